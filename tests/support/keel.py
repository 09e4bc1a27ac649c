"""Runs scripts as a user's training command does: under `stoker train`, or alone.

What a script prints alone is kept in .cache/keel, by its text and torch's version.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import torch

Line = dict[str, object]

SUPPORT = Path(__file__).parent
KEPT = SUPPORT.parents[1] / ".cache" / "keel"
COMMAND = [sys.executable, str(SUPPORT / "keel_command.py")]
DEADLINE_SECONDS = 400
# Data hosts alone make batches, and leave soon where one is killed.
SETTINGS = {"feed.local_workers": "0", "feed.lease_seconds": "5"}


def until(holds: Callable[[], object], what: str, *, seconds: float = DEADLINE_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)


class Job:
    """A script that a command runs."""

    def __init__(self, folder: Path, run: "Run") -> None:
        self.folder, self._run, self.num_pauses = folder, run, 0

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text() if (self.folder / "out").exists() else ""

    @property
    def errors(self) -> str:
        return (self.folder / "err").read_text() if (self.folder / "err").exists() else ""

    @property
    def has_ended(self) -> bool:
        return (self.folder / "code").exists()

    @property
    def is_fed(self) -> bool:
        return (self.folder / "fed").exists()

    @property
    def lines(self) -> list[Line]:
        found = [
            json.loads(line) for line in self.out.splitlines(keepends=True) if line[-1:] == "\n"
        ]
        return [line for line in found if "pause" not in line]

    def end(self) -> int:
        until(lambda: self.has_ended or self._run.has_ended, "the script has ended")
        assert self.has_ended, f"the command ended before the script:\n{self._run.said}"
        return int((self.folder / "code").read_text())

    def finish(self) -> list[Line]:
        assert self.end() == 0, f"{self.errors[-3000:]}\n{self._run.said}"
        return self.lines

    def pause(self) -> None:
        """Waits until the script pauses, once more than before."""
        self.num_pauses += 1
        wanted = self.num_pauses

        def has_paused() -> bool:
            return self.out.count('"pause"') >= wanted

        until(lambda: has_paused() or self.has_ended, "the script pauses")
        assert has_paused(), f"ended before:\n{self.errors[-3000:]}"

    def go_on(self) -> None:
        with (self.folder / "in").open("w") as stdin:
            stdin.write("\n")

    def data_workers(self) -> list[psutil.Process]:
        """Processes of data hosts that work for the script, none of which has others below it."""
        pids = {each.pid for host in self._run.data_hosts() for each in below(host)}
        found = []
        for pid in pids:
            with contextlib.suppress(psutil.Error, OSError):
                process = psutil.Process(pid)
                if Path(process.cwd()) == self.folder / "work" and not process.children():
                    found.append(process)
        return found

    def kill_data_worker(self) -> None:
        until(self.data_workers, "a data worker works for the script")
        self.data_workers()[0].kill()


def below(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return [process, *process.children(recursive=True)]
    return []


class Run:
    """A training command; under `stoker train` if it has groups."""

    def __init__(
        self, folder: Path, *groups: str, settings: Mapping[str, object] | None = None
    ) -> None:
        self.folder = folder
        self.scripts = folder / "scripts"
        self.scripts.mkdir(parents=True)
        self.record = folder / "training.json"
        self._numbers = itertools.count()
        words = [*COMMAND, str(self.scripts)]
        if groups:
            given = SETTINGS | dict(settings or {})
            options = [f"--group={group}" for group in groups]
            options += [f"--set={key}={each}" for key, each in given.items() if each is not None]
            stoker = [
                sys.executable,
                "-m",
                "stoker.cli",
                "train",
                "--yes",
                "--out",
                str(self.record),
            ]
            words = [*stoker, *options, "--", *words]
        env = {name: each for name, each in os.environ.items() if not name.startswith("STOKER_")}
        with (folder / "said").open("w") as said:
            self.process = psutil.Popen(
                words,
                cwd=folder,
                env=env | {"OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> "Run":
        until(lambda: (self.scripts / "pid").exists() or self.has_ended, "the command has begun")
        assert not self.has_ended, self.said
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def said(self) -> str:
        logs = "\n".join(
            f"--- {path.name}\n{path.read_text()[-3000:]}"
            for path in self.folder.glob("runs/*/logs/*")
        )
        return f"{(self.folder / 'said').read_text()[-3000:]}\n{logs}"

    def start(
        self, *argv: str, env: Mapping[str, str] | None = None, is_cold: bool = False, **files: str
    ) -> Job:
        """Starts a script by its arguments; `files` are its folder's texts, by name less .py."""
        job = self.scripts / f"{next(self._numbers):03}"
        (job / "work").mkdir(parents=True)
        for name, text in files.items():
            (job / "work" / f"{name}.py").write_text(text)
        os.mkfifo(job / "in")
        given = {"argv": argv, "env": dict(env or {}), "is_cold": is_cold}
        (job / "job.new").write_text(json.dumps(given))
        (job / "job.new").rename(job / "job.json")
        return Job(job, self)

    def hosts(self) -> list[psutil.Process]:
        """Those of the children of `stoker train` that listen somewhere, or a process below."""
        return [each for each in self.process.children() if self.ports(each)]

    def data_hosts(self) -> list[psutil.Process]:
        """Those of them below which the command is not."""
        command = psutil.Process(int((self.scripts / "pid").read_text()))
        above = {command.pid, *(each.pid for each in command.parents())}
        return [each for each in self.hosts() if each.pid not in above]

    def signal(self, host: psutil.Process, number: int = signal.SIGKILL) -> None:
        for process in below(host):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def ports(self, host: psutil.Process) -> set[int]:
        """On which the host's processes listen."""
        found = set()
        for process in below(host):
            with contextlib.suppress(psutil.Error):
                found |= {
                    each.laddr.port
                    for each in process.net_connections("tcp")
                    if each.status == psutil.CONN_LISTEN
                }
        return found

    def end(self) -> int:
        (self.scripts / "end").touch()
        try:
            return self.process.wait(DEADLINE_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


class Alone:
    """What scripts print without data hosts: kept, or from a command that runs them now."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._run: Run | None = None

    def __enter__(self) -> "Alone":
        return self

    def __exit__(self, *_: object) -> None:
        if self._run is not None:
            self._run.end()

    def run(self) -> Run:
        if self._run is None:
            self._run = Run(self._folder).__enter__()
        return self._run

    @functools.cache  # noqa: B019
    def stokers(self, script: str, given: str, rank: int = 0) -> list[Line]:
        """Returns what the script prints, whose loaders are stoker's: that is not kept."""
        path = str(SUPPORT / script)
        return self.run().start(path, given, env={"RANK": f"{rank}"}).finish()

    def torchs(self, script: str, given: str, rank: int = 0) -> list[Line]:
        out = self.out(str(SUPPORT / script), given, env={"RANK": f"{rank}"})
        return [json.loads(line) for line in out.splitlines()]

    def out(self, *argv: str, env: Mapping[str, str] | None = None, **more: object) -> str:
        """Returns what the script prints; a script that fails is not kept, and an error."""
        texts = [argv, sorted((env or {}).items()), sorted(more.items()), torch.__version__]
        texts += [Path(word).read_text() for word in argv if word.startswith("/")]
        kept = KEPT / hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:24]
        if not kept.is_file():
            job = self.run().start(*argv, env=env, **more)
            assert job.end() == 0, job.errors
            KEPT.mkdir(parents=True, exist_ok=True)
            new = kept.with_suffix(f".{os.getpid()}")
            new.write_text(job.out)
            new.rename(kept)
        return kept.read_text()
