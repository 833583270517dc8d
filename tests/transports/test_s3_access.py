"""How an S3 server is reached: addresses, credentials, regions, TLS; and what cannot be meant."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvctl.core.addresses import StoreConfig
from kvctl.core.errors import AuthError, ConfigError, EnvError, UsageError
from kvctl.testing.buffers import GuardedBuffer
from kvctl.testing.faulty_s3 import FaultyS3
from kvctl.testing.transport_contract import drive
from kvctl.transports.api import Op, Status
from kvctl.transports.registry import choose, open_store, open_transports
from tests.transports.s3_reads import DATA, SIZE, read, read_error, stat_error


@pytest.mark.parametrize("addressing", ["auto", "path"])
def test_an_ip_endpoint_is_addressed_by_path(server: FaultyS3, addressing: str) -> None:
    read(server.store(addressing=addressing))
    assert {item.host for item in server.log} == {f"127.0.0.1:{server.port}"}


def test_a_trailing_slash_of_the_endpoint_and_of_the_url_changes_nothing(server: FaultyS3) -> None:
    config = StoreConfig("s3://bucket/dir", (f"{server.endpoint}/",))
    (done,) = read(config, key="w.bin")
    assert done.status is Status.DONE


def test_virtual_host_addressing_puts_the_bucket_into_the_host(
    server: FaultyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = socket.getaddrinfo

    def resolve(host: str, *arguments: object, **options: object) -> object:
        return real("127.0.0.1" if host == "bucket.s3.test" else host, *arguments, **options)  # type: ignore[arg-type] # passed through

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    config = StoreConfig("s3://bucket", (f"http://s3.test:{server.port}",), {"addressing": "virtual"})
    (done,) = read(config)
    assert done.status is Status.DONE
    store = open_store(config)
    assert store.stat("dir/w.bin").size == SIZE
    assert store.put("a b+ü", b"x").size == 1
    store.close()
    assert {item.host for item in server.log} == {f"bucket.s3.test:{server.port}"}


def test_virtual_host_addressing_of_an_ip_is_refused(server: FaultyS3) -> None:
    with pytest.raises(UsageError, match="IP address"):
        open_store(server.store(addressing="virtual")).stat("x")


def test_anonymous_access_sends_no_signature(server: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> None:
    error = read_error(server.store(anonymous="true"))
    assert type(error) is AuthError
    server.anonymous = True
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert read(server.store(anonymous="true"))[0].status is Status.DONE
    store = open_store(server.store(anonymous="true"))
    assert store.stat("dir/w.bin").size == SIZE
    store.close()


def test_no_credentials_is_an_auth_error_that_says_how(server: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    for error in (read_error(server.store()), stat_error(server.store())):
        assert type(error) is AuthError
        assert "AWS_ACCESS_KEY_ID" in (error.hint or "")
        assert "anonymous=true" in (error.hint or "")
    assert server.log == []


def test_session_tokens_are_sent_and_signed(server: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> None:
    server.session_token = "token+/=="
    assert type(read_error(server.store())) is AuthError
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token+/==")
    assert read(server.store())[0].status is Status.DONE
    store = open_store(server.store())
    assert store.stat("dir/w.bin").size == SIZE
    store.close()


def test_credentials_and_region_come_from_a_profile(
    server: FaultyS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "aws-config"
    config.write_text(
        f"[profile lab]\nregion = lab-1\naws_access_key_id = {server.access_key}\n"
        f"aws_secret_access_key = {server.secret_key}\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.delenv(name)
    server.region = "lab-1"
    assert read(server.store(profile="lab"))[0].status is Status.DONE
    with pytest.raises(ConfigError, match="no AWS profile 'lib'"):
        open_store(server.store(profile="lib"))


def test_the_endpoint_may_come_from_the_environment(server: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.endpoint)
    assert read(StoreConfig("s3://bucket"))[0].status is Status.DONE
    store = open_store(StoreConfig("s3://bucket"))
    assert store.stat("dir/w.bin").size == SIZE
    store.close()
    assert {item.host for item in server.log} == {f"127.0.0.1:{server.port}"}


def test_a_wrong_region_is_named_with_the_right_one(server: FaultyS3) -> None:
    server.region = "eu-central-1"
    for error in (read_error(server.store()), stat_error(server.store())):
        assert type(error) is ConfigError
        assert error.hint == "use region=eu-central-1"
    assert read(server.store(region="eu-central-1"))[0].status is Status.DONE


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A self-signed certificate for 127.0.0.1, as PEM files: it is its own CA."""
    folder = tmp_path_factory.mktemp("tls")
    chain, key = str(folder / "ca.pem"), str(folder / "key.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=kvctl test",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", chain],
        check=True, capture_output=True,
    )  # fmt: skip
    return chain, key


def test_tls_with_a_custom_ca(certificate: tuple[str, str]) -> None:
    with FaultyS3(tls_certificate=certificate) as server:
        server.put("dir/w.bin", DATA)
        for error in (read_error(server.store()), stat_error(server.store())):
            assert type(error) is EnvError
            assert error.exit_code == 10
            assert "TLS" in error.what
            assert "ca_bundle" in (error.hint or "")
        config = server.store(ca_bundle=certificate[0])
        assert {item.status for item in read(config, size=SIZE, count=3)} == {Status.DONE}
        store = open_store(config)
        assert store.stat("dir/w.bin").size == SIZE
        (transport,) = open_transports(config, store, choose("s3", "host"))
        buffer = GuardedBuffer(3_000_001)
        buffer.view[:] = (DATA * 16)[:3_000_001]
        done = drive(transport, [Op(1, "write", "up", 0, 3_000_001, buffer, object_size=3_000_001)])[1]
        assert done.status is Status.DONE
        assert server.objects["bucket", "up"].data == bytes(buffer.view)
        assert not transport.capabilities.zero_copy
        transport.close()
        store.close()
        buffer.close()


def test_tls_to_a_plain_port_is_a_tls_error(server: FaultyS3, certificate: tuple[str, str]) -> None:
    config = StoreConfig("s3://bucket", (server.endpoint.replace("http://", "https://"),))
    for error in (read_error(config), stat_error(config)):
        assert type(error) is EnvError
        assert "TLS" in error.what


@pytest.mark.parametrize(
    ("url", "endpoints", "options"),
    [
        ("s3://", (), {}),
        ("s3://bucket", ("ftp://x",), {}),
        ("s3://bucket", ("http://user:pass@host",), {}),
        ("s3://bucket", ("http://host/path",), {}),
        ("s3://bucket", (), {"colour": "red"}),
        ("s3://bucket", (), {"anonymous": "maybe"}),
        ("s3://bucket", (), {"timeout": "soon"}),
        ("s3://bucket", (), {"ca_bundle": "/no/such/file.pem"}),
    ],
)
def test_what_cannot_be_meant_is_refused(url: str, endpoints: tuple[str, ...], options: dict[str, str]) -> None:
    with pytest.raises(UsageError) as caught:
        open_store(StoreConfig(url, endpoints, options))
    assert "pass" not in str(caught.value).replace("bypass", "")


def test_reading_and_writing_with_keys_from_the_environment_does_not_import_boto3(server: FaultyS3) -> None:
    program = (
        "import sys\n"
        "from kvctl.core.addresses import StoreConfig\n"
        "from kvctl.transports.registry import open_store\n"
        f"store = open_store(StoreConfig('s3://bucket', ({server.endpoint!r},)))\n"
        "assert [item.key for item in store.list()] == ['dir/w.bin']\n"
        "assert store.get('dir/w.bin', 0, 3) == bytes([0, 1, 2])\n"
        f"assert store.stat('dir/w.bin').size == {SIZE}\n"
        "assert store.now().year > 2000\n"
        "first = store.put('new', b'1', if_absent=True)\n"
        "store.put('new', b'22', if_version=first.version)\n"
        "assert store.get('new') == b'22'\n"
        "store.delete(['new'])\n"
        "store.delete(['new'])\n"
        "store.close()\n"
        "assert not {'boto3', 'botocore', 'urllib3', 'numpy', 'torch'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)
