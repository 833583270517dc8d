"""Runs over plain safetensors files: one file or a Hugging Face folder, in any store, without conversion."""

from __future__ import annotations

from kvctl.core.addresses import parse_store
from kvctl.core.context import Context
from kvctl.transfer.lanes import Member, open_member
from kvctl.transfer.tasks import Place
from kvctl.weights.planning import RUN, LoadedTensor, LoadPlan, Opened, fingerprint_of
from kvctl.weights.request import LoadRequest
from kvctl.weights.runs import Run, interleave
from kvctl.weights.sources import SourceFile, WeightSource, open_source, split_source
from kvctl.weights.targets import OutputFile

NO_DIGESTS = "the source has no digests (`kvctl models digest` makes them, --require-digests uses them)"


class PlainModel(Opened):
    """Full loads mirror each file: its data section lands as it is, so every run is in place."""

    def __init__(self, request: LoadRequest, ctx: Context) -> None:
        self.request = request
        config, prefix = split_source(parse_store(request.address))
        member = open_member(config.url, 0, config, ctx)
        self.members: tuple[Member, ...] = (member,)
        try:
            self.source: WeightSource = open_source(member.store, prefix, ctx)
        except BaseException:
            member.store.close()
            raise

    def close(self) -> None:
        for member in self.members:
            member.store.close()

    def plan(self) -> LoadPlan:
        source = self.source
        outputs = tuple(
            OutputFile(file.name, file.header.raw, file.header.data_size, file.header.header_size)
            for file in source.files
        )
        tensors = tuple(
            LoadedTensor(tensor.name, tensor.dtype, tensor.shape, number, tensor.start, tensor.end)
            for number, tensor in source.tensors()
        )
        runs = interleave([_whole(number, file) for number, file in enumerate(source.files)])
        side = {item.name: source.read_sidecar(item) for item in source.sidecars} if self._keeps_files else {}
        if source.index_name and source.index_data is not None and self._keeps_files:
            side[source.index_name] = source.index_data
        return LoadPlan(
            source=self.request.address,
            outputs=outputs,
            tensors=tensors,
            runs=tuple(runs),
            members=(self.members[0].name,),
            objects=len(source.files),
            fingerprint=fingerprint_of([[file.name, file.size, file.version] for file in source.files]),
            side_files=side,
            metadata_bytes=source.metadata_bytes,
            metadata_requests=source.requests,
            unverified_because=NO_DIGESTS,
            notes=tuple(f"ignored {item.name}: {item.reason}" for item in source.ignored),
        )

    @property
    def _keeps_files(self) -> bool:
        return self.request.into.partition(":")[0] in {"dir", "shm"}


def _whole(number: int, file: SourceFile) -> list[Run]:
    """The data section of one file in runs; an empty one takes no request."""
    place = Place(0, file.key, file.version)
    start, size = file.header.header_size, file.header.data_size
    return [
        Run((place,), file.size, start + at, min(RUN, size - at), min(RUN, size - at), output=number, dest=at)
        for at in range(0, size, RUN)
    ]
