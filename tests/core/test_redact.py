"""Secrets leave every text; what is no secret stays."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.core.redact import redact, redact_json

KEY = "AKIA" + "IOSFODNN7EXAMPLE"
SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
TOKEN = "FwoGZXIvYXdzEJr//////////wEaDExample=="
ENV = {"AWS_SECRET_ACCESS_KEY": SECRET, "AWS_SESSION_TOKEN": TOKEN}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"key {KEY} is wrong", "key *** is wrong"),
        (f"signed with {SECRET}", "signed with ***"),
        ("?token=FwoGZXIvYXdzEJr%2F%2F%2F%2F%2F%2F%2F%2F%2F%2FwEaDExample%3D%3D", "?token=***"),
        (
            "GET https://b.s3/k?X-Amz-Credential=AK%2F2026&X-Amz-Signature=abc123&versionId=7",
            "GET https://b.s3/k?X-Amz-Credential=***&X-Amz-Signature=***&versionId=7",
        ),
        ("Authorization: AWS4-HMAC-SHA256 Credential=K/x, Signature=ff", "Authorization: ***"),
        (
            "{'authorization': 'AWS4-HMAC-SHA256 Signature=ff', 'range': 'bytes=0-1'}",
            "{'authorization': '***', 'range': 'bytes=0-1'}",
        ),
        ("x-amz-security-token: abc\nrange: bytes=0-1", "x-amz-security-token: ***\nrange: bytes=0-1"),
        ("s3://alice:hunter2@bucket/key", "s3://***@bucket/key"),
        ("https://alice:hunt/er2@host/key", "https://***@host/key"),
        ("https://alice@host/key", "https://***@host/key"),
        ("aws_secret_access_key = abcdefgh", "aws_secret_access_key = ***"),
        ('{"SecretAccessKey": "abcdefgh", "n": 1}', '{"SecretAccessKey": "***", "n": 1}'),
        ("Bearer abcdefghijklmnop", "Bearer ***"),
    ],
)
def test_secret_is_masked(text: str, expected: str) -> None:
    assert redact(text, ENV) == expected


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/prefix/model.safetensors",
        "http://127.0.0.1:9000/bucket/a@b",
        "lab:llama70b@3",
        "1,024 tokens of alice/chat1@2",
        "chunks/ab/" + "ab" * 32 + ".0123abcd",
        "the session token has expired",
        "kv_key_file = /etc/kvctl/kv.key",
    ],
)
def test_ordinary_text_stays(text: str) -> None:
    assert redact(text, ENV) == text


def test_a_short_secret_does_not_blank_out_words() -> None:
    assert redact("a secure server", {"AWS_SECRET_ACCESS_KEY": "s"}) == "a secure server"


def test_json_values_and_keys_are_masked_and_numbers_stay() -> None:
    value = {"url": "s3://a:b@c/d", "n": 3, "list": [f"x {SECRET}", None, True], KEY: {"deep": KEY}}
    assert redact_json(value, ENV) == {
        "url": "s3://***@c/d",
        "n": 3,
        "list": ["x ***", None, True],
        "***": {"deep": "***"},
    }


@given(st.text(max_size=60), st.text(max_size=60))
def test_no_secret_survives_in_any_surroundings(before: str, after: str) -> None:
    assert SECRET not in redact(before + SECRET + after, ENV)
    assert TOKEN not in json.dumps(redact_json({"text": before + TOKEN + after}, ENV))


@given(st.text(alphabet="abAKIA01:/@=&?. \"'\n", max_size=80))
def test_redacting_twice_changes_nothing(text: str) -> None:
    once = redact(text, ENV)
    assert redact(once, ENV) == once
