"""Fewer batches wait where memory is nearly used up, and all again once there is room."""

import msgspec
import pytest

from stoker.feed.memory import MemoryBrake, killed_words
from stoker.host import machine
from stoker.host.usage import MemoryUse
from stoker.record_words import memory_cause, training_words
from stoker.records import HostMemory, Job
from support import sample_records

GB = 1_000_000_000


def brake_of(*shares: float | None) -> MemoryBrake:
    """A brake that sees these shares of 10 GB in use, one each time it looks."""
    left = iter(shares)

    def look() -> MemoryUse | None:
        share = next(left)
        return None if share is None else MemoryUse(int(share * 10 * GB), 10 * GB, is_cgroups=True)

    return MemoryBrake(look=look)


def test_it_holds_from_92_percent_on_until_less_than_80_are_in_use():
    brake = brake_of(0.5, None, 0.91, 0.93, 0.85, 0.81, 0.79, 0.95)
    shares = []
    for _ in range(8):
        brake.tick()
        shares.append(brake.share)
    assert shares == [1, 1, 1, 1 / 16, 1 / 16, 1 / 16, 1, 1 / 16]


@pytest.mark.parametrize(
    ("code", "kills", "words"),
    [
        (-9, 5, "; since it started, the kernel has killed 2 processes of this host for memory"),
        (-9, 3, ""),
        (-15, 5, ""),
    ],
)
def test_a_process_that_the_kernel_killed_for_memory_is_named(code, kills, words, monkeypatch):
    monkeypatch.setattr(machine, "num_memory_kills", lambda: kills)
    monkeypatch.setattr(machine, "limit_bytes", lambda: 10 * GB)
    said = killed_words(code, kills_before=3)
    assert said.startswith(words)
    assert bool(said) == bool(words)
    assert killed_words(code, kills_before=None) == ""


# The memory that this process may use: the smallest limit of its cgroup and those around it.


GIB = 1 << 30
# A file of memory in a made tree of cgroups, and what it holds.
TREES = {
    "version 2, of a pod around the container": (
        "0::/kubepods/pod1/main\n",
        {"kubepods/pod1/main/memory.max": "max", "kubepods/pod1/memory.max": f"{4 * GIB}"},
        4 * GIB,
    ),
    "version 1, of a parent": (
        "5:memory:/user/job\n2:cpu,cpuacct:/user\n",
        {
            "memory/user/job/memory.limit_in_bytes": "9223372036854771712",
            "memory/user/memory.limit_in_bytes": f"{2 * GIB}",
            "memory/memory.limit_in_bytes": "9223372036854771712",
        },
        2 * GIB,
    ),
    "none": ("0::/a\n", {"a/memory.max": "max"}, None),
}


@pytest.mark.parametrize(("membership", "files", "expected"), TREES.values(), ids=TREES)
def test_the_smallest_limit_around_a_process_counts(
    membership, files, expected, tmp_path, monkeypatch
):
    root = tmp_path / "cgroup"
    root.mkdir()
    (tmp_path / "membership").write_text(membership)
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.setattr(machine, "CGROUP", root)
    monkeypatch.setattr(machine, "MEMBERSHIP", tmp_path / "membership")
    assert machine.limit_bytes() == expected


def test_kills_are_those_of_the_nearest_group(tmp_path, monkeypatch):
    for name, kills in (("a/b", 2), ("a", 5)):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "memory.events").write_text(f"oom 1\noom_kill {kills}\n")
    (tmp_path / "membership").write_text("0::/a/b\n")
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    monkeypatch.setattr(machine, "MEMBERSHIP", tmp_path / "membership")
    assert machine.num_memory_kills() == 2


# How near a run's hosts came to their limit of memory: what is looked at, recorded and said.


replace = msgspec.structs.replace


def with_memory(*hosts):
    record = sample_records.training()
    return replace(record, memory=hosts, job=Job(platform="aws", name="one"))


def memory_of(**changes):
    usual = HostMemory(host="algo-2", limit_bytes=16 * GB, peak_bytes=4 * GB)
    return replace(usual, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"peak_bytes": 15 * GB},
            "15.0 GB of 16.0 GB in use on algo-2",
        ),
        ({"kills": 2}, "the kernel killed 2 processes for memory"),
    ],
)
def test_what_is_felt_of_short_memory_is_said(changes, words):
    training = with_memory(memory_of(host="algo-1"), memory_of(**changes))
    assert words in memory_cause(training)
    assert f"memory was short: {memory_cause(training)}" in training_words(training)
