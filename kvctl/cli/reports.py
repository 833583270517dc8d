"""Reports for people: one compact block per run. Works on the JSON form, so that saved ones look the same. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvctl.cli.documents import cell, label
from kvctl.cli.tables import fields, table, visible
from kvctl.core.units import format_seconds, format_size

# Any: a report's JSON, schema kvctl.report/1
Document = Mapping[str, Any]


def render(report: Document) -> str:
    """The lines of a report document."""
    lines = [visible(_headline(report)), ""]
    lines += fields(_facts(report), "  ")
    paths = report.get("paths") or []
    if paths:
        lines += ["", *("  " + line for line in _paths(paths))]
    lines += [f"  note: {visible(note)}" for note in report.get("notes") or ()]
    return "\n".join(lines)


def _headline(report: Document) -> str:
    moved = report["bytes"] or report.get("written", 0)
    target = f" -> {report['target']}" if report.get("target") else ""
    return (
        f"{report['command']} {report.get('source', '')}{target}: {format_size(moved)} in "
        f"{format_seconds(report['seconds'])}, {report['gb_per_s']:.2f} GB/s"
    )


def _facts(report: Document) -> list[tuple[str, object]]:
    verified = report.get("verified") or {}
    setup = f"{format_seconds(report['setup_s'])} setup included" if report["setup_s"] else ""
    pairs: list[tuple[str, object]] = [
        ("started", report.get("started")),
        ("time", ", ".join(filter(None, (format_seconds(report["seconds"]), setup)))),
        ("bytes", _bytes(report)),
        ("objects", report["objects"] or None),
        ("tensors", report["tensors"] or None),
        ("tensor parallel", _tp(report.get("tp") or {})),
        ("requests", _requests(report)),
        ("per request", _latency(report)),
        (
            "client CPU",
            f"{report['client_cpu_s_per_gb']:.3f} s per GB ({report['cpu_s']:.2f} s)" if report["cpu_s"] else None,
        ),
        ("peak memory", format_size(report["peak_memory"]) if report["peak_memory"] else None),
        ("verified", _verified(verified)),
        ("busy", _stages(report.get("stages") or {})),
        ("limiter", report.get("limiter")),
        ("ceiling", _ceiling(report)),
    ]
    for transport in report.get("transport") or ():
        pairs.append(("transport", f"{transport['name']} ({transport['reason']})"))
        pairs += [("passed over", f"{name}: {reason}") for name, reason in transport.get("passed_over") or ()]
        if transport.get("fallback"):
            pairs.append(("fell back", transport["fallback"]))
    pairs += [(label(name), _extra(name, value)) for name, value in (report.get("extra") or {}).items()]
    pairs.append(("report", report.get("id")))
    return pairs


def _extra(name: str, value: Any) -> str:  # Any: JSON
    if name == "verdict":
        return f"usable {value['usable_tokens']:,} of {value['wanted_tokens']:,} tokens, because {value['reason']}"
    return cell(name, value)


def _bytes(report: Document) -> str:
    parts = []
    if report["needed"]:
        parts += [f"{format_size(report['needed'])} needed"]
        parts += [f"{format_size(report['fetched'])} fetched (over-fetch {report['over_fetch']:.3f})"]
    if report["written"]:
        parts.append(f"{format_size(report['written'])} written")
    if report["metadata_bytes"]:
        parts.append(f"{format_size(report['metadata_bytes'])} of headers and manifests")
    if report["misaligned_bytes"]:
        parts.append(f"{format_size(report['misaligned_bytes'])} copied for alignment")
    return ", ".join(parts)


def _requests(report: Document) -> str | None:
    if not report["requests"]:
        return None
    text = f"{report['requests']}, {report['retries']} retries"
    if report["hedges"]:
        text += f", {report['hedges']} hedges ({report['hedge_wins']} won, {format_size(report['hedged_bytes'])})"
    return text


def _latency(report: Document) -> str | None:
    if not report["p99_s"]:
        return None
    return f"p50 {format_seconds(report['p50_s'])}, p99 {format_seconds(report['p99_s'])}"


def _tp(tp: Document) -> str | None:
    if not tp:
        return None
    text = f"rank {tp['rank']} of {tp['size']}" if "rank" in tp else f"size {tp.get('size')}"
    if "sharded_bytes" in tp:
        text += f", {format_size(tp['sharded_bytes'])} sharded, {format_size(tp.get('replicated_bytes', 0))} replicated"
    return text


def _verified(verified: Document) -> str:
    names = {"full": "digests", "leaves": "leaf checksums", "none": "no"}
    text = names.get(verified.get("state", "none"), "no")
    if verified.get("bytes"):
        text += f", {format_size(verified['bytes'])}"
    return f"{text} ({verified['why']})" if verified.get("why") else text


def _stages(stages: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {share:.0%}" for name, share in sorted(stages.items(), key=lambda item: -item[1]))


def _ceiling(report: Document) -> str | None:
    ceiling = report.get("ceiling_gbps")
    if not ceiling:
        return None
    share = f", {report['gb_per_s'] / ceiling:.0%} of it reached" if ceiling > 0 else ""
    return f"{ceiling:.2f} GB/s ({report.get('ceiling_how') or 'measured'}){share}"


def _paths(paths: Sequence[Document]) -> list[str]:
    total = sum(path["bytes"] for path in paths) or 1
    rows = [
        (
            path["member"],
            path["endpoint"] or "-",
            path["transport"],
            format_size(path["bytes"]),
            f"{path['bytes'] / total:.0%}",
            path["requests"],
            path["retries"],
            path["failures"],
            format_seconds(path["p50_s"]),
            format_seconds(path["p99_s"]),
        )
        for path in paths
    ]
    headers = ("member", "endpoint", "transport", "bytes", "share", "requests", "retries", "failures", "p50", "p99")
    lines = table(headers, rows, right=range(3, 10))
    return lines + [
        f"{path['member']} {path['endpoint']} was given up: {path['down']}" for path in paths if path.get("down")
    ]
