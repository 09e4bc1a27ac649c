"""A profile in a trainer process has phases: the steps, cached batches, the loader."""

import contextlib
import copy
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar, cast
from weakref import ref

import msgspec
import torch.distributed
from torch.utils.data import DataLoader

from stoker.feed import loader as loader_module
from stoker.feed.memory import num_bytes
from stoker.feed.timeline import Timeline
from stoker.feed.wire.dataset import DatasetSpec, why_unshippable
from stoker.logs import EventName, Log
from stoker.profile import batches
from stoker.profile.agree import Agreement, Board, Findings, RankPlace
from stoker.profile.batches import Choice, facts_of, versions
from stoker.profile.costs import measure_costs
from stoker.profile.divided_streams import is_divided
from stoker.profile.file_guard import FileGuard
from stoker.profile.grown_files import Growth
from stoker.profile.inventory import take_inventory
from stoker.profile.loader_phases import (
    measure_loading,
    measure_reads,
    shut_down,
    try_receive,
    worker_counts,
)
from stoker.profile.rank_results import quartiles
from stoker.profile.script_phases import (
    Reading,
    Replay,
    StepsSoFar,
    begin_replay,
    close_profile,
    say_accelerator,
    say_as_is,
    say_cut_off,
    say_so_far,
)
from stoker.profile.states import with_one_step
from stoker.profile.step_watch import AS_IS_ENOUGH, USUAL_STEPS, AsIsSteps, missing_of
from stoker.settings import ProcessSettings

_LOADING_SHARE = 0.30
_RECEIVE_SHARE = 0.03
# For storage and for the parts of loading: each phase also starts workers, which takes a moment.
_READS_SHARE = 0.03
_COSTS_SHARE = 0.03
_MOST_SECONDS = 6.0
# Limits of the look at what could not travel to data hosts: beyond them it takes too long.
_MAX_PICKLE_BYTES, _MAX_PICKLE_SECONDS = 256 << 20, 2.0
# Shorter than that they say nothing.
_LEAST_SECONDS = 0.2

_FoundT = TypeVar("_FoundT")
# A script that overwrites its checkpoint now and then has the replay begin right after that; it
# begins at this share of the budget, whenever that is.
_LATEST_SHARE = 0.6
# So much later than the first rank, the others end.
_HEED_SECONDS = 0.2
# What is known is written this often: it is read if the process is killed.
_KEEP_SECONDS = 5.0


def measure_afterwards(
    findings: Findings,
    loader: "DataLoader[object]",
    *,
    inner: Iterator[object] | None,
    cached: Sequence[object],
    budget_seconds: float,
    iterate: Callable[["DataLoader[object]"], Iterator[object]],
    log: Log,
    instance_type: str | None = None,
) -> None:
    """Measures loader, feed, storage and parts; writes each result before the next begins.

    All ranks come here at the same step and stay together, so that their workers share the vCPUs as
    they do in the training.

    Args:
        findings: Findings of this rank.
        loader: The main one.
        inner: Its iterator, whose workers are ended first.
        cached: Batches; at least one.
        budget_seconds: Budget of the whole profile.
        iterate: Torch's own `DataLoader.__iter__`.
        log: Log; gets one line for each number of workers.
        instance_type: What the user calls this host; `auto`: to be found out.
    """
    # The script's own workers would load next to those that are measured.
    shut_down(inner)
    if findings.result.rank == 0:
        findings.note(*_what_stays_here(loader))
    findings.meet("loader-only")
    drains, notes = measure_loading(
        loader,
        counts=worker_counts(
            script=loader.num_workers,
            vcpus=round(findings.result.vcpus),
            ranks_on_host=findings.result.ranks_on_host,
        ),
        seconds=_LOADING_SHARE * budget_seconds,
        is_stopped=findings.is_stopped,
        iterate=iterate,
        log=log,
    )
    findings.note(*notes)
    findings.learn(drains=tuple(drains))
    _note_division(findings, loader)
    facts = findings.result.batch
    if facts is not None:
        sizes = quartiles([num_bytes(batch) for batch in cached])
        findings.learn(batch=msgspec.structs.replace(facts, sizes=sizes))
    findings.write()
    if not findings.is_stopped():
        findings.meet("receive")
        receive, notes = try_receive(cached[0], seconds=min(1.0, _RECEIVE_SHARE * budget_seconds))
        findings.note(*notes)
        findings.learn(receive=receive)
        findings.write()
    _look_closer(findings, loader, budget_seconds=budget_seconds, iterate=iterate)
    # All hosts are of one type: the first one is looked over.
    if not findings.is_stopped() and findings.result.rank == 0:
        findings.learn(inventory=take_inventory(given=instance_type))
        findings.write()


def _note_division(findings: Findings, loader: "DataLoader[object]") -> None:
    """Notes whether a stream asked in one of the workers that ran by now which one it is."""
    facts = findings.result.loader
    had_workers = bool(loader.num_workers or findings.result.drains)
    if facts is not None and facts.iterable and had_workers:
        divides = is_divided(findings.folder)
        findings.learn(loader=msgspec.structs.replace(facts, divides=divides))


def _look_closer(
    findings: Findings,
    loader: "DataLoader[object]",
    *,
    budget_seconds: float,
    iterate: Callable[["DataLoader[object]"], Iterator[object]],
) -> None:
    """Compares cold and warm reads, and splits the cost of a sample, where there is time."""
    reading = min(_MOST_SECONDS, _READS_SHARE * budget_seconds)
    if reading < _LEAST_SECONDS:
        findings.note("storage and parts of loading were not measured: the budget is too short")
        return
    if not findings.is_stopped():
        findings.meet("reads")
        reads = _tried(
            findings,
            "the storage",
            lambda: measure_reads(loader, seconds=reading, iterate=iterate),
        )
        findings.learn(reads=reads)
        findings.write()
    # All ranks load alike: one says what it is made of.
    if not findings.is_stopped() and findings.result.rank == 0:
        seconds = min(_MOST_SECONDS, _COSTS_SHARE * budget_seconds)
        costs = _tried(
            findings,
            "the parts of loading",
            lambda: measure_costs(loader, seconds=seconds, iterate=iterate),
        )
        findings.learn(costs=costs or ())
        findings.write()


def _tried(
    findings: Findings, what: str, measure: Callable[[], tuple[_FoundT, list[str]]]
) -> _FoundT | None:
    """Returns what `measure` found; None, with a note, where it failed."""
    try:
        found, notes = measure()
    except Exception as err:
        # A process edge: the dataset is the user's.
        summary = " ".join(str(err).split())[:200]
        findings.note(f"{what} could not be looked at: {type(err).__name__}: {summary}")
        return None
    findings.note(*notes)
    return found


def _what_stays_here(loader: "DataLoader[object]") -> list[str]:
    """Says what of the loader could not travel to data hosts; no error ends the profile."""
    try:
        why = why_unshippable(
            DatasetSpec(
                dataset=loader.dataset,
                collate_fn=cast("Callable[[object], object]", loader.collate_fn),
                worker_init_fn=loader.worker_init_fn,
            ),
            max_bytes=_MAX_PICKLE_BYTES,
            max_seconds=_MAX_PICKLE_SECONDS,
        )
    except Exception as err:
        why = f"it is not known whether the dataset can travel: {type(err).__name__}: {err}"
    if not why:
        return []
    # PyTorch's own loaders are made locally, unless the workload says otherwise (feed/loader.py).
    is_stokers = isinstance(loader, loader_module.DataLoader)
    then = "is an error" if is_stokers and loader.num_workers else "gets no help from them"
    return [f"{why}; with data hosts, this loader {then} (see feed.unshippable)"]


Loader = DataLoader[object]
Iterate = Callable[[Loader], Iterator[object]]


class ProfileSession:
    """Measures the main loader of this process: the first that is read to train on.

    Args:
        folder: Folder for the results.
        board: Board on which ranks leave notes for each other.
        lead_steps: See `Agreement`.
        iterate: Torch's own `DataLoader.__iter__`.
        guard: Guard of the files of this process.
    """

    def __init__(
        self,
        settings: ProcessSettings,
        *,
        folder: Path,
        board: Board,
        lead_steps: int,
        iterate: Iterate,
        guard: FileGuard,
    ) -> None:
        assert settings.profile is not None
        self._settings = settings
        self._budget = settings.profile.budget_seconds
        self._asked_type = settings.profile.instance_type
        self._folder = folder
        self._board = board
        self._lead_steps = lead_steps
        self._iterate = iterate
        self._guard = guard
        self._log = Log(run=settings.run_id, host=settings.host)
        self._process = os.getpid()
        self._is_stopping = False
        self._choice = Choice()
        self._loaders = 0
        self._reading = Reading(budget_seconds=self._budget, say=self._say_so_far)
        self._growth: Growth | None = None
        self._steps = 0
        self._is_read_out = False
        self._changes = 0
        self._kept: float | None = None
        self._replay: Replay | None = None
        self._replayed: Loader | None = None
        # Weak: a script that drops its loader ends its workers by that.
        self._inner: Callable[[], Iterator[object] | None] = lambda: None
        # Taken once, by the thread that ends this process: all others wait for that.
        self._end = threading.Lock()
        self._place: RankPlace | None = None
        self._settle(place_of(settings))

    @property
    def is_here(self) -> bool:
        """Returns whether this process began the session; a loader's worker only inherited it."""
        return os.getpid() == self._process

    @property
    def has_begun(self) -> bool:
        """Returns whether a loader was iterated."""
        return self._loaders > 0

    @property
    def has_verdict(self) -> bool:
        """Returns whether the parts are known without which there is nothing to say."""
        return self._replay is not None and self._replay.steps.count > 0

    def begin_epoch(self) -> None:
        """Notes that a loader is iterated now."""
        self._loaders += 1
        self._reading.pause()
        if self._loaders == 1:
            self._log.event(
                EventName.PROFILE_STARTED, budget_seconds=self._budget, pid=self._process
            )
            if self._settings.rank == 0:
                # Once, before the first step: the scan may take a second.
                self._growth = Growth.of_process(self._settings)

    def is_main(self, loader: Loader, *, delivered: int) -> bool:
        """Returns whether `loader` is to be measured; `delivered` counts its epoch's batches."""
        if self._choice.is_main(loader, delivered=delivered, steps=self._reading.steps):
            if self._choice.has_changed:
                self._choice.has_changed = False
                self._reading.begin_anew(delivered=delivered)
            return True
        return False

    def is_replaying(self, loader: Loader) -> bool:
        """Returns whether the loader's batches come from the cache: its workers are idle."""
        return self._replay is not None and self._choice.loader is loader

    def end_epoch(self) -> None:
        """Ends the main loader's epoch, whether complete or given up; may be called twice."""
        self._reading.end_epoch()

    def other_batch(self, loader: Loader, inner: Iterator[object], *, delivered: int) -> object:
        """Returns the next batch of a loader that is not the main one.

        Raises:
            StopIteration: At the end of its epoch.
        """
        # Without gradients it is a validation, which is no part of a step.
        if self._reading.steps is None or not torch.is_grad_enabled():
            return next(inner)
        return self._reading.others.next_batch(
            loader, inner, delivered=delivered, is_replaying=self._replay is not None
        )

    def interrupt(self) -> None:
        """Ends the profile at the next step with what is known; safe in a signal handler."""
        self._is_stopping = True

    def next_batch(self, loader: Loader, inner: Iterator[object] | None) -> object:
        """Returns the main loader's next batch: its own, or a cached one.

        Does not return where the profile ends: so does the process.

        Raises:
            StopIteration: As `inner`, while the loop is measured as it is.
            KeyboardInterrupt: If it was interrupted before there is a verdict.
        """
        if self._replay is None:
            steps = self._reading.steps or self._begin_as_is(loader)
            if self._is_stopping:
                raise KeyboardInterrupt
            if not self._may_replay(steps):
                assert inner is not None
                try:
                    return self._own_batch(inner, steps)
                except StopIteration:
                    # The script may end with this epoch: what can be measured still, is.
                    if not self._is_enough_for_an_end(steps):
                        self._is_read_out = self._findings.result.world_size == 1
                        raise
            self._replay = self._begin_replay(loader, inner, steps)
        elif self._has_replayed(self._replay):
            self._finish()
        batch = self._replay.batch(self._steps)
        self._steps += 1
        self._replay.gave()
        if self._replay.steps.given == 1:
            # A script that does not bear it is told what it was given.
            self._write(missing=self._missing())
        return batch

    def at_exit(self) -> None:
        """Leaves what is known, and says what is missing: the script ends on its own."""
        if self.is_here and self.has_begun:
            # Where another thread ends the process, this one waits for that.
            with self._end:
                self._look_at_files()
                self.leave_word()

    def end_before(self, action: str) -> NoReturn:
        """Ends the profile with what is known: the script is about to change a user's file.

        Args:
            action: What it is about to do.
        """
        self._agreement.warn(action)
        self._finish(before=action)

    def leave_word(self) -> None:
        """Writes what is known, and what is missing: the process ends now."""
        self._reading.has_better_words()
        self.end_epoch()
        self._timeline.close()
        replay = self._replay.steps if self._replay else None
        self._write(missing=self._missing())
        if replay is not None:
            rank = self._findings.result.rank
            say_cut_off(self._log, rank=rank, replayed_steps=replay.given)

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
        steps = self._reading.begin(loader, ranks=self._findings.result.world_size)
        self._findings.learn(
            seed=torch.initial_seed(), versions=versions(), loader=facts_of(loader)
        )
        return steps

    def _own_batch(self, inner: Iterator[object], steps: AsIsSteps) -> object:
        is_first = not self._reading.cache.batches
        batch = self._reading.next_batch(inner, steps, timeline=self._timeline)
        if is_first:
            self._findings.learn(batch=batches.facts(batch))
        self._steps += 1
        now = time.monotonic()
        if self._kept is None or now - self._kept >= _KEEP_SECONDS:
            self._kept = now
            self._write(missing=self._missing())
        # Last: what was written here must not count as part of the script's step.
        self._reading.goes_on()
        return batch

    def _may_replay(self, steps: AsIsSteps) -> bool:
        # Read in each step: what it says is that the script has just saved.
        may_begin = self._has_time_before_it_saves()
        if may_begin and AS_IS_ENOUGH.holds(
            steps=steps.count,
            elapsed_seconds=self._reading.elapsed_seconds,
            budget_seconds=self._budget,
        ):
            self._agreement.propose("accelerator", at_step=self._steps)
        return steps.count > 0 and self._agreement.is_due("accelerator", at_step=self._steps)

    def _has_time_before_it_saves(self) -> bool:
        """Returns whether the script does not save soon, which would end the profile."""
        changes = self._guard.changes
        has_saved, self._changes = changes != self._changes, changes
        is_late = self._reading.elapsed_seconds >= _LATEST_SHARE * self._budget
        return not changes or has_saved or is_late

    def _is_enough_for_an_end(self, steps: AsIsSteps) -> bool:
        """Returns whether an epoch's end ends this phase."""
        # A rank whose epoch is shorter would change alone, and the others wait for it in
        # all-reduce.
        return self._findings.result.world_size == 1 and steps.count >= USUAL_STEPS

    def _say_so_far(self, known: StepsSoFar) -> None:
        """Logs what is known so far; called in a thread of its own, as a step may be long."""
        if self.is_here:
            own = self._findings.result
            say_so_far(self._log, known, rank=own.rank, ranks=own.world_size)

    def _begin_replay(
        self, loader: Loader, inner: Iterator[object] | None, steps: AsIsSteps
    ) -> Replay:
        if self._agreement.is_late("accelerator", at_step=self._steps):
            self._findings.note("the ranks are not in lockstep: phases did not change together")
        self.end_epoch()
        self._timeline.close()
        self._reading.has_better_words()
        found = steps.result()
        self._findings.learn(as_is=found, evidence=self._reading.evidence())
        own = self._findings.result
        if own.world_size == 1:
            # As the verdict will have it. Of several ranks one alone does not know whose work
            # that of others is.
            found = with_one_step([own])[0].as_is or found
        say_as_is(self._log, found, rank=own.rank, ranks=own.world_size)
        with contextlib.suppress(TypeError):
            self._inner = ref(inner)
        # A copy, for scripts drop their loaders, and the next one then becomes the main one.
        self._replayed = copy.copy(loader)
        self._replayed._iterator = None
        replay = begin_replay(
            loader,
            steps,
            self._reading,
            self._findings,
            budget_seconds=self._budget,
            is_stopped=lambda: self._is_stopping,
        )
        # From here on the model is trained on batches that are not the script's own.
        self._guard.arm(self.end_before)
        if self._findings.result.world_size > 1:
            threading.Thread(target=self._heed, name="stoker-heed", daemon=True).start()
        return replay

    def _heed(self) -> None:
        """Ends this rank when another one does: it would wait for that rank in all-reduce."""
        while not (action := self._agreement.warning()):
            time.sleep(_HEED_SECONDS)
        self._finish(before=action)

    def _has_replayed(self, replay: Replay) -> bool:
        replay.asked()
        if self._is_stopping:
            return self.has_verdict
        if replay.is_enough(budget_seconds=self._budget):
            self._agreement.propose("loader", at_step=self._steps)
        return replay.steps.count > 0 and self._agreement.is_due("loader", at_step=self._steps)

    def _finish(self, *, before: str = "") -> NoReturn:
        """Measures the loader alone, and ends the process.

        Args:
            before: What the script is about to do, where that is the reason.
        """
        self._end.acquire()
        self._guard.free_this_thread()
        replay, loader = self._replay, self._replayed
        assert replay is not None
        assert loader is not None
        if before:
            self._findings.learn(ended_before=before)
            self._findings.note(
                f"the script was about to {before}: the profile ended there, with what it had "
                "measured"
            )
            self._log.event(
                EventName.PROFILE_GUARDED, rank=self._findings.result.rank, action=before
            )
        if self.has_verdict:
            accelerator = replay.result()
            self._findings.learn(accelerator=accelerator)
            say_accelerator(self._log, accelerator, rank=self._findings.result.rank)
        # Written before the phases without the model, in which a user's dataset may fail.
        self._write(missing="")

        def measure() -> None:
            measure_afterwards(
                self._findings,
                loader,
                inner=self._inner(),
                cached=self._reading.cache.batches,
                budget_seconds=self._budget,
                iterate=self._iterate,
                log=self._log,
                instance_type=self._asked_type,
            )

        close_profile(
            self._findings,
            # Without a verdict on the steps, nobody looks at the loader's figures; but ranks stay
            # together.
            measure=measure
            if self.has_verdict or self._findings.result.world_size > 1
            else lambda: None,
            look_at_files=self._look_at_files,
            folder=self._folder,
            launcher_pid=self._settings.launcher_pid,
            log=self._log,
        )

    def _look_at_files(self) -> None:
        made = self._guard.made()
        if made:
            self._findings.note(
                f"written while batches were repeated, and of no use: {', '.join(made)}"
            )
        if self._growth and self._findings.result.rank == 0:
            self._findings.learn(grown_files=self._growth.files())

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
    """Returns this process's place among the ranks, as far as it is known now."""
    rank, world_size = settings.rank, settings.world_size
    # The group knows best: launchers inside a script set their variables late, or none.
    if has_group():
        rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    told = settings.processes_per_host or settings.local_world_size
    return RankPlace(
        rank=rank,
        world_size=world_size,
        leads_host=settings.local_rank == 0,
        # 1 of several ranks may be what a variable says by default: then they count themselves.
        ranks_on_host=told if told > 1 or world_size == 1 else None,
    )


def has_group() -> bool:
    """Returns whether the script has made its process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()
