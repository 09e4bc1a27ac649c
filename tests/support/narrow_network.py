"""Two hosts, and a line between them that lets little through."""

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.pod_network import PodNetwork
from support.processes import ran

SERVER = Path(__file__).with_name("byte_server.py")


@dataclass(frozen=True)
class Line:
    enter: tuple[str, ...]
    server: str


@contextlib.contextmanager
def narrow_network(*, mbit: int, answer_bytes: int) -> Iterator[Line]:
    if not shutil.which("tc"):
        pytest.skip("a queue of a network is made by tc")
    with PodNetwork(domain="narrow") as network, contextlib.ExitStack() as stack:
        far, near = network.sandbox("far"), network.sandbox("near")
        queue = f"tc qdisc add dev eth0 root tbf rate {mbit}mbit burst 32kb latency 400ms"
        if (done := ran([*far.enter, "sh", "-ec", queue])).returncode:
            pytest.skip(f"not to be had here: {queue}: {done.stderr.strip()}")
        command = [*far.enter, sys.executable, str(SERVER), far.address, str(answer_bytes)]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        stack.callback(server.communicate)
        stack.callback(server.kill)
        word, port = server.stdout.readline().split()
        assert word == "listening"
        yield Line(enter=near.enter, server=f"{far.address}:{port}")
