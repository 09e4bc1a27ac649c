"""stoker.DataLoader has torch's own iterators without a data group, numbered and seeded."""

import functools
import json
import random

import numpy as np
import pytest
import torch
import torch.utils.data as data

import stoker
from stoker.feed.bookkeeping import this_process
from support.dropin_claims import Plain
from support.loader_draws import DRAWN, Drawing, drawn, hashes
from support.warm_python import run_code


def test_epochs_differ_and_persistent_workers_count_them():
    one = stoker.DataLoader(Drawing(), batch_size=3, num_workers=1, persistent_workers=True)
    two = stoker.DataLoader(Drawing(), batch_size=3, num_workers=2, persistent_workers=True)
    found = hashes(one, epochs=3)
    assert found == hashes(two, epochs=3)
    assert len(set(found)) == len(found)


def note_worker(worker_id, folder=None):
    (folder / str(worker_id)).touch()


# Lightning's has its arguments by name.
def test_an_init_function_may_have_all_of_its_arguments_by_name(tmp_path):
    init = functools.partial(note_worker, folder=tmp_path)
    list(stoker.DataLoader(Plain(), num_workers=2, worker_init_fn=init))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_draws_of_the_dataset_do_not_move_the_trainers_state():
    found = []
    for dataset in (Plain(), Drawing()):
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)
        next(iter(stoker.DataLoader(dataset, batch_size=2)))
        numbers = np.random.get_state()[1].tolist()
        found.append((random.getstate(), numbers, torch.get_rng_state().tolist()))
    assert found[0] == found[1]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_profiler_sees_each_batch_as_a_range(num_workers: int):
    loader = stoker.DataLoader(Plain(), batch_size=2, num_workers=num_workers)
    iterator = iter(loader)
    next(iterator)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        num_batches = len(list(iterator))
    ranges = [
        event.count for event in profile.key_averages() if event.key == iterator._profile_name
    ]
    # One more, which found the end.
    assert ranges == [num_batches + 1]


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
        "from support.dropin_claims import Plain\n"
        "iterator = iter(stoker.DataLoader(Plain(), num_workers=0))\n"
        "print(iterator._num_workers, len(list(iterator)))\n"
    )
    for rank, workers in (("0", 2), ("1", 1)):
        env = {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": rank}
        assert run_code(script, STOKER_WORKERS='{"dnn": 3}', **env) == f"{workers} 10\n"


@pytest.mark.parametrize("decided", [0, 2])
def test_samplers_are_asked_for_iterators_as_the_scripts_workers_would_have_it(decided):
    script = (
        "import torch, stoker\n"
        "from support.loader_draws import DRAWN, drawn\n"
        "print([drawn(stoker.DataLoader, options) for options in DRAWN])\n"
    )
    found = json.loads(run_code(script, STOKER_WORKERS=json.dumps({"dnn": decided})))
    assert found == [drawn(data.DataLoader, options) for options in DRAWN]


def test_the_timeline_has_the_loaders_of_the_script_and_not_those_of_a_dataset(tmp_path):
    script = (
        "import torch, stoker\n"
        "from support.dropin_claims import Plain\n"
        "class Outer(Plain):\n"
        "    def __getitem__(self, i): return sum(map(int, stoker.DataLoader(Plain())))\n"
        "train, test = (stoker.DataLoader(Outer(), batch_size=4, num_workers=n) for n in (0, 1))\n"
        "for loader in (train, test, train):\n"
        "    for batch in loader: pass\n"
        "for batch in train: break\n"
    )
    run_code(script, STOKER_OUTPUT=str(tmp_path), RANK="1")
    rows = [row.split(",") for row in (tmp_path / "timeline-rank1.csv").read_text().splitlines()]
    assert [(row[0], row[1], row[2], row[6]) for row in rows[1:]] == [
        (loader, epoch, batch, samples)
        for loader, epoch in [("0", "0"), ("1", "0"), ("0", "1")]
        for batch, samples in [("0", "4"), ("1", "4"), ("2", "2")]
    ] + [("0", "2", "0", "4")]


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
