"""Models as an operator handles them: list, inspect, digest, verify, remove. (`kvctl models cp` is in `copying`.)"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Final

from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context
from kvctl.core.errors import KvctlError, NotFoundError, UsageError
from kvctl.memory.whole import whole_file
from kvctl.repo.repo import Repo
from kvctl.transfer.lanes import open_lanes
from kvctl.transfer.report import Report
from kvctl.transfer.summary import Stopwatch, cpu_share
from kvctl.transfer.tasks import StageClock
from kvctl.weights import stored
from kvctl.weights.digesting import hash_source
from kvctl.weights.digests import DigestsFile, TensorDigest
from kvctl.weights.from_files import PlainModel
from kvctl.weights.load import run_load
from kvctl.weights.manifest import ModelManifest
from kvctl.weights.request import LoadRequest
from kvctl.weights.safetensors import TensorInfo

LIST_SCHEMA: Final = "kvctl.models/1"
INSPECT_SCHEMA: Final = "kvctl.model-details/1"
REMOVE_SCHEMA: Final = "kvctl.models-removed/1"


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One version of a model. Bytes of its tensors; `unique_bytes` are in chunks that no other listed version has."""

    name: str
    version: str
    created: str
    bytes: int
    unique_bytes: int
    chunks: int
    files: int
    tensors: int
    digest: str
    revision: str | None = None
    latest: bool = False
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ModelList:
    models: tuple[ModelEntry, ...]

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        return {"schema": LIST_SCHEMA, "models": [_as_json(entry) for entry in self.models]}


def _as_json(entry: ModelEntry) -> dict[str, Any]:  # Any: JSON
    return {name: getattr(entry, name) for name in ModelEntry.__dataclass_fields__}


def list_models(
    repo: Sequence[StoreConfig], ctx: Context, patterns: Sequence[str] = (), *, allow_empty: bool = False
) -> ModelList:
    """Every version of every model whose name matches one of the globs (none: all). A manifest that cannot be read
    is listed with its problem. Raises NotFoundError for a pattern that matches nothing, unless `allow_empty`.
    """
    with Repo.open(repo, ctx) as opened:
        versions = _matching(stored.list_versions(opened), patterns, opened, allow_empty=allow_empty)
        manifests = opened.each(lambda item: _read(opened, item), versions)
    owners: Counter[str] = Counter(
        name for manifest in manifests if isinstance(manifest, ModelManifest) for name, _ in manifest.chunks
    )
    newest = {item.name: item.version for item in versions}
    return ModelList(
        tuple(
            _entry(item, manifest, owners, latest=newest[item.name] == item.version)
            for item, manifest in zip(versions, manifests, strict=True)
        )
    )


def _read(repo: Repo, item: stored.StoredVersion) -> ModelManifest | KvctlError:
    try:
        return stored.read_manifest(repo, item.key)
    except KvctlError as error:
        return error


def _entry(
    item: stored.StoredVersion, manifest: ModelManifest | KvctlError, owners: Mapping[str, int], *, latest: bool
) -> ModelEntry:
    if isinstance(manifest, KvctlError):
        return ModelEntry(item.name, item.version, "", 0, 0, 0, 0, 0, "", None, latest, str(manifest))
    return ModelEntry(
        item.name,
        item.version,
        manifest.created,
        manifest.data_bytes,
        sum(size for name, size in manifest.chunks if owners[name] == 1),
        len(manifest.chunks),
        len(manifest.files),
        len(manifest.tensors),
        manifest.digest,
        manifest.revision,
        latest,
    )


def _matching(
    versions: Sequence[stored.StoredVersion], patterns: Sequence[str], repo: Repo, *, allow_empty: bool
) -> list[stored.StoredVersion]:
    """Those that a pattern NAME or NAME@VERSION (globs) names; all when there is none."""
    if not patterns:
        return list(versions)
    found: list[stored.StoredVersion] = []
    for pattern in patterns:
        name, _, version = pattern.partition("@")
        hits = [v for v in versions if fnmatchcase(v.name, name) and fnmatchcase(v.version, version or "*")]
        if not hits and not allow_empty:
            raise NotFoundError(
                f"repo {repo.id[:8]} has no model {pattern!r}", hint="`kvctl models ls` lists them; or --allow-empty"
            )
        found += [item for item in hits if item not in found]
    return found


@dataclass(frozen=True, slots=True)
class ModelDetails:
    """`files`: name, bytes, tensors, chunks. `tensors`: name, dtype, shape, bytes, digest where it is known."""

    source: str
    digest: str
    bytes: int
    files: tuple[Mapping[str, object], ...]
    tensors: tuple[Mapping[str, object], ...]
    side_files: Mapping[str, int]
    ignored: tuple[str, ...] = ()
    facts: Mapping[str, object] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        return {
            "schema": INSPECT_SCHEMA,
            "source": self.source,
            "digest": self.digest,
            "bytes": self.bytes,
            **self.facts,
            "files": [dict(item) for item in self.files],
            "side_files": dict(self.side_files),
            "ignored": list(self.ignored),
            "tensors": [dict(item) for item in self.tensors],
        }


def inspect_model(address: str, repo: Sequence[StoreConfig] | None, version: str | None, ctx: Context) -> ModelDetails:
    """A model's files, tensors and digests from headers and manifest alone. `repo` None: a plain source."""
    if repo is None:
        return _inspect_plain(address, ctx)
    with Repo.open(repo, ctx) as opened:
        version, key = stored.resolve(opened, address, version)
        manifest = stored.read_manifest(opened, key)
        headers = stored.read_headers(opened, manifest)
    tensors = tuple(
        _tensor(tensor, file.name, manifest.tensors.get(tensor.name, ""))
        for file, header in zip(manifest.files, headers, strict=True)
        for tensor in header.tensors
    )
    return ModelDetails(
        f"{address}@{version}",
        manifest.digest,
        manifest.data_bytes,
        tuple(
            {"name": file.name, "bytes": file.size, "tensors": len(header.tensors), "chunks": len(file.data)}
            for file, header in zip(manifest.files, headers, strict=True)
        ),
        tensors,
        {item.name: item.size for item in manifest.sidecars},
        facts={
            "name": manifest.name,
            "version": manifest.version,
            "created": manifest.created,
            "revision": manifest.revision,
            "producer": manifest.producer,
            "stripe": manifest.stripe,
            "chunks": len(manifest.chunks),
        },
    )


def _inspect_plain(address: str, ctx: Context) -> ModelDetails:
    with PlainModel(LoadRequest(address), ctx) as opened:
        source = opened.source
        return ModelDetails(
            address,
            "",
            source.data_bytes,
            tuple(
                {"name": file.name, "bytes": file.size, "tensors": len(file.header.tensors)} for file in source.files
            ),
            tuple(_tensor(tensor, source.files[number].name, "") for number, tensor in source.tensors()),
            {item.name: item.info.size for item in source.sidecars},
            tuple(f"{item.name}: {item.reason}" for item in source.ignored),
        )


def _tensor(tensor: TensorInfo, file: str, digest: str) -> dict[str, object]:
    return {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "bytes": tensor.nbytes,
        "file": file,
        "digest": digest,
    }


def digest_model(
    address: str, repo: Sequence[StoreConfig] | None, version: str | None, out: str | None, ctx: Context
) -> tuple[DigestsFile, Report]:
    """The digests of a model's tensors; of a repo's model from its manifest, of a plain source by reading all of it.
    `out`: also written there, atomically.
    """
    watch = Stopwatch()
    report = Report("models digest", source=address, target=out or "")
    clock = StageClock()
    if repo is not None:
        with Repo.open(repo, ctx) as opened:
            version, key = stored.resolve(opened, address, version)
            manifest = stored.read_manifest(opened, key)
            headers = stored.read_headers(opened, manifest)
        digests = [
            TensorDigest(tensor.name, tensor.dtype, tensor.shape, manifest.tensors[tensor.name])
            for header in headers
            for tensor in header.tensors
        ]
    else:
        with PlainModel(LoadRequest(address), ctx) as source:
            lanes = open_lanes(source.members)
            watch.ready()
            ctx.progress.begin("hashing", source.source.data_bytes)
            try:
                digests = hash_source(source.source, lanes, report, clock, ctx)
            finally:
                ctx.progress.end()
                lanes.close()
            report.bytes = report.needed = source.source.data_bytes
            report.paths = [lane.report() for lane in lanes.lanes]
            report.transport = lanes.report()
    found = DigestsFile(tuple(digests))
    if out is not None:
        with whole_file(out) as file:
            file.write(json.dumps(found.to_json(), indent=1).encode() + b"\n")
    watch.stop(report)
    report.tensors = len(digests)
    report.extra["digest"] = found.digest
    report.stages["cpu"] = cpu_share(report.cpu_s, report.seconds)
    return found, report


def verify_model(request: LoadRequest, ctx: Context) -> Report:
    """Read a model and check every digest: chunks of a repo's model, tensors of a plain source (`digests`)."""
    if request.repo is None and request.digests is None:
        raise UsageError(
            f"{request.address} has no digests to verify against",
            hint="make them with `kvctl models digest --out FILE` and pass --require-digests FILE",
        )
    report = run_load(replace(request, verify="full", into="none"), ctx)
    report.command = "models verify"
    return report


@dataclass(frozen=True, slots=True)
class Removal:
    """What `remove` removes; chunks that nothing else needs are freed by gc. Bytes."""

    models: tuple[str, ...]
    unique_bytes: int
    removed: bool

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        return {
            "schema": REMOVE_SCHEMA,
            "models": list(self.models),
            "unique_bytes": self.unique_bytes,
            "removed": self.removed,
        }


def remove_model(
    repo: Sequence[StoreConfig],
    patterns: Sequence[str],
    ctx: Context,
    *,
    dry_run: bool = False,
    allow_empty: bool = False,
    confirm: Callable[[Removal], None] | None = None,
) -> Removal:
    """Remove every version that a pattern (NAME or NAME@VERSION, globs) names. `confirm` sees the plan first and may
    raise. Nothing named: UsageError.
    """
    if not patterns:
        raise UsageError("no model was named", hint="name models, or use a glob in quotes")
    with Repo.open(repo, ctx) as opened:
        everything = stored.list_versions(opened)
        chosen = _matching(everything, patterns, opened, allow_empty=allow_empty)
        kept: set[str] = set()
        freed: dict[str, int] = {}
        for item in everything:
            manifest = _read(opened, item)
            if isinstance(manifest, KvctlError):
                continue
            if item in chosen:
                freed.update(manifest.chunks)
            else:
                kept.update(name for name, _ in manifest.chunks)
        unique = sum(size for name, size in freed.items() if name not in kept)
        names = tuple(f"{item.name}@{item.version}" for item in chosen)
        plan = Removal(names, unique, removed=False)
        if dry_run or not chosen:
            return plan
        if confirm is not None:
            confirm(plan)
        for item in chosen:
            ctx.cancel.check("removing models")
            opened.delete_meta(item.key)
    return replace(plan, removed=True)
