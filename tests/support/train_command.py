"""Runs verbs of stoker as separate processes, as people and pipelines start them."""

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from support.forked_tree import started

END_SECONDS = 150.0


class Verb:
    """A verb that runs in a folder, with all that it has said."""

    def __init__(self, folder: Path, words: Sequence[str], environ=os.environ, **how) -> None:
        self._said = folder / "said"
        command = [sys.executable, "-m", "stoker.cli", *words]
        self.process = started(command, self._said, cwd=folder, env=dict(environ), **how)

    @property
    def said(self) -> str:
        return self._said.read_text()

    def ended_with(self) -> int:
        return self.process.wait(END_SECONDS)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(END_SECONDS)


class Train(Verb):
    """`stoker train` on a workload, with one dnn host and two data hosts of a type, if any."""

    def __init__(self, folder, workload, *, name, data, environ):
        (folder / "workload.yaml").write_text(workload)
        words = ["train", "workload.yaml", "--name", name, "--yes"]
        groups = ["--group", "dnn=1", *(["--group", f"data={data}:2"] if data else [])]
        super().__init__(folder, [*words, *groups], environ)


@contextlib.contextmanager
def trainings(folder, workload, *, name, data, environ):
    """Starts the command as often as asked, with more variables; kills what runs at the end."""
    with contextlib.ExitStack() as begun:

        def make(**more: str) -> Train:
            found = Train(folder, workload, name=name, data=data, environ={**environ, **more})
            begun.callback(found.kill)
            return found

        yield make
