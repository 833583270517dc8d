"""Guests on a link: started together, given jobs, hurt on purpose, and always ended.

    with Guests(lab, ("node", "client")) as guests:
        serving = guests["node"].start("kvctl node serve /data ..")
        done = guests["client"].run("kvctl load-weights ..", seconds=60)
        guests["node"].kill()

`guests.shared` on the host is /lab in every guest, for coordination and results. A guest's root is the host's, read
when needed; what it writes elsewhere stays in its own memory and ends with it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from scripts.rdma_lab.places import BROKEN, HERE, Lab, LabError
from scripts.rdma_lab.wire import Wire

BOOT_SECONDS = 120.0
# A guest nobody ended by then ends itself, whatever happened to its parent.
LIFETIME_SECONDS = 1800.0
MTU = 9000
URGENT_NICE = 15


@dataclass(frozen=True, slots=True)
class Done:
    """How a job ended. `code` as the shell says it: 128 + n for signal n."""

    code: int
    out: str
    err: str

    def check(self) -> str:
        """Its output. Raises LabError when it failed."""
        if self.code:
            raise LabError(
                f"a job in a guest ended with {self.code}: {self.out[-3000:]}\n{self.err[-3000:]}", code=BROKEN
            )
        return self.out


class Job:
    """One command in a guest. `out` and `err` are its output's files on the host, and grow while it runs."""

    def __init__(self, guest: Guest, number: int) -> None:
        self._guest = guest
        self._number = number
        base = guest.home / str(number)
        self.out, self.err, self._rc = (base.with_suffix(f".{name}") for name in ("out", "err", "rc"))

    def code(self) -> int | None:
        """Its exit code, None while it runs. Raises LabError when its guest is gone and left none."""
        alive = self._guest.alive()  # asked first: a guest may end right after it wrote the code
        with contextlib.suppress(FileNotFoundError, ValueError):
            return int(self._rc.read_text())
        if not alive:
            raise LabError(f"guest {self._guest.name} is gone, and its job {self._number} with it", code=BROKEN)
        return None

    def wait(self, seconds: float) -> Done:
        """Raises LabError, and kills the job, when it takes longer."""
        deadline = time.monotonic() + seconds
        while (code := self.code()) is None:
            if time.monotonic() > deadline:
                with contextlib.suppress(LabError):
                    self._guest.start(f"kill -9 -- -$(cat /run/guest/{self._number}.pid)", urgent=True)
                said = f"{self._text(self.out)[-2000:]}\n{self._text(self.err)[-2000:]}"
                raise LabError(
                    f"job {self._number} in {self._guest.name} still ran after {seconds:g} s: {said}", code=BROKEN
                )
            time.sleep(0.02)
        return Done(code, self._text(self.out), self._text(self.err))

    def wait_for(self, text: str, seconds: float) -> str:
        """Waits until the job has printed `text` (to either), and gives all its output."""
        deadline = time.monotonic() + seconds
        while True:
            code = self.code()
            seen = self._text(self.out) + self._text(self.err)
            if text in seen:
                return seen
            if code is not None or time.monotonic() > deadline:
                raise LabError(f"job {self._number} in {self._guest.name} (ended: {code}) never said {text!r}: "
                               f"{seen[-3000:]}", code=BROKEN)  # fmt: skip
            time.sleep(0.02)

    def wait_for_file(self, path: Path, seconds: float) -> None:
        """Waits until a file is there that the job makes. Raises LabError when it ends without, or takes too long."""
        deadline = time.monotonic() + seconds
        while not path.exists():
            code = self.code()
            if (code is not None and not path.exists()) or time.monotonic() > deadline:
                said = f"{self._text(self.out)[-2000:]}\n{self._text(self.err)[-2000:]}"
                raise LabError(f"job {self._number} in {self._guest.name} (ended: {code}) made no {path.name}: {said}",
                               code=BROKEN)  # fmt: skip
            time.sleep(0.01)

    def signal(self, number: signal.Signals) -> None:
        """To the job and all that it started."""
        self._guest.run(f"kill -{number.value} -- -$(cat /run/guest/{self._number}.pid)", urgent=True)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    @staticmethod
    def _text(path: Path) -> str:
        with contextlib.suppress(FileNotFoundError):
            return path.read_text(errors="replace")
        return ""


class Guest:
    """One running kernel. Use Guests to make them."""

    def __init__(
        self, name: str, home: Path, address: str, process: subprocess.Popen[bytes], line: socket.socket,
        environment: Mapping[str, str], folder: str,
    ) -> None:  # fmt: skip
        self.name = name
        self.home = home
        self.address = address
        self._process = process
        self._line = line
        self._environment = environment
        self._folder = folder
        self._numbers = 0

    def alive(self) -> bool:
        return self._process.poll() is None

    def start(self, command: str, environment: Mapping[str, str] | None = None, *, urgent: bool = False) -> Job:
        """Starts a shell command. Returns at once. `urgent`: before everything else that runs there."""
        if not self.alive():
            raise LabError(f"guest {self.name} is gone: {self.console()[-2000:]}", code=BROKEN)
        number = self._numbers
        self._numbers += 1
        variables = {**self._environment, **(environment or {})}
        lines = [f"echo $$ >/run/guest/{number}.pid", f"cd {shlex.quote(self._folder)}"]
        settings = " ".join(f"{key}={shlex.quote(value)}" for key, value in variables.items())
        # init's own priority is higher, or a transfer under way would keep the one processor from it for seconds
        lower = "" if urgent else f"nice -n {URGENT_NICE} "
        lines.append(f"exec {lower}env -i {settings} /bin/bash -c {shlex.quote(command)}")
        (self.home / f"{number}.sh").write_text("\n".join(lines) + "\n")
        self._line.sendall(f"{number}\n".encode())
        return Job(self, number)

    def run(
        self,
        command: str,
        *,
        seconds: float = 120.0,
        environment: Mapping[str, str] | None = None,
        urgent: bool = False,
    ) -> Done:
        """Runs a shell command to its end. Raises LabError when it takes longer than `seconds`."""
        return self.start(command, environment, urgent=urgent).wait(seconds)

    def link(self, *, up: bool, rail: int = 0) -> None:
        """Takes the network device down, or up again: what the guest itself sees as a lost link. After it tried to send
        meanwhile, connections are made only when its RDMA device was made anew (`renew`).
        """
        self.run(f"ip link set lan{rail} {'up' if up else 'down'}", urgent=True).check()

    def renew(self, rail: int = 0) -> None:
        """Makes the RDMA device anew, with counters at 0: a driver reloaded. Nothing may use it. In Linux 6.1 the queue
        pair of Soft-RoCE that makes connections stays in error for good once it sent while the link was down.
        """
        name = f"rxe{rail}"
        self.run(f"rdma link delete {name} && rdma link add {name} type rxe netdev lan{rail}", urgent=True).check()

    def lose(self, percent: float, rail: int = 0) -> None:
        """Drops this share of the packets that the guest sends; 0 ends it, 100 is a pulled cable."""
        quiet = f"tc qdisc del dev lan{rail} root 2>/dev/null;"
        # the queue holds what Soft-RoCE posts at once: netem's own limit of 1,000 would drop more than was asked for
        more = f" tc qdisc add dev lan{rail} root netem loss {percent:g}% limit 20000" if percent else " true"
        self.run(quiet + more, urgent=True).check()

    def counters(self, rail: int = 0) -> dict[str, int]:
        """Soft-RoCE's hw_counters."""
        where = f"/sys/class/infiniband/rxe{rail}/ports/1/hw_counters"
        lines = self.run(f"cd {where} && grep -H . *").check().splitlines()
        return {name: int(value) for name, _, value in (line.partition(":") for line in lines)}

    def console(self) -> str:
        """What the kernel and its init said."""
        return (self.home / "console").read_text(errors="replace")

    def kill(self) -> None:
        """Power loss: SIGKILL to the kernel and the processes that it traces. The wire stays, silent."""
        for group in (*_children(self._process.pid), self._process.pid):
            # the kernel makes a session of its own, inside of which are its processes; `timeout` is in another
            for reach in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    reach(group, signal.SIGKILL)
        self._process.wait()

    def ready(self, deadline: float) -> None:
        """Waits for the end of the boot. Raises LabError with the console's last lines."""
        self._line.settimeout(max(0.1, deadline - time.monotonic()))
        said = b""
        with contextlib.suppress(OSError):
            while b"ready" not in said and (more := self._line.recv(256)):
                said += more
        self._line.settimeout(10)
        if b"ready" not in said:
            self.kill()
            why = self.console()[-2000:].strip() or "it said nothing"
            raise LabError(f"guest {self.name} did not boot: {why}", code=BROKEN)

    def halt(self) -> None:
        """Asks it to power off."""
        with contextlib.suppress(OSError):
            self._line.sendall(b"halt\n")

    def close(self, seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        self.kill()
        self._line.close()


class Guests:
    """Guests joined by one wire per rail, each with devices rxe0.. on it and addresses 10.9.<2 + rail>.<1..>; a single
    guest has its devices all the same, for talking to itself. `folder`: what jobs find as their working directory.
    """

    def __init__(
        self,
        lab: Lab,
        names: Sequence[str] = ("a",),
        *,
        rails: int = 1,
        memory: str = "1G",
        folder: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._lab = lab
        self._names = tuple(names)
        self._rails = rails
        self._memory = memory
        self._folder = folder or os.getcwd()
        self._environment = dict(environment or {})
        self._guests: dict[str, Guest] = {}
        self._wires: list[Wire] = []
        self._place: Path | None = None

    @property
    def shared(self) -> Path:
        assert self._place is not None
        return self._place / "shared"

    def __getitem__(self, name: str) -> Guest:
        return self._guests[name]

    def __iter__(self) -> Iterator[Guest]:
        return iter(self._guests.values())

    def __enter__(self) -> Self:
        self._place = Path(tempfile.mkdtemp(prefix="kvctl-rdma-lab."))
        try:
            self.shared.mkdir()
            if len(self._names) > 1:
                self._wires = [Wire(len(self._names)) for _ in range(self._rails)]
            for number, name in enumerate(self._names):
                self._guests[name] = self._boot(number, name)
            deadline = time.monotonic() + BOOT_SECONDS
            for guest in self:
                guest.ready(deadline)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends every guest and removes the shared folder."""
        for guest in self:
            guest.halt()
        for guest in self:
            guest.close(3.0)
        for wire in self._wires:
            wire.close()
        if self._place is not None:
            shutil.rmtree(self._place, ignore_errors=True)

    def _boot(self, number: int, name: str) -> Guest:
        assert self._place is not None
        home = self._place / name
        home.mkdir()
        rails = range(self._rails)
        settings = {
            "lab_name": name,
            "lab_shared": str(self.shared),
            "lab_alone": "no" if self._wires else "yes",
            "lab_mtu": str(MTU),
            "lab_nice": f"-{URGENT_NICE}",
            "lab_addresses": " ".join(f"{_address(number, rail)}/24" for rail in rails),
            "lab_hosts": "\n".join(f"{_address(other, 0)} {known}" for other, known in enumerate(self._names)),
        }
        (home / "settings").write_text("".join(f"{key}={shlex.quote(value)}\n" for key, value in settings.items()))
        ours, theirs = socket.socketpair()
        ends = [wire.ends[number] for wire in self._wires]
        vectors = [
            f"vec{rail}:transport=fd,fd={end.fileno()},mac=52:54:00:{rail:02x}:00:{number + 1:02x},mtu={MTU}"
            for rail, end in enumerate(ends)
        ]
        command = [
            *_on_one_processor(number),
            *("timeout", "--foreground", "-k", "5", f"{LIFETIME_SECONDS:g}", str(self._lab.kernel)),
            *(f"mem={self._memory}", "root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro", "quiet"),
            *(f"init={HERE / 'init.sh'}", f"lab_home={home}", f"lab_init={HERE / 'init.sh'}"),
            *("con=null", "con0=null,fd:2", f"con1=fd:{theirs.fileno()}", "ssl=null", *vectors),
        ]
        with theirs, open(home / "console", "wb") as console:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                pass_fds=[theirs.fileno(), *(end.fileno() for end in ends)],
                env={**os.environ, "TMPDIR": _memory_folder(self._memory)},
                start_new_session=True,
            )
        inside = {
            "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
            "HOME": "/root",
            "TERM": "dumb",
            "LANG": "C.UTF-8",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": str(self._lab.python_path),
            "LAB": "/lab",
            "LAB_GUEST": name,
            "LAB_ADDRESS": _address(number, 0),
            **self._environment,
        }
        return Guest(name, home, _address(number, 0), process, ours, inside, self._folder)


def _on_one_processor(number: int) -> list[str]:
    """What keeps a guest on a processor: its kernel and its processes take turns anyway, and where they wake each other
    across processors of a virtual machine a system call takes 50-70 us instead of 7.
    """
    processors = sorted(os.sched_getaffinity(0))
    if shutil.which("taskset") is None:
        return []
    return ["taskset", "-c", str(processors[(os.getpid() + number) % len(processors)])]


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _address(number: int, rail: int) -> str:
    return f"10.9.{2 + rail}.{number + 1}"


def _memory_folder(memory: str) -> str:
    """Where the kernel keeps its memory, a sparse file: the first place with room (/dev/shm has 64 MB in many
    containers, and a guest that touches more dies of SIGBUS) that programs may run from (theirs is mounted noexec too).
    Raises LabError.
    """
    wanted = int(memory.rstrip("GgMm")) << (30 if memory[-1] in "Gg" else 20)
    places = ("/dev/shm", tempfile.gettempdir(), "/var/tmp")
    for place in places:
        with contextlib.suppress(OSError):
            there = os.statvfs(place)
            fits = there.f_bavail * there.f_frsize >= wanted and not there.f_flag & os.ST_NOEXEC
            if fits and os.access(place, os.W_OK):
                return place
    raise LabError(
        f"no room for {memory} of a guest's memory in {', '.join(places)}", hint="TMPDIR names another place"
    )
