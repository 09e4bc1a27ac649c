"""AWS for tests: moto's server in its own process, on a free port of the loopback interface.

`aws_server` gives an empty AWS for one test; the process is started once a test session, for the
first test that asks, and ended with the session. The environment of the test is changed so that
boto3 speaks to it, and nothing else can be reached.
"""

import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import boto3
import pytest

from support.processes import end, started

START_SECONDS = 150.0
STOP_SECONDS = 10.0
REGION = "eu-central-1"
ACCOUNT = "123456789012"
ROLE = f"arn:aws:iam::{ACCOUNT}:role/stoker"

_SECRETS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_RUNNING = re.compile(r"Running on (http://127\.0\.0\.1:\d+)")
# Without the user's settings, keys or proxies: a test may reach the loopback interface only.
_FOREIGN = re.compile(r"^(AWS_|BOTO_|MOTO_)|_proxy$", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsServer:
    """An AWS for one test; with `env` a process speaks to it and to nothing else."""

    url: str
    env: Mapping[str, str]

    def client(self, service: str) -> object:
        return boto3.client(service, region_name=REGION)

    def make_bucket(self, name: str) -> None:
        where = {"CreateBucketConfiguration": {"LocationConstraint": REGION}}
        self.client("s3").create_bucket(Bucket=name, **where)

    def environ(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not _FOREIGN.search(name)}
        return {**kept, **self.env}

    def reset(self) -> None:
        request = urllib.request.Request(f"{self.url}/moto-api/reset", method="POST")
        _opener().open(request, timeout=START_SECONDS).close()


def _environment(url: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": url,
        **dict.fromkeys(_SECRETS, "testing"),
        **dict.fromkeys(("AWS_REGION", "AWS_DEFAULT_REGION"), REGION),
        "AWS_EC2_METADATA_DISABLED": "true",
        **dict.fromkeys(("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"), os.devnull),
        "NO_PROXY": "127.0.0.1,localhost",
    }


@pytest.fixture(scope="session")
def moto_process(tmp_path_factory):
    """Runs moto's server; ask for `aws_server`, which is emptied for each test."""
    folder = tmp_path_factory.mktemp("moto")
    log = folder / "moto.log"
    kept = {name: value for name, value in os.environ.items() if not _FOREIGN.search(name)}
    # Machine images are not used; reading their list takes a second.
    own = {**_environment("http://127.0.0.1:9"), "MOTO_EC2_LOAD_DEFAULT_AMIS": "false"}
    words = [sys.executable, "-c", "from moto.server import main; main()", "-p", "0"]
    process = started(words, log, cwd=folder, env=kept | own)
    try:
        url = _wait_for_start(process, log)
        yield AwsServer(url=url, env=_environment(url))
    finally:
        end(process, STOP_SECONDS)


@pytest.fixture
def aws_server(moto_process, monkeypatch):
    """Gives an empty AWS on the loopback interface, which boto3 finds by the environment."""
    return emptied(moto_process, monkeypatch)


def emptied(server: AwsServer, patch: pytest.MonkeyPatch) -> AwsServer:
    """Empties the server, and lets boto3 find it by the environment until that is undone."""
    for name in list(os.environ):
        if _FOREIGN.search(name):
            patch.delenv(name)
    for name, value in server.env.items():
        patch.setenv(name, value)
    server.reset()
    return server


def _wait_for_start(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    while not (found := _RUNNING.search(said := log.read_text(errors="replace"))):
        is_starting = process.poll() is None and time.monotonic() < deadline
        assert is_starting, f"moto's server did not start: {said}"
        time.sleep(0.05)
    _opener().open(f"{found.group(1)}/moto-api/", timeout=START_SECONDS).close()
    return found.group(1)


def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))
