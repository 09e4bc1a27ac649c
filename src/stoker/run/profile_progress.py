"""Progress of a profile on stderr: what is measured, and the first figures."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from stoker.logs import EventName, LogEvent, parse_line
from stoker.platforms.base import LogLine
from stoker.records import Workload
from stoker.run.progress import is_of_platform
from stoker.terminal import (
    say,
    step_line,
    terminal_bar,
    title_column,
    words_column,
)
from stoker.units import duration, ms, wait_words

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import ProgressColumn, TaskID


# What is measured after an event.
_DOING: dict[str, str] = {
    EventName.PROFILE_STARTED: "measures the script as it is",
    EventName.PROFILE_AS_IS: "measures with cached batches",
    EventName.PROFILE_ACCELERATOR: "measures the loader alone",
}


class FollowedProfile:
    """Progress of a profile, from the log of its first rank.

    Once all ranks have logged their waits, the longest-waiting rank is shown.
    """

    def __init__(self, *, bar: "Bar | None", quiet: bool, budget: str) -> None:
        self._bar = bar
        self._task: TaskID | None = None
        if bar:
            self._task = bar.add_task("profile", total=None, words="starts the command")
        self._quiet = quiet
        self._budget = budget
        self._said: set[str] = set()
        self._run = ""
        # By event and rank: waits that are not yet known of all ranks.
        self._waits: dict[str, dict[int, Mapping[str, str]]] = {}

    def line(self, line: LogLine) -> None:
        """Takes a line of the job's log; the script's own lines are in files."""
        if is_of_platform(line):
            say(step_line("", line.text, None), quiet=self._quiet)
            return
        if not line.text.startswith("stoker "):
            return
        event = parse_line(line.text)
        if event is None:
            return
        # Of the first event's run, which the launcher writes before the script begins.
        self._run = self._run or event.run
        rank = event.values.get("rank", "0")
        if event.run == self._run and rank.isdecimal():
            self._take(event, rank=int(rank))

    def _take(self, event: LogEvent, *, rank: int) -> None:
        if "wait_share" in event.values:
            waits = self._waits.setdefault(event.event, {})
            waits[rank] = event.values
            if len(waits) >= int(event.values.get("ranks", "1")):
                self._say_waits()
        elif rank == 0:
            # A rank whose log is not seen: stop waiting for it.
            self._say_waits()
            self._say(event.event, event.values)
        # In lockstep all ranks would log the same.
        if rank != 0:
            return
        doing = _DOING.get(event.event)
        if doing and self._bar and self._task is not None:
            if event.event == EventName.PROFILE_STARTED:
                # The budget counts from here.
                self._bar.reset(self._task)
            self._bar.update(self._task, words=f"of {self._budget}: {doing}")

    def _say_waits(self) -> None:
        # Imported here: verbs that only print a line start faster.
        from stoker.feed.timeline import waits_longest

        if self._waits:
            name, waits = self._waits.popitem()
            self._waits.clear()
            shares = {rank: float(values["wait_share"]) for rank, values in waits.items()}
            rank = waits_longest(shares)
            self._say(name, {**waits[rank], "least": str(min(shares.values()))})

    def _say(self, name: str, values: Mapping[str, str]) -> None:
        words = _WORDS.get(name)
        # Once, though several ranks log the same event.
        once = f"{name} {values.get('workers')}"
        if words and once not in self._said:
            self._said.add(once)
            title, text = words
            say(step_line(title, text(values), None), quiet=self._quiet)


@contextmanager
def following_profile(workload: Workload, *, quiet: bool) -> Iterator[FollowedProfile]:
    def columns(console: "Console") -> "Sequence[ProgressColumn]":
        from rich.progress import SpinnerColumn, TimeElapsedColumn

        words = words_column(console, taken=len("profile    - 0:00:00 "))
        return (title_column("profile"), SpinnerColumn("line"), TimeElapsedColumn(), words)

    with terminal_bar(columns, quiet=quiet) as bar:
        budget = duration(workload.profile.budget_seconds)
        yield FollowedProfile(bar=bar, quiet=quiet, budget=budget)


def _took(values: Mapping[str, str]) -> str:
    return f"a step takes {ms(float(values['step_seconds']))}"


def _so_far(values: Mapping[str, str]) -> str:
    took = "no step has ended yet"
    if values.get("step_seconds"):
        took = _took(values)
    return f"{_waits(values, 'of the time is spent waiting for data')}; {took}"


def _loader(values: Mapping[str, str]) -> str:
    who = f"{values['workers']} workers"
    if values["workers"] == "1":
        who = "1 worker"
    return f"{who} alone: {ms(float(values['cpu_seconds']))} of CPU per batch"


def _waits(values: Mapping[str, str], of: str) -> str:
    rank = int(values.get("rank", "0"))
    least = float(values["least"])
    return wait_words(float(values["wait_share"]), least=least, rank=rank, of=of)


_WORDS: Mapping[str, tuple[str, Callable[[Mapping[str, str]], str]]] = {
    EventName.PROFILE_STARTED: ("begins", lambda _: "the script asks for its first batch"),
    EventName.PROFILE_PROGRESS: ("so far", _so_far),
    EventName.PROFILE_AS_IS: (
        "as is",
        lambda it: f"{_took(it)}, {_waits(it, 'of it waiting for data')}",
    ),
    EventName.PROFILE_ACCELERATOR: ("no loader", lambda it: f"with cached batches {_took(it)}"),
    EventName.PROFILE_LOADER: ("loader", _loader),
    EventName.PROFILE_GUARDED: (
        "ends here",
        lambda it: (
            f"the script is about to {it['action']}, with a model trained on repeated batches"
        ),
    ),
}
