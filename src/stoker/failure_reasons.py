"""Reasons of failed processes and runs, as one line, found in their last lines.

The rule: the last `error:` line or what the last traceback raised, whichever stands later. What
only says that another process is gone counts if there is nothing else. stoker's own log
lines, which stand between a script's, are skipped.
"""

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

from stoker.host.processes import ended_words
from stoker.logs import EVENT_HEAD, printable

# torch's and stoker's first line of a traceback.
TRACE = re.compile(r"^Traceback \(most recent call last\)")
# From torch's hook, torchrun's tee and log, mpirun: `[rank0]: `, `[default0]:`, `[1,0]<stderr>:`.
_MARKS = re.compile(
    r"^(\[([a-z]+|\d+,)\d+\](<std(err|out)>)?: ?|[IWE]\d{4} [\d:.]+ +\d+ [\w./-]+\.py:\d+\] ?)+"
)
_COLOUR = re.compile(r"\x1b\[[\d;:?]*[mKA-Hhl]")
# stoker's and argparse's: `train.py: error: unrecognized arguments`.
_ERROR = re.compile(r"^(?:[\w./-]+: )?error: *(?P<what>\S.*)")
_RAISED = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt|Warning|Group)(:|$)")
# torch's and stoker's loaders raise a worker's error so, followed by the worker's traceback.
_CAUGHT = re.compile(r"Caught \w+ in (?P<where>.+)\.$")
# Of processes that start others, and say only that one of these failed.
_OF_STARTER = re.compile(
    r"^([\w.]+\.)?(ChildFailedError|CalledProcessError|ProcessRaisedException|SignalException|"
    r"ProcessExitedException|BrokenProcessPool)(:|$)"
)
# Errors of gloo, NCCL, torch's store and a pipe when a peer is gone.
_PEER_IS_GONE = re.compile(
    r"connection (was )?(closed|reset|refused|timed out)|broken pipe|socket closed|peer|"
    r"DistBackendError|DistNetworkError|DistStoreError|ncclRemoteError|remote process exited|"
    r"SIGTERMException|SignalException",
    re.IGNORECASE,
)


def reason_of_failure(
    lines: Iterable[str], *, who: str, exit_code: int, out_of_memory: str = ""
) -> str:
    """Returns why a process failed, in one line.

    Args:
        lines: Its output.
        who: The process.
        exit_code: As a shell counts, or negative for a signal.
        out_of_memory: What is known of that, to follow `it`: `took more memory than its limit`.
    """
    written = _printed(lines)
    # Signals are 1 to 64; a higher code is the command's own.
    code = 128 - exit_code if 128 < exit_code < 193 else exit_code
    reason = f"{who} {out_of_memory or f'ended with {ended_words(code)}'}"
    if error := said_in(written):
        return f"{reason}: {error}"
    rest = [line.strip() for line in written if line.strip()]
    if rest and code >= 0 and not out_of_memory:
        reason += f"; its last line: {rest[-1]}"
    return printable(reason)


def said_in(lines: Iterable[str]) -> str:
    """Returns the last error in lines; empty: there is none."""
    error = of_another = where = ""
    for before, line in pairwise(("", *_printed(lines))):
        if caught := _CAUGHT.search(line):
            where = f" ({caught['where']})"
        if said := _ERROR.match(line.strip()):
            words = said["what"]
        elif _RAISED.match(line) and before.startswith("  "):
            # What was raised follows an indented line of code: a message may have such lines, too.
            words = line + where
        else:
            continue
        if is_of_another(line):
            of_another = words
        else:
            error = words
    return printable(error or of_another)


def cause_of(failure: str) -> str:
    """Returns a failure's first line, or what a bare traceback raised, safe for a terminal."""
    lines = [line for line in _printed(failure.splitlines()) if line]
    first = next((line for line in lines if not line.startswith(("where:", "try:"))), "")
    if TRACE.match(first):
        first = said_in(lines) or lines[-1]
    return printable(first.strip().removeprefix("error:").strip()) or "no reason was left"


def is_of_another(raised: str) -> bool:
    """Whether an error only says that another process is gone: a peer, or one that it started."""
    return says_peer_is_gone(raised) or bool(_OF_STARTER.match(raised))


def says_peer_is_gone(text: str) -> bool:
    return bool(_PEER_IS_GONE.search(text))


def without_events(lines: Iterable[str]) -> list[str]:
    return [line for line in lines if not EVENT_HEAD.search(line)]


def without_marks(line: str) -> str:
    """Returns a line without the marks of its rank."""
    return _MARKS.sub("", line)


def shortened(failure: str, *, most: int) -> str:
    """Returns a failure's text with at most `most` characters: its beginning and its end."""
    if len(failure) <= most:
        return failure
    half = most // 2 - 3
    return f"{failure[:half]}\n...\n{failure[-half:]}"


def _printed(lines: Iterable[str]) -> Sequence[str]:
    """Returns a process's own lines, without what a terminal or torch's log adds to them."""
    return [without_marks(_COLOUR.sub("", line).rstrip()) for line in without_events(lines)]
