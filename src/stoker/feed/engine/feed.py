"""The feed of a trainer process: `Feed.session_for`, and the thread that looks after its hosts.

The thread knows the run's data hosts from the coordinator, opens the sessions of loaders on
them, has workers started, and sees who is lost or late. No batch comes through it.
"""

import atexit
import dataclasses
import functools
import math
import os
import secrets
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType

import zmq

from stoker.errors import FeedError, FeedLostError, ProtocolError, RebuildingError
from stoker.feed import memory
from stoker.feed.bookkeeping import LoaderBooks, TrainerProcess
from stoker.feed.engine import run_messages as messages
from stoker.feed.engine.batch_socket import BufferPool
from stoker.feed.engine.control_connection import (
    GOODBYE_SECONDS,
    Link,
    ZmqContext,
)
from stoker.feed.engine.crypto import Keys, read_token
from stoker.feed.engine.facts import WorkerFacts, pack_facts
from stoker.feed.engine.host import DATASET, Host, LocalLink, Opening
from stoker.feed.engine.raised import summary_of, unpack_error
from stoker.feed.engine.receiver import Receiver
from stoker.feed.engine.scheduler import ORDERS_PER_WORKER
from stoker.feed.engine.session import EpochRequest, FeedSession, Scheduler, SharedState, Worker
from stoker.feed.engine.shards import ShardScheduler
from stoker.logs import EventName, Log

# Interval of looks for what no event reports, such as late batches; each takes 0.1 ms.
_TICK_MILLISECONDS = 250
_REPORT_SECONDS = 1.0
# After that a wait for a batch is said.
_HANG_SECONDS = 60.0
# The control thread's goodbye takes milliseconds; local processes may take longer to end.
CLOSE_SECONDS = 8.0
# Beyond the lease: the coordinator's message and the reconnect take a moment.
LOST_GRACE_SECONDS = 3.0
# The first batch waits this long for hosts that are on their way: a shard stays where it begins.
_SETTLE_SECONDS = 2.0
# Data hosts, until the coordinator has answered: more than any run has.
_UNKNOWN = 1 << 32
# A report must stay far below the coordinator's limit of 64 KiB a message.
_MAX_HOSTS = 128

_unpack_run_state = messages.Unpacker(messages.RunState)
_unpack_from_agent = messages.Unpacker(messages.FromAgent)


class Feed(SharedState):
    """Batches from data hosts and from local workers, for the loaders of this process.

    Its thread looks after hosts and sessions. Raises UsageError if the run's token cannot be read.
    """

    def __init__(self, process: TrainerProcess) -> None:
        super().__init__(process.settings.rank)
        self._process = process
        self._settings = settings = process.settings
        assert settings.token_file is not None
        self._keys = Keys.from_token(read_token(settings.token_file))
        self.log = Log(run=settings.run_id, host=settings.host)
        # Of all loaders of this process. Limits are read from 15 files: once.
        self._max_bytes = memory.max_bytes(settings.feed) // settings.local_world_size
        # More than one of a loader where its epochs overlap.
        self._of_loader = weakref.WeakKeyDictionary[LoaderBooks, list[FeedSession]]()
        self._context: ZmqContext = zmq.Context()
        self._new_receiver = partial(
            Receiver,
            self,
            pool=BufferPool(),
            max_bytes=memory.max_message_bytes(settings.feed),
            accept_pickles=settings.feed.accept_pickles,
            on_lost=self._lost_worker,
        )
        self._roster = messages.RunState(expected=_UNKNOWN)
        # Data hosts, and this one as soon as a loader has local workers.
        self._hosts: dict[str, Host] = {}
        # Who made what, also of hosts that are gone: counts only grow, and are read as differences.
        self._works: dict[str, messages.HostWork] = {}
        self._began = time.monotonic()
        self._report_at = 0.0
        self._brake = memory.MemoryBrake()
        self._is_closing = False
        host, _, port = (settings.coordinator or "").rpartition(":")
        self._coordinator = self._link(host, int(port))
        self._thread = threading.Thread(target=self._run, name="stoker-feed", daemon=True)
        self._thread.start()

    # ---- any thread

    def session_for(
        self, books: LoaderBooks, new_schedule: Callable[[int], Scheduler]
    ) -> FeedSession:
        """Returns an unused session of that loader, or a new one; a schedule takes its bytes."""
        with self.lock:
            sessions = self._of_loader.setdefault(books, [])
            for session in sessions:
                if session in self.sessions and session.reserve():
                    return session
            # Random: agents may still keep a session of this rank's earlier process.
            name = f"r{self._settings.rank}-l{books.number}-{secrets.token_hex(8)}"
            session = FeedSession(name, new_schedule(self._max_bytes), self)
            session.reserve()
            self.sessions.add(session)
            sessions.append(session)
        # Not at exit, where `close` closes all sessions together.
        close = partial(self.post, partial(self._discard, session))
        weakref.finalize(books, close).atexit = False
        return session

    @property
    def has_hosts(self) -> bool:
        """Whether a data host is connected."""
        return any(host.is_remote and host.link.is_up for host in list(self._hosts.values()))

    def exclude(
        self, session: str, host: str, why: str, error: BaseException | None = None
    ) -> None:
        """Has a host make no more batches of a loader; the run's last words have it, too."""
        # Said here: the script may end before the thread's next turn.
        self._process.note_made_here(f"data host {host}: {why}")
        text = f"host {host} makes no batches of this loader: {why}"
        self.log.event(EventName.HOST_EXCLUDED, agent=host, text=text)
        self.post(partial(self._exclude, session, host, why, error))

    def close(self) -> None:
        """Ends sessions and local workers; may be called twice.

        Blocks for at most CLOSE_SECONDS; does nothing in a forked child.
        """
        # A fork has no such thread, and its sockets are the parent's.
        if os.getpid() == self.pid:
            self._is_closing = True
            self.wake()
            self._thread.join(CLOSE_SECONDS)

    # ---- the thread

    def _run(self) -> None:
        """Runs until the feed is closed; a crash fails every session with its error."""
        try:
            while not self._is_closing:
                self._turn(self._poll())
        except BaseException as err:
            self.mark_crashed(err)
        finally:
            self._close()

    def _turn(self, ready: dict[object, int]) -> None:
        while self.posted:
            self.posted.popleft()()
        now = time.monotonic()
        is_new = self._serve(self._coordinator, ready, self._take_run_state)
        if now >= self._report_at or (is_new and self._coordinator.is_up):
            self._report_at = now + _REPORT_SECONDS
            self._report()
        for host in list(self._hosts.values()):
            is_changed = self._serve(host.link, ready, partial(self._take_from_agent, host))
            if is_changed and not host.link.is_up:
                self.log.event(EventName.BATCHES_LOST, agent=host.name)
                self._lose_host(host)
        words = self._brake.tick()
        # One rank says it for all of its host.
        if words and self._settings.is_first_of_host:
            self.log.event(EventName.MEMORY_SHORT, text=words)
        for session in list(self.sessions):
            if (request := session.request) is not None:
                self._look(session, request, now)

    def _poll(self) -> dict[object, int]:
        poller = zmq.Poller()
        poller.register(self.wake_fd, zmq.POLLIN)
        for link in (self._coordinator, *(host.link for host in self._hosts.values())):
            link.register(poller)
        ready: dict[object, int] = dict(poller.poll(_TICK_MILLISECONDS))
        if self.wake_fd in ready:
            os.eventfd_read(self.wake_fd)
        return ready

    def _link(self, name: str, port: int) -> Link:
        return Link(self._context, self._keys, name=name, port=port, post=self.post)

    def _serve(
        self, link: Link | LocalLink, ready: dict[object, int], take: Callable[[bytes], None]
    ) -> bool:
        """Takes what has come; returns whether the connection came or was lost."""
        try:
            return link.turn(ready, take)
        except ProtocolError as err:
            self.log.event(EventName.MESSAGE_REFUSED, agent=link.name, reason=err.what)
            link.mark_lost()
            return True

    # ---- which hosts there are

    def _take_run_state(self, packed: bytes) -> None:
        """Has a connection to each agent that the leader names, and to no other."""
        state = _unpack_run_state(packed)
        assert isinstance(state, messages.RunState)
        self._roster = state
        if state.refusal:
            self.mark_failed(FeedError(f"the leader refuses this rank: {state.refusal}"))
        listed = {member.host: member for member in state.agents}
        for name, host in list(self._hosts.items()):
            # A restarted host has another incarnation at the same address, and no state.
            if host.is_remote and host.member != listed.get(name):
                self._lose_host(host)
                host.close()
                del self._hosts[name]
        for name in listed.keys() - self._hosts.keys():
            member = listed[name]
            self._add_host(member, self._link(member.address, member.port))

    def _add_host(self, member: messages.Member, link: Link | LocalLink) -> None:
        work = messages.HostWork(host=member.host, is_local=isinstance(link, LocalLink))
        work = self._works.setdefault(member.host, work)
        # Ranks share a host; one that waits leaves its part to the others.
        share = -(-member.workers // max(1, self._settings.world_size))
        num_workers = max(1, min(member.workers, 2 * share))
        self._hosts[member.host] = Host(member, link, self._new_receiver(), work, num_workers)
        # Its link takes a turn at once.
        self.wake()

    def _lose_host(self, host: Host) -> None:
        """Loses a host's workers: its control connection is gone."""
        host.forget()
        for session in list(self.sessions):
            session.lose(_workers_on(host.name, session))

    # ---- what hosts say

    def _take_from_agent(self, host: Host, packed: bytes) -> None:
        match _unpack_from_agent(packed):
            case messages.Ticket() as ticket:
                host.take_ticket(ticket)
            case messages.Opened(session=name, dataset=digest):
                if opening := host.opening_of(name, digest):
                    opening.opened_at = time.monotonic()
                if host.is_remote:
                    self.log.event(EventName.AGENT_READY, agent=host.name)
            case messages.Failed(session=name, dataset=digest, error=error):
                if not host.opening_of(name, digest):
                    return
                if not error:
                    # It is opened again.
                    del host.openings[name]
                    return
                raised = unpack_error(error, accept_pickles=self._settings.feed.accept_pickles)
                self.exclude(name, host.name, summary_of(error), raised)
            case messages.Ended(worker=number, how=how, making=(epoch_id, batch, place)):
                worker = host.workers.pop(number, None)
                # No words: its connection was closed from here.
                if worker is not None and how:
                    worker.session.died(worker, how, epoch_id=epoch_id, number=batch, place=place)
            case messages.WrongHost(host=other):
                # Another host has the address now. The name server may still return it.
                self.log.event(EventName.AGENT_ADDRESS_REUSED, agent=host.name, found=other)
                host.link.mark_lost()

    def _lost_worker(self, worker: Worker, why: str) -> None:
        """Notes a worker whose connection has ended; in any thread."""
        is_news = not worker.is_lost
        worker.session.lose([worker])
        if is_news:
            self.post(partial(self._take_loss, worker, why))

    def _take_loss(self, worker: Worker, why: str) -> None:
        session, host = worker.session.name, self._hosts.get(worker.host)
        if host is None or session not in host.openings:
            return
        self.log.event(EventName.BATCHES_LOST, agent=host.name, reason=why)
        if not host.note_lost(worker, time.monotonic()):
            words = (
                f"host {host.name} delivers no batches: connections to its workers were lost again "
                f"and again, at last: {why}; open port feed.port + 1 of data hosts to the "
                "trainers; if it is open, large packets may be lost (the network's MTU)"
            )
            self.exclude(session, host.name, words)
        elif worker.number == DATASET:
            # It is opened again.
            del host.openings[session]

    def _exclude(self, session: str, name: str, why: str, error: BaseException | None) -> None:
        host = self._hosts.get(name)
        if host is not None and session in host.openings:
            opening = host.openings[session]
            opening.opened_at, opening.reason, opening.error = 0.0, why, error
            opening.session.lose(_workers_on(name, opening.session))

    # ---- sessions

    def _look(self, session: FeedSession, request: EpochRequest, now: float) -> None:
        own = self._settings.host
        if request.local_workers and own not in self._hosts:
            # Its processes are started in the next turn.
            member = messages.Member(host=own, workers=1)
            self._add_host(member, LocalLink(own, self.log, self.wake))
        all_hosts = self._hosts.values()
        hosts = [host for host in all_hosts if host.is_remote or request.local_workers]
        able = [host for host in hosts if host.link.is_up and now >= host.not_before]
        serving = [host for host in able if host.open(session, request.spec)]
        if serving:
            self._start_workers(session, request, serving, now)
        with self.lock:
            num_busy = sum(each.is_busy for each in self.sessions)
            most = int(self._max_bytes * self._brake.share)
            session.schedule.max_bytes = most // max(num_busy, 1)
            late = session.schedule.repeat_late(now)
            self._check_workers(session, hosts, now)
        session.order()
        if late is not None:
            self.log.event(EventName.BATCH_OVERDUE, epoch=session.epoch, batch=late)
        self._check_wait(session, now)

    def _start_workers(
        self, session: FeedSession, request: EpochRequest, hosts: Sequence[Host], now: float
    ) -> None:
        """Starts the workers that hosts lack, or those of shards that nobody makes."""
        schedule = session.schedule
        num_workers = request.num_workers
        started: list[tuple[Host, Worker]] = []
        with self.lock:
            owned = Counter(worker.host for worker in session.workers)
            if isinstance(schedule, ShardScheduler):
                num_workers = schedule.num_shards
                num_away = self._roster.expected - len(self._roster.lost)
                num_away -= sum(host.is_remote for host in hosts)
                since = min(host.openings[session.name].opened_at for host in hosts)
                is_settled = num_away <= 0 or now > since + _SETTLE_SECONDS
                numbers = schedule.homeless() if is_settled else []
            else:
                taken = {worker.number for worker in session.workers}
                missing = sum(max(0, host.room_for(request) - owned[host.name]) for host in hosts)
                numbers = [n for n in range(len(taken) + missing) if n not in taken][:missing]
            for number in numbers:
                host = min(hosts, key=partial(_load, owned=owned, request=request))
                owned[host.name] += 1
                worker = Worker(session, host.work, number)
                session.workers.add(worker)
                started.append((host, worker))
                if isinstance(schedule, ShardScheduler):
                    schedule.pin(worker, number)
        for host, worker in started:
            facts = WorkerFacts(
                worker=worker.number,
                # Of get_worker_info() in worker_init_fn: more than the number.
                num_workers=max(num_workers, worker.number + 1),
                base_seed=request.base_seed,
                seeding=request.seeding,
                script=request.script,
            )
            worker.facts = pack_facts(facts)
            host.start(worker)

    def _check_wait(self, session: FeedSession, now: float) -> None:
        """Says who has the batch that is waited for; ends a worker that has it for too long."""
        with self.lock:
            head, epoch_id, since = session.schedule.head, session.epoch_id, session.waits_since
            makers = {} if since is None else session.schedule.makers(head)
        limit = self._settings.feed.batch_timeout_seconds or math.inf
        for worker, begun_at in makers.items():
            waited = now - max(since or 0.0, begun_at)
            if now - begun_at > limit:
                how = f"it took more than {limit:g} s"
                session.died(worker, how, epoch_id=epoch_id, number=head)
            elif waited > _HANG_SECONDS and not session.is_hang_told:
                session.is_hang_told = True
                with self.lock:
                    batch = session.batch_words(head)
                text = (
                    f"waiting for {batch} for {waited:.0f} s, which worker {worker.number} of "
                    f"{worker.host} makes; its stack is in that host's log"
                )
                self.log.event(EventName.BATCH_HANGS, rank=self._settings.rank, text=text)

    def _discard(self, session: FeedSession) -> None:
        """Closes the session of a loader that is gone."""
        with self.lock:
            self.sessions.discard(session)
            session.dismiss()
        for host in self._hosts.values():
            host.close_session(session.name)

    # ---- without workers; under the lock

    def _check_workers(self, session: FeedSession, hosts: Sequence[Host], now: float) -> None:
        """Fails a session that no host can serve, or that has had no worker for too long."""
        if session.schedule.workers:
            session.alone_since = now
            return
        alone = now - session.alone_since
        settings, roster = self._settings, self._roster
        opened = [host.openings[session.name] for host in hosts if session.name in host.openings]
        failed = [opening for opening in opened if opening.reason]
        # A worker's start takes longer than a reconnect, and a preempted host waits for a new node.
        is_slow = settings.comes_back or not session.had_workers or len(opened) > len(failed)
        limit = settings.feed.lease_seconds + LOST_GRACE_SECONDS
        if is_slow:
            limit = settings.feed.start_deadline_seconds
        # A host that has ended, or was lost, comes back on Kubernetes alone.
        may_come = roster.expected == _UNKNOWN or bool(roster.awaited)
        may_come |= settings.comes_back and bool(roster.lost or roster.left)
        if len(failed) == len(hosts) and not may_come:
            limit = 0.0
        if alone > limit:
            session.mark_failed(self._error_of(session, hosts, failed, alone))

    def _error_of(
        self,
        session: FeedSession,
        hosts: Sequence[Host],
        failed: Sequence[Opening],
        alone: float,
    ) -> FeedError:
        roster = self._roster
        where = f"rank {self._settings.rank}, epoch {session.epoch}, batch {session.schedule.head}"
        if failed and len(failed) == len(hosts):
            error = RebuildingError(
                f"no data host can make batches of this dataset: {failed[0].reason}",
                where=where,
                fix="mend what the host's error above says",
            )
            error.__cause__ = failed[0].error
            return error
        what = "lost all data workers" if session.had_workers else "no data worker came"
        seen = f"the coordinator at {self._settings.coordinator} did not answer"
        if roster.expected < _UNKNOWN:
            # The last word on a host counts.
            fates = {host.name: host.fate(session.name) for host in hosts}
            fates |= dict.fromkeys(roster.awaited, "never came")
            fates |= dict.fromkeys(roster.lost, "lost")
            fates |= {name: f"left: {why}" for name, why in roster.left.items()}
            told = ", ".join(f"{name} ({fate})" for name, fate in fates.items())
            seen = f"{roster.expected} data hosts expected, {told}"
        return FeedLostError(
            f"{what} within {alone:.0f} s: {seen}",
            where=where,
            fix="see the logs of the data hosts, or set feed.local_workers as a fallback",
        )

    # ---- the leader

    def _report(self) -> None:
        """Reports this rank's progress to the leader, which answers with the run's state."""
        with self.lock:
            sessions = list(self.sessions)
            feed = self._work_of(sessions)
        sums = dataclasses.asdict(self._process.timeline.training)
        del sums["epochs"], sums["shared"], sums["ended"]
        progress = messages.Progress(
            # A process that only made its loaders, and has children iterate, only asks.
            has_begun=bool(sessions or feed.hosts),
            rank=self._settings.rank,
            bad_samples=self._process.bad.count,
            feed=feed,
            **sums,
        )
        self._coordinator.send(progress)

    def _work_of(self, sessions: Sequence[FeedSession]) -> messages.FeedWork:
        now = time.monotonic()
        ready = shards = 0
        for work in self._works.values():
            work.credits = 0
        for session in sessions:
            schedule = session.schedule
            ready += len(schedule.arrivals)
            for host, number in Counter(worker.host for worker in session.workers).items():
                work = self._works[host]
                work.credits += ORDERS_PER_WORKER * number
                work.num_workers = max(work.num_workers, number)
            if isinstance(schedule, ShardScheduler):
                shards += schedule.num_shards
        works = [work for work in self._works.values() if work.credits or work.batches]
        return messages.FeedWork(
            seconds=now - self._began,
            taken=self.num_taken,
            ready_at_takes=self.ready_at_takes,
            ready=ready,
            shards=shards,
            hosts=tuple(works[:_MAX_HOSTS]),
        )

    def _close(self) -> None:
        # First: a thread that waits for a batch would wait forever.
        self.mark_failed(FeedError("the feed of this process is closed"))
        self._report()
        for session in list(self.sessions):
            self._discard(session)
        self._coordinator.close(linger_seconds=GOODBYE_SECONDS)
        for host in self._hosts.values():
            host.close()
        # Waits until all sockets have sent their messages, or GOODBYE_SECONDS at most.
        self._context.term()


def _workers_on(host: str, session: FeedSession) -> list[Worker]:
    return [worker for worker in list(session.workers) if worker.host == host]


def _load(host: Host, *, owned: Counter[str], request: EpochRequest) -> tuple[bool, float]:
    """Returns by what a host is chosen for a shard: the lowest is."""
    room = max(1, host.room_for(request))
    # Hosts with a free worker come before local workers, which take the training's CPU.
    return not host.is_remote or owned[host.name] >= room, (owned[host.name] + 1) / room


def feed_of(process: TrainerProcess) -> Feed:
    """Returns the feed of this process (a forked child has another one), closed at its exit."""
    return _feed(os.getpid(), process)


@functools.lru_cache(maxsize=1)
def _feed(pid: int, process: TrainerProcess) -> Feed:
    feed = Feed(process)
    atexit.register(feed.close)
    _show_errors()
    return feed


def _show_errors() -> None:
    """Makes an uncaught error of the feed exit with its exit code, not with 1."""
    show = sys.excepthook

    def show_and_exit(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        show(kind, error, trace)
        if isinstance(error, FeedError):
            # In an excepthook this sets the exit code.
            raise SystemExit(error.exit_code)

    sys.excepthook = show_and_exit
