"""`scripts/rdma-lab run` and `guests`: jobs with their output passed on while they run."""

from __future__ import annotations

import shlex
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from scripts.rdma_lab.guests import Guest, Guests, Job
from scripts.rdma_lab.places import Lab, LabError

TIMED_OUT = 124
_ACTIONS = ("kill", "down", "up", "lose")


@dataclass(frozen=True, slots=True)
class Options:
    """`seconds` for everything after the boot."""

    environment: Mapping[str, str]
    rails: int
    memory: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Trigger:
    file: str
    action: str
    guest: str
    percent: float

    @classmethod
    def parse(cls, text: str, names: Sequence[str]) -> Trigger:
        """FILE=ACTION:NAME[:PERCENT]. Raises ValueError."""
        file, _, rest = text.partition("=")
        action, _, rest = rest.partition(":")
        guest, _, percent = rest.partition(":")
        if not file or "/" in file or action not in _ACTIONS or guest not in names:
            raise ValueError(f"--when {text}: want FILE=ACTION:NAME, {'|'.join(_ACTIONS)}, one of the guests")
        return cls(file, action, guest, float(percent or 0))

    def act(self, guest: Guest) -> None:
        if self.action == "kill":
            guest.kill()
        elif self.action == "lose":
            guest.lose(self.percent)
        else:
            guest.link(up=self.action == "up")


def run_one(lab: Lab, words: Sequence[str], options: Options) -> int:
    """The command in one guest, its output ours, its status ours."""
    with _ended_by_signals(), _guests(lab, ("a",), options) as guests:
        job = guests["a"].start(shlex.join(words))
        tails = [_Tail(job.out, sys.stdout.buffer), _Tail(job.err, sys.stderr.buffer)]
        deadline = time.monotonic() + options.seconds
        while (code := _code(job)) is None and time.monotonic() < deadline:
            _pass_on(tails)
            time.sleep(0.05)
        _pass_on(tails, last=True)
        if code is None:
            print(f"rdma-lab: not done after {options.seconds:g} s", file=sys.stderr)
        return TIMED_OUT if code is None else code


def run_several(lab: Lab, commands: Mapping[str, str], options: Options, when: Sequence[str], until: str | None) -> int:
    """A command in each guest. The first status that is not 0, in their order; with `until`, that guest's. The guests
    that a trigger killed do not count.
    """
    names = tuple(commands)
    if until is not None and until not in names:
        raise ValueError(f"--until {until} is none of the guests")
    waiting = [Trigger.parse(text, names) for text in when]
    killed: set[str] = set()
    with _ended_by_signals(), _guests(lab, names, options) as guests:
        jobs = {name: guests[name].start(command) for name, command in commands.items()}
        tails = [
            _Tail(path, stream.buffer, f"[{name}] ".encode())
            for name, job in jobs.items()
            for path, stream in ((job.out, sys.stdout), (job.err, sys.stderr))
        ]
        codes: dict[str, int] = {}
        deadline = time.monotonic() + options.seconds
        while time.monotonic() < deadline:
            for trigger in [one for one in waiting if (guests.shared / one.file).exists()]:
                waiting.remove(trigger)
                print(f"rdma-lab: {trigger.action} {trigger.guest}", file=sys.stderr)
                if trigger.action == "kill":
                    killed.add(trigger.guest)
                trigger.act(guests[trigger.guest])
            for name in [name for name in names if name not in codes and name not in killed]:
                code = _code(jobs[name])
                if code is not None:
                    codes[name] = code
            _pass_on(tails)
            if until in codes or len(codes) + len(killed) == len(names):
                break
            time.sleep(0.02)
        else:
            _pass_on(tails, last=True)
            print(f"rdma-lab: not done after {options.seconds:g} s", file=sys.stderr)
            return TIMED_OUT
        _pass_on(tails, last=True)
        if until is not None:
            return codes.get(until, 1)
        return next((codes[name] for name in names if codes.get(name)), 0)


def _code(job: Job) -> int | None:
    """As Job.code; a guest that died under its job is status 1."""
    try:
        return job.code()
    except LabError as problem:
        print(f"rdma-lab: {problem}", file=sys.stderr)
        return problem.code


class _Tail:
    """Passes a growing file on; with a prefix, whole lines of it."""

    def __init__(self, path: Path, out: BinaryIO, prefix: bytes = b"") -> None:
        self._path = path
        self._out = out
        self._prefix = prefix
        self._at = 0
        self._rest = b""

    def step(self, *, last: bool) -> None:
        try:
            with open(self._path, "rb") as file:
                file.seek(self._at)
                new = file.read()
        except FileNotFoundError:
            return
        self._at += len(new)
        if not self._prefix:
            self._out.write(new)
        else:
            *lines, self._rest = (self._rest + new).split(b"\n")
            if last and self._rest:
                lines.append(self._rest)
            self._out.write(b"".join(self._prefix + line + b"\n" for line in lines))
        self._out.flush()


def _pass_on(tails: Sequence[_Tail], *, last: bool = False) -> None:
    for tail in tails:
        tail.step(last=last)


def _guests(lab: Lab, names: Sequence[str], options: Options) -> Guests:
    return Guests(lab, names, rails=options.rails, memory=options.memory, environment=options.environment)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind as Ctrl-C does, so that guests end with us."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
