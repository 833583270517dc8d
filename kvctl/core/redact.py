"""Removes secrets from text that people, logs or reports will see. Pure but for the environment it is given.

One function for text, one for JSON values; the CLI's output calls them for every line, error and report.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import quote

MASK: Final = "***"

# Values of these are taken out wherever they appear, in clear or URL-encoded.
_SECRET_VARIABLES: Final = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_SECURITY_TOKEN")
# A shorter value would blank out ordinary words.
_SHORTEST: Final = 6

_RULES: Final = (
    # the userinfo of a URL; a password may hold '/', a port (digits) is no password
    (re.compile(r"\b([a-z][a-z0-9+.-]*://)[^\s/@\"'<>]+@", re.IGNORECASE), rf"\1{MASK}@"),
    (
        re.compile(r"\b([a-z][a-z0-9+.-]*://)[^\s/:@\"'<>]+:(?!\d+(?:[/\s,?\"']|$))[^\s@\"'<>]*@", re.IGNORECASE),
        rf"\1{MASK}@",
    ),
    # pre-signed queries
    (re.compile(r"\b(X-Amz-[A-Za-z-]+)=[^&\s\"'<>]+", re.IGNORECASE), rf"\1={MASK}"),
    (re.compile(r"([?&](?:Signature|AWSAccessKeyId|sig))=[^&\s\"'<>]+", re.IGNORECASE), rf"\1={MASK}"),
    # headers, as sent or as a Python or JSON mapping shows them
    (
        re.compile(
            r"\b((?:proxy-)?authorization|x-amz-security-token|x-amz-server-side-encryption-customer-key)"
            r"([\"']?\s*[:=]\s*[\"']?)[^\r\n\"']+",
            re.IGNORECASE,
        ),
        rf"\1\2{MASK}",
    ),
    (re.compile(r"\b(AWS4-HMAC-SHA256)\s+(?=Credential)[^\r\n\"']+"), rf"\1 {MASK}"),
    (re.compile(r"\b(Bearer)\s+[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE), rf"\1 {MASK}"),
    # NAME=value and "name": "value"
    (
        re.compile(
            r"\b((?:aws_)?(?:secret_access_key|access_key_id|session_token|security_token|secret_key)"
            r"|secretaccesskey|sessiontoken|accesskeyid|password|passwd|api_?key)"
            r"([\"']?\s*[:=]\s*[\"']?)[^\s\"'&,;}<>]+",
            re.IGNORECASE,
        ),
        rf"\1\2{MASK}",
    ),
    (re.compile(r"\b(?:AKIA|ASIA|AROA|AIDA|AGPA|ANPA|ANVA)[A-Z0-9]{16}\b"), MASK),
)  # fmt: skip


def redact(text: str, environ: Mapping[str, str] | None = None) -> str:
    """`text` without AWS keys, pre-signed queries, authorization headers, passwords in URLs, and the values of
    the secret AWS variables of `environ` (default: this process's). Applying it twice changes nothing.
    """
    env = os.environ if environ is None else environ
    for name in _SECRET_VARIABLES:
        value = env.get(name, "")
        if len(value) >= _SHORTEST:
            text = text.replace(value, MASK)
            encoded = quote(value, safe="")
            if encoded != value:
                text = text.replace(encoded, MASK)
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text


def redact_json(value: object, environ: Mapping[str, str] | None = None) -> object:
    """A JSON value with every string in it, keys included, through `redact`."""
    if isinstance(value, str):
        return redact(value, environ)
    if isinstance(value, Mapping):
        return {redact(str(key), environ): redact_json(item, environ) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_json(item, environ) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None  # JSON has no such number
    return value
