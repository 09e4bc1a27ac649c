"""Runs scripts of tests on the local platform, and checks that nothing of a run is left."""

import contextlib
import os
import re
import signal
import socket
from pathlib import Path

import psutil

from stoker.environment import RunSettings
from stoker.platforms.base import JobEnd, JobSpec
from stoker.platforms.local import LocalPlatform, LocalRun
from stoker.records import FeedSettings, Training
from stoker.run.train import record_of_job
from support.builders import group
from support.processes import until

# Short, so that a lost launcher is noticed soon: for runs in which one is lost.
QUICK = FeedSettings(lease_seconds=2.0)
# On a busy machine a leader may be silent for seconds, and data hosts would end.
PATIENT = FeedSettings(lease_seconds=20.0)
# Of hosts whose training has no datasets: what a data host imports for them, it need not.
_FOLDERS = (str(Path(__file__).parent / "without_torch"), os.environ.get("PYTHONPATH"))
WITHOUT_TORCH = {"PYTHONPATH": os.pathsep.join(filter(None, _FOLDERS))}


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def marked_processes(base_dir: Path) -> set[int]:
    """Finds running processes whose STOKER_BASE_DIR is `base_dir` or below it."""
    marker = f"\0STOKER_BASE_DIR={base_dir}".encode()
    found = set()
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            if marker in b"\0" + Path(f"/proc/{pid}/environ").read_bytes() and is_running(pid):
                found.add(pid)
    return found


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def is_of_another_tester(port: int) -> bool:
    """Returns whether a process of another of pytest's processes has bound a port since."""
    testers = {child.pid for child in psutil.Process(os.getppid()).children()} - {os.getpid()}
    for connection in psutil.net_connections("tcp"):
        if connection.laddr and connection.laddr.port == port and connection.pid:
            with contextlib.suppress(psutil.Error):
                parents = {parent.pid for parent in psutil.Process(connection.pid).parents()}
                return bool(testers & parents)
    return False


def shared_memory() -> frozenset[str]:
    """Returns the names of what is in shared memory, whosever it is."""
    return frozenset(os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else ())


def assert_nothing_left(
    run_dir: Path, pids: set[int], *, before: frozenset[str] = frozenset()
) -> None:
    """No process, port, shared memory or token of the run in `run_dir` is left.

    Args:
        run_dir: The run's folder.
        pids: Of processes of the run.
        before: Shared memory that was there before the run: the number of a process that left some
            hours ago may be one of `pids` again.
    """
    left = marked_processes(run_dir) | {pid for pid in pids if is_running(pid)}
    assert not left, [psutil.Process(pid).cmdline() for pid in left]
    logs = "\n".join(path.read_text(errors="replace") for path in run_dir.rglob("*.log"))
    ports = re.findall(r"endpoint=tcp://127\.0\.0\.1:(\d+)|agent_listening port=(\d+)", logs)
    for port in {int(a or b) for a, b in ports}:
        is_free = not is_listening(port) or is_of_another_tester(port)
        assert is_free, f"port {port} is still bound"
    shared = shared_memory() - before
    # Whole numbers, as torch_PID_...: random names as sem.mp-yw630n9a have digits, too.
    whole = re.compile(r"(?<![a-z0-9])\d+(?![a-z0-9])")
    theirs = [n for n in shared if set(map(int, whole.findall(n)[:1])) & pids]
    assert not theirs, f"shared memory is left: {theirs}"
    assert not (run_dir / "token").exists()


def launchers(run: LocalRun) -> dict[str, int]:
    return {started.host.name: started.process.pid for started in run._hosts}


class LocalJob:
    """A script on the local platform, checked at its end; its files go to STOKER_TEST_DIR."""

    def __init__(
        self,
        tmp_path,
        script,
        *,
        dnn=1,
        data=0,
        processes=None,
        arguments=(),
        channels=None,
        strategy="auto",
        has_torch=True,
        **settings,
    ):
        self.tmp_path = tmp_path
        if isinstance(script, str):
            (tmp_path / "script.py").write_text(script)
            command: tuple[str, ...] = ("python", str(tmp_path / "script.py"), *arguments)
        else:
            command = tuple(script)
        groups = [group("dnn", count=dnn, processes_per_host=processes)]
        if data:
            groups.append(group("data", count=data, workers_per_host=1))
        self.spec = JobSpec(
            name="test-run",
            command=command,
            groups=tuple(groups),
            run_dir=tmp_path / "run",
            channels=channels or {},
            environment={"STOKER_TEST_DIR": str(tmp_path), **({} if has_torch else WITHOUT_TORCH)},
            settings=RunSettings(strategy=strategy, **{"feed": PATIENT, **settings}),
        )
        self.pids: set[int] = set()

    def __enter__(self) -> "LocalJob":
        platform = LocalPlatform()
        self._shared = shared_memory()
        self.request = platform.plan(self.spec)
        self.run = platform.submit(self.request)
        return self

    def __exit__(self, *_: object) -> None:
        self.run.stop()
        assert_nothing_left(self.spec.run_dir, self.pids, before=self._shared)

    @property
    def leader(self) -> str:
        return self.request.leader.name

    @property
    def launchers(self) -> dict[str, int]:
        """Host name to the pid of its launcher."""
        return launchers(self.run)

    def base_dir(self, host: str) -> Path:
        return self.spec.run_dir / "hosts" / host

    def processes(self, host: str) -> set[int]:
        found = marked_processes(self.base_dir(host))
        self.pids |= found
        return found

    def wait_for_file(self, name: str) -> str:
        path = self.tmp_path / name
        until(lambda: path.exists() and path.read_text() != "", what=f"{name} is written")
        for host in self.request.hosts:
            self.processes(host.name)
        return path.read_text()

    def wait_for_log(self, host: str, words: str) -> None:
        until(lambda: words in self.log(host), what=f"{host} logs {words}")
        for each in self.request.hosts:
            self.processes(each.name)

    def log(self, host: str) -> str:
        group = next(h.group for h in self.request.hosts if h.name == host)
        path = self.spec.run_dir / "logs" / f"{group}-{host}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def kill(self, pid: int, number: int = signal.SIGKILL) -> None:
        os.kill(pid, number)

    def end(self) -> JobEnd:
        return self.run.wait()

    def succeeds(self) -> JobEnd:
        end = self.end()
        assert end.status == "succeeded", self._words_of(end)
        return end

    def _words_of(self, end: JobEnd) -> str:
        """Returns why a run failed, with the logs of all its hosts."""
        logs = [f"== {host.name}\n{self.log(host.name)}" for host in self.request.hosts]
        return "\n".join([end.failure or "", *logs])

    def training(self) -> Training:
        """Returns the record that `stoker train` makes of the run; blocks until it has ended."""
        record = record_of_job(self.spec, self.end(), platform="local", name=self.run.name)
        assert record.hosts, "the leader left no record"
        return record

    def failure_file(self) -> str | None:
        path = self.base_dir(self.leader) / "output" / "failure"
        return path.read_text() if path.exists() else None
