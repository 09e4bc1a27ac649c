"""stoker.DataLoader has torch's own iterators without a data group, numbered and seeded."""

import copy
import functools
import json
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.utils.data as data

import stoker
from stoker.feed.bookkeeping import this_process
from stoker.feed.iterators import LoaderView, with_workers
from support.loader_draws import DRAWN, Drawing, Plain, drawn, hashes
from support.warm_python import run_code


class Broken(Plain):
    def __getitem__(self, index: int) -> int:
        if index == 4:
            raise LookupError("sample 4 is broken")
        return index


class Stream(data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


def draw_at_start(worker_id: int) -> None:
    torch.utils.data.get_worker_info().dataset.length = 8  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 2},
        {"num_workers": 1, "prefetch_factor": 5},
        # A worker that imports torch: faults/test_start_methods begins one in each run.
        pytest.param(
            {"num_workers": 1, "multiprocessing_context": "spawn"}, marks=pytest.mark.soak
        ),
    ],
    ids=str,
)
def test_shuffled_batches_are_the_same_bytes_with_workers(options):
    alone = hashes(stoker.DataLoader(Drawing(), batch_size=3, shuffle=True))
    workers = hashes(stoker.DataLoader(Drawing(), batch_size=3, shuffle=True, **options))
    assert alone == workers


def test_epochs_differ_and_persistent_workers_count_them():
    one = stoker.DataLoader(Drawing(), batch_size=3, num_workers=1, persistent_workers=True)
    two = stoker.DataLoader(Drawing(), batch_size=3, num_workers=2, persistent_workers=True)
    found = hashes(one, epochs=3)
    assert found == hashes(two, epochs=3)
    assert len(set(found)) == len(found)


def test_torch_alone_gives_other_bytes_with_other_workers():
    """stoker's own seeding exists because of this; if it fails, torch has changed."""
    alone = hashes(data.DataLoader(Drawing(), batch_size=3))
    assert alone != hashes(data.DataLoader(Drawing(), batch_size=3, num_workers=2))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("with_generator", [False, True])
def test_shuffle_order_and_random_state_are_torchs(num_workers, with_generator):
    states = []
    for kind in (data.DataLoader, stoker.DataLoader):
        torch.manual_seed(5)
        generator = torch.Generator().manual_seed(9) if with_generator else None
        loader = kind(
            Plain(), batch_size=2, shuffle=True, num_workers=num_workers, generator=generator
        )
        order = [batch.tolist() for _ in range(2) for batch in loader]
        own = generator.get_state().tolist() if generator else []
        states.append((order, torch.get_rng_state().tolist(), own))
    assert states[0] == states[1]


def test_draws_of_the_dataset_do_not_move_the_trainers_state():
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    next(iter(stoker.DataLoader(Plain(), batch_size=2)))
    expected = (
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.get_rng_state().tolist(),
    )
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    next(iter(stoker.DataLoader(Drawing(), batch_size=2)))
    found = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    assert found == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_epoch_goes_on_after_a_failing_batch(num_workers):
    iterator = iter(stoker.DataLoader(Broken(), batch_size=2, num_workers=num_workers))
    found: list[object] = []
    for _ in range(5):
        try:
            found.append(next(iterator).tolist())
        except LookupError as err:
            found.append("sample 4 is broken" in str(err))
    assert found == [[0, 1], [2, 3], True, [6, 7], [8, 9]]
    with pytest.raises(StopIteration):
        next(iterator)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_early_stop_and_a_new_epoch(num_workers):
    loader = stoker.DataLoader(Plain(), batch_size=2, num_workers=num_workers)
    for _ in range(3):
        for batch in loader:
            assert batch.tolist() == [0, 1]
            break


def test_worker_init_fn_of_the_user_runs_first():
    loader = stoker.DataLoader(
        Drawing(), batch_size=2, num_workers=1, worker_init_fn=draw_at_start, sampler=range(8)
    )
    assert len(list(loader)) == 4


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"batch_size": None}, list(range(10))),
        ({"batch_sampler": [[1, 2], [9]]}, [[1, 2], [9]]),
        ({"batch_size": 2, "sampler": [5, 4, 3, 2]}, [[5, 4], [3, 2]]),
        ({"batch_size": 3, "drop_last": True}, [[0, 1, 2], [3, 4, 5], [6, 7, 8]]),
    ],
    ids=str,
)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_samplers_are_torchs(options, expected, num_workers):
    loader = stoker.DataLoader(Plain(), num_workers=num_workers, **options)
    found = [b.tolist() if isinstance(b, torch.Tensor) else b for b in loader]
    assert found == expected
    assert len(loader) == len(expected)


def test_generator_as_sampler():
    loader = stoker.DataLoader(Plain(), sampler=(n for n in [7, 1]), batch_size=1)
    assert [batch.tolist() for batch in loader] == [[7], [1]]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_iterable_dataset_is_torchs(num_workers):
    ours = [b.tolist() for b in stoker.DataLoader(Stream(), batch_size=4, num_workers=num_workers)]
    torchs = [b.tolist() for b in data.DataLoader(Stream(), batch_size=4, num_workers=num_workers)]
    assert ours == torchs


def test_loader_is_one_of_torchs():
    loader = stoker.DataLoader(Plain(), batch_size=4)
    assert isinstance(loader, data.DataLoader)
    assert len(loader) == 3
    with pytest.raises(ValueError, match="should not be set after"):
        loader.batch_size = 2
    with pytest.raises(ValueError, match="num_workers option should be non-negative"):
        stoker.DataLoader(Plain(), num_workers=-1)


def test_loader_can_be_copied_and_pickled_after_use():
    loader = stoker.DataLoader(Plain(), batch_size=4)
    list(loader)
    for other in (copy.copy(loader), pickle.loads(pickle.dumps(loader))):
        assert len(list(other)) == 3


def test_nested_epochs_over_one_loader():
    loader = stoker.DataLoader(Plain(), batch_size=5, num_workers=1)
    assert [(a.tolist()[0], b.tolist()[0]) for a in loader for b in loader] == [
        (0, 0),
        (0, 5),
        (5, 0),
        (5, 5),
    ]


def test_sample_seeding_depends_on_the_sample_alone(tmp_path):
    found = []
    for order in ([0, 1, 2, 3], [3, 2, 1, 0]):
        script = (
            "import torch, stoker\n"
            "from support.loader_draws import Drawing\n"
            "torch.manual_seed(1)\n"
            f"loader = stoker.DataLoader(Drawing(), batch_size=2, sampler={order})\n"
            "print(sorted(row for batch in loader for row in batch.tolist()))\n"
        )
        found.append(run_code(script, STOKER_FEED='{"seeding": "sample"}'))
    assert found[0] == found[1]


def test_torch_seeding_is_torchs():
    script = (
        "import stoker, torch.utils.data\n"
        "from support.loader_draws import Drawing, hashes\n"
        "for n in (0, 2):\n"
        "    ours = hashes(stoker.DataLoader(Drawing(), batch_size=3, num_workers=n))\n"
        "    torchs = hashes(torch.utils.data.DataLoader(Drawing(), batch_size=3, num_workers=n))\n"
        "    assert ours == torchs\n"
    )
    run_code(script, STOKER_FEED='{"seeding": "torch"}')


def test_decided_workers_replace_the_scripts():
    script = (
        "import torch, stoker\n"
        "from support.loader_draws import Plain\n"
        "iterator = iter(stoker.DataLoader(Plain(), num_workers=0))\n"
        "print(iterator._num_workers, len(list(iterator)))\n"
    )
    env = {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    assert run_code(script, STOKER_WORKERS='{"dnn": 3}', **env) == "2 10\n"
    assert (
        run_code(script, STOKER_WORKERS='{"dnn": 3}', LOCAL_WORLD_SIZE="2", LOCAL_RANK="1")
        == "1 10\n"
    )


@functools.cache
def drawn_where_decided(workers: int) -> list[list[list[int]]]:
    """Returns the draws for each of DRAWN, where the launcher says how many workers there are."""
    script = (
        "import torch, stoker\n"
        "from support.loader_draws import DRAWN, drawn\n"
        "print([drawn(stoker.DataLoader, options) for options in DRAWN])\n"
    )
    found: list[list[list[int]]] = json.loads(
        run_code(script, STOKER_WORKERS=json.dumps({"dnn": workers}))
    )
    return found


@pytest.mark.parametrize("decided", [0, 2])
@pytest.mark.parametrize("options", DRAWN, ids=str)
def test_samplers_are_asked_for_iterators_as_the_scripts_workers_would_have_it(options, decided):
    """torch asks twice at the start of an epoch with workers, once without."""
    found = drawn_where_decided(decided)[DRAWN.index(options)]
    assert found == drawn(data.DataLoader, options)


def test_decided_zero_workers_fit_a_script_with_workers():
    loader = data.DataLoader(Plain(), num_workers=2, timeout=9, persistent_workers=True)
    seen = with_workers(loader, 0)
    assert isinstance(seen, LoaderView)
    assert (seen.num_workers, seen.timeout, seen.prefetch_factor) == (0, 0, None)
    assert seen.dataset is loader.dataset


def test_timeline_is_written_without_a_launcher(tmp_path):
    script = (
        "import torch, stoker\n"
        "from support.loader_draws import Plain\n"
        "train, test = (stoker.DataLoader(Plain(), batch_size=4) for _ in range(2))\n"
        "for loader in (train, test, train):\n"
        "    for batch in loader: pass\n"
        "for batch in train: break\n"
    )
    run_code(script, STOKER_OUTPUT=str(tmp_path), RANK="1")
    rows = [row.split(",") for row in (tmp_path / "timeline-rank1.csv").read_text().splitlines()]
    assert [(row[0], row[1], row[2], row[-1]) for row in rows[1:]] == [
        (loader, epoch, batch, samples)
        for loader, epoch in [("0", "0"), ("1", "0"), ("0", "1")]
        for batch, samples in [("0", "4"), ("1", "4"), ("2", "2")]
    ] + [("0", "2", "0", "4")]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_loader_that_a_dataset_goes_through_is_no_part_of_the_timeline(tmp_path, num_workers):
    script = (
        "import torch, stoker\n"
        "from support.loader_draws import Plain\n"
        "class Outer(Plain):\n"
        "    def __getitem__(self, i): return sum(map(int, stoker.DataLoader(Plain())))\n"
        f"list(stoker.DataLoader(Outer(), batch_size=5, num_workers={num_workers}))\n"
    )
    run_code(script, STOKER_OUTPUT=str(tmp_path))
    rows = [row.split(",") for row in (tmp_path / "timeline-rank0.csv").read_text().splitlines()]
    assert [row[:3] for row in rows[1:]] == [["0", "0", "0"], ["0", "0", "1"]]


def test_replacement_catches_torchs_class(tmp_path):
    script = (
        "import torch\n"
        "from torch.utils.data import DataLoader\n"
        "from stoker.feed.replace import install; install(DataLoader)\n"
        "from support.loader_draws import Drawing, hashes\n"
        "a = hashes(DataLoader(Drawing(), batch_size=3))\n"
        "assert a == hashes(DataLoader(Drawing(), batch_size=3, num_workers=2))\n"
    )
    run_code(script)


def test_import_of_stoker_imports_no_torch():
    clean = {key: value for key, value in os.environ.items() if not key.startswith("STOKER_")}
    heavy = "[m for m in ('torch', 'numpy', 'zmq') if m in sys.modules]"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"import sys, stoker; print({heavy})"],
        env=clean,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_unknown_name_of_stoker_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Loader'"):
        stoker.Loader  # noqa: B018
    assert set(stoker.__all__) <= set(dir(stoker))


def test_books_are_forgotten_with_their_loader():
    loader = stoker.DataLoader(Plain())
    list(loader)
    process = this_process()
    before = len(process._books)
    del loader
    assert len(process._books) == before - 1
