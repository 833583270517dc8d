"""Models stored in a repo: their versions, manifests and small chunks (headers, leaf tables, side files)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from kvctl.core.errors import IntegrityError, KvctlError, MemberDownError, NotFoundError, TransientError
from kvctl.core.units import is_count
from kvctl.repo.chunks import ChunkRef, digest_of
from kvctl.repo.layout import MODELS, model_key, model_prefix, parse_model_key
from kvctl.repo.repo import Repo
from kvctl.weights.manifest import ModelFile, ModelManifest, parse_manifest
from kvctl.weights.safetensors import Header, parse_header


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """One version of a model, from a listing alone."""

    name: str
    version: str
    key: str
    modified: datetime

    @property
    def order(self) -> tuple[bool, int, datetime]:
        """Numbered versions by number; named ones before any numbered one, by time."""
        number = is_count(self.version)
        return number, int(self.version) if number else 0, self.modified


def list_versions(repo: Repo, name: str | None = None) -> list[StoredVersion]:
    """Versions of one model, or of all, oldest first within a model."""
    prefix = MODELS if name is None else model_prefix(name)
    found: list[StoredVersion] = []
    for info in repo.list_meta(prefix):
        parsed = parse_model_key(info.key)
        if parsed is not None:
            found.append(StoredVersion(parsed[0], parsed[1], info.key, info.modified))
    return sorted(found, key=lambda item: (item.name, item.order))


def resolve(repo: Repo, name: str, version: str | None) -> tuple[str, str]:
    """(version, key): the one asked for, or the latest. Raises NotFoundError that lists what is there."""
    versions = list_versions(repo, name)
    if version is not None:
        if all(item.version != version for item in versions):
            have = ", ".join(item.version for item in versions[-5:])
            raise NotFoundError(
                f"model {name!r} has no version {version!r} in repo {repo.id[:8]}",
                cause=f"it has {have}" if have else "it has no version at all",
                hint="`kvctl models ls` lists models and versions",
            )
        return version, model_key(name, version)
    if not versions:
        raise NotFoundError(f"repo {repo.id[:8]} has no model {name!r}", hint="`kvctl models ls` lists them")
    return versions[-1].version, versions[-1].key


def read_manifest(repo: Repo, key: str) -> ModelManifest:
    """Raises NotFoundError, FormatError, IncompatibleError and what the members raise."""
    return parse_manifest(repo.read_meta(key), key)


def chunk_ref(manifest: ModelManifest, position: int) -> ChunkRef:
    name, size = manifest.chunks[position]
    return ChunkRef.parse(name, size)


def read_chunk(repo: Repo, ref: ChunkRef) -> bytes:
    """A whole small chunk, its digest checked; the next replica where one is missing or damaged.

    Raises IntegrityError when every replica is damaged or missing, MemberDownError when those that may have it are
    down.
    """
    problem: KvctlError | None = None
    down = False
    for member in repo.locate(ref.digest):
        if member.down is not None:
            down, problem = True, problem or member.down
            continue
        try:
            data = member.store.get(ref.key)
        except TransientError as error:  # it may well have the chunk, and does not answer
            down, problem = True, error
            continue
        except KvctlError as error:
            problem = error
            continue
        if len(data) == ref.size and digest_of(data) == ref.digest:
            return data
        problem = IntegrityError(f"{member.name}: chunk {ref.name} is damaged")
        repo.ctx.progress.note(str(problem))
    kind = MemberDownError if down else IntegrityError
    raise kind(
        f"no readable copy of chunk {ref.name} in repo {repo.id[:8]}",
        cause=str(problem) if problem else None,
        hint="bring the member back" if down else "`kvctl repo check` lists the holes",
    )


def read_headers(repo: Repo, manifest: ModelManifest) -> list[Header]:
    """The parsed header of each file, in the manifest's order; one batch of small reads."""

    def one(file: ModelFile) -> Header:
        raw = read_chunk(repo, chunk_ref(manifest, file.header))
        return parse_header(raw, file.size, f"{manifest.name}@{manifest.version}/{file.name}")

    return repo.each(one, manifest.files)


def read_tables(repo: Repo, manifest: ModelManifest) -> list[memoryview]:
    """The leaf table of each file, in the manifest's order."""

    def one(file: ModelFile) -> memoryview:
        return memoryview(b"" if file.leaves is None else read_chunk(repo, chunk_ref(manifest, file.leaves)))

    return repo.each(one, manifest.files)


def read_sidecars(repo: Repo, manifest: ModelManifest) -> dict[str, bytes]:
    """Name -> bytes of the model's small files."""
    wanted: Sequence[tuple[str, int | None]] = [(item.name, item.chunk) for item in manifest.sidecars]
    datas = repo.each(lambda item: b"" if item[1] is None else read_chunk(repo, chunk_ref(manifest, item[1])), wanted)
    return {name: data for (name, _), data in zip(wanted, datas, strict=True)}
