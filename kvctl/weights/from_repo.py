"""A repo's model as a load plan: chunks spread over members, verified leaf by leaf, a rank's slices read exactly."""

from __future__ import annotations

from collections.abc import Sequence

from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context
from kvctl.core.errors import MemberDownError
from kvctl.core.units import format_size
from kvctl.repo.chunks import LEAF
from kvctl.repo.repo import Repo
from kvctl.transfer.tasks import Place
from kvctl.weights import stored
from kvctl.weights.digests import TensorDigest
from kvctl.weights.from_files import parse_config
from kvctl.weights.plan import MAX_RUN, SourceObject, plan_runs
from kvctl.weights.planning import LoadPlan, Opened, fingerprint_of, keeps_files, lay_out
from kvctl.weights.request import LoadRequest


class RepoModel(Opened):
    """One version of a model of a repo. Members that are down are reported and read around."""

    def __init__(self, request: LoadRequest, stores: Sequence[StoreConfig], ctx: Context) -> None:
        self.request = request
        self.repo = Repo.open(stores, ctx)
        try:
            self.version, key = stored.resolve(self.repo, request.address, request.version)
            self.manifest = stored.read_manifest(self.repo, key)
        except BaseException:
            self.repo.close()
            raise
        self.members = tuple(self.repo.up)

    def close(self) -> None:
        self.repo.close()

    def moved(self) -> bool:
        generation = self.repo.format.generation
        self.repo.refresh()
        return self.repo.format.generation > generation

    def digests(self) -> list[TensorDigest]:
        """What the manifest says of every tensor; chunks are verified against it as they land."""
        tensors = self.manifest.tensors
        return [
            TensorDigest(tensor.name, tensor.dtype, tensor.shape, tensors[tensor.name])
            for header in stored.read_headers(self.repo, self.manifest)
            for tensor in header.tensors
        ]

    def plan(self) -> LoadPlan:
        request, repo, manifest = self.request, self.repo, self.manifest
        self._check_missing()
        objects = self._objects()
        headers = stored.read_headers(repo, manifest)
        files = [(file.name, header) for file, header in zip(manifest.files, headers, strict=True)]
        layout, sliced = lay_out(request, files, self._config, congruent=False)
        runs = plan_runs(objects, layout.wants, max_run=max(MAX_RUN, manifest.stripe), leaf=LEAF)
        side = stored.read_sidecars(repo, manifest) if keeps_files(request) else {}
        if sliced.ranks:
            side.pop("model.safetensors.index.json", None)
        return LoadPlan(
            source=f"{request.address}@{self.version}",
            outputs=layout.outputs,
            tensors=layout.tensors,
            runs=tuple(runs),
            members=tuple(member.name for member in repo.members),
            objects=len(objects),
            fingerprint=fingerprint_of([repo.id, manifest.digest, self._identity(), sliced.identity(request)]),
            side_files=side,
            metadata_bytes=self._metadata_bytes(),
            metadata_requests=1 + 2 * len(manifest.files),
            tp=sliced.tp,
            notes=(
                *(f"member {member.name} is down: {member.down}" for member in repo.down),
                *sliced.notes,
            ),
        )

    def _identity(self) -> list[object]:
        return [[file.name, file.size, self.manifest.chunks[file.header][0][:64]] for file in self.manifest.files]

    def _metadata_bytes(self) -> int:
        small = [file.header for file in self.manifest.files]
        small += [file.leaves for file in self.manifest.files if file.leaves is not None]
        return sum(self.manifest.chunks[position][1] for position in small)

    def _objects(self) -> list[SourceObject]:
        """Every data chunk with the members that can serve it."""
        repo, manifest = self.repo, self.manifest
        objects: list[SourceObject] = []
        for number, (file, table) in enumerate(zip(manifest.files, stored.read_tables(repo, manifest), strict=True)):
            for item, leaves in file.tables(table, manifest.leaf):
                ref = stored.chunk_ref(manifest, item.chunk)
                members = repo.locate(ref.digest)
                places = tuple(Place(member.index, ref.key) for member in members if member.down is None)
                objects.append(SourceObject(number, places, ref.size, tuple(item.cut.held()), leaves, ref.digest))
        return objects

    def _check_missing(self) -> None:
        """Raises MemberDownError, before anything is read, when chunks are only on members that are down."""
        if not self.repo.down:
            return
        missing: dict[str, int] = {}
        for number in range(len(self.manifest.chunks)):
            ref = stored.chunk_ref(self.manifest, number)
            members = self.repo.locate(ref.digest)
            if all(member.down is not None for member in members):
                missing[members[0].name] = missing.get(members[0].name, 0) + ref.size
        if not missing:
            return
        total = sum(size for _, size in self.manifest.chunks)
        share = sum(missing.values())
        names = ", ".join(sorted(missing))
        down = self.repo.down[0]
        raise MemberDownError(
            f"{self.request.address}@{self.version} cannot be read: member {names} is down",
            cause=f"{format_size(share)} of {format_size(total)} are only there; {down.down}",
            hint="bring the member back; more replicas (`kvctl repo init --replicas`) would have kept it readable",
            details={"members": sorted(missing), "missing_bytes": share, "bytes": total},
        )

    def _config(self) -> dict[str, object] | None:
        for item in self.manifest.sidecars:
            if item.name == "config.json" and item.chunk is not None:
                data = stored.read_chunk(self.repo, stored.chunk_ref(self.manifest, item.chunk))
                return parse_config(data, f"{self.manifest.name}/config.json")
        return None
