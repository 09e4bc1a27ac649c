"""The course of a profile in one trainer process: as is, accelerator only, loader only, the end."""

import os
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn
from weakref import ref

import msgspec
import torch
from torch.utils.data import DataLoader

from stoker.errors import StokerError
from stoker.feed.timeline import Steps, Timeline
from stoker.logs import Log
from stoker.profile import batches
from stoker.profile.agree import Agreement
from stoker.profile.clocks import children_cpu_seconds, machine_cpu_seconds, usable_vcpus
from stoker.profile.drain import shut_down
from stoker.profile.ending import end_process
from stoker.profile.loading import measure_loading, worker_counts
from stoker.profile.raw import LoaderFacts, RankResult
from stoker.profile.receive import measure_receive
from stoker.profile.steps import (
    AS_IS_ENOUGH,
    REPLAY_ENOUGH,
    WARM_UP_STEPS,
    AsIsSteps,
    ReplaySteps,
)
from stoker.records import write_text
from stoker.settings import ProcessSettings

Loader = DataLoader[object]
Iterate = Callable[[Loader], Iterator[object]]

# A loader that is read where no gradients are wanted is for validation, unless nothing else comes.
MAX_BATCHES_WITHOUT_GRADIENTS = 50

_CACHED_BATCHES = 8
_CACHED_BYTES = 2 << 30
# Kernels run behind the host: so many steps are timed together where CUDA is used.
_CUDA_BLOCK = 5
_FIRST_WORDS_SECONDS = 12.0
_LOADING_SHARE = 0.30
_RECEIVE_SHARE = 0.03
_SETTLE_SHARE = 0.10
_IDLE_SHARE = 0.05
_POLL_SECONDS = 0.1
_MEET_SECONDS = 30.0


class Session:
    """Measures the main loader of this process: the first that is read to train on.

    Args:
        folder: For the results.
        iterate: Torch's own `DataLoader.__iter__`.
    """

    def __init__(
        self, settings: ProcessSettings, *, folder: Path, agreement: Agreement, iterate: Iterate
    ) -> None:
        assert settings.profile is not None
        self._settings = settings
        self._budget = settings.profile.budget_seconds
        self._folder = folder
        self._agreement = agreement
        self._iterate = iterate
        self._log = Log(run=settings.run_id, host=settings.host)
        self._timeline = Timeline(folder / f"baseline-timeline-rank{settings.rank}.csv")
        self._process = os.getpid()
        self._is_stopping = False
        self._main: ref[Loader] | None = None
        self._loaders = 0
        self._epochs = 0
        self._phase_began: float | None = None
        self._spoke = False
        self._steps = 0
        self._seen_before = 0
        self._as_is: AsIsSteps | None = None
        self._rows: Steps | None = None
        self._replay: ReplaySteps | None = None
        self._cached: list[object] = []
        self._notes: list[str] = []
        self._result = RankResult(
            rank=settings.rank,
            world_size=settings.world_size,
            host=settings.host,
            vcpus=usable_vcpus(),
            ranks_on_host=min(
                settings.world_size, settings.processes_per_host or settings.world_size
            ),
        )

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
        if self._loaders == 1:
            self._log.event("profile_begins", budget_seconds=self._budget, pid=self._process)

    def is_main(self, loader: Loader, *, delivered: int) -> bool:
        """Whether `loader`, which delivered so many batches in this pass, is the one to measure."""
        main = self._main() if self._main else None
        if main is loader:
            return True
        trains = torch.is_grad_enabled() or delivered >= MAX_BATCHES_WITHOUT_GRADIENTS
        # A script may look at a batch of any loader before it trains: who delivers more counts.
        steps = self._as_is
        is_looked_at = steps is not None and steps.count == 0 and delivered > steps.batches
        if trains and (main is None or is_looked_at):
            self._main = ref(loader)
            if is_looked_at:
                self.end_pass()
                self._as_is = None
                self._cached.clear()
                self._seen_before = delivered
            return True
        return False

    def is_replaying(self, loader: Loader) -> bool:
        """Whether the loader's batches come from the cache: its workers are not wanted."""
        return self._replay is not None and self._main is not None and self._main() is loader

    def end_pass(self) -> None:
        """The main loader's pass is over, or was given up; may be called twice."""
        if self._as_is is not None:
            self._as_is.epoch_ended()
        if self._rows is not None:
            self._rows.end()
            self._rows = None

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
                return self._own_batch(inner, steps)
            self._replay = self._begin_replay(loader, steps)
        elif self._has_replayed(self._replay):
            self._finish(loader, inner, self._replay)
        return self._cached_batch(self._replay)

    def at_exit(self) -> None:
        """The script ends by itself: leaves what is known, and says what is missing."""
        if self.is_here and self.has_begun:
            self.end_pass()
            self._timeline.close()
            self._write(missing=self._missing())

    def _begin_as_is(self, loader: Loader) -> AsIsSteps:
        self._as_is = AsIsSteps(
            workers=loader.num_workers,
            children_cpu=children_cpu_seconds,
            machine_cpu=machine_cpu_seconds,
            batches=self._seen_before,
            epoch_batches=_length(loader),
        )
        self._phase_began = time.monotonic()
        kind = type(loader.dataset)
        self._result = msgspec.structs.replace(
            self._result,
            seed=torch.initial_seed(),
            versions=_versions(),
            loader=LoaderFacts(
                num_workers=loader.num_workers,
                pin_memory=loader.pin_memory,
                persistent_workers=loader.persistent_workers,
                dataset=f"{kind.__module__}.{kind.__qualname__}",
            ),
        )
        return self._as_is

    def _own_batch(self, inner: Iterator[object], steps: AsIsSteps) -> object:
        if self._rows is None:
            self._rows = self._timeline.epoch(loader=0, epoch=self._epochs)
            self._epochs += 1
        self._rows.ask()
        asked = time.monotonic()
        thread_before = time.thread_time()
        batch = next(inner)
        receive = time.thread_time() - thread_before
        now = time.monotonic()
        self._rows.got(batches.num_samples(batch))
        steps.got(now=now, cpu=time.process_time(), wait=now - asked, receive=receive)
        if len(self._cached) < _CACHED_BATCHES:
            self._cache(batch)
        self._steps += 1
        if not self._spoke and steps.count and self._elapsed() > _FIRST_WORDS_SECONDS:
            self._say_as_is(steps)
        return batch

    def _cache(self, batch: object) -> None:
        if not self._cached:
            self._result = msgspec.structs.replace(self._result, batch=batches.facts(batch))
        if self._cached and batches.num_bytes(batch) * (len(self._cached) + 1) > _CACHED_BYTES:
            return
        self._cached.append(batches.clone(batch))

    def _elapsed(self) -> float:
        """Seconds since the phase began."""
        return time.monotonic() - (self._phase_began or time.monotonic())

    def _may_replay(self, steps: AsIsSteps) -> bool:
        if AS_IS_ENOUGH.holds(
            steps=steps.count, elapsed_seconds=self._elapsed(), budget_seconds=self._budget
        ):
            self._agreement.propose("accelerator", at_step=self._steps)
        return steps.count > 0 and self._agreement.is_due("accelerator", at_step=self._steps)

    def _say_as_is(self, steps: AsIsSteps) -> None:
        self._spoke = True
        result = steps.result()
        self._log.event(
            "profile_as_is",
            rank=self._settings.rank,
            steps=steps.count,
            step_seconds=result.step_seconds.median,
            wait_share=result.wait_seconds.median / result.step_seconds.median,
        )

    def _begin_replay(self, loader: Loader, steps: AsIsSteps) -> ReplaySteps:
        if self._agreement.is_late("accelerator", at_step=self._steps):
            self._notes.append("the ranks are not in lockstep: phases did not change together")
        self.end_pass()
        self._timeline.close()
        self._result = msgspec.structs.replace(self._result, as_is=steps.result())
        self._say_as_is(steps)
        if loader.num_workers:
            self._let_workers_rest()
        uses_cuda = torch.cuda.is_available() and _is_cuda_used()
        self._result = msgspec.structs.replace(self._result, uses_cuda=uses_cuda)
        self._phase_began = time.monotonic()
        return ReplaySteps(block=_CUDA_BLOCK if uses_cuda else 1)

    def _let_workers_rest(self) -> None:
        """Waits until the workers have filled their queues: the model must have the CPU alone."""
        until = time.monotonic() + _SETTLE_SHARE * self._budget
        before = children_cpu_seconds()
        quiet = 0
        while quiet < 2 and not self._is_stopping:
            if time.monotonic() >= until:
                self._notes.append("the loader's workers did not come to rest before the replay")
                return
            time.sleep(_POLL_SECONDS)
            now = children_cpu_seconds()
            quiet = quiet + 1 if now - before < _IDLE_SHARE * _POLL_SECONDS else 0
            before = now

    def _has_replayed(self, replay: ReplaySteps) -> bool:
        if self._result.uses_cuda and replay.is_block_end():
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
        batch = batches.clone(self._cached[self._steps % len(self._cached)])
        self._steps += 1
        replay.gave(now=time.monotonic(), cpu=time.process_time())
        return batch

    def _finish(
        self, loader: Loader, inner: Iterator[object] | None, replay: ReplaySteps
    ) -> NoReturn:
        accelerator = replay.result(cached_batches=len(self._cached))
        self._result = msgspec.structs.replace(self._result, accelerator=accelerator)
        self._write(missing="")
        self._log.event(
            "profile_accelerator",
            rank=self._settings.rank,
            steps=replay.count,
            step_seconds=accelerator.step_seconds.median,
            trainer_cpu_seconds=accelerator.trainer_cpu_seconds.median,
        )
        shut_down(inner)
        self._meet("loader-only")
        drains, notes = measure_loading(
            loader,
            counts=worker_counts(
                script=loader.num_workers,
                vcpus=self._result.vcpus,
                ranks_on_host=self._result.ranks_on_host,
            ),
            seconds=_LOADING_SHARE * self._budget,
            is_stopped=lambda: self._is_stopping,
            iterate=self._iterate,
            log=self._log,
        )
        self._notes.extend(notes)
        self._result = msgspec.structs.replace(self._result, drains=tuple(drains))
        self._write(missing="")
        if not self._is_stopping:
            self._meet("receive")
            self._measure_receive()
        if self._is_stopping:
            self._notes.append("stopped early: the verdict is the one so far")
        self._write(missing="")
        self._meet("end")
        self._log.event("profile_ends", rank=self._settings.rank)
        end_process()

    def _meet(self, name: str) -> None:
        if not self._agreement.meet(
            name, deadline_seconds=_MEET_SECONDS, is_stopped=lambda: self._is_stopping
        ):
            self._notes.append(f"not all ranks came to {name} within {_MEET_SECONDS:.0f} s")

    def _measure_receive(self) -> None:
        try:
            receive = measure_receive(
                self._cached[0], seconds=min(1.0, _RECEIVE_SHARE * self._budget)
            )
        except (StokerError, OSError) as err:
            self._notes.append(f"the feed could not be tried: {' '.join(str(err).split())}")
            return
        if receive is None:
            self._notes.append("the feed could not be tried: nothing came in time")
        self._result = msgspec.structs.replace(self._result, receive=receive)

    def _missing(self) -> str:
        if self._main is None:
            return "no DataLoader was read to train on"
        if self._replay is not None:
            return f"the script ended while {self._replay.count} cached batches had been replayed"
        steps = self._as_is
        count = steps.batches if steps else 0
        epoch = f"; an epoch has {steps.epoch_batches}" if steps and steps.epoch_batches else ""
        return (
            f"the script ended after {count} batches of its main loader{epoch}; "
            f"{WARM_UP_STEPS + 5} to {WARM_UP_STEPS + AS_IS_ENOUGH.steps}, "
            "and then as many again, are needed"
        )

    def _write(self, *, missing: str) -> None:
        steps = self._as_is
        as_is = self._result.as_is or (steps.result() if steps and steps.count else None)
        self._result = msgspec.structs.replace(
            self._result,
            missing=missing,
            steps=self._steps,
            loaders=self._loaders,
            as_is=as_is,
            notes=tuple(self._notes),
        )
        file = self._folder / f"profile-rank{self._settings.rank}.json"
        write_text(file, msgspec.json.format(msgspec.json.encode(self._result)).decode())


def _is_cuda_used() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _length(loader: Loader) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def _versions() -> dict[str, str]:
    found = {}
    for name in ("stoker", "torch", "numpy", "torchvision", "pillow"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
