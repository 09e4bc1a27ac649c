"""What a profile says of memory: what workers copy and grow by, and what of the dataset does it."""

import os
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from stoker.host import machine, memory_usage
from stoker.host.memory_usage import paging, process_memory
from stoker.profile.memory_states import memory_of
from stoker.profile.memory_watch import MemoryWatch, _Point, growth_of, worker_pids
from stoker.profile.python_objects import grown_between, held_objects, sizes_of
from stoker.profile.rank_results import BatchFacts, LoaderFacts, RankMemory, RankResult
from support.memory_script import CASES, Samples

MB = 1_000_000
ASKED = {"samples": "5000", "width": "64"}


def dataset_of(case: str) -> Samples:
    return CASES[case](ASKED)


def test_a_process_knows_its_memory():
    held = np.ones(20 * MB, dtype=np.uint8)
    memory = process_memory(os.getpid())
    assert memory is not None
    assert held.nbytes <= memory.private_bytes <= memory.pss_bytes
    assert held.nbytes <= memory.anonymous_bytes


def test_a_process_that_has_ended_has_no_memory():
    assert process_memory(2**22 + 1) is None


@pytest.mark.parametrize(
    ("membership", "file", "prefix"),
    [("0::/a\n", "a", ""), ("4:memory:/a\n", "memory/a", "total_")],
    ids=["version 2", "version 1"],
)
def test_refaults_are_those_of_the_group(membership, file, prefix, tmp_path, monkeypatch):
    (tmp_path / "membership").write_text(membership)
    (tmp_path / "vmstat").write_text("workingset_refault_file 7\npgmajfault 8\npswpin 2\n")
    folder = tmp_path / "cgroup" / file
    folder.mkdir(parents=True)
    (folder / "memory.stat").write_text(
        f"{prefix}workingset_refault_file 3\n{prefix}pgmajfault 5\n"
    )
    monkeypatch.setattr(machine, "CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(memory_usage, "_VMSTAT", tmp_path / "vmstat")
    page = os.sysconf("SC_PAGE_SIZE")
    counts = paging()
    assert (counts.refaulted_bytes, counts.major_faults) == (3 * page, 5)
    assert (counts.swapped_in_bytes, counts.swapped_out_bytes) == (2 * page, 0)


def points(*, copied: float = 0, grown: float = 0, looks: int = 12) -> list[_Point]:
    # The first look is after a batch; pages are inherited before it.
    made = []
    for place in range(1, looks + 1):
        anonymous = int(500 * MB + grown * place)
        made.append(_Point(place, int(MB + (copied + grown) * place), anonymous))
    return made


def test_what_is_copied_does_not_count_as_grown():
    assert growth_of(points(copied=4000)) == (4000, 0)
    assert growth_of(points(grown=4000)) == (0, 4000)
    assert growth_of(points()) == (0, 0)


def test_what_is_copied_once_is_no_growth():
    made = points()
    after = [point._replace(private_bytes=point.private_bytes + 40 * MB) for point in made[8:]]
    assert growth_of([*made[:8], *after]) == (0, 0)


def test_memory_that_comes_and_goes_is_no_growth():
    made = []
    for place, point in enumerate(points()):
        busy = place in (7, 8)
        made.append(point._replace(anonymous_bytes=point.anonymous_bytes + busy * 30 * MB))
    assert growth_of(made).grown == 0


def test_too_few_looks_show_nothing():
    assert growth_of(points(grown=4000, looks=3)) == (0, 0)


@pytest.mark.parametrize(
    ("case", "name", "container", "element", "least", "most"),
    [
        ("list of paths", "ListOfPaths.paths", "list", "str", 100, 140),
        ("list of dicts", "ListOfDicts.rows", "list", "dict", 400, 700),
        ("dict of objects", "DictOfObjects.annotations", "dict", "Annotation", 250, 700),
        ("object column", "ObjectColumn.table['path']", "DataFrame", "str", 100, 140),
    ],
)
def test_collections_of_python_objects_are_named(case, name, container, element, least, most):
    if case == "object column":
        pytest.importorskip("pandas")
    first = held_objects(dataset_of(case))[0]
    assert (first.name, first.element, first.count) == (name, element, 5000)
    assert first.container == container
    assert least <= first.num_bytes / first.count <= most


@pytest.mark.parametrize("case", ["one array", "one tensor", "plain"])
def test_arrays_and_tensors_are_no_python_objects(case):
    assert held_objects(dataset_of(case)) == ()


def test_the_dataset_within_a_subset_is_looked_at():
    subset: torch.utils.data.Subset[torch.Tensor]
    subset = torch.utils.data.Subset(dataset_of("list of paths"), list(range(2000, 4000)))
    names = [held.name for held in held_objects(subset)]
    assert names == ["ListOfPaths.paths", "Subset.indices"]


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("own cache", "OwnCache.cache"),
        ("growing list", "GrowingList.seen"),
        ("lru_cache", "CachedGetitem.__getitem__"),
    ],
)
def test_what_grows_is_named(case, name):
    dataset = dataset_of(case)
    before = sizes_of(dataset)
    for index in range(100):
        dataset[index]
    (growing,) = grown_between(before, sizes_of(dataset), samples=100)
    assert growing.name == name
    assert growing.count_per_sample == pytest.approx(1, abs=0.1)


def test_without_a_cache_nothing_grows():
    dataset = dataset_of("list of paths")
    before = sizes_of(dataset)
    for index in range(100):
        dataset[index]
    assert grown_between(before, sizes_of(dataset), samples=100) == ()


def test_it_looks_once_a_second_and_less_often_where_a_look_takes_long():
    times = iter([0.0, 0.5, 0.6, 40.0, 50.0, 51.0])
    watch = MemoryWatch(clock=lambda: next(times))
    for step in range(4):
        watch.look(None, steps=step, batch_size=4)
    seen = watch.result(prefetch_factor=2, epoch_samples=400)
    # The first look took 0.5 s, so that the one at 0.6 s is left out, and the one at 40 s.
    assert seen is not None
    assert seen.looks == 2


def test_workers_of_a_torch_iterator_are_looked_at():
    # This process stands for two workers.
    worker = SimpleNamespace(pid=os.getpid())
    iterator = SimpleNamespace(_workers=[worker, worker])
    watch = MemoryWatch()
    watch.look(iterator, steps=1, batch_size=4)
    seen = watch.result(prefetch_factor=2, epoch_samples=5000)
    assert seen is not None
    assert seen.workers == 2
    assert seen.worker_bytes > 0
    assert 0 < seen.used_bytes < seen.limit_bytes


def test_an_iterator_without_workers_has_none():
    assert worker_pids(iter([1])) == []


RANK = RankResult(
    rank=0,
    world_size=1,
    host="one",
    vcpus=2,
    ranks_on_host=1,
    batch=BatchFacts(samples=8, num_bytes=5 * MB),
    loader=LoaderFacts(num_workers=3, pin_memory=False, persistent_workers=False, dataset="x"),
    memory=RankMemory(
        looks=5,
        look_seconds=0.01,
        limit_bytes=1000 * MB,
        used_bytes=500 * MB,
        trainer_bytes=70 * MB,
        workers=3,
        prefetch_factor=4,
        epoch_samples=800,
    ),
)


def test_ranks_of_a_host_are_added_up():
    other = msgspec.structs.replace(RANK, rank=1)
    elsewhere = msgspec.structs.replace(RANK, rank=2, host="two")
    memory = memory_of([RANK, other, elsewhere])
    assert memory is not None
    assert memory.limited_by == "machine"
    assert (memory.workers, memory.trainer_bytes) == (6, 140 * MB)
    assert memory.waiting_bytes == 2 * 3 * 4 * 5 * MB
    assert memory.epoch_samples == 1600


def test_without_looks_nothing_is_known():
    assert memory_of([msgspec.structs.replace(RANK, memory=None)]) is None
