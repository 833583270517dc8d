"""What a file that is no safetensors file looks like, by its first bytes. Pure; used in error messages only."""

from __future__ import annotations

import re
from typing import Final

_MAGIC: Final = (
    (b"version https://git-lfs", "a Git LFS pointer (fetch the real file with `git lfs pull`)"),
    (b"PK\x03\x04", "a zip archive, such as a PyTorch .bin checkpoint (a pickle inside, which kvctl never opens)"),
    (b"PK\x05\x06", "an empty zip archive"),
    (b"GGUF", "a GGUF file"),
    (b"GGML", "a GGML file"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x93NUMPY", "a numpy .npy file"),
    (b"\x1f\x8b", "gzip-compressed data"),
    (b"\x28\xb5\x2f\xfd", "zstd-compressed data"),
    (b"BZh", "bzip2-compressed data"),
    (b"\xfd7zXZ", "xz-compressed data"),
    (b"\x7fELF", "an executable"),
    (b"%PDF", "a PDF"),
)
_PICKLE = re.compile(rb"\x80[\x02-\x05]")
_TEXT_START: Final = 64


def looks_like(first: bytes, file_size: int) -> str:
    """'looks like …' or, when nothing is recognised, an empty string. `first`: the file's first bytes."""
    if file_size == 0:
        return "looks like an empty file"
    for magic, name in _MAGIC:
        if first.startswith(magic):
            return f"looks like {name}"
    if _PICKLE.match(first):
        return "looks like a Python pickle, which kvctl never opens"
    text = first.lstrip(b"\xef\xbb\xbf \t\r\n")[:512].lower()
    if text.startswith((b"<!doctype html", b"<html")) or (text.startswith(b"<") and b"<html" in text):
        return f"looks like an HTML page, such as an error page saved as a file ({_quote(text)})"
    if text.startswith((b"<?xml", b"<error")):
        return f"looks like an XML document, such as an S3 error ({_quote(text)})"
    if text.startswith((b"{", b"[")) and not first.startswith(b"\x00"):
        return f"looks like a JSON document ({_quote(text)})"
    if not first.strip(b"\x00"):
        return "looks like a hole: its first bytes are all zero"
    start = first[:_TEXT_START]
    if all(byte in b"\t\n\r" or 32 <= byte < 127 for byte in start):
        return f"looks like text ({_quote(start)})"
    return ""


def _quote(data: bytes) -> str:
    text = data[:_TEXT_START].decode("utf-8", "replace")
    return repr(" ".join(text.split()))
