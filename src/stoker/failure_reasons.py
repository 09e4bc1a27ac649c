"""Reasons of failed processes and runs, as one line, found in their last lines.

stoker's own log lines, which stand between a script's, are skipped.
"""

import re
from collections.abc import Iterable, Sequence

from stoker.host.processes import ended_words
from stoker.logs import EVENT_HEAD, printable

# From torch's hook, torchrun's tee, mpirun: `[rank0]: `, `[default0]:`, `[1,0]<stderr>:`.
RANK_MARK = re.compile(r"^\[[a-z]*\d+(,\d+)?\](<std(err|out)>)?: ?")
# stoker's and argparse's: `train.py: error: unrecognized arguments`.
_ERROR = re.compile(r"^(?:[\w./-]+: )?error: *(?P<what>\S.*)")
_TRACE = re.compile(r"^[\s|+]*(Exception Group )?Traceback \(most recent call last\)")
# Lines of an exception group begin with a bar.
_BAR = re.compile(r"^ *\| ?")
_RAISED = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt|Warning)(:|$)")
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
# Any name: `queue.Empty`, `StopIteration`, `jsonschema.Invalid: words`.
_MAYBE_RAISED = re.compile(r"^[A-Za-z_][\w.]*(: |:$|$)")


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
    written = _written(lines)
    error = _error_in(written) or _raised_in(written)
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
    lines = [line for line in _written(failure.splitlines()) if line]
    first = next((line for line in lines if not line.startswith(("where:", "try:"))), "")
    if _TRACE.match(first):
        first = _what_of_error(lines) or _raised_in(lines) or lines[-1]
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
        last_trace = max(_matching(_TRACE, lines), default=0)
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
    written = _written(lines)
    return printable(_error_in(written) or _raised_in(written))


def without_events(lines: Iterable[str]) -> list[str]:
    return [line for line in lines if not EVENT_HEAD.search(line)]


def shortened(failure: str, *, most: int) -> str:
    """Returns a failure's text with at most `most` characters: first line and end."""
    if len(failure) <= most:
        return failure
    head = failure.split("\n", 1)[0][: most // 2] + "\n...\n"
    return head + failure[len(head) - most :]


def _written(lines: Iterable[str]) -> list[str]:
    """Returns a process's own lines, without the mark of its rank."""
    return [RANK_MARK.sub("", line.rstrip()) for line in without_events(lines)]


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
    """Returns what the last traceback raised, even if the traceback's start is missing."""
    begins = _matching(_TRACE, lines)
    whole = lines
    if begins:
        lines = lines[begins[-1] + 1 :]
    after = [_BAR.sub("", line) for line in lines]
    # After an indented line: libraries print further text after a traceback.
    ends = [
        at
        for at, line in enumerate(after)
        if _RAISED.match(line) and (begins or (at and after[at - 1].startswith("  ")))
    ]
    if begins and not ends:
        ends = _matching(_MAYBE_RAISED, after)
    if not ends:
        return ""
    # The first after a traceback's start: later lines may be printed by others.
    at = ends[0] if begins else ends[-1]
    raised = "\n".join(after[at:])
    words = words_of_feed(raised) or innermost(raised) or _with_next(after, at)
    return with_cause(words, lines=whole)


def _with_next(lines: Sequence[str], at: int) -> str:
    # `Error(s) in loading state_dict for Net:` continues in the next lines.
    words = lines[at].strip()
    for line in lines[at + 1 :]:
        if not words.endswith(":") or not line.strip() or _ADVICE.match(line):
            break
        words += f" {line.strip()}"
    advice = (line.strip() for line in lines[at + 1 : at + 1 + _ADVICE_LINES])
    fix = next((line.removeprefix("try:").strip() for line in advice if line[:4] == "try:"), "")
    if fix:
        return f"{words}; {fix}"
    return words
