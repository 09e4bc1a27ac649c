"""Reasons of failed processes and runs, as one line, found in their last lines.

stoker's own log lines, which stand between a script's, are skipped.
"""

import re
from collections.abc import Iterable, Sequence

from stoker.host.processes import ended_words
from stoker.logs import EVENT_HEAD, printable
from stoker.printed_tracebacks import (
    RAISED,
    TRACE,
    FirstFailure,
    PrintedTraceback,
    first_failure,
    plain_line,
    without_marks,
)

# stoker's and argparse's: `train.py: error: unrecognized arguments`.
_ERROR = re.compile(r"^(?:[\w./-]+: )?error: *(?P<what>\S.*)")
# Of what stoker raises in a rank, with `where:` and `try:` in further lines.
_OF_FEED = re.compile(
    r"^(stoker\.errors\.)?(Feed|FeedLost|Shipping|Protocol|Usage|MissingExtra)Error: "
)
# torch's and stoker's loaders raise a worker's error so, followed by the worker's traceback.
_CAUGHT = re.compile(r"\bCaught (?P<kind>\w+) in (?P<where>.+)\.\nOriginal ")
# stoker's: `index 37 of data worker 0 on host algo-2`.
_SAMPLE = re.compile(r"^index (?P<index>.+) of (?P<worker>data worker )")
# Torch's loader raises the first where a worker was killed, and the second because of it.
_KILLED = re.compile(r"^RuntimeError: DataLoader worker \(pid \d+\) is killed by signal: ")
_ENDED = re.compile(r"^RuntimeError: DataLoader worker \(pid\(s\) [\d, ]+\) exited unexpectedly")
# Of a worker that writes a batch to /dev/shm.
_NO_SHARED_MEMORY = re.compile(
    r"signal: Bus error|unable to (write to|allocate shared memory\(shm\) for|open|mmap \d+ bytes "
    r"from|resize|stretch)[a-z ]* ?file <(filename not specified|/torch_)"
)
_MORE_SHARED_MEMORY = (
    "/dev/shm is full, through which torch's workers pass batches (64 MB in a container, unless it "
    "is given more): --shm-size=2g, kubernetes.shm, fewer workers, or prefetch_factor=1; workers "
    "of stoker's data hosts need none"
)
# What stoker adds to an error, in the lines after it.
_ADVICE = re.compile(r"^\s*(where|try):")
_ADVICE_LINES = 3
# A line within a message, and not a progress bar that is printed after it.
_CONTINUED = re.compile(r"^[ \t]+[^\s|+](?!.*%\|)")
_MAX_CONTINUED = 3
_MAX_WORDS = 300


def reason_of_failure(
    lines: Iterable[str], *, who: str, exit_code: int, out_of_memory: str = ""
) -> str:
    """Returns why a process failed, in one line.

    In this order: its last `error:` line with the advice, what its last traceback raised, that it
    ran out of memory, its signal, or its exit code with its last line.

    Args:
        exit_code: As a shell counts, or negative for a signal.
        out_of_memory: What is known of that, to follow `it`: `took more memory than its limit`.
    """
    printed = _printed(lines)
    written = [without_marks(line) for line in printed]
    error = _error_in(written) or _raised_in(printed)
    if out_of_memory and not error:
        return printable(f"{who} {out_of_memory}")
    code = exit_code
    # Signals are 1 to 64; a higher code is the command's own.
    if 128 < exit_code < 193:
        code = 128 - exit_code
    reason = f"{who} ended with {ended_words(code)}"
    if error:
        reason += f": {error}"
    if error and out_of_memory:
        reason += f"; it {out_of_memory}"
    if not error and code >= 0:
        rest = [line.strip() for line in written if line.strip()]
        if rest:
            reason += f"; its last line: {rest[-1]}"
    return printable(reason)


def cause_of(failure: str) -> str:
    """Returns a failure's first line, or the last of a bare traceback, safe for a terminal."""
    printed = [line for line in _printed(failure.splitlines()) if line]
    lines = [without_marks(line) for line in printed]
    first = next((line for line in lines if not line.startswith(("where:", "try:"))), "")
    if TRACE.match(first):
        first = _what_of_error(lines) or _raised_in(printed) or lines[-1]
    return printable(first.strip().removeprefix("error:").strip()) or "no reason was left"


def innermost(raised: str) -> str:
    """Returns a data worker's error and where it happened: `OSError: a.jpg (sample 7)`.

    Empty if what was raised in the trainer, `RuntimeError: Caught ...`, has none.
    """
    frames = list(_CAUGHT.finditer(raised))
    if not frames:
        return ""
    kind = frames[-1]["kind"]
    lines = raised[frames[-1].end() :].splitlines()
    printed = re.compile(rf"(?:[\w.<>]+\.)?{kind}(?::|$)")
    # After a frame of the traceback: a message may have lines like this, too.
    at = [
        number
        for number, line in enumerate(lines)
        # Or at once: what was made and not raised has no traceback.
        if printed.match(line)
        and (not number or lines[number - 1].startswith(("  ", "Traceback ")))
    ]
    words = kind
    if at:
        last_trace = max(_matching(TRACE, lines), default=0)
        # The first after it: later lines may be of a message. Else the last one.
        line = next((number for number in at if number > last_trace), at[-1])
        words = _with_next(lines, line)
    where = _SAMPLE.sub(r"sample \g<index>, \g<worker>", frames[0]["where"])
    return printable(f"{words} ({where})")


def words_of_feed(raised: str) -> str:
    """Returns what the feed raised, and what to do, in one line; empty: it was not the feed."""
    if _OF_FEED.match(raised):
        return printable(_with_next(raised.splitlines(), 0))
    return ""


def with_cause(words: str, *, lines: Sequence[str]) -> str:
    """Returns what was raised; of a worker of torch's that ended, what ended it; and what to do.

    Args:
        words: What was raised.
        lines: The traceback, and what was raised before.
    """
    if _ENDED.match(words):
        words = next(filter(_KILLED.match, reversed(lines)), words).strip()
    if fix := fix_of_shared_memory(words):
        return f"{words}; {fix}"
    return words


def fix_of_shared_memory(words: str) -> str:
    """Returns what to do where a worker had no room in /dev/shm; empty: that is not the error."""
    if _NO_SHARED_MEMORY.search(words):
        return _MORE_SHARED_MEMORY
    return ""


def said_in(lines: Iterable[str]) -> str:
    printed = _printed(lines)
    written = [without_marks(line) for line in printed]
    return printable(_error_in(written) or _raised_in(printed))


def failure_of_child(lines: Iterable[str], *, host: str) -> str:
    """Returns which process of a command failed first, and why; then its traceback.

    Empty: the output says nothing of a process that the command itself had started.
    """
    printed = _printed(lines)
    failure = first_failure(printed)
    if failure is None or not failure.who:
        return ""
    traceback = failure.traceback
    if traceback is None:
        return printable(f"{failure.who} on {host} {_end_words(failure)}")
    words = printable(f"{failure.who} on {host}: {_words_of(traceback, printed)}")
    return "\n".join([words, *traceback.lines]).rstrip()


def without_events(lines: Iterable[str]) -> list[str]:
    return [line for line in lines if not EVENT_HEAD.search(line)]


def shortened(failure: str, *, most: int) -> str:
    """Returns a failure's text with at most `most` characters: first line and end."""
    if len(failure) <= most:
        return failure
    head = failure.split("\n", 1)[0][: most // 2] + "\n...\n"
    return head + failure[len(head) - most :]


def _printed(lines: Iterable[str]) -> list[str]:
    """Returns a process's own lines, without what a terminal or torch's log adds to them."""
    return [plain_line(line) for line in without_events(lines)]


def _error_in(lines: Sequence[str]) -> str:
    places = [at for at, line in enumerate(lines) if _ERROR.match(line.strip())]
    if not places:
        return ""
    what = _what_of_error(lines[places[-1] :])
    after = (line.strip() for line in lines[places[-1] + 1 :])
    # With a blank: a line of Python, as in a traceback, is no advice.
    fix = next(
        (line.removeprefix("try:").strip() for line in after if line.startswith("try: ")), ""
    )
    if fix:
        return f"{what}; {fix}"
    return what


def _what_of_error(lines: Sequence[str]) -> str:
    matches = [match for line in lines if (match := _ERROR.match(line.strip()))]
    if matches:
        return matches[-1]["what"]
    return ""


def _matching(pattern: re.Pattern[str], lines: Sequence[str]) -> list[int]:
    """Returns the numbers of the lines that begin as the pattern says."""
    return [number for number, line in enumerate(lines) if pattern.match(line)]


def _raised_in(lines: Sequence[str]) -> str:
    """Returns what the process that failed first raised, even if its traceback's start is missing.

    Before it: which rank or process that was, where others may have failed because of it.
    """
    failure = first_failure(lines)
    if failure is None:
        return _raised_in_end(lines)
    if failure.traceback is None:
        return f"{failure.who} {_end_words(failure)}"
    words = _words_of(failure.traceback, lines)
    if failure.who:
        words = f"{failure.who}: {words}"
    if child := failure.child:
        words += f"; before it, {child.who}: {_words_of(child, lines)}"
    return words


def _end_words(failure: FirstFailure) -> str:
    words = f"ended with {failure.ended}"
    # What a signal ended had no last words.
    if failure.before and failure.ended.startswith("exit code"):
        words += f"; the line before: {failure.before}"
    return words


def _raised_in_end(lines: Sequence[str]) -> str:
    """Returns what a traceback raised whose first line is not there."""
    written = [without_marks(line) for line in lines]
    # After an indented line: libraries print further text after a traceback.
    ends = [at for at in _matching(RAISED, written) if at and written[at - 1].startswith("  ")]
    if not ends:
        return ""
    raised = "\n".join(written[ends[-1] :])
    words = words_of_feed(raised) or innermost(raised) or _with_next(written, ends[-1])
    return with_cause(words, lines=written)


def _words_of(traceback: PrintedTraceback, lines: Sequence[str]) -> str:
    """Returns what a traceback raised, in one line.

    Args:
        traceback: One of `lines`.
        lines: All of the output: what ended a worker stands before.
    """
    raised = traceback.raised
    words = words_of_feed(raised) or innermost(raised)
    if not words:
        words = _with_next(traceback.lines, traceback.at)
        if in_group := traceback.in_group:
            words += f": {'; '.join(in_group)}"
        if traceback.is_of_starter and traceback.before:
            words = f"{words.rstrip('.')}; the line before: {traceback.before}"
    return with_cause(words, lines=[without_marks(line) for line in lines])


def _with_next(lines: Sequence[str], at: int) -> str:
    # `Error(s) in loading state_dict for Net:` continues in the next lines.
    words = lines[at].strip()
    for number, line in enumerate(lines[at + 1 :]):
        is_continued = _CONTINUED.match(line) and number < _MAX_CONTINUED
        is_next = words.endswith(":") or is_continued
        if not is_next or not line.strip() or _ADVICE.match(line) or len(words) > _MAX_WORDS:
            break
        words += f" {line.strip()}"
    advice = (line.strip() for line in lines[at + 1 : at + 1 + _ADVICE_LINES])
    fix = next((line.removeprefix("try:").strip() for line in advice if line[:4] == "try:"), "")
    if fix:
        return f"{words}; {fix}"
    return words
