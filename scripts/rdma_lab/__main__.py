"""The command line of scripts/rdma-lab."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from scripts.rdma_lab.places import LabError
from scripts.rdma_lab.prepare import boot, prepare, status


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/rdma-lab", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("prepare", help="install, unpack and build what is missing; boots a guest to prove it")
    commands.add_parser("status", help="what is there; changes nothing. 0: ready, 10: not")
    run = commands.add_parser("run", help="a command in one guest")
    _add_common(run)
    run.add_argument("words", nargs=argparse.REMAINDER, metavar="-- COMMAND ..")
    several = commands.add_parser("guests", help="a shell command in each of several guests on one link")
    _add_common(several)
    several.add_argument("--until", metavar="NAME", help="end when this guest's command ends; its status is ours")
    several.add_argument(
        "--when", action="append", default=[], metavar="FILE=ACTION:NAME[:PERCENT]",
        help="when /lab/FILE appears: kill, down, up or lose (percent of packets) on guest NAME",
    )  # fmt: skip
    several.add_argument("commands", nargs="+", metavar="NAME=COMMAND")
    known = parser.parse_args(arguments)
    try:
        return _dispatch(known, parser)
    except LabError as problem:
        print(f"error: {problem.args[0]}", file=sys.stderr)
        if problem.hint:
            print(f"hint: {problem.hint}", file=sys.stderr)
        return problem.code
    except KeyboardInterrupt:
        return 130


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S", help="seconds; then all ends, status 124")
    parser.add_argument("--env", action="append", default=[], metavar="K=V", help="for the command; repeatable")
    parser.add_argument("--rails", type=int, default=1, metavar="N", help="RDMA devices per guest, a link each")
    parser.add_argument("--memory", default="1G", metavar="M|G", help="of each guest (default 1G)")


def _dispatch(known: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from scripts.rdma_lab.running import Options, run_one, run_several

    if known.command == "status":
        lines = status()
        for what, there, more in lines:
            print(f"{'ok' if there else 'missing':8}{what:12}{more}")
        return 0 if all(there for _, there, _ in lines) else 10
    lab = prepare(_say)
    if known.command == "prepare":
        print(boot(lab))
        return 0
    pairs = [text.partition("=") for text in known.env]
    if not all(separator for _, separator, _ in pairs):
        parser.error("--env wants K=V")
    options = Options({key: value for key, _, value in pairs}, known.rails, known.memory, known.timeout)
    if known.command == "run":
        words = known.words[1:] if known.words[:1] == ["--"] else known.words
        if not words:
            parser.error("run wants a command")
        return run_one(lab, words, options)
    named = [text.partition("=") for text in known.commands]
    if not all(name and separator for name, separator, _ in named):
        parser.error("guests wants NAME=COMMAND")
    try:
        return run_several(lab, {name: command for name, _, command in named}, options, known.when, known.until)
    except ValueError as problem:
        parser.error(str(problem))


def _say(text: str) -> None:
    print(f"rdma-lab: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a text stream, unless someone replaced it
    os.environ.setdefault("LANG", "C.UTF-8")
    sys.exit(main(sys.argv[1:]))
