"""Programs that tests run, and their output."""

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from support.run_file import in_run

DEADLINE_SECONDS = 150.0


def until(
    condition: Callable[[], object], what: str, seconds=DEADLINE_SECONDS, *, pause_seconds=0.02
) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(pause_seconds)


def named_by_commands(folder: Path) -> Iterator[int]:
    """Yields processes whose command names a folder."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(folder).encode() in path.read_bytes():
                yield int(path.parent.name)


def end(process: "subprocess.Popen[bytes]", seconds: float) -> None:
    """Asks a process to end, and ends it."""
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(150)


def ran(words, **how) -> "subprocess.CompletedProcess[str]":
    """Runs a program to its end, however that is; without an input, unless it is given one."""
    how = how if "input" in how else {"stdin": subprocess.DEVNULL, **how}
    if how.get("env"):
        how["env"] = in_run(how["env"])
    return subprocess.run(words, capture_output=True, text=True, **how)


def started(words, log, **how) -> "subprocess.Popen[bytes]":
    """Starts a process without an input, whose output is appended to the file `log`."""
    if how.get("env"):
        how["env"] = in_run(how["env"])
    with log.open("ab") as file:
        return subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, **how
        )
