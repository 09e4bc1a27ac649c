"""Generators that nothing leads to from a dataset: those of libraries and of imported modules."""

import importlib
import random
import sys
import types

import pytest

from stoker.feed import module_generators
from stoker.feed.generators import HeldGenerators
from stoker.feed.module_generators import ModuleGenerators
from stoker.feed.random_states import PreservedRandomStates
from stoker.feed.seeding import Seeder

FILES = {
    "site-packages/noise/__init__.py": "from noise.core import RNG, augment\n",
    "site-packages/noise/core.py": """
import functools
import random
import threading
from contextvars import ContextVar

import numpy as np
import torch

RNG = np.random.default_rng(3)
LEGACY = np.random.RandomState(3)
PYTHONS = random.Random(3)
TORCHS = torch.Generator()
_rng = None
_local = threading.local()
_generators = {}
get_rng = functools.lru_cache(lambda: random.Random(4))
rng = ContextVar("rng", default=None)


class Augment:
    def __init__(self):
        self.state = random.Random(3)


augmenting = Augment()


def augment(x):
    return x + RNG.random()


def of_legacy(x):
    return x + LEGACY.normal()


def of_python(x):
    return x + PYTHONS.gauss(0, 1)


def of_torch(x):
    return x + float(torch.rand((), generator=TORCHS))


def of_object(x):
    return x + augmenting.state.random()


def made_later(x):
    global _rng
    if _rng is None:
        _rng = random.Random(x)
    return x + _rng.random()


def of_thread(x):
    if not hasattr(_local, "one"):
        _local.one = random.Random(x)
    return x + _local.one.random()


def of_dictionary(x):
    return x + _generators.setdefault("here", random.Random(x)).random()


def of_cache(x):
    return x + get_rng().random()


def of_context(x):
    if rng.get() is None:
        rng.set(random.Random(x))
    return x + rng.get().random()
""",
    "site-packages/late_noise.py": """
import random

RNG = random.Random(3)


def augment(x):
    return x + RNG.random()
""",
    "site-packages/near_noise.py": """
import dataclasses
import enum
import os
import random
import threading

import numpy as np


def with_default(x, rng=random.Random(5)):
    return x + rng.random()


def undeclared(x):
    global odd_thing
    if "odd_thing" not in globals():
        odd_thing = random.Random(x)
    return x + odd_thing.random()


class Part:
    def __init__(self):
        self.numbers = np.random.default_rng(3)


class Pipe:
    shared = random.Random(3)

    def __init__(self):
        self.parts = [Part(), Part()]


pipe = Pipe()


class Kind(enum.Enum):
    A = 1

    def __init__(self, seed):
        self.numbers = random.Random(seed)


class Registry:
    numbers = None

    @classmethod
    def draw(cls):
        if cls.numbers is None:
            cls.numbers = random.Random(3)
        return cls.numbers.random()


numbers_by_name = {"b": random.Random(3)}
numbers_by_process = {}
draw = random.Random(17).random
of_this_thread = threading.local()


def nested(x):
    return x + pipe.parts[1].numbers.random()


def of_class(x):
    return x + Pipe().shared.random()


def of_member(x):
    return x + Kind.A.numbers.random()


def of_registry(x):
    return x + Registry.draw()


def of_name(x):
    return x + numbers_by_name["b"].random()


def of_process(x):
    return x + numbers_by_process.setdefault(os.getpid(), random.Random(x)).random()


def of_method(x):
    return x + draw()


def of_local(x):
    if not hasattr(of_this_thread, "numbers"):
        of_this_thread.numbers = np.random.RandomState(3)
    return x + of_this_thread.numbers.rand()
""",
    "own_noise.py": """
import random


class Augment:
    rng = random.Random(3)

    def __call__(self, x):
        return x + self.rng.random()


class Chain:
    def __init__(self, *parts):
        self.parts = parts

    def __call__(self, x):
        for part in self.parts:
            x = part(x)
        return x


class Held:
    def __init__(self):
        self.random_numbers = random.Random(3)

    def __call__(self, x):
        return x + self.random_numbers.random()


generators = [random.Random(3), random.Random(4)]
chain = Chain(Held())


def undeclared(x):
    global an_odd_thing
    if "an_odd_thing" not in globals():
        an_odd_thing = random.Random(x)
    return x + an_odd_thing.random()


def of_list(x):
    return x + generators[1].random()
""",
}


def _of_core(name):
    def draw(x):
        from noise import core

        return getattr(core, name)(x)

    return draw


def of_package(x):
    import noise

    return noise.augment(x)


def imported_late(x):
    import late_noise

    return late_noise.augment(x)


def imported_late_by_name(x):
    return importlib.import_module("late_noise").augment(x)


def of_own_class(x):
    from own_noise import Augment

    return Augment()(x)


def of_own_object(x):
    import own_noise

    return own_noise.chain(x)


def of_own_list(x):
    import own_noise

    return own_noise.of_list(x)


def own_by_name(x):
    return importlib.import_module("own_noise").chain(x)


def own_undeclared(x):
    import own_noise

    return own_noise.undeclared(x)


def _near(name):
    def draw(x):
        import near_noise

        return getattr(near_noise, name)(x)

    return draw


of_near = ["with_default", "undeclared", "nested", "of_class", "of_member", "of_registry"]
of_near += ["of_name", "of_process", "of_method", "of_local"]
of_core = ["of_legacy", "of_python", "of_torch", "of_object", "made_later", "of_thread"]
of_core += ["of_dictionary", "of_cache", "of_context"]
KINDS = {
    **{name: _of_core(name) for name in of_core},
    **{name: _near(name) for name in of_near},
    "of an object by name": own_by_name,
    "made by the function": own_undeclared,
    "of a package": of_package,
    "imported late": imported_late,
    "imported late by its name": imported_late_by_name,
    "of a class": of_own_class,
    "of an object": of_own_object,
    "of a list": of_own_list,
}
NAMES = ("noise", "noise.core", "late_noise", "near_noise", "own_noise")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    for name, text in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    # A seeder sets it.
    monkeypatch.setattr("torch.utils.data._utils.worker._worker_info", None)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    with PreservedRandomStates():
        yield tmp_path
    forget()
    module_generators.module_generators.cache_clear()


def forget():
    for name in NAMES:
        sys.modules.pop(name, None)


class Drawing:
    def __init__(self, draw):
        self.draw = draw

    def __getitem__(self, index):
        return self.draw(index)


def process_of(draw, *, seeding="stretch", imports=()):
    """Returns what makes the batch of a number, as a process that has just begun."""
    forget()
    module_generators.module_generators.cache_clear()
    for name in imports:
        importlib.import_module(name)
    dataset = Drawing(draw)
    seeder = Seeder({"dataset": dataset, "collate_fn": list}, num_workers=2, seeding=seeding)

    def batch(number):
        words = (7, 0, 0, number)
        indices = range(100 * number, 100 * number + 64)
        return seeder.make(words, lambda: [dataset[one] for one in seeder.each(words, indices)])

    return batch


@pytest.mark.parametrize(
    ("kind", "seeding"),
    [*((kind, "stretch") for kind in KINDS), ("of_python", "batch"), ("of_torch", "sample")],
)
def test_batches_do_not_depend_on_which_process_makes_them(kind, seeding):
    def made(numbers, imports=()):
        batch = process_of(KINDS[kind], seeding=seeding, imports=imports)
        return {number: batch(number) for number in numbers}

    whole = made(range(6))
    assert made([4, 1], imports=["noise"]) | made([5, 0, 3, 2], imports=NAMES) == whole
    assert len({number for batch in whole.values() for number in batch}) == 6 * 64


@pytest.mark.parametrize("kind", KINDS)
def test_the_script_s_own_draws_do_not_move(kind):
    forget()
    module_generators.module_generators.cache_clear()
    draw = KINDS[kind]
    draw(1)
    expected = [draw(2), draw(3)]
    forget()
    draw(1)
    dataset = Drawing(draw)
    seeder = Seeder({"dataset": dataset, "collate_fn": list}, num_workers=None)
    for number in range(3):
        with seeder.preserved():
            seeder.make((7, 0, 0, number), lambda: dataset[1])
    # This one is not made anew with its module.
    if kind != "of_context":
        assert [draw(2), draw(3)] == expected


def test_what_no_sample_draws_from_keeps_its_state():
    noise = importlib.import_module("noise.core")
    before = noise.PYTHONS.getstate()
    batch = process_of(lambda x: random.random())
    core = importlib.import_module("noise.core")
    assert batch(0) != batch(1)
    assert core.PYTHONS.getstate() == before


def test_a_generator_is_named_by_the_module_that_makes_it(folder):
    (folder / "a_user.py").write_text("from noise import RNG\n")
    held = []
    for imports in (["noise"], ["a_user", "noise"], ["noise.core", "a_user"]):
        forget()
        sys.modules.pop("a_user", None)
        module_generators.module_generators.cache_clear()
        for name in imports:
            importlib.import_module(name)
        idle = HeldGenerators({"dataset": None}, with_modules=True).idle
        held.append([one.path for one in idle if one.path.startswith(("noise", "a_user"))])
    assert held[0] == held[1] == held[2]
    assert "noise.core.RNG" in held[0]
    sys.modules.pop("a_user", None)


def test_no_code_of_a_module_runs_and_each_is_looked_at_once(monkeypatch):
    class Lazy(types.ModuleType):
        def __getattribute__(self, name):
            raise AssertionError(name)

    class Own:
        def __getattribute__(self, name):
            raise AssertionError(name)

    module = types.ModuleType("with_own")
    vars(module).update(__getattr__=lambda name: 1 / 0, own=Own())
    monkeypatch.setitem(sys.modules, "a_lazy_one", Lazy("a_lazy_one"))
    monkeypatch.setitem(sys.modules, "with_own", module)
    monkeypatch.setitem(sys.modules, "nothing", None)
    modules = ModuleGenerators()
    version = modules.version()
    vars(module)["rng"] = random.Random()
    assert modules.version() == version
    later = types.ModuleType("later_one")
    vars(later)["rng"] = random.Random()
    monkeypatch.setitem(sys.modules, "later_one", later)
    assert modules.version() == version + 1
    paths = [place.path for place in modules.places()]
    assert "later_one.rng" in paths
    assert "with_own.rng" not in paths


def test_generators_of_torch_numpy_and_the_standard_library_are_no_module_s():
    import tempfile

    tempfile.mktemp()
    tops = {place.path.partition(".")[0] for place in ModuleGenerators().places()}
    assert not tops & {"torch", "numpy", "random", "tempfile", "secrets", "__main__"}
