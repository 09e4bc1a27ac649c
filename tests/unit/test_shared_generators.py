"""A generator that a dataset shares with a module is one generator on a data host, too."""

import importlib
import random
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from stoker.feed import module_generators
from stoker.feed.random_states import PreservedRandomStates
from stoker.feed.seeding import Seeder
from stoker.feed.wire.dataset import DatasetSpec, pack_spec, unpack_spec

TEXT = """
import random
import numpy as np
import torch

GENERATOR = np.random.default_rng(3)
LEGACY = np.random.RandomState(3)
PYTHONS = random.Random(3)
TORCHS = torch.Generator()
BITS = np.random.Philox(3)


class Augment:
    def __init__(self):
        self.rng = random.Random(3)


augment = Augment()


class Dataset:
    def __init__(self, rng):
        self.rng = rng
"""
DRAWS = {
    "GENERATOR": lambda rng: float(rng.random()),
    "LEGACY": lambda rng: float(rng.normal()),
    "PYTHONS": lambda rng: rng.gauss(0, 1),
    "TORCHS": lambda rng: float(torch.rand((), generator=rng)),
    "BITS": lambda rng: rng.random_raw(),
    "augment.rng": lambda rng: rng.random(),
}
GLOBALS = [torch.default_generator, np.random.mtrand._rand, random._inst]


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "sharing_noise.py").write_text(TEXT)
    monkeypatch.syspath_prepend(folder)
    # A seeder sets it.
    monkeypatch.setattr("torch.utils.data._utils.worker._worker_info", None)
    with PreservedRandomStates():
        yield imported()
    sys.modules.pop("sharing_noise", None)
    module_generators.module_generators.cache_clear()


def imported():
    """The module as another process has it."""
    sys.modules.pop("sharing_noise", None)
    module_generators.module_generators.cache_clear()
    return importlib.import_module("sharing_noise")


def at(module, path):
    for name in path.split("."):
        module = getattr(module, name)
    return module


def packed_of(dataset, collate_fn=default_collate):
    spec = DatasetSpec(dataset=dataset, collate_fn=collate_fn)
    return pack_spec(spec, max_bytes=1 << 20).data


def unpacked(data) -> Any:
    return unpack_spec(data).dataset


@pytest.mark.parametrize("path", DRAWS)
def test_a_generator_of_a_module_stays_that_of_the_module(path, module):
    rng = at(module, path)
    draw = DRAWS[path]
    draw(rng)
    data = packed_of(module.Dataset(rng))
    expected = [draw(rng), draw(rng)]
    there = imported()
    dataset = unpacked(data)
    assert dataset.rng is at(there, path)
    # Where it is not seeded, it continues the trainer's.
    assert [draw(dataset.rng), draw(at(there, path))] == expected


@pytest.mark.parametrize("path", DRAWS)
def test_a_module_that_is_imported_later_has_the_dataset_s(path, module):
    rng = at(module, path)
    data = packed_of([rng])
    expected = DRAWS[path](rng)
    sys.modules.pop("sharing_noise")
    module_generators.module_generators.cache_clear()
    (there,) = unpacked(data)
    assert "sharing_noise" not in sys.modules
    assert at(importlib.import_module("sharing_noise"), path) is there
    assert DRAWS[path](there) == expected


@pytest.mark.parametrize("rng", GLOBALS)
def test_the_global_generators_stay_the_global_ones(rng, module):
    state = random.getstate()
    data = packed_of(module.Dataset(rng))
    assert unpacked(data).rng is rng
    assert random.getstate() == state


def test_one_that_another_host_has_otherwise_is_a_copy(module):
    data = packed_of(module.Dataset(module.PYTHONS))
    there = imported()
    there.PYTHONS = None
    assert type(unpacked(data).rng) is random.Random
    assert there.PYTHONS is None


def test_one_of_the_dataset_alone_is_sent_as_before(module):
    rng = random.Random(5)
    there = unpacked(packed_of(module.Dataset(rng))).rng
    assert there is not rng
    assert there.random() == rng.random()


@pytest.mark.parametrize("path", [path for path in DRAWS if path != "BITS"])
def test_draws_from_both_are_those_of_the_trainer(path, module):
    draw = DRAWS[path]

    def batches(dataset, module):
        seeder = Seeder({"dataset": dataset, "collate_fn": list}, num_workers=2, seeding="stretch")

        def make():
            return [draw(dataset.rng), draw(at(module, path)), draw(dataset.rng)]

        return [seeder.make((7, 0, 0, number), make) for number in range(3)]

    data = packed_of(module.Dataset(at(module, path)))
    expected = batches(module.Dataset(at(module, path)), module)
    there = imported()
    assert batches(unpacked(data), there) == expected
