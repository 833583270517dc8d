"""Aligned columns for people. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_CONTROLS = {code: repr(chr(code))[1:-1] for code in (*range(32), *range(127, 160))}
_BUT_LINES = {code: text for code, text in _CONTROLS.items() if chr(code) not in "\n\t"}


def visible(text: str, *, line: bool = False) -> str:
    """`text` with control characters, which would move the cursor or colour the rest, as escapes; with `line` also the
    end of a line. Names come from file systems and repos, and may hold anything.
    """
    return text.translate(_CONTROLS if line else _BUT_LINES)


def table(headers: Sequence[str], rows: Iterable[Sequence[object]], *, right: Iterable[int] = ()) -> list[str]:
    """Lines of a table: headers in capitals, columns two spaces apart, numbers (`right`) flush right."""
    cells = [[name.upper() for name in headers], *([visible(str(cell), line=True) for cell in row] for row in rows)]
    widths = [max(len(row[index]) for row in cells) for index in range(len(headers))]
    flush = set(right)
    return [
        "  ".join(
            cell.rjust(widths[index]) if index in flush else cell.ljust(widths[index]) for index, cell in enumerate(row)
        ).rstrip()
        for row in cells
    ]


def fields(pairs: Iterable[tuple[str, object]], indent: str = "") -> list[str]:
    """`name  value` lines with the values aligned; pairs with an empty value are left out."""
    kept = [(name, visible(str(value))) for name, value in pairs if value not in ("", None)]
    width = max((len(name) for name, _ in kept), default=0)
    return [f"{indent}{name.ljust(width)}  {value}" for name, value in kept]
