"""Turns a bench's JSON into the Markdown tables of the README. Usage: table.py OUT.json"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Sequence
from typing import Any, Final

GIB: Final = 1 << 30
Result = dict[str, Any]  # Any: the bench's JSON


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank: of ten samples the p99 is the largest."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def best(entries: Sequence[Result]) -> Result | None:
    """The entry of the lowest median, of those that were measured."""
    measured = [entry for entry in entries if entry["samples"]]
    return min(measured, key=median_seconds, default=None)


def median_seconds(entry: Result) -> float:
    seconds: list[float] = [sample["seconds"] for sample in entry["samples"]]
    return statistics.median(seconds)


def cpu_per_gb(entry: Result, nbytes: int) -> float:
    used: list[float] = [sample["cpu_s"] for sample in entry["samples"]]
    return statistics.median(used) / (nbytes / 1e9)


def paired(entry: Result, reference: Result) -> float:
    """Median over rounds of how fast `entry` was as a share of `reference` in the same round: what the machine did
    between rounds cancels out."""
    other = {sample["round"]: sample["seconds"] for sample in reference["samples"]}
    ratios = [other[s["round"]] / s["seconds"] for s in entry["samples"] if s["round"] in other]
    return statistics.median(ratios) if ratios else math.nan


def scenario_table(scenario: Result) -> list[str]:
    """One Markdown table: the fastest setting of each rival, fastest rival first."""
    nbytes = scenario["bytes"]
    by_name: dict[str, list[Result]] = {}
    for entry in scenario["rivals"]:
        by_name.setdefault(entry["name"], []).append(entry)
    chosen = [entry for entries in by_name.values() if (entry := best(entries)) is not None]
    chosen.sort(key=median_seconds)
    ceiling = next((entry for entry in chosen if entry["name"] == scenario["ceiling"]), None)
    peer = next((entry for entry in chosen if entry["role"] == "peer"), None)
    against = "the ceiling" if ceiling is None or ceiling["role"] == "ceiling" else ceiling["name"]
    lines = [
        (
            f"**{scenario['title']}**: {scenario['model']}, {nbytes / 1e9:.2f} GB in {scenario['files']} file(s), "
            f"{scenario['rounds']} rounds"
        ),
        "",
        (f"| loader | median s | p99 s | GB/s | of {against} | of the fastest peer | CPU s/GB | peak GiB | notes |"),
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for entry in chosen:
        seconds = median_seconds(entry)
        samples = entry["samples"]
        notes = [entry["note"]] if entry["note"] else []
        if entry["variant"]:
            notes.append(f"best of its settings: {entry['variant']}")
        if not entry["takes_destination"]:
            notes.append("allocates inside")
        lines.append(
            f"| {entry['name']} | {seconds:.3f} | {percentile([s['seconds'] for s in samples], 0.99):.3f} "
            f"| {nbytes / 1e9 / seconds:.2f} | {_ratio(entry, ceiling)} | {_ratio(entry, peer)} "
            f"| {cpu_per_gb(entry, nbytes):.2f} | {max(s['peak_rss'] for s in samples) / GIB:.2f} "
            f"| {'; '.join(notes)} |"
        )
    for name, entries in by_name.items():
        reasons = [entry["unavailable"] for entry in entries if entry.get("unavailable")]
        if reasons:
            lines.append(f"| {name} | | | | | | | | not measured: {reasons[0]} |")
    return lines


def many_table(scenario: Result) -> list[str]:
    """Loads side by side: the seconds that each one took, by how many ran at a time."""
    nbytes, count = scenario["bytes"], scenario["files"]
    lines = [
        (
            f"**{scenario['title']}**: {scenario['model']}, {nbytes / 1e6 / count:.1f} MB each, "
            f"{scenario['rounds']} rounds"
        ),
        "",
        "| loader | at a time | p50 s of each | p99 s of each | GB/s of all | CPU s/GB | peak GiB | notes |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for entry in scenario["rivals"]:
        samples = entry["samples"]
        if not samples:
            lines.append(f"| {entry['name']} | {entry['variant']} | | | | | | not measured: {entry['unavailable']} |")
            continue
        each = [seconds for sample in samples for seconds in sample["each"]]
        lines.append(
            f"| {entry['name']} | {entry['variant']} | {statistics.median(each):.4f} | {percentile(each, 0.99):.4f} "
            f"| {nbytes / 1e9 / median_seconds(entry):.2f} | {cpu_per_gb(entry, nbytes):.2f} "
            f"| {max(s['peak_rss'] for s in samples) / GIB:.2f} | {entry['note']} |"
        )
    return lines


def growth_table(scenario: Result) -> list[str]:
    """One session's pull beside ever more others."""
    lines = [
        f"**{scenario['title']}**: {scenario['model']}, a session of {scenario['bytes'] / 1e6:.1f} MB",
        "",
        "| other sessions | p50 s | p99 s | requests | by kind |",
        "| ---: | ---: | ---: | ---: | --- |",
    ]
    for row in scenario["rows"]:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(row["by_kind"].items()))
        lines.append(f"| {row['others']:,} | {row['p50']:.4f} | {row['p99']:.4f} | {row['requests']} | {kinds} |")
    return lines


KINDS: Final = {"loads": scenario_table, "many": many_table, "growth": growth_table}


def lines_of(scenario: Result) -> list[str]:
    return KINDS[scenario.get("kind", "loads")](scenario)


def _ratio(entry: Result, reference: Result | None) -> str:
    return "" if reference is None else f"{paired(entry, reference):.2f}"


def document(result: Result) -> str:
    machine = result["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    lines = [
        (
            f"Measured {result['when']} on {machine['cores']} cores ({machine['cpu']}), "
            f"{machine['memory_gib']:.0f} GiB, Linux {machine['kernel']}, Python {machine['python']}. {versions}."
        ),
        (
            "Medians of interleaved rounds; ratios are medians of the rounds' own ratios, larger is faster. The "
            "p99 of fewer than 100 rounds is the slowest. Peak memory includes what was loaded, but not files in "
            "tmpfs (s5cmd)."
        ),
    ]
    for scenario in result["scenarios"]:
        lines += ["", *lines_of(scenario)]
    return "\n".join(lines)


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        print(document(json.load(file)))
