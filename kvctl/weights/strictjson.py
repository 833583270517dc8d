"""JSON as file formats need it: UTF-8 only, no duplicate keys, no NaN, no lone surrogates, bounded depth. Pure."""

from __future__ import annotations

import json
from typing import Any, Final

from kvctl.core.errors import FormatError

_DAMAGED: Final = "the file is damaged or hostile; fetch it again"


class NotAnInteger(float):
    """A number written with a fraction or an exponent; `text` is how it was written."""

    text: str

    @classmethod
    def parse(cls, text: str) -> NotAnInteger:
        value = cls(text)
        value.text = text
        return value


def loads(data: bytes | memoryview, where: str, part: str) -> Any:  # Any: JSON
    """The document in `data`. `part` says what it is ('header'). Raises FormatError for all that is wrong."""
    try:
        text = str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(
            f"{where}: the {part} is not UTF-8",
            cause=f"byte {error.start} of {len(data)}: {error.reason}",
            hint="the file is damaged; fetch it again",
        ) from None

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:  # Any: JSON
        result = dict(items)
        if len(result) != len(items):
            seen: set[str] = set()
            for key, _ in items:
                if key in seen:
                    raise FormatError(
                        f"{where}: duplicate key {key!r} in the {part}",
                        cause="readers disagree on which of the two counts",
                        hint="write the file again with a tool that keeps names unique",
                        details={"file": where, "key": key},
                    )
                seen.add(key)
        return result

    def constant(name: str) -> Any:  # Any: never returns
        raise FormatError(f"{where}: the {part} holds {name}, which is not JSON", hint=_DAMAGED)

    try:
        value = json.loads(
            text, object_pairs_hook=pairs, parse_constant=constant, parse_float=NotAnInteger.parse, strict=True
        )
    except RecursionError:
        raise FormatError(f"{where}: the {part} is nested too deeply", hint="the file is damaged or hostile") from None
    except json.JSONDecodeError as error:
        raise FormatError(
            f"{where}: the {part} is not valid JSON",
            cause=f"{error.msg} at character {error.pos} of {len(text)}",
            hint="the file is damaged; fetch it again",
        ) from None
    except ValueError:  # an integer of thousands of digits
        raise FormatError(f"{where}: the {part} holds a number that overflows", hint=_DAMAGED) from None
    # Only an escape can bring a lone surrogate in, and only it cannot be encoded again.
    if "\\u" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise FormatError(
                f"{where}: the {part} holds a lone surrogate, which is not Unicode text", hint=_DAMAGED
            ) from None
    return value
