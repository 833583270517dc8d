"""The faulty S3 server as a program that a user starts."""

from __future__ import annotations

import subprocess
import sys

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from kvctl.testing.faulty_s3 import Fault, parse_fault


def test_it_serves_and_misbehaves_as_told() -> None:
    command = [
        sys.executable,
        "-m",
        "kvctl.testing.faulty_s3",
        "--bucket",
        "lab",
        "--fault",
        "status,methods=PUT,times=1",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            endpoint = process.stdout.readline().split()[0]
            client = boto3.session.Session().client(
                "s3", endpoint_url=endpoint, config=Config(retries={"total_max_attempts": 1})
            )
            with pytest.raises(ClientError, match="SlowDown"):
                client.put_object(Bucket="lab", Key="k", Body=b"hello")
            client.put_object(Bucket="lab", Key="k", Body=b"hello")
            assert client.get_object(Bucket="lab", Key="k", Range="bytes=1-2")["Body"].read() == b"el"
            client.close()
            assert [process.stdout.readline().split() for _ in range(3)] == [
                ["503", "PUT", "lab/k", "114"],
                ["200", "PUT", "lab/k", "0"],
                ["206", "GET", "lab/k", "bytes=1-2", "2"],
            ]
        finally:
            process.terminate()


def test_faults_are_written_as_text() -> None:
    fault = parse_fault("truncate,key=*.safetensors,after=1000,every=3,methods=GET+HEAD")
    assert fault == Fault("truncate", key="*.safetensors", after=1000, every=3, methods=("GET", "HEAD"))
