"""What a user says about an S3 store, checked: bucket, prefix, endpoints, options. Pure but for the environment."""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass
from typing import Final, Literal
from urllib.parse import urlsplit

from kvctl.core.addresses import StoreConfig, split_url
from kvctl.core.errors import ConfigError, UsageError

Addressing = Literal["auto", "path", "virtual"]
Switch = Literal["auto", "true", "false"]

_ALIASES: Final = {"aws_profile": "profile", "no_sign_request": "anonymous"}
_KNOWN: Final = frozenset(
    {"region", "profile", "anonymous", "addressing", "ca_bundle", "conditional_put", "connect_timeout", "timeout"}
)
_AWS_HOST: Final = re.compile(r"(^|\.)amazonaws\.com(\.cn)?$")
# RFC 1123 label of the length that S3 allows; dots excluded, since certificates' wildcards do not match them
_DNS_BUCKET: Final = re.compile(r"^[a-z0-9][a-z0-9-]{1,61}[a-z0-9]$")


@dataclass(frozen=True, slots=True)
class S3Settings:
    """`prefix` is empty or ends with '/'. Timeouts in seconds: to connect, and without a byte moving."""

    url: str
    bucket: str
    prefix: str = ""
    endpoints: tuple[str, ...] = ()
    region: str | None = None
    profile: str | None = None
    anonymous: bool = False
    addressing: Addressing = "auto"
    ca_bundle: str | None = None
    conditional_put: Switch = "auto"
    connect_timeout: float = 5.0
    timeout: float = 30.0


def parse_settings(config: StoreConfig) -> S3Settings:
    """Raises UsageError or ConfigError for what cannot be meant."""
    bucket, _, prefix = config.url.removeprefix("s3://").partition("/")
    if not bucket:
        raise UsageError(f"{config.url} names no bucket", hint="write s3://BUCKET/PREFIX")
    options: dict[str, str] = {}
    for name, value in config.options.items():
        name = _ALIASES.get(name, name).replace("-", "_")
        options[name] = value
    known = {
        "region",
        "profile",
        "anonymous",
        "addressing",
        "ca_bundle",
        "conditional_put",
        "connect_timeout",
        "timeout",
    }
    if unknown := sorted(set(options) - known):
        raise UsageError(
            f"{config.url}: an s3 store has no option {unknown[0]!r}", hint=f"it has {', '.join(sorted(known))}"
        )
    prefix = prefix.strip("/")
    return S3Settings(
        url=config.url,
        bucket=bucket,
        prefix=f"{prefix}/" if prefix else "",
        endpoints=tuple(check_endpoint(endpoint) for endpoint in config.endpoints),
        region=options.get("region"),
        profile=options.get("profile"),
        anonymous=_choice(config.url, options, "anonymous", ("false", "true")) == "true",
        addressing=_addressing(_choice(config.url, options, "addressing", ("auto", "path", "virtual"))),
        ca_bundle=_ca_bundle(options.get("ca_bundle") or os.environ.get("AWS_CA_BUNDLE")),
        conditional_put=_switch(_choice(config.url, options, "conditional_put", ("auto", "true", "false"))),
        connect_timeout=_seconds(config.url, options, "connect_timeout", 5.0),
        timeout=_seconds(config.url, options, "timeout", 30.0),
    )


def check_endpoint(endpoint: str) -> str:
    """`endpoint` without its trailing slash. Raises UsageError for what is no plain http(s) URL of a server."""
    parts = split_url(endpoint, port=True)
    shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise UsageError(f"{shown} is not an endpoint", hint="write https://HOST:PORT or http://HOST:PORT")
    if "@" in parts.netloc:
        raise UsageError(
            f"an endpoint with credentials in it is refused ({shown})",
            hint="use the environment, a profile or the config file for credentials",
        )
    if parts.path.strip("/") or parts.query or parts.fragment:
        raise UsageError(f"endpoint {shown} has more than a host and a port", hint="put the bucket into s3://BUCKET")
    return f"{parts.scheme}://{parts.netloc}"


def is_aws(endpoint: str) -> bool:
    return bool(_AWS_HOST.search(urlsplit(endpoint).hostname or ""))


def uses_path_style(endpoint: str, bucket: str, addressing: Addressing) -> bool:
    """Whether the bucket goes into the path (http://host/bucket/key) and not into the host name.

    auto: the host name only at AWS, and there only for buckets that a wildcard certificate covers. Raises
    UsageError when 'virtual' cannot work.
    """
    host = urlsplit(endpoint).hostname or ""
    if addressing == "virtual":
        try:
            ipaddress.ip_address(host)
        except ValueError:
            return False
        raise UsageError(
            f"virtual-host addressing needs a host name, {endpoint} is an IP address", hint="use addressing=path"
        )
    return addressing == "path" or not is_aws(endpoint) or not _DNS_BUCKET.match(bucket)


def _choice(url: str, options: dict[str, str], name: str, allowed: tuple[str, ...]) -> str:
    value = options.get(name, allowed[0]).lower()
    if value not in allowed:
        raise UsageError(f"{url}: {name}={value} means nothing", hint=f"use one of {', '.join(allowed)}")
    return value


def _addressing(value: str) -> Addressing:
    return "path" if value == "path" else "virtual" if value == "virtual" else "auto"


def _switch(value: str) -> Switch:
    return "true" if value == "true" else "false" if value == "false" else "auto"


def _ca_bundle(path: str | None) -> str | None:
    if path is not None and not os.path.isfile(path):
        raise ConfigError(f"the CA bundle {path} does not exist", hint="name a PEM file with ca_bundle=PATH")
    return path


def _seconds(url: str, options: dict[str, str], name: str, default: float) -> float:
    try:
        value = float(options.get(name, default))
    except ValueError:
        value = -1.0
    if not 0 < value < 1e6:
        raise UsageError(f"{url}: {name}={options.get(name)} is not a number of seconds")
    return value
