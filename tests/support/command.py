"""The command line, as a process or in this process."""

import contextlib
import io
import sys
from dataclasses import dataclass
from pathlib import Path

from stoker.cli.main import run
from support.processes import ran


@dataclass(frozen=True, slots=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


def process(*words, cwd=None, env=None, timeout=100) -> Done:
    command = [sys.executable, "-m", "stoker.cli", *words]
    done = ran(command, cwd=cwd, env=env, timeout=timeout)
    return Done(done.returncode, done.stdout, done.stderr)


def succeeds(*words: str, cwd: Path | None = None) -> Done:
    done = stoker(*words, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done


def stoker(*words: str, cwd: Path | None = None) -> Done:
    """Runs the command in this process, which is faster."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(cwd or "."),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = run([*words])
    return Done(code, out.getvalue(), err.getvalue())
