"""JSON documents of the KV formats: read strictly, field by field, each fault named by its path. Pure.

Strict: UTF-8, no duplicate keys, no NaN, no fractions (no format here has any), no lone surrogates, no unknown fields.
Canonical: sorted keys, no spaces, UTF-8; two writers of one meaning write the same bytes.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final, NoReturn

from kvctl.core.errors import FormatError, IncompatibleError

_LIMIT: Final = 1 << 63
_HEX: Final = re.compile(r"(?:[0-9a-f]{2})+")
_HINT: Final = "the document is damaged, or a newer kvctl wrote it; see `kvctl repo check`"


def canonical(document: object) -> bytes:
    """Canonical JSON. The document holds text, whole numbers, booleans, null, lists and objects only."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def loads(data: bytes | memoryview, where: str) -> Any:  # Any: JSON
    """Raises FormatError for everything that is wrong."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:  # Any: JSON
        found = dict(items)
        if len(found) != len(items):
            raise ValueError("a key is twice in one object")
        return found

    def refuse(text: str) -> NoReturn:
        raise ValueError(f"{text[:40]} is no whole number")

    try:
        text = str(data, "utf-8")
        found = json.loads(text, object_pairs_hook=pairs, parse_constant=refuse, parse_float=refuse)
        if "\\u" in text:  # only an escape can bring a lone surrogate in, and only it cannot be encoded again
            json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as problem:
        raise FormatError(f"{where} is not a JSON document of ours", cause=str(problem), hint=_HINT) from None
    return found


class Fields:
    """An object of a document, each field taken with its type checked. `path` names it in errors."""

    def __init__(self, value: Any, where: str, path: str = "") -> None:  # Any: JSON
        self.where = where
        self.path = path
        if not isinstance(value, dict):
            raise self.bad("", "is no object")
        self._value: dict[str, Any] = value  # Any: JSON

    def schema(self, expected: str) -> None:
        """Raises IncompatibleError for another version of the same schema, FormatError for another document."""
        found = self._value.get("schema")
        family = expected.rpartition("/")[0] + "/"
        if isinstance(found, str) and found != expected and found.startswith(family):
            raise IncompatibleError(
                f"{self.where} has schema {found}, this kvctl reads {expected}", hint="use a newer kvctl to read it"
            )
        if found != expected:
            raise FormatError(f"{self.where} is no {family[:-1]} document", cause=f"its schema is {found!r}")

    def only(self, needed: set[str], optional: set[str] | None = None) -> None:
        missing = needed - self._value.keys()
        extra = self._value.keys() - needed - (optional or set())
        if missing or extra:
            raise self.bad("", f"lacks {sorted(missing)}" if missing else f"has unknown fields {sorted(extra)}")

    def has(self, key: str) -> bool:
        return key in self._value

    def raw(self, key: str) -> Any:  # Any: JSON
        return self._value[key]

    def text(self, key: str) -> str:
        value = self._value[key]
        if not isinstance(value, str) or not value:
            raise self.bad(key, f"is {value!r}, not text")
        return value

    def text_or_null(self, key: str) -> str | None:
        return None if self._value[key] is None else self.text(key)

    def hex(self, key: str, size: int = 32) -> str:
        """`size` bytes as lower-case hex."""
        return self.as_hex(self._value[key], key, size)

    def hex_or_null(self, key: str, size: int = 32) -> str | None:
        return None if self._value[key] is None else self.hex(key, size)

    def as_hex(self, value: Any, key: str, size: int) -> str:  # Any: JSON
        if not isinstance(value, str) or len(value) != 2 * size or not _HEX.fullmatch(value):
            raise self.bad(key, f"is {value!r}, not {2 * size} lower-case hex digits")
        return value

    def number(self, key: str, low: int = 0, high: int = _LIMIT - 1) -> int:
        return self.as_number(self._value[key], key, low, high)

    def number_or_null(self, key: str, low: int = 0, high: int = _LIMIT - 1) -> int | None:
        return None if self._value[key] is None else self.number(key, low, high)

    def as_number(self, value: Any, key: str, low: int = 0, high: int = _LIMIT - 1) -> int:  # Any: JSON
        if type(value) is not int or not low <= value <= high:
            raise self.bad(key, f"has {value!r} where a whole number from {low} to {high} is needed")
        return value

    def flag(self, key: str) -> bool:
        value = self._value[key]
        if not isinstance(value, bool):
            raise self.bad(key, f"is {value!r}, not true or false")
        return value

    def items(self, key: str) -> list[Any]:  # Any: JSON
        value = self._value[key]
        if not isinstance(value, list):
            raise self.bad(key, "is no list")
        return value

    def objects(self, key: str) -> list[Fields]:
        return [Fields(value, self.where, self._at(f"{key}[{i}]")) for i, value in enumerate(self.items(key))]

    def rows(self, key: str, width: int) -> list[list[Any]]:  # Any: JSON
        """A list of lists of `width` items each."""
        rows = self.items(key)
        for i, row in enumerate(rows):
            if not isinstance(row, list) or len(row) != width:
                raise self.bad(f"{key}[{i}]", f"is no list of {width}")
        return rows

    def texts(self, key: str) -> dict[str, str]:
        """An object whose values are all text."""
        value = self._value[key]
        if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
            raise self.bad(key, "does not map text to text")
        return value

    def _at(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path and key else self.path or key

    def bad(self, key: str, problem: str) -> FormatError:
        return FormatError(f"{self.where}: {self._at(key) or 'the document'} {problem}", hint=_HINT)
