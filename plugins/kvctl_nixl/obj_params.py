"""From what a user says about an S3 store to the parameters of NIXL's object back end. Pure but for the probe of the
accelerated engines.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from kvctl.core.errors import EnvError, UsageError
from kvctl_nixl.places import Keys, S3Access
from kvctl_nixl.probes import has_library, installed, missing

# What `--transport-opt` passes to the back end by name (NIXL's src/plugins/obj/README.md); others as backend.NAME.
PASSED: Final = (
    "accelerated", "type", "crtMinLimit", "throughput_target_gbps", "num_threads", "req_checksum", "resp_checksum",
)  # fmt: skip
PREFIX: Final = "backend."
_FROM_STORE: Final = {
    "access_key": "credentials come from the AWS chain, never from the command line",
    "secret_key": "credentials come from the AWS chain, never from the command line",
    "session_token": "credentials come from the AWS chain, never from the command line",
    "bucket": "the bucket is the store's",
    "endpoint_override": "the endpoint is the store's: --endpoint-url",
    "scheme": "the scheme is the endpoint's",
    "region": "the region is the store's: --region",
    "use_virtual_addressing": "the store's option addressing says it",
    "ca_bundle": "the store's option ca_bundle says it",
}
_CUOBJECT: Final = "libcuobjclient.so.1"
_AWS_HOST: Final = re.compile(r"(^|\.)amazonaws\.com(\.cn)?$")
_DNS_BUCKET: Final = re.compile(r"^[a-z0-9][a-z0-9-]{1,61}[a-z0-9]$")


def passed_on(options: Mapping[str, str], own: tuple[str, ...]) -> dict[str, str]:
    """The parameters among `options` that go to the back end as they are. Raises UsageError."""
    found: dict[str, str] = {}
    for name, value in options.items():
        if name in own:
            continue
        bare = name.removeprefix(PREFIX)
        if bare in _FROM_STORE:
            raise UsageError(f"transport nixl-obj does not take {name}=", hint=_FROM_STORE[bare])
        if bare == name and name not in PASSED:
            known = ", ".join(sorted((*own, *PASSED)))
            raise UsageError(
                f"transport nixl-obj has no option {name!r}",
                hint=f"it has {known}; {PREFIX}{name}={value} passes it to NIXL's back end unseen",
            )
        found[bare] = value
    if "type" in found and found.get("accelerated") != "true":
        raise UsageError(f"type={found['type']} names an accelerated engine", hint="add accelerated=true")
    return found


def choose_build(asked: str, params: Mapping[str, str]) -> str:
    """The build of NIXL for these parameters. Raises EnvError when their engine is not here."""
    if params.get("accelerated") != "true":
        if asked == "cu13" or (asked == "auto" and not installed("cu12") and installed("cu13")):
            _need_cuobject("the OBJ plug-in of nixl-cu13")
            return "cu13"
        return "cu12"
    engine = f"engine {params['type']}" if "type" in params else "accelerated engine"
    if asked == "cu12":
        raise EnvError(
            f"nixl-obj has no {engine} here", cause="nixl-cu12 is built without accelerated engines", hint="build=cu13"
        )
    if not installed("cu13"):
        found = missing(("cu13",))
        raise EnvError(
            f"nixl-obj has no {engine} here",
            cause=found.reason,
            hint="pip install nixl-cu13==1.5.1, or a vendor's NIXL",
        )
    _need_cuobject(engine)
    return "cu13"


def _need_cuobject(who: str) -> None:
    if not has_library(_CUOBJECT):
        raise EnvError(
            f"nixl-obj: {who} is not available",
            cause=f"{_CUOBJECT} is not installed",
            hint="it comes with the CUDA toolkit from 13.1.1 on (cuObject)",
        )


def connection(access: S3Access, endpoint: str, keys: Keys) -> dict[str, str]:
    """The parameters that say where the store is and who asks."""
    settings = access.settings
    scheme = urlsplit(endpoint).scheme
    params = {
        "endpoint_override": endpoint,
        "scheme": scheme,
        "bucket": str(settings.bucket),
        "region": access.region,
        "use_virtual_addressing": "true"
        if uses_host_names(endpoint, settings.bucket, settings.addressing)
        else "false",
        "access_key": keys.access_key,
        "secret_key": keys.secret_key,
        # as our own S3 path: checksums where they must be, since not every server knows them
        "req_checksum": "required",
        "resp_checksum": "required",
    }
    if keys.token:
        params["session_token"] = keys.token
    if settings.ca_bundle and scheme == "https":
        params["ca_bundle"] = str(settings.ca_bundle)
    return params


def uses_host_names(endpoint: str, bucket: str, addressing: str) -> bool:
    """Whether the bucket goes into the host name; auto: at AWS, for buckets that a wildcard certificate covers."""
    if addressing != "auto":
        return addressing == "virtual"
    host = urlsplit(endpoint).hostname or ""
    return bool(_AWS_HOST.search(host)) and bool(_DNS_BUCKET.match(bucket))
