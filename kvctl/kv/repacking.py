"""What gc does for KV: packs of which only the first part is still used are made anew with just that, and index nodes
that name chunks which are gone are removed. See `kvctl.repo.repack`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvctl.core.context import Context
from kvctl.core.errors import ConflictError, FormatError, IncompatibleError, IntegrityError, NotFoundError
from kvctl.kv.access import read_chunk, read_descriptor
from kvctl.kv.index import Node, node_key, packs_of, sweep
from kvctl.kv.manifest import SessionManifest
from kvctl.kv.rewriting import rewrite_pack
from kvctl.kv.sessions import list_generations
from kvctl.kv.writing import ChunkWriter, rows_and_chunks, uses_of
from kvctl.repo.chunks import ChunkRef, digest_of
from kvctl.repo.marking import list_chunks
from kvctl.repo.pushing import Push
from kvctl.repo.repack import RepackResult, replace_manifest
from kvctl.repo.repo import Repo
from kvctl.transfer.lanes import open_lanes


@dataclass(slots=True)
class _Pack:
    """A pack as all manifests together use it: the most blocks that any of them uses."""

    ref: ChunkRef
    total: int
    used: int = 0


def repack_sessions(repo: Repo, live_ratio: float, keep: Callable[[], None]) -> RepackResult:
    """A `kvctl.repo.repack.Repacker`. Packs that are damaged, or whose manifests change meanwhile, are left alone."""
    packs: dict[str, _Pack] = {}
    candidates: list[str] = []  # a pack is worth it only where it is so for every manifest that names it
    for item in list_generations(repo):
        found = _read(repo, item.key)
        if found is None:
            continue
        uses = uses_of(found[0])
        if any(use.blocks / use.total < live_ratio for use in uses):
            candidates.append(item.key)
        for use in uses:
            pack = packs.setdefault(use.chunk.name, _Pack(use.chunk, use.total))
            pack.used = max(pack.used, use.blocks)
    old = {name: pack for name, pack in packs.items() if pack.used / pack.total < live_ratio}
    packs.clear()
    work = _Repacking(repo, repo.ctx, old, keep)
    try:
        for key in candidates if old else ():
            found = _read(repo, key)
            if found is not None and found[1] and any(name in old for name, _ in found[0].chunks):
                keep()
                work.manifest(key, *found)
    finally:
        work.close()
    keep()
    return RepackResult(len(work.done), work.freed, work.manifests, sweep(repo, list_chunks(repo)))


def _read(repo: Repo, key: str) -> tuple[SessionManifest, str] | None:
    """A manifest and its version; None when it is gone, or not to be understood."""
    try:
        data, version = repo.read_meta_versioned(key)
        return SessionManifest.parse(data, key), version
    except (NotFoundError, FormatError, IncompatibleError):
        return None


class _Repacking:
    def __init__(self, repo: Repo, ctx: Context, old: dict[str, _Pack], keep: Callable[[], None]) -> None:
        self.repo = repo
        self.ctx = ctx
        self.old = old
        self.keep = keep
        self.lanes = open_lanes(repo.up)
        self.done: dict[str, tuple[ChunkRef, int]] = {}  # old name -> new chunk, its header's size
        self.freed = 0
        self.manifests = 0

    def close(self) -> None:
        self.lanes.close()

    def manifest(self, key: str, manifest: SessionManifest, version: str) -> None:
        """Make anew what the manifest names of the old packs, and replace it."""
        with Push.begin(self.repo, f"repack {key}", self.ctx) as push:
            writer = ChunkWriter(push, self.lanes, self.ctx)
            try:
                uses = []
                for use in uses_of(manifest):
                    if use.chunk.name in self.old:
                        made = self._made(push, writer, use.chunk.name, manifest.ns)
                        if made is not None:
                            pack = self.old[use.chunk.name]
                            use = replace(use, chunk=made[0], header=made[1], total=pack.used)
                    uses.append(use)
            finally:
                writer.close()
            tokens = None if manifest.tokens_chunk is None else manifest.refs[manifest.tokens_chunk]
            rows, chunks, tokens_chunk = rows_and_chunks(uses, tokens)
            if chunks == manifest.chunks:
                return
            changed = replace(manifest, packs=rows, chunks=chunks, tokens_chunk=tokens_chunk)
            kept = [ref for ref in changed.refs if ref.name in {name for name, _ in manifest.chunks}]
            others = [ref for ref in changed.refs if ref not in kept]
            if push.adopt(others) == {ref.name for ref in others} and replace_manifest(
                self.repo, push, key, version, changed.to_bytes(), kept
            ):
                self.manifests += 1
                self._nodes(changed)

    def _made(self, push: Push, writer: ChunkWriter, name: str, ns: str) -> tuple[ChunkRef, int] | None:
        """The smaller pack, written once for all manifests; None when the old one cannot be read."""
        pack = self.old[name]
        known = self.done.get(name)
        if known is not None and push.adopt([known[0]]):
            return known
        self.keep()
        try:
            data = rewrite_pack(memoryview(read_chunk(self.repo, pack.ref)), ns, None, pack.used, pack.ref.key)
        except (IntegrityError, IncompatibleError) as problem:
            self.ctx.progress.note(f"pack {name} is not repacked: {problem}")
            return None
        digest = digest_of(data)
        ref = writer.store({digest: (data,)})[digest]
        self.freed += pack.ref.size - ref.size if name not in self.done else 0
        self.done[name] = ref, int.from_bytes(data[12:16], "little")
        return self.done[name]

    def _nodes(self, manifest: SessionManifest) -> None:
        """Let the index name the new packs, where it named the old ones."""
        descriptor = read_descriptor(self.repo, manifest.ns)
        uses = uses_of(manifest)
        for key in manifest.index:
            where = node_key(manifest.ns, bytes.fromhex(key))
            try:
                data, version = self.repo.read_meta_versioned(where)
                node = Node.parse(data, where)
            except (NotFoundError, FormatError, IncompatibleError):
                continue
            if version and any(use.chunk.name in self.done for use in node.packs):
                packs = packs_of(uses, node.tokens, descriptor)
                try:
                    self.repo.commit_meta(where, replace(node, packs=packs).to_bytes(), if_version=version)
                except ConflictError:
                    continue
