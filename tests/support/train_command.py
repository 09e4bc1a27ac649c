"""Runs verbs of stoker as separate processes, as people and pipelines start them."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from support.processes import started

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
