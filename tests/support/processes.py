"""Programs that tests run, and their output."""

import subprocess

# A container's runtime: with it the first process ends, and with that all others do.
RUNTIME = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


def ran(words, **how) -> "subprocess.CompletedProcess[str]":
    """Runs a program to its end, however that is; without an input, unless it is given one."""
    how = how if "input" in how else {"stdin": subprocess.DEVNULL, **how}
    return subprocess.run(words, capture_output=True, text=True, **how)


def started(words, log, **how) -> "subprocess.Popen[bytes]":
    """Starts a process without an input, whose output is appended to the file `log`."""
    with log.open("ab") as file:
        return subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, **how
        )
