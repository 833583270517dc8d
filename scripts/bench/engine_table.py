"""What a run of engine.py says, without running anything: the crossover and what `kv advise` makes of the same inputs,
and the README's tables. Usage: python -m scripts.bench.engine_table RESULT.json
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kvctl.kv.advise import GroupCost, Prefill, Restore, break_even, session_bytes

Result = Mapping[str, Any]  # Any: the bench's JSON
NAMES: Final = {"memory": "host memory", "files": "files", "s3": "S3", "nodes": "two nodes"}
LONGEST: Final = 1 << 20


def spread(values: Sequence[float]) -> dict[str, float]:
    """Of seconds; `n` samples. The p99 by nearest rank."""
    ordered = sorted(values)
    return {
        "n": len(ordered),
        "p50": statistics.median(ordered),
        "p99": ordered[max(0, -(-99 * len(ordered) // 100) - 1)],
    }


def crossing(points: Mapping[int, tuple[float, float]]) -> float | None:
    """From how many tokens on restoring is faster, by (computed, restored) seconds of some lengths: between the last
    one where it is not and the next, where the straight lines meet. The shortest length when it wins everywhere; None
    when it loses at the longest.
    """
    lengths = sorted(points)
    ahead = {tokens: points[tokens][0] - points[tokens][1] for tokens in lengths}
    if not lengths or ahead[lengths[-1]] < 0:
        return None
    losing = [tokens for tokens in lengths if ahead[tokens] < 0]
    if not losing:
        return float(lengths[0])
    last = losing[-1]
    after = next(tokens for tokens in lengths if tokens > last)
    return last + (after - last) * -ahead[last] / (ahead[after] - ahead[last])


def advice(groups: Sequence[GroupCost], place: Result) -> dict[str, Any] | None:  # Any: JSON
    """The measured crossover against the one that `kv advise` predicts. It is given what the long prompts took (the
    prefill fitted to them, the bandwidth between the shortest and the longest of them) and never sees the short ones,
    among which the crossover lies. Both without what any request takes, as computing 16 tokens shows it. None where
    too little was measured.
    """
    rows = {int(tokens): widths["1"] for tokens, widths in place["tokens"].items() if "1" in widths}
    if len(rows) < 2 or not place.get("crossover"):
        return None
    base = place["base"]["p50"]
    short, long = min(rows), max(rows)
    prefill = Prefill.fitted([(tokens, max(row["computed"]["p50"] - base, 1e-6)) for tokens, row in rows.items()])
    took = {tokens: rows[tokens]["restored"]["p50"] - base for tokens in (short, long)}
    moved = session_bytes(groups, long) - session_bytes(groups, short)
    bandwidth = moved / (took[long] - took[short]) if took[long] > took[short] else None
    latency = took[short] - (session_bytes(groups, short) / bandwidth if bandwidth else 0.0)
    restore = Restore(bandwidth or 1e12, max(0.0, latency))
    points = {
        int(tokens): (row["computed"]["p50"], row["restored"]["p50"]) for tokens, row in place["crossover"].items()
    }
    return {
        "measured_from": crossing(points),
        "measured_at": sorted(points),
        "advised_from": break_even(groups, restore, prefill, longest=LONGEST),
        "bandwidth": bandwidth,
        "latency_s": restore.latency,
        "base_s": base,
        "prefill": {"linear_s": prefill.linear, "quadratic_s": prefill.quadratic},
    }


def table(result: Result) -> str:
    """Markdown."""
    lines: list[str] = []
    for name, found in result["models"].items():
        lines += _model(name, found)
    return "\n".join(lines).rstrip() + "\n"


def _model(name: str, found: Result) -> list[str]:
    places = list(found["places"])
    lines = [
        f"**{name}** ({found['dtype']}, {found['cores']} cores): time to first token in ms, p50 / p99",
        "",
        "| tokens | at once | computed | own cache | " + " | ".join(NAMES[place] for place in places) + " |",
        "| ---: | ---: | ---: | ---: |" + " ---: |" * len(places),
    ]
    for tokens, widths in found["computed"].items():
        for width, computed in widths.items():
            rows = [found["places"][place]["tokens"][tokens][width] for place in places]
            cells = [_ms(computed), _ms(rows[0]["own cache"]), *(_ms(row["restored"]) for row in rows)]
            lines.append(f"| {int(tokens):,} | {width} | " + " | ".join(cells) + " |")
    every = [row for place in places for widths in found["places"][place]["tokens"].values() for row in widths.values()]
    ratio = max(row["fetched_per_needed"] for row in every)
    lost = sum(row["lost_tokens"] for row in every)
    samples = sorted({row["restored"]["n"] for row in every})
    counts = " or ".join(str(count) for count in samples)
    lines += [
        "",
        f"Bytes fetched / needed: {ratio:.2f} at most; tokens wanted that did not come: {lost}; {counts} samples each.",
        "",
    ]
    told = [(place, found["advice"][place]) for place in places if found["advice"].get(place)]
    if told:
        lines += [
            "| restoring is faster from .. tokens on | " + " | ".join(NAMES[place] for place, _ in told) + " |",
            "| --- |" + " ---: |" * len(told),
            "| measured | " + " | ".join(_from(said["measured_from"], said["measured_at"]) for _, said in told) + " |",
            "| `kv advise` of the same inputs | "
            + " | ".join(_from(said["advised_from"], ()) for _, said in told)
            + " |",
            "",
        ]
    return lines + _streams(found, places)


def _streams(found: Result, places: Sequence[str]) -> list[str]:
    streams = {place: found["places"][place]["stream"] for place in places if found["places"][place].get("stream")}
    if not streams:
        return []
    tokens = next(iter(streams.values()))["tokens"]
    lines = [
        f"Between two tokens of a running stream, ms, p50 / p99 / longest, while prompts of {tokens:,} tokens come in:",
        "",
        "| restored from | alone | beside restores | beside the same computed |",
        "| --- | ---: | ---: | ---: |",
    ]
    for place, stream in streams.items():
        ways = [stream[way] for way in ("alone", "beside restores", "beside computing")]
        lines.append(f"| {NAMES[place]} | " + " | ".join(f"{_ms(way)} / {1e3 * way['max']:.0f}" for way in ways) + " |")
    return [*lines, ""]


def _ms(way: Mapping[str, float]) -> str:
    return f"{1e3 * way['p50']:.0f} / {1e3 * way['p99']:.0f}"


def _from(tokens: float | None, measured: Sequence[int]) -> str:
    if tokens is None:
        return "none measured" if measured else "none"
    return f"{round(tokens)} or fewer" if measured and tokens <= measured[0] else f"{round(tokens)}"


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))), end="")
