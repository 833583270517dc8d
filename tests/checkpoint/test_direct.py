"""When a checkpoint is written past the page cache."""

from __future__ import annotations

from pathlib import Path

from kvctl.checkpoint.direct import write_options
from tests.kv.world import file_stores, mem_stores


def test_options_say_direct_only_where_all_members_are_files_and_nobody_else_said_it(tmp_path: Path) -> None:
    files, memory = file_stores(tmp_path, 2), mem_stores(1)
    assert write_options(files, "auto", {"threads": "2"}) == ({"threads": "2", "direct": "true"}, "")
    assert write_options(files, "file", {"direct": "false"}) == ({"direct": "false"}, "")
    assert write_options(files, "store-get", {}) == ({}, "")
    assert write_options([*files, *memory], "auto", {}) == ({}, "")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
