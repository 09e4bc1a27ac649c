"""The feed of a trainer process: `Feed.session_for`, and the thread that looks after its hosts.

The thread knows the run's data hosts from the coordinator, opens the sessions of loaders on
them, has workers started, and sees who is lost or late. No batch comes through it.
"""

import atexit
import dataclasses
import functools
import itertools
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
from stoker.feed.engine.host import Host, LocalLink
from stoker.feed.engine.raised import summary_of, unpack_error
from stoker.feed.engine.receiver import Counts, Receiver
from stoker.feed.engine.session import EpochRequest, FeedSession, Scheduler, SharedState, Worker
from stoker.feed.engine.shards import ShardScheduler
from stoker.logs import EventName, Log

# Interval of progress reports, and of checks for what no event reports.
_TICK_SECONDS = 1.0
# After that a wait for a batch is said, and each time again.
_HANG_SECONDS = 60.0
# The control thread's goodbye takes milliseconds; local processes may take longer to end.
CLOSE_SECONDS = 8.0
# Beyond the lease: the coordinator's message and the reconnect take a moment.
LOST_GRACE_SECONDS = 3.0
# Instead of the lease, where the coordinator says that every data host has left or is lost.
ALL_GONE_SECONDS = 10.0
# Data hosts, until the coordinator has answered: more than any run has.
_UNKNOWN = 1 << 32

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
        # Of each loader, if it is the only one. Limits are read from 15 files: once.
        self._share = memory.max_bytes(settings.feed) // settings.local_world_size
        # More than one of a loader where its epochs overlap.
        self._of_loader = weakref.WeakKeyDictionary[LoaderBooks, list[FeedSession]]()
        self._context: ZmqContext = zmq.Context()
        self._counts = Counts(self)
        self._new_receiver = partial(
            Receiver,
            self,
            self._counts,
            pool=BufferPool(),
            max_bytes=memory.max_message_bytes(settings.feed),
            accept_pickles=settings.feed.accept_pickles,
            on_lost=self._lost_worker,
        )
        self._roster = messages.RunState(expected=_UNKNOWN)
        # Data hosts, and this one as soon as a loader has local workers.
        self._hosts: dict[str, Host] = {}
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
                if session.name in self.sessions and session.reserve():
                    return session
            # Random: agents may still keep a session of this rank's earlier process.
            name = f"r{self._settings.rank}-l{books.number}-{secrets.token_hex(8)}"
            session = FeedSession(name, new_schedule(self._share), self)
            session.reserve()
            self.sessions[name] = session
            sessions.append(session)
        # Not at exit, where `close` closes all sessions together.
        close = partial(self.post, partial(self._discard, session))
        weakref.finalize(books, close).atexit = False
        return session

    @property
    def has_hosts(self) -> bool:
        """Whether a data host is connected."""
        return any(host.is_remote and host.link.is_up for host in list(self._hosts.values()))

    def exclude(self, session: FeedSession, host: str, why: str) -> None:
        """Has a host make no more batches of a loader."""
        # Said here: the script may end before the thread's next turn.
        self._say_excluded(host, why)
        self.post(partial(self._fail, host, session.name, FeedError(why), why))

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
        coordinator = self._coordinator
        if coordinator.turn(ready, self._take_run_state) and coordinator.is_up:
            self._report()
        for host in list(self._hosts.values()):
            if host.link.turn(ready, partial(self._take_from_agent, host)) and not host.link.is_up:
                self.log.event(EventName.BATCHES_LOST, agent=host.name)
                self._lose_host(host)
        self._follow_roster()
        now = time.monotonic()
        words = self._brake.tick(now) if self._brake.is_due(now) else ""
        # One rank says it for all of its host.
        if words and self._settings.is_first_of_host:
            self.log.event(EventName.MEMORY_SHORT, text=words)
        for session in list(self.sessions.values()):
            if (request := session.request) is not None:
                self._look(session, request, now)
        if now >= self._report_at:
            self._report_at = now + _TICK_SECONDS
            self._report()

    def _poll(self) -> dict[object, int]:
        links = [self._coordinator, *(host.link for host in self._hosts.values())]
        poller = zmq.Poller()
        poller.register(self.wake_fd, zmq.POLLIN)
        for link in links:
            link.register(poller)
        now = time.monotonic()
        looks = [now + _TICK_SECONDS, *(link.dial_at for link in links)]
        looks += [host.not_before for host in self._hosts.values() if host.not_before > now]
        with self.lock:
            for session in self.sessions.values():
                if session.request is not None:
                    looks.append(now + session.schedule.next_check(now))
        milliseconds = math.ceil(max(0.0, min(looks) - now) * 1000)
        ready: dict[object, int] = dict(poller.poll(milliseconds))
        if self.wake_fd in ready:
            os.eventfd_read(self.wake_fd)
        return ready

    def _link(self, name: str, port: int) -> Link:
        return Link(self._context, self._keys, name=name, port=port, post=self.post)

    # ---- which hosts there are

    def _take_run_state(self, packed: bytes) -> None:
        try:
            state = _unpack_run_state(packed)
        except ProtocolError as err:
            self.log.event(EventName.MESSAGE_REFUSED, coordinator=True, reason=err.what)
            return
        assert isinstance(state, messages.RunState)
        self._roster = state
        if state.refusal:
            self.mark_failed(FeedError(f"the leader refuses this rank: {state.refusal}"))

    def _follow_roster(self) -> None:
        """Has a connection to each agent of the roster, and none to those that are lost."""
        roster = self._roster
        listed = {member.host: member for member in roster.agents}
        for name, host in list(self._hosts.items()):
            # A restarted host has another incarnation at the same address, and no state.
            is_other = name in listed and host.member.incarnation != listed[name].incarnation
            is_gone = name not in listed and not host.link.is_up
            if host.is_remote and (is_other or is_gone or name in roster.lost):
                self._lose_host(host)
                host.close()
                del self._hosts[name]
        for name in listed.keys() - self._hosts.keys():
            member = listed[name]
            self._add_host(member, self._link(member.address, member.port))

    def _add_host(self, member: messages.Member, link: Link | LocalLink) -> None:
        receiver, num_ranks = self._new_receiver(), self._settings.world_size
        self._hosts[member.host] = Host(member, link, receiver, self._lost_connection, num_ranks)

    def _lose_host(self, host: Host) -> None:
        """Loses a host's workers: its control connection is gone."""
        host.forget()
        for session in list(self.sessions.values()):
            session.lose(_workers_on(host.name, session))

    # ---- what hosts say

    def _take_from_agent(self, host: Host, packed: bytes) -> None:
        try:
            self._handle(host, _unpack_from_agent(packed))
        except ProtocolError as err:
            self.log.event(EventName.MESSAGE_REFUSED, agent=host.name, reason=err.what)
            host.link.mark_lost()

    def _handle(self, host: Host, message: messages.Message) -> None:
        match message:
            case messages.Ticket():
                host.take_ticket(message)
            case messages.Opened(session=name, dataset=digest):
                if opening := host.opening_of(name, digest):
                    opening.state = "opened"
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
                self._say_excluded(host.name, summary_of(error))
                self._fail(host.name, name, raised, summary_of(error))
            case messages.Ended(worker=number, how=how, making=(epoch_id, batch, place)):
                worker = host.workers.pop(number, None)
                # No words: its connection was closed from here.
                if worker is None or not how:
                    return
                if worker.session.epoch_id == epoch_id:
                    worker.session.died(worker, how, number=batch, place=place)
                else:
                    worker.session.lose([worker])
            case messages.WrongHost():
                # Another host has the address now. The name server may still return it.
                self.log.event(EventName.AGENT_ADDRESS_REUSED, agent=host.name, found=message.host)
                host.link.mark_lost()

    def _lost_worker(self, worker: Worker, why: str) -> None:
        """Notes a worker whose connection has ended; in a receiver's thread."""
        is_news = not worker.is_lost
        worker.session.lose([worker])
        if is_news:
            self._lost_connection(worker.host, worker.session.name, why, worker.num_made)

    def _lost_connection(self, host: str, session: str, why: str, num_made: int = 0) -> None:
        self.post(partial(self._take_loss, host, session, why, num_made))

    def _take_loss(self, name: str, session: str, why: str, num_made: int) -> None:
        host = self._hosts.get(name)
        if host is None or session not in host.openings:
            return
        self.log.event(EventName.BATCHES_LOST, agent=name, reason=why)
        words = host.note_lost(why, num_made=num_made, now=time.monotonic())
        if words:
            self._say_excluded(name, words)
            self._fail(name, session, FeedLostError(words), words)
        elif host.openings[session].state == "opening":
            # Its dataset could not be sent: it is opened again.
            del host.openings[session]

    def _fail(self, name: str, session: str, error: BaseException, reason: str) -> None:
        """Has a host make no more batches of a loader."""
        host = self._hosts.get(name)
        if host is not None and session in host.openings:
            opening = host.openings[session]
            opening.state, opening.error, opening.reason = "failed", error, reason
            if session in self.sessions:
                self.sessions[session].lose(_workers_on(name, self.sessions[session]))

    def _say_excluded(self, host: str, reason: str) -> None:
        """Says that a host makes no batches of a loader; the run's last words have it, too."""
        self._process.note_made_here(f"data host {host}: {reason}")
        text = f"host {host} makes no batches of this loader: {reason}"
        self.log.event(EventName.HOST_EXCLUDED, agent=host, text=text)

    # ---- sessions

    def _look(self, session: FeedSession, request: EpochRequest, now: float) -> None:
        own = self._settings.host
        if request.local_workers and own not in self._hosts:
            # Its processes are started in the next turn.
            member = messages.Member(host=own, workers=1)
            self._add_host(member, LocalLink(own, self.log))
        all_hosts = self._hosts.values()
        hosts = [host for host in all_hosts if host.is_remote or request.local_workers]
        able = [host for host in hosts if host.link.is_up and now >= host.not_before]
        serving = [host for host in able if host.open(session, request.spec)]
        self._start_workers(session, request, serving, now)
        schedule = session.schedule
        with self.lock:
            # Next to the batches of other loaders.
            others = [other for other in self.sessions.values() if other is not session]
            taken = [other.schedule.committed_bytes for other in others if other.is_busy]
            most = int(self._share * self._brake.share)
            schedule.max_bytes = memory.allowance(most, taken=taken)
            late = schedule.repeat_late(now)
            self._check_workers(session, hosts, now)
        session.order()
        for number in late:
            self.log.event(EventName.BATCH_OVERDUE, epoch=session.epoch, batch=number)
        self._check_wait(session, now)

    def _start_workers(
        self, session: FeedSession, request: EpochRequest, hosts: Sequence[Host], now: float
    ) -> None:
        """Starts the workers that hosts lack, or those of shards that nobody makes."""
        schedule = session.schedule
        started: list[tuple[Host, Worker]] = []
        num_workers = request.num_workers
        with self.lock:
            owned = Counter(worker.host for worker in session.workers)
            if isinstance(schedule, ShardScheduler):
                num_workers = schedule.num_shards
                are_all_there = self._are_all_there(session)
                for shard in schedule.homeless(now, are_all_there=are_all_there) if hosts else ():
                    host = min(hosts, key=partial(_load, owned=owned, request=request))
                    owned[host.name] += 1
                    worker = Worker(session, host.name, shard, is_remote=host.is_remote)
                    started.append((host, worker))
                    schedule.pin(worker, shard)
            else:
                taken = {worker.number for worker in session.workers}
                free = (number for number in itertools.count() if number not in taken)
                for host in hosts:
                    for _ in range(_num_workers(host, request) - owned[host.name]):
                        worker = Worker(session, host.name, next(free), is_remote=host.is_remote)
                        started.append((host, worker))
            session.workers.update(worker for _, worker in started)
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
            head, since = session.schedule.head, session.waits_since
            makers = session.schedule.makers(head)
            if since is None or not makers:
                return
            batch = session.batch_words(head)
        limit = self._settings.feed.batch_timeout_seconds or math.inf
        who: list[str] = []
        for worker, begun_at in makers.items():
            assert isinstance(worker, Worker)
            who.append(f"worker {worker.number} of {worker.host}")
            if now - begun_at > limit:
                session.died(worker, f"it took more than {limit:g} s", number=head)
        waited = now - max(since, *makers.values())
        if waited > _HANG_SECONDS * (session.num_hangs_told + 1):
            session.num_hangs_told += 1
            makes = f"{' and '.join(who)} makes; its stack is in that host's log"
            text = f"waiting for {batch} for {waited:.0f} s, which {makes}"
            self.log.event(EventName.BATCH_HANGS, rank=self._settings.rank, text=text)

    def _discard(self, session: FeedSession) -> None:
        """Closes the session of a loader that is gone."""
        with self.lock:
            self.sessions.pop(session.name, None)
            session.dismiss()
        for host in self._hosts.values():
            host.close_session(session.name)

    # ---- without workers; under the lock

    def _are_all_there(self, session: FeedSession) -> bool:
        """Returns whether every data host has opened a session, or cannot."""
        states = [host.state_of(session) for host in self._hosts.values() if host.is_remote]
        num_known = states.count("opened") + states.count("failed")
        return num_known >= self._roster.expected - len(self._roster.lost)

    def _check_workers(self, session: FeedSession, hosts: Sequence[Host], now: float) -> None:
        """Fails a session that has had no worker for too long, or that no host can serve."""
        alone = now - session.alone_since
        if session.schedule.workers:
            if session.is_waiting:
                waited = round(alone, 1)
                self.log.event(EventName.TRAINING_CONTINUES, waited_seconds=waited)
            session.alone_since = now
            session.is_waiting = False
            return
        feed, roster, comes_back = self._settings.feed, self._roster, self._settings.comes_back
        states = [host.state_of(session) for host in hosts]
        # A lost host may come back, and may be able to make them.
        num_away = roster.expected - sum(host.is_remote for host in hosts)
        if not comes_back:
            num_away -= len(roster.lost)
        if hosts and num_away <= 0 and all(state == "failed" for state in states):
            opening = hosts[0].openings[session.name]
            error = RebuildingError(
                f"no data host can make batches of this dataset: {opening.reason}",
                where=f"host {hosts[0].name}",
                fix="mend what the host's error above says",
            )
            error.__cause__ = opening.error
            session.mark_failed(error)
            return
        patience = feed.lease_seconds + LOST_GRACE_SECONDS
        are_gone = roster.expected < _UNKNOWN and not (roster.agents or roster.awaited)
        if are_gone:
            patience = min(patience, ALL_GONE_SECONDS)
        # A worker's start takes longer than a reconnect, and a preempted host waits for a new node.
        is_starting = "opening" in states or "opened" in states
        is_first = not (session.had_workers or are_gone)
        may_come = comes_back or is_starting or is_first
        if alone > (feed.start_deadline_seconds if may_come else patience):
            session.mark_failed(self._lost_error(session, hosts, alone))
        elif alone > patience and not session.is_waiting:
            # Logged once, not at each tick.
            session.is_waiting = True
            self.log.event(EventName.TRAINING_WAITING, epoch=session.epoch)

    def _lost_error(
        self, session: FeedSession, hosts: Sequence[Host], alone: float
    ) -> FeedLostError:
        settings, roster = self._settings, self._roster
        what = "lost all data workers" if session.had_workers else "no data worker came"
        expected = f"the coordinator at {settings.coordinator} did not answer"
        if roster.expected < _UNKNOWN:
            # The last word on a host counts.
            fates = dict.fromkeys(roster.awaited, "never came")
            fates |= {member.host: "no connection" for member in roster.agents}
            for host in hosts:
                opening = host.openings.get(session.name)
                fates[host.name] = opening.reason or "not ready" if opening else "no connection"
            fates |= dict.fromkeys(roster.lost, "lost")
            fates |= {name: f"left: {why}" for name, why in roster.left.items()}
            seen = ", ".join(f"{name} ({fate})" for name, fate in fates.items()) or "none seen"
            expected = f"{roster.expected} data hosts expected, {seen}"
        where = f"rank {settings.rank}, epoch {session.epoch}, batch {session.schedule.head}"
        return FeedLostError(
            f"{what} within {alone:.0f} s: {expected}",
            where=where,
            fix="see the logs of the data hosts, or set feed.local_workers as a fallback",
        )

    # ---- the leader

    def _report(self) -> None:
        """Reports this rank's progress to the leader, which answers with the run's state."""
        with self.lock:
            sessions = list(self.sessions.values())
            feed = self._counts.tell(sessions)
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

    def _close(self) -> None:
        # First: a thread that waits for a batch would wait forever.
        self.mark_failed(FeedError("the feed of this process is closed"))
        self._report()
        for session in list(self.sessions.values()):
            self._discard(session)
        self._coordinator.close(linger_seconds=GOODBYE_SECONDS)
        for host in self._hosts.values():
            host.close()
        # Waits until all sockets have sent their messages, or GOODBYE_SECONDS at most.
        self._context.term()


def _workers_on(host: str, session: FeedSession) -> list[Worker]:
    return [worker for worker in list(session.workers) if worker.host == host]


def _num_workers(host: Host, request: EpochRequest) -> int:
    return host.num_workers if host.is_remote else request.local_workers


def _load(host: Host, *, owned: Counter[str], request: EpochRequest) -> tuple[bool, float]:
    """Returns by what a host is chosen for a shard: the lowest is."""
    room = max(1, _num_workers(host, request))
    # Hosts with a free worker come before local workers, which take the training's CPU.
    return not host.is_remote or owned[host.name] >= room, (owned[host.name] + 1) / room


def feed_of(process: TrainerProcess) -> Feed:
    """Returns the feed of this process (a forked child has another one), closed at its exit."""
    _show_errors(os.getpid())
    return _feed(os.getpid(), process)


@functools.lru_cache(maxsize=1)
def _feed(pid: int, process: TrainerProcess) -> Feed:
    feed = Feed(process)
    atexit.register(feed.close)
    return feed


@functools.lru_cache(maxsize=1)
def _show_errors(pid: int) -> None:
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
