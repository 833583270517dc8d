"""The KV bundle that the demo ships is what its maker says."""

from __future__ import annotations

from importlib.resources import as_file, files

from kvctl.cli.demo import KV_BUNDLE
from kvctl.kv.bundle import read_bundle
from kvctl.kv.geometry import bytes_per_token


def test_the_shipped_bundle_is_all_layers_of_smollm2_and_small() -> None:
    with as_file(files("kvctl.cli").joinpath("data", KV_BUNDLE)) as path:
        assert path.stat().st_size < 1_000_000
        with read_bundle(str(path)) as bundle:
            meaning = bundle.descriptor
            assert (bundle.tokens, meaning.layers, meaning.dtype) == (32, 30, "BF16")
            assert bytes_per_token(meaning.groups, meaning.dtype) == 23_040
            assert bundle.token_ids is not None
            assert bundle.producer["made by"] == "scripts/make_demo_bundle.py"
