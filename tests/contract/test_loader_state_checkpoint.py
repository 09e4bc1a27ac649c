"""A loader's state may be taken anywhere and loaded anywhere: the rest is the same bytes."""

import hashlib
import io
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

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


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


KEPT = {"num_workers": 1, "persistent_workers": True}
WEIGHTS = [1.0 + n % 5 for n in range(LENGTH)]
SAMPLERS: dict[str, Callable[[], dict[str, object]]] = {
    "in order": dict,
    "shuffled": lambda: {"shuffle": True},
    "shuffled by a generator": lambda: {"shuffle": True, "generator": seeded(8)},
    "with replacement": lambda: {
        "sampler": data.RandomSampler(range(LENGTH), replacement=True, num_samples=70)
    },
    "weighted": lambda: {"sampler": data.WeightedRandomSampler(WEIGHTS, 30)},
    "distributed": lambda: {"sampler": data.DistributedSampler(Drawing(), 2, 1, seed=9)},
    "batch sampler": lambda: {
        "batch_size": 1,
        "batch_sampler": data.BatchSampler(data.RandomSampler(range(LENGTH)), 5, False),
    },
    "held by the sampler": lambda: {"sampler": Held()},
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


# One worker asks a sampler ahead as two do; two are for those that draw from one state.
AHEAD = ["shuffled", "held by the sampler", "with replacement"]


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        *((name, *workers) for name in SAMPLERS for workers in [(1, 0), (0, 1)]),
        *((name, 2, 0) for name in AHEAD),
    ],
)
def test_a_checkpoint_of_any_shuffle_gives_the_rest_of_its_epoch_and_all_later(name, before, after):
    options = SAMPLERS[name]() | {"num_workers": before}
    whole = saved_once((1, 2), options, name=f"{name}, {before}")
    found = resumed(whole, SAMPLERS[name]() | {"num_workers": after}, 1)
    assert found == whole.found[whole.after :]


LAST = LENGTH // 3
PLACES = ["before 0", (0, LAST), "at 1", (2, LAST - 1)]
ONE: dict[str, object] = {"num_workers": 1}


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize(("before", "after"), [({}, ONE), (ONE, {}), (KEPT, KEPT)], ids=str)
def test_a_checkpoint_may_be_taken_at_any_place(place, before, after):
    epoch = int(place[-1]) if isinstance(place, str) else place[0]
    whole = saved_once(place, before | {"shuffle": True}, name=f"{place}, {before}")
    assert resumed(whole, after | {"shuffle": True}, epoch) == whole.found[whole.after :]


def test_a_resumed_loader_can_be_saved_and_resumed_again():
    for name in ("shuffled", "with replacement"):
        whole = saved((1, 2), SAMPLERS[name]() | {"num_workers": 1})
        second = Script(SAMPLERS[name](), (1, 5))
        second.start(seed=5)
        second.loader.load_state_dict(whole.state)
        second.train(1, batches_before=2)
        assert second.found == whole.found[whole.after :], name
        found = resumed(second, SAMPLERS[name]() | {"num_workers": 2}, 1)
        assert found == second.found[second.after :], name


@pytest.mark.parametrize(
    ("dataset", "options", "words"),
    [
        (Drawing(23), {}, "dataset length: 24 in the state, 23 here"),
        (Drawing(), {"batch_size": 4}, "batch size: 3 in the state, 4 here"),
        (Drawing(), {"shuffle": True}, "RandomSampler"),
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


BATCHES, STOP_AT = 8, 3


@pytest.fixture(scope="module")
def fit():
    """Gives `fit` of support/lightning_fit.py, which imports Lightning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("lightning")
        from support import lightning_fit

    assert lightning_fit.BATCHES == BATCHES
    return lightning_fit.fit


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stop_at", [STOP_AT, BATCHES + STOP_AT], ids=["first", "second epoch"])
def test_a_fit_that_was_stopped_in_an_epoch_resumes_with_the_batches_left(tmp_path, fit, stop_at):
    file = tmp_path / "last.ckpt"
    whole = fit(file)
    first = fit(file, stop_at=stop_at)
    assert first == whole[:stop_at]
    assert fit(file, resume=True) == whole[stop_at:]
