"""The course of a profile in one trainer process: as is, accelerator only, loader only, the end."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import torch
from torch.utils.data import DataLoader

from stoker.feed.timeline import Steps, Timeline
from stoker.logs import Log
from stoker.profile import batches
from stoker.profile.afterwards import measure_afterwards
from stoker.profile.agree import Agreement, Board
from stoker.profile.cache import Beside, Cache
from stoker.profile.choice import Choice
from stoker.profile.clocks import children_cpu_seconds, machine_cpu_seconds
from stoker.profile.closing import close_profile, hold_learning_rate
from stoker.profile.facts import facts_of, is_cuda_used, length_of, versions
from stoker.profile.findings import Findings
from stoker.profile.first_words import FirstWords, SoFar
from stoker.profile.grown_files import Growth
from stoker.profile.loading import workers_rest
from stoker.profile.place import Place, place_of
from stoker.profile.steps import (
    AS_IS_ENOUGH,
    REPLAY_ENOUGH,
    USUAL_STEPS,
    WARM_UP_REPLAYS,
    AsIsSteps,
    ReplaySteps,
    missing_of,
)
from stoker.profile.watch import Watch
from stoker.settings import ProcessSettings

Loader = DataLoader[object]
Iterate = Callable[[Loader], Iterator[object]]

# Kernels run behind the host: so many steps are timed together where CUDA is used.
_CUDA_BLOCK = 5
# Of slow steps fewer are left out: by this share of the budget the warm-up is over.
_WARM_UP_SHARE = 0.08
_SLOW_STEP_SHARE = 0.02
_SETTLE_SHARE = 0.10


class Session:
    """Measures the main loader of this process: the first that is read to train on.

    Args:
        folder: For the results.
        board: Where ranks leave notes for each other.
        lead_steps: As `Agreement`.
        iterate: Torch's own `DataLoader.__iter__`.
    """

    def __init__(
        self,
        settings: ProcessSettings,
        *,
        folder: Path,
        board: Board,
        lead_steps: int,
        iterate: Iterate,
    ) -> None:
        assert settings.profile is not None
        self._settings = settings
        self._budget = settings.profile.budget_seconds
        self._asked_type = settings.profile.instance_type
        self._folder = folder
        self._board = board
        self._lead_steps = lead_steps
        self._iterate = iterate
        self._log = Log(run=settings.run_id, host=settings.host)
        self._process = os.getpid()
        self._is_stopping = False
        self._choice = Choice()
        self._loaders = 0
        self._epochs = 0
        self._phase_began: float | None = None
        self._first_words = FirstWords(self._say_so_far)
        self._growth: Growth | None = None
        self._steps = 0
        self._seen_before = 0
        self._as_is: AsIsSteps | None = None
        self._rows: Steps | None = None
        self._replay: ReplaySteps | None = None
        self._cache = Cache()
        self._beside = Beside()
        self._watch = Watch()
        self._place: Place | None = None
        self._settle(place_of(settings))

    @property
    def is_here(self) -> bool:
        """Whether this is the process that began; a loader's worker only inherited it."""
        return os.getpid() == self._process

    @property
    def has_begun(self) -> bool:
        """Whether a loader was iterated."""
        return self._loaders > 0

    @property
    def has_verdict(self) -> bool:
        """Whether the parts are known without which there is nothing to say."""
        return self._replay is not None and self._replay.count > 0

    def begin_pass(self) -> None:
        """A loader is iterated."""
        self._loaders += 1
        # Workers may be forked now.
        self._watch.pause()
        if self._loaders == 1:
            self._log.event("profile_begins", budget_seconds=self._budget, pid=self._process)
            if self._settings.rank == 0:
                self._growth = Growth.of_process(self._settings)

    def is_main(self, loader: Loader, *, delivered: int) -> bool:
        """Whether `loader`, which delivered so many batches in this pass, is the one to measure."""
        if self._choice.is_main(loader, delivered=delivered, steps=self._as_is):
            if self._choice.has_changed:
                self._choice.has_changed = False
                self.end_pass()
                self._as_is = None
                self._watch = Watch()
                self._cache = Cache()
                self._beside = Beside()
                self._seen_before = max(0, delivered)
            return True
        return False

    def is_replaying(self, loader: Loader) -> bool:
        """Whether the loader's batches come from the cache: its workers are not wanted."""
        return self._replay is not None and self._choice.loader is loader

    def end_pass(self) -> None:
        """The main loader's pass is over, or was given up; may be called twice."""
        self._watch.pass_ended()
        self._first_words.pass_ended()
        if self._as_is is not None:
            self._as_is.epoch_ended()
        self._beside.take_waited()
        if self._rows is not None:
            self._rows.end()
            self._rows = None

    def batch_beside(self, loader: Loader, inner: Iterator[object], *, delivered: int) -> object:
        """The next batch of a loader that is not the main one.

        Raises:
            StopIteration: At the end of its pass.
        """
        if self._as_is is None or not torch.is_grad_enabled():
            return next(inner)
        return self._beside.next_batch(
            loader, inner, delivered=delivered, is_replaying=self._replay is not None
        )

    def interrupt(self) -> None:
        """Ends the profile at the next step with what is known; safe in a signal handler."""
        self._is_stopping = True

    def next_batch(self, loader: Loader, inner: Iterator[object] | None) -> object:
        """The main loader's next batch: its own, or a cached one.

        Does not return where the profile ends: so does the process.

        Raises:
            StopIteration: As `inner`, while the loop is measured as it is.
            KeyboardInterrupt: If it was interrupted before there is a verdict.
        """
        if self._replay is None:
            steps = self._as_is or self._begin_as_is(loader)
            if self._is_stopping:
                raise KeyboardInterrupt
            if not self._may_replay(steps):
                assert inner is not None
                try:
                    return self._own_batch(inner, steps)
                except StopIteration:
                    # The script may end with this epoch: what can be measured still, is.
                    if not self._is_enough_for_an_end(steps):
                        raise
            self._replay = self._begin_replay(loader, steps)
        elif self._has_replayed(self._replay):
            self._finish(loader, inner, self._replay)
        return self._cached_batch(self._replay)

    def at_exit(self) -> None:
        """The script ends by itself: leaves what is known, and says what is missing."""
        if self.is_here and self.has_begun:
            self._first_words.cancel()
            self.end_pass()
            self._timeline.close()
            self._look_at_files()
            self._write(missing=missing_of(self._as_is, self._replay))

    def _settle(self, place: Place) -> None:
        """What depends on this process's rank, which a script may find out late."""
        if place == self._place:
            return
        self._place = place
        self._agreement = Agreement(
            self._board,
            rank=place.rank,
            world_size=place.world_size,
            lead_steps=self._lead_steps,
        )
        self._timeline = Timeline(self._folder / f"baseline-timeline-rank{place.rank}.csv")
        self._findings = Findings(
            place,
            host=self._settings.host,
            folder=self._folder,
            agreement=self._agreement,
            is_stopped=lambda: self._is_stopping,
        )

    def _begin_as_is(self, loader: Loader) -> AsIsSteps:
        self._settle(place_of(self._settings))
        self._agreement.come_from(self._settings.host)
        self._as_is = AsIsSteps(
            workers=loader.num_workers,
            children_cpu=children_cpu_seconds,
            machine_cpu=machine_cpu_seconds,
            batches=self._seen_before,
            epoch_batches=length_of(loader),
            warm_up_seconds=_WARM_UP_SHARE * self._budget,
        )
        self._phase_began = time.monotonic()
        self._findings.learn(
            seed=torch.initial_seed(), versions=versions(), loader=facts_of(loader)
        )
        return self._as_is

    def _own_batch(self, inner: Iterator[object], steps: AsIsSteps) -> object:
        if self._rows is None:
            self._rows = self._timeline.epoch(loader=0, epoch=self._epochs)
            self._epochs += 1
        self._rows.ask()
        self._watch.asked()
        asked = time.monotonic()
        self._first_words.asked(now=asked)
        thread_before = time.thread_time()
        batch = next(inner)
        receive = time.thread_time() - thread_before
        now = time.monotonic()
        wait = now - asked + self._beside.take_waited()
        self._first_words.got(now=now, wait=wait)
        self._rows.got(batches.num_samples(batch))
        steps.got(now=now, cpu=time.process_time(), wait=wait, receive=receive)
        self._watch.got(now=now, wait=wait, receive=receive, is_counted=steps.count > 0)
        if not self._cache.batches:
            self._findings.learn(batch=batches.facts(batch))
        self._cache.add(batch)
        self._steps += 1
        return batch

    def _elapsed(self) -> float:
        """Seconds since the phase began."""
        return time.monotonic() - (self._phase_began or time.monotonic())

    def _may_replay(self, steps: AsIsSteps) -> bool:
        if AS_IS_ENOUGH.holds(
            steps=steps.count, elapsed_seconds=self._elapsed(), budget_seconds=self._budget
        ):
            self._agreement.propose("accelerator", at_step=self._steps)
        return steps.count > 0 and self._agreement.is_due("accelerator", at_step=self._steps)

    def _is_enough_for_an_end(self, steps: AsIsSteps) -> bool:
        """Whether the end of an epoch ends this phase, too; several ranks change at a step only."""
        return self._findings.result.world_size == 1 and steps.count >= USUAL_STEPS

    def _say_as_is(self, steps: AsIsSteps) -> None:
        self._first_words.cancel()
        result = steps.result()
        self._log.event(
            "profile_as_is",
            rank=self._findings.result.rank,
            steps=steps.count,
            step_seconds=result.step_seconds.median,
            wait_share=result.wait_seconds.median / result.step_seconds.median,
        )

    def _say_so_far(self, known: SoFar) -> None:
        """In a thread of its own: a step may last longer than anybody waits for words."""
        if self.is_here:
            self._log.event(
                "profile_so_far",
                rank=self._findings.result.rank,
                steps=known.steps,
                step_seconds=known.step_seconds,
                wait_share=known.wait_share,
            )

    def _begin_replay(self, loader: Loader, steps: AsIsSteps) -> ReplaySteps:
        if self._agreement.is_late("accelerator", at_step=self._steps):
            self._findings.note("the ranks are not in lockstep: phases did not change together")
        self.end_pass()
        self._timeline.close()
        self._findings.learn(as_is=steps.result(), evidence=self._watch.result())
        self._say_as_is(steps)
        if loader.num_workers and not workers_rest(
            seconds=_SETTLE_SHARE * self._budget, is_stopped=lambda: self._is_stopping
        ):
            self._findings.note("the loader's workers did not come to rest before the replay")
        if self._beside.count > steps.batches / 2:
            self._findings.note(
                "the steps read from more than one loader: their waiting is in the figures, what "
                f"loading costs is that of {facts_of(loader).dataset} only"
            )
        if threading.current_thread() is not threading.main_thread():
            self._findings.note(
                "the loader is read by a thread beside the main one: the wait is that thread's"
            )
        hold_learning_rate()
        uses_cuda = is_cuda_used()
        self._findings.learn(uses_cuda=uses_cuda)
        self._phase_began = time.monotonic()
        self._findings.count_neighbours()
        is_slow = steps.result().step_seconds.median > _SLOW_STEP_SHARE * self._budget
        return ReplaySteps(
            block=_CUDA_BLOCK if uses_cuda and not is_slow else 1,
            warm_up=1 if is_slow else WARM_UP_REPLAYS,
        )

    def _has_replayed(self, replay: ReplaySteps) -> bool:
        if self._findings.result.uses_cuda and replay.is_block_end():
            torch.cuda.synchronize()
        replay.asked(now=time.monotonic(), cpu=time.process_time())
        if self._is_stopping:
            return self.has_verdict
        if REPLAY_ENOUGH.holds(
            steps=replay.count, elapsed_seconds=self._elapsed(), budget_seconds=self._budget
        ):
            self._agreement.propose("loader", at_step=self._steps)
        return replay.count > 0 and self._agreement.is_due("loader", at_step=self._steps)

    def _cached_batch(self, replay: ReplaySteps) -> object:
        batch = self._cache.give(self._steps)
        self._steps += 1
        replay.gave(now=time.monotonic(), cpu=time.process_time())
        return batch

    def _finish(
        self, loader: Loader, inner: Iterator[object] | None, replay: ReplaySteps
    ) -> NoReturn:
        accelerator = replay.result(cached_batches=len(self._cache.batches))
        self._findings.learn(accelerator=accelerator)
        self._write(missing="")
        self._log.event(
            "profile_accelerator",
            rank=self._findings.result.rank,
            steps=replay.count,
            step_seconds=accelerator.step_seconds.median,
            trainer_cpu_seconds=accelerator.trainer_cpu_seconds.median,
        )

        def measure() -> None:
            measure_afterwards(
                self._findings,
                loader,
                inner=inner,
                cached=self._cache.batches,
                budget_seconds=self._budget,
                iterate=self._iterate,
                log=self._log,
                instance_type=self._asked_type,
            )

        close_profile(
            self._findings,
            measure=measure,
            look_at_files=self._look_at_files,
            folder=self._folder,
            launcher_pid=self._settings.launcher_pid,
            log=self._log,
        )

    def _look_at_files(self) -> None:
        if self._growth and self._findings.result.rank == 0:
            self._findings.learn(grown_files=self._growth.files())

    def _write(self, *, missing: str) -> None:
        steps = self._as_is
        if self._findings.result.as_is is None and steps and steps.count:
            self._findings.learn(as_is=steps.result())
        self._findings.learn(steps=self._steps, loaders=self._loaders)
        self._findings.write(missing=missing)
