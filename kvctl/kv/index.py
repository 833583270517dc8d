"""The index: which packs hold the blocks that lead to a point of a chain. It finds stored prefixes; it owns nothing.

A node is `index/<nsdigest>/<key>.json`, named by the key of the block that ends there, which stands for all tokens up
to there. `kvctl.kv.places` says where a chain has nodes: anchors, O(log tokens) of them, and behind the last one nodes
that lead to the session's end. The longest stored prefix of other tokens is found by galloping and bisecting over the
anchors, then over each kind of nodes behind the last one: O(log n) reads, whatever else is stored.

A node names the packs of the tokens since the anchor before it, so anchors are read back to the start. What proves
them: their keys (computed here, from the tokens), the anchor before, and an HMAC of the tokens in between; a pack's
own block keys are compared before its bytes are used. gc takes no notice of nodes: one that names a chunk that is gone
is a miss. Evictions remove nodes before manifests, the last of a chain first.
"""

from __future__ import annotations

import hmac
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvctl.core.errors import ConflictError, FormatError, IncompatibleError, KvctlError, NotFoundError
from kvctl.kv.documents import Fields, canonical, loads
from kvctl.kv.identity import Descriptor
from kvctl.kv.places import anchor_before, anchors, points, spacing, steps
from kvctl.kv.tokens import ROOT, TOKEN_HMAC_SIZE, BlockKey, token_bytes, token_hmac
from kvctl.repo import metadata
from kvctl.repo.chunks import ChunkRef
from kvctl.repo.repo import Repo

INDEX: Final = "index/"
SCHEMA: Final = "kvctl.index/1"


@dataclass(frozen=True, slots=True, order=True)
class PackUse:
    """Tokens `first` to `first + count` of a group, in the first `blocks` blocks of a pack of `total` blocks, whose
    header takes `header` bytes. A sliding group's first block may lack the tokens before `first`.
    """

    group: int
    first: int
    count: int
    blocks: int
    total: int
    header: int
    chunk: ChunkRef

    @property
    def end(self) -> int:
        return self.first + self.count

    def row(self) -> list[object]:
        ref = self.chunk
        return [ref.name, ref.size, self.group, self.first, self.count, self.blocks, self.total, self.header]


@dataclass(frozen=True, slots=True)
class Node:
    """`key` of the block that ends at `tokens`, `previous` of the one at the anchor before (32 zero bytes: none)."""

    key: bytes
    tokens: int
    previous: bytes
    token_hmac: bytes
    packs: tuple[PackUse, ...]

    def to_bytes(self) -> bytes:
        return canonical(
            {
                "schema": SCHEMA,
                "key": self.key.hex(),
                "tokens": self.tokens,
                "previous": self.previous.hex(),
                "token_hmac": self.token_hmac.hex(),
                "packs": [pack.row() for pack in self.packs],
            }
        )

    @classmethod
    def parse(cls, data: bytes, where: str) -> Node:
        """Raises FormatError, IncompatibleError."""
        fields = Fields(loads(data, where), where)
        fields.schema(SCHEMA)
        fields.only({"schema", "key", "tokens", "previous", "token_hmac", "packs"})
        packs: list[PackUse] = []
        for number, (name, *numbers) in enumerate(fields.rows("packs", 8)):
            if not isinstance(name, str):
                raise fields.bad(f"packs[{number}]", "names no chunk")
            size, group, first, count, blocks, total, header = (
                fields.as_number(value, f"packs[{number}]") for value in numbers
            )
            packs.append(PackUse(group, first, count, blocks, total, header, ChunkRef.parse(name, size)))
        return cls(
            bytes.fromhex(fields.hex("key")),
            fields.number("tokens", 1),
            bytes.fromhex(fields.hex("previous")),
            bytes.fromhex(fields.hex("token_hmac", TOKEN_HMAC_SIZE)),
            tuple(packs),
        )


def node_key(nsdigest: str, key: bytes) -> str:
    return f"{INDEX}{nsdigest}/{key.hex()}.json"


@dataclass(frozen=True, slots=True)
class Stored:
    """The longest stored prefix: its `tokens`, the nodes that prove it, how many index objects were asked for."""

    tokens: int
    nodes: tuple[Node, ...]
    requests: int
    problems: tuple[str, ...] = ()

    def uses(self, descriptor: Descriptor) -> list[PackUse]:
        """The packs of the prefix, each once, as far as the prefix goes; by group, then place."""
        found: dict[tuple[int, str], PackUse] = {}
        for node in self.nodes:
            for use in node.packs:
                known = found.get((use.group, use.chunk.name))
                if known is None or known.end < use.end:
                    found[use.group, use.chunk.name] = use
        return sorted(found.values())


class Finder:
    """Looks for the longest stored prefix of one chain."""

    def __init__(
        self,
        repo: Repo,
        secret: bytes,
        blocks: Sequence[BlockKey],
        tokens: memoryview,
        descriptor: Descriptor,
    ) -> None:
        self._repo = repo
        self._ns = descriptor.digest
        self._secret = secret
        self._blocks = blocks
        self._tokens = token_bytes(tokens)
        self._size = descriptor.block_tokens
        self._full = full_groups(descriptor)
        self._seen: dict[int, Node | None] = {}
        self._ends = [block.end for block in blocks]
        self._problems: list[str] = []

    def drop(self, node: Node) -> None:
        """Take the node for one that is not there: its packs cannot be relied on."""
        self._seen[node.tokens] = None

    def find(self) -> Stored:
        """The longest prefix; again after `drop`, from what was read. Reads only; what is damaged or does not fit is a
        miss, said in `problems`.
        """
        total = self._ends[-1] if self._ends else 0
        places = anchors(total)
        proven = self._proven(places[: self._bisect(places, gallop=True)])
        reached = places[proven - 1] if proven else 0
        nodes = [node for place in places[:proven] if (node := self._seen[place]) is not None]
        last = self._tail(reached, total)
        if last is not None:
            nodes.append(last)
            reached = last.tokens
        return Stored(reached, tuple(nodes), len(self._seen), tuple(dict.fromkeys(self._problems)))

    def _proven(self, places: Sequence[int]) -> int:
        """How many anchors from the start on are what they must be."""
        self._read(places)
        for number, place in enumerate(places):
            node = self._seen[place]
            if node is None or not self._proves(node):
                self._problems.append(f"the index has a hole at token {place}")
                return number
        return len(places)

    def _tail(self, reached: int, total: int) -> Node | None:
        """The last node behind an anchor (or the start) that is there and what it must be."""
        limit = min(total, reached + spacing(reached) - 1)
        found: list[int] = []
        at, end = reached, limit
        for step in steps(reached, self._size):
            places = range(at + step, end + 1, step)
            count = self._bisect(places, gallop=False)
            if count:
                at = places[count - 1]
                found.append(at)
            end = min(limit, at + step - 1)
        if limit == total and total % self._size and at < total:
            found.append(total)
        for place in reversed(found):
            node = self._node(place)
            if node is not None and self._proves(node):
                return node
        return None

    def _bisect(self, places: Sequence[int], *, gallop: bool) -> int:
        """Of how many `places`, from the first on, the nodes are there, given that they are there up to some place."""
        low, high = 0, len(places) + 1
        if gallop:
            probe = 1
            while probe <= len(places) and self._node(places[probe - 1]) is not None:
                low = probe
                probe *= 2
            high = min(high, probe)
        while high - low > 1:
            middle = (low + high) // 2
            if self._node(places[middle - 1]) is not None:
                low = middle
            else:
                high = middle
        return low

    def _node(self, place: int) -> Node | None:
        if place not in self._seen:
            self._read([place])
        return self._seen[place]

    def _read(self, places: Sequence[int]) -> None:
        wanted = [place for place in places if place not in self._seen]
        for place, node in zip(wanted, self._repo.each(self._get, wanted), strict=True):
            self._seen[place] = node

    def _get(self, place: int) -> Node | None:
        block = self._block(place)
        if block is None:
            return None
        key = node_key(self._ns, block.key)
        try:
            return Node.parse(read_once(self._repo, key), key)
        except NotFoundError:
            return None
        except (FormatError, IncompatibleError) as problem:
            self._problems.append(str(problem))
            return None

    def _block(self, end: int) -> BlockKey | None:
        number = bisect_left(self._ends, end)
        return self._blocks[number] if number < len(self._ends) and self._ends[number] == end else None

    def _proves(self, node: Node) -> bool:
        """Whether the node is at its place of this chain, of these tokens, and covers what it must."""
        block = self._block(node.tokens)
        start = anchor_before(node.tokens)
        before = self._block(start)
        return (
            block is not None
            and node.key == block.key
            and node.previous == (before.key if before is not None else ROOT)
            and hmac.compare_digest(node.token_hmac, interval_hmac(self._secret, self._tokens, start, node.tokens))
            and covers(node, self._full)
        )


def full_groups(descriptor: Descriptor) -> tuple[int, ...]:
    """The groups of which a prefix needs every token."""
    return tuple(i for i, group in enumerate(descriptor.groups) if group.kind not in {"sliding", "recurrent"})


def interval_hmac(secret: bytes, tokens: memoryview, start: int, end: int) -> bytes:
    """The token HMAC of a node: of the tokens since the anchor before it. `tokens`: u32 little endian bytes."""
    return token_hmac(secret, tokens[4 * start : 4 * end])[:TOKEN_HMAC_SIZE]


def covers(node: Node, groups: Iterable[int]) -> bool:
    """Whether the node's packs hold every token since the anchor before it, in each of these groups."""
    for group in groups:
        at = anchor_before(node.tokens)
        for use in sorted(use for use in node.packs if use.group == group):
            if use.first <= at:
                at = max(at, use.end)
        if at < node.tokens:
            return False
    return True


def make_nodes(
    secret: bytes, blocks: Sequence[BlockKey], tokens: memoryview, uses: Sequence[PackUse], descriptor: Descriptor
) -> list[Node]:
    """The nodes of a chain, ascending; `uses` cover it."""
    flat = token_bytes(tokens)
    total = len(flat) // 4
    ends = {block.end: block.key for block in blocks}
    nodes: list[Node] = []
    for place in points(total, descriptor.block_tokens):
        start = anchor_before(place)
        previous = ends[start] if start else ROOT
        packs = packs_of(uses, place, descriptor)
        nodes.append(Node(ends[place], place, previous, interval_hmac(secret, flat, start, place), packs))
    return nodes


def packs_of(uses: Sequence[PackUse], place: int, descriptor: Descriptor) -> tuple[PackUse, ...]:
    """What the node at `place` names of a session's packs."""
    start = anchor_before(place)
    found = (clipped(use, place, descriptor) for use in uses if use.first < place and use.end > start)
    return tuple(sorted(use for use in found if use is not None))


def clipped(use: PackUse, end: int, descriptor: Descriptor) -> PackUse | None:
    """The part of a pack's use before token `end`; None where nothing of it is: a state is valid at its end only."""
    if use.end <= end:
        return use
    if use.first >= end or descriptor.groups[use.group].recurrent:
        return None
    begin = use.first // descriptor.block_tokens * descriptor.block_tokens
    blocks = -(-(end - begin) // descriptor.block_tokens)
    return replace(use, count=end - use.first, blocks=min(use.blocks, blocks))


def read_once(repo: Repo, key: str) -> bytes:
    """A document that is never changed but replaced as a whole: one request to its home, a copy while that is down."""
    home = metadata.home_of(repo, key)
    if home.down is None:
        return home.store.get(key)
    return repo.read_meta(key)


def write_nodes(repo: Repo, nsdigest: str, nodes: Sequence[Node], whole: Callable[[Sequence[ChunkRef]], bool]) -> int:
    """Make sure that the nodes are there; returns how many were written. One that another push wrote stays, unless
    `whole` says that not all of its chunks are there any more, or it goes back to another place than the anchor before
    it: then it is replaced.
    """

    def write(node: Node) -> tuple[Node, str, tuple[ChunkRef, ...]] | bool:
        key = node_key(nsdigest, node.key)
        try:
            repo.commit_meta(key, node.to_bytes(), if_absent=True)
        except ConflictError:
            try:
                data, version = repo.read_meta_versioned(key)
            except NotFoundError:
                return False
            try:
                known = Node.parse(data, key)
            except (FormatError, IncompatibleError):
                return node, version, ()
            refs = tuple(use.chunk for use in known.packs) if known.previous == node.previous else ()
            return node, version, refs
        return True

    written = 0
    for result in repo.each(write, nodes):
        if isinstance(result, bool):
            written += result
            continue
        node, version, refs = result
        if version and not (refs and whole(refs)):
            try:
                repo.commit_meta(node_key(nsdigest, node.key), node.to_bytes(), if_version=version)
            except ConflictError:
                continue  # another push mends it just now
            written += 1
    return written


def remove_nodes(repo: Repo, nsdigest: str, keys: Sequence[bytes], doomed: Callable[[ChunkRef], bool]) -> int:
    """Remove, from the last to the first, the nodes of a chain that name a doomed chunk. Returns how many went."""
    names = [node_key(nsdigest, key) for key in keys]

    def read(name: str) -> bool:
        try:
            return any(doomed(use.chunk) for use in Node.parse(read_once(repo, name), name).packs)
        except NotFoundError:
            return False
        except (FormatError, IncompatibleError):
            return True

    count = 0
    for name, goes in reversed(list(zip(names, repo.each(read, names), strict=True))):
        if goes:
            repo.delete_meta(name)
            count += 1
    return count


def sweep(repo: Repo, chunks: Mapping[str, object]) -> int:
    """Remove nodes that name a chunk which is not among `chunks` (all that were listed) and not there now either.
    Reads every node. Returns how many went.
    """
    keys = [info.key for info in repo.list_meta(INDEX)]

    def dangling(key: str) -> bool:
        try:
            node = Node.parse(read_once(repo, key), key)
        except NotFoundError:
            return False
        except (FormatError, IncompatibleError):
            return True
        return any(use.chunk.name not in chunks and not _is_there(repo, use.chunk) for use in node.packs)

    doomed = [key for key, goes in zip(keys, repo.each(dangling, keys), strict=True) if goes]
    for key in doomed:
        repo.delete_meta(key)
    return len(doomed)


def _is_there(repo: Repo, ref: ChunkRef) -> bool:
    """Whether any member that should have the chunk shows it; an unclear answer counts as yes."""
    for member in repo.locate(ref.digest):
        try:
            member.store.stat(ref.key)
        except NotFoundError:
            continue
        except KvctlError:
            return True
        return True
    return False
