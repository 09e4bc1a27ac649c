"""Two yardsticks are here: batches as Ray moves them, and Ray Data on top of it.

Two raylets on this machine, so that a batch has to go from one node's object store to the other's,
as between hosts; the raylet on the trainer's side receives it, so its CPU time counts, too.
`RayLoader` asks each actor for two batches ahead, and takes them in order by `ray.get`;
`RayDataLoader` is the pipeline that Ray Data's guide has for a training's data.
"""

from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import numpy as np
import psutil
import torch

from cases import SAMPLE_SHAPE, Case, Images, SleptCollate

_AHEAD = 2
# Of Ray Data: each task costs the trainer milliseconds; benchmarks/README.md has what one,
# 2, 4 and 8 batches a task gave.
_BATCHES_PER_TASK = 2
_TASKS_PER_ACTOR = 4
_PREFETCHED = 4
_STORE_BYTES = 1 << 30
_SECONDS = 120.0
_END_SECONDS = 5.0


class RayLoader:
    """Yields the batches 0..num_batches-1 in order; a context in which two Ray nodes run."""

    def __init__(self, case: Case) -> None:
        self._case = case

    def __enter__(self) -> Self:
        import ray
        from ray.cluster_utils import Cluster

        self._cluster = Cluster()
        self._cluster.add_node(num_cpus=0, object_store_memory=_STORE_BYTES)
        self._receivers = _raylets()
        self._cluster.add_node(
            num_cpus=self._case.workers,
            object_store_memory=_STORE_BYTES,
            resources={"data": self._case.workers},
        )
        ray.init(address=self._cluster.address, log_to_driver=False)
        self._start()
        return self

    def _start(self) -> None:
        import ray

        make = ray.remote(num_cpus=1, resources={"data": 1})(_Maker)
        self._makers = [make.remote(self._case) for _ in range(self._case.workers)]
        ray.get([maker.make.remote(0) for maker in self._makers], timeout=_SECONDS)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        import ray

        processes = psutil.Process().children(recursive=True)
        ray.shutdown()
        self._cluster.shutdown()
        # Agents and actors of a raylet outlive it for a while: not into the next measurement.
        for left in psutil.wait_procs(processes, timeout=_END_SECONDS)[1]:
            left.kill()

    def __iter__(self) -> Iterator[torch.Tensor]:
        import ray

        shape = (self._case.batch_size, *SAMPLE_SHAPE)
        asked: deque[object] = deque()
        following = 0
        for _ in range(self._case.num_batches):
            while following < self._case.num_batches and len(asked) < _AHEAD * len(self._makers):
                asked.append(self._makers[following % len(self._makers)].make.remote(following))
                following += 1
            found: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
            found = ray.get(asked.popleft(), timeout=_SECONDS)
            # What Ray gives lies in its store and is read-only; nobody writes to a batch here.
            yield torch.frombuffer(found.data, dtype=torch.uint8).view(shape)

    def receiver_cpu_seconds(self) -> float:
        """Returns the CPU time of the raylet on the trainer's side."""
        times = [each.cpu_times() for each in self._receivers]
        return sum(each.user + each.system for each in times)


class RayDataLoader(RayLoader):
    """Yields the batches as `iter_batches` does, in the order of their arrival."""

    def _start(self) -> None:
        self._batches: Iterator[torch.Tensor] = iter(())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # A pipeline that is cut off calls Ray after its end, which ends the trainer's process.
        for _ in self._batches:
            pass
        super().__exit__(kind, error, trace)

    def __iter__(self) -> Iterator[torch.Tensor]:
        self._batches = self._made()
        return self._batches

    def _made(self) -> Iterator[torch.Tensor]:
        import ray

        ray.data.DataContext.get_current().enable_progress_bars = False
        numbers = np.arange(self._case.num_batches)
        tasks = np.split(numbers, range(_BATCHES_PER_TASK, len(numbers), _BATCHES_PER_TASK))
        pipeline = ray.data.from_numpy(tasks).map_batches(
            _BlockMaker,
            fn_constructor_args=(self._case,),
            batch_size=None,
            compute=ray.data.ActorPoolStrategy(
                size=self._case.workers, max_tasks_in_flight_per_actor=_TASKS_PER_ACTOR
            ),
            num_cpus=1,
            resources={"data": 1},
        )
        for batch in pipeline.iter_batches(
            batch_size=self._case.batch_size, prefetch_batches=_PREFETCHED
        ):
            yield torch.from_numpy(batch["images"])


class _Maker:
    def __init__(self, case: Case) -> None:
        torch.set_num_threads(1)
        self._size = case.batch_size
        self._dataset = Images(case)
        self._collate = SleptCollate(case)

    def make(self, number: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        first = number * self._size
        batch = self._collate(self._dataset.__getitems__(range(first, first + self._size)))
        return batch.numpy().reshape(-1)


class _BlockMaker(_Maker):
    """Makes the batches of a task of Ray Data."""

    def __call__(
        self, block: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.int64]]]
    ) -> Iterator[dict[str, np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]]:
        for number in block["data"].tolist():
            yield {"images": self.make(number).reshape(-1, *SAMPLE_SHAPE)}


def _raylets() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [child for child in children if child.name() == "raylet"]
