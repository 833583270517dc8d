"""`kvctl node serve|key|token`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kvctl.cli.app import App, current
from kvctl.cli.lazy import KvCommand
from kvctl.cli.options import Size, argument, option

if TYPE_CHECKING:
    from kvctl.node.server import Ready
    from kvctl.transports.node_auth import MasterKey

_FILE = click.Path(dir_okay=False)
_SECURITY = "Security"
_LIMITS = "Limits"
_RDMA = "RDMA"


@click.command("serve", cls=KvCommand)
@argument("folder", "The directory whose files are the objects.", metavar="DIR", type=click.Path(file_okay=False))
@option(
    "--listen",
    metavar="HOST:PORT",
    envvar="KVCTL_NODE_LISTEN",
    default="127.0.0.1:7780",
    show_default=True,
    help="Where to listen; port 0 takes a free one.",
)
@option(
    "--key-file",
    type=_FILE,
    envvar="KVCTL_NODE_MASTER_KEY_FILE",
    section=_SECURITY,
    help="The node's master key(s), made by `kvctl node key`.",
)
@option(
    "--allow-unauthenticated",
    "open_to",
    metavar="CIDR",
    multiple=True,
    envvar=None,
    section=_SECURITY,
    help="Serve peers of this network without tokens, all rights; may repeat.",
)
@option("--tls-cert", type=_FILE, envvar=None, section=_SECURITY, help="PEM certificate with its chain: HTTPS only.")
@option("--tls-key", type=_FILE, envvar=None, section=_SECURITY, help="Its key, if it is not in the same file.")
@option(
    "--max-connections", type=click.IntRange(1, 65536), default=1024, show_default=True, envvar=None, section=_LIMITS,
    help="Beyond it the longest idle one makes room; if none is idle, the newcomer gets 503.",
)  # fmt: skip
@option("--max-object", type=Size(), metavar="SIZE", envvar=None, section=_LIMITS, help="Largest upload [5TiB].")
@option(
    "--threads", type=click.IntRange(1, 1024), default=16, show_default=True, envvar=None, section=_LIMITS,
    help="Bodies that move at the same moment.",
)  # fmt: skip
@option(
    "--drain", type=click.FloatRange(0, 3600), default=30.0, show_default=True, envvar=None, section=_LIMITS,
    help="Seconds that requests may take to end after a signal.",
)  # fmt: skip
@option(
    "--head-timeout", type=click.FloatRange(0.01), default=10.0, show_default=True, envvar=None, section=_LIMITS,
    help="Seconds that a request's head may take, from its first byte.",
)  # fmt: skip
@option(
    "--body-timeout", type=click.FloatRange(0.01), default=30.0, show_default=True, envvar=None, section=_LIMITS,
    help="Seconds that a body may stand still.",
)  # fmt: skip
@option(
    "--idle-timeout", type=click.FloatRange(0.01), default=120.0, show_default=True, envvar=None, section=_LIMITS,
    help="Seconds that a connection may wait between requests.",
)  # fmt: skip
@option(
    "--min-rate", type=Size(), metavar="SIZE", default=4096, show_default="4KiB", envvar=None, section=_LIMITS,
    help="Bytes per second that a body must move on average, after its first minute.",
)  # fmt: skip
@option(
    "--rdma", type=click.Choice(["auto", "off", "require"]), default="auto", show_default=True, envvar=None,
    section=_RDMA, help="Answer RDMA tokens when a plug-in can; require: do not start without.",
)  # fmt: skip
@option(
    "--rdma-allow", metavar="CIDR", multiple=True, envvar=None, section=_RDMA,
    help="Connect back to this network too, not to the HTTP peer's address only; may repeat.",
)  # fmt: skip
@option("--rdma-opt", metavar="K=V", multiple=True, envvar=None, section=_RDMA, help="An option of the RDMA plug-in.")
def serve(
    *,
    folder: str,
    listen: str,
    key_file: str | None,
    open_to: tuple[str, ...],
    tls_cert: str | None,
    tls_key: str | None,
    max_connections: int,
    max_object: int | None,
    threads: int,
    drain: float,
    head_timeout: float,
    body_timeout: float,
    idle_timeout: float,
    min_rate: int,
    rdma: str,
    rdma_allow: tuple[str, ...],
    rdma_opt: tuple[str, ...],
) -> None:
    """Serve the files of DIR as objects, over HTTP (and RDMA where a plug-in can), to `node://` stores.

    One process serves one directory; several make a repo's members. SIGTERM or Ctrl-C lets requests end, then stops
    with 0; a second one cuts them. With -o json the node says where it listens in one document.
    """
    from dataclasses import asdict, replace

    from kvctl.node.server import run_node
    from kvctl.node.settings import Limits, NodeSettings, parse_listen, parse_networks

    app = current()
    limits = Limits(
        connections=max_connections,
        drain_seconds=drain,
        head_seconds=head_timeout,
        stall_seconds=body_timeout,
        idle_seconds=idle_timeout,
        min_rate=max(1, min_rate),
    )
    settings = NodeSettings(
        root=folder,
        listen=parse_listen(listen),
        keys=() if key_file is None else _master_keys(key_file),
        open_to=parse_networks(open_to),
        tls_cert=tls_cert,
        tls_key=tls_key,
        threads=threads,
        limits=limits if max_object is None else replace(limits, max_object=max_object),
        rdma=rdma,
        rdma_allow=tuple(str(network) for network in parse_networks(rdma_allow)),
        rdma_options=_pairs(rdma_opt),
    )

    def ready(found: Ready) -> None:
        if open_to:
            app.output.warning(f"peers in {', '.join(open_to)} need no token: they may read, write and delete")
        if not app.output.human:
            app.output.document("kvctl.node/1", {**asdict(found), "pid": _pid()}, str)
            return
        app.output.note(f"serving {found.root} at {found.url}")
        app.output.note("RDMA: on" if found.rdma else f"RDMA: off ({'; '.join(found.rdma_reasons)})")

    ended = run_node(
        settings, ready=ready, note=app.output.warning, trace=app.output.detail if app.output.verbose else None
    )
    cut = f", {ended.cut} connections were cut" if ended.cut else ""
    app.output.note(f"stopped after {ended.requests} requests{cut}")


@click.command("key", cls=KvCommand)
@argument("file", "The file to make; it must not exist.", type=_FILE)
def key(file: str) -> None:
    """Make a node's master key, for `kvctl node serve --key-file`. Give each node a key of its own."""
    from kvctl.transports.node_auth import MasterKey

    made = MasterKey.make()
    _write_secret(file, made.text())
    _say(current(), "kvctl.node-key/1", file, {"key_id": made.key_id})


@click.command("token", cls=KvCommand)
@argument("file", "The client's key file to make; it must not exist.", type=_FILE)
@option(
    "--key-file",
    type=_FILE,
    required=True,
    envvar="KVCTL_NODE_MASTER_KEY_FILE",
    help="The node's master key, made by `kvctl node key`; of several the first.",
)
@option("--scope", type=click.Choice(["ro", "rw"]), default="ro", show_default=True, envvar=None, help="Read, or both.")
@option("--prefix", default="", envvar=None, help="Only keys in this folder.")
def token(*, file: str, key_file: str, scope: str, prefix: str) -> None:
    """Derive a client's key from a node's master key: what `key_file=` of a node:// store names.

    The client signs each request with it; the node needs no list of clients. To take keys back, change the master.
    """
    made = _master_keys(key_file)[0].scoped("rw" if scope == "rw" else "ro", prefix)
    _write_secret(file, made.text())
    _say(current(), "kvctl.node-token/1", file, {"key_id": made.key_id, "scope": made.rights, "prefix": made.prefix})


def _master_keys(path: str) -> tuple[MasterKey, ...]:
    """Raises ConfigError when the file holds a client's key."""
    from kvctl.core.errors import ConfigError
    from kvctl.transports.node_auth import MasterKey, read_key_file

    found = read_key_file(path)
    masters = tuple(item for item in found if isinstance(item, MasterKey))
    if len(masters) != len(found):
        raise ConfigError(f"{path} holds a client's key, not a node's", hint="`kvctl node key` makes a node's")
    return masters


def _write_secret(path: str, text: str) -> None:
    """A new file that only its owner can read. Raises UsageError when it exists."""
    import os

    from kvctl.core.errors import UsageError
    from kvctl.memory.files import cannot_write

    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise UsageError(f"{path} exists already", hint="a key is never overwritten: remove it first") from None
    except OSError as error:
        raise cannot_write(path, error) from error
    try:
        with os.fdopen(fd, "w", encoding="ascii") as out:
            out.write(f"{text}\n")
    except OSError as error:
        os.unlink(path)  # half a key would stand in the way of a whole one
        raise cannot_write(path, error) from error


def _say(app: App, schema: str, file: str, document: dict[str, str]) -> None:
    app.output.document(schema, {"file": file, **document}, lambda: f"{file}: key {document['key_id']}")


def _pairs(texts: tuple[str, ...]) -> dict[str, str]:
    from kvctl.core.errors import UsageError

    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise UsageError(f"{text!r} is not K=V")
        found[name] = value
    return found


def _pid() -> int:
    import os

    return os.getpid()
