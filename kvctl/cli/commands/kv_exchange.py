"""`kvctl kv export|import`: folders of KV bundles."""

from __future__ import annotations

from typing import Any

import click

from kvctl.cli.app import S3Flags, current
from kvctl.cli.documents import cell
from kvctl.cli.kv_options import PATTERNS, codec_option, key_option, label_option, pairs, place, rate_option
from kvctl.cli.lazy import KvCommand
from kvctl.cli.options import allow_empty_option, argument, option, s3_options
from kvctl.cli.tables import table


@click.command("export", cls=KvCommand)
@argument("patterns", f"{PATTERNS}; the latest generation where none is named.", nargs=-1, required=True,
          metavar="PATTERN...")  # fmt: skip
@option("--to", "folder", required=True, type=click.Path(file_okay=False), metavar="DIR", envvar=None,
        help="Writes DIR/TENANT/NAME.safetensors.")  # fmt: skip
@allow_empty_option
@rate_option
@key_option
@s3_options
def export(
    *,
    patterns: tuple[str, ...],
    folder: str,
    allow_empty: bool,
    max_rate: int | None,
    kv_key_file: str | None,
    **s3: Any,  # Any: as S3Flags takes them
) -> None:
    """Write sessions as KV bundles (`kvctl help format`), each file whole or absent. Damaged sessions are left out, and
    the command ends with 3.
    """
    app = current()
    where = place(app, S3Flags(**s3), kv_key_file)

    from kvctl.kv.exchange import ExportRequest, export_sessions

    request = ExportRequest(where.stores, patterns, folder, where.key, allow_empty, max_rate)
    with app.running() as ctx:
        found = export_sessions(request, ctx)
    document = found.to_json()
    app.output.rows(document["schema"], "sessions", document["sessions"], _exchanged)
    found.require_ok()


@click.command("import", cls=KvCommand)
@argument("folder", "DIR with TENANT/NAME.safetensors, as `kv export` writes them.",
          type=click.Path(exists=True, file_okay=False), metavar="DIR")  # fmt: skip
@option("--tenant", metavar="TENANT", envvar=None, help="Push all of them as sessions of this tenant.")
@option("--with-tokens", is_flag=True, default=False, envvar=None, help="Store the token ids too.")
@codec_option
@label_option
@rate_option
@key_option
@s3_options
def import_(
    *,
    folder: str,
    tenant: str | None,
    with_tokens: bool,
    codec: str,
    labels: tuple[str, ...],
    max_rate: int | None,
    kv_key_file: str | None,
    **s3: Any,  # Any: as S3Flags takes them
) -> None:
    """Push every KV bundle of a folder as a session. One that fails does not stop the others (ends with 3)."""
    app = current()
    where = place(app, S3Flags(**s3), kv_key_file)

    from kvctl.kv.exchange import ImportRequest, import_bundles

    request = ImportRequest(where.stores, folder, tenant, where.key, with_tokens, codec, pairs(labels), max_rate)
    with app.running() as ctx:
        found = import_bundles(request, ctx)
    document = found.to_json()
    app.output.rows(document["schema"], "sessions", document["sessions"], _exchanged)
    found.require_ok()


def _exchanged(rows: list[Any]) -> str:  # Any: JSON
    cells = [
        (row["session"], row["path"], row["tokens"], cell("bytes", row["bytes"]), row["problem"] or "ok")
        for row in rows
    ]
    return "\n".join(table(("session", "path", "tokens", "bytes", "state"), cells, right=(2, 3)))
