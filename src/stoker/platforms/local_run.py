"""A job that runs on this machine: its hosts' processes, from start to end."""

import contextlib
import io
import queue
import secrets
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from stoker.errors import PlatformError, UsageError
from stoker.logs import Log, now_utc
from stoker.platforms import processes, spawn
from stoker.platforms.base import JobEnd, LogLine
from stoker.platforms.local_plan import LocalHost, LocalRequest, make_job_folder
from stoker.platforms.local_start import (
    StartedHost,
    engine_hosts,
    host_variables,
    start_host,
    write_secret,
)
from stoker.platforms.tail import Tail
from stoker.records import Event, Training, read_json, write_json

# Once the leader has ended, the others know it within 10 s: nobody listens at its port.
AFTER_LEADER_SECONDS = 30.0
# Asked to stop, a trainer may save its state.
STOP_SECONDS = 30.0
# The leader tells the others; that they are asked themselves, too, is for those it cannot reach.
STOP_OTHERS_SECONDS = 1.0
_POLL_SECONDS = 0.05


class LocalRun:
    """A submitted job; its hosts are started when it is made.

    Args:
        request: What to run.
        environ: Of the hosts' processes; variables of an outer run are left out.

    Raises:
        UsageError: If a channel's folder is not there.
        PlatformError: If a host cannot be started.
    """

    def __init__(self, request: LocalRequest, *, environ: Mapping[str, str]) -> None:
        self.name = request.job.name
        self.not_comparable = request.not_comparable
        self._request = request
        self._token_file = (request.job.run_dir / "token").absolute()
        self._events: list[Event] = []
        self._failure = ""
        self._is_stopping = threading.Event()
        self._stopped_by_caller = False
        self._has_ended = threading.Event()
        self._end: JobEnd | None = None
        self._error: BaseException | None = None
        self._hosts: list[StartedHost] = []
        self._asked: set[str] = set()
        self._said: queue.SimpleQueue[LogLine] = queue.SimpleQueue()
        if request.not_comparable:
            self._note(f"not comparable: {request.not_comparable}")
            text = f"{request.not_comparable}: its times compare with no other cluster's"
            self._say(request.leader, "hosts_not_comparable", text=text)
        self._start(environ)
        self._monitor = threading.Thread(target=self._watch, name=f"run {self.name}", daemon=True)
        self._monitor.start()

    @property
    def comparable(self) -> bool:
        """Whether its times can be compared with other runs'."""
        return not self.not_comparable

    @property
    def events(self) -> tuple[Event, ...]:
        """What happened so far that only the platform sees."""
        return tuple(self._events)

    @property
    def launchers(self) -> Mapping[str, int]:
        """Host to the pid of its launcher."""
        return {started.host.name: started.process.pid for started in self._hosts}

    def lines(self) -> Iterator[LogLine]:
        """Log lines of all hosts as they come; ends when the job has ended."""
        tails = [(host, Tail(self._request.log_file(host))) for host in self._request.hosts]
        try:
            is_last = False
            while not is_last:
                is_last = self._has_ended.is_set()
                while not self._said.empty():
                    yield self._said.get()
                for host, tail in tails:
                    for text in tail.read(is_last=is_last):
                        yield LogLine(group=host.group, host=host.name, text=text)
                if not is_last:
                    self._has_ended.wait(_POLL_SECONDS)
        finally:
            for _, tail in tails:
                tail.close()

    def wait(self) -> JobEnd:
        """Blocks until all hosts have ended."""
        self._has_ended.wait()
        self._monitor.join()
        if self._error is not None:
            raise self._error
        assert self._end is not None
        return self._end

    def stop(self) -> None:
        """Asks the job to stop and ends what does not: blocks STOP_SECONDS and a little at most."""
        if not self._has_ended.is_set():
            self._stopped_by_caller = True
            self._is_stopping.set()
            limit = STOP_SECONDS + processes.KILL_SECONDS * (len(self._hosts) + 1)
            self._has_ended.wait(limit)

    def _start(self, environ: Mapping[str, str]) -> None:
        request = self._request
        try:
            for host in request.hosts:
                make_job_folder(request, host)
            write_secret(self._token_file, secrets.token_hex(32))
            taken: set[int] = set()
            ports = {host.name: processes.free_ports(taken) for host in request.hosts}
            engine = engine_hosts(request, taken)
            spawn.adopt_orphans()
            for host in request.hosts:
                variables = host_variables(
                    request,
                    host,
                    environ=environ,
                    ports=ports,
                    engine=engine,
                    token_file=self._token_file,
                )
                self._hosts.append(start_host(request, host, variables))
        except BaseException as err:
            self._clean_up()
            if isinstance(err, OSError):
                raise PlatformError(
                    f"the local run cannot start: {err}", where=str(request.job.run_dir)
                ) from None
            raise

    def _watch(self) -> None:
        try:
            self._follow()
            self._end = self._conclude()
        except BaseException as err:
            self._error = err
        finally:
            self._clean_up()
            self._has_ended.set()

    def _follow(self) -> None:
        leader = self._hosts[0]
        stop_at: float | None = None
        while not self._look_for_ended():
            now = time.monotonic()
            if self._is_stopping.is_set() and stop_at is None:
                stop_at = now
                _ask(leader)
            if stop_at is not None:
                if now > stop_at + STOP_OTHERS_SECONDS:
                    # Once each: a second SIGTERM would mean "at once".
                    for started in self._hosts[1:]:
                        if started.host.name not in self._asked:
                            self._asked.add(started.host.name)
                            _ask(started)
                if now > stop_at + STOP_SECONDS:
                    self._kill_rest(f"did not stop within {STOP_SECONDS:g} s")
            if leader.ended_at is not None and now > leader.ended_at + AFTER_LEADER_SECONDS:
                self._kill_rest(f"did not end within {AFTER_LEADER_SECONDS:g} s of the leader")
            time.sleep(_POLL_SECONDS)

    def _look_for_ended(self) -> bool:
        for started in self._hosts:
            if started.ended_at is None and started.process.poll() is not None:
                started.ended_at = time.monotonic()
                self._clean_host(started)
                self._judge(started)
        return all(started.ended_at is not None for started in self._hosts)

    def _judge(self, started: StartedHost) -> None:
        code = started.process.returncode
        host = started.host
        leader = self._hosts[0]
        self._note(f"host ended with {_words(code)}", host.name)
        if leader.ended_at is not None and started is not leader:
            return
        if code < 0 and host.role == "data" and not self._is_stopping.is_set():
            self._say(host, "host_ended", how=processes.ended_words(code))
        if started is leader:
            if code < 0:
                self._failure = (
                    f"the launcher of dnn host {host.name} (group {host.group}, the leader) "
                    f"ended with {processes.ended_words(code)}"
                )
        elif host.role == "data" and code > 0 and not self._is_stopping.is_set():
            log = self._request.log_file(host)
            self._failure = f"data host {host.name} ended with exit code {code}, see {log}"
            self._is_stopping.set()

    def _kill_rest(self, why: str) -> None:
        for started in self._hosts:
            if started.ended_at is None:
                self._note(f"killed: {why}", started.host.name)
                started.process.kill()

    def _clean_host(self, started: StartedHost) -> None:
        if not processes.kill_all(started.process.pid, started.marker):
            self._note("has processes that cannot be killed", started.host.name)

    def _clean_up(self) -> None:
        for started in self._hosts:
            if started.process.poll() is None:
                started.process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    started.process.wait(processes.KILL_SECONDS)
            self._clean_host(started)
        self._token_file.unlink(missing_ok=True)

    def _conclude(self) -> JobEnd:
        leader = self._hosts[0]
        assert leader.ended_at is not None
        data_ends = [s.ended_at for s in self._hosts if s.host.role == "data" and s.ended_at]
        release = max(0.0, max(data_ends) - leader.ended_at) if data_ends else None
        base = self._request.base_dir(leader.host)
        code = leader.process.returncode
        training = self._complete_record(base / "output" / "data" / "stoker", release)
        failure = self._failure or (training.failure if training else None)
        exit_code = training.exit_code if training else (code if code >= 0 else None)
        status: Literal["succeeded", "failed", "stopped"]
        if self._stopped_by_caller:
            status = "stopped"
        else:
            status = "failed" if code != 0 or self._failure else "succeeded"
            if training and training.status == "stopped" and not self._failure:
                status = "stopped"
        if status == "failed" and not failure:
            words = f"the leader ended with {processes.ended_words(code)}"
            failure = _read(base / "output" / "failure") or words
        return JobEnd(
            status=status,
            exit_code=exit_code,
            failure=failure if status == "failed" else None,
            output_dir=base / "output" / "data",
            model_uri=_model(base / "model"),
            data_group_release_seconds=release,
        )

    def _complete_record(self, folder: Path, release: float | None) -> Training | None:
        """Adds what only the platform saw to the record that the leader wrote."""
        path = folder / "training.json"
        try:
            training = read_json(path, Training)
            events = sorted([*training.events, *self._events], key=lambda event: event.when)
            training = msgspec.structs.replace(
                training, events=tuple(events), data_group_release_seconds=release
            )
            write_json(path, training)
        except UsageError:
            return None
        return training

    def _say(self, host: LocalHost, event: str, **values: str) -> None:
        """Puts a line of the platform's own between those of the hosts' logs."""
        line = io.StringIO()
        Log(run=self.name, host=host.name, stream=line).event(event, **values)
        self._said.put(LogLine(group=host.group, host=host.name, text=line.getvalue().rstrip()))

    def _note(self, what: str, host: str | None = None) -> None:
        self._events.append(Event(when=now_utc(), what=what, host=host))


def _ask(started: StartedHost) -> None:
    if started.process.poll() is None:
        started.process.terminate()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _words(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {-code}"


def _model(folder: Path) -> str | None:
    """The folder, if the training left something in it."""
    return str(folder) if folder.is_dir() and any(folder.iterdir()) else None
