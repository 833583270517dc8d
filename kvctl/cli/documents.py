"""Result documents for people: names and values aligned, lists of objects as tables, sizes and times with their
units. One rule for every command, so that a new field of a result needs no new code here. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from kvctl.cli.tables import fields, table, visible
from kvctl.core.units import format_seconds, format_size

_HIDDEN: Final = {"schema"}
_SIZES: Final = ("bytes", "size", "fetched", "needed", "written", "logical", "unique", "physical", "garbage")
_COUNTED: Final = ("blocks_", "packs_", "nodes_", "tp_size")
_WIDEST_CELL: Final = 60


def render(document: Mapping[str, object], title: str = "") -> str:
    """The lines of a document: scalars first, then a block per nested object or list."""
    lines = [title] if title else []
    lines += _block(document, "")
    return "\n".join(lines) or "nothing"


def _block(document: Mapping[str, object], indent: str, inside: str = "") -> list[str]:
    shown = {key: value for key, value in document.items() if key not in _HIDDEN}
    scalars = [(label(key), cell(f"{inside}{key}", value)) for key, value in shown.items() if _simple(value)]
    lines = fields(scalars, indent)
    for key, value in shown.items():
        if _simple(value):
            continue
        if isinstance(value, Mapping):
            inner = _mapping(value, indent + "  ", "tp_" if key == "tp" else "")  # its size counts ranks
        else:
            assert isinstance(value, Sequence)
            inner = [f"{indent}  {line}" for line in rows(value)]
        if inner:
            lines += [f"{indent}{label(key)}:", *inner]
    return lines


def _mapping(value: Mapping[str, object], indent: str, inside: str = "") -> list[str]:
    """Names with objects behind them are a table too, if the objects are flat."""
    maps = [item for item in value.values() if isinstance(item, Mapping)]
    if maps and len(maps) == len(value) and all(_short(part) for item in maps for part in item.values()):
        return [indent + line for line in rows([{"": name, **item} for name, item in zip(value, maps, strict=True)])]
    return _block(value, indent, inside)


def rows(items: Sequence[object]) -> list[str]:
    """A list of objects as a table; of anything else, a line each."""
    maps = [item for item in items if isinstance(item, Mapping)]
    if len(maps) != len(items):
        return [visible(cell("", item), line=True) for item in items]
    keys = list(dict.fromkeys(key for item in maps for key, value in item.items() if _short(value)))
    # a column that is empty everywhere says nothing
    keys = [key for key in keys if any(cell(key, item.get(key)) for item in maps)]
    if not keys:
        return []
    numbers = {
        index
        for index, key in enumerate(keys)
        if all(isinstance(item.get(key), (int, float)) and not isinstance(item.get(key), bool) for item in maps)
    }
    body = [[cell(key, item.get(key)) or "-" for key in keys] for item in maps]
    return table([label(key) for key in keys], body, right=numbers)


def label(key: str) -> str:
    return key.removesuffix("_s").replace("_", " ")


def cell(key: str, value: object) -> str:
    """A value as text; the key tells the unit."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)) and key.endswith(("_s", "seconds")):
        return format_seconds(value)
    if isinstance(value, int) and (key.endswith(_SIZES) or key.startswith("bytes_")) and not key.startswith(_COUNTED):
        return format_size(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(cell("", item) for item in value)
    if isinstance(value, Mapping):
        shown = ((name, cell(str(name), item)) for name, item in value.items())
        return ", ".join(f"{label(str(name))} {text}" for name, text in shown if text)
    return str(value)


def _simple(value: object) -> bool:
    if isinstance(value, Mapping):
        return False
    if isinstance(value, (list, tuple)):
        scalars = all(isinstance(item, (str, int, float)) for item in value)
        return scalars and len(cell("", value)) <= _WIDEST_CELL
    return True


def _short(value: object) -> bool:
    return _simple(value) or (isinstance(value, Mapping) and len(cell("", value)) <= _WIDEST_CELL)
