"""Processes of tests whose output goes to a file."""

import subprocess

# A container's runtime: with it the first process ends, and with that all others do.
RUNTIME = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


def started(words, log, **how) -> "subprocess.Popen[bytes]":
    """Starts a process without an input, whose output is appended to the file `log`."""
    with log.open("ab") as file:
        return subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, **how
        )
