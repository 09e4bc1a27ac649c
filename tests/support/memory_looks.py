"""Looks at the memory of `memory_script.py` as a profile does, without a profile's other phases.

Arguments: those of that script; result: a file for what was seen; seconds: of looks at the loop;
growth (no): without a look at how one worker's memory grows, which needs room for that worker.
"""

import contextlib
import itertools
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch
from torch.utils.data import DataLoader

if __name__ == "__main__":
    sys.path.insert(1, str(Path(__file__).parents[1]))

from stoker.profile import batches
from stoker.profile.loader_phases import TaskSource, run_in_workers, shut_down
from stoker.profile.memory import watch
from stoker.profile.memory.loop_growth import LoopWatch
from stoker.profile.memory.python_objects import held_objects
from stoker.profile.memory.watch import MemoryWatch
from stoker.profile.rank_results import AsIs, BatchFacts, Quartiles, RankResult, WorkerGrowth
from support import memory_script

# What a worker makes in the share of a profile of 12 s, in which it looks at itself 24 times.
GROWTH_SAMPLES = 12_000
# Only until it is given up.
GROWTH_SECONDS = 100.0
# Also where a busy machine takes all of the time for one.
LEAST_STEPS = 40


class Seen(Exception):
    """There were enough looks: the script ends."""


def steps_of(seconds: float) -> AsIs:
    """Returns steps of which each took so long."""
    step = Quartiles(mean=seconds, median=seconds, low=seconds, high=seconds, samples=1)
    nothing = Quartiles(mean=0.0, median=0.0, low=0.0, high=0.0, samples=1)
    return AsIs(
        step_seconds=step,
        wait_seconds=nothing,
        trainer_cpu_seconds=0.0,
        children_cpu_seconds=0.0,
        receive_seconds=0.0,
    )


class LookedAt:
    """A loader whose reader is looked at before each batch, until there were enough looks."""

    def __init__(self, loader: DataLoader[torch.Tensor], asked: dict[str, str]) -> None:
        self._loader = loader
        self._asked = asked
        self._memory = MemoryWatch()
        self._loop = LoopWatch()
        self._steps = 0
        self._began: float | None = None
        self._began_at = 0
        self.result: RankResult | None = None

    def __iter__(self) -> Iterator[torch.Tensor]:
        inner = iter(self._loader)
        try:
            for batch in inner:
                self._look(inner, batch)
                yield batch
        finally:
            if self.result is not None:
                shut_down(inner)

    def _look(self, inner: object, batch: torch.Tensor) -> None:
        self._steps += 1
        # The script waits in an early step, until what is to be seen is there.
        if self._steps > memory_script.WAITING_STEP and self._began is None:
            self._began = time.monotonic()
            self._began_at = self._steps
        if self._began is not None:
            self._memory.look(inner, steps=self._steps, batch_size=len(batch))
            self._loop.look(self._steps)
            seconds = time.monotonic() - self._began
            steps = self._steps - self._began_at
            if seconds >= float(self._asked.get("seconds", "1.2")) and steps >= LEAST_STEPS:
                self._end(batches.facts(batch), seconds / steps)

    def _end(self, facts: BatchFacts, step_seconds: float) -> None:
        # Without the batch: a variable of this frame, as of the script's, which the first looks at
        # the loop did not see, would be one that has become longer.
        loader = self._loader
        self.result = RankResult(
            rank=0,
            world_size=1,
            host="here",
            vcpus=2,
            ranks_on_host=1,
            batch=facts,
            loader=batches.facts_of(loader),
            as_is=steps_of(step_seconds),
            memory=self._memory.result(
                prefetch_factor=int(self._asked["prefetch"]) if loader.num_workers else 0,
                epoch_samples=len(loader) * facts.samples,
            ),
            # Here: the loop is among the frames of this thread.
            loop=self._loop.result(self._steps),
        )
        raise Seen


class BatchClock:
    """Stands for the module `time` in a worker that looks at itself: a second for each batch."""

    def __init__(self) -> None:
        self._batches = itertools.count()

    def monotonic(self) -> float:
        return float(next(self._batches))


def watch_by_batches(source: TaskSource, until: float) -> WorkerGrowth | None:
    """Looks at a worker's memory as often as a profile on an idle machine, by batches."""
    vars(watch)["time"] = BatchClock()
    return watch.watch_own_memory(source, until=len(source.indices))


def worker_growth(loader: DataLoader[torch.Tensor]) -> WorkerGrowth | None:
    """Returns how a worker grew over the same batches, however busy the machine is."""
    (growth,) = run_in_workers(
        loader,
        watch_by_batches,
        workers=1,
        num_batches=GROWTH_SAMPLES // (loader.batch_size or 1),
        seconds=GROWTH_SECONDS,
        iterate=DataLoader.__iter__,
    )
    return growth


def main() -> None:
    asked = memory_script.asked_by(sys.argv[1:])
    loader = memory_script.loader_of(asked)
    looked_at = LookedAt(loader, asked)
    with contextlib.suppress(Seen):
        memory_script.train(looked_at, asked)
    result = looked_at.result
    assert result is not None
    if asked.get("growth") != "no":
        growth = worker_growth(loader)
        is_forked = batches.start_method_of(loader) == "fork"
        held = held_objects(loader.dataset, with_arrays=not is_forked)
        result = msgspec.structs.replace(result, worker_growth=growth, held_objects=held)
    file = Path(asked["result"])
    file.with_suffix(".part").write_bytes(msgspec.json.encode(result))
    os.replace(file.with_suffix(".part"), file)


if __name__ == "__main__":
    main()
