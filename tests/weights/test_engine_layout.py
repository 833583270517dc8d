"""Layouts of engines: what the header says comes back, what differs is named, nobody takes them for a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvctl.core.context import Context
from kvctl.core.errors import FormatError, IncompatibleError
from kvctl.weights.engine_layout import FILE, LAYOUT, EngineLayout, Laid, laid_out_for
from kvctl.weights.load import plan_load
from kvctl.weights.request import LoadRequest
from kvctl.weights.safetensors import Header, parse_header

KEY = {"engine": "vLLM", "release": "1", "model": "LlamaForCausalLM", "dtype": "torch.float32"}
LAYOUTS = EngineLayout(
    KEY,
    "lab:m@1",
    "abc",
    "d1",
    ("q", "k", "v"),
    (
        Laid("qkv", "F32", (6, 4), "param", (0, 1)),
        Laid("turned", "BF16", (3, 5), "param", (1, 0)),
        Laid("none", "BF16", (0, 5), "buffer", (0, 1)),
        Laid("scale", "F8_E4M3", (), "buffer", ()),
    ),
    {"lm_head": "qkv"},
    {"own": True},
)


def header_of(layout: EngineLayout) -> Header:
    raw = layout.header()
    return parse_header(raw, len(raw) + sum(item.nbytes for item in layout.tensors), "here")


def parsed(header: Header) -> EngineLayout:
    return EngineLayout.parse(header.metadata, [(t.name, t.dtype, t.shape) for t in header.tensors], "here")


def test_what_is_written_comes_back() -> None:
    header = header_of(LAYOUTS)
    found = parsed(header)
    assert {item.name: item for item in found.tensors} == {item.name: item for item in LAYOUTS.tensors}
    assert found.header() == LAYOUTS.header()
    assert (found.key, found.source, found.digest, found.names) == (KEY, "lab:m@1", "d1", ("q", "k", "v"))
    assert (found.aliases, found.attrs) == ({"lm_head": "qkv"}, {"own": True})
    assert header.by_name()["turned"].shape == (5, 3)  # as its bytes are
    assert header.header_size % 64 == 0
    assert laid_out_for(header.metadata) == "vLLM 1, LlamaForCausalLM"


def test_the_first_difference_is_named() -> None:
    assert LAYOUTS.differs(KEY) == ""
    assert LAYOUTS.differs({**KEY, "dtype": "torch.bfloat16"}) == (
        "dtype is 'torch.float32' there, 'torch.bfloat16' here"
    )
    assert LAYOUTS.differs({**KEY, "more": 1}) == "more is None there, 1 here"


@pytest.mark.parametrize(
    "damage",
    [
        lambda about: about.pop("tensors"),
        lambda about: about["tensors"].pop("qkv"),
        lambda about: about["tensors"].update(qkv=["param", [0]]),
        lambda about: about["tensors"].update(qkv=["param", [0, 7]]),
        lambda about: about.update(schema="kvctl.engine-layout/9"),
        lambda about: about.update(names=None),
    ],
)
def test_a_damaged_one_is_one_error(damage: object) -> None:
    header = header_of(LAYOUTS)
    about = json.loads(header.metadata[LAYOUT])
    assert callable(damage)
    damage(about)
    with pytest.raises(FormatError):
        EngineLayout.parse({LAYOUT: json.dumps(about)}, [(t.name, t.dtype, t.shape) for t in header.tensors], "here")
    with pytest.raises(FormatError):
        EngineLayout.parse({}, [], "here")


def test_it_is_no_checkpoint(tmp_path: Path) -> None:
    raw = LAYOUTS.header()
    (tmp_path / FILE).write_bytes(raw + bytes(sum(item.nbytes for item in LAYOUTS.tensors)))
    with pytest.raises(IncompatibleError, match="laid out for an engine"):
        plan_load(LoadRequest(str(tmp_path)), Context())
