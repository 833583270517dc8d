"""Asked to, a push writes to files past the page cache, from where the KV lies, and the session is what it was."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvctl.core.context import Context
from kvctl.kv.identity import Group
from kvctl.kv.pull import PullSession, pull_session
from kvctl.kv.push import PushSession, push_session
from kvctl.kv.seams import LayerKv, MemorySink, MemorySource
from kvctl.memory.buffers import PAGE, HostBuffer
from kvctl.repo.check import Share, check
from kvctl.repo.repo import Repo
from tests.kv.world import descriptor, file_stores, make_repo, some_tokens, source

GROUP = Group("full", (0, 1), 4, 128, 128)
TOKENS = 1_500  # the last pack ends inside a block, so that its fragments are no pages
BYTES = TOKENS * 4096


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A folder whose files can be out of memory."""
    page = HostBuffer(PAGE)
    try:
        fd = os.open(tmp_path / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        try:
            os.write(fd, page.view)
        finally:
            os.close(fd)
        known = in_memory(tmp_path / "probe")
    except OSError as problem:
        pytest.skip(f"{tmp_path} takes no O_DIRECT ({problem.strerror}): run with --basetemp on a disk")
    if known:
        pytest.skip(f"{tmp_path} keeps all files in memory: run with --basetemp on a disk")
    return tmp_path


def in_memory(path: Path) -> bool:
    """Whether the page cache has the file's first page."""
    with open(path, "rb", buffering=0) as file:
        try:
            return os.preadv(file.fileno(), [bytearray(PAGE)], 0, os.RWF_NOWAIT) > 0
        except BlockingIOError:
            return False


def moved_to(known: MemorySource, place: int) -> MemorySource:
    """The same KV, each part so many bytes behind the beginning of a page."""

    def moved(view: memoryview) -> memoryview:
        found = HostBuffer(place + len(view)).view[place:]
        found[:] = view
        return found

    layers = {(0, layer): known.layer(0, layer) for layer in GROUP.layers}
    return MemorySource(
        known.descriptor, known.tokens, {key: LayerKv(moved(kv.k), moved(kv.v)) for key, kv in layers.items()}
    )


@pytest.mark.parametrize("place", [0, 64])
def test_a_session_is_written_past_the_page_cache(disk: Path, ctx: Context, place: int) -> None:
    tokens = some_tokens(TOKENS)
    kv = moved_to(source(descriptor(GROUP), tokens), place)
    repo = make_repo(file_stores(disk), ctx)
    past = {"direct": "true"}
    report = push_session(PushSession(repo, "alice/chat", kv, pack_bytes=2 << 20, transport_options=past), ctx)
    assert (report.bytes, report.notes) == (BYTES + 4 * 4096, [])  # the last block is stored whole
    chunks = [path for path in disk.rglob("chunks/*/*") if path.is_file()]
    assert len(chunks) == report.extra["packs_written"] == 3
    assert [in_memory(path) for path in chunks] == [False] * 3
    with Repo.open(repo, ctx) as opened:
        assert not check(opened, read_data=Share()).damaged
    sink = MemorySink()
    pull_session(PullSession(repo, "alice/chat", sink), ctx)
    for layer in GROUP.layers:
        assert sink.layers[0, layer] == kv.layer(0, layer)
    sink.close()
