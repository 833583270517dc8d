"""Which secret the keys of a tenant's blocks are made under, in one repo; and the repo's namespaces."""

from __future__ import annotations

from kvctl.core.errors import ConfigError, ConflictError, IncompatibleError, IntegrityError, NotFoundError
from kvctl.kv.identity import Descriptor
from kvctl.kv.index import read_once
from kvctl.kv.tokens import domain_secret, key_id
from kvctl.repo.chunks import ChunkRef, digest_of
from kvctl.repo.epochs import write_format
from kvctl.repo.layout import SESSIONS
from kvctl.repo.repo import Repo

NAMESPACES = "ns/"


def check_key(repo: Repo, master: bytes | None) -> None:
    """Raises ConfigError when the repo's sessions were keyed under a secret and none is at hand, IncompatibleError
    when it is another one.
    """
    ours, theirs = key_id(master), repo.format.key_id
    if theirs is not None and ours is None:
        raise ConfigError(
            f"repo {repo.id[:8]} keys its sessions under the secret {theirs}, and none is configured",
            hint="set kv_key_file of this repo to the file that holds it",
        )
    if theirs is not None and ours != theirs:
        raise IncompatibleError(
            f"the kv_key_file of repo {repo.id[:8]} is another one",
            cause=f"its key id is {ours}, the repo's is {theirs}",
            hint="use the key file that the repo's sessions were pushed with",
        )


def secret_of(repo: Repo, master: bytes | None, tenant: str) -> bytes:
    """The tenant's domain secret for reading. Raises as `check_key`."""
    check_key(repo, master)
    return domain_secret(master if repo.format.key_id is not None else None, tenant)


def adopt_key(repo: Repo, master: bytes | None, tenant: str) -> bytes:
    """The tenant's domain secret for writing; the first push with a key makes it the repo's. Raises as `check_key`, and
    ConfigError when the repo has sessions that were pushed without one.
    """
    check_key(repo, master)
    if master is not None and repo.format.key_id is None:
        if repo.list_meta(SESSIONS):
            raise ConfigError(
                f"repo {repo.id[:8]} has sessions that were pushed without a key",
                hint="leave kv_key_file out for this repo, or copy its sessions to a new one with `kvctl kv cp`",
            )
        repo.require_all("make the key the repo's own")
        write_format(repo, repo.format.next(key_id=key_id(master)))
    return domain_secret(master, tenant)


def namespace_key(nsdigest: str) -> str:
    return f"{NAMESPACES}{nsdigest}.json"


def read_descriptor(repo: Repo, nsdigest: str) -> Descriptor:
    """Raises NotFoundError, FormatError, IntegrityError when the document is not the one its name says."""
    key = namespace_key(nsdigest)
    found = Descriptor.parse(read_once(repo, key), key)
    if found.digest != nsdigest:
        raise IntegrityError(f"{key} is not what its name says", cause=f"its digest is {found.digest}")
    return found


def write_descriptor(repo: Repo, descriptor: Descriptor) -> None:
    key = namespace_key(descriptor.digest)
    try:
        read_descriptor(repo, descriptor.digest)
    except NotFoundError:
        try:
            repo.commit_meta(key, descriptor.canonical(), if_absent=True)
        except ConflictError:
            read_descriptor(repo, descriptor.digest)


def read_chunk(repo: Repo, ref: ChunkRef) -> bytes:
    """A whole small chunk, verified by its digest, from any replica. Raises IntegrityError when none is right."""
    problems: list[str] = []
    for member in repo.locate(ref.digest):
        if member.down is not None:
            problems.append(str(member.down))
            continue
        try:
            data = member.store.get(ref.key)
        except NotFoundError:
            problems.append(f"{member.name} has none")
            continue
        if len(data) == ref.size and digest_of(data) == ref.digest:
            return data
        problems.append(f"{member.name}'s is damaged")
    raise IntegrityError(
        f"no readable copy of chunk {ref.name} in repo {repo.id[:8]}",
        cause="; ".join(problems),
        hint="`kvctl repo check` lists the holes",
    )
