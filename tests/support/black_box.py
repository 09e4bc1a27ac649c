"""Stoker as its users see it: a program with exit codes, output and files."""

import contextlib
import json
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from support.forked_stoker import ran
from support.processes import started, until

STOKER = Path(sys.executable).with_name("stoker")
END_SECONDS = 150.0


def stoker(*words: str, cwd: Path, env: Mapping[str, str] | None = None, code: int = 0) -> str:
    """Runs a verb to its end, which must be this exit code; returns what it printed."""
    done = ran(words, cwd=cwd, env=env)
    assert done.returncode == code, (words, done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return done.stdout


def refused(*words: str, cwd: Path, code: int = 2, env: Mapping[str, str] | None = None) -> str:
    """Runs a verb that must end with this exit code; returns what it says of the reason."""
    done = ran(words, cwd=cwd, env=env)
    assert done.returncode == code, (words, done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    assert done.stderr.strip()
    return done.stderr


def as_json(*words: str, cwd: Path, env: Mapping[str, str] | None = None, code: int = 0) -> Any:
    return json.loads(stoker(*words, "--json", cwd=cwd, env=env, code=code))


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


class Verb:
    """A verb that runs, with all that it has said."""

    def __init__(self, folder: Path, words: Sequence[str], env: Mapping[str, str]) -> None:
        self._log = folder / "said"
        self.process = started([STOKER, *words], self._log, cwd=folder, env=dict(env))

    @property
    def said(self) -> str:
        return self._log.read_text(errors="replace")

    def until_it_says(self, text: str) -> None:
        until(lambda: text in self.said or self.process.poll() is not None, what=text)
        assert text in self.said, self.said

    def ends_with(self, code: int) -> None:
        found = self.process.wait(END_SECONDS)
        assert found == code, (found, self.said)
        assert "Traceback" not in self.said, self.said

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(END_SECONDS)


class Verbs:
    """Verbs of a test, which are killed at its end."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self.folder = folder
        self.env = env
        self._begun: list[Verb] = []

    def start(self, *words: str, **more: str) -> Verb:
        """Starts a verb, with more variables of the environment."""
        self._begun.append(Verb(self.folder, words, {**self.env, **more}))
        return self._begun[-1]

    def close(self) -> None:
        for verb in self._begun:
            verb.kill()


@contextlib.contextmanager
def verbs(folder: Path, env: Mapping[str, str]) -> Iterator[Verbs]:
    with contextlib.closing(Verbs(folder, env)) as found:
        yield found
