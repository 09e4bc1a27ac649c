"""A loader's state may be taken anywhere and loaded anywhere: the rest is the same bytes."""

import copy
import gc
import hashlib
import io
import itertools
import multiprocessing
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data as data

import stoker
from stoker.errors import UsageError
from support import loader_draws

LENGTH = 24
EPOCHS = 3

State = dict[str, object]


@pytest.fixture(autouse=True)
def _torch_waits_half_a_second(monkeypatch):
    monkeypatch.setattr(data._utils, "MP_STATUS_CHECK_INTERVAL", 0.5)


class Drawing(loader_draws.Drawing):
    def __init__(self, length: int = LENGTH) -> None:
        super().__init__(length)


class PythonShuffled(data.Sampler[int]):
    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        order = list(range(LENGTH))
        random.shuffle(order)
        return iter(order)


class Held(PythonShuffled):
    def __init__(self) -> None:
        self.rng = random.Random(4)
        self.new = np.random.default_rng(4)
        self.old = np.random.RandomState(4)

    def __iter__(self) -> Iterator[int]:
        for _ in range(LENGTH // 3):
            yield self.rng.randrange(LENGTH)
            yield int(self.new.integers(LENGTH))
            yield int(self.old.randint(LENGTH))


class Consumed(data.Sampler[int]):
    def __init__(self) -> None:
        self.state = {"epoch": -1, "consumed": LENGTH}
        self.is_loaded = False

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        if not self.is_loaded:
            self.state.update(epoch=self.state["epoch"] + 1, consumed=0)
        self.is_loaded = False
        order = random.Random(self.state["epoch"]).sample(range(LENGTH), LENGTH)
        for index in order[self.state["consumed"] :]:
            self.state["consumed"] += 1
            yield index

    def state_dict(self) -> State:
        return self.state

    def load_state_dict(self, state: State) -> None:
        self.state.update(state)
        self.is_loaded = True


class Yielded(data.DistributedSampler[int]):
    yielded = 0
    next_yielded: int | None = None

    def __iter__(self) -> Iterator[int]:
        self.yielded, self.next_yielded = self.next_yielded or 0, None
        for index in list(super().__iter__())[self.yielded :]:
            self.yielded += 1
            yield index

    def state_dict(self) -> State:
        return {"yielded": self.yielded}

    def load_state_dict(self, state: State) -> None:
        self.next_yielded = state["yielded"]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def kept(num_workers: int) -> dict[str, object]:
    return {"num_workers": num_workers, "persistent_workers": num_workers > 0}


KEPT = kept(1)
WEIGHTS = [1.0 + n % 5 for n in range(LENGTH)]
SAMPLERS: dict[str, Callable[[], dict[str, object]]] = {
    "in order": dict,
    "drop last": lambda: {"batch_size": 7, "drop_last": True},
    "shuffled": lambda: {"shuffle": True},
    "shuffled by a generator": lambda: {"shuffle": True, "generator": seeded(8)},
    "one by one": lambda: {"shuffle": True, "batch_size": None},
    "with replacement": lambda: {
        "sampler": data.RandomSampler(range(LENGTH), replacement=True, num_samples=70)
    },
    "with replacement by a generator": lambda: {
        "sampler": data.RandomSampler(range(LENGTH), True, num_samples=70, generator=seeded(2))
    },
    "weighted": lambda: {"sampler": data.WeightedRandomSampler(WEIGHTS, 30)},
    "weighted by a generator": lambda: {
        "sampler": data.WeightedRandomSampler(WEIGHTS, 30, generator=seeded(3)),
        "generator": seeded(4),
    },
    "subset": lambda: {"sampler": data.SubsetRandomSampler(range(3, 19))},
    "distributed": lambda: {"sampler": data.DistributedSampler(Drawing(), 2, 1, seed=9)},
    "list": lambda: {"sampler": [5, 4, 3, 2, 9, 8, 7, 6, 20]},
    "list of batches": lambda: {"batch_sampler": [[1, 2], [9], [4, 5, 6], [7]], "batch_size": 1},
    "batch sampler": lambda: {
        "batch_size": 1,
        "batch_sampler": data.BatchSampler(data.RandomSampler(range(LENGTH)), 5, False),
    },
    "held by the sampler": lambda: {"sampler": Held()},
    "stateful": lambda: {"sampler": Consumed()},
    "stateful, distributed": lambda: {"sampler": Yielded(Drawing(), 2, 1, seed=9)},
}


@dataclass
class Script:
    """A training script, which draws after every batch, and saves a state at `save`."""

    options: dict[str, object]
    # An epoch and the number of its batches before, or a word.
    save: tuple[int, int] | str = ""
    state: State = field(default_factory=dict)
    # Epoch, batch, the script's draw: of so many `after` which the state was saved.
    found: list[tuple[int, str, float]] = field(default_factory=list)
    after: int = 0
    epoch: int = 0

    def start(self, seed: int) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.loader = stoker.DataLoader(Drawing(), **({"batch_size": 3} | self.options))

    def keep(self, place: tuple[int, int] | str) -> None:
        if place != self.save:
            return
        buffer = io.BytesIO()
        torch.save(self.loader.state_dict(), buffer)
        buffer.seek(0)
        self.state = torch.load(buffer, weights_only=True)
        self.after = len(self.found)

    def train(self, first_epoch: int = 0, batches_before: int = 0) -> None:
        for epoch in range(first_epoch, EPOCHS):
            self.epoch = epoch
            if isinstance(self.loader.sampler, data.DistributedSampler):
                self.loader.sampler.set_epoch(epoch)
            count = batches_before if epoch == first_epoch else 0
            self.keep(f"before {epoch}")
            iterator = iter(self.loader)
            self.keep(f"at {epoch}")
            for batch in iterator:
                digest = hashlib.sha256(batch.numpy().tobytes()).hexdigest()[:8]
                self.found.append((epoch, digest, float(torch.rand(())) + random.random()))
                count += 1
                self.keep((epoch, count))


def saved(save: tuple[int, int] | str, options: dict[str, object]) -> Script:
    script = Script(options, save)
    script.start(seed=3)
    script.train()
    assert script.state, "nothing was saved"
    return script


def resumed(whole: Script, options: dict[str, object], epoch: int) -> list[object]:
    script = Script(options)
    script.start(seed=77)
    script.loader.load_state_dict(whole.state)
    script.train(epoch)
    return list(script.found)


# A whole run is the same, whoever goes on with its state.
WHOLE: dict[str, Script] = {}


def saved_once(save: tuple[int, int] | str, options: dict[str, object], *, name: str) -> Script:
    if name not in WHOLE:
        WHOLE[name] = saved(save, options)
        # With its workers, which would stay as long as this process.
        del WHOLE[name].loader
    return WHOLE[name]


@pytest.fixture(scope="module", autouse=True)
def _no_worker_stays():
    # Those of files before may stay.
    before = set(multiprocessing.active_children())
    yield
    gc.collect()
    for child in set(multiprocessing.active_children()) - before:
        # It was told to end, and may not have come to it.
        child.join(150.0)
    assert set(multiprocessing.active_children()) <= before


# One worker asks a sampler ahead as two do; two are for those that draw from one state.
AHEAD = ["shuffled", "held by the sampler", "stateful", "with replacement"]


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        *((name, *workers) for name in SAMPLERS for workers in [(0, 0), (1, 0), (0, 1)]),
        *((name, 2, 0) for name in AHEAD),
    ],
)
def test_a_checkpoint_of_any_shuffle_gives_the_rest_of_its_epoch_and_all_later(name, before, after):
    whole = saved_once((1, 2), SAMPLERS[name]() | kept(before), name=f"{name}, {before}")
    found = resumed(whole, SAMPLERS[name]() | kept(after), 1)
    assert found == whole.found[whole.after :]


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_that_was_asked_to_its_end_draws_no_more(name):
    count = len(stoker.DataLoader(Drawing(), **({"batch_size": 3} | SAMPLERS[name]())))
    whole = saved((1, count - 1), SAMPLERS[name]() | KEPT)
    assert resumed(whole, SAMPLERS[name](), 1) == whole.found[whole.after :]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sampler_that_draws_when_its_iterator_is_made_is_gone_on_with(num_workers):
    # With workers torch makes it twice an epoch: the state is for a loader that does so too.
    options: dict[str, object] = {"batch_size": None, "num_workers": num_workers}
    whole = saved((1, 2), options | {"sampler": PythonShuffled()})
    assert resumed(whole, options | {"sampler": PythonShuffled()}, 1) == whole.found[whole.after :]


LAST = LENGTH // 3
PLACES = ["before 0", "at 0", (0, 1), (0, LAST), "before 1", "at 1", (2, LAST - 1)]
ONE: dict[str, object] = {"num_workers": 1}


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize(
    ("before", "after"),
    [({}, ONE), (KEPT, {}), ({}, KEPT), pytest.param(KEPT, KEPT, marks=pytest.mark.soak)],
    ids=str,
)
def test_a_checkpoint_may_be_taken_at_any_place(place, before, after):
    epoch = int(place[-1]) if isinstance(place, str) else place[0]
    whole = saved_once(place, before | {"shuffle": True}, name=f"{place}, {before}")
    assert resumed(whole, after | {"shuffle": True}, epoch) == whole.found[whole.after :]


def test_a_resumed_loader_can_be_saved_and_resumed_again():
    for name in ("shuffled", "stateful", "with replacement"):
        whole = saved((1, 2), SAMPLERS[name]() | {"num_workers": 1})
        second = Script(SAMPLERS[name](), (1, 5))
        second.start(seed=5)
        second.loader.load_state_dict(whole.state)
        second.train(1, batches_before=2)
        assert second.found == whole.found[whole.after :], name
        found = resumed(second, SAMPLERS[name]() | {"num_workers": 2}, 1)
        assert found == second.found[second.after :], name


def test_a_dataset_need_not_have_a_length():
    class Endless(Drawing):
        def __len__(self) -> int:
            raise NotImplementedError

    first, again = (stoker.DataLoader(Endless(), sampler=range(5), batch_size=2) for _ in range(2))
    next(iter(first))
    again.load_state_dict(first.state_dict())
    assert torch.cat(list(again))[:, 0].tolist() == [2, 3, 4]


@pytest.mark.parametrize(
    ("error", "num_workers", "following"),
    [(LookupError, 0, 6.0), (LookupError, 1, 6.0), (KeyboardInterrupt, 0, 4.0)],
)
def test_a_failed_batch_has_no_retry_and_an_interrupted_one_has(error, num_workers, following):
    class Failing(Drawing):
        def __getitem__(self, index: int) -> torch.Tensor:
            if index == 4:
                raise error("sample 4 is broken")
            return super().__getitem__(index)

    loader, other = (
        stoker.DataLoader(dataset, batch_size=2, num_workers=num_workers)
        for dataset in (Failing(), Drawing())
    )
    iterator = iter(loader)
    with pytest.raises(error):
        list(iterator)
    other.load_state_dict(loader.state_dict())
    assert next(iter(other))[:, 0].tolist() == [following, following + 1]


def test_a_loaded_state_is_kept_until_a_batch_is_drawn():
    whole = saved((1, 2), {"shuffle": True})
    script = Script({"shuffle": True})
    script.start(seed=5)
    script.loader.load_state_dict(whole.state)
    before = copy.deepcopy(script.loader.state_dict())
    iter(script.loader)
    assert script.loader.state_dict()["num_yielded"] == before["num_yielded"] == 2
    script.train(1)
    assert script.found == whole.found[whole.after :]


def test_states_of_two_loaders_are_their_own_and_change_with_nothing_that_follows():
    one, two = (stoker.DataLoader(Drawing(), sampler=Consumed(), batch_size=4) for _ in range(2))
    iterator = iter(one)
    next(iterator)
    state = one.state_dict()
    expected = repr(state)
    assert (state["num_yielded"], two.state_dict()["num_yielded"]) == (1, 0)
    list(iterator)
    two.load_state_dict(state)
    assert len(list(two)) == LENGTH // 4 - 1
    assert repr(state) == expected


@pytest.mark.parametrize(
    ("dataset", "options", "words"),
    [
        (Drawing(23), {}, "dataset length: 24 in the state, 23 here"),
        (Drawing(), {"batch_size": 4}, "batch size: 3 in the state, 4 here"),
        (Drawing(), {"drop_last": True}, "drop last: False in the state, True here"),
        (Drawing(), {"shuffle": True}, "RandomSampler"),
        (Drawing(), {"generator": seeded(1)}, r"generators: \[\] in the state, \['generator'\]"),
        (Drawing(23), {"batch_size": 4}, "dataset length.*; batch size"),
        (Drawing(), {}, "world size: 7 in the state.*; rank: 7 in the state"),
    ],
)
def test_a_state_of_another_loader_is_refused_with_what_differs(dataset, options, words):
    state = stoker.DataLoader(Drawing(), batch_size=3).state_dict()
    if "rank" in words:
        state["loader"] = dict(state["loader"]) | {"world_size": 7, "rank": 7}
    loader = stoker.DataLoader(dataset, **({"batch_size": 3} | options))
    with pytest.raises(UsageError, match=words):
        loader.load_state_dict(state)


@pytest.mark.parametrize("state", [{"_num_yielded": 3}, {"version": 99, "loader": {}}])
def test_what_is_no_state_is_refused(state):
    with pytest.raises(UsageError, match="not a state_dict of this version"):
        stoker.DataLoader(Drawing()).load_state_dict(state)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sampler_that_gives_others_is_an_error_not_other_batches(num_workers):
    how = {"batch_size": 3, "num_workers": num_workers}
    loader = stoker.DataLoader(Drawing(), sampler=range(LENGTH), batch_size=3)
    next(iter(loader))
    other = stoker.DataLoader(Drawing(), sampler=range(0, 2 * LENGTH, 2), **how)
    other.load_state_dict(loader.state_dict())
    with pytest.raises(UsageError, match=r"the sampler \(BatchSampler, range\) did not give"):
        next(iter(other))


class Stateful(loader_draws.Counting, data.IterableDataset[int]):
    pass


def test_batches_out_of_order_have_no_state_in_an_epoch():
    loader = stoker.DataLoader(Drawing(), batch_size=2, num_workers=1, in_order=False)
    state = loader.state_dict()
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(UsageError, match="in_order=False"):
        loader.state_dict()
    list(iterator)
    assert loader.state_dict()["epoch"] == 1
    loader.load_state_dict(state)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_iterable_dataset_with_a_state_of_its_own_goes_on(num_workers):
    loader = stoker.DataLoader(Stateful(), batch_size=3)
    next(iter(loader))
    state = loader.state_dict()
    other = stoker.DataLoader(Stateful(), batch_size=3, num_workers=num_workers)
    other.load_state_dict(state)
    assert [batch.tolist() for batch in other] == [[3, 4, 5], [6, 7, 8], [9]]


def test_a_state_of_an_iterable_dataset_of_an_earlier_version_is_read_without_workers():
    loader = stoker.DataLoader(Stateful(), batch_size=3)
    next(iter(loader))
    state: Any = loader.state_dict()
    del state["begun"]["stream"]
    state["begun"]["dataset"] = {"at": 3}
    other = stoker.DataLoader(Stateful(), batch_size=3)
    other.load_state_dict(state)
    iterator = iter(other)
    assert next(iterator).tolist() == [3, 4, 5]
    again = stoker.DataLoader(Stateful(), batch_size=3)
    again.load_state_dict(other.state_dict())
    assert [batch.tolist() for batch in again] == [[6, 7, 8], [9]]
    workers = stoker.DataLoader(Stateful(), batch_size=3, num_workers=1)
    workers.load_state_dict(state)
    with pytest.raises(UsageError, match="no position of iterable dataset Stateful"):
        iter(workers)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_map_style_dataset_whose_own_state_is_not_kept_is_named_once(num_workers, capfd):
    class Counted(Drawing):
        def state_dict(self) -> State:
            raise AssertionError("it is not asked")

        def load_state_dict(self, state: State) -> None:
            raise AssertionError("nor told")

    loader = stoker.DataLoader(Counted(), batch_size=2, num_workers=num_workers)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    loader.state_dict()
    err = capfd.readouterr().err
    assert err.count("stream_state_refused") == 1
    assert "no state_dict of the loader has that of Counted itself" in err
    stoker.DataLoader(Counted(), batch_size=2).load_state_dict(state)


def test_a_sampler_without_a_state_that_can_be_told_stops_no_training():
    class Failing(Consumed):
        def __init__(self) -> None:
            super().__init__()
            self.entropy = random.SystemRandom()

        def state_dict(self) -> State:
            raise RuntimeError("not now")

    loader = stoker.DataLoader(Drawing(), sampler=Failing(), batch_size=2)
    assert len(list(loader)) == 12


def test_none_is_refused_as_a_state_and_an_empty_one_is_ignored():
    loader = stoker.DataLoader([1, 2, 3])
    loader.load_state_dict({})
    with pytest.raises(TypeError, match="takes what state_dict returned, not None"):
        loader.load_state_dict(None)


class PreemptedError(Exception):
    """What a script's handler of SIGTERM raises."""


def test_a_state_that_is_saved_after_a_handler_raised_between_two_draws_resumes(monkeypatch):
    def loader() -> stoker.DataLoader[torch.Tensor]:
        return stoker.DataLoader(range(40), batch_size=4, shuffle=True)

    torch.manual_seed(0)
    interrupted = loader()
    batches = iter(interrupted)
    taken = [next(batches).tolist() for _ in range(3)]

    def preempted(*_: object, **__: object) -> str:
        raise PreemptedError

    with monkeypatch.context() as patch:
        patch.setattr("stoker.feed.sampler.digest_with", preempted)
        with pytest.raises(PreemptedError):
            next(batches)
    state = interrupted.state_dict()
    resumed = loader()
    resumed.load_state_dict(state)
    rest = [batch.tolist() for batch in resumed]
    assert sorted(itertools.chain(*taken, *rest)) == list(range(40))
