"""How an S3 store is reached: credentials, region and endpoints by the AWS chain. Holds the boto3 clients.

boto3 is imported here, when the first store is opened.
"""

from __future__ import annotations

import base64
import hashlib
import os
import ssl
import threading
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import boto3
import botocore.exceptions as boto_errors
import botocore.session
from botocore import UNSIGNED
from botocore.config import Config
from botocore.loaders import Loader

from kvctl.core.errors import AuthError, ConfigError, EnvError
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


class Access:
    """Credentials, region and clients of one store; shared by its control calls and its bulk transports."""

    def __init__(self, settings: S3Settings) -> None:
        with _LOCK:
            self._session = _make_session(settings)
            self.region = settings.region or self._session.region_name or "us-east-1"
        self.settings = replace(settings, region=self.region)
        self._clients: dict[str, S3Client] = {}
        self._source: object = None
        self.endpoints: tuple[str, ...] = settings.endpoints or (self._default_endpoint(),)

    def _default_endpoint(self) -> str:
        client = self._make_client(None)
        endpoint = str(client.meta.endpoint_url).rstrip("/")
        if is_aws(endpoint):
            self._clients[endpoint] = client  # keeps botocore's own rules for AWS
        else:
            client.close()
        return endpoint

    def path_style(self, endpoint: str) -> bool:
        return uses_path_style(endpoint, self.settings.bucket, self.settings.addressing)

    def client(self, endpoint: str) -> S3Client:
        """The control client for one of `endpoints`."""
        with _LOCK:
            found = self._clients.get(endpoint)
            if found is None:
                found = self._clients[endpoint] = self._make_client(endpoint)
            return found

    def _make_client(self, endpoint: str | None) -> S3Client:
        """None: where AWS_ENDPOINT_URL_S3, the profile or AWS itself point."""
        settings = self.settings
        style = settings.addressing
        if endpoint is not None:
            style = "path" if self.path_style(endpoint) else "virtual"
        config = Config(
            region_name=self.region,
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

    def credentials(self) -> Credentials | None:
        """What to sign with now (refreshed by botocore when temporary); None for anonymous access."""
        if self.settings.anonymous:
            return None
        with _LOCK:
            if self._source is None:
                self._source = self._find_credentials()
            try:
                frozen = self._source.get_frozen_credentials()  # type: ignore[attr-defined] # botocore's credentials
            except boto_errors.BotoCoreError as problem:
                raise AuthError(
                    f"{self.settings.url}: the credentials cannot be renewed", cause=str(problem), hint="log in again"
                ) from problem
        return Credentials(frozen.access_key, frozen.secret_key, frozen.token)

    def _find_credentials(self) -> object:
        try:
            found = self._session.get_credentials()
        except boto_errors.BotoCoreError as problem:
            raise AuthError(f"{self.settings.url}: no usable credentials", cause=str(problem)) from problem
        if found is None:
            raise no_credentials(self.settings.url)
        return found

    def tls_context(self) -> ssl.SSLContext:
        try:
            return ssl.create_default_context(cafile=self.settings.ca_bundle)
        except (ssl.SSLError, OSError) as problem:
            raise EnvError(f"the CA bundle {self.settings.ca_bundle} cannot be used", cause=str(problem)) from problem

    def is_aws(self) -> bool:
        return all(is_aws(endpoint) for endpoint in self.endpoints)

    def close(self) -> None:
        with _LOCK:
            for client in self._clients.values():
                client.close()
            self._clients.clear()


def no_credentials(url: str) -> AuthError:
    return AuthError(
        f"{url}: no credentials found",
        hint="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or anonymous=true for public buckets",
    )
