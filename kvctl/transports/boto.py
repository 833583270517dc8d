"""A plain boto3 client for an S3 store's address: the way past the `s3` plug-in, for whoever compares or measures it.

The plug-in does not use this. boto3 is imported when it is called.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kvctl.core.addresses import StoreConfig

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client


def plain_client(config: StoreConfig, endpoint: str | None = None) -> S3Client:
    """A client for `endpoint` (else the store's first, else boto3's own choice) with the store's options."""
    import boto3
    from botocore import UNSIGNED
    from botocore.config import Config

    options = {name.replace("-", "_"): value for name, value in config.options.items()}
    chosen = endpoint or (config.endpoints[0] if config.endpoints else None)
    own = chosen or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    at_aws = not own or (urlsplit(own).hostname or "").endswith((".amazonaws.com", ".amazonaws.com.cn"))
    style = options.get("addressing", "auto")
    if style == "auto":
        style = "auto" if at_aws else "path"
    unsigned = "true" in {options.get("anonymous"), options.get("no_sign_request")}
    session = boto3.session.Session(
        profile_name=options.get("profile") or options.get("aws_profile"), region_name=options.get("region")
    )
    settings: Any = {"addressing_style": style}  # Any: the stubs want literals
    client: S3Client = session.client(
        "s3",
        endpoint_url=chosen,
        verify=options.get("ca_bundle"),
        region_name=session.region_name or "us-east-1",
        config=Config(
            s3=settings,
            signature_version=UNSIGNED if unsigned else "s3v4",
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
    )
    return client


def bucket_and_prefix(config: StoreConfig) -> tuple[str, str]:
    """The bucket, and the prefix: empty or ending with '/'."""
    bucket, _, prefix = config.url.removeprefix("s3://").partition("/")
    prefix = prefix.strip("/")
    return bucket, f"{prefix}/" if prefix else ""
