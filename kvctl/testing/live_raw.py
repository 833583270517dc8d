"""Raw access for the live run of the contracts: the same objects, past the store under test.

Files through the file system and S3 through boto3, so that two errors of one client cannot hide each other; any
other scheme through a second instance of its own store, which `about` says.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from kvctl.core.addresses import StoreConfig
from kvctl.core.errors import NotFoundError
from kvctl.transports.boto import bucket_and_prefix, plain_client
from kvctl.transports.registry import open_store


@dataclass(frozen=True)
class Raw:
    """`about` says by what way. `start_upload` is None where no unfinished upload can be made from here."""

    about: str
    put: Callable[[str, bytes], None]
    get: Callable[[str], bytes]
    start_upload: Callable[[str], None] | None
    close: Callable[[], None]


def raw_access(config: StoreConfig) -> Raw:
    """The raw way to the objects of `config`. Raises KvctlError as opening the store does."""
    if config.scheme == "file":
        return _files(config.url.removeprefix("file://"))
    if config.scheme == "s3":
        return _s3(config)
    return _second(config)


def _files(root: str) -> Raw:
    def path(key: str) -> str:
        found = os.path.join(root, key)
        os.makedirs(os.path.dirname(found), exist_ok=True)
        return found

    def put(key: str, data: bytes) -> None:
        with open(path(key), "wb") as file:
            file.write(data)

    def get(key: str) -> bytes:
        try:
            with open(os.path.join(root, key), "rb") as file:
                return file.read()
        except FileNotFoundError:
            raise NotFoundError(key) from None

    def start_upload(key: str) -> None:
        with open(path(f"{key}.123.kvctl-tmp"), "wb") as file:
            file.write(b"half")

    return Raw("the file system", put, get, start_upload, lambda: None)


def _s3(config: StoreConfig) -> Raw:
    client = plain_client(config)
    bucket, start = bucket_and_prefix(config)

    def put(key: str, data: bytes) -> None:
        client.put_object(Bucket=bucket, Key=start + key, Body=data)

    def get(key: str) -> bytes:
        try:
            return client.get_object(Bucket=bucket, Key=start + key)["Body"].read()
        except client.exceptions.NoSuchKey:
            raise NotFoundError(key) from None

    def start_upload(key: str) -> None:
        client.create_multipart_upload(Bucket=bucket, Key=start + key)

    return Raw("boto3", put, get, start_upload, client.close)


def _second(config: StoreConfig) -> Raw:
    store = open_store(config)

    def put(key: str, data: bytes) -> None:
        store.put(key, data)

    return Raw(f"a second instance of the {config.scheme} store", put, store.get, None, store.close)
