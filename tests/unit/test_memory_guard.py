"""Fewer batches wait where memory is nearly used up, and more again once there is room."""

import itertools
from dataclasses import dataclass

import pytest

from stoker.feed.agent.dispatch import AgentSession, CreditPool
from stoker.feed.memory_guard import MemoryGuard, killed_words
from stoker.host import machine, memory_usage
from stoker.host.memory_usage import MemoryUse, memory_use, swap_room_bytes

GB = 1_000_000_000
MB = 1_000_000
MAX_BYTES = 4 * GB


def guard_of(*shares: float | None) -> MemoryGuard:
    """A guard that sees these shares of 10 GB in use, one each time it looks."""
    left = iter(shares)

    def look() -> MemoryUse | None:
        share = next(left)
        return None if share is None else MemoryUse(int(share * 10 * GB), 10 * GB, is_cgroups=True)

    return MemoryGuard(max_bytes=MAX_BYTES, look=look)


def test_less_may_wait_step_by_step_and_it_is_said_once():
    guard = guard_of(*[0.95] * 6)
    said = [guard.tick(100.0 + 2 * step, waiting_bytes=MAX_BYTES) for step in range(6)]
    assert guard.share == 1 / 16
    assert said[0].startswith(
        "9.50 GB of 10.0 GB, its memory limit, are in use: fewer batches wait"
    )
    assert said[1:] == [""] * 5


def test_the_first_step_is_half_of_what_waits_however_much_may():
    guard = guard_of(0.95, 0.95)
    guard.tick(100.0, waiting_bytes=GB)
    assert guard.share * MAX_BYTES == GB / 2
    assert guard.least_share == guard.share


def test_use_that_grows_is_lowered_before_it_is_at_the_limit():
    guard = guard_of(0.5, 0.62, 0.72)
    assert guard.tick(100.0, waiting_bytes=GB) == ""
    # In two seconds 0.86 of the limit, then 0.92 at once.
    assert guard.tick(101.0, waiting_bytes=GB) == ""
    said = guard.tick(101.9, waiting_bytes=GB)
    assert said.startswith("7.20 GB of 10.0 GB, its memory limit, are in use, and 1.11 GB more eac")
    assert guard.share == 1 / 8


def test_use_that_still_grows_is_lowered_again_before_what_waits_is_taken():
    # 1 GB a second, of 10: half a second after the first step it grows as before.
    guard = guard_of(0.70, 0.75, 0.775, 0.80, 0.825, 0.85)
    shares = []
    for step in range(6):
        guard.tick(100.0 + step / 4, waiting_bytes=MAX_BYTES)
        shares.append(guard.share)
    assert shares == [1.0, 1 / 2, 1 / 2, 1 / 4, 1 / 4, 1 / 8]


def test_use_that_no_longer_grows_is_given_time():
    guard = guard_of(0.70, 0.75, 0.93, 0.93, 0.93)
    shares = []
    for step in range(5):
        guard.tick(100.0 + step / 4, waiting_bytes=MAX_BYTES)
        shares.append(guard.share)
    assert shares == [1.0, 1 / 2, 1 / 2, 1 / 2, 1 / 2]


def test_what_was_asked_for_has_to_fit_however_slowly_it_comes():
    guard = guard_of(0.70, 0.75, 0.80)
    bytes_of = {"waiting_bytes": MAX_BYTES, "coming_bytes": 2 * GB}
    said = [guard.tick(now, **bytes_of) for now in (100.0, 101.0, 102.0)]
    assert said[:2] == ["", ""]
    assert said[2].startswith(
        "8.00 GB of 10.0 GB, its memory limit, are in use, and 2.00 GB of batches are on their way"
    )
    assert guard.share == 1 / 2


def test_growth_far_from_the_limit_lowers_nothing():
    guard = guard_of(0.1, 0.5)
    for now in (100.0, 101.0):
        assert guard.tick(now, waiting_bytes=GB) == ""
    assert guard.share == 1.0


def test_a_bound_above_the_limit_is_lowered_to_a_share_of_the_limit():
    guard = MemoryGuard(
        max_bytes=100 * GB, look=lambda: MemoryUse(95 * GB // 10, 10 * GB, is_cgroups=True)
    )
    for step in range(9):
        guard.tick(100.0 + 2 * step, waiting_bytes=8 * GB)
    assert guard.share * 100 * GB == pytest.approx(10 * GB / 16)


def test_what_waits_is_taken_before_the_next_step():
    guard = guard_of(0.95, 0.95, 0.95)
    for now in (100.0, 101.0, 102.0):
        guard.tick(now, waiting_bytes=MAX_BYTES)
    assert guard.share == 1 / 4


def test_between_the_two_bounds_nothing_changes():
    guard = guard_of(0.95, *[0.85] * 20)
    for second in range(21):
        guard.tick(100.0 + second, waiting_bytes=MAX_BYTES)
    assert guard.share == 1 / 2


def test_more_may_wait_again_once_there_is_room_for_a_while():
    guard = guard_of(0.95, 0.95, *[0.5] * 30)
    shares = []
    for second in range(32):
        guard.tick(100.0 + 2 * second, waiting_bytes=MAX_BYTES)
        shares.append(guard.share)
    assert shares[1] == 1 / 4
    assert shares[2:5] == [1 / 4] * 3
    assert shares[-1] == 1.0


def test_that_memory_has_room_again_is_said_once():
    guard = guard_of(0.95, *[0.5] * 10, 0.95, *[0.5] * 10)
    said = [guard.tick(100.0 + 12 * step, waiting_bytes=MAX_BYTES) for step in range(22)]
    assert [words for words in said if words][1:] == [
        "memory has room again (5.00 GB of 10.0 GB, its memory limit): as many batches wait as "
        "before"
    ]


@dataclass
class Host:
    """A host of 10 GB, on which as many batches wait as the guard lets, up to what a run wants.

    Attributes:
        base_bytes: What else is in use, always as much.
        wanted_bytes: Batches that wait where nothing is short.
        rate: Bytes of batches that more wait in a second, where more may.
    """

    base_bytes: int
    wanted_bytes: int
    rate: int
    waiting_bytes: int = 0

    def __post_init__(self) -> None:
        self.guard = MemoryGuard(max_bytes=MAX_BYTES, look=self.use)

    @property
    def coming_bytes(self) -> int:
        return min(8 * GB // 10, self.waiting_bytes // 2)

    def use(self) -> MemoryUse:
        here = self.waiting_bytes - self.coming_bytes
        return MemoryUse(self.base_bytes + here, 10 * GB, is_cgroups=True)

    def run(self, seconds: int, *, began: int = 0) -> list[float]:
        """Returns the share after each quarter of a second."""
        shares = []
        for look in range(4 * began, 4 * (began + seconds)):
            most = min(self.wanted_bytes, int(self.guard.share * MAX_BYTES))
            change = min(self.rate // 4, abs(most - self.waiting_bytes))
            self.waiting_bytes += change if most > self.waiting_bytes else -change
            bytes_of = {"waiting_bytes": self.waiting_bytes, "coming_bytes": self.coming_bytes}
            self.guard.tick(look / 4, **bytes_of)
            shares.append(self.guard.share)
        return shares


def lowered(shares: list[float]) -> int:
    return sum(later < earlier for earlier, later in itertools.pairwise(shares))


@pytest.mark.parametrize("rate", [200, 1000, 4000])
@pytest.mark.parametrize("wanted", [1000, 2000, 3500])
@pytest.mark.parametrize("base", range(3000, 9000, 500))
def test_a_run_that_uses_the_same_all_the_time_is_not_lowered_and_raised_in_turns(
    base, wanted, rate
):
    host = Host(base * MB, wanted * MB, rate * MB)
    shares = host.run(600)
    # A start is fast, and looks as if it went on.
    assert lowered(shares) <= 4
    assert lowered(shares[1200:]) <= 1
    if base + wanted <= 8000:
        # With all that it wants 80% are in use.
        assert host.guard.share * MAX_BYTES >= host.wanted_bytes


@dataclass
class HostWithValidations(Host):
    """A host on which each validation takes memory, and workers keep buffers until less may wait.

    Attributes:
        validation_bytes: What each one of a minute takes, after ten minutes of steps.
        kept_share: Of what may wait, in buffers that workers keep.
    """

    validation_bytes: int = 0
    kept_share: float = 0.0
    validating_bytes: int = 0

    def use(self) -> MemoryUse:
        kept = self.kept_share * min(self.wanted_bytes, self.guard.share * MAX_BYTES)
        here = self.waiting_bytes - self.coming_bytes + self.validating_bytes + int(kept)
        return MemoryUse(self.base_bytes + here, 10 * GB, is_cgroups=True)

    def run_hour(self) -> list[float]:
        """Returns the share after each quarter of a second."""
        shares = []
        for second in range(3600):
            takes = self.validation_bytes if second % 660 >= 600 else 0
            change = max(-200 * MB, min(200 * MB, takes - self.validating_bytes))
            self.validating_bytes += change
            shares += self.run(1, began=second)
        return shares


@pytest.mark.parametrize("kept_share", [0.0, 0.5])
@pytest.mark.parametrize(("base", "wanted"), [(5000, 2000), (3500, 2000), (5000, 1000)])
def test_after_each_validation_as_many_batches_wait_soon_as_before(base, wanted, kept_share):
    host = HostWithValidations(
        base * MB, wanted * MB, 1000 * MB, validation_bytes=4 * GB, kept_share=kept_share
    )
    shares = host.run_hour()
    # Two minutes after the latest of five.
    assert shares[4 * (3300 + 120)] * MAX_BYTES >= 0.9 * host.wanted_bytes
    # Each validation lowers it a few times in a row.
    assert lowered(shares) <= 5 * 5


@pytest.mark.parametrize("kept_share", [0.5, 1.0])
@pytest.mark.parametrize("base", [2000, 3000, 5000])
def test_what_workers_give_back_is_not_taken_in_turns(base, kept_share):
    host = HostWithValidations(base * MB, 3500 * MB, 1000 * MB, kept_share=kept_share)
    # With raises as fast as the first whenever so much was given back, 320 times.
    assert lowered(host.run_hour()) <= 6


def test_as_much_may_wait_again_as_there_is_room_for():
    guard = guard_of(0.95, *[0.75] * 10)
    guard.tick(100.0, waiting_bytes=MAX_BYTES)
    for second in range(10):
        bytes_of = {"waiting_bytes": MAX_BYTES // 2, "coming_bytes": GB}
        guard.tick(110.0 + second, **bytes_of)
    # 0.92 less 0.75 and 0.1 of 10 GB.
    assert guard.share * MAX_BYTES == pytest.approx(MAX_BYTES / 2 + 0.7 * GB)


def test_a_raise_that_was_taken_back_is_tried_again_later_and_by_less():
    guard = guard_of(0.95, 0.5, 0.95, *[0.5] * 20)
    for now in (100.0, 110.0, 112.0):
        guard.tick(now, waiting_bytes=MAX_BYTES)
    assert guard.share == 1 / 2
    shares = []
    for second in range(20):
        guard.tick(113.0 + second, waiting_bytes=MAX_BYTES // 2)
        shares.append(guard.share)
    assert shares == [1 / 2] * 19 + [3 / 4]


@pytest.mark.parametrize(
    ("code", "kills", "words"),
    [
        (-9, 5, "; since it started, the kernel has killed two processes of this host for memory"),
        # A worker before it.
        (-9, 3, ""),
        (-9, None, ""),
        (-15, 5, ""),
        (1, 5, ""),
    ],
)
def test_a_process_that_the_kernel_killed_for_memory_is_named(code, kills, words, monkeypatch):
    monkeypatch.setattr(machine, "num_memory_kills", lambda: kills)
    monkeypatch.setattr(machine, "limit_bytes", lambda: 10 * GB)
    said = killed_words(code, kills_before=3)
    assert said.startswith(words)
    assert bool(said) == bool(words)
    assert killed_words(code, kills_before=None) == ""


def test_where_nothing_is_known_nothing_changes():
    guard = guard_of(None)
    assert guard.tick(100.0, waiting_bytes=MAX_BYTES) == ""
    assert guard.share == 1.0


def test_an_agent_gives_fewer_credits_but_one_for_each_worker():
    pool = CreditPool(workers=4, per_worker=8)
    session = AgentSession("one", b"", 0, "spec", "batch")
    assert pool.share(session, [session], 0.0) == 32
    pool.memory_share = 1 / 4
    assert pool.share(session, [session], 0.0) == 8
    pool.memory_share = 1 / 16
    assert pool.share(session, [session], 0.0) == 4


FILES = {
    "version 2": (
        "0::/pod/main\n",
        {
            "pod/main/memory.max": "max",
            "pod/main/memory.current": "5000",
            "pod/memory.max": "10000",
            "pod/memory.current": "9700",
            "pod/memory.stat": "anon 8900\ninactive_file 700\nactive_file 10\n",
        },
        MemoryUse(8990, 10000, is_cgroups=True),
    ),
    "version 1": (
        "5:memory:/job\n",
        {
            "memory/job/memory.limit_in_bytes": "10000",
            "memory/job/memory.usage_in_bytes": "9900",
            "memory/job/memory.stat": "inactive_file 100\ntotal_inactive_file 400\n",
        },
        MemoryUse(9500, 10000, is_cgroups=True),
    ),
    "files that are read again and again": (
        "0::/a\n",
        {
            "a/memory.max": "10000",
            "a/memory.current": "9700",
            "a/memory.stat": "anon 2000\nactive_file 7400\ninactive_file 200\n",
        },
        MemoryUse(75 * 1024, 100 * 1024, is_cgroups=False),
    ),
    "the machine is nearer": (
        "0::/a\n",
        {"a/memory.max": "10000", "a/memory.current": "10"},
        MemoryUse(75 * 1024, 100 * 1024, is_cgroups=False),
    ),
    "no cgroups": ("", {}, MemoryUse(75 * 1024, 100 * 1024, is_cgroups=False)),
}


@pytest.mark.parametrize(("membership", "files", "expected"), FILES.values(), ids=FILES)
def test_the_use_nearest_to_its_limit_counts(membership, files, expected, tmp_path, monkeypatch):
    (tmp_path / "membership").write_text(membership)
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemFree: 3 kB\nMemAvailable: 25 kB\n")
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(machine, "CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(memory_usage, "_MEMINFO", tmp_path / "meminfo")
    assert memory_use() == expected


@pytest.mark.parametrize(("both", "room"), [(3 * MB, MB), (2 * MB, 0), (1 << 62, 5000 * 1024)])
def test_version_1_limits_memory_and_swap_together(both, room, tmp_path, monkeypatch):
    (tmp_path / "membership").write_text("4:memory:/a\n")
    (tmp_path / "meminfo").write_text("SwapTotal: 9000 kB\nSwapFree: 5000 kB\n")
    group = tmp_path / "cgroup" / "memory" / "a"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text(str(2 * MB))
    (group / "memory.memsw.limit_in_bytes").write_text(str(both))
    monkeypatch.setattr(machine, "CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(memory_usage, "_MEMINFO", tmp_path / "meminfo")
    assert swap_room_bytes() == room


def test_this_machine_has_a_use():
    use = memory_use()
    assert use is not None
    assert 0 < use.used_bytes < use.limit_bytes
