"""Who is slow, stopped, cut off in the middle or late does not stop the others, nor change a byte.

Every batch of every run is compared with the same script without any cluster.
"""

import functools
import json
import select
import socket
import threading

import psutil
import pytest

from support.cluster import Cluster, Line, run_script, wait_until

pytestmark = [pytest.mark.fault, pytest.mark.timeout(180)]

SLOW = {"sample_seconds": 0.01, "samples": 96, "epochs": 1}


@functools.cache
def _reference(given: str) -> tuple[str, ...]:
    return tuple(json.dumps(line) for line in run_script(json.loads(given)).finish())


def reference(**given: object) -> list[Line]:
    """What the script yields alone, with num_workers=0."""
    return [json.loads(line) for line in _reference(json.dumps(given, sort_keys=True))]


def test_stopped_worker_of_the_only_host_is_not_waited_for() -> None:
    with Cluster(agents=1, workers=2) as cluster:
        trainer = cluster.train(pause_at=5, **SLOW)
        trainer.until("pause")
        cluster.workers_of(0)[0].suspend()
        trainer.go_on()
        assert trainer.finish() == reference(**SLOW)
        assert "batch_overdue" in cluster.log_of(0).read_text()


def test_stopped_local_worker_is_not_waited_for() -> None:
    with Cluster(agents=1, late=True) as cluster:
        trainer = cluster.train(pause_at=5, num_workers=2, **SLOW)
        trainer.until("pause")
        psutil.Process(trainer.process.pid).children()[0].suspend()
        trainer.go_on()
        assert trainer.finish() == reference(**SLOW)
        assert "local_batch_overdue" in trainer.errors


def test_what_a_worker_makes_that_is_woken_late_is_dropped() -> None:
    given = {**SLOW, "epochs": 3}
    with Cluster(agents=1, workers=2) as cluster:
        trainer = cluster.train(pause_at=5, **given)
        trainer.until("pause")
        stopped = cluster.workers_of(0)[0]
        stopped.suspend()
        trainer.go_on()
        wait_until(
            lambda: "batch_overdue" in cluster.log_of(0).read_text(), "its batch is made again"
        )
        stopped.resume()
        assert trainer.finish() == reference(**given)
        assert "data_worker_died" not in cluster.log_of(0).read_text()


class Proxy:
    """A TCP proxy before an agent that cuts its first connection in the middle of a message.

    Args:
        cut_after: Bytes to the trainer until the cut; the next connections are left alone.
    """

    def __init__(self, *, cut_after: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.target = 0
        self.num_cut = 0
        self._left = cut_after
        self._is_armed = False
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._serve)

    def arm(self) -> None:
        """From here on bytes are counted."""
        self._is_armed = True

    def __enter__(self) -> "Proxy":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closing.set()
        self._thread.join(10)
        assert not self._thread.is_alive()

    def _serve(self) -> None:
        ends: dict[socket.socket, socket.socket] = {}
        to_trainer: set[socket.socket] = set()
        with self._listener:
            while not self._is_closing.is_set():
                for ready in select.select([self._listener, *ends], [], [], 0.05)[0]:
                    if ready is self._listener:
                        client = self._listener.accept()[0]
                        agent = socket.create_connection(("127.0.0.1", self.target), 10)
                        ends |= {client: agent, agent: client}
                        to_trainer.add(agent)
                    elif ready in ends and not self._pass_on(ready, ends, ready in to_trainer):
                        for end in (ends.pop(ready), ready):
                            ends.pop(end, None)
                            end.close()
        for end in ends:
            end.close()

    def _pass_on(
        self, source: socket.socket, ends: dict[socket.socket, socket.socket], is_counted: bool
    ) -> bool:
        try:
            data = source.recv(4096)
            if is_counted and self._is_armed and not self.num_cut:
                self._left -= len(data)
                if self._left < 0:
                    self.num_cut += 1
                    ends[source].sendall(data[: len(data) // 2])
                    return False
            ends[source].sendall(data)
        except OSError:
            return False
        return bool(data)


@pytest.mark.parametrize("encrypts", [True, False], ids=["encrypted", "plain"])
def test_connection_cut_in_the_middle_of_a_batch_changes_nothing(encrypts: bool) -> None:
    # Batches of 230 kB, so that the cut is inside of one.
    given = {**SLOW, "shape": [3, 140, 140], "samples": 64}
    feed = {"encrypt_batches": encrypts}
    with Proxy(cut_after=500_000) as proxy, Cluster(agents=1, late=True, feed=feed) as cluster:
        cluster.start_agent(0, advertised_port=proxy.port, plain=not encrypts)
        proxy.target = cluster.agent_port(0) + (not encrypts)
        trainer = cluster.train(pause_at=3, **given)
        trainer.until("pause")
        proxy.arm()
        trainer.go_on()
        assert trainer.finish() == reference(**given)
        assert proxy.num_cut == 1
        assert "agent_connection_lost" in trainer.errors


def test_host_that_joins_in_the_epoch_takes_part_and_changes_nothing() -> None:
    given = {**SLOW, "samples": 160}
    with Cluster(agents=2, late=True) as cluster:
        cluster.start_agent(0)
        trainer = cluster.train(pause_at=[5, 10], **given)
        trainer.until("pause")
        cluster.start_agent(1)
        wait_until(lambda: "agent_ready agent=algo-1" in trainer.errors, "the second is ready")
        trainer.go_on()
        trainer.until("pause")
        # From here on only the second is there.
        cluster.kill(0)
        trainer.go_on()
        assert trainer.finish() == reference(**given)


def test_slow_host_among_quick_ones_does_not_hold_the_epoch() -> None:
    given = {**SLOW, "samples": 160}
    with Cluster(agents=2) as cluster:
        cluster.wait_for_agents()
        trainer = cluster.train(pause_at=5, **given)
        trainer.until("pause")
        slow = cluster.workers_of(0)[0]
        # One that is stopped most of the time.
        stop = threading.Event()
        hand = threading.Thread(target=_limp, args=(slow, stop))
        hand.start()
        trainer.go_on()
        try:
            assert trainer.finish() == reference(**given)
        finally:
            stop.set()
            hand.join(10)


def _limp(process: psutil.Process, stop: threading.Event) -> None:
    while not stop.is_set():
        process.suspend()
        stop.wait(0.3)
        process.resume()
        stop.wait(0.03)


@pytest.mark.parametrize("max_bytes", [1, 60_000])
def test_one_batch_always_goes_however_small_the_budget(max_bytes: int) -> None:
    with Cluster(agents=2, workers=2, feed={"max_bytes": max_bytes}) as cluster:
        cluster.wait_for_agents()
        trainer = cluster.train(loaders=2, num_workers=1, samples=48)
        assert trainer.finish() == reference(loaders=2, num_workers=1, samples=48)
