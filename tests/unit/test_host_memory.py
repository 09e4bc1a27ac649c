"""How near a run's hosts came to their limit of memory: what is looked at, recorded and said."""

import msgspec
import pytest

from stoker.feed.memory_guard import MemoryShares
from stoker.feed.wire.protocol import MemoryNow, MemoryPeak
from stoker.host.memory_usage import MemoryUse
from stoker.launch.host_memory import HostMemoryWatch, MemoryLog, MemorySources
from stoker.record_words import memory_cause, training_words
from stoker.records import Fix, HostMemory, Job
from stoker.report.memory_rows import memory_story
from support import sample_records

replace = msgspec.structs.replace
GB = 10**9


class Host:
    """A host whose memory is as a test says."""

    def __init__(self, **sources):
        self.now = 100.0
        self.use: MemoryUse | None = MemoryUse(GB, 10 * GB, is_cgroups=True)
        self.kills: int | None = 3
        self.num_counted = self.num_read = 0
        self.watch = HostMemoryWatch(
            shares=lambda: MemoryShares(now=0.5, least=0.25),
            sources=MemorySources(
                use=lambda: self._read(self.use),
                num_kills=lambda: self._read(self.kills),
                processes=self._processes,
                **sources,
            ),
            clock=lambda: self.now,
        )

    def _read(self, value: object):
        self.num_read += 1
        return value

    def _processes(self) -> list[int]:
        self.num_counted += 1
        return []

    def look(self, used: int, *, limit: int = 10 * GB, is_cgroups: bool = True) -> MemoryPeak:
        self.now += 1.0
        self.use = MemoryUse(used, limit, is_cgroups=is_cgroups)
        peak = self.watch.peak()
        assert peak is not None
        return peak


def test_the_highest_use_stays_and_is_looked_at_once_a_second():
    host = Host()
    assert host.look(4 * GB).peak_bytes == 4 * GB
    assert host.look(9 * GB).peak_bytes == 9 * GB
    assert host.look(2 * GB).peak_bytes == 9 * GB
    host.use = MemoryUse(10 * GB, 10 * GB, is_cgroups=True)
    host.now += 0.5
    assert host.watch.peak().peak_bytes == 9 * GB
    assert host.watch.peak().least_share == 0.25


def test_between_two_looks_nothing_is_read():
    host = Host()
    host.look(4 * GB)
    num_read = host.num_read
    for _ in range(20):
        host.now += 0.04
        assert not host.watch.look()
    assert host.num_read == num_read
    host.now += 0.3
    assert host.watch.look()
    assert host.num_read > num_read


def test_what_is_in_use_now_is_told_beside_the_highest():
    host = Host()
    host.look(9 * GB)
    peak = host.look(2 * GB, limit=20 * GB)
    assert peak.now == MemoryNow(limit_bytes=20 * GB, used_bytes=2 * GB, waiting_share=0.5)


def test_now_is_what_a_host_said_last_with_its_ranks_share():
    log = MemoryLog()
    before = MemoryNow(limit_bytes=10 * GB, used_bytes=9 * GB, waiting_share=0.25)
    after = MemoryNow(limit_bytes=10 * GB, used_bytes=GB)
    highest = MemoryPeak(limit_bytes=10 * GB, peak_bytes=9 * GB, is_cgroups=True, now=before)
    log.add("algo-1", highest)
    (first,) = log.now({})
    assert (first.used_bytes, first.waiting_share) == (9 * GB, 0.25)
    log.add("algo-1", replace(highest, peak_bytes=8 * GB, now=after))
    (second,) = log.now({"algo-1": [0.5, 1.0], "algo-2": [0.1]})
    assert (second.used_bytes, second.peak_bytes, second.waiting_share) == (GB, 9 * GB, 0.5)


def test_kills_count_from_the_watchs_start():
    host = Host()
    assert host.look(GB).kills == 0
    host.kills = 5
    assert host.look(GB).kills == 2


def test_nothing_is_known_without_limits():
    host = Host()
    host.use = None
    host.kills = None
    assert host.watch.peak() is None


@pytest.mark.parametrize("is_cgroups", [True, False])
def test_own_processes_are_counted_only_where_memory_is_short(is_cgroups):
    host = Host()
    assert host.look(7 * GB, is_cgroups=is_cgroups).ours_bytes is None
    assert host.num_counted == 0
    assert host.look(9 * GB, limit=9 * GB + 1, is_cgroups=is_cgroups).ours_bytes == 0
    assert host.num_counted == 1
    # Nothing more is in use.
    host.look(9 * GB, limit=9 * GB + 1, is_cgroups=is_cgroups)
    assert host.num_counted == 1


def test_a_host_that_began_again_keeps_its_highest_use_and_ranks_add_their_share():
    log = MemoryLog()
    first = MemoryPeak(
        limit_bytes=10 * GB, peak_bytes=9 * GB, is_cgroups=True, swapped_bytes=5, kills=1
    )
    log.add("algo-1", first)
    log.add("algo-1", MemoryPeak(limit_bytes=10 * GB, peak_bytes=GB, is_cgroups=True))
    log.add("algo-2", None)
    (host,) = log.hosts({"algo-1": [1.0, 0.5]})
    assert host == HostMemory(
        host="algo-1",
        limit_bytes=10 * GB,
        peak_bytes=9 * GB,
        limited_by="cgroup",
        swapped_bytes=5,
        least_share=0.5,
        kills=1,
    )


def with_memory(*hosts, platform="aws", **changes):
    record = sample_records.training()
    return replace(record, memory=hosts, job=Job(platform=platform, name="one"), **changes)


def memory_of(**changes):
    usual = HostMemory(host="algo-2", limit_bytes=16 * GB, peak_bytes=4 * GB, limited_by="cgroup")
    return replace(usual, **changes)


def test_a_run_with_room_says_nothing_of_memory():
    assert memory_cause(with_memory(memory_of())) == ""
    assert "memory" not in training_words(with_memory(memory_of()))
    # Pages of idle processes, which the kernel moves out in good time.
    assert memory_cause(with_memory(memory_of(swapped_bytes=GB // 10))) == ""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peak_bytes": 15 * GB}, "15.0 GB of 16.0 GB, its limit, in use on algo-2"),
        ({"least_share": 0.25}, "batches that wait were lowered to 25% of feed.max_bytes"),
        ({"swapped_bytes": GB}, "1.00 GB were swapped out"),
        ({"kills": 2}, "the kernel killed two processes for memory"),
    ],
)
def test_what_is_felt_of_short_memory_is_said(changes, words):
    training = with_memory(memory_of(host="algo-1"), memory_of(**changes))
    assert words in memory_cause(training)
    assert f"memory was short: {memory_cause(training)}" in training_words(training)


def test_other_programs_are_named_where_they_hold_most():
    short = {"limited_by": "machine", "peak_bytes": 15 * GB}
    profile = replace(
        sample_records.profile(), fixes=(Fix(id="growing_cache", text="bound the cache"),)
    )
    others = with_memory(memory_of(**short, ours_bytes=3 * GB))
    words = "12.0 GB of them by other programs, or by files in /dev/shm"
    assert words in memory_cause(others, profile)
    assert "bound the cache" not in memory_cause(others, profile)
    own = with_memory(memory_of(**short, ours_bytes=13 * GB))
    assert memory_cause(own, profile).endswith("; the profile says: bound the cache")
    # Two hosts of one machine are no other programs to each other.
    hosts = [memory_of(host=name, **short, ours_bytes=6 * GB) for name in ("algo-1", "algo-2")]
    assert "other programs" in memory_cause(with_memory(*hosts))
    assert "other programs" not in memory_cause(with_memory(*hosts, platform="local"))


def test_the_report_names_a_host_in_its_sentence_as_in_its_table():
    story = memory_story(
        with_memory(memory_of(peak_bytes=15 * GB)), profile=None, names={"algo-2": "data host 1"}
    )
    assert story is not None
    assert story.rows[0].host == "data host 1"
    assert "in use on data host 1" in story.line


def test_the_report_says_what_the_profile_found_in_a_sentence_of_its_own():
    profile = replace(
        sample_records.profile(), fixes=(Fix(id="growing_cache", text="A.cache grows: bound it"),)
    )
    story = memory_story(with_memory(memory_of(kills=1)), profile=profile, names={})
    assert story is not None
    assert story.line.endswith(
        "the kernel killed one process for memory. The profile says what takes it: A.cache grows: "
        "bound it."
    )


def test_the_report_shows_each_host_and_the_cause(tmp_path):
    training = with_memory(memory_of(host="algo-1"), memory_of(peak_bytes=15 * GB, least_share=0.5))
    page = sample_records.write_page(tmp_path, training=training)
    assert "<h3>Memory</h3>" in page
    assert "Memory was short: 15.0 GB of 16.0 GB, its limit, in use on data host" in page
    assert "lowered to 50" in page
    assert "stoker profile, with the same command, names what takes it" in page
    room = sample_records.write_page(tmp_path, training=with_memory(memory_of()))
    assert "No host came near its limit" in room
    assert "<h3>Memory</h3>" not in sample_records.write_page(tmp_path)
