"""The agent's socket: what is there already and is not a dead agent's stays as it is."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from kvctl.agent.client import AgentClient
from kvctl.agent.server import Agent, ControlServer
from kvctl.agent.settings import AgentSettings
from kvctl.core.errors import EnvError
from kvctl.testing.models import write_llama
from tests.agent.agents import kvctl
from tests.agent.conftest import Start


def server(path: Path) -> ControlServer:
    return ControlServer(Agent(AgentSettings(str(path), 1 << 20)), note=lambda _: None)


def test_a_file_where_the_socket_should_be_is_not_removed(place: Path) -> None:
    path = place / "precious"
    path.write_text("mine")
    code, error, _ = kvctl("agent", "serve", "--socket", str(path), socket="", state=place)
    assert (code, error["code"]) == (10, "environment")
    assert "is no socket" in error["what"]
    assert path.read_text() == "mine"
    folder = place / "folder"
    folder.mkdir()
    with pytest.raises(EnvError, match="is no socket"):
        server(folder).start()


def test_a_link_to_a_dead_socket_and_one_to_a_file_are_not_followed(place: Path) -> None:
    path, link = place / "precious", place / "a.sock"
    path.write_text("mine")
    link.symlink_to(path)
    with pytest.raises(EnvError, match="is no socket"):
        server(link).start()
    assert link.is_symlink()


def test_the_socket_of_a_dead_agent_is_replaced_and_the_own_one_removed(place: Path) -> None:
    path = place / "a.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))
    running = server(path)
    running.start()
    try:
        with AgentClient(str(path)) as client:
            assert client.agent_pid == os.getpid()
    finally:
        running.close()
    assert not path.exists()


def test_an_agent_that_ends_leaves_the_socket_of_its_successor(place: Path) -> None:
    path = place / "a.sock"
    first, second = server(path), server(path)
    first.start()
    path.unlink()  # somebody tidied up
    second.start()
    try:
        first.close()
        AgentClient(str(path)).close()
    finally:
        second.close()


@pytest.mark.parametrize("name", ["x" * 120, "x" * 300])
def test_a_path_that_no_socket_can_have_is_said(place: Path, name: str) -> None:
    with pytest.raises(EnvError, match="cannot be made"):
        server(place / name).start()
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--allow-unauthenticated", "127.0.0.0/8"), "--allow-unauthenticated without --peers"),
        (("--tls-cert", "c.pem"), "--tls-cert without --peers"),
        (("--rdma-allow", "10.0.0.0/8"), "--rdma-allow without --peers"),
        (("--peers", "0", "--allow-unauthenticated", "127.0.0.0/8"), "is not HOST:PORT"),
    ],
)
def test_what_would_have_no_effect_is_refused(place: Path, arguments: tuple[str, ...], words: str) -> None:
    code, error, _ = kvctl("agent", "serve", *arguments, "--socket", str(place / "a.sock"), socket="", state=place)
    assert (code, words in error["what"]) == (2, True)
    assert list(place.iterdir()) == []


def test_an_agent_may_have_no_memory(start: Start, tmp_path: Path) -> None:
    agent = start(memory="0")
    write_llama(str(tmp_path / "m"))
    code, error, _ = kvctl("load-weights", str(tmp_path / "m"), "--into", "slot:m", socket=agent.socket, state=tmp_path)
    assert (code, error["code"]) == (9, "capacity")
