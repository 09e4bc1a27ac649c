"""The profiler for batches that come from no DataLoader: it ends the command when enough is known.

The steps are in the timeline that `stoker.timed` writes, from which the launcher makes the profile.
"""

import json
import os
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import NoReturn

from stoker.environment import ProcessSettings, from_environment
from stoker.feed.bookkeeping import this_process
from stoker.feed.foreign_loaders import own_loaders
from stoker.feed.timed import TimedEpoch
from stoker.feed.timeline import Steps
from stoker.logs import EventName, Log
from stoker.profile.ranks import LEAD_STEPS_ON_DEVICE, Ranks, end_process
from stoker.profile.steps import is_enough
from stoker.records import write_text
from stoker.units import wait_share

# The profile's medians are over all steps: the first ones, which compile, are a quarter at most.
_FIRST_STEPS = 20
_LEAST_STEPS = 4 * _FIRST_STEPS
# Ranks in lockstep are a step apart.
_MEET_SECONDS = 10.0


def install(pass_class: type[TimedEpoch]) -> None:
    """Ends this process when enough steps are known, where the run asks for a profile.

    All ranks end at a step that they agree on. Ranks on other hosts learn it from torch's store; in
    jobs without one they end with the run, which ends with the host of rank 0.
    """
    settings = from_environment()
    if settings.profile is None or settings.output is None:
        return
    course = _course(settings, budget=settings.profile.budget_seconds, folder=settings.output)
    process = os.getpid()
    ask = pass_class.ask

    def ask_and_look(self: Steps) -> None:
        ask(self)
        # A process that the script forked inherited the changed class.
        if os.getpid() == process:
            next(course)

    pass_class.ask = ask_and_look  # type: ignore[method-assign]


def _course(settings: ProcessSettings, *, budget: float, folder: Path) -> Iterator[None]:
    """Yields at each batch that is asked for, and ends the process when enough are."""
    log = Log(run=settings.run_id, host=settings.host)
    log.event(EventName.PROFILE_STARTED, budget_seconds=budget)
    # By now the script has found its ranks.
    ranks = Ranks(settings, folder=folder)
    since = time.monotonic()
    for asked in count(1):
        if asked <= _FIRST_STEPS:
            since = time.monotonic()
        seconds = time.monotonic() - since
        is_over = seconds >= budget
        if asked >= _LEAST_STEPS:
            is_over |= is_enough(asked, elapsed_seconds=seconds, budget_seconds=budget)
        if is_over and ranks.step is None and ranks.rank == 0:
            # Devices may run behind their host.
            ranks.announce("", at_step=asked, lead_steps=LEAD_STEPS_ON_DEVICE)
        if ranks.is_due(at_step=asked):
            _end(settings, ranks, folder=folder, log=log)
        yield


def _end(settings: ProcessSettings, ranks: Ranks, *, folder: Path, log: Log) -> NoReturn:
    timeline = this_process().timeline
    timeline.close()
    sums = timeline.whole
    seconds = sums.wait_seconds + sums.compute_seconds
    log.event(
        EventName.PROFILE_AS_IS,
        rank=ranks.rank,
        steps=sums.steps,
        step_seconds=seconds / max(1, sums.steps),
        wait_share=wait_share(step_seconds=seconds, wait_seconds=sums.wait_seconds),
    )
    # No exit handler of this process will say it.
    seen = {"loaders": own_loaders()}
    write_text(folder / f"seen-{os.getpid()}.json", json.dumps(seen))
    # A host's first rank ends the processes above all ranks of its host, so it waits for them.
    if ranks.leads_host:
        ranks.meet("timed-end", seconds=_MEET_SECONDS)
    else:
        ranks.post(f"timed-end-{ranks.rank}", "here")
    end_process(folder=folder, launcher_pid=settings.launcher_pid if ranks.leads_host else None)
