"""A profile inside a trainer process, in phases: the steps, cached batches, the loader.

`install` replaces how the process's DataLoaders are iterated.
"""

import _thread
import atexit
import contextlib
import copy
import itertools
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn, TypeVar, cast
from weakref import ref

import msgspec
import torch.distributed
import torch.utils.data
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from stoker.environment import ProcessSettings, from_environment
from stoker.errors import UsageError
from stoker.feed import loader as loader_module
from stoker.feed.changes import making
from stoker.feed.device_events import own_gpu_uuids
from stoker.feed.epoch_times import epoch_times
from stoker.feed.foreign_loaders import own_loaders
from stoker.feed.memory import num_bytes
from stoker.feed.replace import note_makings
from stoker.feed.stream_epochs import streams_in
from stoker.feed.timeline import Timeline, read_timeline
from stoker.feed.wire.dataset import DatasetSpec, refusal_of, what_is_shared
from stoker.logs import EventName, Log
from stoker.profile import batches
from stoker.profile.batches import (
    Choice,
    LoopChanges,
    facts_of,
    is_cuda_used,
    is_divided,
    length_of,
    versions,
    watch_streams,
)
from stoker.profile.file_guard import FileGuard, own_folders
from stoker.profile.inventory import MOST_SECONDS, measure_gpu_decoding, take_inventory
from stoker.profile.loader_phases import (
    Iterate,
    Loader,
    error_words,
    measure_costs,
    measure_loading,
    measure_reads,
    room_for_batches,
    shut_down,
    try_receive,
    waiting_counts,
    worker_counts,
    workers_rest,
)
from stoker.profile.lockstep import (
    LEAD_STEPS,
    LEAD_STEPS_ON_DEVICE,
    Agreement,
    Board,
    Findings,
    RankPlace,
    end_process,
)
from stoker.profile.memory.loop_growth import LoopWatch
from stoker.profile.memory.python_objects import held_objects
from stoker.profile.memory.watch import MemoryWatch, measure_growth
from stoker.profile.rank_results import HOST, Drain, quartiles
from stoker.profile.script_phases import Reading, Replay, StepsSoFar, VariantPhases
from stoker.profile.states import with_one_step
from stoker.profile.steps import (
    AS_IS_ENOUGH,
    USUAL_STEPS,
    WARM_UP_REPLAYS,
    AsIsSteps,
    Lack,
    ReplaySteps,
    lack_of,
    missing_of,
)
from stoker.records import Shippable
from stoker.units import wait_share

# Shares of the budget; each phase also starts workers, which takes a moment.
_LOADING_SHARE = 0.30
_RECEIVE_SHARE = 0.03
_READS_SHARE = 0.03
_COSTS_SHARE = 0.03
_DECODING_SHARE = 0.05
_MEMORY_SHARE = 0.03
_MOST_SECONDS = 6.0
# A shorter phase measures nothing.
_LEAST_SECONDS = 0.2
# Limits for finding out what cannot be pickled for data hosts: beyond them it takes too long.
_MAX_PICKLE_BYTES = 256 << 20
_MAX_PICKLE_SECONDS = 2.0
# The replay begins right after the script saves; at this share of the budget at the latest.
_LATEST_SHARE = 0.6
_SETTLE_SHARE = 0.10
# A step that takes more of the budget is slow: fewer replays are left out.
_SLOW_STEP_SHARE = 0.02
# Cached steps over steps as they are that no noise explains: the self-check's tolerance.
_LONGER = 1.15
# The other ranks end this much later than the first one at most.
_HEED_SECONDS = 0.2
# How often the results so far are written: they are read if the process is killed.
_KEEP_SECONDS = 5.0

# Of an optimizer, before which a loader would have been read.
_ENOUGH_STEPS = 20
# For the last word of a process that a signal ends: hosts get SIGKILL some 30 s after it.
_LAST_WORD_SECONDS = 10.0

_FoundT = TypeVar("_FoundT")


class ProfileSession:
    """The profile of this process's main loader: the first that is read to train on."""

    def __init__(
        self,
        settings: ProcessSettings,
        *,
        folder: Path,
        board: Board,
        iterate: Iterate,
        guard: FileGuard,
    ) -> None:
        assert settings.profile is not None
        self._settings = settings
        self._budget = settings.profile.budget_seconds
        self._asked_type = settings.profile.instance_type
        self._folder = folder
        self._board = board
        self._iterate = iterate
        self._guard = guard
        self._log = Log(run=settings.run_id, host=settings.host)
        self._process = os.getpid()
        self._is_stopping = False
        self._choice = Choice()
        self._loaders = 0
        self._loop = LoopChanges()
        self._memory = MemoryWatch()
        self._loop_memory = LoopWatch()
        self._reading = Reading(budget_seconds=self._budget, say=self._say_so_far)
        self._steps = 0
        self._is_read_out = False
        self._changes = 0
        self._kept: float | None = None
        self._replay: Replay | None = None
        self._variants: VariantPhases | None = None
        self._replayed: Loader | None = None
        # Weak: a script that drops its loader ends its workers by that.
        self._inner: Callable[[], Iterator[object] | None] = lambda: None
        # Taken once, by the thread that ends this process: all others wait for that.
        self._end = threading.Lock()
        self._place: RankPlace | None = None
        self._settle(place_of(settings))

    @property
    def is_here(self) -> bool:
        """False in a loader's worker, which only inherited the session."""
        return os.getpid() == self._process

    @property
    def has_begun(self) -> bool:
        return self._loaders > 0

    @property
    def has_verdict(self) -> bool:
        return self._replay is not None and self._replay.steps.count > 0

    def begin_epoch(self) -> None:
        self._loaders += 1
        self._reading.watch.pause()
        if self._loaders == 1:
            self._log.event(
                EventName.PROFILE_STARTED, budget_seconds=self._budget, pid=self._process
            )

    def is_main(self, loader: Loader, *, delivered: int) -> bool:
        is_main = self._choice.is_main(loader, delivered=delivered, steps=self._reading.steps)
        if is_main and self._choice.has_changed:
            self._choice.has_changed = False
            self._reading.start_over(delivered=delivered)
            self._memory = MemoryWatch()
            self._loop_memory = LoopWatch()
        return is_main

    def is_replaying(self, loader: Loader) -> bool:
        """Whether the loader's batches come from the cache: its workers are idle."""
        return self._replay is not None and self._choice.loader is loader

    def end_epoch(self) -> None:
        """Ends the main loader's epoch, complete or not; may be called twice."""
        self._loop.epoch_ended()
        self._reading.end_epoch()

    def opened(self, seconds: float) -> None:
        """Records how long iter() of the main loader took: its next first batch waited for it."""
        self._reading.opened(seconds)

    def other_batch(self, loader: Loader, inner: Iterator[object], *, delivered: int) -> object:
        # Without gradients it is a validation, which is no part of a step.
        if self._reading.steps is None or not torch.is_grad_enabled():
            with making():
                return next(inner)
        return self._reading.others.next_batch(
            loader,
            inner,
            delivered=delivered,
            is_replaying=self._replay is not None,
            clock=self._reading.clock,
        )

    def interrupt(self) -> None:
        """Ends the profile at the next step with what is known; safe in a signal handler."""
        self._is_stopping = True

    def next_batch(self, loader: Loader, inner: Iterator[object] | None) -> object:
        """Returns the main loader's next batch, its own or a cached one, or ends the process.

        Raises:
            StopIteration: As `inner`, while the loop is measured as it is.
            KeyboardInterrupt: If it was interrupted before there is a verdict.
        """
        if self._replay is None:
            steps = self._reading.steps or self._begin_as_is(loader)
            if self._is_stopping:
                raise KeyboardInterrupt
            lack = lack_of(steps, budget_seconds=self._budget)
            if lack is not None and self._findings.result.rank == 0:
                self._give_up(lack)
            if not self._may_replay(steps):
                assert inner is not None
                try:
                    return self._own_batch(loader, inner, steps)
                except StopIteration:
                    # The script may end with this epoch: what can be measured is. But of several
                    # ranks one would change phase alone, and the others wait for it in all-reduce.
                    is_alone = self._findings.result.world_size == 1
                    if is_alone:
                        steps.settle()
                    if not is_alone or steps.count < max(USUAL_STEPS, steps.least):
                        self._is_read_out = is_alone
                        raise
            self._replay = self._begin_replay(loader, inner, steps)
        elif self._has_replayed(self._replay):
            self._finish()
        batch = self._running(self._replay).batch(self._steps)
        self._steps += 1
        if self._replay.steps.given == 1:
            # Written now: a script may fail on cached batches, and the error then names them.
            self._write(missing=self._missing())
        return batch

    def at_exit(self) -> None:
        if self.is_here and self.has_begun:
            # Where another thread ends the process, this one waits for that.
            with self._end:
                self._look_at_files()
                self.leave_word()

    def end_before(self, action: str) -> NoReturn:
        """Ends the profile with what is known, before the script does `action` to a user's file."""
        self._agreement.warn(action)
        self._finish(before=action)

    def leave_word(self) -> None:
        self._reading.first_words.cancel()
        self.end_epoch()
        self._timeline.close()
        missing = self._missing()
        if self._replay and self._variants and self._variants.running:
            # The script's last steps: the cached ones before them are enough for a verdict.
            self._end_replay(self._replay)
            missing = ""
        self._write(missing=missing)
        if self._replay is not None:
            # The process may end *because* of the cached batches.
            self._log.event(
                EventName.PROFILE_INTERRUPTED,
                rank=self._findings.result.rank,
                replayed_steps=self._replay.steps.given,
                note="the profile was replaying cached batches",
            )

    def _settle(self, place: RankPlace) -> None:
        """Sets up what depends on this process's rank, which a script may find out late."""
        if place == self._place:
            return
        self._place = place
        self._agreement = Agreement(
            self._board,
            rank=place.rank,
            world_size=place.world_size,
            lead_steps=self._lead_steps,
        )
        self._timeline_file = self._folder / f"baseline-timeline-rank{place.rank}.csv"
        self._timeline = Timeline(self._timeline_file)
        self._findings = Findings(
            place,
            host=self._settings.host,
            folder=self._folder,
            agreement=self._agreement,
            is_stopped=lambda: self._is_stopping,
        )

    def _lead_steps(self) -> int:
        """Returns how far ahead a change of phase is announced: devices run behind their host."""
        if self._reading.clock.name == HOST:
            return LEAD_STEPS
        return LEAD_STEPS_ON_DEVICE

    def _begin_as_is(self, loader: Loader) -> AsIsSteps:
        self._settle(place_of(self._settings))
        self._agreement.come_from(self._settings.host)
        steps = self._reading.begin(loader, ranks=self._findings.result.world_size)
        self._findings.learn(
            seed=torch.initial_seed(), versions=versions(), loader=facts_of(loader)
        )
        return steps

    def _own_batch(self, loader: Loader, inner: Iterator[object], steps: AsIsSteps) -> object:
        is_first = not self._reading.cache.batches
        self._loop.asked(loader)
        batch = self._reading.next_batch(inner, steps, timeline=self._timeline)
        if is_first:
            self._findings.learn(batch=batches.facts(batch))
        self._steps += 1
        now = time.monotonic()
        if self._kept is None or now - self._kept >= _KEEP_SECONDS:
            self._kept = now
            self._write(missing=self._missing())
        facts = self._findings.result.batch
        if steps.count and facts is not None:
            self._memory.look(inner, steps=steps.batches, batch_size=facts.samples)
            self._loop_memory.look(self._steps)
        self._loop.made()
        # Last: the time for writing and looking must not count as part of the script's step.
        self._reading.gave()
        return batch

    def _may_replay(self, steps: AsIsSteps) -> bool:
        changes = self._guard.changes
        has_saved = changes != self._changes
        self._changes = changes
        is_late = self._reading.elapsed_seconds >= _LATEST_SHARE * self._budget
        # A script that saves soon would end the profile.
        if (not changes or has_saved or is_late) and self._is_enough(steps):
            self._agreement.propose("accelerator", at_step=self._steps)
        is_due = self._agreement.is_due("accelerator", at_step=self._steps)
        if self._agreement.is_announced("accelerator"):
            # Rank 0 decides for all: another one may have seen a slow step later.
            steps.end_warm_up()
        if is_due and not steps.count:
            steps.settle()
        return steps.count > 0 and is_due

    def _is_enough(self, steps: AsIsSteps) -> bool:
        counted = self._reading.counted_seconds
        return AS_IS_ENOUGH.holds(
            steps=steps.count,
            elapsed_seconds=counted,
            budget_seconds=self._budget,
            least=steps.least,
        ) and (steps.is_supplied or counted >= AS_IS_ENOUGH.most * self._budget)

    def _say_so_far(self, known: StepsSoFar) -> None:
        if self.is_here:
            result = self._findings.result
            self._log.event(
                EventName.PROFILE_PROGRESS,
                rank=result.rank,
                ranks=result.world_size,
                **known._asdict(),
            )

    def _begin_replay(
        self, loader: Loader, inner: Iterator[object] | None, steps: AsIsSteps
    ) -> Replay:
        if self._agreement.is_late("accelerator", at_step=self._steps):
            self._findings.note("the ranks are not in lockstep: phases did not change together")
        self.end_epoch()
        self._timeline.close()
        self._reading.first_words.cancel()
        steps.settle()
        if not steps.is_supplied:
            self._findings.note(
                f"the steps may have lived on batches that were prefetched: {steps.count} of them "
                f"never waited, and the loader holds up to {steps.prefetched} ready"
            )
        self._learn_as_is(steps)
        self._note_loop()
        self._learn_memory(loader)
        self._learn_loop()
        with contextlib.suppress(TypeError):
            self._inner = ref(inner)
        # A copy, as scripts drop their loaders, and the next one then becomes the main one.
        self._replayed = copy.copy(loader)
        self._replayed._iterator = None
        replay = self._set_up_replay(loader, steps)
        self._variants = VariantPhases(
            self._reading.cache,
            clock=self._reading.clock,
            loader=self._replayed,
            inner=lambda: self._inner(),
            iterate=self._iterate,
            budget_seconds=self._budget,
            elapsed_seconds=lambda: self._reading.elapsed_seconds,
            is_stopped=self._findings.is_stopped,
        )
        # From here on the model is trained on repeated batches.
        self._guard.arm(self.end_before)
        if self._findings.result.world_size > 1:
            threading.Thread(target=self._heed, name="stoker-heed", daemon=True).start()
        return replay

    def _learn_as_is(self, steps: AsIsSteps) -> None:
        """Keeps the steps as they are, and logs them."""
        as_is = steps.result()
        rows = read_timeline(self._timeline_file)
        self._findings.learn(
            as_is=as_is,
            evidence=self._reading.watch.result(),
            epoch_times=epoch_times(rows, epoch_steps=steps.epoch_batches),
        )
        result = self._findings.result
        if result.world_size == 1:
            # As the verdict has it. One of several ranks does not know which work is the others'.
            as_is = with_one_step([result])[0].as_is or as_is
        step = as_is.step_seconds
        wait = as_is.wait_seconds
        self._log.event(
            EventName.PROFILE_AS_IS,
            rank=result.rank,
            ranks=result.world_size,
            steps=step.samples,
            step_seconds=step.median,
            wait_share=wait_share(step_seconds=step.median, wait_seconds=wait.median),
        )

    def _note_loop(self) -> None:
        """Keeps what the loop changes: neither data hosts nor workers may make batches ahead."""
        facts = self._findings.result.loader
        loop = self._loop
        if loop.words and facts is not None:
            self._findings.learn(loader=msgspec.structs.replace(facts, in_step=loop.words))
        elif loop.once:
            self._findings.note(
                f"{loop.once} changed once between two batches: with data hosts or a plan's "
                "workers the trainer makes the rest of that epoch"
            )

    def _learn_memory(self, loader: Loader) -> None:
        facts = self._findings.result.batch
        length = length_of(loader)
        samples = None
        if length is not None and facts is not None:
            samples = length * facts.samples
        factor = loader.prefetch_factor or 2 if loader.num_workers else 0
        self._findings.learn(
            memory=self._memory.result(prefetch_factor=factor, epoch_samples=samples)
        )

    def _learn_loop(self) -> None:
        """Learns what the loop keeps of each step, in its thread."""
        growth = self._tried(
            "what the loop keeps", lambda: (self._loop_memory.result(self._steps), [])
        )
        self._findings.learn(loop=growth)

    def _set_up_replay(self, loader: Loader, steps: AsIsSteps) -> Replay:
        """Waits until the loader's workers are idle, and notes anything unusual."""
        findings = self._findings
        others = self._reading.others
        if loader.num_workers and not workers_rest(
            self._inner(),
            seconds=_SETTLE_SHARE * self._budget,
            is_stopped=lambda: self._is_stopping,
        ):
            findings.note("the loader's workers did not become idle before the replay")
        # In most steps: a loader that is read now and then is no part of a step.
        if others.count > steps.batches / 2:
            findings.note(
                "the steps read from more than one loader: the wait is for all of them, the cost "
                f"of loading is for {facts_of(loader).dataset} only"
            )
        if threading.current_thread() is not threading.main_thread():
            findings.note(
                "a thread other than the main one reads the loader: the wait is that thread's"
            )
        # A schedule for the script's number of steps (OneCycleLR) raises at the first one beyond.
        LRScheduler.step = lambda self, epoch=None: None  # type: ignore[method-assign]
        findings.learn(uses_cuda=is_cuda_used(), gpu_uuids=own_gpu_uuids())
        findings.count_neighbours()
        warm_up = WARM_UP_REPLAYS
        if steps.result().step_seconds.median > _SLOW_STEP_SHARE * self._budget:
            # The usual warm-up would take too much of the budget.
            warm_up = 1
        return Replay(self._reading.cache, ReplaySteps(clock=self._reading.clock, warm_up=warm_up))

    def _heed(self) -> None:
        """Ends this rank when another one does: it would wait for that rank in all-reduce."""
        while not (action := self._agreement.warning()):
            time.sleep(_HEED_SECONDS)
        self._finish(before=action)

    def _running(self, replay: Replay) -> Replay:
        """Returns the replay whose steps are timed now: the cached steps, or a variant of them."""
        if self._variants is None:
            return replay
        return self._variants.running or replay

    def _has_replayed(self, replay: Replay) -> bool:
        assert self._variants is not None
        variants = self._variants
        self._running(replay).asked()
        if self._is_stopping:
            return self.has_verdict
        if variants.running is None:
            is_enough = replay.is_enough(budget_seconds=self._budget)
            if is_enough and self._keeps_pages(replay):
                replay.start_over()
                return False
        else:
            is_enough = variants.is_enough()
        if is_enough and self._findings.result.rank == 0:
            self._agreement.propose(self._following(replay), at_step=self._steps)
        if not replay.steps.count:
            return False
        phases = (*variants.left, "loader")
        due = (name for name in phases if self._agreement.is_due(name, at_step=self._steps))
        phase = next(due, None)
        if phase is not None and phase != "loader":
            variants.begin(phase)
        return phase == "loader"

    def _keeps_pages(self, replay: Replay) -> bool:
        """Whether the cached batches were in the wrong kind of pages, which it changes.

        A step without any wait is not longer than the step as it is. Where it is, the script drops
        batches whose pages its workers hold, and the replayed ones were freed with each step.
        """
        as_is = self._findings.result.as_is
        # Ranks that do not count alike would not change phase together.
        if as_is is None or not replay.steps.count or self._findings.result.world_size > 1:
            return False
        cache = self._reading.cache
        cached = replay.steps.result(cached_batches=len(cache.batches)).step_seconds
        if cached.median <= _LONGER * as_is.step_seconds.median:
            return False
        return cache.keep_pages()

    def _following(self, replay: Replay) -> str:
        """Returns the phase after the running one."""
        assert self._variants is not None
        as_is = self._findings.result.as_is
        if not replay.steps.count or as_is is None:
            return "loader"
        cached = replay.steps.result(cached_batches=len(self._reading.cache.batches))
        following = self._variants.following(
            cached.step_seconds, step_seconds=as_is.step_seconds.median
        )
        return following or "loader"

    def _finish(self, *, before: str = "") -> NoReturn:
        """Measures the loader alone, hands the results over, and always ends the process."""
        self._end.acquire()
        self._guard.free_this_thread()
        findings = self._findings
        replay = self._replay
        log = self._log
        assert replay is not None
        if before:
            findings.learn(ended_before=before)
            findings.note(
                f"the script was about to {before}: the profile ended there, with what it had "
                "measured"
            )
            log.event(EventName.PROFILE_GUARDED, rank=findings.result.rank, action=before)
        self._end_replay(replay)
        # Written before the phases without the model, in which a user's dataset may fail.
        self._write(missing="")
        try:
            # Without a verdict the loader's figures are of no use; but ranks stay together.
            if self.has_verdict or findings.result.world_size > 1:
                self._measure_loader()
            if self._is_stopping:
                findings.note("stopped early: the verdict rests on what was measured until then")
            self._look_at_files()
            findings.learn(has_ended=True)
            findings.write()
            findings.hand_over()
            log.event(EventName.PROFILE_ENDED, rank=findings.result.rank)
        except BaseException as err:
            # A process edge: the script must not catch it, and save an unfinished training.
            words = f"{type(err).__name__}: {err}"[:300]
            log.event(EventName.PROFILE_FAILED, error=words)
            traceback.print_exc()
            with contextlib.suppress(BaseException):
                findings.note(f"the phases without the model failed: {words}")
                findings.write()
        finally:
            self._end_process()

    def _end_process(self) -> NoReturn:
        """Ends this process; a host's first rank also what stands above all ranks of the host."""
        launcher_pid = None
        if self._findings.is_first_of_host:
            launcher_pid = self._settings.launcher_pid
        end_process(folder=self._folder, launcher_pid=launcher_pid)

    def _end_replay(self, replay: Replay) -> None:
        """Ends the steps on cached batches and their variants, and keeps what they gave."""
        findings = self._findings
        log = self._log
        if self._variants is not None:
            self._variants.end()
            findings.note(*self._variants.notes)
            findings.learn(variants=self._variants.result())
        replay.steps.settle()
        if not self.has_verdict:
            return
        if replay.steps.count < replay.steps.least:
            findings.note(
                f"{replay.steps.count} steps with cached batches were timed, of "
                f"{replay.steps.least} needed: profile again with a longer budget"
            )
        accelerator = replay.steps.result(cached_batches=len(self._reading.cache.batches))
        findings.learn(accelerator=accelerator)
        log.event(
            EventName.PROFILE_ACCELERATOR,
            rank=findings.result.rank,
            steps=accelerator.step_seconds.samples,
            step_seconds=accelerator.step_seconds.median,
            trainer_cpu_seconds=accelerator.trainer_cpu_seconds.median,
        )

    def _give_up(self, lack: Lack) -> NoReturn:
        """Ends the process: what the budget leaves is too short, and a longer one is known.

        Other ranks end with their host's first one, or with the run.
        """
        self._end.acquire()
        findings = self._findings
        try:
            self.end_epoch()
            self._reading.first_words.cancel()
            self._timeline.close()
            self._look_at_files()
            findings.learn(has_ended=True, needed_seconds=lack.needed_seconds)
            self._write(missing=lack.text)
            self._log.event(EventName.PROFILE_ENDED, rank=findings.result.rank)
        finally:
            self._end_process()

    def _measure_loader(self) -> None:
        """Measures loader, feed, storage and parts; writes each result before the next begins.

        All ranks come here at the same step and stay together: their workers share the vCPUs.
        """
        findings = self._findings
        loader = self._replayed
        assert loader is not None
        # The script's own workers would load while others are measured.
        shut_down(self._inner())
        self._learn_where_batches_are_made(loader)
        rank = findings.result
        self._measure_loading(loader)
        cached = self._reading.cache.batches
        if rank.batch is not None:
            sizes = quartiles([num_bytes(batch) for batch in cached])
            findings.learn(batch=msgspec.structs.replace(rank.batch, sizes=sizes))
        findings.write()
        if not findings.is_stopped():
            findings.meet("receive")
            receive, notes = try_receive(cached[0], seconds=min(1.0, _RECEIVE_SHARE * self._budget))
            findings.note(*notes)
            findings.learn(receive=receive)
            findings.write()
        self._look_closer(loader)
        # All hosts are of one type: the first one is looked over.
        if not findings.is_stopped() and rank.rank == 0:
            findings.learn(inventory=take_inventory(given=self._asked_type))
            findings.write()
            self._decode_on_device(loader)

    def _measure_loading(self, loader: Loader) -> None:
        """Measures the loader alone, with some numbers of workers."""
        findings = self._findings
        rank = findings.result
        findings.meet("loader-only")
        seconds = _LOADING_SHARE * self._budget
        counts = worker_counts(
            script=loader.num_workers,
            vcpus=round(rank.vcpus),
            ranks_on_host=rank.ranks_on_host,
            seconds=seconds,
        )
        alone = measure_loading(
            loader,
            counts=counts,
            seconds=seconds,
            is_stopped=findings.is_stopped,
            iterate=self._iterate,
            log=self._log,
            more=partial(self._more_counts, loader, counts),
        )
        drains = alone.drains
        findings.note(*alone.notes)
        findings.learn(drains=drains)
        facts = findings.result.loader
        if facts is not None and not loader.num_workers and not drains:
            # A dataset on an accelerator, say, which a forked process cannot use.
            findings.learn(loader=msgspec.structs.replace(facts, fails_in_workers=alone.error))
        if facts is not None and facts.iterable and (loader.num_workers or drains):
            # Known now: workers ran in which the stream could ask which one it is in.
            divides = is_divided(findings.folder)
            findings.learn(loader=msgspec.structs.replace(facts, divides=divides))

    def _learn_where_batches_are_made(self, loader: Loader) -> None:
        """Learns whether data hosts could make the batches; the first rank tells of all."""
        findings = self._findings
        if findings.result.rank != 0:
            return
        shared = _what_is_shared(loader)
        shippable, notes = _can_be_sent(loader)
        findings.note(*notes)
        facts = findings.result.loader
        if facts is not None:
            findings.learn(
                loader=msgspec.structs.replace(facts, made_here=shared, shippable=shippable)
            )

    def _decode_on_device(self, loader: Loader) -> None:
        """Decodes some of the dataset's JPEGs where the script uses CUDA; last, as it may fail."""
        seconds = min(MOST_SECONDS, _DECODING_SHARE * self._budget)
        if not is_cuda_used() or seconds < _LEAST_SECONDS:
            return
        decoding = self._tried(
            "decoding on the accelerator",
            lambda: measure_gpu_decoding(loader, seconds=seconds, iterate=self._iterate),
        )
        self._findings.learn(gpu_decoding=decoding)
        self._findings.write()

    def _more_counts(
        self, loader: Loader, counts: Sequence[int], drains: Sequence[Drain]
    ) -> Sequence[int]:
        result = self._findings.result
        # Several ranks try the same numbers at the same time; spawned workers take seconds to come.
        if result.world_size > 1 or loader.multiprocessing_context is not None:
            return ()
        return waiting_counts(
            drains,
            # The first to be tried: one for each vCPU of this rank.
            vcpus=counts[0],
            batch_bytes=result.batch.num_bytes if result.batch else 0,
            room_bytes=room_for_batches(),
        )

    def _look_closer(self, loader: Loader) -> None:
        findings = self._findings
        reading = min(_MOST_SECONDS, _READS_SHARE * self._budget)
        if reading < _LEAST_SECONDS:
            findings.note("storage and parts of loading were not measured: the budget is too short")
            return
        if not findings.is_stopped():
            findings.meet("reads")
            reads = self._tried(
                "the storage",
                lambda: measure_reads(loader, seconds=reading, iterate=self._iterate),
            )
            findings.learn(reads=reads)
            findings.write()
        # All ranks load alike: one is enough.
        if not findings.is_stopped() and findings.result.rank == 0:
            seconds = min(_MOST_SECONDS, _COSTS_SHARE * self._budget)
            costs = self._tried(
                "the parts of loading",
                lambda: measure_costs(loader, seconds=seconds, iterate=self._iterate),
            )
            findings.learn(costs=costs or ())
            findings.write()
        if not findings.is_stopped() and findings.result.rank == 0:
            self._look_at_memory(loader)

    def _look_at_memory(self, loader: Loader) -> None:
        """Learns what a worker copies and grows by, and what of the dataset that may be."""
        seconds = min(_MOST_SECONDS, _MEMORY_SHARE * self._budget)
        growth = self._tried(
            "how a worker's memory grows",
            lambda: measure_growth(loader, seconds=seconds, iterate=self._iterate),
        )
        is_forked = batches.start_method_of(loader) == "fork"
        held = self._tried(
            "what the dataset holds in memory",
            lambda: (held_objects(loader.dataset, with_arrays=not is_forked), []),
        )
        self._findings.learn(worker_growth=growth, held_objects=held or ())
        self._findings.write()

    def _tried(self, what: str, measure: Callable[[], tuple[_FoundT, list[str]]]) -> _FoundT | None:
        try:
            result, notes = measure()
        except Exception as err:
            # A process edge: the dataset is the user's.
            self._findings.note(f"{what} could not be measured: {error_words(err)}")
            return None
        self._findings.note(*notes)
        return result

    def _look_at_files(self) -> None:
        files = self._guard.made()
        if files:
            self._findings.note(
                f"written while batches were repeated, and of no use: {', '.join(files)}"
            )

    def _missing(self) -> str:
        return missing_of(
            self._reading.steps,
            self._replay.steps if self._replay else None,
            elapsed_seconds=self._reading.elapsed_seconds,
            budget_seconds=self._budget,
            is_read_out=self._is_read_out,
        )

    def _write(self, *, missing: str) -> None:
        steps = self._reading.steps
        if self._replay is None and steps and steps.count:
            self._findings.learn(as_is=steps.result())
        self._findings.learn(
            steps=self._steps,
            loaders=self._loaders,
            replayed_steps=self._replay.steps.given if self._replay else 0,
        )
        self._findings.write(missing=missing)


def place_of(settings: ProcessSettings) -> RankPlace:
    rank = settings.rank
    world_size = settings.world_size
    # The process group knows best: launchers inside a script set their variables late, or none.
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank = torch.distributed.get_rank()
        world_size = torch.distributed.get_world_size()
    ranks_on_host: int | None = settings.processes_per_host or settings.local_world_size
    if ranks_on_host == 1 and world_size > 1:
        # It may be a variable's default: then they count themselves.
        ranks_on_host = None
    return RankPlace(
        rank=rank,
        world_size=world_size,
        leads_host=settings.local_rank == 0,
        ranks_on_host=ranks_on_host,
    )


def _what_is_shared(loader: Loader) -> str:
    """Returns what of the loader is shared in memory, as half a sentence; empty: nothing."""
    try:
        return what_is_shared(
            _spec_of(loader), max_bytes=_MAX_PICKLE_BYTES, max_seconds=_MAX_PICKLE_SECONDS
        )
    except Exception:
        # `_can_be_sent` says it.
        return ""


def _spec_of(loader: Loader) -> DatasetSpec:
    parts = {"dataset": loader.dataset, "collate_fn": loader.collate_fn}
    return DatasetSpec(
        dataset=loader.dataset,
        collate_fn=cast("Callable[[object], object]", loader.collate_fn),
        worker_init_fn=loader.worker_init_fn,
        outlives_epochs=loader.persistent_workers,
        streams=streams_in(parts | {"worker_init_fn": loader.worker_init_fn}),
    )


def _can_be_sent(loader: Loader) -> tuple[Shippable | None, list[str]]:
    """Returns whether the dataset can be sent to data hosts, if known, and notes on it.

    No error ends the profile.
    """
    shippable = None
    try:
        why, fix = refusal_of(
            _spec_of(loader),
            max_bytes=_MAX_PICKLE_BYTES,
            max_seconds=_MAX_PICKLE_SECONDS,
        )
        shippable = Shippable(ok=not why, why=why, fix=fix)
    except Exception as err:
        why = f"it is not known whether the dataset can be pickled: {type(err).__name__}: {err}"
    if not why:
        return shippable, []
    # PyTorch's own loaders are made locally, unless the workload says otherwise (feed/loader.py).
    is_stokers = isinstance(loader, loader_module.DataLoader)
    then = "is an error" if is_stokers and loader.num_workers else "gets no help from them"
    return shippable, [f"{why}; with data hosts, this loader {then} (see feed.unshippable)"]


def install(dataloader_class: type[Loader]) -> None:
    """Makes every `iter(loader)` of this process part of the profile that STOKER_PROFILE asks for.

    `__iter__` of torch's class is replaced: `for` calls it on every loader, however imported, and
    subclasses override `_get_iterator` at most. Not without STOKER_PROFILE, nor twice.

    Raises:
        UsageError: If STOKER_OUTPUT, the folder for the results, is not set.
    """
    settings = from_environment()
    original: Iterate = dataloader_class.__iter__
    if settings.profile is None or hasattr(original, "stoker_session"):
        return
    if settings.output is None:
        raise UsageError(
            "a profile needs a folder for its results",
            where="variable STOKER_OUTPUT",
            fix="run the script through stoker profile",
        )
    folder = settings.output
    guard = FileGuard(own_folders(settings))
    guard.listen()
    watch_streams(folder)
    board = Board(folder)
    sessions = _Sessions(
        partial(ProfileSession, settings, folder=folder, board=board, iterate=original, guard=guard)
    )
    _replace(dataloader_class, sessions)
    _leave_word_of_steps(sessions, folder)


def install_subclass(subclass: type[Loader]) -> None:
    sessions = getattr(torch.utils.data.DataLoader.__iter__, "stoker_session", None)
    if isinstance(sessions, _Sessions) and not hasattr(subclass.__iter__, "stoker_session"):
        _replace(subclass, sessions)


class _Sessions:
    """The session of this process; a forked rank begins another one."""

    def __init__(self, new: Callable[[], ProfileSession]) -> None:
        self._new = new
        self.current = new()

    def for_epoch(self) -> ProfileSession | None:
        """None in a worker."""
        session = self.current
        if not session.is_here:
            # A loader's worker and what it starts; but a script may fork its ranks, too.
            if session.has_begun or torch.utils.data.get_worker_info() is not None:
                return None
            session = self.current = self._new()
        if not session.has_begun:
            atexit.register(session.at_exit)
            _listen(session)
        session.begin_epoch()
        return session


def _replace(cls: type[Loader], sessions: _Sessions) -> None:
    original: Iterate = cls.__iter__

    def iterate(loader: Loader) -> Iterator[object]:
        session = sessions.for_epoch()
        if session is None:
            return original(loader)
        return ProfiledIterator(session, loader, original)

    iterate.stoker_session = sessions  # type: ignore[attr-defined]
    cls.__iter__ = iterate  # type: ignore[assignment]
    note_makings(cls)


def _leave_word_of_steps(sessions: _Sessions, folder: Path) -> None:
    """Writes which packages a script uses that trains without a loader known to the profiler."""
    count = itertools.count(1)

    def before_step(optimizer: object, arguments: object, keywords: object) -> None:
        # A hook costs a little in each step, so it goes when it is of no use.
        if sessions.current.has_begun:
            handle.remove()
        # 20 steps without a loader: this script trains on batches that the profile cannot see.
        elif next(count) == _ENOUGH_STEPS:
            handle.remove()
            # Now, not at the end: the command may be killed before.
            packages = {name.partition(".")[0] for name in sys.modules}
            word = {
                "packages": sorted(
                    packages | {"nvidia.dali", "torchdata.nodes"} & sys.modules.keys()
                ),
                "loaders": own_loaders(),
            }
            (folder / f"seen-{os.getpid()}.json").write_bytes(msgspec.json.encode(word))

    handle = register_optimizer_step_pre_hook(before_step)


class ProfiledIterator:
    """One epoch of a loader; to the script it is torch's iterator."""

    def __init__(self, session: ProfileSession, loader: Loader, original: Iterate) -> None:
        self._session = session
        self._loader = loader
        self._delivered = 0
        self._inner: Iterator[object] | None = None
        if session.is_replaying(loader):
            return
        # -1: before its first batch it cannot take the place of another loader.
        is_main = session.is_main(loader, delivered=-1)
        if is_main:
            session.end_epoch()
        began = time.monotonic()
        self._inner = original(loader)
        if is_main:
            session.opened(time.monotonic() - began)

    def __iter__(self) -> "ProfiledIterator":
        return self

    def __next__(self) -> object:
        session = self._session
        loader = self._loader
        if not session.is_here:
            assert self._inner is not None
            batch = next(self._inner)
        elif not session.is_main(loader, delivered=self._delivered):
            assert self._inner is not None
            batch = session.other_batch(loader, self._inner, delivered=self._delivered)
        else:
            try:
                batch = session.next_batch(loader, self._inner)
            except StopIteration:
                session.end_epoch()
                raise
        self._delivered += 1
        return batch

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> object:
        """Returns attributes of torch's own iterator, which scripts read."""
        # A copy that is being made has no `_inner` yet: asking for it would recurse.
        if name.startswith("__") or name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)


def _listen(session: ProfileSession) -> None:
    """Makes Ctrl-C and SIGTERM end the profile at the next step, with a verdict if there is one."""
    if threading.current_thread() is not threading.main_thread():
        return
    # Python sets handlers in the main thread only; a loader may be read by another.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, partial(_handle, session, signal.getsignal(number)))


def _handle(
    session: ProfileSession, previous: object, number: int, frame: FrameType | None
) -> None:
    if session.is_here and session.has_verdict:
        session.interrupt()
        # A second signal ends the process as it would have without a profile.
        signal.signal(number, signal.SIG_DFL)
    elif callable(previous):
        previous(number, frame)
    elif previous is signal.SIG_DFL or previous is None:
        # The process ends here, without its exit handlers.
        signal.signal(number, signal.SIG_DFL)
        if session.is_here:
            # This thread may be in the middle of anything, and have a lock that the last word waits
            # for. Not a Thread: its start takes locks as well.
            with contextlib.suppress(RuntimeError):
                _thread.start_new_thread(_end_late, (number,))
            with contextlib.suppress(Exception):
                session.leave_word()
        signal.raise_signal(number)


def _end_late(number: int) -> None:
    """Ends this process by a signal, unless it has ended within _LAST_WORD_SECONDS."""
    time.sleep(_LAST_WORD_SECONDS)
    os.kill(os.getpid(), number)
