"""Scripts that copy, hoard and leak on purpose are profiled, and the cause is named for each."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from stoker.profile.combine import combine
from stoker.profile.rank_results import read_ranks
from stoker.records import Profile, ProfileSettings, TodaysGroup
from support.local_job import until
from support.memory_limit import UNLIMITED, MemoryGroup, memory_limit, swap_file
from support.warm_python import WarmProcess, clean_environ

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "support" / "memory_script.py"
DEADLINE_SECONDS = 150.0
BUDGET_SECONDS = 12.0
BALLAST_MB = 150
MEMORY_FIXES = {
    *("copied_objects", "growing_cache", "growing_worker", "growing_trainer"),
    *("prefetch_factor", "fewer_workers", "page_cache", "swap", "memory_files"),
}


class Profiled:
    """A script that is being profiled."""

    def __init__(self, folder: Path, words: list[str], *, budget_seconds: float) -> None:
        self._folder = folder
        asked = f'{{"budget_seconds": {budget_seconds}}}'
        environ = clean_environ(STOKER_OUTPUT=str(folder), STOKER_PROFILE=asked)
        with self._log.open("ab") as log:
            self.process = WarmProcess([str(SCRIPT), *words], environ, log=log)

    @property
    def _log(self) -> Path:
        return self._folder / "log"

    def has_looked(self) -> bool:
        ranks = read_ranks(self._folder)
        return bool(ranks and ranks[0].memory)

    def profile(self) -> Profile:
        assert self.process.wait(DEADLINE_SECONDS) == 0, self._log.read_text()
        profile = combine(
            read_ranks(self._folder),
            group=TodaysGroup(instance_type="local.c2"),
            settings=ProfileSettings(),
            workload_sha256=None,
            what={},
        )
        print(profile.memory, profile.fixes, profile.states, profile.what["notes"], sep="\n")
        return profile


@pytest.fixture
def begin(tmp_path):
    with contextlib.ExitStack() as stack:

        def start(case: str, *, budget: float = BUDGET_SECONDS, **asked: object) -> Profiled:
            words = [f"case={case}", *(f"{name}={value}" for name, value in asked.items())]
            profiled = Profiled(tmp_path, words, budget_seconds=budget)
            stack.callback(profiled.process.wait)
            stack.callback(profiled.process.kill)
            return profiled

        yield start


def memory_fixes(profile: Profile) -> dict[str, str]:
    return {fix.id: fix.text for fix in profile.fixes if fix.id in MEMORY_FIXES}


def states_of(profile: Profile) -> dict[str, str]:
    return {state.id: state.text for state in profile.states}


# More than a 200th of the machine's memory, with both workers: less is not worth a line.
MANY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 25_000


@pytest.mark.parametrize(
    ("case", "named", "fix"),
    [
        ("list of paths", "ListOfPaths.paths, a list of", "one NumPy array of bytes"),
        ("dict of objects", "DictOfObjects.annotations, a dict of", "NumPy array, tensor or table"),
        # All are named, with what helps: tests/unit/test_profile_memory.py.
        pytest.param(
            *("columns of paths", "ColumnsOfPaths.columns['path'], a list of"),
            "NumPy array, tensor or",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            *("catalog of texts", "Catalog.texts, a list of", "NumPy array, tensor or table"),
            marks=pytest.mark.soak,
        ),
        pytest.param(
            *("list of dicts", "ListOfDicts.rows, a list of", "NumPy array, tensor or table"),
            marks=pytest.mark.soak,
        ),
        pytest.param(
            *("object column", "ObjectColumn.table['path'], a DataFrame of", "an array of pyarrow"),
            marks=pytest.mark.soak,
        ),
    ],
)
def test_python_objects_that_each_worker_copies_are_named(begin, case, named, fix):
    if case == "object column":
        pytest.importorskip("pandas")
    samples = MANY if "NumPy array of" in fix or "pyarrow" in fix[-7:] else MANY // 2
    profile = begin(case, samples=samples).profile()
    assert set(memory_fixes(profile)) == {"copied_objects"}
    text = memory_fixes(profile)["copied_objects"]
    assert named in text
    assert fix in text
    assert "two workers x " in text
    assert "saves up to " in text


@pytest.mark.parametrize(
    ("case", "name", "fix"),
    [
        ("lru_cache", "CachedGetitem.__getitem__ (lru_cache) grows by", "maxsize"),
        ("own cache", "OwnCache.cache (dict) grows by", "bound it"),
        ("global cache", "KEPT_BY_ALL (dict) grows by", "bound it"),
        ("growing list", "GrowingList.seen (list) grows by", "bound it"),
    ],
)
def test_a_cache_that_grows_is_named_with_what_an_epoch_takes(begin, case, name, fix):
    profile = begin(case, samples=MANY, width=1000, persistent="yes").profile()
    assert set(memory_fixes(profile)) == {"growing_cache"}
    text = memory_fixes(profile)["growing_cache"]
    assert text.startswith(name)
    assert "in an epoch" in text
    assert fix in text


def test_a_cache_without_workers_is_the_datasets(begin):
    profile = begin("own cache", samples=MANY, width=1000, workers=0).profile()
    assert set(memory_fixes(profile)) == {"growing_cache"}
    text = memory_fixes(profile)["growing_cache"]
    assert text.startswith("OwnCache.cache (dict) grows by")
    assert text.endswith("bound it, or keep it in a file")


@pytest.mark.soak
def test_elements_that_keep_what_was_read_of_them_are_named(begin):
    profile = begin("lazy episodes", samples=MANY // 2, width=5000, persistent="yes").profile()
    # The objects themselves are copied as they are read, too.
    assert set(memory_fixes(profile)) <= {"growing_cache", "copied_objects"}
    text = memory_fixes(profile)["growing_cache"]
    assert text.startswith("the elements of LazyEpisodes.episodes (list) keep ")
    assert "open or load it in __getitem__" in text


def test_what_a_collate_function_keeps_of_each_batch_is_named(begin):
    asked = {"width": 1000, "collate": "keeps", "persistent": "yes"}
    profile = begin("plain", samples=MANY, **asked).profile()
    assert set(memory_fixes(profile)) == {"growing_cache"}
    text = memory_fixes(profile)["growing_cache"]
    assert text.startswith("KeepingCollate.batches (list) grows by")


def test_a_leak_in_c_is_named_with_the_epoch_that_it_ends_in(begin):
    profile = begin("leak in C", samples=MANY, persistent="yes").profile()
    assert set(memory_fixes(profile)) == {"growing_worker"}
    text = memory_fixes(profile)["growing_worker"]
    assert text.startswith("a worker grows by 20.0 kB for each sample, and nothing of its dataset")
    assert "is used up in epoch " in text
    assert "persistent_workers=False frees it after each epoch" in text


@pytest.mark.parametrize(
    ("keeps", "cause", "fix"),
    [
        ("losses", "losses in train() (list) keeps a Tensor with its graph", "loss.item()"),
        ("total", "total in train() is a sum of tensors, each with its graph", "loss.item()"),
        ("attribute", "History.outputs['train'] (list) keeps a Tensor of each", "(.item())"),
        # As of the words: tests/unit/test_profile_memory.py, and of what is kept: test_loop_growth.
        pytest.param(
            *("scores", "scores in train() (list) keeps 20", "keep a sum or a mean of it"),
            marks=pytest.mark.soak,
        ),
        pytest.param(
            *("joined", "joined in train() (Tensor) becomes longer with each step", "its mean"),
            marks=pytest.mark.soak,
        ),
    ],
)
def test_what_the_loop_keeps_of_each_step_is_named(begin, keeps, cause, fix):
    profile = begin("plain", samples=MANY, width=2000, keeps=keeps).profile()
    assert set(memory_fixes(profile)) == {"growing_trainer"}
    text = memory_fixes(profile)["growing_trainer"]
    assert text.startswith(cause)
    assert " a step, " in text
    assert " in an epoch" in text
    assert fix in text


@pytest.mark.parametrize("keeps", ["numbers", "warm-up"])
def test_a_loop_that_keeps_numbers_or_its_first_steps_is_no_finding(begin, keeps):
    profile = begin("plain", samples=MANY, width=2000, keeps=keeps).profile()
    assert memory_fixes(profile) == {}
    assert "memory" not in states_of(profile)


def test_a_large_prefetch_factor_is_named_with_what_it_takes(begin):
    with memory_limit(3_000_000_000) as group:
        profile = begin("plain", width=40_000, prefetch=20, group=group.folder).profile()
    assert profile.memory is not None
    assert profile.memory.limited_by == "cgroup"
    text = memory_fixes(profile)["prefetch_factor"]
    assert "320 MB of batches wait: two workers x 20 (prefetch_factor) x 8.00 MB" in text
    assert "prefetch_factor=2 keeps 32.0 MB: saves 288 MB" in text


def is_steady(group: MemoryGroup) -> bool:
    before = group.held_bytes()
    time.sleep(0.5)
    return before > 4 * BALLAST_MB * 1e6 and abs(group.held_bytes() - before) < 0.01 * before


def profile_near_limit(profiled: Profiled, group: MemoryGroup, *, processes: int) -> Profile:
    """Returns a profile in which memory is short while the steps run as they are.

    Args:
        profiled: Its processes are in the group.
        group: Has no limit yet.
        processes: Of the group, once all workers run.
    """
    until(lambda: group.num_processes() >= processes, what="all workers have begun")
    until(lambda: is_steady(group), what="all processes hold what they hold")
    group.limit(int(1.06 * group.held_bytes()))
    until(profiled.has_looked, what="the steps as they are have ended")
    group.limit(UNLIMITED)
    profile = profiled.profile()
    assert group.num_kills() == 0
    return profile


@pytest.mark.alone
def test_workers_that_take_the_memory_near_its_limit_are_named(begin):
    with memory_limit() as group:
        # Long enough that a look comes after the limit, also on a busy machine.
        asked = {"workers": 4, "prefetch": 2, "ballast_mb": BALLAST_MB, "group": group.folder}
        profiled = begin("plain", budget=3 * BUDGET_SECONDS, width=10_000, **asked)
        profile = profile_near_limit(profiled, group, processes=5)
    assert "four loader workers x " in memory_fixes(profile)["fewer_workers"]
    assert "num_workers=2" in memory_fixes(profile)["fewer_workers"]
    assert "the container's limit, are in use; four loader workers" in states_of(profile)["memory"]
    assert profile.states[0].id == "memory"


OTHER = """
import sys
held = bytearray(b"1") * 700_000_000
sys.stdin.read()
"""


@contextlib.contextmanager
def other_program(group: MemoryGroup) -> Iterator[None]:
    """A program in a group, which holds 700 MB there, as a notebook in a container does."""
    join = f"echo $$ > {group.folder}/cgroup.procs; exec {sys.executable} -c '{OTHER}'"
    process = subprocess.Popen(["sh", "-c", join], stdin=subprocess.PIPE)
    try:
        until(lambda: group.held_bytes() > 7e8, what="the other program holds what it holds")
        yield
    finally:
        process.communicate()


@pytest.mark.alone
def test_another_program_of_the_container_is_named_and_no_loader(begin):
    with memory_limit() as group, other_program(group):
        profiled = begin("plain", budget=3 * BUDGET_SECONDS, group=group.folder)
        profile = profile_near_limit(profiled, group, processes=4)
    assert "of them by other programs, most of it by python" in states_of(profile)["memory"]
    assert memory_fixes(profile) == {}
    assert profile.memory is not None
    assert profile.memory.group_others_bytes == pytest.approx(7e8, rel=0.05)


# Such files are found: contract/test_memory_holders.py; and named: unit/test_profile_memory.py.
@pytest.mark.soak
@pytest.mark.alone
def test_files_that_a_script_copies_to_memory_are_named(begin):
    copy = Path(f"/dev/shm/stoker-copy-{os.getpid()}")
    try:
        with memory_limit() as group:
            asked = {"group": group.folder, "copied_to": copy}
            profiled = begin("plain", budget=3 * BUDGET_SECONDS, **asked)
            profile = profile_near_limit(profiled, group, processes=3)
            copy.unlink()
    finally:
        copy.unlink(missing_ok=True)
    text = memory_fixes(profile)["memory_files"]
    assert text.startswith("700 MB of files are in /dev/shm, which is memory: delete those that")
    assert "700 MB of files are in /dev/shm" in states_of(profile)["memory"]


@pytest.mark.root
@pytest.mark.alone
def test_workers_that_wait_for_swap_are_named(begin, tmp_path):
    is_limited = tmp_path / "is_limited"
    with swap_file(tmp_path, 600_000_000), memory_limit() as group:
        asked = {"ballast_mb": BALLAST_MB, "group": group.folder, "waits_for": is_limited}
        profiled = begin("reads ballast", **asked)
        until(lambda: group.held_bytes() > 2 * BALLAST_MB * 1e6, what="both workers hold theirs")
        group.limit(int(0.75 * group.held_bytes()))
        is_limited.touch()
        until(profiled.has_looked, what="the steps as they are have ended")
        group.limit(UNLIMITED)
        profile = profiled.profile()
        assert group.num_kills() == 0
    text = memory_fixes(profile)["swap"]
    assert " of trainers and workers are swapped out, and " in text
    assert " a second go in and out" in text
    assert profile.states[0].id == "memory"
    assert text.split(":")[0] in states_of(profile)["memory"]


def drop_from_page_cache(file: Path) -> None:
    """Drops pages that count for the group of this process, which wrote them."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def test_files_that_do_not_fit_into_the_page_cache_are_named(begin, tmp_path):
    file = tmp_path / "values"
    samples = 20_000
    np.random.default_rng(0).integers(0, 255, samples * 40_000, dtype=np.uint8).tofile(file)
    drop_from_page_cache(file)
    with memory_limit(600_000_000) as group:
        asked = {"samples": samples, "file": file, "group": group.folder, "read_first": "yes"}
        profile = begin("more than the page cache", **asked).profile()
    text = memory_fixes(profile)["page_cache"]
    assert "a second are read again that the page cache had just thrown out" in text


@pytest.mark.parametrize("case", ["one array", "one tensor", "bounded cache"])
def test_arrays_tensors_and_a_cache_that_ends_are_no_finding(begin, case):
    profile = begin(case, samples=MANY, width=64, persistent="yes").profile()
    assert memory_fixes(profile) == {}
    assert "memory" not in states_of(profile)


def test_a_memory_map_is_no_finding(begin, tmp_path):
    file = tmp_path / "values"
    np.zeros(20_000 * 2000, dtype=np.uint8).tofile(file)
    profile = begin("memory map", samples=20_000, file=file).profile()
    assert memory_fixes(profile) == {}
    assert "memory" not in states_of(profile)
