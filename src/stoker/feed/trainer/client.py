"""The client of the feed in a trainer process: one I/O thread for all its loaders."""

import atexit
import dataclasses
import errno
import functools
import os
import secrets
import select
import sys
import threading
import time
import weakref
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from types import TracebackType

import msgspec
import zmq
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from stoker import units
from stoker.environment import ProcessSettings
from stoker.errors import FeedError, ProtocolError, UsageError
from stoker.feed import memory
from stoker.feed.abandoned_workers import end_elsewhere
from stoker.feed.bookkeeping import LoaderBooks, TrainerProcess, known_process
from stoker.feed.memory_guard import MemoryGuard
from stoker.feed.trainer.answers import Answers, LocalAnswers, mark_peer_lost, reassign_local
from stoker.feed.trainer.buffers import BatchBuffers
from stoker.feed.trainer.control_connection import GOODBYE_SECONDS, ZmqContext
from stoker.feed.trainer.host_watch import HostWatch
from stoker.feed.trainer.late_batches import LateBatches
from stoker.feed.trainer.links import AgentLink, Link
from stoker.feed.trainer.observer import Observer, SessionState
from stoker.feed.trainer.pinned import PinnedMemory
from stoker.feed.trainer.scheduler import BatchScheduler, Peer, Scheduler
from stoker.feed.trainer.session import LOCAL, FeedSession, SharedState
from stoker.feed.trainer.shards import idle_words
from stoker.feed.trainer.shared_batch import BatchShares, shares_of
from stoker.feed.wire import protocol
from stoker.feed.wire.crypto import Keys, read_token
from stoker.feed.wire.dataset import PackedSpec
from stoker.feed.wire.stream import MAX_IDLE_BYTES, BufferPool, Bytes
from stoker.feed.workers.jobs import Result
from stoker.feed.workers.splitting import num_samples, splits_of
from stoker.logs import EventName, Log

_VERSIONS = protocol.own_versions()
# Interval of progress reports, and of checks for what no event reports.
_TICK_SECONDS = 1.0
_IN = select.POLLIN
_OUT = select.POLLOUT
# The I/O thread's goodbye takes milliseconds; local workers may take longer to stop.
CLOSE_SECONDS = 8.0


class Requester:
    """The I/O thread's orders to data hosts and local workers.

    Callers hold the lock, but for `pass_on`.
    """

    def __init__(
        self,
        shared: SharedState,
        settings: ProcessSettings,
        links: Mapping[str, AgentLink],
        hosts: HostWatch,
    ) -> None:
        self._shared = shared
        self._settings = settings
        self._feed = settings.feed
        self._links = links
        self._hosts = hosts
        # Sessions that were told of idle data workers: once is enough, their number of shards
        # stays.
        self._warned_of: set[str] = set()
        self._has_warned_of_bytes = False

    def announce(self, session: FeedSession) -> None:
        """Opens the loader's dataset on hosts that lack it, and cancels its earlier epochs."""
        session.has_news = False
        if session.spec is None:
            return
        before = session.epoch_id
        if not session.is_busy:
            # This one is over, and is cancelled, too.
            before += 1
        if session.local is not None:
            session.local.cancel(before_epoch_id=before)
        for link in self._links.values():
            if not link.is_up or not link.may_open(session.name, epoch_id=session.epoch_id):
                continue
            opened = session.spec.digest, session.seeding
            if link.opened.get(session.name) != opened:
                link.opened[session.name] = opened
                # Until the agent is ready with this spec it gets no order.
                link.ready.discard(session.name)
                link.attach()
                link.send(
                    protocol.Open(
                        protocol=protocol.PROTOCOL_VERSION,
                        session=session.name,
                        rank=self._settings.rank,
                        spec=session.spec.digest,
                        spec_bytes=len(session.spec.data),
                        seeding=session.seeding,
                        base_seed=session.base_seed,
                        # The ids of hosts interleave (place, place + hosts, ...).
                        first_worker=self._first_worker(session.spec) + link.member.place,
                        worker_step=max(1, self._hosts.num_expected or 1),
                        versions=_VERSIONS,
                        host=link.member.host,
                    )
                )
            # After the Open, which resets the agent's list of cancelled epochs.
            link.send(protocol.Cancel(session=session.name, before_epoch_id=before))

    def _first_worker(self, spec: PackedSpec) -> int:
        """Returns the lowest id that no local worker of any rank has."""
        # What the plan decided goes before the setting.
        decided = self._settings.workers.get("dnn")
        if decided is None and self._feed.local_workers != "auto":
            decided = self._feed.local_workers
        return max(spec.num_workers, decided or 0)

    def ask(self, session: FeedSession, now: float) -> None:
        schedule = session.schedule
        # First: what is assigned below is bounded by it.
        schedule.max_bytes = self._max_bytes(session)
        if session.local is not None:
            session.local.spare_memory(self._shared.memory_share)
        for batch_number in schedule.overdue(now):
            self._shared.log.event(EventName.BATCH_OVERDUE, epoch=session.epoch, batch=batch_number)
        if not schedule.is_settled and self._are_all_there(session):
            schedule.settle()
        if schedule.num_shards and schedule.is_settled and session.name not in self._warned_of:
            self._warn_of_few_shards(session)
        if self._feed.max_bytes is not None and not self._has_warned_of_bytes:
            self._warn_of_few_bytes(session, self._feed.max_bytes)
        self._send_orders(session, now)
        if session.local is not None:
            for _ in session.local.give_late_jobs_again():
                self._shared.log.event(EventName.LOCAL_BATCH_OVERDUE, epoch=session.epoch)
            session.local.flush()

    def _max_bytes(self, session: FeedSession) -> int:
        """Returns how many bytes a loader's batches may have, next to those of other loaders."""
        sessions = self._shared.sessions
        total = int(session.max_bytes * self._shared.memory_share)
        if session.local is not None:
            total = max(0, total - session.local.part_bytes)
        if len(sessions) == 1:
            return total
        # At each turn, because what other loaders hold changes with each batch.
        others = [s.schedule for s in sessions.values() if s is not session and s.is_busy]
        taken = [other.committed_bytes for other in others]
        return memory.allowance(total, taken=taken)

    def _send_orders(self, session: FeedSession, now: float) -> None:
        lost: list[Result] = []
        for peer, batch_number in session.schedule.assign(now):
            order = self._shared_order(session, session.order_of(batch_number), peer)
            if peer == LOCAL and session.local is not None:
                lost += session.local.ask(order)
            elif isinstance(peer, str) and peer in self._links:
                self._send_order(peer, order)
        for result in lost:
            reassign_local(session, result, host=self._settings.host)
        if session.schedule.may_share():
            self._share_last(session, now)

    def _send_order(self, host: str, order: protocol.Make) -> None:
        self._links[host].has_asked = True
        self._links[host].send(order)

    def _shared_order(
        self, session: FeedSession, order: protocol.Make, collator: Peer
    ) -> protocol.Make:
        """Has other hosts make samples of an epoch's first batch as well, where that pays.

        Returns:
            The order for the peer that has the batch.
        """
        schedule = session.schedule
        splits = splits_of(self._feed.split_batches, session.seeding)
        # Only the first peer that is asked for it: of another one it is expected that it is late.
        is_first = order.batch_number == schedule.head == 0 and len(schedule.makers(0)) == 1
        if splits is False or not is_first or order.stream is not None:
            return order
        shares = self._first_shares(session, order, collator)
        if shares is None:
            return order
        self._lend(session, order, shares, collator)
        return msgspec.structs.replace(
            order,
            part_samples=shares.part_samples,
            elsewhere=tuple(shares.places.values()),
        )

    def _lend(
        self, session: FeedSession, order: protocol.Make, shares: BatchShares, collator: Peer
    ) -> None:
        """Has hosts make their shares of a batch, and send them for the peer that collates."""
        session.sharing.begin(order.batch_number, collator)
        shared = msgspec.structs.replace(order, part_samples=shares.part_samples)
        for host, (first, last) in shares.places.items():
            session.schedule.peers[host].helps_with[order.batch_number] = last - first
            self._send_order(str(host), msgspec.structs.replace(shared, only=(first, last)))

    def _workers_of(self, session: FeedSession) -> dict[Peer, int]:
        """Returns the workers of the peers that may make samples of a batch."""
        workers: dict[Peer, int] = {}
        for peer, state in session.schedule.peers.items():
            if state.credits <= 0 or state.is_draining:
                continue
            link = self._links.get(str(peer))
            if peer == LOCAL and session.local is not None:
                workers[peer] = session.local.num_ready
            elif link is not None and link.is_up and session.name in link.ready:
                workers[peer] = link.member.workers
        return workers

    def _first_shares(
        self, session: FeedSession, order: protocol.Make, collator: Peer
    ) -> BatchShares | None:
        """Returns which hosts make which samples of a first batch; None: that does not pay."""
        size = num_samples(order)
        workers = self._workers_of(session)
        if collator != LOCAL:
            # These have the next batches.
            workers.pop(LOCAL, None)
        if size < 2 or len(workers) < 2 or not workers.get(collator):
            return None
        shares = shares_of(size, collator=collator, workers=workers)
        if shares is None or self._feed.split_batches is True:
            return shares
        # In units of the time that one worker takes for the batch: what all workers take for the
        # first batches of all ranks, and by how much sooner that is than with the collator's alone.
        together = min(1.0, self._settings.world_size / sum(workers.values()))
        fewer = 1 / workers[collator] - together
        if session.sharing.pays(fewer=fewer, share=shares.num_elsewhere / size):
            return shares
        return None

    def _share_last(self, session: FeedSession, now: float) -> None:
        """Has hosts without a batch make samples of an epoch's last ones, where that pays.

        They help with one batch at a time, the next that the trainer waits for: so what is made for
        others needs the memory of one batch at most.
        """
        if splits_of(self._feed.split_batches, session.seeding) is False:
            return
        for batch_number, collator in session.schedule.unfinished():
            if session.sharing.collators.get(batch_number) == collator:
                # Others help with it already.
                continue
            order = session.order_of(batch_number)
            shares = self._last_shares(session, order, collator, now)
            if shares is None:
                continue
            order = msgspec.structs.replace(order, is_among_last=True)
            self._lend(session, order, shares, collator)
            self._announce_shares(session, order, shares, collator)
            return

    def _announce_shares(
        self, session: FeedSession, order: protocol.Make, shares: BatchShares, collator: Peer
    ) -> None:
        """Says which samples others make to a peer that has a batch already."""
        message = protocol.Share(
            session=order.session,
            epoch_id=order.epoch_id,
            batch_number=order.batch_number,
            part_samples=shares.part_samples,
            elsewhere=tuple(shares.places.values()),
        )
        if collator == LOCAL and session.local is not None:
            session.local.share_out(message)
        else:
            self._links[str(collator)].send(message)

    def _last_shares(
        self, session: FeedSession, order: protocol.Make, collator: Peer, now: float
    ) -> BatchShares | None:
        """Returns which idle hosts make which samples of a batch; None: that does not pay."""
        peers = session.schedule.peers
        size = num_samples(order)
        able = self._workers_of(session)
        num_workers = able.get(collator, 0)
        if size < 2 or not num_workers:
            return None
        # Of its workers, those that this batch has.
        workers = {collator: max(1, num_workers // len(peers[collator].asked))}
        workers |= {peer: able[peer] for peer in able if peers[peer].has_nothing}
        usual = session.sharing.usual_seconds
        due = peers[collator].due_seconds(
            order.batch_number, workers=num_workers, usual=usual, now=now
        )
        # One that is late takes as long again as it is late; how far it is, nobody knows.
        left = 1.0
        if usual:
            left = min(1.0, abs(due) / usual)
        begin = 0
        if due > 0:
            begin = int(size * (1 - left))
        shares = shares_of(size, collator=collator, workers=workers, begin=begin)
        if shares is None or self._feed.split_batches is True:
            return shares
        fewer = left * (1 / workers[collator] - 1 / sum(workers.values()))
        if session.sharing.pays(fewer=fewer, share=shares.num_elsewhere / size):
            return shares
        return None

    def pass_on(
        self, link: AgentLink, part: protocol.BatchPart, payload: Bytes
    ) -> tuple[FeedSession, list[Result]] | None:
        """Gives samples to the peer that makes their batch, if it still does; takes the lock.

        Args:
            link: To the host that has made them.

        Returns:
            What they end, if local workers make it, and of which session.
        """
        with self._shared.lock:
            session = self._shared.sessions.get(part.session)
            if session is None or session.epoch_id != part.epoch_id or not session.is_busy:
                return None
            sharing = session.sharing
            batch_number = part.batch_number
            host = link.member.host
            sharing.add_part(part, nbytes=payload.nbytes)
            session.schedule.came_part(host, batch_number, num_samples=part.num_samples)
            collator = sharing.collators.get(batch_number)
            is_awaited = collator in session.schedule.makers(batch_number)
            if not is_awaited or payload.nbytes > self._feed.max_dataset_bytes:
                return None
            sharing.count_passed_on(batch_number, host, part.num_samples)
            local, to = session.local, self._links.get(str(collator))
        whole = msgspec.structs.replace(part, payload=payload.tobytes())
        if collator == LOCAL and local is not None:
            return session, local.add_part(whole)
        # In pieces, as the agent's frames are short.
        if to is not None:
            to.send(whole)
        return None

    def _warn_of_few_shards(self, session: FeedSession) -> None:
        self._warned_of.add(session.name)
        text = idle_words(
            num_shards=session.schedule.num_shards,
            ranks=self._settings.world_size,
            data_workers=sum(
                link.member.workers for link in self._links.values() if session.name in link.ready
            ),
            is_set=self._feed.shards is not None,
            has_workers=session.schedule.has_workers,
        )
        if text and self._settings.rank == 0:
            self._shared.log.event(EventName.FEW_SHARDS, text=text)

    def _warn_of_few_bytes(self, session: FeedSession, max_bytes: int) -> None:
        """Says once that `feed.max_bytes` holds no batch, so that none is made ahead."""
        batch_bytes = session.schedule.usual_bytes
        if batch_bytes <= session.max_bytes:
            return
        self._has_warned_of_bytes = True
        # One rank says it for all of its host.
        if not self._settings.is_first_of_host:
            return
        workers = sum(link.member.workers for link in self._links.values())
        needed = 2 * max(1, workers) * batch_bytes * self._settings.local_world_size
        limit, one, enough = map(units.size, (max_bytes, batch_bytes, needed))
        self._shared.log.event(
            EventName.MAX_BYTES_SMALL,
            text=f"feed.max_bytes ({limit}) holds no batch for each rank of this host: one has "
            f"{one}, and is made only when the one before is taken; set it to {enough}, two "
            "batches for each worker, or leave it out",
        )

    def _are_all_there(self, session: FeedSession) -> bool:
        num_known = sum(
            session.name in link.ready or link.has_failed(session.name)
            for link in self._links.values()
        )
        expected = self._hosts.num_expected
        return expected is not None and num_known >= expected - len(self._hosts.lost)


# Descriptor of a local worker to its session and the poller's flags.
_ChildSessions = dict[int, tuple[FeedSession, int]]
# Links, the descriptors of their connections, local workers.
_Polled = tuple[list[Link], list[tuple[int, ...]], _ChildSessions]


def fix_of_crash(err: BaseException) -> str:
    """Returns what to do about an error that ended the feed's thread: a limit's, or a bug's."""
    if getattr(err, "errno", None) in (errno.EMFILE, errno.ENFILE):
        return "raise the limit of open files (ulimit -n 65536)"
    if "can't start new thread" in str(err):
        return "raise the limit of tasks (ulimit -u, a pod's pids limit): a trainer needs about 20"
    return "this is a bug in stoker; please report it with the traceback above"


def _next_look_seconds(session: FeedSession, now: float) -> float:
    """Returns the seconds until a session wants a look without any event."""
    waits = [max(0.0, session.check_at - now)]
    wait = session.schedule.next_check(now)
    if wait is not None:
        waits.append(wait)
    if session.local is not None and session.is_busy:
        wait = session.local.next_look_seconds()
        if wait is not None:
            waits.append(wait)
    return min(waits)


class IoThread:
    """Asks agents and local workers for batches, and takes answers; `run` blocks its thread."""

    def __init__(self, shared: SharedState, settings: ProcessSettings, keys: Keys) -> None:
        self._shared = shared
        self._settings = settings
        self._keys = keys
        self._context: ZmqContext = zmq.Context()
        self._unpack_coordinator = protocol.Unpacker(protocol.FromCoordinator)
        # Cannot be unregistered: a weak reference, so that a closed feed is not kept.
        os.register_at_fork(after_in_child=partial(_close_descriptors, weakref.ref(shared)))
        now = self._progress_at = time.monotonic()
        self._polled: _Polled = ([], [], {})
        self._poll = select.poll()
        self._link_of: dict[int, Link] = {}
        self._links: dict[str, AgentLink] = {}
        # The ranks of a host share its memory evenly.
        self._guard = MemoryGuard(
            max_bytes=memory.max_bytes(settings.feed) // max(1, settings.local_world_size)
        )
        self._observer = Observer(own_host=settings.host, clock=time.monotonic)
        self._ended: list[SessionState] = []
        self._has_begun = False
        self._pool = pool = BufferPool()
        self._hosts = HostWatch(shared, settings, self._links)
        self._asking = Requester(shared, settings, self._links, self._hosts)
        self._answers = Answers(
            shared,
            self._observer,
            pool,
            settings.feed,
            on_lost=self._mark_lost,
            pass_on=self._pass_on,
        )
        self._local_answers = LocalAnswers(
            shared, self._observer, BatchBuffers(pool, shared.pinned), host=settings.host
        )
        self._late = LateBatches(shared, settings, self._links)
        host, _, port = (settings.coordinator or "").rpartition(":")
        self._coordinator = Link(
            self._context, keys, name=host, port=int(port), now=now, post=shared.post
        )

    def run(self) -> None:
        """Runs until the feed is closed; a crash fails every session with its error."""
        shared = self._shared
        try:
            # After the first turn, which dials: during it the connection is set up.
            self._turn()
            # Starts pyzmq's thread that frees zero-copy frames (2 to 7 ms), before the first spec.
            zmq.Frame(b"", copy=False)
            while not shared.is_closing:
                self._turn()
        except BaseException as err:
            failure = FeedError(
                f"the feed's thread failed: {type(err).__name__}: {err}",
                where=f"rank {self._settings.rank}, host {self._settings.host}",
                fix=fix_of_crash(err),
            )
            failure.__cause__ = err
            shared.mark_failed(failure)
        finally:
            self._close()

    def _turn(self) -> None:
        now = time.monotonic()
        shared = self._shared
        links = [self._coordinator, *self._links.values()]
        # What zmq has read already: no descriptor signals it again.
        served = {link for link in links if link.has_input()}
        children: _ChildSessions = {}
        seconds = min(self._check_links(links, now), self._check_sessions(children, now))
        self._watch(links, children)
        # `mark_asleep` last: a `wake` from here on ends the poll. Rounded up, or it ends too early.
        milliseconds = int(seconds * 1000) + 1 if shared.mark_asleep() and not served else 0
        ready = {fileno for fileno, _ in self._poll.poll(milliseconds)}
        # In this order: a `wake` from here on, as by posted functions, is for the next poll.
        shared.mark_awake(is_rung=shared.wake_fd in ready)
        shared.run_posted()
        for fileno in ready:
            if fileno in self._link_of:
                served.add(self._link_of[fileno])
            elif fileno in children:
                self._local_answers.take(children[fileno][0], fileno)
        for link in links:
            if link in served:
                self._serve(link, ready)
        self._tick(time.monotonic())

    def _pass_on(self, link: AgentLink, part: protocol.BatchPart, payload: Bytes) -> None:
        ended = self._asking.pass_on(link, part, payload)
        if ended is not None:
            self._local_answers.settle(*ended)

    def _check_links(self, links: Sequence[Link], now: float) -> float:
        """Returns the seconds until a connection wants a look."""
        seconds = _TICK_SECONDS
        for link in links:
            wait = link.wait_seconds(now)
            if wait is not None and wait < seconds:
                seconds = wait
        return seconds

    def _check_sessions(self, children: _ChildSessions, now: float) -> float:
        """Returns the seconds until a session wants a look, and adds its workers to `children`."""
        seconds = _TICK_SECONDS
        with self._shared.lock:
            for session in self._shared.sessions.values():
                seconds = min(seconds, _next_look_seconds(session, now))
                if session.local is None:
                    continue
                for fileno, wants_write in session.local.sockets().items():
                    children[fileno] = (session, _IN | _OUT if wants_write else _IN)
        return seconds

    def _watch(self, links: list[Link], children: _ChildSessions) -> None:
        filenos = [link.filenos for link in links]
        polled = (links, filenos, children)
        # Nearly always: to register all descriptors again would cost more than the poll.
        if polled == self._polled:
            return
        self._poll = select.poll()
        self._polled = polled
        self._poll.register(self._shared.wake_fd, _IN)
        self._link_of = {fileno: link for link in links for fileno in link.filenos}
        for fileno in self._link_of:
            self._poll.register(fileno, _IN)
        for fileno, (_, flags) in children.items():
            self._poll.register(fileno, flags)

    def _serve(self, link: Link, ready: Container[int]) -> None:
        has_events = link.has_events(ready)
        # Messages before connection events: a host that drains says so, and may hang up.
        if isinstance(link, AgentLink):
            link.receive(partial(self._answers.take, link), ready=ready)
        else:
            link.receive(self._take_roster, ready=ready)
        if not has_events or not link.watch(time.monotonic()):
            return
        if not isinstance(link, AgentLink):
            if link.is_up:
                link.send(
                    protocol.Attend(
                        protocol=protocol.PROTOCOL_VERSION,
                        run_id=self._settings.run_id,
                        rank=self._settings.rank,
                        host=self._settings.host,
                    )
                )
        elif link.is_up:
            link.attach()
            with self._shared.lock:
                for session in self._shared.sessions.values():
                    session.has_news = True
        else:
            self._mark_lost(link)

    def _mark_lost(self, link: AgentLink) -> None:
        self._shared.log.event(EventName.AGENT_CONNECTION_LOST, agent=link.member.host)
        mark_peer_lost(self._shared, link)
        if not any(other.is_up for other in self._links.values()):
            with self._shared.lock:
                self._hosts.log_alone()

    def _take_roster(self, frames: Sequence[zmq.Frame]) -> None:
        try:
            message = self._unpack_coordinator(frames[0].buffer)
        except ProtocolError as err:
            self._shared.log.event(EventName.MESSAGE_REFUSED, coordinator=True, reason=err.what)
            return
        if isinstance(message, protocol.Refused):
            self._shared.mark_failed(
                FeedError(
                    f"the coordinator refuses this rank: {message.reason}",
                    where=f"rank {self._settings.rank}, host {self._settings.host}",
                )
            )
        if isinstance(message, protocol.Roster):
            self._hosts.take_roster(message, time.monotonic())
            self._link_to(message.agents)

    def _link_to(self, agents: Sequence[protocol.Member]) -> None:
        """Has a link to each agent of the roster, and none to those that left or are lost."""
        listed = {member.host: member for member in agents}
        for host, link in list(self._links.items()):
            link.is_listed = host in listed
            if (host in listed and not link.is_same(listed[host])) or host in self._hosts.lost:
                mark_peer_lost(self._shared, link)
                self._remove(link)
            elif not link.is_listed and not link.is_up:
                # It left, and its last messages are read.
                self._remove(link)
        for host, member in listed.items():
            if host not in self._links:
                self._links[host] = AgentLink(
                    self._context, self._keys, member, now=time.monotonic(), post=self._shared.post
                )

    def _tick(self, now: float) -> None:
        for link in [self._coordinator, *self._links.values()]:
            if link.is_open:
                continue
            if isinstance(link, AgentLink) and not link.is_listed:
                self._remove(link)
            else:
                link.tick(now)
        self._guard_memory(now)
        if now >= self._progress_at:
            self._progress_at = now + _TICK_SECONDS
            self._report()
        with self._shared.lock:
            self._has_begun = self._has_begun or bool(self._shared.sessions)
            closing = self._shared.take_closing()
            self._ended += map(self._state, closing)
            locals_ended = [s.local for s in closing if s.local is not None]
            for session in (*closing, *self._shared.sessions.values()):
                locals_ended += session.closing_locals
                session.closing_locals = []
            for session in self._shared.sessions.values():
                self._tick_session(session, now)
        for session in closing:
            for agent in self._links.values():
                agent.discard(session.name)
                agent.send(protocol.Close(session=session.name))
        # Without the lock: they may take seconds to stop, and the script would get no batch.
        for local in locals_ended:
            local.close()

    def _guard_memory(self, now: float) -> None:
        if not self._guard.is_due(now):
            return
        with self._shared.lock:
            schedules = [session.schedule for session in self._shared.sessions.values()]
            waiting_bytes = sum(schedule.committed_bytes for schedule in schedules)
            coming_bytes = sum(schedule.coming_bytes for schedule in schedules)
        words = self._guard.tick(now, waiting_bytes=waiting_bytes, coming_bytes=coming_bytes)
        if self._shared.memory_share != self._guard.share:
            self._shared.memory_share = self._guard.share
            self._pool.keep_at_most(int(MAX_IDLE_BYTES * self._guard.share))
        # One rank says it for all of its host.
        if words and self._settings.is_first_of_host:
            self._shared.log.event(EventName.MEMORY_SHORT, text=words)

    def _tick_session(self, session: FeedSession, now: float) -> None:
        # Before orders: they follow the Open on the same connection.
        if session.has_news:
            self._asking.announce(session)
        if session.is_busy:
            self._asking.ask(session, now)
            self._hosts.check(session, now)
            self._late.check(session, now)
        if session.is_due:
            session.ring()

    def _report(self) -> None:
        # A process that only made its loaders, and has children iterate, has nothing to report.
        if not self._coordinator.is_up or not self._has_begun:
            return
        sums = dataclasses.asdict(self._shared.timeline.training)
        del sums["epochs"], sums["shared"]
        with self._shared.lock:
            states = self._ended
            self._ended = []
            states += map(self._state, self._shared.sessions.values())
            feed = self._observer.tell(states)
        process = known_process()
        progress = protocol.Progress(
            rank=self._settings.rank,
            bad_samples=0 if process is None else process.num_bad,
            memory_share=self._guard.share,
            least_memory_share=self._guard.least_share,
            feed=feed,
            **sums,
        )
        self._coordinator.send(progress)

    def _state(self, session: FeedSession) -> SessionState:
        return session.schedule.observe(own_host=self._settings.host, now=time.monotonic())

    def _remove(self, link: AgentLink) -> None:
        link.close_for_good()
        # A host that came back has another link under its name.
        if self._links.get(link.member.host) is link:
            del self._links[link.member.host]

    def _close(self) -> None:
        # First: a thread that waits for a batch would wait forever.
        self._shared.mark_failed(FeedError("the feed of this process is closed"))
        with self._shared.lock:
            sessions = [*self._shared.sessions.values(), *self._shared.take_closing()]
            self._ended += map(self._state, sessions)
            self._shared.sessions.clear()
        for session in sessions:
            for agent in self._links.values():
                agent.send(protocol.Close(session=session.name))
            for local in [session.local, *session.closing_locals]:
                if local is not None:
                    local.close()
        self._report()
        for link in [self._coordinator, *self._links.values()]:
            link.close_for_good(linger_seconds=GOODBYE_SECONDS)
        for receiver in list(self._shared.receivers):
            receiver.join(GOODBYE_SECONDS)
        # Waits until all sockets have sent their messages, or GOODBYE_SECONDS at most.
        self._context.term()


def _close_descriptors(shared: "weakref.ref[SharedState]") -> None:
    feed = shared()
    for receiver in list(feed.receivers) if feed else ():
        receiver.close_descriptor()


class Feed:
    """Batches from the data group and from local workers, for the loaders of this process.

    Raises UsageError if the run's token or the coordinator's address is missing or malformed.
    """

    def __init__(self, process: TrainerProcess) -> None:
        settings = process.settings
        if settings.token_file is None:
            raise UsageError(
                "the run has a data group, but no token",
                where="variable STOKER_TOKEN_FILE",
                fix="start the training with `stoker train` or `stoker launch`",
            )
        host, _, port = (settings.coordinator or "").rpartition(":")
        if not host or not port.isdigit():
            raise UsageError(
                f"expected host:port, found {settings.coordinator!r}",
                where="variable STOKER_COORDINATOR",
            )
        keys = Keys.from_token(read_token(settings.token_file))
        log = Log(run=settings.run_id, host=settings.host)
        self._settings = settings
        self._pid = os.getpid()
        max_bytes = memory.max_bytes(settings.feed)
        # Of each loader, if it is the only one. Limits are read from 15 files: once.
        self._share = max_bytes // settings.local_world_size
        pinned = PinnedMemory(
            # Twice what may wait: torch pins powers of two.
            max_bytes=2 * max_bytes // settings.local_world_size,
            warn=lambda reason: log.event(
                EventName.PINNING_FAILED,
                rank=settings.rank,
                text=f"batches are in pageable memory, which cannot be pinned: {reason}",
            ),
        )
        self.shared = SharedState(timeline=process.timeline, log=log, pinned=pinned)
        # More than one of a loader where its epochs overlap.
        self._sessions = weakref.WeakKeyDictionary[LoaderBooks, list[FeedSession]]()
        # Before the threads start that must not wait.
        end_elsewhere(_MultiProcessingDataLoaderIter)
        io_thread = IoThread(self.shared, settings, keys)
        self._thread = threading.Thread(target=io_thread.run, name="stoker-feed", daemon=True)
        self._thread.start()

    def session_for(
        self, books: LoaderBooks, *, new_schedule: Callable[[int], Scheduler] = BatchScheduler
    ) -> FeedSession:
        """Returns an unused session of that loader, or a new one."""
        shared = self.shared
        with shared.lock:
            sessions = self._sessions.setdefault(books, [])
            for idle in list(sessions):
                if not idle.is_idle() or idle.name not in shared.sessions:
                    continue
                # Its workers ended with their iterator: the next epoch needs a fresh session.
                if idle.schedule.workers_live == "iterator":
                    sessions.remove(idle)
                    shared.close_session(idle)
                    continue
                idle.reserve()
                return idle
            # Random: agents may still keep a session of this rank's earlier process.
            name = f"r{self._settings.rank}-l{books.number}-{secrets.token_hex(8)}"
            session = FeedSession(
                name,
                lock=shared.lock,
                wake=shared.wake,
                schedule=new_schedule(self._share),
                rank=self._settings.rank,
            )
            session.reserve()
            session.failure = shared.failure
            shared.sessions[name] = session
            sessions.append(session)
        # Not at exit, where `close` closes all sessions together.
        weakref.finalize(books, shared.close_session, session).atexit = False
        return session

    def close(self) -> None:
        """Sends a goodbye to the agents and stops the local workers; may be called twice.

        Blocks for at most CLOSE_SECONDS; does nothing in a forked child.
        """
        # A fork has no I/O thread, and its sockets are the parent's.
        if os.getpid() != self._pid:
            return
        self.shared.is_closing = True
        self.shared.wake()
        self._thread.join(CLOSE_SECONDS)
        # Else the thread still polls the descriptor, whose number another file might get.
        if not self._thread.is_alive():
            self.shared.close()


def feed_of(process: TrainerProcess) -> Feed:
    """Returns the feed of this process (a forked child has another one), closed at its exit."""
    _show_errors(os.getpid())
    return connect(process)


def connect(process: TrainerProcess) -> Feed:
    """Returns the same, without `feed_of`'s excepthook: this process may never ask for a batch."""
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
