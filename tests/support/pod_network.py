"""A cluster's network: pods with separate addresses, and a DNS server for them.

Each pod has a network namespace with one interface, routed by one more namespace that stands for
the nodes. What no pod has is a black hole, as the address of a pod that is gone: no answer, no
error. Namespaces belong to processes that end with this one, so that nothing is left behind.
"""

import contextlib
import ctypes
import os
import socket
import struct
import subprocess
import threading
import time
from pathlib import Path

import pytest

from support.processes import ran, until

NAMESERVER = "10.96.0.10"
GATEWAY = "169.254.1.1"
_CLONE_NEWNET = 0x40000000
_A, _NXDOMAIN = 1, 3
_NEEDED = (
    f"ip link set lo up && ip addr add {GATEWAY}/32 dev lo && ip addr add {NAMESERVER}/32 dev lo"
    " && ip route add blackhole 10.244.0.0/16 && echo 1 > /proc/sys/net/ipv4/ip_forward"
)


class Names:
    """The DNS server: answers for A records over UDP, all else is empty or NXDOMAIN.

    `given`: name without the domain to its answers so far, () for NXDOMAIN. Those whom it is
    `deaf_to` get no answer.
    """

    def __init__(self, namespace: str, *, domain: str) -> None:
        self.domain = domain
        self.given: dict[str, list[tuple[str, ...]]] = {}
        self.deaf_to: set[str] = set()
        self._records: dict[str, list[tuple[float, tuple[str, ...]]]] = {}
        self._is_listening = threading.Event()
        self._is_closing = False
        self._thread = threading.Thread(target=self._serve, args=(namespace,), daemon=True)
        self._thread.start()
        assert self._is_listening.wait(150), "the DNS server does not listen"

    def publish(self, name: str, *addresses: str, after_seconds: float = 0.0) -> None:
        """Gives `name` these addresses from then on; until then it keeps what it has."""
        since = time.monotonic() + after_seconds
        self._records.setdefault(name, []).append((since, addresses))

    def count(self, name: str, *addresses: str) -> int:
        return self.given.get(name, []).count(addresses)

    def close(self) -> None:
        self._is_closing = True
        self._thread.join(150)

    def _serve(self, namespace: str) -> None:
        # This thread alone is there; what it opens stays there.
        with open(namespace) as file:
            assert ctypes.CDLL(None).setns(file.fileno(), _CLONE_NEWNET) == 0
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
            server.bind((NAMESERVER, 53))
            server.settimeout(0.1)
            self._is_listening.set()
            while not self._is_closing:
                try:
                    query, client = server.recvfrom(512)
                except TimeoutError:
                    continue
                if client[0] in self.deaf_to:
                    continue
                with contextlib.suppress(OSError, ValueError, struct.error, IndexError):
                    server.sendto(self._answer(query), client)

    def _answer(self, query: bytes) -> bytes:
        number, _, _, _, _, _ = struct.unpack_from("!6H", query)
        labels, end = [], 12
        while query[end]:
            labels.append(query[end + 1 : end + 1 + query[end]].decode())
            end += 1 + query[end]
        (kind,) = struct.unpack_from("!H", query, end + 1)
        question = query[12 : end + 5]
        name = ".".join(labels).lower()
        found: tuple[str, ...] = ()
        if name.endswith("." + self.domain):
            short = name.removesuffix("." + self.domain)
            now, records = time.monotonic(), reversed(self._records.get(short, []))
            found = next((addresses for since, addresses in records if now >= since), ())
            if kind == _A:
                self.given.setdefault(short, []).append(found)
        addresses = found if kind == _A else ()
        flags = 0x8580 if found else 0x8580 | _NXDOMAIN
        head = struct.pack("!6H", number, flags, 1, len(addresses), 0, 0)
        records = b"".join(
            struct.pack("!HHHIH", 0xC00C, _A, 1, 5, 4) + socket.inet_aton(address)
            for address in addresses
        )
        return head + question + records


class Sandbox:
    """A pod's network namespace, host name and address; a command after `enter` runs in there."""

    def __init__(self, network, *, hostname, number, address):
        self.address = address or f"10.244.{number // 250}.{number % 250 + 2}"
        self._network = network
        self._port = f"pod{number}"
        self._holder = _hold("--net", "--uts")
        places = f"/proc/{self._holder.pid}/ns"
        self.enter = ("nsenter", f"--net={places}/net", f"--uts={places}/uts")
        network.run(f"ip link add {self._port} type veth peer name eth0 netns {self._holder.pid}")
        self.connect()
        _run(
            *self.enter,
            f"hostname {hostname} && ip link set lo up && ip addr add {self.address}/32 dev eth0"
            f" && ip link set eth0 up && ip route add {GATEWAY} dev eth0"
            f" && ip route add default via {GATEWAY}",
        )

    def connect(self) -> None:
        self._network.run(
            f"ip link set {self._port} up && ip route add {self.address} dev {self._port}"
        )
        self._network.run(f"ip rule del from {self.address} blackhole 2> /dev/null || true")
        self._network.names.deaf_to.discard(self.address)

    def disconnect(self) -> None:
        """Loses what the pod sends and what is sent to it, without an error."""
        self._network.names.deaf_to.add(self.address)
        self._network.run(
            f"ip rule add from {self.address} blackhole && ip route del {self.address}"
        )

    def close(self) -> None:
        """Ends it, without a word to anybody; may be called twice."""
        if self._holder.poll() is None:
            # Without its interface nothing gets out.
            self._network.run(f"ip link del {self._port}")
            _end(self._holder)


class PodNetwork:
    """The nodes' network; it ends with all sandboxes when the context ends."""

    def __init__(self, *, domain: str) -> None:
        self._domain = domain
        self._sandboxes: list[Sandbox] = []

    def __enter__(self) -> "PodNetwork":
        if os.geteuid():
            pytest.skip("network namespaces are made by root")
        self._holder = _hold("--net")
        try:
            self.run(_NEEDED)
        except AssertionError as err:
            self.__exit__()
            pytest.skip(f"cannot make a network here: {err}")
        self.names = Names(f"/proc/{self._holder.pid}/ns/net", domain=self._domain)
        return self

    def __exit__(self, *_: object) -> None:
        for sandbox in self._sandboxes:
            sandbox.close()
        if hasattr(self, "names"):
            self.names.close()
        _end(self._holder)

    def sandbox(self, hostname: str, *, address: str | None = None) -> Sandbox:
        """Makes a new sandbox, with an address that none had before, or one that is free again."""
        number = len(self._sandboxes)
        made = Sandbox(self, hostname=hostname, number=number, address=address)
        self._sandboxes.append(made)
        return made

    def run(self, script: str) -> None:
        _run("nsenter", f"--net=/proc/{self._holder.pid}/ns/net", script)


def _hold(*namespaces: str) -> "subprocess.Popen[bytes]":
    """Starts a process with new namespaces, which end with it; it ends with this process."""
    words = ["setpriv", "--pdeathsig", "KILL", "unshare", *namespaces, "sleep", "infinity"]
    holder = subprocess.Popen(words, stdin=subprocess.DEVNULL)
    executable = Path(f"/proc/{holder.pid}/comm")
    until(
        lambda: holder.poll() is not None or executable.read_text() == "sleep\n",
        what="new namespaces",
    )
    if holder.poll() is not None:
        pytest.skip("this machine makes no network namespaces")
    return holder


def _end(holder: "subprocess.Popen[bytes]") -> None:
    holder.kill()
    holder.wait(150)


def _run(*words: str) -> None:
    """Runs `words` and, at their end, a shell script."""
    *head, script = words
    done = ran([*head, "sh", "-ec", script], timeout=150)
    assert done.returncode == 0, f"{script}: {done.stderr}"
