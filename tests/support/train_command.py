"""Runs verbs of stoker as separate processes, as people and pipelines start them."""

import contextlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

END_SECONDS = 60.0


class Verb:
    """A verb that runs in a folder, with all that it has said."""

    def __init__(self, folder: Path, words: Sequence[str], environ: Mapping[str, str]) -> None:
        self._said = folder / "said"
        with self._said.open("ab") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "stoker.cli", *words],
                cwd=folder,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
            )

    @property
    def said(self) -> str:
        return self._said.read_text()

    def ended_with(self) -> int:
        return self.process.wait(END_SECONDS)


class Train(Verb):
    """`stoker train` on a workload, with one dnn host and two data hosts."""

    def __init__(self, folder, workload, *, name, data, environ):
        (folder / "workload.yaml").write_text(workload)
        words = ["train", "workload.yaml", "--name", name, "--yes"]
        super().__init__(folder, [*words, "--group", "dnn=1", "--group", f"data={data}:2"], environ)


@contextlib.contextmanager
def trainings(folder, workload, *, name, data, environ):
    """Starts the command as often as asked, with more variables; kills what runs at the end."""
    begun: list[Train] = []

    def make(**more: str) -> Train:
        found = Train(folder, workload, name=name, data=data, environ={**environ, **more})
        begun.append(found)
        return found

    yield make
    for train in begun:
        if train.process.poll() is None:
            train.process.kill()
            train.process.wait(END_SECONDS)
