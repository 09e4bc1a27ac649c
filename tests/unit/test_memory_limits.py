"""The memory that this process may use: the smallest limit of its cgroup and those around it."""

import pytest

from stoker.host import machine

GIB = 1 << 30
# A file of memory in a made tree of cgroups, and what it holds.
TREES = {
    "version 2, of a pod around the container": (
        "0::/kubepods/pod1/main\n",
        {"kubepods/pod1/main/memory.max": "max", "kubepods/pod1/memory.max": f"{4 * GIB}"},
        4 * GIB,
    ),
    "version 2, of a slice around a service": (
        "0::/work.slice/train.service\n",
        {"work.slice/train.service/memory.max": f"{9 * GIB}", "work.slice/memory.max": f"{GIB}"},
        GIB,
    ),
    "version 2, its own is the smallest": (
        "0::/a/b\n",
        {"a/b/memory.max": f"{GIB}", "a/memory.max": f"{2 * GIB}"},
        GIB,
    ),
    "version 2, the root is the container's group": (
        "0::/kubepods/pod1/main\n",
        {"memory.max": f"{3 * GIB}"},
        3 * GIB,
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
    "both versions, the second mounted below": (
        "5:memory:/\n0::/job/part\n",
        {
            "memory/memory.limit_in_bytes": "9223372036854771712",
            "unified/job/memory.max": f"{2 * GIB}",
        },
        2 * GIB,
    ),
    "a group outside of what is mounted": ("0::/../other\n", {"memory.max": f"{GIB}"}, GIB),
    "none": ("0::/a\n", {"a/memory.max": "max"}, None),
    "no cgroups": ("", {}, None),
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
