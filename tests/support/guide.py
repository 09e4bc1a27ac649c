"""A shell for the blocks of a guide, line by line, with fakes of missing programs.

`stoker` is the real one. tests/support/guide_programs.py fakes `make`, `pip`, `docker`, `kubectl`
and `aws`, and checks their arguments. Lines that need no shell run in this process.
"""

import contextlib
import io
import os
import re
import shlex
import string
import sys
from collections.abc import Iterator
from pathlib import Path

from support import guide_programs
from support.command import Done, stoker
from support.processes import ran

_PROGRAMS = Path(guide_programs.__file__)
# Lines of docs/kubeflow.md that tests/cluster/nodes does not type, by their first words, and why.
LEFT_OUT = {
    "pip install": "what runs the tests has stoker",
    "make -C": "the cluster has an image: STOKER_TEST_IMAGE",
    "printf": "the cluster has an image: STOKER_TEST_IMAGE",
    "docker": "the cluster has an image: STOKER_TEST_IMAGE",
}
TYPED = ("export", "stoker", "cd", "sed", "kubectl")
# What only a shell can do with a line.
_SHELL = re.compile(r"[|<>&;`]|\$\(")


def steps(text: str) -> Iterator[tuple[str, list[str]]]:
    """Returns the steps of a guide: their titles, and the lines of their shell blocks."""
    part = text.partition("\n## Ten steps\n")[2].partition("\n## ")[0]
    for step in re.split(r"\n(?=\*\*\d+\. )", part):
        title = step.partition("**")[2].partition("**")[0]
        lines = [line[4:] for line in step.splitlines() if line.startswith("    ")]
        yield title, "\n".join(lines).replace("\\\n", " ").splitlines()


def why_left_out(line: str) -> str:
    """Returns why a line of the guide is not typed on a real cluster; empty: it is typed."""
    return next((why for words, why in LEFT_OUT.items() if line.startswith(f"{words} ")), "")


class GuideShell:
    """A shell in which a guide is typed; unless it `plays`, a real one runs each line."""

    def __init__(self, folder, *, env, plays=True, seconds=60) -> None:
        self._plays, self._seconds = plays, seconds
        programs = folder / "programs"
        programs.mkdir()
        for name in guide_programs.PLAYED if plays else ():
            (programs / name).write_text(
                f'#!/bin/sh\nexec {sys.executable} {_PROGRAMS} {name} "$@"\n'
            )
            (programs / name).chmod(0o755)
        own = Path(sys.executable).parent
        self._folder = folder
        self._env = {**env, "PATH": f"{programs}:{own}:{env['PATH']}"}

    def type(self, line: str) -> Done:
        """Runs a line; its variables and its folder stay."""
        words = shlex.split(line, comments=True)
        if words[:1] == ["export"]:
            done = self._bash(f"{line}; env -0")
            self._env.update(text.split("=", 1) for text in done.stdout.split("\0") if text)
            return done
        if words[:1] == ["cd"]:
            self._folder /= words[1]
            return Done(0, "", "")
        command, _, file = line.partition(" > ")
        is_known = words[0] == "stoker" or words[0] in guide_programs.PLAYED
        if self._plays and is_known and not _SHELL.search(command):
            count = len(shlex.split(command, comments=True))
            done = self._here(*map(self._filled, words[:count]))
            if not file:
                return done
            (self._folder / file).write_text(done.stdout)
            return Done(done.returncode, "", done.stderr)
        return self._bash(line)

    def _here(self, name: str, *arguments: str) -> Done:
        before = dict(os.environ)
        try:
            os.environ.update(self._env)
            if name == "stoker":
                return stoker(*arguments, cwd=self._folder)
            out, err = io.StringIO(), io.StringIO()
            with (
                contextlib.chdir(self._folder),
                contextlib.redirect_stdout(out),
                contextlib.redirect_stderr(err),
            ):
                code = guide_programs.play(name, *arguments)
            return Done(code, out.getvalue(), err.getvalue())
        finally:
            os.environ.clear()
            os.environ.update(before)

    def _bash(self, line: str) -> Done:
        words = ["bash", "-euo", "pipefail", "-c", line]
        done = ran(words, cwd=self._folder, env=self._env, timeout=self._seconds)
        return Done(done.returncode, done.stdout, done.stderr)

    def _filled(self, word: str) -> str:
        # As `bash -u` does: a variable that was never set is an error.
        return string.Template(word).substitute(self._env)
