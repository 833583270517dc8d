"""Keys and tokens of the storage node's protocol (and its port), for both ends. Pure but for `read_key_file` and for
randomness.

A node has a master key. Clients get scoped keys derived from it: rights (ro or rw) and a prefix of keys. Each
request carries a token of its own, an HMAC under the scoped key over what the request asks for; the node derives
the scoped key again from the token's scope, so it keeps no list of clients. `kvctl/help/nodes.md` specifies it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import itertools
import os
import re
import secrets
import stat
import time
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal, NamedTuple

from kvctl.core.errors import AuthError, ConfigError

Rights = Literal["ro", "rw"]

DEFAULT_PORT: Final = 7780

TOKEN_HEADER: Final = "x-kvctl-token"  # noqa: S105 - a header's name
RDMA_HEADERS: Final = ("x-scal-rdma", "x-rdma-info")
LIFE: Final = 60  # seconds: how long our client's tokens are good for
MAX_LIFE: Final = 600  # what a node accepts at most, so that its nonce cache has an end
_LENGTHS: Final = tuple(length.to_bytes(4, "little").decode("latin-1") for length in range(256))

_MASTER: Final = re.compile(r"^kvctl-node-master\.v1\.([0-9a-f]{64})$")
_SCOPED: Final = re.compile(r"^kvctl-node-key\.v1\.([0-9a-f]{8})\.(ro|rw)\.([A-Za-z0-9_-]*)\.([0-9a-f]{64})$")
_TOKEN: Final = re.compile(
    r"^v1\.([0-9a-f]{8})\.([0-9]{1,12})\.(([0-9a-f]{1,12})-[0-9a-f]{16,64})"  # key id, expiry, nonce, issued
    r"\.(ro|rw):([A-Za-z0-9_-]{0,1400})\.([0-9a-f]{64})$"  # rights, prefix, mac
)


# This and `Token` are tuples: there is one of each per request, and a frozen dataclass takes four times as long.
class Asked(NamedTuple):
    """What a token is bound to. `target` is the request target as sent (path and query, encoded); headers as sent,
    empty where absent. `rdma`: the RDMA token.
    """

    method: str
    target: str
    range: str = ""
    if_match: str = ""
    if_none_match: str = ""
    rdma: str = ""


class Token(NamedTuple):
    """A token taken apart, not yet verified. Times in Unix seconds."""

    key_id: str
    expiry: int
    issued: float
    nonce: str
    rights: Rights
    prefix: str
    mac: str


class _Nonces:
    """Hex digits that no other token has: random ones of this process, and a number."""

    prefix = os.urandom(12).hex()
    numbers = itertools.count()

    @classmethod
    def renew(cls) -> None:
        cls.prefix = os.urandom(12).hex()


os.register_at_fork(after_in_child=_Nonces.renew)


@dataclass(frozen=True, slots=True)
class ScopedKey:
    """What a client holds. `prefix` is empty (everything) or a folder of keys, without slashes at its ends."""

    key_id: str
    rights: Rights
    prefix: str
    secret: bytes

    def __repr__(self) -> str:
        return f"ScopedKey({self.key_id}, {self.rights}, {self.prefix!r}, ***)"

    def text(self) -> str:
        """The line of a key file."""
        return f"kvctl-node-key.v1.{self.key_id}.{self.rights}.{_encode(self.prefix)}.{self.secret.hex()}"

    def token(self, asked: Asked, *, life: int = LIFE, now: float | None = None) -> str:
        """A token for one request, good for `life` seconds."""
        moment = time.time() if now is None else now
        expiry = int(moment) + life
        nonce = f"{int(moment * 1000):x}-{_Nonces.prefix}{next(_Nonces.numbers):08x}"
        scope = f"{self.rights}:{_encode(self.prefix)}"
        mac = token_mac(self.secret, asked, expiry, nonce)
        return f"v1.{self.key_id}.{expiry}.{nonce}.{scope}.{mac}"


@dataclass(frozen=True, slots=True)
class MasterKey:
    """What a node holds."""

    secret: bytes

    def __repr__(self) -> str:
        return f"MasterKey({self.key_id}, ***)"

    @classmethod
    def make(cls) -> MasterKey:
        return cls(secrets.token_bytes(32))

    @property
    def key_id(self) -> str:
        return hashlib.sha256(b"kvctl-node key id\0" + self.secret).hexdigest()[:8]

    def text(self) -> str:
        """The line of a key file."""
        return f"kvctl-node-master.v1.{self.secret.hex()}"

    def scoped(self, rights: Rights, prefix: str) -> ScopedKey:
        folder = prefix.strip("/")
        secret = hmac.digest(self.secret, _frame("kvctl-node scope v1", rights, folder), "sha256")
        return ScopedKey(self.key_id, rights, folder, secret)


def token_mac(secret: bytes, asked: Asked, expiry: int, nonce: str) -> str:
    begun, outer = _hmac_states(secret, asked.method, asked.target)
    inner = begun.copy()
    inner.update(_frame_tail(asked, str(expiry), nonce))
    sealed = outer.copy()
    sealed.update(inner.digest())
    return sealed.hexdigest()


@lru_cache(maxsize=1024)
def _hmac_states(secret: bytes, method: str, target: str) -> tuple[hashlib._Hash, hashlib._Hash]:
    """HMAC-SHA256 (RFC 2104) up to where the parts of the message come in that differ between requests for one object:
    setting it up anew costs ten times the hashing of a token's few bytes.
    """
    block = secret.ljust(64, b"\0")
    inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in block))
    inner.update(_frame("kvctl-node token v1", method, target))
    return inner, hashlib.sha256(bytes(byte ^ 0x5C for byte in block))


def parse_token(text: str) -> Token | None:
    """None for what is no token of this version."""
    match = _TOKEN.match(text)
    if match is None:
        return None
    key_id, expiry, nonce, issued, said, encoded, mac = match.groups()
    try:
        prefix = _decode(encoded)
    except ValueError:
        return None
    rights: Rights = "rw" if said == "rw" else "ro"
    return Token(key_id, int(expiry), int(issued, 16) / 1000, nonce, rights, prefix, mac)


def covers(prefix: str, key: str) -> bool:
    """Whether `key` is the folder `prefix` or inside it."""
    return not prefix or key == prefix or key.startswith(f"{prefix}/")


def parse_keys(text: str, where: str) -> list[MasterKey | ScopedKey]:
    """The keys of a key file's text; empty lines and lines that start with '#' are skipped. Raises ConfigError,
    which shows no secret.
    """
    found: list[MasterKey | ScopedKey] = []
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        if match := _MASTER.match(stripped):
            found.append(MasterKey(bytes.fromhex(match[1])))
        elif match := _SCOPED.match(stripped):
            rights: Rights = "rw" if match[2] == "rw" else "ro"
            try:
                prefix = _decode(match[3])
            except ValueError:
                raise ConfigError(f"{where}:{number}: the prefix of the key is damaged") from None
            found.append(ScopedKey(match[1], rights, prefix, bytes.fromhex(match[4])))
        else:
            raise ConfigError(f"{where}:{number}: not a storage node's key", hint="`kvctl node key` makes one")
    if not found:
        raise ConfigError(f"{where} holds no key", hint="`kvctl node key` makes one")
    return found


def read_key_file(path: str) -> list[MasterKey | ScopedKey]:
    """The keys in a file. Raises ConfigError (missing, malformed) or AuthError (others could read it)."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(1 << 20)
    except OSError as problem:
        raise ConfigError(f"the key file {path} cannot be read", cause=problem.strerror) from problem
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise AuthError(
            f"the key file {path} can be used by others", cause=f"mode {stat.S_IMODE(mode):o}", hint=f"chmod 600 {path}"
        )
    return parse_keys(text, path)


def _frame(*parts: str) -> bytes:
    """Length-prefixed, so that no two different lists of parts are the same bytes."""
    out = b""
    for part in parts:
        data = part.encode("utf-8", "surrogateescape")
        out += len(data).to_bytes(4, "little") + data
    return out


def _frame_tail(asked: Asked, expiry: str, nonce: str) -> bytes:
    """`_frame` of what differs between requests for one object, in one go where it is short and ASCII, as it is."""
    _, _, span, match, none, rdma = asked
    if not (span.isascii() and match.isascii() and none.isascii() and rdma.isascii()):
        return _frame(span, match, none, rdma, expiry, nonce)
    size = _LENGTHS
    try:
        return (
            f"{size[len(span)]}{span}{size[len(match)]}{match}{size[len(none)]}{none}{size[len(rdma)]}{rdma}"
            f"{size[len(expiry)]}{expiry}{size[len(nonce)]}{nonce}"
        ).encode("latin-1")
    except IndexError:
        return _frame(span, match, none, rdma, expiry, nonce)


@lru_cache(maxsize=1024)
def _encode(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


@lru_cache(maxsize=1024)
def _decode(text: str) -> str:
    try:
        found = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode()
    except (binascii.Error, UnicodeDecodeError) as problem:
        raise ValueError(str(problem)) from None
    if _encode(found) != text:
        raise ValueError("not canonical")
    return found
