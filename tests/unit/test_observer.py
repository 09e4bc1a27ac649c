from dataclasses import replace

from stoker.feed.trainer.observer import MAX_WORKERS_TOLD, Observer, SessionState
from stoker.feed.trainer.scheduler import BatchScheduler
from stoker.feed.wire.protocol import (
    FeedWork,
    HostWork,
    Make,
    Progress,
    ToCoordinator,
    Unpacker,
    WorkerWork,
    pack,
)
from stoker.feed.workers.jobs import Result, WorkerJob
from stoker.launch.coordinator import MAX_MESSAGE_BYTES
from support.aws_answers import Clock

NOTHING: dict[str, int] = {}
ORDER = Make(session="s", epoch_id=0, batch_number=0, index=b"", seed_words=())


def observer(clock: Clock | None = None) -> Observer:
    return Observer(own_host="gpu-1", clock=clock or Clock())


def came(books: Observer, host: str | None, worker: int = 0, *, is_wanted: bool = True) -> None:
    books.note_batch(
        host,
        Result(WorkerJob((), ORDER), worker, cpu_seconds=0.25, wall_seconds=0.5),
        frame_bytes=1000,
        is_wanted=is_wanted,
    )


def state(**changes: object) -> SessionState:
    """Returns the state of a session with a batch under way on data-1."""
    given = {"taken": 0, "ready_at_takes": 0, "moved": NOTHING, "ready": 0, "window": 5}
    given |= {"in_flight": {"data-1": 1}, "credits": {"data-1": 4}}
    return SessionState(**{**given, **changes})


def host_of(work: FeedWork, name: str) -> HostWork:
    return next(host for host in work.hosts if host.host == name)


def test_each_batch_is_counted_for_its_host_and_its_worker():
    clock = Clock()
    books = observer(clock)
    came(books, "data-1")
    came(books, "data-1", 1)
    came(books, "data-1", 1)
    # A late duplicate is work of the worker, and no batch of the host.
    came(books, "data-1", is_wanted=False)
    came(books, None, 3)
    clock.now += 7.0
    work = books.tell([])
    assert work.seconds == 7.0
    data = host_of(work, "data-1")
    assert (data.batches, data.duplicates, data.frame_bytes, data.num_workers) == (3, 1, 4000, 2)
    assert (data.busy_seconds, data.cpu_seconds, data.is_local) == (2.0, 1.0, False)
    assert data.workers == (WorkerWork(0, 2, 1.0), WorkerWork(1, 2, 1.0))
    local = host_of(work, "gpu-1")
    assert (local.batches, local.is_local, local.workers) == (1, True, (WorkerWork(3, 1, 0.5),))


def asked_of_the_first(count: int) -> BatchScheduler:
    schedule = BatchScheduler(max_bytes=1 << 30)
    schedule.begin()
    schedule.grant("data-1", count)
    schedule.supply(count)
    assert len(schedule.assign(0.0)) == count
    return schedule


def test_a_schedule_tells_what_lay_ready_when_the_trainer_took():
    schedule = asked_of_the_first(3)
    schedule.mark_complete()
    for number in range(3):
        schedule.arrived("data-1", number, frame_bytes=10, now=1.0)
    seen = []
    for _ in range(3):
        schedule.take(2.0)
        seen.append(schedule.observe(2.0, own_host="gpu-1"))
    assert [each.taken for each in seen] == [1, 1, 1]
    assert [each.ready_at_takes for each in seen] == [2, 1, 0]
    assert [each.ready for each in seen] == [2, 1, 0]


def test_batches_of_a_lost_host_count_as_moved_once():
    schedule = asked_of_the_first(2)
    schedule.grant("data-2", 2)
    schedule.mark_lost("data-1")
    assert schedule.observe(0.0, own_host="gpu-1").moved == {"data-1": 2}
    assert schedule.observe(0.0, own_host="gpu-1").moved == {}
    assert len(schedule.assign(0.0)) == 2


def test_batches_of_a_late_host_count_as_moved():
    schedule = asked_of_the_first(1)
    schedule.grant("data-2", 1)
    assert schedule.overdue(1000.0) == [0]
    assert schedule.observe(1000.0, own_host="gpu-1").moved == {"data-1": 1}


def test_several_sessions_make_one_report_and_counts_only_grow():
    books = observer()
    moved, asked = {"data-1": 1}, {"data-1": 2}
    first = state(taken=4, ready_at_takes=8, moved=moved, in_flight=asked, ready=3, window=9)
    second = state(taken=1)
    work = books.tell([first, second])
    assert (work.taken, work.ready_at_takes, work.ready, work.window) == (5, 8, 3, 14)
    data = host_of(work, "data-1")
    assert (data.in_flight, data.credits, data.moved) == (3, 4, 1)
    later = books.tell([])
    assert (later.taken, later.ready_at_takes, later.ready) == (5, 8, 0)
    assert host_of(later, "data-1").moved == 1


def test_a_host_without_credits_is_gone_and_between_two_epochs_it_is_not():
    books = observer()
    there = state()
    assert host_of(books.tell([there]), "data-1").credits == 4
    assert host_of(books.tell([]), "data-1").credits == 4, "no session asks, nothing is lost"
    lost = replace(there, credits=NOTHING, in_flight=NOTHING, moved={"data-1": 1})
    assert host_of(books.tell([lost]), "data-1").credits == 0
    assert host_of(books.tell([]), "data-1").credits == 0


def test_the_largest_report_stays_below_the_limit_of_a_message():
    books = observer()
    for host in range(200):
        name = f"a-rather-long-name-of-a-host-{host}.data.default.svc.cluster.local"
        for worker in range(96):
            came(books, name, worker)
    work = books.tell([])
    assert sum(len(host.workers) for host in work.hosts) <= MAX_WORKERS_TOLD
    assert all(host.num_workers == 96 for host in work.hosts)
    report = Progress(rank=0, steps=1, samples=1, wait_seconds=0.0, compute_seconds=0.0, feed=work)
    told = pack(report)
    assert len(told) < MAX_MESSAGE_BYTES
    assert Unpacker(ToCoordinator)(told) == report
