import functools
import itertools
import random
import threading
import types
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from stoker.feed.generators import MAX_GENERATORS, HeldGenerators, put_back

DIGEST = bytes(64)

of_module = np.random.default_rng(1)
made_later: np.random.Generator | None = None


class Holds:
    def __init__(self, **given: object) -> None:
        self.__dict__.update(given)


class Slotted:
    __slots__ = ("rng",)

    def __init__(self) -> None:
        self.rng = random.Random(1)


class LaterSlotted:
    __slots__ = ("rng",)

    def __init__(self) -> None:
        self.rng: random.Random | None = None


class OfClass:
    rng = np.random.RandomState(1)


class InClass(OfClass):
    pass


class UsesGlobal:
    def __getitem__(self, index: int) -> float:
        return float(of_module.random())


class UsesLaterGlobal:
    def __getitem__(self, index: int) -> float:
        global made_later
        if made_later is None:
            made_later = np.random.default_rng(index)
        return float(made_later.random())


@functools.lru_cache
def kept(number: int) -> random.Random:
    return random.Random(number)


@functools.cache
def kept_for_all() -> np.random.Generator:
    return np.random.default_rng(5)


class UsesKept:
    def __getitem__(self, index: int) -> float:
        return kept(7).random() + float(kept_for_all().random())


of_context: ContextVar[random.Random | None] = ContextVar("of_context", default=None)
of_all_contexts = torch.Generator()
with_default = ContextVar("with_default", default=of_all_contexts)


class UsesDefault:
    def __getitem__(self, index: int) -> int:
        return with_default.get().initial_seed()


class UsesContext:
    def __getitem__(self, index: int) -> float:
        rng = of_context.get()
        if rng is None:
            rng = random.Random(index)
            of_context.set(rng)
        return rng.random()


def drawing() -> Callable[[], float]:
    rng = random.Random(4)
    return lambda: rng.random()


def local() -> threading.local:
    found = threading.local()
    found.rng = random.Random(2)
    return found


def paths(value: object) -> list[str]:
    return [each.path for each in HeldGenerators({"dataset": value}).found]


PLACES: dict[str, tuple[Callable[[], object], str]] = {
    "an attribute": (lambda: Holds(rng=np.random.default_rng()), "dataset.rng"),
    "a transform's": (
        lambda: Holds(transforms=[Holds(), Holds(R=np.random.RandomState())]),
        "dataset.transforms[1].R",
    ),
    "a dictionary's": (lambda: Holds(by={"b": 1, "a": torch.Generator()}), "dataset.by['a']"),
    "a slot": (lambda: Holds(one=Slotted()), "dataset.one.rng"),
    "a class": (InClass, f"{__name__}.OfClass.rng"),
    "a module": (UsesGlobal, f"{__name__}.of_module"),
    "a context's": (UsesDefault, f"{__name__}.with_default"),
    "a closure": (lambda: Holds(call=drawing()), "dataset.call.rng"),
    "a partial": (lambda: functools.partial(len, np.random.default_rng()), "dataset.args[0]"),
    "a method's object": (lambda: Slotted().__init__, "dataset.__self__.rng"),
    "a generator's method": (lambda: Holds(f=random.Random().random), "dataset.f.__self__"),
    "a thread's": (lambda: Holds(here=local()), "dataset.here.rng"),
    "a read-only dictionary's": (
        lambda: Holds(by=types.MappingProxyType({"a": torch.Generator()})),
        "dataset.by['a']",
    ),
    "a bit generator": (lambda: Holds(bits=np.random.Philox()), "dataset.bits"),
}


@pytest.mark.parametrize("place", PLACES)
def test_generators_are_found_by_their_path(place):
    make, path = PLACES[place]
    assert paths(make()) == [path]


def test_what_functions_keep_is_found_by_their_arguments():
    kept.cache_clear()
    kept_for_all.cache_clear()
    held = HeldGenerators({"dataset": UsesKept()})
    assert held.found == []
    UsesKept()[0]
    assert held.has_changed()
    assert held.look()
    of_kept = f"{__name__}.kept[7]"
    assert [each.path for each in held.found] == [of_kept, f"{__name__}.kept_for_all[()]"]
    assert not held.has_changed()


def test_what_a_context_has_is_noticed_as_it_is_set():
    held = HeldGenerators({"dataset": UsesContext()})
    assert not held.has_changed()
    token = of_context.set(None)
    UsesContext()[0]
    assert held.has_changed()
    assert held.look()
    assert [each.path for each in held.found] == [f"{__name__}.of_context"]
    of_context.reset(token)


@dataclass
class Box:
    corners: list[int]
    tags: list[str]


@dataclass
class Labelled:
    boxes: list[Box]


def test_a_transform_is_found_behind_many_objects_of_a_dataset():
    labels = [Labelled([Box([1, 2, 3, 4], ["car"]) for _ in range(8)]) for _ in range(2000)]
    one_of = Holds(transforms=[Holds(crop=Holds(rng=np.random.default_rng()))])
    dataset = Holds(labels=labels, transform=Holds(transforms=[one_of]))
    assert paths(dataset) == ["dataset.transform.transforms[0].transforms[0].crop.rng"]


def test_generator_with_its_bit_generator_is_one():
    rng = np.random.default_rng()
    assert paths(Holds(a=rng.bit_generator, b=rng)) == ["dataset.b"]
    assert paths(Holds(b=rng.bit_generator, a=rng)) == ["dataset.a"]


def test_samples_are_not_walked_through():
    samples = [("path", [1, 2], {"size": 3})] * 100_000
    held = HeldGenerators({"dataset": Holds(samples=samples, table=dict(enumerate(samples)))})
    assert held.found == []
    assert not held.has_changed()


def test_many_datasets_and_a_list_that_holds_itself_are_walked_through_once():
    samples: list[object] = [("path", 1)] * 100
    samples[0] = samples
    many = [Holds(rng=random.Random()) for _ in range(100)]
    assert len(paths(Holds(samples=samples, datasets=many))) == 100
    # Global generators are not among them.
    given = {"a": torch.default_generator, "b": random._inst, "c": np.random.mtrand._rand}
    assert paths(Holds(**given)) == []


# A generator of each kind, and its first draw after it was seeded with DIGEST.
KINDS: dict[str, tuple[Callable[[], object], float]] = {
    "PCG64": (lambda: np.random.default_rng(3), 1.6453214),
    "PCG64DXSM": (lambda: np.random.Generator(np.random.PCG64DXSM(3)), -0.899782),
    "Philox": (lambda: np.random.Generator(np.random.Philox(3)), -0.5566048),
    "SFC64": (lambda: np.random.Generator(np.random.SFC64(3)), -0.2697551),
    "MT19937": (lambda: np.random.Generator(np.random.MT19937(3)), 0.722698),
    "RandomState": (lambda: np.random.RandomState(3), -0.1097211),
    "RandomState over PCG64": (lambda: np.random.RandomState(np.random.PCG64(3)), 1.1620328),
    "Random": (lambda: random.Random(3), -1.2530586),
    "torch": (lambda: torch.Generator().manual_seed(3), 0.3959734),
}
MADE = {kind: make for kind, (make, _) in KINDS.items()}


def drawn(rng: object) -> list[float]:
    if isinstance(rng, torch.Generator):
        return torch.rand(5, generator=rng).tolist()
    draw = rng.normal if hasattr(rng, "normal") else rng.gauss
    return [float(draw(0, 1)) for _ in range(5)]


@pytest.mark.parametrize("kind", MADE)
def test_draws_follow_from_digest_and_path_alone(kind):
    rngs = [MADE[kind]() for _ in range(3)]
    drawn(rngs[1])
    held = [HeldGenerators({"dataset": Holds(rng=rngs[at])}) for at in (0, 1)]
    other = HeldGenerators({"dataset": Holds(other=rngs[2])})
    seen = []
    for digest in (DIGEST, b"x" * 64, DIGEST):
        for each in (*held, other):
            each.seed(digest)
        found = [drawn(rng) for rng in rngs]
        assert found[0] == found[1] != found[2]
        seen.append(found[0])
    assert seen[0] == seen[2] != seen[1]


def test_draws_are_the_same_in_every_version():
    # A change here changes the batches of every run that is resumed.
    rngs = {kind: make() for kind, make in MADE.items()}
    held = HeldGenerators({"dataset": Holds(**rngs)})
    held.seed(DIGEST)
    golden = {kind: draw for kind, (_, draw) in KINDS.items()}
    assert {name: drawn(rng)[0] for name, rng in rngs.items()} == pytest.approx(golden, abs=1e-6)


def test_torch_seeds_fit_a_tensor():
    rng = torch.Generator()
    held = HeldGenerators({"dataset": Holds(rng=rng)})
    for number in range(64):
        held.seed(bytes([number]) * 64)
        assert torch.tensor(rng.initial_seed()) >= 0


@pytest.mark.parametrize("kind", MADE)
def test_states_are_put_back(kind):
    rng = MADE[kind]()
    held = HeldGenerators({"dataset": Holds(rng=rng)})
    states = held.states()
    held.seed(DIGEST)
    drawn(rng)
    put_back(states)
    assert drawn(rng) == drawn(MADE[kind]())


LATER: dict[str, Callable[[Any], object]] = {
    "a new attribute": lambda dataset: setattr(dataset, "rng", random.Random()),
    "one that was None": lambda dataset: setattr(dataset, "none", random.Random()),
    "one in place of another": lambda dataset: setattr(dataset, "held", random.Random()),
    "of a transform": lambda dataset: setattr(dataset.inner, "rng", random.Random()),
    "in a slot": lambda dataset: setattr(dataset.slotted, "rng", random.Random()),
    "in a dictionary": lambda dataset: dataset.made.update(later=random.Random()),
    "of a class": lambda dataset: setattr(Given, "of_class", random.Random()),
    "a global": lambda dataset: UsesLaterGlobal()[1],
}


class Given(Holds):
    of_class: random.Random | None = None

    def __getitem__(self, index: int) -> object:
        return UsesLaterGlobal()[index]


@pytest.mark.parametrize("how", LATER)
def test_what_is_made_at_first_use_is_noticed(how, monkeypatch):
    monkeypatch.setattr(Given, "of_class", None)
    monkeypatch.setitem(globals(), "made_later", None)
    dataset = Given(none=None, held=random.Random(), inner=Holds(), made={}, slotted=LaterSlotted())
    held = HeldGenerators({"dataset": dataset})
    before = {id(each.value) for each in held.found}
    assert not held.has_changed()
    LATER[how](dataset)
    assert held.has_changed()
    assert held.look()
    assert len({id(each.value) for each in held.found} - before) == 1
    assert not held.has_changed()
    assert not held.look()


def test_a_cache_that_grows_is_looked_at_a_few_times_only():
    dataset = Holds(cache={})
    held = HeldGenerators({"dataset": dataset})
    for number in itertools.count():
        dataset.cache[number] = [number]
        if not held.has_changed():
            break
        assert number < 20
        assert not held.look()


class Seeds:
    def seed(self, number: int) -> None:
        random.seed(number)


class Odd:
    seed = np.random.mtrand._rand.seed


def test_what_cannot_be_reached_is_named():
    held = HeldGenerators({"dataset": Holds(a=Odd(), b=[random.SystemRandom()], c=Seeds())})
    assert held.found == []
    assert held.out_of_reach == {
        "dataset.a": f"a {__name__}.Odd",
        "dataset.b[0]": "a random.SystemRandom",
    }


def test_too_many_generators_are_named():
    rngs = [random.Random() for _ in range(MAX_GENERATORS + 2)]
    held = HeldGenerators({"dataset": Holds(rngs=rngs)})
    assert len(held.found) == MAX_GENERATORS
    assert held.out_of_reach == {
        f"dataset.rngs[{MAX_GENERATORS}]": "a random.Random, the first of more than 256"
    }


class Hostile:
    @property
    def __class__(self) -> type:
        raise RuntimeError("looked at")

    def __getattribute__(self, name: str) -> object:
        raise RuntimeError("looked at")


def test_no_code_of_the_objects_runs():
    assert paths([Hostile(), random.Random()]) == ["dataset[1]"]
