"""Samples that fail in odd ways, odd samplers and datasets: bad samples are the same anywhere."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from stoker.environment import ProcessSettings
from stoker.errors import FeedError
from stoker.feed import placement
from stoker.feed.bookkeeping import TrainerProcess
from stoker.feed.iterators import torch_iterator
from stoker.feed.timeline import Timeline
from stoker.records import FeedSettings
from support.bad_sample_rows import rows_of
from support.local_job import is_running
from support.processes import until

SIZE = 24
BAD = (2, 9, 17)

pytestmark = [
    pytest.mark.timeout(200),
    # The machine may have two CPUs.
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


class PanicError(BaseException):
    """As pyo3_runtime.PanicException, which Rust's libraries raise: no Exception."""


class WordlessError(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


class LeavingError(Exception):
    def __str__(self) -> str:
        sys.exit("no words")


class PanickingError(Exception):
    def __str__(self) -> str:
        raise PanicError("no words")


@dataclass(frozen=True)
class FrozenError(Exception):
    """Refuses whoever sets its traceback, as contextlib's generators do."""

    path: str


class LockedError(Exception):
    """Cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("damaged")
        self.lock = threading.Lock()


def refuse(_owner: object) -> Any:
    raise RuntimeError("not to be read")


# Made by hand: a type checker, too, knows better than to have such a property.
ClasslessError = type("ClasslessError", (Exception,), {"__class__": property(refuse)})


class NoAttributesError(Exception):
    """As one that passes on what it does not have to what it does not have either."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


Nameless = type("Nameless", (type,), {"__name__": property(refuse)})
NamelessError = Nameless("NamelessError", (Exception,), {})


def raises(error: Callable[[], BaseException]) -> Callable[[], None]:
    def strike() -> None:
        raise error()

    return strike


def recurse() -> None:
    recurse()


def warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.warn("a damaged EXIF block", UserWarning, stacklevel=2)


def ask_for_terabytes() -> None:
    np.empty(1 << 46, dtype=np.uint8)


def ask_torch_for_terabytes() -> None:
    torch.empty(1 << 46, dtype=torch.uint8)


def limit_time() -> None:
    def handler(number: int, frame: object) -> None:
        raise TimeoutError("too slow")

    # It is left installed, as many do.
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    time.sleep(30)


# What a sample does, and the class that is listed.
ODD = MappingProxyType(
    {
        "stop iteration": (raises(StopIteration), "StopIteration"),
        "generator exit": (raises(GeneratorExit), "GeneratorExit"),
        "panic": (raises(lambda: PanicError("index out of bounds")), "PanicError"),
        "cancelled": (raises(asyncio.CancelledError), "CancelledError"),
        "group": (
            raises(lambda: BaseExceptionGroup("two", [PanicError(), ValueError("bad")])),
            "BaseExceptionGroup",
        ),
        "wordless": (raises(WordlessError), "WordlessError"),
        "leaving": (raises(LeavingError), "LeavingError"),
        "panicking": (raises(PanickingError), "PanickingError"),
        "frozen": (raises(lambda: FrozenError("a.jpg")), "FrozenError"),
        "classless": (raises(ClasslessError), "ClasslessError"),
        "without attributes": (raises(NoAttributesError), "NoAttributesError"),
        "nameless": (raises(NamelessError), "NamelessError"),
        "locked": (raises(LockedError), "LockedError"),
        "recursion": (recurse, "RecursionError"),
        "warning": (warn, "UserWarning"),
        "terabytes": (ask_for_terabytes, "MemoryError"),
        "torch's terabytes": (ask_torch_for_terabytes, "RuntimeError"),
        "own time limit": (limit_time, "TimeoutError"),
    }
)


class Odd(Dataset[torch.Tensor]):
    """Samples with a random draw; the bad ones fail in one of the ways above."""

    def __init__(self, kind: str, bad: tuple[int, ...] = BAD) -> None:
        self.kind, self.bad = kind, bad

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: Any) -> torch.Tensor:
        noise = torch.rand(2)
        if index in self.bad:
            ODD[self.kind][0]()
        return index + noise


class OddMany(Odd):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


def process_of(folder: Any = None, **feed: Any) -> TrainerProcess:
    settings = ProcessSettings(feed=FeedSettings(**{"max_errors": 99, **feed}), output=folder)
    return TrainerProcess(settings, Timeline(None))


def batches_of(
    loader: Any, process: TrainerProcess, *, iterate: Any = placement.placed_iterator
) -> list[Any]:
    torch.manual_seed(3)
    return [batch.tolist() for batch in iterate(loader, process)]


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize(
    ("dataset", "on_error", "workers"),
    [(Odd, "skip", 0), (Odd, "replace", 2), (OddMany, "skip", 2)],
)
def test_odd_errors_are_bad_samples_in_the_trainer_and_in_workers(
    tmp_path, kind, dataset, on_error, workers
):
    def result_of(name: str, workers: int, iterate: Any) -> tuple[Any, Any]:
        folder = tmp_path / name
        folder.mkdir()
        process = process_of(folder, on_error=on_error)
        loader = DataLoader(dataset(kind), 3, num_workers=workers)
        batches = batches_of(loader, process, iterate=iterate)
        return batches, rows_of(folder, "batch_number", "index", "error", "replaced_by")

    batches, rows = result_of("trainer", 0, torch_iterator)
    assert result_of("workers", workers, placement.placed_iterator) == (batches, rows)
    assert [row[1:3] for row in rows] == [(str(index), ODD[kind][1]) for index in BAD]
    assert len(batches) == SIZE // 3
    assert sum(map(len, batches)) == SIZE - (len(BAD) if on_error == "skip" else 0)


def test_where_no_sample_is_good_the_error_ends_no_epoch_and_no_process(tmp_path):
    for kind in ("stop iteration", "panic"):
        loader = DataLoader(Odd(kind, bad=tuple(range(SIZE))), 3)
        with pytest.raises(RuntimeError):
            batches_of(loader, process_of(tmp_path, on_error="skip"))


@pytest.mark.parametrize("kind", ["classless", "without attributes", "nameless"])
def test_with_raise_an_error_that_cannot_be_shown_names_its_sample(kind):
    loader = DataLoader(Odd(kind), 3, num_workers=2)
    feed = {"sample_timeout_seconds": 100.0}
    with pytest.raises(RuntimeError, match=f"index 2 of data worker.*\\n[^$]*{ODD[kind][1]}"):
        batches_of(loader, process_of(**feed))


class DecodeError(ValueError):
    """As many errors of scripts: it is made of facts, of which its text is made."""

    def __init__(self, path: str, *, line: int) -> None:
        super().__init__(path)
        self.path, self.line = path, line

    def __str__(self) -> str:
        return f"{self.path}, line {self.line}, is damaged"


class Decoded(Odd):
    def __init__(self) -> None:
        super().__init__("locked", ())

    def __getitem__(self, index: int) -> torch.Tensor:
        if index in BAD:
            try:
                int("seven")
            except ValueError as err:
                damaged = DecodeError("a.txt", line=index)
                damaged.add_note("of shard 7")
                raise damaged from err
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_scripts_own_is_the_same_one_in_the_trainer_and_in_workers(
    tmp_path, workers
):
    process = process_of(sample_timeout_seconds=100.0)
    iterate = placement.placed_iterator if workers else torch_iterator
    with pytest.raises(DecodeError, match=r"a\.txt, line 2, is damaged") as caught:
        batches_of(DataLoader(Decoded(), 3, num_workers=workers), process, iterate=iterate)
    assert (caught.value.path, caught.value.line) == ("a.txt", 2)
    assert caught.value.__notes__[0] == "of shard 7"
    shown = "".join(traceback.format_exception(caught.value))
    for line in ("raise damaged from err", 'int("seven")', "invalid literal for int()"):
        assert line in shown
    process = process_of(tmp_path, on_error="skip")
    batches_of(DataLoader(Decoded(), 3, num_workers=workers), process, iterate=iterate)
    expected = [("DecodeError", f"a.txt, line {index}, is damaged") for index in BAD]
    assert rows_of(tmp_path, "error", "text") == expected


class Generating(Odd):
    """Holds a generator, whose state is the trainer's again behind each batch."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.rng = np.random.default_rng(3)


def test_with_raise_a_frozen_error_is_what_the_script_gets_in_the_trainer():
    # Another loader looks at its dataset as well.
    process = process_of()
    others = placement.placed_iterator(DataLoader(Odd("frozen", ()), 3), process)
    next(others)
    for dataset in (Odd("frozen"), Generating("frozen")):
        with pytest.raises(FrozenError, match=r"a\.jpg"):
            batches_of(DataLoader(dataset, 3), process)


class PreemptedError(Exception):
    """The script's own way to stop."""


class Signalled(Odd):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 2:
            # As if it came from outside while this sample is made.
            os.kill(os.getpid(), signal.SIGUSR1)
        return super().__getitem__(index)


def test_what_a_signals_handler_raises_is_no_bad_sample(tmp_path):
    def handler(number: int, frame: object) -> None:
        raise PreemptedError

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(PreemptedError):
            batches_of(DataLoader(Signalled("locked", ()), 3), process_of(on_error="skip"))
    finally:
        signal.signal(signal.SIGUSR1, before)


class Started(Odd):
    """Writes the pids of what its samples start, which must not outlive the test."""

    def __init__(self, file: Path) -> None:
        super().__init__("locked")
        self.file = file

    def note(self, pid: int) -> None:
        with self.file.open("a") as file:
            file.write(f"{pid}\n")

    def pids(self) -> list[int]:
        return [int(pid) for pid in self.file.read_text().split()]


class Deadly(Started):
    """Its bad samples end their process; one as if all were well, one leaves a child behind."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 9:
            sys.exit(0)
        if index == 17:
            child = os.fork()
            if child == 0:
                # It keeps what its parent had open.
                time.sleep(3600)
            self.note(child)
            os._exit(4)
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_that_end_their_process_in_odd_ways_are_left_out(tmp_path, workers):
    process, dataset = process_of(tmp_path, on_error="skip"), Deadly(tmp_path / "pids")
    try:
        batches = batches_of(DataLoader(dataset, 3, num_workers=workers), process)
    finally:
        for pid in dataset.pids():
            os.kill(pid, signal.SIGKILL)
    assert rows_of(tmp_path, "index", "error") == [
        ("2", "LockedError"),
        ("9", "ProcessDiedError"),
        ("17", "ProcessDiedError"),
    ]
    assert sum(map(len, batches)) == SIZE - 3


class Forking(Odd):
    """A sample forks a child that raises where only the parent should go on."""

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = super().__getitem__(index)
        if index == 9:
            child = os.fork()
            if child == 0:
                raise ValueError("of the child")
            os.waitpid(child, 0)
        return sample


def test_a_child_that_a_sample_forks_makes_no_batch(tmp_path):
    expected = batches_of(DataLoader(Odd("locked", ()), 3), process_of(on_error="skip"))
    process = process_of(tmp_path, on_error="skip")
    loader = DataLoader(Forking("locked", ()), 3, num_workers=2)
    assert batches_of(loader, process) == expected
    assert process.num_bad == 0


class Moving(Odd):
    """A bad sample does not come back from the folder that it went to."""

    def __getitem__(self, index: int) -> torch.Tensor:
        Path("data").read_text()
        if index in self.bad:
            os.chdir("/")
        return super().__getitem__(index)


class MovingMany(Moving):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Moving, MovingMany])
def test_a_bad_sample_takes_no_other_one_to_its_folder(tmp_path, monkeypatch, kind, workers):
    monkeypatch.chdir(tmp_path)
    Path("data").touch()
    process = process_of(tmp_path, on_error="skip")
    batches_of(DataLoader(kind("locked"), 3, num_workers=workers), process)
    assert rows_of(tmp_path, "index") == [(str(index),) for index in BAD]
    assert os.getcwd() == str(tmp_path)


class GoingOnce(Moving):
    """The first sample of a process, a good one, goes to the folder of all."""

    def __init__(self, folder: Path) -> None:
        super().__init__("locked")
        self.folder, self.pid = folder, 0

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.pid != os.getpid():
            self.pid = os.getpid()
            os.chdir(self.folder)
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_sample_takes_no_other_one_from_the_folder_that_a_good_one_went_to(
    tmp_path, monkeypatch, workers
):
    monkeypatch.chdir("/")
    (tmp_path / "data").touch()
    process = process_of(tmp_path, on_error="skip")
    batches_of(DataLoader(GoingOnce(tmp_path), 3, num_workers=workers), process)
    assert rows_of(tmp_path, "index") == [(str(index),) for index in BAD]


class Lazy(Odd):
    def __getitems__(self, indices: list[int]) -> Any:
        return (self[index] for index in indices)


class Sliced(Odd):
    def __getitems__(self, indices: Any) -> list[torch.Tensor]:
        assert isinstance(indices, slice | range)
        places = range(SIZE)[indices] if isinstance(indices, slice) else indices
        return [self[index] for index in places]


@dataclass
class Whole:
    """A batch that cannot be iterated over."""

    indices: list[int]

    def tolist(self) -> list[int]:
        return self.indices


class WholeBatches(Odd):
    def __getitems__(self, indices: list[int]) -> Whole:
        return Whole(list(indices))


def stacked(samples: Any) -> torch.Tensor:
    return torch.stack([*samples])


def as_it_is(batch: Any) -> Any:
    return batch


@pytest.mark.parametrize("workers", [0, 2])
def test_datasets_that_make_whole_batches_get_and_give_what_they_do_with_raise(tmp_path, workers):
    lazy = DataLoader(Lazy("locked"), 3, num_workers=workers, collate_fn=stacked)
    process = process_of(tmp_path, on_error="skip")
    assert sum(map(len, batches_of(lazy, process))) == SIZE - len(BAD)
    assert process.num_bad == len(BAD)
    sampler: Any = [slice(start, start + 6) for start in range(0, SIZE, 6)]
    sliced = DataLoader(Sliced("locked", ()), batch_sampler=sampler, num_workers=workers)
    whole = DataLoader(WholeBatches("locked"), 3, num_workers=workers, collate_fn=as_it_is)
    for loader in (sliced, whole):
        tolerant = batches_of(loader, process_of(on_error="skip"))
        assert tolerant == batches_of(loader, process_of())


class Named(Odd):
    """Its indices are no numbers."""

    def __getitem__(self, index: Any) -> torch.Tensor:
        return super().__getitem__(index["place"] if isinstance(index, dict) else int(index))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "index_of", [str, lambda place: {"place": place}, lambda place: f"{place}\n"]
)
def test_indices_may_be_anything_and_are_listed_as_they_are(tmp_path, workers, index_of):
    indices = [index_of(place) for place in range(SIZE)]
    loader = DataLoader(Named("locked"), 3, sampler=indices, num_workers=workers)
    assert sum(map(len, batches_of(loader, process_of(tmp_path, on_error="skip")))) == SIZE - 3
    assert rows_of(tmp_path, "index") == [(repr(index_of(place)),) for place in BAD]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Odd, OddMany])
def test_subsets_of_joined_datasets_list_the_loaders_own_indices(tmp_path, workers, kind):
    joined: Any = ConcatDataset([Subset(kind("locked"), range(12)), kind("locked")])
    subset: Any = Subset(joined, range(1, len(joined)))
    loader = DataLoader(subset, 4, num_workers=workers)
    batches_of(loader, process_of(tmp_path, on_error="skip"))
    listed = [int(index) for (index,) in rows_of(tmp_path, "index")]
    assert listed == [1, 8, 13, 20, 28]


def test_each_loader_and_each_epoch_has_its_own_count(tmp_path):
    process = process_of(tmp_path, on_error="skip", max_errors=len(BAD))
    for _ in range(2):
        # One is made anew each epoch, and one read beside it.
        training, validation = DataLoader(Odd("locked"), 3), DataLoader(Odd("panic"), 3)
        iterators = [placement.placed_iterator(each, process) for each in (training, validation)]
        assert len([*zip(*iterators, strict=True)]) == SIZE // 3
    assert process.num_bad == 4 * len(BAD)
    assert len(set(rows_of(tmp_path, "loader", "index"))) == 4 * len(BAD)
    process = process_of(tmp_path, on_error="skip", max_errors=len(BAD) - 1)
    with pytest.raises(FeedError, match=r"3 of \d+ samples of this epoch are bad"):
        batches_of(DataLoader(Odd("locked"), 3), process)


class Waiting(Started):
    """A sample waits for a program that never ends, as ffmpeg for a pipe."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 9:
            program = subprocess.Popen(["sleep", "3600"])
            self.note(program.pid)
            program.wait()
        return super().__getitem__(index)


def test_a_program_that_a_hanging_sample_waits_for_is_ended_with_it(tmp_path):
    process = process_of(tmp_path, on_error="skip", sample_timeout_seconds=1.5)
    dataset = Waiting(tmp_path / "pids")
    batches = batches_of(DataLoader(dataset, 3, num_workers=2), process)
    assert sum(map(len, batches)) == SIZE - 3
    assert ("9", "SampleTimeoutError") in rows_of(tmp_path, "index", "error")
    pids = dataset.pids()
    assert len(pids) >= 2
    until(lambda: not any(map(is_running, pids)), what="the programs end")
