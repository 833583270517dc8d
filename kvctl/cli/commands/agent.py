"""`kvctl agent serve|ls|unload`, and `kvctl kv tiers`, which asks the agent too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kvctl.cli.app import current
from kvctl.cli.kv_options import key_option, place
from kvctl.cli.lazy import KvCommand
from kvctl.cli.options import Size, argument, option

if TYPE_CHECKING:
    from kvctl.agent.server import Ready
    from kvctl.agent.settings import KvSettings
    from kvctl.node.settings import NodeSettings

_FILE = click.Path(dir_okay=False)
_FOLDER = click.Path(file_okay=False)
_PEERS = "Peers"
_KV = "KV ahead of a repo"
_socket = option(
    "--socket", type=_FILE, envvar="KVCTL_AGENT_SOCKET", metavar="PATH",
    help="The agent's unix socket [default: in the user's runtime directory].",
)  # fmt: skip


@click.command("serve", cls=KvCommand)
@_socket
@option(
    "--memory", type=Size(), envvar="KVCTL_AGENT_MEMORY", metavar="SIZE",
    help="What all slots may take together of host memory [default: three quarters of what is available].",
)  # fmt: skip
@option(
    "--device-memory", metavar="DEVICE=SIZE", multiple=True, envvar=None,
    help="Slots may be on this GPU too, and take so much of it (cuda:0-7=60GiB: of each); may repeat.",
)  # fmt: skip
@option(
    "--peers", metavar="HOST:PORT", envvar="KVCTL_AGENT_PEERS", section=_PEERS,
    help="Let other hosts read the slots here; port 0 takes a free one. Without it nobody can.",
)  # fmt: skip
@option(
    "--key-file", type=_FILE, envvar="KVCTL_NODE_MASTER_KEY_FILE", section=_PEERS,
    help="Master key(s) that peers' keys are derived from, made by `kvctl node key`.",
)  # fmt: skip
@option(
    "--allow-unauthenticated", "open_to", metavar="CIDR", multiple=True, envvar=None, section=_PEERS,
    help="Serve peers of this network without tokens; may repeat.",
)  # fmt: skip
@option("--tls-cert", type=_FILE, envvar=None, section=_PEERS, help="PEM certificate with its chain: HTTPS only.")
@option("--tls-key", type=_FILE, envvar=None, section=_PEERS, help="Its key, if it is not in the same file.")
@option(
    "--rdma", type=click.Choice(["auto", "off", "require"]), default="auto", show_default=True, envvar=None,
    section=_PEERS, help="Answer peers' RDMA tokens when a plug-in can; require: do not start without.",
)  # fmt: skip
@option(
    "--rdma-allow", metavar="CIDR", multiple=True, envvar=None, section=_PEERS,
    help="Connect back to this network too, not to the HTTP peer's address only; may repeat.",
)  # fmt: skip
@option(
    "--peers-ucx", metavar="HOST:PORT", envvar="KVCTL_AGENT_PEERS_UCX", section=_PEERS,
    help="Let other hosts read the slots' memory by NIXL (UCX), as ucx://HOST:PORT/SLOT.",
)  # fmt: skip
@option(
    "--peers-ucx-key", type=_FILE, envvar="KVCTL_PEER_KEY_FILE", section=_PEERS,
    help="File with a key shared with them; without it only this host is served.",
)  # fmt: skip
@option(
    "--kv-memory", type=Size(), envvar="KVCTL_AGENT_KV_MEMORY", metavar="SIZE", section=_KV,
    help="Keep KV in memory ahead of the repo, out of --memory; gone with the agent.",
)  # fmt: skip
@option(
    "--kv-local", type=_FOLDER, envvar="KVCTL_AGENT_KV_LOCAL", metavar="DIR", section=_KV,
    help="Keep KV on a local disk, behind memory and ahead of the repo; kept when the agent ends.",
)  # fmt: skip
@option(
    "--kv-local-bytes", type=Size(), envvar="KVCTL_AGENT_KV_LOCAL_BYTES", metavar="SIZE", section=_KV,
    help="What that may take; needed with --kv-local.",
)  # fmt: skip
@option(
    "--kv-repo", metavar="REPO", envvar="KVCTL_AGENT_KV_REPO", section=_KV,
    help="The repo behind them [default: that of -r, or the default one].",
)  # fmt: skip
@key_option
def serve(
    *,
    socket: str | None,
    memory: int | None,
    device_memory: tuple[str, ...],
    peers: str | None,
    key_file: str | None,
    open_to: tuple[str, ...],
    tls_cert: str | None,
    tls_key: str | None,
    rdma: str,
    rdma_allow: tuple[str, ...],
    peers_ucx: str | None,
    peers_ucx_key: str | None,
    kv_memory: int | None,
    kv_local: str | None,
    kv_local_bytes: int | None,
    kv_repo: str | None,
    kv_key_file: str | None,
) -> None:
    """Own the memory of weights: slots that engines attach to, and that outlive them.

    Only this user's processes (and root's) can use the socket. SIGTERM or Ctrl-C ends the agent with 0; what is
    attached stays with those who have it mapped. See `kvctl help agent`.
    """
    import os
    from dataclasses import asdict

    from kvctl.agent.server import run_agent
    from kvctl.agent.settings import AgentSettings, OneSided, default_socket, parse_device_memory
    from kvctl.core.errors import UsageError
    from kvctl.memory.budget import memory_available
    from kvctl.node.settings import parse_listen

    app = current()
    given = {
        "--allow-unauthenticated": open_to,
        "--tls-cert": tls_cert,
        "--tls-key": tls_key,
        "--rdma-allow": rdma_allow,
    }
    for name in (name for name, value in given.items() if value and peers is None):
        raise UsageError(f"{name} without --peers", hint="--peers HOST:PORT says where to listen")
    settings = AgentSettings(
        os.path.abspath(os.path.expanduser(socket)) if socket else default_socket(),
        memory_available() * 3 // 4 if memory is None else memory,
        None if peers is None else _peer_settings(peers, key_file, open_to, tls_cert, tls_key, rdma, rdma_allow),
        None if peers_ucx is None else OneSided("nixl-ucx", parse_listen(peers_ucx), peers_ucx_key),
        kv=_kv_settings(kv_memory, kv_local, kv_local_bytes, kv_repo, kv_key_file),
        devices=parse_device_memory(device_memory),
    )

    def ready(found: Ready) -> None:
        if not app.output.human:
            app.output.document("kvctl.agent-ready/1", asdict(found), str)
            return
        from kvctl.core.units import format_size

        sizes = "".join(f", {format_size(nbytes)} of {name}" for name, nbytes in found.devices.items())
        app.output.note(f"agent at {found.socket}, {format_size(found.memory)}{sizes} for slots")
        ways = " and ".join(way for way in (found.peers, found.one_sided) if way)
        app.output.note(f"peers: {ways}" if ways else "peers: none can read here (--peers)")

    ended = run_agent(
        settings, ready=ready, note=app.output.warning, trace=app.output.detail if app.output.verbose else None
    )
    app.output.note(f"stopped with {ended.slots} slots, used by {ended.holders} processes")


def _kv_settings(
    memory: int | None, local: str | None, local_bytes: int | None, repo: str | None, key_file: str | None
) -> KvSettings | None:
    from kvctl.agent.settings import KvSettings
    from kvctl.cli.app import S3Flags
    from kvctl.core.errors import UsageError

    if (local is None) != (local_bytes is None):
        raise UsageError("--kv-local and --kv-local-bytes need each other", hint="say where, and how much it may take")
    if not memory and local is None:
        if repo is not None:
            raise UsageError("--kv-repo without a tier ahead of it", hint="--kv-memory SIZE, --kv-local DIR, or both")
        return None
    found = place(current(), S3Flags(), key_file, repo)
    return KvSettings(found.stores, memory or 0, local, local_bytes or 0, found.key)


def _peer_settings(
    listen: str,
    key_file: str | None,
    open_to: tuple[str, ...],
    tls_cert: str | None,
    tls_key: str | None,
    rdma: str,
    rdma_allow: tuple[str, ...],
) -> NodeSettings:
    from kvctl.cli.commands.node import _master_keys
    from kvctl.node.settings import NodeSettings, parse_listen, parse_networks

    return NodeSettings(
        root="",
        listen=parse_listen(listen),
        keys=() if key_file is None else _master_keys(key_file),
        open_to=parse_networks(open_to),
        tls_cert=tls_cert,
        tls_key=tls_key,
        rdma=rdma,
        rdma_allow=tuple(str(network) for network in parse_networks(rdma_allow)),
    )


@click.command("ls", cls=KvCommand)
@argument("slot", "Only this slot.", required=False, default=None)
@_socket
def ls(*, slot: str | None, socket: str | None) -> None:
    """List the generations of every slot: their state, bytes, source, and who holds leases on them."""
    from kvctl.agent.client import AgentClient
    from kvctl.cli.documents import render

    app = current()
    with AgentClient(socket, label="kvctl agent ls") as client:
        document = client.call("ls", slot=slot.removeprefix("slot:") if slot else None)
    app.output.result(document, lambda: render(document))


@click.command("unload", cls=KvCommand)
@argument("slot", "The slot to free.")
@_socket
@option(
    "--force", is_flag=True, default=False, envvar=None, help="Also while it is used: its users keep what they mapped."
)
@option("--previous", is_flag=True, default=False, envvar=None, help="Only the generation kept for a rollback.")
def unload(*, slot: str, socket: str | None, force: bool, previous: bool) -> None:
    """Free a slot's memory. Refused (6) while a process holds a lease on it."""
    from kvctl.agent.client import AgentClient
    from kvctl.cli.documents import render

    app = current()
    with AgentClient(socket, label="kvctl agent unload") as client:
        answer = client.call("unload", slot=slot.removeprefix("slot:"), force=force, previous_only=previous)
    document = {"schema": "kvctl.agent-unload/1", **answer}
    app.output.result(document, lambda: render(document))


@click.command("tiers", cls=KvCommand)
@_socket
def tiers(*, socket: str | None) -> None:
    """Show the agent's KV tiers ahead of the repo: where they are, what they hold, and how often each is hit."""
    from kvctl.agent.client import AgentClient
    from kvctl.cli.documents import render

    app = current()
    with AgentClient(socket, label="kvctl kv tiers") as client:
        document = client.call("kv_tiers")
    app.output.result(document, lambda: render(document))
