"""The last step of a push or a copy: a model's manifest becomes visible, once, under the right version."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from kvctl.core.errors import ConflictError, UsageError
from kvctl.core.units import is_count
from kvctl.repo.layout import model_key
from kvctl.repo.pushing import Push
from kvctl.repo.repo import Repo
from kvctl.weights import stored
from kvctl.weights.manifest import ModelManifest

_TRIES: Final = 16


def commit_model(push: Push, repo: Repo, manifest: ModelManifest, wanted: str | None) -> tuple[str, bool]:
    """(version, whether it is new). Under `wanted`, or the next number; content that the latest version (or `wanted`)
    holds already stays that. Raises UsageError when `wanted` holds other content, ConflictError as `Push.commit`.
    """
    for _ in range(_TRIES):
        versions = stored.list_versions(repo, manifest.name)
        if wanted is None:
            rival = versions[-1] if versions else None
        else:
            rival = next((item for item in versions if item.version == wanted), None)
        if rival is not None and same_content(stored.read_manifest(repo, rival.key), manifest):
            return rival.version, False
        if rival is not None and wanted is not None:
            raise UsageError(
                f"model {manifest.name} has a version {wanted} already, with other content",
                hint="choose another --version, or remove that one with `kvctl models rm`",
            )
        version = wanted or str(1 + max((int(v.version) for v in versions if is_count(v.version)), default=0))
        try:
            push.commit(model_key(manifest.name, version), replace(manifest, version=version).to_bytes())
        except ConflictError:
            if all(item.version != version for item in stored.list_versions(repo, manifest.name)):
                raise  # the name was not taken: gc condemned a chunk
            continue
        return version, True
    raise ConflictError(f"other pushes of {manifest.name} kept taking the next version", hint="run it again")


def same_content(a: ModelManifest, b: ModelManifest) -> bool:
    """The same files, bit for bit; which incarnation of a chunk holds a byte does not matter."""
    return _content(a) == _content(b)


def _content(manifest: ModelManifest) -> object:
    def digest(position: int | None) -> str:
        return "" if position is None else manifest.chunks[position][0][:64]

    files = [(file.name, file.size, digest(file.header)) for file in manifest.files]
    side = sorted((item.name, item.size, digest(item.chunk)) for item in manifest.sidecars)
    return manifest.digest, files, side
