"""`kvctl config show`."""

from __future__ import annotations

import os

import click

from kvctl.cli.app import current
from kvctl.cli.lazy import KvCommand
from kvctl.cli.tables import table


@click.command("show", cls=KvCommand)
def show() -> None:
    """Show every setting's value and where it comes from: flag, environment, project or user file, default."""
    from kvctl.core.config import SETTINGS

    app = current()
    config = app.config
    rows: list[dict[str, object]] = []
    for name in SETTINGS:
        setting = app.setting(name)
        rows.append({"name": name, "value": setting.value, "origin": setting.origin})
    repo = app.flags.get("repo")
    if repo:
        origin = "flag --repo" if app.sources["repo"] == "flag" else "environment KVCTL_REPO"
        rows.append({"name": "repo", "value": repo, "origin": origin})
    default = config.default_repo
    rows.append(
        {
            "name": "default_repo",
            "value": default.value if default else None,
            "origin": default.origin if default else "default",
        }
    )
    repos = [
        {
            "name": found.name,
            "origin": found.origin,
            "kv_key_file": found.kv_key_file,
            "stores": [
                {"url": store.url, "endpoints": list(store.endpoints), "options": dict(store.options)}
                for store in found.stores
            ],
        }
        for found in config.repos.values()
    ]

    def human() -> str:
        files = [f"files: {', '.join(config.files)}" if config.files else "files: none found"]
        lines = table(
            ("setting", "value", "origin"), [(row["name"], _shown(row["value"]), row["origin"]) for row in rows]
        )
        for found in config.repos.values():
            files_of = [f"\nrepo {found.name} ({found.origin})"]
            if found.kv_key_file:
                files_of.append(f"  kv_key_file  {found.kv_key_file}")
            for store in found.stores:
                extra = [f"endpoints {', '.join(store.endpoints)}"] if store.endpoints else []
                extra += [f"{key}={value}" for key, value in store.options.items()]
                files_of.append("  " + "  ".join([store.url, *extra]))
            lines += files_of
        return "\n".join([*files, "", *lines])

    app.output.document(
        "kvctl.config/1", {"files": list(config.files), "settings": rows, "repos": repos, "cwd": os.getcwd()}, human
    )


def _shown(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return " ".join(f"{key}={item}" for key, item in value.items()) or "-"
    return f"{value:g}" if isinstance(value, float) else str(value)
