"""The plot of `bench paths`: GB/s over the size of a request, a panel per store and concurrency. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Final

from kvctl.core.errors import AuthError, EnvError, UsageError
from kvctl.core.units import format_size

FORMATS: Final = (".svg", ".png", ".pdf")
_INCHES: Final = (5.2, 3.6)  # of one panel
_STYLES: Final[Mapping[str, Mapping[str, str]]] = {
    "ceiling": {"color": "black", "linestyle": "--"},
    "readinto": {"color": "grey", "linestyle": ":"},
}


def require_plot(path: str) -> None:
    """Raises before anything is measured: EnvError without matplotlib, UsageError for a format it does not write."""
    if not path.endswith(FORMATS):
        raise UsageError(f"{path} is no picture", hint=f"end its name with {', '.join(FORMATS)}")
    if find_spec("matplotlib") is None:
        raise EnvError("--plot needs matplotlib", hint="pip install 'kvctl[plot]'")


def write_plot(document: Mapping[str, Any], path: str) -> None:  # Any: JSON, schema kvctl.bench-paths/1
    """Write the picture. Raises AuthError or EnvError when it cannot be written."""
    # without pyplot: no window system is asked for
    from matplotlib.figure import Figure

    stores: Sequence[Mapping[str, Any]] = document["stores"]
    concurrencies = sorted({cell["concurrency"] for store in stores for cell in store["cells"]})
    rows, columns = len(stores), max(1, len(concurrencies))
    figure = Figure(figsize=(_INCHES[0] * columns, _INCHES[1] * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False)
    for store, line in zip(stores, panels, strict=True):
        for concurrency, panel in zip(concurrencies, line, strict=False):
            cells = [cell for cell in store["cells"] if cell["concurrency"] == concurrency]
            sizes = sorted({cell["size"] for cell in cells})
            for name in dict.fromkeys(cell["path"] for cell in cells):
                mine = sorted((cell for cell in cells if cell["path"] == name), key=lambda cell: cell["size"])
                style = _STYLES.get(name, {"marker": "o"})
                xs = [sizes.index(cell["size"]) for cell in mine]
                panel.plot(xs, [cell["gb_per_s"] for cell in mine], label=name, **style)
                lows = [min(cell["gb_per_s_rounds"]) for cell in mine]
                highs = [max(cell["gb_per_s_rounds"]) for cell in mine]
                panel.fill_between(xs, lows, highs, alpha=0.12, color=panel.lines[-1].get_color())
            panel.set_xticks(range(len(sizes)), [format_size(size) for size in sizes])
            panel.set_ylim(bottom=0)
            panel.set_title(f"{store['name']}, {concurrency} at once", fontsize=9)
            panel.set_xlabel("bytes per request")
            panel.set_ylabel("GB/s, median of rounds")
            panel.legend(fontsize=8)
    save(figure, path)


def save(figure: Any, path: str) -> None:  # Any: a matplotlib figure
    """Raises AuthError or EnvError when it cannot be written."""
    try:
        figure.savefig(path)
    except PermissionError as problem:
        raise AuthError(f"cannot write {path}", cause=problem.strerror) from problem
    except OSError as problem:
        raise EnvError(f"cannot write {path}", cause=problem.strerror) from problem
