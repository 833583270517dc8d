"""How an S3 store is reached: region, endpoints and credentials by the AWS chain.

The environment is read here; what needs more of the chain (profiles, SSO, roles) asks boto3, which is imported then.
"""

from __future__ import annotations

import os
import ssl
import threading
from functools import cached_property
from typing import TYPE_CHECKING

from kvctl.core.errors import EnvError
from kvctl_s3.settings import S3Settings, check_endpoint, is_aws
from kvctl_s3.signing import Credentials

if TYPE_CHECKING:
    from kvctl_s3.aws import Aws

_LOCK = threading.RLock()


class Access:
    """Region, endpoints and credentials of one store; shared by its control calls and its bulk transports."""

    def __init__(self, settings: S3Settings) -> None:
        self.settings = settings
        self._aws: Aws | None = None
        if settings.profile is not None:
            self.aws  # noqa: B018 - a profile that does not exist is told at once
        self.region = self._find_region()
        self.endpoints = settings.endpoints or (self._find_endpoint(),)

    @property
    def aws(self) -> Aws:
        with _LOCK:
            if self._aws is None:
                from kvctl_s3.aws import Aws

                self._aws = Aws(self.settings)
            return self._aws

    def _find_region(self) -> str:
        named = self.settings.region
        if named is None and self.settings.profile is None:
            named = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
            if named is None and not os.path.exists(_config_file()):
                named = "us-east-1"
        return named or self.aws.region or "us-east-1"

    def _find_endpoint(self) -> str:
        ignored = os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true"
        named = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        if named and not ignored:
            return check_endpoint(named)
        return self.aws.default_endpoint(self.region)

    def credentials(self) -> Credentials | None:
        """What to sign with now; None for anonymous access. Raises AuthError."""
        if self.settings.anonymous:
            return None
        key, secret = os.environ.get("AWS_ACCESS_KEY_ID"), os.environ.get("AWS_SECRET_ACCESS_KEY")
        if key and secret and self.settings.profile is None:  # first in the chain
            return Credentials(key, secret, os.environ.get("AWS_SESSION_TOKEN") or None)
        return self.aws.credentials()

    @cached_property
    def tls_context(self) -> ssl.SSLContext:
        try:
            return ssl.create_default_context(cafile=self.settings.ca_bundle)
        except (ssl.SSLError, OSError) as problem:
            raise EnvError(f"the CA bundle {self.settings.ca_bundle} cannot be used", cause=str(problem)) from problem

    def is_aws(self) -> bool:
        return all(is_aws(endpoint) for endpoint in self.endpoints)

    def close(self) -> None:
        if self._aws is not None:
            self._aws.close()


def _config_file() -> str:
    return os.environ.get("AWS_CONFIG_FILE") or os.path.expanduser("~/.aws/config")
