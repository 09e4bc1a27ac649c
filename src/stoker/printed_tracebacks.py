"""Tracebacks that the processes of a command printed, and which of the processes failed first.

When one rank fails, the others fail a moment later because it is gone, and so does what started
them: torchrun, `mp.spawn`, mpirun or a script. Their tracebacks stand last, and say nothing.
"""

import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile

from stoker.host.processes import ended_words

# From torch's hook, torchrun's tee, mpirun: `[rank0]: `, `[default0]:`, `[1,0]<stderr>:`.
RANK_MARK = re.compile(r"^\[([a-z]+|\d+,)(?P<rank>\d+)\](<std(err|out)>)?: ?")
# Of torch's and Rich's, and that of an exception group, which begins with a bar.
TRACE = re.compile(r"^[\s|+╭─]*(Exception Group )?Traceback \(most recent call last\)")
RAISED = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt|Warning|Group)(:|$)")
# Lines of an exception group begin with a bar.
_BAR = re.compile(r"^ *\| ?")
_GROUP_END = re.compile(r"^ *\+-{20,}$")
_MAX_IN_GROUP = 3
# Any name: `queue.Empty`, `StopIteration`, `jsonschema.Invalid: words`.
_MAYBE_RAISED = re.compile(r"^[A-Za-z_][\w.]*(: |:$|$)")
# And what moves the cursor and ends a line, as bars do; other sequences are an error's own words.
_COLOUR = re.compile(r"\x1b\[[\d;:?]*[mKA-Hhl]")
# A bar of tqdm's, which has no line end.
_METER = re.compile(r"^.*\](?=Traceback \(most recent call last\):$)")
# The head of a line of torch's log, in which torchrun repeats the traceback of a function.
_LOGGED = re.compile(r"^[IWE]\d{4} [\d:.]+ +\d+ [\w./-]+\.py:\d+\] ?")
# Of multiprocessing, and of `torch.multiprocessing.spawn`.
_CHILD = re.compile(r"^(?:-- )?Process (?P<name>.+?)(?: terminated with the following error)?:$")
# Before the second of two tracebacks of one process.
_CHAINED = re.compile(r"^(During handling of the above|The above exception was the direct)")
# Errors that end no process, such as those of `__del__`.
_ASIDE = re.compile(
    r"^(Exception ignored |Error in atexit|--- Logging error ---|Task exception was never)"
)
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
# What torchrun, mp.spawn and Open MPI say of the process that failed first.
_REPORTS = (
    re.compile(
        r"Root Cause \(first observed failure\):\n\[\d+\]:\n(?:  .*\n)*?"
        r"  rank +: (?P<rank>\d+) .*\n  exitcode +: (?P<code>-?\d+)"
    ),
    re.compile(
        r"ProcessExitedException: process (?P<process>\d+) terminated with "
        r"(?:exit code (?P<code>\d+)|signal (?P<signal>\w+))"
    ),
    re.compile(
        r"(?:mpirun|prterun|mpiexec) noticed that process rank (?P<rank>\d+) [^\n]*exited on\s"
        r"signal (?P<number>\d+)"
    ),
    re.compile(
        r"MPI_ABORT was invoked on rank (?P<rank>\d+) [^\n]*\n(?:[^\n]*\n)?"
        r"[^\n]*[Ee]rror ?code:? (?P<code>\d+)"
    ),
    re.compile(r"Process name: \[\[\d+,\d+\],(?P<rank>\d+)\]\n\s*Exit code: +(?P<code>\d+)"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrintedTraceback:
    """A traceback, and what its process printed until the next one.

    Attributes:
        who: `rank 1` or `process 1` where the output says so.
        lines: From its first line on, without marks of ranks and bars.
        at: The number of the line in `lines` that says what was raised.
        first: The number of its first line in the output.
        is_aside: Whether it ended no process.
        before: The last line before it.
    """

    who: str
    lines: Sequence[str]
    at: int
    first: int
    is_aside: bool
    before: str

    @property
    def in_group(self) -> list[str]:
        """What the first ones in an exception group were; [] without a group."""
        if "Exception Group" not in self.lines[0]:
            return []
        rest = list(takewhile(lambda line: not _GROUP_END.match(line), self.lines[self.at + 1 :]))
        return [line for line in rest if RAISED.match(line)][:_MAX_IN_GROUP]

    @property
    def raised(self) -> str:
        return "\n".join(self.lines[self.at :])

    @property
    def is_of_starter(self) -> bool:
        """Whether it only says that a process failed that was started by this one."""
        return bool(_OF_STARTER.match(self.lines[self.at]))

    @property
    def is_consequence(self) -> bool:
        """Whether it only says that another rank is gone."""
        return says_peer_is_gone(self.lines[self.at])


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstFailure:
    """What the output says of the process that failed first.

    Attributes:
        who: As in its traceback, or in the words of what started it; empty: the command itself.
        traceback: None: it left none.
        ended: How it ended, where it left no traceback.
        before: The last line before the first traceback of another: perhaps its last one.
        child: A child's traceback right before the command's own, perhaps its cause.
    """

    who: str
    traceback: PrintedTraceback | None = None
    ended: str = ""
    before: str = ""
    child: PrintedTraceback | None = None


def says_peer_is_gone(text: str) -> bool:
    return bool(_PEER_IS_GONE.search(text))


def says_child_failed(text: str) -> bool:
    """Returns whether an error only says that a process failed which this one had started."""
    return bool(_OF_STARTER.match(text))


def plain_line(line: str) -> str:
    """Returns a line without its colours, and without a progress bar before a traceback."""
    return _METER.sub("", _COLOUR.sub("", line).rstrip())


def without_marks(line: str) -> str:
    """Returns a line without the marks of its rank, of which torchrun's tee adds another one."""
    while match := RANK_MARK.match(line):
        line = line[match.end() :]
    return line


def tracebacks_in(lines: Iterable[str]) -> list[PrintedTraceback]:
    """Returns the tracebacks of plain lines in the order of their first lines.

    Lines of ranks, which are marked, may stand among each other.
    """
    streams: dict[str, list[tuple[int, str]]] = {}
    for number, line in enumerate(lines):
        words = _LOGGED.sub("", without_marks(line))
        streams.setdefault(_rank_of(line), []).append((number, words))
    tracebacks: list[PrintedTraceback] = []
    for rank, numbered in streams.items():
        tracebacks += _of_stream(rank, numbered)
    return sorted(tracebacks, key=lambda one: one.first)


def first_failure(lines: Sequence[str]) -> FirstFailure | None:
    """Returns the failure that caused the others; None: there is no traceback and no report.

    Args:
        lines: Plain ones, of all processes. The last traceback counts, unless a rank or a child
            left it, or what started them.
    """
    tracebacks = tracebacks_in(lines)
    ends = [one for one in tracebacks if not one.is_aside] or tracebacks
    report = _report_in("\n".join(map(without_marks, lines)))
    if not ends:
        return report
    last = ends[-1]
    if not (last.who or last.is_of_starter or report):
        return FirstFailure(who="", traceback=last, child=_child_before(last, ends))
    # Of each rank or process the last one, in order.
    of_each = {one.who: one for one in ends if one.who and not one.is_of_starter}
    of_ranks = sorted(of_each.values(), key=lambda one: one.first)
    for one in of_ranks:
        if not one.is_consequence:
            return FirstFailure(who=one.who, traceback=one)
    # Torch's hook marks the lines of a rank only after `init_process_group`.
    unmarked = [one for one in ends if not (one.who or one.is_of_starter or one.is_consequence)]
    if report:
        if unmarked and report.ended == ended_words(1):
            return FirstFailure(who=report.who, traceback=unmarked[-1])
        return replace(report, before=_line_before(lines, tracebacks[0].first))
    if unmarked and (last.is_consequence or _stands_before(unmarked[-1], last)):
        return FirstFailure(who="a child process", traceback=unmarked[-1])
    if of_ranks:
        return FirstFailure(who=of_ranks[0].who, traceback=of_ranks[0])
    return FirstFailure(who=last.who, traceback=last)


def _line_before(lines: Sequence[str], end: int) -> str:
    words = [line for line in lines[:end] if re.search(r"\w", line) and not _LOGGED.match(line)]
    return without_marks(words[-1]).strip() if words else ""


def _rank_of(line: str) -> str:
    rank = ""
    while match := RANK_MARK.match(line):
        # torchrun's tee, which stands first, counts on each host.
        rank = f"rank {match['rank']}"
        line = line[match.end() :]
    return rank


def _of_stream(rank: str, numbered: Sequence[tuple[int, str]]) -> list[PrintedTraceback]:
    lines = [line for _, line in numbered]
    begins = [
        at for at, line in enumerate(lines) if TRACE.match(line) and not _is_within_group(lines, at)
    ]
    tracebacks: list[PrintedTraceback] = []
    for begin, end in pairwise([*begins, len(lines)]):
        stretch = [_BAR.sub("", line) for line in lines[begin:end]]
        at = _first_of(RAISED, stretch) or _first_of(_MAYBE_RAISED, stretch)
        if not at:
            continue
        before = next((line for line in reversed(lines[:begin]) if line.strip()), "")
        is_chained = bool(tracebacks) and bool(_CHAINED.match(before))
        tracebacks.append(
            PrintedTraceback(
                who=tracebacks[-1].who if is_chained else rank or _child_in(before),
                lines=stretch,
                at=at,
                first=numbered[begin][0],
                before=before,
                is_aside=tracebacks[-1].is_aside if is_chained else bool(_ASIDE.match(before)),
            )
        )
    return tracebacks


def _first_of(pattern: re.Pattern[str], lines: Sequence[str]) -> int:
    """Returns the number of the first line that begins so, after the first one; 0: none does."""
    return next((at for at, line in enumerate(lines) if at and pattern.match(line)), 0)


def _child_in(line: str) -> str:
    """Returns the name of the process whose traceback begins below a line, if it has one."""
    child = _CHILD.match(line)
    if child is None:
        return ""
    name = child["name"]
    if name.isdigit():
        return f"process {name}"
    return name


def _child_before(
    last: PrintedTraceback, tracebacks: Sequence[PrintedTraceback]
) -> PrintedTraceback | None:
    before = tracebacks[-2] if len(tracebacks) > 1 else None
    if before and before.who and _stands_before(before, last):
        return before
    return None


def _is_within_group(lines: Sequence[str], at: int) -> bool:
    return bool(re.match(r"^ +\|", lines[at])) and lines[at - 1].lstrip().startswith(("+", "|"))


def _stands_before(one: PrintedTraceback, later: PrintedTraceback) -> bool:
    """Returns whether nothing but the error's own words and blank lines stand between the two."""
    rest = one.lines[one.at + 1 :]
    return one.first < later.first and not any(line.strip() for line in rest)


def _report_in(text: str) -> FirstFailure | None:
    for pattern in _REPORTS:
        matches = list(pattern.finditer(text))
        if matches:
            return _reported(matches[-1].groupdict())
    return None


def _reported(said: "dict[str, str | None]") -> FirstFailure:
    who = f"process {said['process']}" if said.get("process") else f"rank {said['rank']}"
    if name := said.get("signal"):
        number = getattr(signal, name, 0)
        return FirstFailure(who=who, ended=ended_words(-number) if number else f"signal {name}")
    if number_text := said.get("number"):
        return FirstFailure(who=who, ended=ended_words(-int(number_text)))
    return FirstFailure(who=who, ended=ended_words(int(said.get("code") or 0)))
