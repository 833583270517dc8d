"""Which model an address means, without reading weights: its name, its digest where known, its small files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvctl.core.addresses import StoreConfig, parse_store
from kvctl.core.context import Context
from kvctl.core.errors import EnvError, NotFoundError
from kvctl.repo.repo import Repo
from kvctl.transfer.lanes import open_member
from kvctl.weights import stored
from kvctl.weights.digests import parse_digests
from kvctl.weights.sources import split_source

LARGEST: Final = 64 << 20  # bytes; the tokenizer of many languages has tens of MB
SMALL_FILES: Final = (
    *("config.json", "tokenizer.json", "tekken.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt"),
    *("merges.txt", "added_tokens.json", "special_tokens_map.json", "adapter_config.json"),
)


@dataclass(frozen=True, slots=True)
class KnownModel:
    """`name`: of a repo's model, or the last part of a path. `digest`: the model digest, None where nobody made it.
    `files`: its small files.
    """

    name: str
    digest: str | None
    files: Mapping[str, bytes] = field(repr=False)


def identify_model(
    address: str,
    repo: Sequence[StoreConfig] | None,
    version: str | None,
    ctx: Context,
    *,
    digests: str | None = None,
) -> KnownModel:
    """`repo` None: `address` is a path or URL, whose digest is known only from the sidecar `digests` (`kvctl models
    digest`): reading all weights for it is never done here. Raises NotFoundError for an address with no model.
    """
    known = None if digests is None else parse_digests(read_file(digests), digests).digest
    if repo is not None:
        with Repo.open(repo, ctx) as opened:
            _, key = stored.resolve(opened, address, version)
            manifest = stored.read_manifest(opened, key)
            files = stored.read_sidecars(opened, manifest)
        return KnownModel(address, known or manifest.digest, files)
    config, prefix = split_source(parse_store(address))
    folder = "" if prefix.endswith(".safetensors") else prefix
    member = open_member(config.url, 0, config, ctx)
    found: dict[str, bytes] = {}
    try:
        for name in SMALL_FILES:
            try:
                info = member.store.stat(folder + name)
                if info.size <= LARGEST:
                    found[name] = member.store.get(folder + name)
            except NotFoundError:
                continue
    finally:
        member.store.close()
    if not found:
        raise NotFoundError(
            f"there is no model at {config.url}",
            cause="none of config.json and tokenizer files is there",
            hint="name a model folder in the Hugging Face layout",
        )
    return KnownModel(config.url.rstrip("/").rpartition("/")[2], known, found)


def read_file(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        raise NotFoundError(f"there is no {path}", hint="`kvctl models digest URL --out FILE` makes it") from None
    except OSError as error:
        raise EnvError(f"{path} cannot be read", cause=error.strerror) from error
