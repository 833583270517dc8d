"""The places that the contracts run on: a store of each kind, and raw access past it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import boto3

from kvctl.core.addresses import StoreConfig
from kvctl.core.errors import NotFoundError
from kvctl.testing.faulty_s3 import FaultyS3
from kvctl.testing.seaweed import SeaweedFS
from kvctl.testing.store_contract import StoreCase
from kvctl.transports.mem import MemStore
from kvctl.transports.registry import open_store
from kvctl_s3.store import S3Store

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

_NAMES = itertools.count()


def mem_case(**options: str) -> StoreCase:
    name = f"contract-{next(_NAMES)}"
    raw = MemStore(name)
    return StoreCase(
        open_store(StoreConfig(f"mem://{name}/pre", (), options)), _under(raw), lambda key: raw.get(f"pre/{key}")
    )


def _under(raw: MemStore) -> Callable[[str, bytes], None]:
    def put(key: str, data: bytes) -> None:
        raw.put(f"pre/{key}", data)

    return put


def file_case(folder: Path) -> StoreCase:
    def raw_put(key: str, data: bytes) -> None:
        path = folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def raw_get(key: str) -> bytes:
        try:
            return (folder / key).read_bytes()
        except FileNotFoundError:
            raise NotFoundError(key) from None

    def start_upload(key: str) -> None:
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{key}.123.kvctl-tmp").write_bytes(b"half")

    folder.mkdir(exist_ok=True)
    return StoreCase(open_store(StoreConfig(f"file://{folder}")), raw_put, raw_get, start_upload)


def faulty_case(server: FaultyS3) -> StoreCase:
    def raw_put(key: str, data: bytes) -> None:
        server.put(f"pre/{key}", data)

    def raw_get(key: str) -> bytes:
        try:
            return server.objects["bucket", f"pre/{key}"].data
        except KeyError:
            raise NotFoundError(key) from None

    return StoreCase(open_store(server.store("pre")), raw_put, raw_get, page=server.page_size)


@cache
def _raw_client(endpoint: str) -> S3Client:
    return boto3.session.Session().client("s3", endpoint_url=endpoint)


def seaweed_case(server: SeaweedFS, config: StoreConfig) -> StoreCase:
    client = _raw_client(server.endpoint)
    bucket, _, prefix = config.url.removeprefix("s3://").partition("/")

    def raw_put(key: str, data: bytes) -> None:
        client.put_object(Bucket=bucket, Key=f"{prefix}/{key}", Body=data)

    def raw_get(key: str) -> bytes:
        try:
            return client.get_object(Bucket=bucket, Key=f"{prefix}/{key}")["Body"].read()
        except client.exceptions.NoSuchKey:
            raise NotFoundError(key) from None

    def start_upload(key: str) -> None:
        client.create_multipart_upload(Bucket=bucket, Key=f"{prefix}/{key}")

    store = open_store(config)
    assert isinstance(store, S3Store)
    store.page_size = 9
    return StoreCase(store, raw_put, raw_get, start_upload, page=9)
