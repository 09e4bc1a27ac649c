"""Two hosts, and a line between them that lets little through.

Each has a network namespace, held by a process that ends with the context: nothing
is left behind.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.processes import ran

SERVER = Path(__file__).with_name("byte_server.py")
_FAR, _NEAR = "10.9.0.1", "10.9.0.2"


@dataclass(frozen=True)
class Line:
    enter: list[str]
    server: str


@contextlib.contextmanager
def narrow_network(*, mbit: int, answer_bytes: int) -> Iterator[Line]:
    if os.geteuid() or not shutil.which("tc") or not shutil.which("ip"):
        pytest.skip("namespaces and their queues are made by root, with ip and tc")
    with contextlib.ExitStack() as stack:
        far, near = (_hold(stack) for _ in range(2))
        _in(far, f"ip link add far type veth peer name near netns {near.pid}")
        _in(far, f"ip addr add {_FAR}/24 dev far && ip link set far up")
        _in(far, f"tc qdisc add dev far root tbf rate {mbit}mbit burst 32kb latency 400ms")
        _in(near, f"ip addr add {_NEAR}/24 dev near && ip link set near up")
        command = [sys.executable, str(SERVER), _FAR, str(answer_bytes)]
        server = _start(stack, [*_enter(far), *command])
        yield Line(enter=_enter(near), server=f"{_FAR}:{_word(server, 'listening')}")


def _hold(stack: contextlib.ExitStack) -> "subprocess.Popen[str]":
    up = "ip link set lo up && echo ready now && exec sleep 300"
    held = _start(stack, ["unshare", "--net", "sh", "-c", up])
    _word(held, "ready")
    return held


def _start(stack: contextlib.ExitStack, command: list[str]) -> "subprocess.Popen[str]":
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    stack.callback(process.communicate)
    stack.callback(process.kill)
    return process


def _word(process: "subprocess.Popen[str]", first: str) -> str:
    words = process.stdout.readline().split()
    if words[:1] != [first]:
        pytest.skip(f"no namespace, or nothing in it: {words}")
    return words[1]


def _enter(held: "subprocess.Popen[str]") -> list[str]:
    return ["nsenter", "--target", str(held.pid), "--net"]


def _in(held: "subprocess.Popen[str]", command: str) -> None:
    done = ran([*_enter(held), "sh", "-ec", command])
    if done.returncode:
        pytest.skip(f"not to be had here: {command}: {done.stderr.strip()}")
