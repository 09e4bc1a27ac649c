"""The profiler for batches that come from no DataLoader: measures the steps as they are, and ends.

Replaying such batches would tell nothing about their source. The steps are in the timeline that
`stoker.timed` writes, from which the launcher makes the profile.
"""

import os
from typing import NoReturn

from stoker.environment import ProcessSettings, from_environment
from stoker.feed.bookkeeping import this_process
from stoker.feed.timed import TimedEpoch
from stoker.feed.timeline import Steps
from stoker.logs import EventName, Log
from stoker.profile.lockstep import LEAD_STEPS_ON_DEVICE, Agreement, Board, end_process
from stoker.profile.steps import AS_IS_ENOUGH, WarmUp
from stoker.units import wait_share

# Batches that a loader of any kind may hold ready: 4 workers, twice, and a queue to the script.
_PREFETCHED = 16
# The profile's medians are over all steps of the timeline: of these, the warm-up is a quarter at
# most.
_COUNTED_STEPS = 3
_WARM_UP_SHARE = 0.08
_LONGEST_WARM_UP_SHARE = 0.25
# A wait is one from this share of a step on, and this long.
_WAIT_SHARE = 0.05
_WAIT_SECONDS = 1e-3
# Ranks in lockstep are a step apart.
_MEET_SECONDS = 10.0


def install(pass_class: type[TimedEpoch]) -> None:
    """Ends this process when enough steps are known, where STOKER_PROFILE asks for a profile.

    All ranks end at a step that they agree on. Ranks on other hosts learn it from torch's store; in
    jobs without one they end with the run, which ends with the host of rank 0.
    """
    settings = from_environment()
    if settings.profile is None or settings.output is None:
        return
    session = _Session(settings)
    # Both are places where a step ends: loops ask for batches, Keras tells of them afterwards.
    ask = pass_class.ask
    took = pass_class.took

    def ask_and_look(self: Steps) -> None:
        ask(self)
        session.asked()

    def took_and_look(self: Steps, *, seconds: float, wait: float, samples: int) -> None:
        took(self, seconds=seconds, wait=wait, samples=samples)
        session.asked()

    pass_class.ask = ask_and_look  # type: ignore[method-assign]
    pass_class.took = took_and_look  # type: ignore[method-assign]


class Counting:
    """Which steps count: those after the warm-up, until there are enough.

    Told of the process's totals whenever a batch is asked for: steps, seconds of waiting and of the
    rest.
    """

    def __init__(self, *, budget_seconds: float) -> None:
        self._budget = budget_seconds
        self._warm_up = WarmUp(
            prefetched=_PREFETCHED,
            soon_seconds=_WARM_UP_SHARE * budget_seconds,
            longest_seconds=_LONGEST_WARM_UP_SHARE * budget_seconds,
        )
        self._last = (0, 0.0, 0.0)
        # Totals at the end of the warm-up.
        self._warm = (0, 0.0, 0.0)

    def look(self, totals: tuple[int, float, float]) -> None:
        steps, wait, busy = (now - then for now, then in zip(totals, self._last, strict=True))
        if steps < 1:
            return
        self._last = totals
        seconds = (wait + busy) / steps
        was_over = self._warm_up.is_over
        self._warm_up.add(
            busy_seconds=busy / steps,
            seconds=seconds,
            had_to_wait=wait / steps >= max(_WAIT_SECONDS, _WAIT_SHARE * seconds),
            may_be_full=True,
        )
        if not (was_over and self._warm_up.is_over):
            self._warm = totals

    def counted(self) -> tuple[int, float, float]:
        """Returns steps, seconds of waiting and of the rest since the warm-up; all in it."""
        begun = (0, 0.0, 0.0)
        if self._warm_up.is_over:
            begun = self._warm
        steps, wait, busy = (now - then for now, then in zip(self._last, begun, strict=True))
        return round(steps), wait, busy

    def is_enough(self) -> bool:
        steps, wait, busy = self.counted()
        elapsed = wait + busy
        least = _COUNTED_STEPS * self._warm[0]
        if elapsed >= AS_IS_ENOUGH.most * self._budget:
            # With few steps rather than with none: the budget is used up.
            least = 0
        return self._warm_up.is_over and AS_IS_ENOUGH.holds(
            steps=steps, elapsed_seconds=elapsed, budget_seconds=self._budget, least=least
        )


class _Session:
    def __init__(self, settings: ProcessSettings) -> None:
        assert settings.profile is not None
        assert settings.output is not None
        self._settings = settings
        self._folder = settings.output
        self._budget = settings.profile.budget_seconds
        self._log = Log(run=settings.run_id, host=settings.host)
        self._process = os.getpid()
        self._asked = 0
        self._counting = Counting(budget_seconds=self._budget)
        self._agreement = Agreement(
            Board(self._folder),
            rank=settings.rank,
            world_size=settings.world_size,
            # Devices may run behind their host.
            lead_steps=lambda: LEAD_STEPS_ON_DEVICE,
        )

    def asked(self) -> None:
        # A process that the script forked inherited the changed class.
        if os.getpid() != self._process:
            return
        self._asked += 1
        if self._asked == 1:
            self._log.event(
                EventName.PROFILE_STARTED, budget_seconds=self._budget, pid=self._process
            )
        timeline = this_process().timeline
        self._counting.look((timeline.steps, timeline.wait_seconds, timeline.compute_seconds))
        if self._counting.is_enough():
            self._agreement.propose("timed", at_step=self._asked)
        if self._agreement.is_due("timed", at_step=self._asked):
            self._end()

    def _end(self) -> NoReturn:
        settings = self._settings
        this_process().timeline.close()
        steps, waited, computed = self._counting.counted()
        self._log.event(
            EventName.PROFILE_AS_IS,
            rank=settings.rank,
            ranks=settings.world_size,
            steps=steps,
            step_seconds=(waited + computed) / max(1, steps),
            wait_share=wait_share(step_seconds=waited + computed, wait_seconds=waited),
        )
        leads = settings.local_rank == 0
        # It ends the processes above all ranks of its host, so it waits for them.
        if leads:
            self._agreement.meet(
                "timed-end", deadline_seconds=_MEET_SECONDS, is_stopped=lambda: False
            )
        else:
            self._agreement.arrive("timed-end")
        end_process(folder=self._folder, launcher_pid=settings.launcher_pid if leads else None)
