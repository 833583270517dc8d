"""Plans: every wanted byte lands once at its place, from files and from chunks, whole and sliced; counts are exact."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvctl.testing.models import LlamaShape, Spec, file_bytes, folder_files, tensor_bytes
from kvctl.transfer.tasks import Place
from kvctl.weights.cut import cut_file, gather
from kvctl.weights.dtypes import DTYPES
from kvctl.weights.layout import Layout, layout_files, layout_rank
from kvctl.weights.plan import SourceObject, merge_wants, misaligned_bytes, over_fetch, plan_runs, spread
from kvctl.weights.runs import Run, scatter
from kvctl.weights.safetensors import Header, parse_header
from kvctl.weights.slicing import Heads, slice_model
from kvctl.weights.strided import Strided, span

KIB = 1024
LLAMA = LlamaShape(layers=2, hidden=256, heads=16, kv_heads=8, head_dim=16, inner=768, vocab=1024)


class Source:
    """Objects with their bytes: plain files, or the chunks of those files spread over three members."""

    def __init__(self, files: Sequence[bytes], stripe: int | None = None, heads: Heads | None = None) -> None:
        self.headers: list[Header] = []
        self.objects: list[SourceObject] = []
        self.bytes: dict[str, memoryview] = {}
        for number, data in enumerate(files):
            header = parse_header(data, len(data), str(number))
            self.headers.append(header)
            section = memoryview(data)[header.header_size :]
            if stripe is None:
                self.add(number, memoryview(data), ((header.header_size, span(0, header.data_size)),), 0)
                continue
            for cut in cut_file(header, stripe, heads=heads):
                chunk = bytearray(cut.size)
                gather(cut, section, memoryview(chunk))
                self.add(number, memoryview(chunk), tuple(cut.held()), len(self.objects) % 3, table=True)

    def add(
        self, file: int, data: memoryview, held: tuple[tuple[int, Strided], ...], member: int, *, table: bool = False
    ) -> None:
        key = f"o{len(self.objects)}"
        self.bytes[key] = data
        parts = tuple((at, part) for at, part in held if len(data))
        self.objects.append(
            SourceObject(file, (Place(member, key),), len(data), parts, memoryview(b"") if table else None, key)
        )

    def files(self) -> list[tuple[str, Header]]:
        return [(f"f{number}", header) for number, header in enumerate(self.headers)]

    def load(self, runs: Sequence[Run], layout: Layout) -> list[bytearray]:
        """What a loader does with the runs; asserts that no byte lands twice."""
        images = [bytearray(output.data_size) for output in layout.outputs]
        marks = [np.zeros(output.data_size, np.uint8) for output in layout.outputs]
        for run in runs:
            data = self.bytes[run.places[0].key]
            assert 0 <= run.offset < run.offset + run.length <= len(data) == run.object_size
            assert 0 < run.needed <= run.length
            part = data[run.offset : run.offset + run.length]
            if run.dest is not None:
                images[run.output][run.dest : run.dest + run.length] = part
                marks[run.output][run.dest : run.dest + run.length] += 1
                continue
            scatter(part, run.pieces, [memoryview(image) for image in images])
            for piece in run.pieces:
                for row in range(piece.rows):
                    at = piece.dest + row * piece.dest_stride
                    marks[piece.output][at : at + piece.row_bytes] += 1
        for mark in marks:
            assert (mark == 1).all()
        return images


def rank_layouts(source: Source, ranks: Sequence[int], size: int, config: dict[str, object]) -> Layout:
    layouts = []
    for output, rank in enumerate(ranks):
        tensors = [tensor for header in source.headers for tensor in header.tensors]
        layouts.append(layout_rank(source.headers, slice_model(tensors, rank, size, config=config), output=output))
    return Layout(
        tuple(output for layout in layouts for output in layout.outputs),
        tuple(tensor for layout in layouts for tensor in layout.tensors),
        tuple(want for layout in layouts for want in layout.wants),
    )


def llama_files(shards: int = 2) -> list[bytes]:
    files = folder_files(LLAMA.tensors(), shards=shards)
    return [data for name, data in files.items() if name.endswith(".safetensors")]


def slices_of(rank: int, size: int) -> dict[str, bytes]:
    """What numpy gives for each tensor."""
    found = {}
    for spec in LLAMA.tensors():
        name, _, shape = spec
        array = np.frombuffer(tensor_bytes(spec), np.int16).reshape(shape)
        if "norm" in name:
            part = array
        elif ".o_proj" in name or ".down_proj" in name:
            part = array[:, rank * shape[1] // size : (rank + 1) * shape[1] // size]
        else:
            part = array[rank * shape[0] // size : (rank + 1) * shape[0] // size]
        found[name] = part.tobytes()
    return found


def test_a_whole_plain_load_is_in_place_and_exact() -> None:
    files = llama_files()
    source = Source(files)
    layout = layout_files(source.files(), congruent=True)
    runs = plan_runs(source.objects, layout.wants, max_run=256 * KIB)
    images = source.load(runs, layout)
    for header, image, data in zip(source.headers, images, files, strict=True):
        assert image == data[header.header_size :]
    assert all(run.dest is not None for run in runs)
    assert over_fetch(runs) == 1.0
    assert {run.places[0].key for run in runs[:2]} == {"o0", "o1"}  # both files from the first requests on
    assert [output.congruent_to for output in layout.outputs] == [header.header_size for header in source.headers]
    assert misaligned_bytes(runs, [output.congruent_to for output in layout.outputs]) == 0
    assert misaligned_bytes(runs, [header.header_size + 8 for header in source.headers]) == sum(
        run.length for run in runs
    )
    assert all(run.offset % 4096 == 0 for run in runs if run.offset > run.object_size // 2)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_ranks_of_a_plain_source_get_their_slices(size: int) -> None:
    source = Source(llama_files())
    for rank in range(size):
        layout = rank_layouts(source, [rank], size, LLAMA.config())
        runs = plan_runs(source.objects, layout.wants)
        image = source.load(runs, layout)[0]
        expected = slices_of(rank, size)
        assert {t.name: bytes(image[t.start : t.end]) for t in layout.tensors} == expected
        assert sum(run.needed for run in runs) == sum(map(len, expected.values()))
        # Column-parallel and replicated tensors are exact: what is read beyond is the gaps of row-parallel ones.
        strided = sum(
            t.nbytes for h in source.headers for t in h.tensors if ".o_proj" in t.name or ".down_proj" in t.name
        )
        assert sum(run.length for run in runs) <= sum(map(len, expected.values())) + strided * (size - 1) // size
        header = (
            parse_header(layout.outputs[0].header, len(layout.outputs[0].header) + len(image), "rank")
            if image
            else None
        )
        assert header is not None
        assert {t.name: t.shape for t in header.tensors} == {t.name: t.shape for t in layout.tensors}


def test_all_ranks_of_a_host_share_strided_reads() -> None:
    source = Source(llama_files())
    layout = rank_layouts(source, range(4), 4, LLAMA.config())
    runs = plan_runs(source.objects, layout.wants)
    images = source.load(runs, layout)
    for rank, image in enumerate(images):
        expected = slices_of(rank, 4)
        mine = [tensor for tensor in layout.tensors if tensor.output == rank]
        assert {t.name: bytes(image[t.start : t.end]) for t in mine} == expected
    total = sum(header.data_size for header in source.headers)
    assert sum(run.length for run in runs) == total  # every byte of the model once, for all four ranks
    assert over_fetch(runs) == 1.0


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_ranks_of_a_repo_read_exactly_their_slices(size: int) -> None:
    source = Source(llama_files(), stripe=64 * KIB, heads=Heads.of(LLAMA.config()))
    leaf = 4 * KIB
    total = 0
    for rank in range(size):
        layout = rank_layouts(source, [rank], size, LLAMA.config())
        runs = plan_runs(source.objects, layout.wants, leaf=leaf)
        image = source.load(runs, layout)[0]
        assert {t.name: bytes(image[t.start : t.end]) for t in layout.tensors} == slices_of(rank, size)
        for run in runs:
            assert run.offset % leaf == 0
            assert (run.offset + run.length) % leaf == 0 or run.offset + run.length == run.object_size
            assert run.leaves is not None
            assert run.leaves.start == run.offset
            assert bool(run.leaves.digest) == (run.length == run.object_size)
        total += sum(run.length for run in runs)
    norms = sum(t.nbytes for h in source.headers for t in h.tensors if len(t.shape) == 1)
    assert total == sum(header.data_size for header in source.headers) + (size - 1) * norms


def test_a_whole_load_of_a_repo_rebuilds_the_files_with_one_request_a_chunk() -> None:
    files = llama_files()
    source = Source(files, stripe=64 * KIB, heads=Heads.of(LLAMA.config()))
    layout = layout_files(source.files(), congruent=False)
    runs = plan_runs(source.objects, layout.wants, leaf=4 * KIB)
    for header, image, data in zip(source.headers, source.load(runs, layout), files, strict=True):
        assert image == data[header.header_size :]
    assert len(runs) == len(source.objects)
    assert {run.places[0].member for run in runs[:3]} == {0, 1, 2}
    counts = spread(runs)
    assert sum(nbytes for nbytes, _ in counts.values()) == sum(header.data_size for header in source.headers)
    assert sum(requests for _, requests in counts.values()) == len(runs)


def test_zero_size_tensors_take_no_request() -> None:
    source = Source([file_bytes([("none", "F32", (0, 4)), ("also", "U8", (0,))])])
    layout = layout_files(source.files(), congruent=True)
    assert plan_runs(source.objects, layout.wants) == []
    sliced = rank_layouts(source, [0], 2, {})
    assert plan_runs(source.objects, sliced.wants) == []
    assert [tensor.shape for tensor in sliced.tensors] == [(0, 4), (0,)]


def test_rows_far_apart_are_read_one_by_one() -> None:
    wide = 2 << 20
    source = Source([file_bytes([("m.down_proj.weight", "U8", (3, 2 * wide))])])
    layout = rank_layouts(source, [1], 2, {})
    runs = plan_runs(source.objects, layout.wants, max_run=16 << 20)
    assert [run.length for run in runs] == [wide] * 3
    assert over_fetch(runs) == 1.0
    source.load(runs, layout)


MODULES = st.sampled_from(["q_proj", "o_proj", "down_proj", "lm_head", "norm", "odd", "gate_up_proj"])
TENSOR = st.tuples(
    st.integers(0, 3),
    MODULES,
    st.sampled_from(["U8", "BF16", "F64"]),
    st.lists(st.sampled_from([0, 1, 4, 8, 16, 32]), min_size=1, max_size=2),
).map(lambda t: (f"layers.{t[0]}.{t[1]}.weight", t[2], tuple(t[3])))
FILES = st.lists(TENSOR, min_size=1, max_size=9, unique_by=lambda tensor: tensor[0])


@settings(max_examples=80)
@given(
    FILES,
    st.integers(1, 3),
    st.sampled_from([None, 64, 500, 4096]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 16, 256]),
    st.sampled_from([33, 500, 5000, 1 << 20]),
    st.booleans(),
)
def test_any_model_members_stripe_and_slice_land_right(
    tensors: list[Spec], shards: int, stripe: int | None, size: int, leaf: int, max_run: int, together: bool
) -> None:
    parts = [tensors[number::shards] for number in range(shards)]
    source = Source([file_bytes(part) for part in parts], stripe)
    leaf = leaf if stripe is not None else 1
    divides = all(
        dim % (2 * size if "gate_up" in name else size) == 0
        for name, _, shape in tensors
        for dim in shape
        if "norm" not in name and "odd" not in name
    )
    if size == 1:
        layout = layout_files(source.files(), congruent=stripe is None)
        runs = plan_runs(source.objects, layout.wants, max_run=max_run, leaf=leaf)
        for image, part in zip(source.load(runs, layout), parts, strict=True):
            assert image == b"".join(map(tensor_bytes, part))
        assert sum(run.needed for run in runs) == sum(len(tensor_bytes(tensor)) for tensor in tensors)
        return
    if not divides:
        return
    groups = [list(range(size))] if together else [[rank] for rank in range(size)]
    for group in groups:
        layout = rank_layouts(source, group, size, {})
        runs = plan_runs(source.objects, layout.wants, max_run=max_run, leaf=leaf)
        images = source.load(runs, layout)
        merged = merge_wants(layout.wants)
        assert sum(want.part.nbytes for want in merged) == sum(output.data_size for output in layout.outputs)
        for tensor in layout.tensors:
            spec = next(item for item in tensors if item[0] == tensor.name)
            array = np.frombuffer(tensor_bytes(spec), np.uint8).reshape(*spec[2], DTYPES[spec[1]].bits // 8)
            piece = slice_model([t for h in source.headers for t in h.tensors], group[tensor.output], size).slices[
                spec[0]
            ]
            if piece.dim is not None and "gate_up" in spec[0]:
                half, step = spec[2][0] // 2, spec[2][0] // 2 // size
                at = group[tensor.output] * step
                array = np.concatenate([array[at : at + step], array[half + at : half + at + step]])
            elif piece.dim is not None:
                array = array.take(range(piece.start, piece.stop), axis=piece.dim)
            assert bytes(images[tensor.output][tensor.start : tensor.end]) == array.tobytes()
