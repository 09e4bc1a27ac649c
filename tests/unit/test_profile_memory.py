"""What a profile says of memory: what workers copy and grow by, and what of the dataset does it."""

import ctypes
import os
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from stoker.host import machine, memory_usage
from stoker.host.memory_usage import (
    ProcessMemory,
    asked_bytes,
    give_back_freed,
    paging,
    process_memory,
    written_bytes,
)
from stoker.profile.batches import facts_of
from stoker.profile.memory.findings import memory_findings, memory_of
from stoker.profile.memory.growing_objects import grown_between, sizes_of
from stoker.profile.memory.python_objects import held_objects
from stoker.profile.memory.watch import MemoryWatch, _Point, _point, growth_of, worker_pids
from stoker.profile.rank_results import (
    AsIs,
    BatchFacts,
    LoaderFacts,
    LoopGrowth,
    Quartiles,
    RankMemory,
    RankResult,
    WorkerGrowth,
)
from stoker.records import GrowingObjects, HeldObjects, KeptObjects, ProfiledMemory
from support.memory_script import CASES, Samples

MB = 1_000_000
ASKED = {"samples": "5000", "width": "64", "ballast_mb": "0"}


def dataset_of(case: str) -> Samples:
    return CASES[case](ASKED)


def test_a_process_knows_its_memory():
    held = np.ones(20 * MB, dtype=np.uint8)
    memory = process_memory(os.getpid())
    assert memory is not None
    assert held.nbytes <= memory.private_bytes <= memory.pss_bytes
    assert held.nbytes <= memory.anonymous_bytes


def test_memory_that_glibc_keeps_after_it_was_freed_is_given_back():
    # Less than glibc maps by itself, and the last one is in the way of a smaller heap.
    held = [bytearray(b"1") * 100_000 for _ in range(400)]
    last = held.pop()
    before = written_bytes()
    held.clear()
    give_back_freed()
    assert written_bytes() < before - 30 * MB
    assert last


def test_memory_that_glibc_kept_is_asked_for_when_it_is_taken_again():
    # As above: the last one keeps the heap as large as it was.
    held = [bytearray(b"1") * 100_000 for _ in range(400)]
    last = held.pop()
    before = asked_bytes()
    held.clear()
    freed = asked_bytes()
    held = [bytearray(b"1") * 100_000 for _ in range(400)]
    assert freed < before - 30 * MB
    assert asked_bytes() > freed + 30 * MB
    assert last


def test_a_process_that_has_ended_has_no_memory():
    assert process_memory(2**22 + 1) is None


@pytest.mark.parametrize(
    ("membership", "file", "prefix"),
    [("0::/a\n", "a", ""), ("4:memory:/a\n", "memory/a", "total_")],
    ids=["version 2", "version 1"],
)
def test_refaults_are_those_of_the_group(membership, file, prefix, tmp_path, monkeypatch):
    (tmp_path / "membership").write_text(membership)
    (tmp_path / "vmstat").write_text(
        "workingset_refault_file 7\npgmajfault 8\npswpin 2\nzswpin 3\nzswpout 4\n"
    )
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
    assert (counts.swapped_in_bytes, counts.swapped_out_bytes) == (5 * page, 4 * page)


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


def test_pages_that_are_swapped_in_again_are_no_growth():
    made = []
    for place in range(1, 13):
        swapped = (12 - place) * 10 * MB
        here = 200 * MB - swapped
        memory = ProcessMemory(
            pss_bytes=here,
            private_bytes=here,
            anonymous_bytes=here,
            swapped_bytes=swapped,
            pss_anonymous_bytes=here,
        )
        made.append(_point(place, memory))
    assert growth_of(made) == (0, 0)


def test_what_has_filled_up_is_no_growth():
    filled = [
        point._replace(anonymous_bytes=500 * MB + 4000 * min(place, 9) + place)
        for place, point in enumerate(points(looks=14))
    ]
    assert growth_of(filled[:10]).grown == pytest.approx(4001)
    assert growth_of(filled).grown == 0


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


class Row:
    """An annotation with slots, as of a dataclass."""

    __slots__ = ("label", "path")

    def __init__(self, number: int) -> None:
        self.path = f"/data/pictures/{number:09d}.jpeg"
        self.label = number


class Index:
    """What a library for annotations keeps, behind a name that does not say so."""

    def __init__(self) -> None:
        self.rows = [str(number) for number in range(5000)]


def columns(number: int = 5000) -> dict[str, list[str]]:
    return {
        "paths": [f"/data/{place:09d}.jpeg" for place in range(number)],
        "texts": [f"a picture of {place}" for place in range(number)],
    }


def shards() -> list[list[str]]:
    return [[f"{shard}-{row}" for row in range(900)] for shard in range(80)]


PATHS_OF_ALL = [f"/data/{number:09d}.jpeg" for number in range(5000)]


class OfTheModule:
    def __getitem__(self, index: int) -> str:
        return PATHS_OF_ALL[index]


def with_closure() -> Any:
    lines = [f"line {number}" for number in range(5000)]

    class OfAClosure:
        def __getitem__(self, index: int) -> str:
            return lines[index]

    return OfAClosure()


@pytest.mark.parametrize(
    ("dataset", "name", "element"),
    [
        (SimpleNamespace(table=columns()), "SimpleNamespace.table['paths']", "str"),
        (SimpleNamespace(parts=list(columns().values())), "SimpleNamespace.parts[0]", "str"),
        (SimpleNamespace(index=Index()), "Index.rows", "str"),
        (OfTheModule(), "PATHS_OF_ALL", "str"),
        (with_closure(), "lines", "str"),
        ([{"path": str(number)} for number in range(5000)], "the dataset", "dict"),
        (SimpleNamespace(shards=shards()), "SimpleNamespace.shards", "list"),
    ],
    ids=["dict of lists", "list of lists", "object", "module", "closure", "list", "shards"],
)
def test_python_objects_are_found_wherever_a_dataset_keeps_them(dataset, name, element):
    first = held_objects(dataset)[0]
    assert name in first.name
    assert first.element == element


def test_the_index_of_a_table_is_named():
    pandas = pytest.importorskip("pandas")
    names = [f"/data/{number:09d}.jpeg" for number in range(5000)]
    table = pandas.DataFrame({"label": range(5000)}, index=pandas.Index(names, dtype=object))
    (first,) = held_objects(SimpleNamespace(table=table))
    assert (first.name, first.container) == ("SimpleNamespace.table.index", "DataFrame")
    assert (first.element, first.count) == ("str", 5000)


def test_a_dict_of_small_arrays_is_named():
    (first,) = held_objects(SimpleNamespace(boxes=boxes_of(5000)))
    assert (first.name, first.element) == ("SimpleNamespace.boxes", "ndarray")
    assert first.num_bytes == pytest.approx(real_bytes(lambda: boxes_of(5000)), rel=0.25)


def boxes_of(count: int) -> dict[int, np.ndarray]:
    return {number: np.full(4, number / 2) for number in range(count)}


def test_arrays_count_where_each_worker_is_sent_a_copy(tmp_path):
    np.zeros(2 * MB, np.uint8).tofile(tmp_path / "mapped")
    dataset = SimpleNamespace(
        values=np.zeros(MB, np.float32),
        small=np.zeros(9),
        shared=torch.zeros(MB),
        mapped=np.memmap(tmp_path / "mapped", np.uint8, mode="r"),
    )
    assert held_objects(dataset) == ()
    held = held_objects(dataset, with_arrays=True)
    assert [(array.name, array.element, array.num_bytes) for array in held] == [
        ("SimpleNamespace.values", "float32", 4 * MB),
        ("SimpleNamespace.mapped", "uint8", 2 * MB),
    ]


@pytest.mark.parametrize(("method", "is_forked"), [("spawn", False), ("fork", True), (None, True)])
def test_a_loaders_facts_say_whether_its_workers_are_forks(method, is_forked):
    loader = torch.utils.data.DataLoader(
        dataset_of("plain"), num_workers=1, multiprocessing_context=method
    )
    assert facts_of(loader).is_forked is is_forked


def test_what_a_script_holds_beside_its_dataset_is_not_the_datasets():
    names = [held.name for held in held_objects(with_closure())]
    assert not any("PATHS_OF_ALL" in name for name in names)


def real_bytes(make: Any) -> int:
    """Returns the bytes that Python's own allocator gives what `make` returns."""
    tracemalloc.start()
    kept = make()
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept
    return num_bytes


@pytest.mark.parametrize(
    "make",
    [
        lambda: [Path(f"/data/pictures/{number:09d}.jpeg") for number in range(5000)],
        lambda: [Row(number + 1000) for number in range(5000)],
        lambda: [(f"/data/{number:09d}.jpeg", number + 1000) for number in range(5000)],
        lambda: [[number + 1000 + place for place in range(500)] for number in range(1000)],
        lambda: {f"key of {number}": f"value of {number}" for number in range(5000)},
        lambda: [{"tokens": list(range(1000, 1300)), "of": str(row)} for row in range(1000)],
    ],
    ids=["paths", "slots", "tuples", "tokens", "dict of str", "dicts of tokens"],
)
def test_the_size_of_python_objects_is_what_they_take(make):
    (held,) = held_objects(SimpleNamespace(rows=make()))
    assert held.num_bytes == pytest.approx(real_bytes(make), rel=0.25)


class Memo:
    """What a decoder keeps of each file, behind an attribute of any name."""

    def __init__(self) -> None:
        self.decoded: dict[int, bytes] = {}


def test_objects_that_load_what_is_asked_of_them_are_not_asked():
    dataset = SimpleNamespace(libraries=ctypes.cdll, library=ctypes.CDLL(None))
    assert sizes_of(dataset) == sizes_of(SimpleNamespace())


def test_what_grows_in_an_object_of_any_name_is_named():
    dataset = SimpleNamespace(decoder=Memo())
    before = sizes_of(dataset)
    for index in range(100):
        dataset.decoder.decoded[index] = bytes(10)
    (growing,) = grown_between(before, sizes_of(dataset), samples=100)
    assert growing.name == "Memo.decoded"


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
    times = iter([0.0, 0.5, 0.6, 40.0, 60.0, 61.0])
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


def memory_with(**asked: object) -> ProfiledMemory:
    memory = memory_of([RANK])
    assert memory is not None
    return msgspec.structs.replace(memory, **asked)


def findings_of(*, persistent: bool = False, **asked: Any) -> tuple[str, dict[str, str]]:
    assert RANK.loader is not None
    facts = msgspec.structs.replace(RANK.loader, persistent_workers=persistent)
    rank = msgspec.structs.replace(RANK, loader=facts)
    state, fixes = memory_findings(memory_with(**asked), [rank], read_bytes=None)
    return (state.text if state else ""), {fix.id: fix.text for fix in fixes}


NAMES = HeldObjects(name="A.names", container="list", element="str", count=10**6, num_bytes=90 * MB)
CACHE = GrowingObjects(name="A.cache", container="dict", count_per_sample=1.0)
BELOW: dict[str, Any] = {"waiting_bytes": 0}


def test_a_usual_host_has_no_finding():
    assert findings_of(**BELOW) == ("", {})


def test_python_objects_count_only_where_a_worker_copies():
    _, fixes = findings_of(objects=(NAMES,), copied_bytes_per_sample=4000.0, **BELOW)
    assert list(fixes) == ["copied_objects"]
    assert "three workers x 90.0 MB of A.names, a list of 1" in fixes["copied_objects"]
    assert findings_of(objects=(NAMES,), copied_bytes_per_sample=40.0, **BELOW) == ("", {})


@pytest.mark.parametrize(
    ("element", "words"),
    [
        ("str", "one NumPy array of bytes (dtype 'S') or an array of pyarrow"),
        ("Tensor", "join them to one tensor or NumPy array, with an array of where each begins"),
        ("int", "put them into one NumPy array or tensor"),
        ("dict", "one NumPy array, tensor or table of pyarrow each"),
        ("Annotation", "one NumPy array, tensor or table of pyarrow each"),
    ],
)
def test_what_helps_against_copies_follows_from_what_is_copied(element, words):
    held = msgspec.structs.replace(NAMES, element=element)
    _, fixes = findings_of(objects=(held,), copied_bytes_per_sample=4000.0, **BELOW)
    assert words in fixes["copied_objects"]


def test_workers_that_are_sent_the_dataset_have_a_copy_of_all_of_it():
    assert RANK.loader is not None
    facts = msgspec.structs.replace(RANK.loader, start_method="spawn")
    array = HeldObjects(
        name="A.values", container="ndarray", element="float32", count=10**7, num_bytes=40 * MB
    )
    memory = memory_with(objects=(NAMES, array), **BELOW)
    rank = msgspec.structs.replace(RANK, loader=facts)
    _, fixes = memory_findings(memory, [rank], read_bytes=None)
    (text,) = (fix.text for fix in fixes)
    assert text.startswith(
        "each worker is sent a copy of the dataset, as it is no fork (spawn): three workers x "
        "130 MB of A.names, a list of 1,000,000 str, and one more like it: "
        "multiprocessing_context='fork'"
    )
    assert text.endswith("saves up to 390 MB")
    alone = msgspec.structs.replace(memory, objects=(array,))
    _, fixes = memory_findings(alone, [rank], read_bytes=None)
    assert "40.0 MB of A.values, an array of 10,000,000 float32" in fixes[0].text
    small = msgspec.structs.replace(memory, objects=())
    assert memory_findings(small, [rank], read_bytes=None)[1] == []


def test_copies_that_do_not_fit_are_a_limit():
    held = msgspec.structs.replace(NAMES, num_bytes=200 * MB)
    text, _ = findings_of(objects=(held,), copied_bytes_per_sample=4000.0, **BELOW)
    assert text.startswith("memory: 500 MB of 1.00 GB, the machine's memory, are in use; each work")


def test_a_cache_is_said_with_the_epoch_in_which_the_limit_is_reached():
    growing: dict[str, Any] = {"growing": (CACHE,), "grown_bytes_per_sample": 250_000.0, **BELOW}
    text, fixes = findings_of(persistent=True, **growing)
    assert text == ""
    assert "200 MB in an epoch" in fixes["growing_cache"]
    assert "1.00 GB, the machine's memory, is used up in epoch 3" in fixes["growing_cache"]


def test_a_cache_that_fills_gaps_beside_objects_that_are_copied_is_named():
    cache = msgspec.structs.replace(CACHE, element_bytes=4000)
    both: dict[str, Any] = {"growing": (cache,), "objects": (NAMES,), **BELOW}
    _, fixes = findings_of(copied_bytes_per_sample=250_000.0, **both)
    # 800 samples take less than a line is worth.
    assert set(fixes) == {"copied_objects"}
    cache = msgspec.structs.replace(CACHE, element_bytes=40_000)
    both["growing"] = (cache,)
    _, fixes = findings_of(copied_bytes_per_sample=250_000.0, **both)
    assert set(fixes) == {"copied_objects", "growing_cache"}
    assert "A.cache (dict) grows by 40.0 kB for each sample" in fixes["growing_cache"]
    # No more than a worker copies and grows by.
    _, fixes = findings_of(copied_bytes_per_sample=500.0, **both)
    assert set(fixes) == {"copied_objects"}


def test_workers_that_end_with_an_epoch_give_a_cache_back():
    growing: dict[str, Any] = {"growing": (CACHE,), "grown_bytes_per_sample": 250_000.0, **BELOW}
    _, fixes = findings_of(**growing)
    assert "used up" not in fixes["growing_cache"]


def test_a_cache_with_a_small_limit_is_no_finding():
    cache = msgspec.structs.replace(CACHE, container="lru_cache", max_count=5)
    growing: dict[str, Any] = {"growing": (cache,), "grown_bytes_per_sample": 250_000.0, **BELOW}
    assert findings_of(persistent=True, **growing) == ("", {})


def test_a_cache_with_a_limit_is_said_with_what_it_takes_once_it_is_full():
    # Three workers hold 200 samples of 250 kB each.
    cache = msgspec.structs.replace(CACHE, container="lru_cache", max_count=200)
    growing: dict[str, Any] = {"growing": (cache,), "grown_bytes_per_sample": 250_000.0, **BELOW}
    for persistent in (True, False):
        text, fixes = findings_of(persistent=persistent, **growing)
        assert text == ""
        assert fixes == {
            "growing_cache": "A.cache (lru_cache) holds 200 at most: three workers x 50.0 MB once "
            "it is full: a limit half as large saves 75.0 MB"
        }
    text, _ = findings_of(persistent=True, **growing | {"grown_bytes_per_sample": 1e6})
    assert "A.cache (lru_cache) holds 200 at most: three workers x 200 MB once" in text


def test_elements_that_keep_more_each_time_have_no_end():
    endless = GrowingObjects(
        name="A.parts", container="list", count_per_sample=1.0, of_elements=True
    )
    growing: dict[str, Any] = {"growing": (endless,), "grown_bytes_per_sample": 250_000.0, **BELOW}
    text = findings_of(persistent=True, **growing)[1]["growing_cache"]
    assert text.startswith(
        "the elements of A.parts (list) keep more each time that they are used, "
    )
    assert "is used up in epoch 3: bound it" in text


def test_a_cache_that_fills_the_memory_in_one_epoch_is_a_limit():
    growing: dict[str, Any] = {"growing": (CACHE,), "grown_bytes_per_sample": 800_000.0, **BELOW}
    text, _ = findings_of(persistent=True, **growing)
    assert "A.cache (dict) grows by 800 kB for each sample, 640 MB in an epoch" in text


def test_elements_that_keep_what_they_read_are_said_with_what_helps():
    loaded = GrowingObjects(
        name="A.images", container="list", count_per_sample=1.0, max_count=800, of_elements=True
    )
    growing: dict[str, Any] = {"growing": (loaded,), "grown_bytes_per_sample": 250_000.0, **BELOW}
    _, fixes = findings_of(**growing)
    text = fixes["growing_cache"]
    assert text.startswith("the elements of A.images (list) keep what was read of them, 250 kB")
    assert "open or load it in __getitem__" in text


def without_workers(**asked: Any) -> dict[str, str]:
    """Findings of a loader without workers, whose dataset's objects are the trainer's."""
    assert RANK.loader is not None
    facts = msgspec.structs.replace(RANK.loader, num_workers=0)
    memory = memory_with(workers=0, **asked, **BELOW)
    rank = msgspec.structs.replace(RANK, loader=facts, loop=LoopGrowth(grown_bytes_per_step=8e6))
    _, fixes = memory_findings(memory, [rank], read_bytes=None)
    return {fix.id: fix.text for fix in fixes}


def test_a_cache_in_the_trainer_is_the_datasets_and_not_what_the_loop_keeps():
    # The trainer's own entries are Python objects that it holds.
    held = msgspec.structs.replace(NAMES, name="A.cache", container="dict", element="Tensor")
    kept = KeptObjects(name="A.cache", container="dict", element="Tensor", count_per_step=8.0)
    fixes = without_workers(
        growing=(CACHE,), objects=(held,), kept=(kept,), trainer_grown_bytes_per_step=8e6
    )
    assert list(fixes) == ["growing_cache"]
    assert fixes["growing_cache"].startswith("A.cache (dict) grows by 1.00 MB for each sample, 800")
    assert "bound it" in fixes["growing_cache"]
    assert "each has one for itself" not in fixes["growing_cache"]


def test_a_limit_that_only_slows_is_said_to():
    assert RANK.memory is not None
    memory = {"used_bytes": 950 * MB, "is_cgroups": True, "only_slows": True}
    seen = msgspec.structs.replace(RANK.memory, **memory)
    rank = msgspec.structs.replace(RANK, memory=seen)
    state, _ = memory_findings(memory_of([rank]), [rank], read_bytes=None)
    assert state is not None
    assert "950 MB of 1.00 GB, the container's memory.high, above which the kernel" in state.text


def test_swapping_is_a_limit():
    text, fixes = findings_of(swapped_bytes=80 * MB, swapped_bytes_per_second=5e6, **BELOW)
    assert "80.0 MB of trainers and workers are swapped out, and 5.00 MB a second go in" in text
    assert list(fixes) == ["swap"]


def test_what_takes_the_memory_is_named_where_the_kernel_swaps_before_the_limit_is_near():
    asked: dict[str, Any] = {"swapped_bytes": 80 * MB, "swapped_bytes_per_second": 5e6}
    text, fixes = findings_of(worker_private_bytes=150.0 * MB, **asked, **BELOW)
    assert list(fixes) == ["swap", "fewer_workers"]
    assert text.endswith(
        "go in and out; three loader workers x 150 MB, with the batches that they hold"
    )


def test_growth_of_a_worker_alone_counts_before_that_beside_others():
    growth = WorkerGrowth(samples=9, copied_bytes_per_sample=3, grown_bytes_per_sample=4)
    memory = memory_of([msgspec.structs.replace(RANK, worker_growth=growth)])
    assert memory is not None
    assert (memory.copied_bytes_per_sample, memory.grown_bytes_per_sample) == (3, 4)


def test_a_host_has_memory_for_so_many_workers():
    # 0.92 of 1 GB less 500 MB leave 420 MB; a worker takes 40 MB, and 20 MB of batches.
    memory = memory_with(worker_private_bytes=40.0 * MB, waiting_bytes=60 * MB)
    assert memory.most_workers == 3 + 7


def test_other_programs_that_fill_the_machine_are_named_and_not_the_loader():
    full: dict[str, Any] = {"used_bytes": 950 * MB, "trainer_bytes": 100 * MB, **BELOW}
    text, fixes = findings_of(worker_bytes=30.0 * MB, worker_private_bytes=20.0 * MB, **full)
    assert "are in use, 760 MB of them by other programs" in text
    assert fixes == {}
    # Of a group those count that were seen.
    text, _ = findings_of(limited_by="cgroup", **full)
    assert "other programs" not in text
    assert text
    seen: dict[str, Any] = {"group_others_bytes": 700 * MB, "largest_other": "jupyter"}
    text, _ = findings_of(limited_by="cgroup", **seen, **full)
    assert "are in use, 700 MB of them by other programs, most of it by jupyter: end those" in text
    # The run's own processes are what fills it.
    text, fixes = findings_of(worker_bytes=280.0 * MB, worker_private_bytes=250.0 * MB, **full)
    assert "other programs" not in text
    assert "three loader workers x 250 MB" in text


LOSSES = KeptObjects(
    name="losses in train()", container="list", element="Tensor", has_graph=True, count_per_step=1
)


HIDDEN = msgspec.structs.replace(LOSSES, name="hidden in train()", container="graph")
NODES = msgspec.structs.replace(LOSSES, name="Node.next", container="objects", element="Node")


@pytest.mark.parametrize(
    ("kept", "per_step", "words"),
    [
        ((LOSSES,), 2 * MB, "losses in train() (list) keeps a Tensor with its graph of each step"),
        ((msgspec.structs.replace(LOSSES, container="sum"),), 2 * MB, "add loss.item()"),
        ((msgspec.structs.replace(LOSSES, has_graph=False),), 2 * MB, "append a number (.item())"),
        ((HIDDEN,), 2 * MB, "hidden in train() is computed from that of the step before, and so k"),
        ((HIDDEN,), 2 * MB, "use hidden.detach() in the next step"),
        ((NODES,), 2 * MB, "Node objects, each with a graph, with each step, kept by Node.next"),
        ((msgspec.structs.replace(NODES, has_graph=False),), 2 * MB, "let go of those of earlier"),
        (
            (msgspec.structs.replace(NODES, name="Node"),),
            2 * MB,
            "there are more Node objects, each with a graph",
        ),
        # A step's graph of 10 kB is 1 MB in an epoch of 100 steps.
        ((LOSSES,), 10_000, ""),
        # Nothing is found, and an allocator may have taken as much.
        ((), 2 * MB, ""),
    ],
)
def test_what_a_loop_keeps_is_said_where_an_epoch_of_it_is_worth_it(kept, per_step, words):
    _, fixes = findings_of(kept=kept, trainer_grown_bytes_per_step=per_step, **BELOW)
    assert words in fixes.get("growing_trainer", "")
    assert bool(fixes) == bool(words)


@pytest.mark.parametrize(("seen", "is_named"), [(60 * MB, True), (20 * MB, False)])
def test_growth_that_nothing_explains_is_said_where_it_is_more_than_an_allocators(seen, is_named):
    loop = LoopGrowth(grown_bytes_per_step=2.0 * MB, seen_bytes=seen)
    rank = msgspec.structs.replace(RANK, loop=loop)
    memory = memory_of([rank])
    _, fixes = memory_findings(memory, [rank], read_bytes=None)
    texts = [fix.text for fix in fixes if fix.id == "growing_trainer"]
    assert bool(texts) is is_named
    assert all("something keeps memory of each step, and no list" in text for text in texts)


@pytest.mark.parametrize(
    ("samples", "seen_beside_others", "is_named"),
    [(200, 0, True), (20, 0, False), (20, 50 * MB, True)],
    ids=["much", "as caches of libraries fill", "much in the whole profile"],
)
def test_a_worker_that_grows_is_said_where_it_is_more_than_a_librarys_cache(
    samples, seen_beside_others, is_named
):
    # HDF5 keeps 8 MB of each data set that a worker reads, by default.
    growth = WorkerGrowth(samples=samples, copied_bytes_per_sample=0, grown_bytes_per_sample=4e5)
    assert RANK.memory is not None
    memory = msgspec.structs.replace(RANK.memory, grown_bytes=seen_beside_others)
    rank = msgspec.structs.replace(RANK, worker_growth=growth, memory=memory)
    _, fixes = memory_findings(memory_of([rank]), [rank], read_bytes=None)
    assert ("growing_worker" in {fix.id for fix in fixes}) is is_named


def test_a_buffer_of_a_stream_is_named_and_no_limit_as_it_may_end():
    # 160 MB were seen, all of them in gaps of pages that the worker inherited; an epoch has 640 MB.
    growing = msgspec.structs.replace(CACHE, name="buffer in __iter__()", element_bytes=800_000)
    growth = WorkerGrowth(
        samples=200, copied_bytes_per_sample=8e5, grown_bytes_per_sample=0, growing=(growing,)
    )
    rank = msgspec.structs.replace(RANK, worker_growth=growth)
    state, fixes = memory_findings(memory_of([rank]), [rank], read_bytes=None)
    text = next(fix.text for fix in fixes if fix.id == "growing_cache")
    assert text.startswith(
        "buffer in __iter__() (dict) grows by 800 kB for each sample, 640 MB in an"
    )
    assert "used up" not in text
    assert text.endswith("a shuffle buffer ends at its size")
    assert state is None
    # A small one is none, either.
    small = msgspec.structs.replace(growth, samples=20)
    rank = msgspec.structs.replace(RANK, worker_growth=small)
    _, fixes = memory_findings(memory_of([rank]), [rank], read_bytes=None)
    assert "growing_cache" not in {fix.id for fix in fixes}


@pytest.mark.parametrize(
    ("max_count", "words"), [(40, "80.0 MB until it is full"), (2, ""), (500, "epoch")]
)
def test_what_a_deque_holds_at_most_is_what_it_takes(max_count, words):
    kept = msgspec.structs.replace(LOSSES, container="deque", max_count=max_count)
    _, fixes = findings_of(kept=(kept,), trainer_grown_bytes_per_step=2.0 * MB, **BELOW)
    assert bool(fixes) == bool(words)
    assert words in fixes.get("growing_trainer", "")


def test_a_loop_that_fills_the_memory_in_its_first_epoch_is_a_limit():
    text, _ = findings_of(kept=(LOSSES,), trainer_grown_bytes_per_step=6.0 * MB, **BELOW)
    assert "the trainer grows by 6.00 MB a step, 600 MB in an epoch; 1.00 GB" in text


@pytest.mark.parametrize(("used", "is_named"), [(950, True), (500, False)])
def test_files_in_memory_are_named_where_it_is_short(used, is_named):
    files: dict[str, Any] = {"files_bytes": 600 * MB, "files_folder": "/dev/shm", **BELOW}
    text, fixes = findings_of(used_bytes=used * MB, **files)
    assert list(fixes) == ["memory_files"] * is_named
    if is_named:
        assert "600 MB of files are in /dev/shm, which is memory" in text
        assert "read the others from a disk" in fixes["memory_files"]
        # The files are no other program's.
        assert "other programs" not in text


NUMBERS = KeptObjects(name="scores in train()", container="list", element="float", count_per_step=9)


def test_numbers_that_a_loop_keeps_are_said_with_how_many_of_each_step():
    _, fixes = findings_of(kept=(NUMBERS,), trainer_grown_bytes_per_step=2.0 * MB, **BELOW)
    text = fixes["growing_trainer"]
    assert text.startswith("scores in train() (list) keeps 9 float of each step: the trainer grows")
    assert text.endswith("keep a sum or a mean of it, or write it to a file now and then")


@pytest.mark.parametrize(
    ("name", "container", "count", "cause", "fix"),
    [
        ("Linear._forward_hooks", "OrderedDict", 1.0, "keeps a function of each", "call remove()"),
        ("rows in train()", "Queue", 1.0, "keeps a function of each step", "give it a maxsize"),
        ("seen in train()", "list", 1 / 8, "keeps a function every 8 steps", "append a number"),
        ("LBFGS.old_dirs", "list", 1.0, "keeps a function of each step", "a smaller history_size"),
    ],
)
def test_what_helps_follows_from_what_keeps_it(name, container, count, cause, fix):
    kept = KeptObjects(name=name, container=container, element="function", count_per_step=count)
    _, fixes = findings_of(kept=(kept,), trainer_grown_bytes_per_step=2.0 * MB, **BELOW)
    assert cause in fixes["growing_trainer"]
    assert fix in fixes["growing_trainer"]


def steps_of(seconds: float) -> AsIs:
    """Returns steps of which each took so long."""
    step = Quartiles(mean=seconds, median=seconds, low=seconds, high=seconds, samples=1)
    return AsIs(
        step_seconds=step,
        wait_seconds=step,
        trainer_cpu_seconds=0.0,
        children_cpu_seconds=0.0,
        receive_seconds=0.0,
    )


def stream_findings(**asked: Any) -> tuple[str, dict[str, str]]:
    """Findings of a stream that does not say how long it is: 57,600 samples an hour."""
    assert RANK.loader is not None
    facts = msgspec.structs.replace(RANK.loader, persistent_workers=True)
    rank = msgspec.structs.replace(RANK, loader=facts, as_is=steps_of(0.5))
    memory = memory_with(epoch_samples=None, **asked, **BELOW)
    state, fixes = memory_findings(memory, [rank], read_bytes=None)
    return (state.text if state else ""), {fix.id: fix.text for fix in fixes}


def test_what_grows_of_a_stream_without_length_is_said_by_the_hour():
    state, fixes = stream_findings(growing=(CACHE,), grown_bytes_per_sample=1000.0)
    assert fixes["growing_cache"].startswith(
        "A.cache (dict) grows by 1.00 kB for each sample, 57.6 MB an hour; 1.00 GB, the machine's "
        "memory, is used up within nine hours: bound it"
    )
    assert not state
    state, _ = stream_findings(growing=(CACHE,), grown_bytes_per_sample=20_000.0)
    assert "1.15 GB an hour; 1.00 GB, the machine's memory, is used up within one hour" in state


def test_what_a_loop_keeps_of_a_stream_without_length_is_said_by_the_hour():
    _, fixes = stream_findings(kept=(LOSSES,), trainer_grown_bytes_per_step=20_000.0)
    assert "the trainer grows by 20.0 kB a step, " in fixes["growing_trainer"]
    assert " an hour: append loss.item()" in fixes["growing_trainer"]
    state, _ = stream_findings(kept=(LOSSES,), trainer_grown_bytes_per_step=6.0 * MB)
    assert "an hour; 1.00 GB, the machine's memory, is used up within one hour" in state


def test_a_stream_whose_speed_is_not_known_has_no_figure():
    rank = msgspec.structs.replace(RANK, as_is=None)
    memory = memory_with(epoch_samples=None, growing=(CACHE,), grown_bytes_per_sample=1e5, **BELOW)
    assert memory_findings(memory, [rank], read_bytes=None) == (None, [])


def test_a_bound_beyond_the_memory_is_no_bound():
    log = msgspec.structs.replace(
        CACHE, name="MemoryHandler.buffer", container="list", max_count=10**9
    )
    growing: dict[str, Any] = {"growing": (log,), "grown_bytes_per_sample": 50_000.0, **BELOW}
    _, fixes = findings_of(persistent=True, **growing)
    assert fixes["growing_cache"].startswith(
        "MemoryHandler.buffer (list) grows by 50.0 kB for each sample, 40.0 MB in an epoch; 1.00 "
        "GB, the machine's memory, is used up in epoch 13; its bound of 1,000,000,000 is beyond "
        "the machine's memory: bound it"
    )


def test_a_cache_whose_bound_is_beyond_the_samples_holds_all_of_them():
    cache = msgspec.structs.replace(CACHE, container="lru_cache", max_count=10**9)
    growing: dict[str, Any] = {"growing": (cache,), "grown_bytes_per_sample": 50_000.0, **BELOW}
    _, fixes = findings_of(persistent=True, **growing)
    assert fixes["growing_cache"] == (
        "A.cache (lru_cache) holds 1,000,000,000 at most: three workers x 40.0 MB once it has all "
        "samples: a limit of 400 saves 60.0 MB"
    )
