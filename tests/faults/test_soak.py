"""A random killer strikes while epochs are read; for longer with STOKER_SOAK_SECONDS."""

import contextlib
import os
import random
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil
import pytest

from support.cluster import SHORT_LEASE, Cluster, Trainer, reference
from support.proxy import Proxy

SECONDS = float(os.environ.get("STOKER_SOAK_SECONDS", "15"))
SEED = int(os.environ.get("STOKER_SOAK_SEED", "0")) or secrets.randbelow(1 << 32)
MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 2.0, 5.0
HOSTS = 3

pytestmark = [pytest.mark.fault, pytest.mark.e2e, pytest.mark.timeout(SECONDS + 600)]

# Without the time that a sample takes, which changes no byte.
MAP = {"samples": 96, "num_workers": 1, "shape": [3, 80, 80]}
STREAM = {"samples": 96, "num_workers": 2}
SLOW = {"sample_seconds": 0.01, "epochs": 100_000}


@dataclass
class Killer:
    cluster: Cluster
    proxies: list[tuple[Proxy, Proxy]]
    trainers: list[Trainer]
    draw: random.Random
    counts: dict[str, int] = field(default_factory=dict)
    _healing: dict[int, tuple[float, Callable[[], None]]] = field(default_factory=dict)

    def go_on_for(self, seconds):
        end = time.monotonic() + seconds
        strike_at = time.monotonic()
        while time.monotonic() < end:
            for trainer in self.trainers:
                assert trainer.process.poll() is None, trainer.errors[-4000:]
            self._heal(time.monotonic())
            if time.monotonic() >= strike_at:
                self._strike()
                pause = self.draw.uniform(MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS)
                strike_at = time.monotonic() + pause
            time.sleep(0.05)
        self._heal(end + 1000)

    def start(self, host):
        control, batches = self.proxies[host]
        ports = {"advertised_port": control.port, "advertised_batch_port": batches.port}
        self.cluster.start_agent(host, **ports)
        control.target = batches.target = 0

    def find(self):
        for number, (control, batches) in enumerate(self.proxies):
            if not control.target and number not in self._healing:
                control.target = self.cluster.agent_port(number)
                batches.target = control.target + 1

    def _heal(self, now):
        for host, (due, heal) in list(self._healing.items()):
            if now >= due:
                del self._healing[host]
                heal()
        for host, process in enumerate(self.cluster.hosts):
            if host not in self._healing and process.poll() is not None:
                # The process that forks the workers was taken for one of them: the host ended.
                self._kill_host(host, 0.0)
        self.find()

    def _strike(self):
        host = self.draw.randrange(HOSTS)
        often = (self._kill_worker, self._stop_worker, self._cut)
        strikes = (*often, self._kill_host, self._stop_host, self._kill_local)
        (strike,) = self.draw.choices(strikes, (3, 3, 3, 2, 2, 1))
        seconds = self.draw.uniform(0.2, 6.0)
        if host in self._healing:
            return
        name = strike.__name__.strip("_")
        self.counts[name] = self.counts.get(name, 0) + 1
        print(f"{time.strftime('%H:%M:%S')} {name} algo-{host} {seconds:.1f}", flush=True)
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            strike(host, seconds)

    def _kill_worker(self, host, seconds):
        if workers := self.cluster.workers_of(host):
            self.draw.choice(workers).kill()

    def _stop_worker(self, host, seconds):
        if workers := self.cluster.workers_of(host):
            victim = self.draw.choice(workers)
            victim.suspend()
            self._healing[host] = (time.monotonic() + seconds, lambda: _wake(victim))

    def _kill_host(self, host, seconds):
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            self.cluster.kill(host)
        self.cluster.hosts[host].wait(150)
        for proxy in self.proxies[host]:
            proxy.target = 0
        self._healing[host] = (time.monotonic() + seconds, lambda: self.start(host))

    def _stop_host(self, host, seconds):
        self.cluster.stop(host)
        self._healing[host] = (time.monotonic() + seconds, lambda: self.cluster.cont(host))

    def _cut(self, host, seconds):
        # Far more goes over the one for batches.
        proxy, share = self.draw.choice(tuple(zip(self.proxies[host], (0.02, 1.0), strict=True)))
        proxy.arm(cut_after=round(seconds * share * 10_000))

    def _kill_local(self, host, seconds):
        trainer = self.draw.choice(self.trainers)
        if children := psutil.Process(trainer.process.pid).children():
            self.draw.choice(children).kill()


def _wake(process):
    with contextlib.suppress(psutil.Error):
        process.resume()


def test_every_batch_is_exact_while_workers_hosts_and_connections_are_struck_at_random():
    print(f"STOKER_SOAK_SEED={SEED} STOKER_SOAK_SECONDS={SECONDS:g}", flush=True)
    with contextlib.ExitStack() as stack:
        proxies = [tuple(map(stack.enter_context, (Proxy(), Proxy()))) for _ in range(HOSTS)]
        cluster = stack.enter_context(Cluster(agents=HOSTS, workers=2, late=True, feed=SHORT_LEASE))
        until = str(cluster.folder / "enough")
        scripts = {"feed_script.py": MAP, "stream_script.py": STREAM}
        trainers = [
            cluster.train(rank=rank, world=1, script=script, until=until, **given, **SLOW)
            for rank, (script, given) in enumerate(scripts.items())
        ]
        draw = random.Random(SEED)
        killer = Killer(cluster=cluster, proxies=proxies, trainers=trainers, draw=draw)
        for host in range(HOSTS):
            killer.start(host)
        killer.find()
        for trainer in trainers:
            trainer.until("hash")
        killer.go_on_for(SECONDS)
        (cluster.folder / "enough").touch()
        for rank, (script, given) in enumerate(scripts.items()):
            found = trainers[rank].finish()
            epochs = len({line["epoch"] for line in found if "epoch" in line})
            print(f"{script}: {len(found)} lines, {epochs} epochs, {killer.counts}")
            torchs = {"torch": True} if script == "stream_script.py" else {}
            assert found == reference(script=script, rank=rank, epochs=epochs, **given, **torchs)
