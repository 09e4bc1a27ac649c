"""Scripts that copy, hoard and leak on purpose are profiled, and the cause is named for each.

Most are looked at as by a profile, without its other phases (`support/memory_looks.py`); a whole
profile has all of it, and `make soak` has more.
"""

import contextlib
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest

from stoker.profile.combine import combine
from stoker.profile.memory.findings import memory_findings, memory_of
from stoker.profile.rank_results import RankResult, read_ranks
from stoker.records import Profile, ProfiledMemory, ProfileSettings, TodaysGroup
from support.local_job import until
from support.memory_limit import MemoryGroup, memory_limit, swap_file
from support.warm_python import WarmProcess, clean_environ

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "support" / "memory_script.py"
LOOKS = SCRIPT.with_name("memory_looks.py")
DEADLINE_SECONDS = 150.0
BUDGET_SECONDS = 12.0
BALLAST_MB = 150
MEMORY_FIXES = {
    *("copied_objects", "growing_cache", "growing_worker", "growing_trainer"),
    *("prefetch_factor", "fewer_workers", "page_cache", "swap", "memory_files"),
}
TABLE = "NumPy array, tensor or table"
# A worker reads 20,000 samples, each of them on another page.
MANY = 400_000


class Profiled:
    """A script that is being profiled."""

    def __init__(self, folder: Path, words: list[str]) -> None:
        self._folder = folder
        asked = f'{{"budget_seconds": {BUDGET_SECONDS}}}'
        environ = clean_environ(STOKER_OUTPUT=str(folder), STOKER_PROFILE=asked)
        with self._log.open("ab") as log:
            self.process = WarmProcess([str(SCRIPT), *words], environ, log=log)

    @property
    def _log(self) -> Path:
        return self._folder / "log"

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

        def start(case: str, **asked: object) -> Profiled:
            words = [f"case={case}", *(f"{name}={value}" for name, value in asked.items())]
            profiled = Profiled(tmp_path, words)
            stack.callback(profiled.process.wait)
            stack.callback(profiled.process.kill)
            return profiled

        yield start


def memory_fixes(profile: Profile) -> dict[str, str]:
    return {fix.id: fix.text for fix in profile.fixes if fix.id in MEMORY_FIXES}


def states_of(profile: Profile) -> dict[str, str]:
    return {state.id: state.text for state in profile.states}


class LookedAt:
    """A script whose memory is looked at, but that is not profiled."""

    def __init__(self, folder: Path, words: list[str]) -> None:
        self._file = folder / "result"
        self._log = folder / "log"
        with self._log.open("ab") as log:
            asked = [str(LOOKS), *words, f"result={self._file}"]
            self.process = WarmProcess(asked, clean_environ(), log=log)

    def seen(self) -> RankResult:
        assert self.process.wait(DEADLINE_SECONDS) == 0, self._log.read_text()
        return msgspec.json.decode(self._file.read_bytes(), type=RankResult)


@dataclass(frozen=True)
class Findings:
    """What a profile would say of a memory.

    Attributes:
        state: Words of the state; empty: memory limits nothing.
        fixes: Words by the fix.
    """

    state: str
    fixes: dict[str, str]
    memory: ProfiledMemory


def findings_of(result: RankResult) -> Findings:
    memory = memory_of([result])
    assert memory is not None
    state, fixes = memory_findings(memory, [result], read_bytes=None)
    print(memory, state, fixes, sep="\n")
    return Findings(state.text if state else "", {fix.id: fix.text for fix in fixes}, memory)


def on_small_host(result: RankResult) -> RankResult:
    """Returns what was seen as of a machine of 1 GB, on which less is worth a line."""
    assert result.memory is not None
    memory = msgspec.structs.replace(result.memory, limit_bytes=10**9, used_bytes=3 * 10**8)
    return msgspec.structs.replace(result, memory=memory)


@pytest.fixture
def look(tmp_path):
    """Starts a script, whose memory is looked at."""
    with contextlib.ExitStack() as stack:

        def start(case: str, **asked: object) -> LookedAt:
            asked = {"model_ms": 8, **asked}
            words = [f"case={case}", *(f"{name}={value}" for name, value in asked.items())]
            looked_at = LookedAt(tmp_path, words)
            stack.callback(looked_at.process.wait)
            stack.callback(looked_at.process.kill)
            return looked_at

        yield start


@pytest.fixture
def found(look):
    """Returns what is said of a script's memory on a machine of 1 GB."""

    def find(case: str, **asked: object) -> Findings:
        return findings_of(on_small_host(look(case, **asked).seen()))

    return find


@pytest.fixture
def found_each(look):
    """Returns what is said of each thing that a script holds or keeps, as if it were alone."""

    def find(case: str, what: str, **asked: object) -> list[Findings]:
        result = on_small_host(look(case, **asked).seen())
        if what == "held_objects":
            of_each = [{what: (held,)} for held in result.held_objects]
            return [findings_of(msgspec.structs.replace(result, **one)) for one in of_each]
        around, field = what.split(".")
        part = getattr(result, around)
        parts = [msgspec.structs.replace(part, **{field: (one,)}) for one in getattr(part, field)]
        return [findings_of(msgspec.structs.replace(result, **{around: one})) for one in parts]

    return find


def copies(findings: Findings) -> str:
    assert set(findings.fixes) == {"copied_objects"}
    text = findings.fixes["copied_objects"]
    assert "two workers x " in text
    assert "saves up to " in text
    return text


# In one script: a worker that copies copies of all.
MANY_COPIES = [
    ("ListOfPaths.paths, a list of", "one NumPy array of bytes"),
    ("DictOfObjects.annotations, a dict of", TABLE),
    ("ObjectColumn.table['path'], a DataFrame of", "an array of pyarr"),
]


def test_python_objects_that_each_worker_copies_are_named(found_each):
    # On a busy machine, too, a worker looks at itself after many batches.
    asked = {"samples": MANY // 2, "batch": 10}
    texts = [copies(found) for found in found_each("many copies", "held_objects", **asked)]
    expected = MANY_COPIES
    if importlib.util.find_spec("pandas") is None:
        expected = MANY_COPIES[:-1]
    for named, fix in expected:
        (text,) = (text for text in texts if named in text)
        assert fix in text


@pytest.mark.soak
@pytest.mark.parametrize(
    ("case", "samples", "named"),
    [
        # All are named, with what helps: tests/unit/test_profile_memory.py.
        ("columns of paths", MANY // 2, "ColumnsOfPaths.columns['path'], a list of"),
        ("catalog of texts", MANY // 2, "Catalog.texts, a list of"),
        ("list of dicts", MANY // 4, "ListOfDicts.rows, a list of"),
    ],
)
def test_other_python_objects_that_each_worker_copies_are_named(found, case, samples, named):
    text = copies(found(case, samples=samples))
    assert named in text
    assert TABLE in text


MANY_CACHES = [
    ("CachedGetitem.__getitem__ (lru_cache) grows by", "maxsize"),
    ("ManyCaches.cache (dict) grows by", "bound it"),
    ("KEPT_BY_ALL (dict) grows by", "bound it"),
    ("GrowingList.seen (list) grows by", "bound it"),
]


def test_caches_that_grow_are_named_with_what_an_epoch_takes(found_each):
    asked = {"width": 1000, "persistent": "yes"}
    all_found = found_each("many caches", "worker_growth.growing", **asked)
    assert all(set(found.fixes) == {"growing_cache"} for found in all_found)
    texts = [found.fixes["growing_cache"] for found in all_found]
    assert all("in an epoch" in text for text in texts)
    for name, fix in MANY_CACHES:
        (text,) = (text for text in texts if text.startswith(name))
        assert fix in text


def test_a_cache_without_workers_is_the_datasets(found):
    findings = found("own cache", width=1000, workers=0)
    assert set(findings.fixes) == {"growing_cache"}
    text = findings.fixes["growing_cache"]
    assert text.startswith("OwnCache.cache (dict) grows by")
    assert text.endswith("bound it, or keep it in a file")


def test_elements_that_keep_what_was_read_of_them_are_named(found):
    findings = found("lazy episodes", width=5000, persistent="yes")
    # The objects themselves are copied as they are read, too.
    assert set(findings.fixes) <= {"growing_cache", "copied_objects"}
    text = findings.fixes["growing_cache"]
    assert text.startswith("the elements of LazyEpisodes.episodes (list) keep ")
    assert "open or load it in __getitem__" in text


def test_what_a_collate_function_keeps_of_each_batch_is_named(found):
    findings = found("plain", width=1000, collate="keeps", persistent="yes")
    assert set(findings.fixes) == {"growing_cache"}
    text = findings.fixes["growing_cache"]
    assert text.startswith("KeepingCollate.batches (list) grows by")


def test_a_leak_in_c_is_named_with_the_epoch_that_it_ends_in(look):
    result = look("leak in C", persistent="yes").seen()
    growth = result.worker_growth
    assert growth is not None
    # A usual profile looks at it for 5 s: more than what caches of libraries take is seen.
    growth = msgspec.structs.replace(growth, samples=20 * growth.samples)
    findings = findings_of(on_small_host(msgspec.structs.replace(result, worker_growth=growth)))
    assert set(findings.fixes) == {"growing_worker"}
    text = findings.fixes["growing_worker"]
    assert text.startswith("a worker grows by 20.")
    assert " kB for each sample, and nothing of its dataset does" in text
    assert "is used up in epoch " in text
    assert "persistent_workers=False frees it after each epoch" in text


def of_the_loop(findings: Findings) -> str:
    assert set(findings.fixes) == {"growing_trainer"}
    text = findings.fixes["growing_trainer"]
    assert " a step, " in text
    assert " in an epoch" in text
    return text


MANY_KEPT = [
    ("losses in train() (list) keeps a Tensor with its graph", "loss.item()"),
    ("total in train() is a sum of tensors, each with its graph", "loss.item()"),
    ("History.outputs['train'] (list) keeps a Tensor of each", "(.item())"),
]


def test_what_the_loop_keeps_of_each_step_is_named(found_each):
    all_found = found_each("plain", "loop.kept", width=2000, keeps="losses+total+attribute")
    texts = [of_the_loop(found) for found in all_found]
    for cause, fix in MANY_KEPT:
        (text,) = (text for text in texts if text.startswith(cause))
        assert fix in text


@pytest.mark.soak
@pytest.mark.parametrize(
    ("keeps", "cause", "fix"),
    [
        # As of the words: tests/unit/test_profile_memory.py, and of what is kept: test_loop_growth.
        ("scores", "scores in train() (list) keeps 20", "keep a sum or a mean of it"),
        ("joined", "joined in train() (Tensor) becomes longer with each step", "its mean"),
    ],
)
def test_what_else_the_loop_keeps_of_each_step_is_named(found, keeps, cause, fix):
    text = of_the_loop(found("plain", width=2000, keeps=keeps))
    assert text.startswith(cause)
    assert fix in text


def test_a_profile_names_all_that_takes_memory_and_that_first(begin):
    # What an epoch adds does not fit.
    with memory_limit(4_000_000_000) as group:
        asked = {"samples": 2 * MANY, "width": 1000, "persistent": "yes", "group": group.folder}
        profile = begin("copies and caches", keeps="losses", model_ms=10, **asked).profile()
        assert group.num_kills() == 0
    assert profile.memory is not None
    assert profile.memory.limited_by == "cgroup"
    fixes = memory_fixes(profile)
    assert set(fixes) == {"copied_objects", "growing_cache", "growing_trainer"}
    assert "CopiesAndCaches.paths, a list of" in fixes["copied_objects"]
    assert fixes["growing_cache"].startswith("CopiesAndCaches.cache (dict) grows by")
    assert fixes["growing_trainer"].startswith("losses in train() (list) keeps a Tensor with its")
    assert profile.states[0].id == "memory"


def mapped_file(folder: Path, num_bytes: int) -> Path:
    file = folder / "values"
    np.zeros(num_bytes, dtype=np.uint8).tofile(file)
    return file


# Its looks: test_what_does_not_grow_is_no_finding. That a profile has what they find: above.
@pytest.mark.soak
def test_a_profile_of_a_script_that_keeps_nothing_has_no_finding(begin, tmp_path):
    file = mapped_file(tmp_path, 20_000 * 2000)
    asked = {"samples": 20_000, "persistent": "yes", "file": file, "keeps": "warm-up"}
    with memory_limit(4_000_000_000) as group:
        profile = begin("keeps nothing", group=group.folder, **asked).profile()
    assert memory_fixes(profile) == {}
    assert "memory" not in states_of(profile)


def test_what_does_not_grow_is_no_finding(found, tmp_path):
    # Arrays, tensors, a memory map, a cache that ends, and a loop that keeps numbers and its first
    # steps. Each alone: `make soak`.
    file = mapped_file(tmp_path, 20_000 * 2000)
    asked = {"samples": 20_000, "persistent": "yes", "file": file, "keeps": "numbers+warm-up"}
    findings = found("keeps nothing", **asked)
    assert (findings.fixes, findings.state) == ({}, "")


@pytest.mark.soak
@pytest.mark.parametrize("case", ["one array", "one tensor", "bounded cache", "memory map"])
def test_arrays_tensors_and_a_cache_that_ends_are_no_finding(found, tmp_path, case):
    asked: dict[str, object] = {"samples": MANY, "persistent": "yes"}
    if case == "memory map":
        asked = {"samples": 20_000, "file": mapped_file(tmp_path, 20_000 * 2000)}
    findings = found(case, **asked)
    assert (findings.fixes, findings.state) == ({}, "")


@pytest.mark.soak
@pytest.mark.parametrize("keeps", ["numbers", "warm-up"])
def test_a_loop_that_keeps_numbers_or_its_first_steps_is_no_finding(found, keeps):
    findings = found("plain", width=2000, keeps=keeps)
    assert (findings.fixes, findings.state) == ({}, "")


def test_a_large_prefetch_factor_is_named_with_what_it_takes(look):
    with memory_limit(3_000_000_000) as group:
        looked_at = look("plain", width=40_000, prefetch=20, group=group.folder, growth="no")
        findings = findings_of(looked_at.seen())
    assert findings.memory.limited_by == "cgroup"
    text = findings.fixes["prefetch_factor"]
    assert "320 MB of batches wait: two workers x 20 (prefetch_factor) x 8.00 MB" in text
    assert "prefetch_factor=2 keeps 32.0 MB: saves 288 MB" in text


def is_steady(group: MemoryGroup) -> bool:
    before = group.held_bytes()
    time.sleep(0.3)
    return before > 5e6 and abs(group.held_bytes() - before) < 0.01 * before


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


@pytest.fixture
def look_near_limit(look, tmp_path):
    """Starts a script in a group, limits it once the script holds all, and says what was seen."""

    def find(
        group: MemoryGroup,
        *,
        case: str = "plain",
        limit: Callable[[int], float],
        swaps: bool = False,
        **asked: object,
    ) -> Findings:
        is_limited = tmp_path / "is-limited"
        asked = {"waits_for": is_limited, "group": group.folder, "growth": "no", **asked}
        looked_at = look(case, **asked)
        waits = is_limited.with_name("waits")
        try:
            until(waits.exists, what="each worker has made a batch")
            until(lambda: is_steady(group), what="all processes hold what they hold")
            set_limit = group.squeeze if swaps else group.limit
            set_limit(int(limit(group.held_bytes())))
            is_limited.touch()
            findings = findings_of(looked_at.seen())
        finally:
            # The group ends before the script's fixture does.
            looked_at.process.kill()
        assert group.num_kills() == 0
        return findings

    return find


def near(held_bytes: int) -> float:
    return 1.06 * held_bytes


def test_workers_that_take_the_memory_near_its_limit_are_named(look_near_limit):
    with memory_limit() as group:
        asked = {"workers": 4, "ballast_mb": BALLAST_MB}
        findings = look_near_limit(group, limit=near, **asked)
    assert "four loader workers x " in findings.fixes["fewer_workers"]
    assert "num_workers=2" in findings.fixes["fewer_workers"]
    assert "the container's limit, are in use; four loader workers" in findings.state


def test_another_program_of_the_container_is_named_and_no_loader(look_near_limit):
    with memory_limit() as group, other_program(group):
        findings = look_near_limit(group, limit=near)
    assert "of them by other programs, most of it by python" in findings.state
    assert findings.fixes == {}
    assert findings.memory.group_others_bytes == pytest.approx(7e8, rel=0.05)


def test_files_that_a_script_copies_to_memory_are_named(look_near_limit):
    copy = Path(f"/dev/shm/stoker-copy-{os.getpid()}")
    try:
        with memory_limit() as group:
            findings = look_near_limit(group, limit=near, copied_to=copy)
            copy.unlink()
    finally:
        copy.unlink(missing_ok=True)
    text = findings.fixes["memory_files"]
    assert text.startswith("700 MB of files are in /dev/shm, which is memory: delete those that")
    assert "700 MB of files are in /dev/shm" in findings.state


@pytest.mark.root
@pytest.mark.alone
def test_workers_that_wait_for_swap_are_named(look_near_limit, tmp_path):
    with swap_file(tmp_path, 600_000_000), memory_limit() as group:
        group.let_swap("max")
        asked = {"case": "reads ballast", "ballast_mb": BALLAST_MB, "seconds": 3}
        findings = look_near_limit(group, limit=lambda held: 0.75 * held, swaps=True, **asked)
    text = findings.fixes["swap"]
    assert " of trainers and workers are swapped out, and " in text
    assert " a second go in and out" in text
    assert text.split(":")[0] in findings.state


def drop_from_page_cache(file: Path) -> None:
    """Drops pages that count for the group of this process, which wrote them."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def test_files_that_do_not_fit_into_the_page_cache_are_named(look_near_limit, tmp_path):
    file = tmp_path / "values"
    samples = 4000
    np.random.default_rng(0).integers(0, 255, samples * 40_000, dtype=np.uint8).tofile(file)
    drop_from_page_cache(file)
    with memory_limit() as group:
        asked = {"samples": samples, "file": file, "read_first": "yes", "seconds": 2}
        asked |= {"case": "more than the page cache"}
        findings = look_near_limit(group, limit=lambda held: held + 5e7, **asked)
    text = findings.fixes["page_cache"]
    assert "a second are read again that the page cache had just thrown out" in text
