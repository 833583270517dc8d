"""Finding plug-ins and choosing transports; a broken plug-in breaks nothing but itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvctl.core.addresses import StoreConfig
from kvctl.core.errors import EnvError, UsageError
from kvctl.transports import registry

_SPECS = """
from kvctl.transports.registry import Probe, StoreSpec, TransportSpec
GOOD = TransportSpec("goodway", "works", "plug_good:make", schemes=("mem",), rank=50, probe="plug_good:probe")
SHY = TransportSpec("shyway", "has no driver", "plug_good:make", schemes=("mem",), rank=60, probe="plug_good:shy")
CRASHING = TransportSpec("crashway", "crashes", "plug_good:make", schemes=("mem",), rank=70, probe="plug_good:crash")
MISNAMED = StoreSpec("other", "calls itself otherwise", "plug_good:make")
NO_SPEC = 7
def make(*arguments): raise AssertionError
def probe(): return Probe(True)
def shy(): return Probe(False, "no driver", "install the driver")
def crash(): raise RuntimeError("boom")
"""
_PICKY = """
from kvctl.core.errors import MemberDownError
from kvctl.transports.registry import TransportSpec
PICKY = TransportSpec("pickyway", "asks", "plug_good:make", schemes=("mem",), rank=55, serves="plug_picky:serves")
def serves(config, store):
    if config.url == "mem://down":
        raise MemberDownError("no answer")
    return f"no RDMA in {config.url}" if config.url == "mem://cannot" else ""
"""
_ENTRY_POINTS = """
[kvctl.stores]
misnamed = plug_good:MISNAMED
nospec = plug_good:NO_SPEC
mem2 = plug_missing:STORE

[kvctl.transports]
goodway = plug_good:GOOD
shyway = plug_good:SHY
crashway = plug_good:CRASHING
brokenway = plug_broken:TRANSPORT
"""


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A real distribution on sys.path whose plug-ins are good, unavailable and broken in several ways."""
    info = tmp_path / "plug-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plug\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(_ENTRY_POINTS)
    (tmp_path / "plug_good.py").write_text(_SPECS)
    (tmp_path / "plug_broken.py").write_text("raise OSError('libmissing.so.1: cannot open shared object file')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry.clear_cache()
    yield
    registry.clear_cache()


def test_first_party_plugins_are_found_and_whole() -> None:
    assert {"file", "mem", "s3"} <= set(registry.store_specs())
    assert {"file", "mem", "s3", "store-get"} <= set(registry.transport_specs())
    assert registry.broken_plugins() == ()


def test_broken_plugins_are_listed_with_their_reasons_and_break_nothing_else(plugins: None) -> None:
    broken = {item.name: item.reason for item in registry.broken_plugins()}
    assert set(broken) == {"misnamed", "nospec", "mem2", "brokenway"}
    assert "calls itself 'other'" in broken["misnamed"]
    assert "not a StoreSpec" in broken["nospec"]
    assert "plug_missing" in broken["mem2"]
    assert "libmissing.so.1" in broken["brokenway"]
    registry.open_store(StoreConfig("mem://registry")).put("k", b"works")
    assert registry.choose("file", "host").spec.name == "file"


def test_only_using_a_broken_plugin_is_an_error(plugins: None) -> None:
    with pytest.raises(EnvError, match=r"mem2://.*plug_missing"):
        registry.open_store(StoreConfig("mem2://x"))
    with pytest.raises(EnvError, match=r"brokenway is broken.*libmissing"):
        registry.choose("mem", "host", "brokenway")


def test_auto_takes_the_highest_rank_and_says_why_others_were_passed_over(plugins: None) -> None:
    choice = registry.choose("mem", "host")
    assert choice.spec.name == "goodway"
    passed = dict(choice.passed_over)
    assert passed["shyway"] == "no driver"
    assert "boom" in passed["crashway"]
    assert "libmissing" in passed["brokenway"]


@pytest.mark.parametrize(
    ("urls", "chosen", "why"),
    [
        (["mem://can", "mem://can2"], "pickyway", ""),
        (["mem://can", "mem://cannot"], "goodway", "no RDMA in mem://cannot"),
        (["mem://can", "mem://down"], "pickyway", ""),
        ([], "pickyway", ""),
    ],
)
def test_auto_asks_the_servers_that_a_transport_depends_on(
    plugins: None, tmp_path: Path, urls: list[str], chosen: str, why: str
) -> None:
    info = tmp_path / "picky-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: picky\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kvctl.transports]\npickyway = plug_picky:PICKY\n")
    (tmp_path / "plug_picky.py").write_text(_PICKY)
    registry.clear_cache()
    stores = [(StoreConfig(url), registry.open_store(StoreConfig(url))) for url in urls]
    choice = registry.choose("mem", "host", stores=stores)
    assert choice.spec.name == chosen
    assert dict(choice.passed_over).get("pickyway", "") == why
    assert registry.choose("mem", "host", "pickyway", stores=stores).spec.name == "pickyway", "asked for by name"


def test_a_transport_asked_for_never_falls_back(plugins: None) -> None:
    with pytest.raises(EnvError, match="no driver") as caught:
        registry.choose("mem", "host", "shyway")
    assert caught.value.hint == "install the driver"
    with pytest.raises(UsageError, match="serves mem, not s3"):
        registry.choose("s3", "host", "goodway")
    with pytest.raises(UsageError, match="not cuda"):
        registry.choose("s3", "cuda", "s3")


def test_two_plugins_for_one_name_are_used_neither_way(tmp_path: Path, plugins: None) -> None:
    info = tmp_path / "twin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: twin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kvctl.transports]\ngoodway = plug_good:GOOD\n")
    registry.clear_cache()
    assert "goodway" not in registry.transport_specs()
    with pytest.raises(EnvError, match="two plug-ins"):
        registry.choose("mem", "host", "goodway")


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(UsageError) as caught:
        registry.open_store(StoreConfig("gopher://x"))
    assert "s3://" in (caught.value.hint or "")
    with pytest.raises(UsageError) as caught:
        registry.choose("mem", "host", "warp")
    assert "store-get" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("file", {"threads": "many"}),
        ("file", {"threads": "0"}),
        ("file", {"direct": "maybe"}),
        ("file", {"colour": "red"}),
        ("s3", {"threads": "-1"}),
        ("s3", {"payload": "maybe"}),
        ("s3", {"colour": "red"}),
        ("mem", {"colour": "red"}),
    ],
)
def test_options_that_mean_nothing_are_refused(scheme: str, options: dict[str, str], tmp_path: Path) -> None:
    url = {"file": f"file://{tmp_path}", "mem": "mem://options", "s3": "s3://bucket"}[scheme]
    config = StoreConfig(url, ("http://127.0.0.1:1",) if scheme == "s3" else ())
    store = registry.open_store(config)
    with pytest.raises(UsageError):
        registry.open_transports(config, store, registry.choose(scheme, "host"), options)
    store.close()
