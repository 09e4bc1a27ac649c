"""Without data hosts, a loader's own workers find samples that end or block them, if asked for."""

import ctypes
import faulthandler
import os
import random
import signal
import time
from typing import Any

import pytest
import torch
from torch.utils import data
from torch.utils.data import BatchSampler, Dataset, IterableDataset, RandomSampler

from stoker import DataLoader
from stoker.environment import ProcessSettings
from stoker.errors import FeedLostError, UsageError
from stoker.feed import placement
from stoker.feed.bookkeeping import TrainerProcess
from stoker.feed.iterators import TorchIterator, torch_iterator
from stoker.feed.loader_state import load, state_of
from stoker.feed.module_generators import module_generators
from stoker.feed.timeline import Timeline
from stoker.feed.watched_workers import WatchedIterator
from stoker.records import FeedSettings
from support.bad_sample_rows import rows_of as listed

SIZE = 48
SEGFAULT, EXIT, HANGING, RAISING = 7, 13, 22, 30
ENDS_OR_RAISES = (SEGFAULT, EXIT, RAISING)

pytestmark = [
    pytest.mark.timeout(200),
    # The machine may have two CPUs.
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


class Numbers(Dataset[torch.Tensor]):
    """Samples with a random draw; `bad` ones raise, or with `is_deadly` end or block a process."""

    def __init__(self, bad: tuple[int, ...] = (), *, is_deadly: bool = False) -> None:
        self.bad, self.is_deadly = bad, is_deadly
        self.level = 0

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.rand(2)
        if index in self.bad:
            self.strike(index)
        return index + 1000 * self.level + noise

    def strike(self, index: int) -> None:
        if self.is_deadly and index == SEGFAULT:
            # Its stack is of no use here.
            faulthandler.disable()
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.is_deadly and index == EXIT:
            os._exit(3)
        if self.is_deadly and index == HANGING:
            time.sleep(3600)
        raise ValueError(f"damaged {index}")


class ManyNumbers(Numbers):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


class Held(Numbers):
    """What it has open is the trainer's, and no other process's."""

    def __init__(self) -> None:
        super().__init__()
        self.file = open(__file__, "rb")  # noqa: SIM115


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(8))


def process_of(tmp_path: Any = None, *, workers: int | None = None, **feed: Any) -> TrainerProcess:
    settings = ProcessSettings(
        feed=FeedSettings(max_errors=99, **feed),
        output=tmp_path,
        workers={} if workers is None else {"dnn": workers},
    )
    return TrainerProcess(settings, Timeline(None))


def loader_of(dataset: Any, how: str = "batches", *, workers: int = 2, **more: Any) -> Any:
    """A loader with an order of its own, whose sampler draws from a generator."""
    generator = torch.Generator()
    generator.manual_seed(3)
    sampler = RandomSampler(range(SIZE), generator=generator)
    shape: dict[str, Any] = {"batch_size": 5, "sampler": sampler}
    if how == "large batches":
        # In which two samples each draw in a row.
        shape = {"batch_size": 40, "sampler": sampler}
    if how == "batch sampler":
        shape = {"batch_sampler": BatchSampler(sampler, 5, drop_last=False)}
    if how == "no batches":
        shape = {"batch_size": None, "sampler": sampler}
    return DataLoader(dataset, num_workers=workers, generator=generator, **shape, **more)


def placed(loader: Any, process: TrainerProcess) -> Any:
    return placement.placed_iterator(loader, process)


def epochs_of(
    loader: Any, process: TrainerProcess, count: int = 2, *, iterate: Any = placed
) -> list[Any]:
    return [[batch.tolist() for batch in iterate(loader, process)] for _ in range(count)]


def made_here(loader: Any, process: TrainerProcess) -> list[Any]:
    """Two epochs whose batches this process makes all by itself."""
    return epochs_of(loader, process, iterate=torch_iterator)


def rows_of(folder: Any) -> list[tuple[str, ...]]:
    return listed(folder, "epoch", "batch_number", "place", "index", "replaced_by")


@pytest.mark.parametrize("on_error", ["skip", "replace"])
@pytest.mark.parametrize(
    ("kind", "how", "workers", "plan"),
    [
        (Numbers, "batches", 2, None),
        (Numbers, "large batches", 2, None),
        (Numbers, "large batches", 0, 2),
        (ManyNumbers, "batches", 2, None),
        (Numbers, "batch sampler", 3, None),
        (Numbers, "no batches", 1, None),
        # A plan gives a loader other workers, or its first ones.
        (Numbers, "batches", 1, 3),
        (Numbers, "batches", 0, 2),
    ],
)
def test_samples_that_end_their_process_are_bad_ones_as_if_they_had_raised(
    tmp_path, on_error, kind, how, workers, plan
):
    alone, folder = tmp_path / "alone", tmp_path / "watched"
    alone.mkdir()
    folder.mkdir()
    process = process_of(alone, on_error=on_error)
    expected = made_here(loader_of(kind(ENDS_OR_RAISES), how, workers=0), process)
    dataset = kind(ENDS_OR_RAISES, is_deadly=plan is None or workers > 0)
    process = process_of(folder, on_error=on_error, workers=plan)
    assert epochs_of(loader_of(dataset, how, workers=workers), process) == expected
    assert rows_of(folder) == rows_of(alone)
    assert process.num_bad == 2 * len(ENDS_OR_RAISES)


@pytest.mark.parametrize("plan", [2, None])
def test_workers_find_it_in_a_loader_without_workers_of_its_own(tmp_path, plan):
    # The first batches are made in the trainer, so only a later one may end its process.
    class Late(Numbers):
        def strike(self, index: int) -> None:
            os._exit(4)

    loader = DataLoader(Late((RAISING,)), batch_size=5)
    process = process_of(tmp_path, on_error="skip", workers=plan)
    (batches,) = epochs_of(loader, process, 1)
    assert [len(batch) for batch in batches] == [5] * 6 + [4] + [5] * 2 + [3]
    assert [row[3] for row in rows_of(tmp_path)] == [str(RAISING)]


class Makers(Dataset[int]):
    """Its samples are the processes that make them."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> int:
        return os.getpid()


@pytest.mark.parametrize("plan", [2, None])
def test_a_loop_that_takes_one_batch_of_each_iterator_starts_no_worker_for_each(tmp_path, plan):
    loader = data.DataLoader(Makers(), batch_size=5)
    process = process_of(tmp_path, on_error="skip", workers=plan)
    for _ in range(6):
        assert set(next(placed(loader, process)).tolist()) == {os.getpid()}
    # Which goes on after all.
    makers = [set(batch.tolist()) for batch in placed(loader, process)]
    assert makers[0] == {os.getpid()}
    assert all(os.getpid() not in pids for pids in makers[1:])
    assert os.getpid() not in next(placed(loader, process)).tolist()


def test_where_a_samples_time_is_limited_workers_make_all_but_the_first_batches(tmp_path):
    loader = data.DataLoader(Makers(), batch_size=5)
    process = process_of(tmp_path, sample_timeout_seconds=100)
    makers = [next(placed(loader, process)).tolist()[0] for _ in range(4)]
    assert [pid == os.getpid() for pid in makers] == [True, True, False, False]


def test_a_sample_that_hangs_is_left_out(tmp_path):
    process = process_of(tmp_path, on_error="skip", sample_timeout_seconds=2.0)
    loader = loader_of(Numbers((HANGING,), is_deadly=True))
    epochs = epochs_of(loader, process)
    assert [sum(len(batch) for batch in batches) for batches in epochs] == [SIZE - 1, SIZE - 1]
    assert [row[3] for row in rows_of(tmp_path)] == [str(HANGING)] * 2


class HoldingTheLock(Numbers):
    """A sample waits in native code that keeps Python's lock: no thread of its process can act."""

    def strike(self, index: int) -> None:
        ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_hangs_with_pythons_lock_held_is_left_out(tmp_path, workers):
    process = process_of(tmp_path, on_error="skip", sample_timeout_seconds=2.0)
    # With no workers of its own the first two batches are made in this process.
    loader = DataLoader(HoldingTheLock((HANGING,)), batch_size=5, num_workers=workers)
    (batches,) = epochs_of(loader, process, 1)
    assert sum(map(len, batches)) == SIZE - 1
    assert listed(tmp_path, "index", "error") == [(str(HANGING), "SampleTimeoutError")]


@pytest.mark.parametrize("kind", [Numbers, ManyNumbers])
def test_with_raise_the_error_names_the_sample_that_hangs(kind):
    process = process_of(sample_timeout_seconds=2.0)
    loader = DataLoader(kind((HANGING,), is_deadly=True), batch_size=5, num_workers=2)
    iterator = placed(loader, process)
    assert [len(next(iterator)) for _ in range(4)] == [5] * 4
    with pytest.raises(FeedLostError) as caught:
        next(iterator)
    words = "one call that makes all of its samples" if kind is ManyNumbers else "sample 22 for "
    assert words in caught.value.what
    assert "in strike (test_watched_workers.py:" in caught.value.what
    assert "more than feed.sample_timeout_seconds (2)" in caught.value.what


def test_with_raise_and_a_timeout_the_error_names_the_sample_that_ends_its_process():
    process = process_of(sample_timeout_seconds=60.0)
    loader = DataLoader(Numbers((EXIT,), is_deadly=True), batch_size=5, num_workers=2)
    with pytest.raises(FeedLostError, match=r"sample 13 ends its process, also alone: .*code 3"):
        list(placed(loader, process))


@pytest.mark.parametrize("seeding", ["batch", "sample"])
@pytest.mark.parametrize("more", [{}, {"persistent_workers": True}, {"prefetch_factor": 4}])
def test_batches_and_draws_are_those_of_torchs_workers(seeding, more):
    loaders = [loader_of(Numbers(), **more) for _ in range(2)]
    watched = process_of(seeding=seeding, on_error="skip")
    assert isinstance(placed(loader_of(Numbers()), watched), WatchedIterator)
    torchs = process_of(seeding=seeding)
    assert isinstance(placed(loader_of(Numbers()), torchs), TorchIterator)
    assert epochs_of(loaders[0], watched) == epochs_of(loaders[1], torchs)
    states = [loader.generator.get_state().tolist() for loader in loaders]
    assert states[0] == states[1]


def test_persistent_workers_make_epoch_after_epoch(tmp_path):
    process = process_of(tmp_path, on_error="skip")
    loader = loader_of(Numbers((EXIT,), is_deadly=True), persistent_workers=True)
    iterator = placed(loader, process)
    for _ in range(2):
        assert sum(map(len, iterator)) == SIZE - 1
        iterator._reset(loader)
    # An epoch that is left early.
    next(iterator)
    iterator._reset(loader)
    assert sum(map(len, iterator)) == SIZE - 1
    iterator._shutdown_workers()
    assert [row[3] for row in rows_of(tmp_path)][:3] == ["13"] * 3


class Logged(Numbers):
    """Writes down which processes make its samples."""

    def __init__(self, bad: tuple[int, ...], log: Any) -> None:
        super().__init__(bad)
        self.log = log

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return super().__getitem__(index)


@pytest.mark.parametrize("is_made_again", [False, True])
def test_errors_that_came_again_are_doubted_in_no_later_epoch(tmp_path, is_made_again):
    log = tmp_path / "pids"
    process = process_of(tmp_path, on_error="skip")
    bad = tuple(range(1, 12))
    dataset = Logged(bad, log)
    kept = loader_of(dataset, workers=1)
    num_processes = []
    for _ in range(2):
        log.write_text("")
        loader = loader_of(dataset, workers=1) if is_made_again else kept
        assert sum(map(len, placed(loader, process))) == SIZE - len(bad)
        num_processes.append(len(set(log.read_text().split())))
    assert num_processes[0] > num_processes[1] == 1


def test_a_spawned_worker_finds_it_as_well(tmp_path):
    process = process_of(tmp_path, on_error="skip")
    dataset = Numbers((EXIT,), is_deadly=True)
    loader = loader_of(dataset, workers=1, multiprocessing_context="spawn")
    assert sum(map(len, epochs_of(loader, process, 1)[0])) == SIZE - 1


@pytest.mark.parametrize("workers", [2, 0])
def test_an_epoch_resumes_where_it_was_left(workers):
    def new_loader() -> Any:
        # Of a loader without workers the first batches are made in this process.
        dataset = Numbers((EXIT, RAISING), is_deadly=workers > 0)
        return loader_of(dataset, workers=workers)

    whole = epochs_of(new_loader(), process_of(on_error="skip"), 1)
    first, process = new_loader(), process_of(on_error="skip")
    iterator = placed(first, process)
    begun = [next(iterator).tolist() for _ in range(4)]
    state = state_of(first, process)
    iterator._shutdown_workers()
    later, process = new_loader(), process_of(on_error="skip")
    load(later, process, dict(state))
    assert [begun + epochs_of(later, process, 1)[0]] == whole


def test_errors_of_sampler_and_script_come_in_their_place():
    def fails() -> Any:
        yield from range(11)
        raise KeyError("no more")

    class Failing(BatchSampler):
        def __iter__(self) -> Any:
            return ([index] for index in fails())

    loader = DataLoader(
        Numbers(), batch_sampler=Failing(range(9), 1, drop_last=False), num_workers=2
    )
    taken: list[int] = []
    with pytest.raises(KeyError, match="no more"):
        taken += (int(batch[0, 0]) for batch in placed(loader, process_of(on_error="skip")))

    def init(worker_id: int) -> None:
        raise OSError("no table")

    loader = DataLoader(Numbers(), batch_size=5, num_workers=2, worker_init_fn=init)
    with pytest.raises(OSError, match="no table"):
        next(placed(loader, process_of(on_error="skip")))


def test_a_loaders_timeout_is_torchs():
    process = process_of(sample_timeout_seconds=90.0)
    dataset = Numbers((HANGING,), is_deadly=True)
    loader = DataLoader(dataset, batch_size=SIZE, num_workers=1, timeout=1)
    with pytest.raises(RuntimeError, match="DataLoader timed out after 1 seconds"):
        list(placed(loader, process))


@pytest.mark.parametrize(
    ("dataset", "workers", "feed", "why"),
    [
        (Held(), 0, {"on_error": "skip"}, "num_workers=0 makes its samples in the script's own"),
        (Stream(), 2, {"sample_timeout_seconds": 9.0}, "its stream is made by PyTorch's own"),
        (Numbers(), 2, {"on_error": "skip", "seeding": "torch"}, "with feed.seeding: torch"),
    ],
)
def test_where_it_cannot_be_found_a_line_says_so_once(capsys, dataset, workers, feed, why):
    process = process_of(**feed)
    loader = DataLoader(dataset, num_workers=workers)
    for _ in range(2):
        list(placed(loader, process))
    said = capsys.readouterr().err.splitlines()
    (line,) = [line for line in said if "samples_unwatched" in line]
    assert why in line.replace("'\"'\"'", "'")
    assert "test_watched_workers.py:" in line


def test_a_stream_is_refused_with_what_to_do():
    with pytest.raises(UsageError, match="iterable dataset"):
        placed(DataLoader(Stream(), num_workers=2), process_of(on_error="skip"))


@pytest.mark.parametrize("feed", [{}, {"on_error": "skip"}])
def test_a_change_after_the_samplers_last_index_is_seen_under_a_plan(feed):
    process = process_of(workers=2, **feed)
    dataset = Numbers()
    loader = DataLoader(dataset, batch_size=8, sampler=range(SIZE))
    for epoch in range(2):
        firsts = []
        for number, batch in enumerate(placed(loader, process)):
            firsts.append(int(batch[0, 0]))
            # Its workers have all indices of the epoch by then.
            dataset.level += epoch == 1 and number == 3
    assert firsts == [0, 8, 16, 24, 1032, 1040]


@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 30))]
)
def test_any_samples_any_workers_any_prefetch_give_what_raising_ones_give(seed):
    rng = random.Random(seed)
    bad = tuple(rng.sample(ENDS_OR_RAISES, rng.randint(1, 3)))
    on_error, kind = rng.choice(["skip", "replace"]), rng.choice([Numbers, ManyNumbers])
    seeding = rng.choice(["batch", "sample"])
    expected = made_here(
        loader_of(kind(bad), workers=0), process_of(on_error=on_error, seeding=seeding)
    )
    more: dict[str, Any] = {
        "prefetch_factor": rng.randint(1, 5),
        "persistent_workers": rng.random() < 0.5,
    }
    loader = loader_of(kind(bad, is_deadly=True), workers=rng.randint(1, 4), **more)
    assert epochs_of(loader, process_of(on_error=on_error, seeding=seeding)) == expected


class Rows(ManyNumbers):
    """As a table of rows: a list of indices is one sample, and `__getitems__` is for batches."""

    def __getitem__(self, index: Any) -> torch.Tensor:
        return torch.tensor(index)


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_without_batches_a_worker_makes_one_sample_of_what_the_sampler_gives(on_error):
    lists: Any = [[0, 1], [4, 5, 6]]
    loader = DataLoader(Rows(), batch_size=None, sampler=lists, num_workers=1)
    process = process_of(on_error=on_error, sample_timeout_seconds=100.0)
    assert epochs_of(loader, process, 1) == [lists]


def test_modules_are_looked_at_once_before_workers_are_forked(tmp_path):
    module_generators.cache_clear()
    assert len([*placed(loader_of(Numbers()), process_of(tmp_path, on_error="skip"))]) == 10
    # Of a fork this process would have heard nothing.
    assert vars(module_generators())["_num_modules"] > 0
