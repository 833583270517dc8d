"""The boto3 side of an S3 store: sessions, the credential chain, clients. Imported only when it is needed, since
that costs 0.4 s of CPU: reading with keys from the environment and a known endpoint does without.
"""

from __future__ import annotations

import base64
import hashlib
import os
import threading
from functools import cache
from typing import TYPE_CHECKING, Any

import boto3
import botocore.exceptions as boto_errors
import botocore.session
from botocore import UNSIGNED
from botocore.config import Config
from botocore.loaders import Loader

from kvctl.core.errors import AuthError, ConfigError
from kvctl_s3.errors import no_credentials
from kvctl_s3.settings import S3Settings, is_aws, uses_path_style
from kvctl_s3.signing import Credentials

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

_LOCK = threading.RLock()  # boto3 sessions are not thread-safe


@cache
def _loader() -> Loader:
    """Shared by all sessions: it keeps the parsed service model, which costs 100 ms of CPU to load."""
    loader: Loader = botocore.session.get_session().get_component("data_loader")
    return loader


def _make_session(settings: S3Settings) -> boto3.session.Session:
    inner = botocore.session.get_session()
    inner.register_component("data_loader", _loader())
    custom = settings.endpoints or [os.environ.get(name, "") for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")]
    try:
        session = boto3.session.Session(
            botocore_session=inner, profile_name=settings.profile, region_name=settings.region
        )
        if any(endpoint and not is_aws(endpoint) for endpoint in custom):
            # no server outside AWS takes an EC2 role, and asking for one waits for an address that may not answer
            inner.get_component("credential_provider").remove("iam-role")
    except boto_errors.ProfileNotFound as problem:
        raise ConfigError(
            f"there is no AWS profile {settings.profile!r}",
            cause=str(problem),
            hint="see `aws configure list-profiles`",
        ) from problem
    except boto_errors.BotoCoreError as problem:
        raise ConfigError("the AWS configuration cannot be used", cause=str(problem)) from problem
    return session


def _no_redirects(params: dict[str, object], **_: object) -> None:
    """A bucket in another region is an error to report: the bulk path would not follow either."""
    context = params.get("context")
    if isinstance(context, dict):
        context["s3_redirect"] = {**context.get("s3_redirect", {}), "redirected": True}


def _plain_md5(params: dict[str, object], **_: object) -> None:
    """Batch deletes must carry a checksum; every S3 server knows Content-MD5, older ones know nothing newer."""
    body, headers, context = params.get("body"), params.get("headers"), params.get("context")
    if isinstance(body, bytes) and hasattr(headers, "__setitem__") and isinstance(context, dict):
        digest = hashlib.md5(body, usedforsecurity=False).digest()
        headers["Content-MD5"] = base64.b64encode(digest).decode()
        context.get("checksum", {}).pop("request_algorithm", None)


class Aws:
    """What botocore knows for one store. Thread-safe."""

    def __init__(self, settings: S3Settings) -> None:
        self._settings = settings
        self._clients: dict[str, S3Client] = {}
        self._source: Any = None  # Any: one of botocore's credentials classes
        with _LOCK:
            self._session = _make_session(settings)
            self.region: str | None = self._session.region_name

    def default_endpoint(self, region: str) -> str:
        """Where AWS_ENDPOINT_URL_S3, the profile or AWS itself point."""
        client = self._make_client(None, region)
        endpoint = str(client.meta.endpoint_url).rstrip("/")
        if is_aws(endpoint):
            self._clients[endpoint] = client  # keeps botocore's own rules for AWS
        else:
            client.close()
        return endpoint

    def client(self, endpoint: str, region: str) -> S3Client:
        with _LOCK:
            found = self._clients.get(endpoint)
            if found is None:
                found = self._clients[endpoint] = self._make_client(endpoint, region)
            return found

    def _make_client(self, endpoint: str | None, region: str) -> S3Client:
        settings = self._settings
        style = settings.addressing
        if endpoint is not None:
            style = "path" if uses_path_style(endpoint, settings.bucket, settings.addressing) else "virtual"
        config = Config(
            region_name=region,
            signature_version=UNSIGNED if settings.anonymous else "s3v4",
            s3={"addressing_style": style},
            retries={"total_max_attempts": 1, "mode": "standard"},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            connect_timeout=settings.connect_timeout,
            read_timeout=settings.timeout,
            max_pool_connections=32,
            tcp_keepalive=True,
        )
        try:
            client: S3Client = self._session.client(
                "s3", endpoint_url=endpoint, config=config, verify=settings.ca_bundle
            )
        except (boto_errors.BotoCoreError, ValueError) as problem:
            raise ConfigError(f"{settings.url}: {problem}") from problem
        client.meta.events.register("before-call.s3", _no_redirects)
        client.meta.events.register("before-call.s3.DeleteObjects", _plain_md5)
        return client

    def credentials(self) -> Credentials:
        """What to sign with now; temporary ones are renewed by botocore. Raises AuthError."""
        with _LOCK:
            try:
                if self._source is None:
                    self._source = self._session.get_credentials()
                if self._source is None:
                    raise no_credentials(self._settings.url)
                frozen = self._source.get_frozen_credentials()
            except boto_errors.BotoCoreError as problem:
                raise AuthError(
                    f"{self._settings.url}: the credentials cannot be used", cause=str(problem), hint="log in again"
                ) from problem
        return Credentials(frozen.access_key, frozen.secret_key, frozen.token)

    def close(self) -> None:
        with _LOCK:
            for client in self._clients.values():
                client.close()
            self._clients.clear()
