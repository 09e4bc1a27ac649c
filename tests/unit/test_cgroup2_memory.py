"""Memory of control groups of version 2, whose files have what the kernel's documentation lists."""

import psutil
import pytest

from stoker import doctor
from stoker.feed.memory_guard import MemoryGuard, killed_words
from stoker.host import machine, memory_usage
from stoker.host.memory_usage import (
    MemoryUse,
    group_shared_bytes,
    memory_use,
    memory_uses,
    paging,
    swap_room_bytes,
)
from stoker.profile.loader_phases import room_for_batches
from stoker.profile.memory.watch import MemoryWatch

GIB = 1 << 30
MIB = 1 << 20
PAGE = 4096

# Figures that nothing here reads stand for those that nothing may read by mistake.
STAT = """anon {anon}
file {file}
kernel 309641216
kernel_stack 1114112
pagetables 8421376
sec_pagetables 0
percpu 12432
sock 0
vmalloc 16384
shmem {shmem}
zswap 0
zswapped 0
file_mapped 53579776
file_dirty 0
file_writeback 0
swapcached 0
anon_thp 0
file_thp 0
shmem_thp 0
inactive_anon {anon}
active_anon 8192
inactive_file {inactive_file}
active_file {active_file}
unevictable 0
slab_reclaimable {slab_reclaimable}
slab_unreclaimable 3801088
slab {slab}
workingset_refault_anon 17
workingset_refault_file {refaults}
workingset_activate_anon 3
workingset_activate_file 1200
workingset_restore_anon 0
workingset_restore_file 900
workingset_nodereclaim 0
pgdemote_kswapd 0
pgscan 91000
pgsteal 90100
pgfault 1240000
pgmajfault {major_faults}
pgrefill 2100
pgactivate 1300
pgdeactivate 2100
thp_fault_alloc 0
"""


def stat_of(**sizes: int) -> str:
    usual = {"anon": GIB, "file": 0, "shmem": 0, "inactive_file": 0, "active_file": 0}
    usual |= {"slab_reclaimable": 0, "slab": 3801088, "refaults": 0, "major_faults": 0}
    return STAT.format(**{**usual, **sizes})


class Groups:
    """A tree of groups, in which this process is in the deepest one."""

    def __init__(self, folder, monkeypatch):
        self._root = folder / "cgroup"
        self._membership = folder / "membership"
        self._meminfo = folder / "meminfo"
        self.let_swap(0)
        monkeypatch.setattr(machine, "CGROUP", self._root)
        monkeypatch.setattr(machine, "MEMBERSHIP", self._membership)
        monkeypatch.setattr(memory_usage, "_MEMINFO", self._meminfo)

    def let_swap(self, free_bytes):
        """The machine has so much free in swap."""
        lines = ["MemTotal: 67108864 kB", "MemAvailable: 60397978 kB"]
        lines.append(f"SwapFree: {free_bytes // 1024} kB")
        self._meminfo.write_text("\n".join(lines))

    def add(
        self, path, *, limit="max", high="max", current, kills=0, together=0, swap="max", **sizes
    ):
        folder = self._root / path
        folder.mkdir(parents=True, exist_ok=True)
        files = {
            "memory.max": limit,
            "memory.high": high,
            "memory.low": 0,
            "memory.min": 0,
            "memory.current": current,
            "memory.peak": current,
            "memory.oom.group": together,
            "memory.swap.max": swap,
            "memory.swap.current": MIB if swap != 0 else 0,
            "memory.events": f"low 0\nhigh 12\nmax 40\noom 3\noom_kill {kills}\noom_group_kill 0",
        }
        for name, value in files.items():
            (folder / name).write_text(f"{value}\n")
        (folder / "memory.stat").write_text(stat_of(**sizes))
        self._membership.write_text(f"0::/{path}\n")

    def add_bare(self, path):
        """A group without the memory controller, as below a delegated one."""
        (self._root / path).mkdir(parents=True, exist_ok=True)
        (self._root / path / "cgroup.procs").write_text("")
        self._membership.write_text(f"0::/{path}\n")


@pytest.fixture
def groups(tmp_path, monkeypatch):
    return Groups(tmp_path, monkeypatch)


def test_the_pods_limit_above_the_containers_counts(groups):
    groups.add("kubepods.slice", current=9 * GIB)
    groups.add("kubepods.slice/pod1.slice", limit=8 * GIB, current=7 * GIB, kills=2)
    groups.add("kubepods.slice/pod1.slice/cri-1.scope", current=6 * GIB, kills=1)
    assert memory_use() == MemoryUse(7 * GIB, 8 * GIB, is_cgroups=True)
    # What the kernel killed in this container, not in another one of the pod.
    assert machine.num_memory_kills() == 1


def test_a_batch_systems_limit_counts_above_groups_without_the_controller(groups):
    job = "system.slice/slurmstepd.scope/job_7"
    groups.add(job, limit=4 * GIB, current=3 * GIB, kills=5)
    groups.add_bare(f"{job}/step_0/user/task_0")
    assert memory_use() == MemoryUse(3 * GIB, 4 * GIB, is_cgroups=True)
    assert machine.num_memory_kills() == 5


def test_the_limit_at_which_the_kernel_slows_counts_where_it_is_nearer(groups):
    groups.add("train.slice/train.service", limit=16 * GIB, high=8 * GIB, current=7 * GIB)
    assert memory_use() == MemoryUse(7 * GIB, 8 * GIB, is_cgroups=True, only_slows=True)
    assert machine.host_bytes() == min(8 * GIB, psutil.virtual_memory().total)
    # The kernel kills at the other one.
    assert machine.limit_bytes() == 16 * GIB


def test_fewer_batches_wait_before_the_kernel_slows_and_the_words_say_which_limit(groups):
    groups.add("train.service", high=8 * GIB, current=int(7.6 * GIB))
    guard = MemoryGuard(max_bytes=4 * GIB)
    words = guard.tick(100.0, waiting_bytes=4 * GIB)
    assert guard.share == 0.5
    assert words.startswith("8.16 GB of 8.59 GB, its memory.high, are in use: fewer batches wait")
    assert "so that the kernel slows no process" in words


def test_the_words_say_that_the_whole_container_would_be_killed(groups):
    # As Kubernetes sets it, from 1.28 on.
    groups.add("pod", current=int(7.6 * GIB), limit=16 * GIB)
    groups.add("pod/main", limit=8 * GIB, current=int(7.6 * GIB), together=1)
    words = MemoryGuard(max_bytes=4 * GIB).tick(100.0, waiting_bytes=4 * GIB)
    assert "so that the kernel does not kill the whole container (memory.oom.group); give" in words
    assert "at which the kernel kills the whole container" in doctor.memory_check().text


def test_where_one_process_is_killed_the_words_say_so(groups):
    groups.add("pod/main", limit=8 * GIB, current=int(7.6 * GIB))
    words = MemoryGuard(max_bytes=4 * GIB).tick(100.0, waiting_bytes=4 * GIB)
    assert "so that no process is killed; give" in words
    assert "container" not in doctor.memory_check().text


@pytest.mark.parametrize(
    ("swap", "free", "room"),
    [("max", GIB, GIB), (4 * MIB, GIB, 3 * MIB), (0, GIB, 0), ("max", 0, 0)],
    ids=["the machine's", "the group's", "none of the group", "none"],
)
def test_where_the_kernel_swaps_before_it_kills_the_words_say_so(groups, swap, free, room):
    groups.let_swap(free)
    groups.add("pod", current=int(7.6 * GIB))
    groups.add("pod/main", limit=8 * GIB, current=int(7.6 * GIB), swap=swap)
    assert swap_room_bytes() == room
    words = MemoryGuard(max_bytes=4 * GIB).tick(100.0, waiting_bytes=4 * GIB)
    aim = "nothing is swapped out" if room else "no process is killed"
    assert f"fewer batches wait from now on, so that {aim}; give" in words


def test_files_and_kernel_memory_that_the_kernel_drops_are_not_in_use(groups):
    # A data set of millions of small files: their inodes and names are counted as used.
    groups.add(
        "train.service",
        limit=8 * GIB,
        current=int(7.8 * GIB),
        file=3 * GIB,
        inactive_file=2 * GIB,
        active_file=GIB,
        slab_reclaimable=2 * GIB,
        slab=2 * GIB + 3801088,
    )
    (use, of_machine) = memory_uses()
    assert use.used_bytes == int(7.8 * GIB) - 5 * GIB
    assert not of_machine.is_cgroups


def test_a_profile_knows_that_its_limit_only_slows(groups):
    groups.add("train.service", limit=16 * GIB, high=8 * GIB, current=7 * GIB)
    watch = MemoryWatch()
    watch.look(None, steps=1, batch_size=1)
    seen = watch.result(prefetch_factor=0, epoch_samples=None)
    assert seen is not None
    assert (seen.limit_bytes, seen.only_slows) == (8 * GIB, True)


def test_batches_in_shared_memory_are_in_use(groups):
    groups.add("train.service", limit=8 * GIB, current=7 * GIB, file=5 * GIB, shmem=5 * GIB)
    assert memory_uses()[0].used_bytes == 7 * GIB
    assert group_shared_bytes() == 5 * GIB


@pytest.mark.parametrize("path", ["", "pod/main"])
def test_without_limits_the_machine_counts(groups, path):
    groups.add(path, current=GIB)
    assert [use.is_cgroups for use in memory_uses()] == [False]
    assert machine.limit_bytes() is None


def test_files_that_are_read_again_are_counted_by_the_nearest_group(groups, tmp_path, monkeypatch):
    monkeypatch.setattr(memory_usage, "_VMSTAT", tmp_path / "vmstat")
    (tmp_path / "vmstat").write_text("workingset_refault_file 900000\npgmajfault 9\npswpin 3\n")
    groups.add("pod", current=GIB, refaults=700)
    groups.add("pod/main", current=GIB, refaults=500, major_faults=20)
    counts = paging()
    assert counts.refaulted_bytes == 500 * PAGE
    assert counts.major_faults == 20
    assert counts.swapped_in_bytes == 3 * PAGE


def test_kernels_before_5_9_count_files_that_are_read_again_by_another_name(groups, tmp_path):
    groups.add("pod", current=GIB)
    old = "anon 5\ninactive_file 0\nactive_file 0\nworkingset_refault 400\npgmajfault 2\n"
    (tmp_path / "cgroup" / "pod" / "memory.stat").write_text(old)
    assert paging().refaulted_bytes == 400 * PAGE


def test_a_kill_is_said_with_the_limit_that_it_came_from(groups):
    groups.add("train.service", limit=8 * GIB, high=6 * GIB, current=8 * GIB, kills=3)
    words = killed_words(-9, kills_before=1)
    assert "the kernel has killed two processes of this host for memory" in words
    assert f"whose limit is {8 * GIB / 1e9:.2f} GB" in words


def test_what_a_profile_may_try_is_what_the_limit_leaves(groups):
    groups.add("train.service", limit=4 * GIB, current=4 * GIB - 64 * MIB)
    # It tried as many workers as the whole limit has room for, beside what was in use.
    assert room_for_batches() <= 64 * MIB


def test_the_doctor_says_what_a_limit_leaves(groups):
    groups.add("train.service", limit=4 * GIB, current=4 * GIB - 64 * MIB)
    finding = doctor.memory_check()
    assert finding.state == "warn"
    assert "64 MiB left of a limit of 4.0 GiB" in finding.text
