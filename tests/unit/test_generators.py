import functools
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from stoker.feed.generators import find_generators

DIGEST = bytes(64)

of_module = np.random.default_rng(1)


class Holds:
    def __init__(self, **given: object) -> None:
        self.__dict__.update(given)


class Slotted:
    __slots__ = ("rng",)

    def __init__(self) -> None:
        self.rng = random.Random(1)


class OfClass:
    rng = np.random.RandomState(1)


class InClass(OfClass):
    pass


class UsesGlobal:
    def __getitem__(self, index: int) -> float:
        return float(of_module.random())


def drawing() -> Callable[[], float]:
    rng = random.Random(4)
    return lambda: rng.random()


def paths(value: object) -> list[str]:
    return [each.path for each in find_generators({"dataset": value})]


PLACES: dict[str, tuple[Callable[[], object], str]] = {
    "an attribute": (lambda: Holds(rng=np.random.default_rng()), "dataset.rng"),
    "a transform's": (
        lambda: Holds(transforms=[Holds(), Holds(R=np.random.RandomState())]),
        "dataset.transforms[1].R",
    ),
    "a dictionary's": (lambda: Holds(by={"b": 1, "a": torch.Generator()}), "dataset.by[1]"),
    "a slot": (lambda: Holds(one=Slotted()), "dataset.one.rng"),
    "a class": (InClass, "dataset.rng"),
    "a module": (UsesGlobal, f"dataset.__getitem__ {__name__}.of_module"),
    "a closure": (lambda: Holds(call=drawing()), "dataset.call.rng"),
    "a partial": (lambda: functools.partial(len, np.random.default_rng()), "dataset.args[0]"),
    "a method's object": (lambda: Slotted().__init__, "dataset.__self__.rng"),
}


@pytest.mark.parametrize("place", PLACES)
def test_generators_are_found_by_their_path(place):
    make, path = PLACES[place]
    assert paths(make()) == [path]


# A generator of each kind, and its first draw after it was seeded with DIGEST.
KINDS: dict[str, tuple[Callable[[], object], float]] = {
    "PCG64": (lambda: np.random.default_rng(3), 1.7537892),
    "PCG64DXSM": (lambda: np.random.Generator(np.random.PCG64DXSM(3)), 0.7903477),
    "Philox": (lambda: np.random.Generator(np.random.Philox(3)), -0.5566048),
    "SFC64": (lambda: np.random.Generator(np.random.SFC64(3)), -0.2697551),
    "MT19937": (lambda: np.random.Generator(np.random.MT19937(3)), 0.722698),
    "RandomState": (lambda: np.random.RandomState(3), -0.1097211),
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
    held = [one for at in (0, 1) for one in find_generators({"dataset": Holds(rng=rngs[at])})]
    held += find_generators({"dataset": Holds(other=rngs[2])})
    seen = []
    for digest in (DIGEST, b"x" * 64, DIGEST):
        for each in held:
            each.seed(digest)
        found = [drawn(rng) for rng in rngs]
        assert found[0] == found[1] != found[2]
        seen.append(found[0])
    assert seen[0] == seen[2] != seen[1]


def test_draws_are_the_same_in_every_version():
    # A change here changes the batches of every run that is resumed.
    rngs = {kind: make() for kind, make in MADE.items()}
    for one in find_generators({"dataset": Holds(**rngs)}):
        one.seed(DIGEST)
    golden = {kind: draw for kind, (_, draw) in KINDS.items()}
    assert {name: drawn(rng)[0] for name, rng in rngs.items()} == pytest.approx(golden, abs=1e-6)


def test_torch_seeds_fit_a_tensor():
    rng = torch.Generator()
    (held,) = find_generators({"dataset": Holds(rng=rng)})
    for number in range(64):
        held.seed(bytes([number]) * 64)
        assert torch.tensor(rng.initial_seed()) >= 0
