"""`kvctl checkpoint` as it is typed: what is refused, what is shown."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvctl.agent.load import load_slot
from kvctl.core.context import Context
from kvctl.testing.models import write_llama
from kvctl.weights.request import LoadRequest
from tests.agent.agents import AgentProcess, kvctl


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("create", "--from", "./folder", "--to", "./ck"), 2, "is no live source"),
        (("create", "--from", "slot:m", "--to", "lab:m"), 2, "is no path and no URL"),
        (("create", "--from", "slot:m", "--to", "./ck", "--latency-budget", "1ms"), 2, "without --latency-from"),
        (("create", "--from", "slot:m", "--to", "./ck", "--max-rate", "1KB"), 2, "is below --min-rate"),
        (("create", "--from", "slot:m", "--to", "./ck", "--max-rate", "0", "--min-rate", "0"), 2, "moves nothing"),
        (("create", "--from", "slot:m", "--to", "lab:m", "--format", "repo", "--keep-last", "2"), 2, "no --keep-last"),
        (("create", "--from", "slot:m", "--to", "./ck"), 10, "no agent is running"),
        (("ls", "./none"), 0, ""),
        (("verify", "./none"), 4, "has no checkpoint"),
        (("restore", "./none", "--into", "none"), 2, "nothing would be kept"),
        (("rm", "./none", "-y"), 2, "names no checkpoint"),
        (("rm", "./none@20260101T000000Z-abcdef", "-y"), 4, "has no checkpoint"),
        (("rm", "./none@20260101T000000Z-abcdef"), 2, "add -y"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value)[:12],
)
def test_what_cannot_be_done_is_refused_in_words(
    arguments: tuple[str, ...], code: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    got, document, _ = kvctl("checkpoint", *arguments, socket=str(tmp_path / "none.sock"), state=tmp_path)
    assert got == code
    if code:
        assert words in f"{document['what']} {document['hint']}"
    else:
        assert document["checkpoints"] == []


def test_people_see_ids_sizes_and_the_pace(agent: AgentProcess, tmp_path: Path) -> None:
    write_llama(str(tmp_path / "m"))
    load_slot(LoadRequest(str(tmp_path / "m"), into="slot:m"), Context(), socket=agent.socket)
    environment = {**os.environ, "KVCTL_AGENT_SOCKET": agent.socket, "KVCTL_STATE_DIR": str(tmp_path)}

    def said(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "kvctl", *arguments], capture_output=True, text=True, env=environment, check=True
        )
        return done.stdout

    place = str(tmp_path / "ck")
    created = said("checkpoint", "create", "--from", "slot:m", "--to", place)
    assert "by rate alone" in created
    assert "source CPU" in created or "source cpu" in created
    ident = (tmp_path / "ck" / "LATEST").read_text().strip()
    assert ident in created
    assert ident in said("checkpoint", "ls", place)
    assert f"{ident} -> none" in said("checkpoint", "verify", place)
    assert "checkpoint" in said("checkpoint", "restore", place, "--into", f"dir:{tmp_path}/back")
    assert ident in said("checkpoint", "rm", f"{place}@{ident}", "--force", "-y")
    shown = said("agent", "ls")
    assert "ready" in shown
    assert "budget" in shown


def test_an_agents_commands_name_what_is_not_there(agent: AgentProcess, tmp_path: Path) -> None:
    for arguments in (("agent", "unload", "x"), ("agent", "ls", "x"), ("load-weights", "slot:x")):
        code, error, _ = kvctl(*arguments, socket=agent.socket, state=tmp_path)
        assert (code, error["code"]) == (4, "not_found")
        assert "no slot is called x" in error["what"]
    code, error, _ = kvctl("load-weights", "./m", "--evict", socket=agent.socket, state=tmp_path)
    assert (code, error["code"]) == (2, "usage")
