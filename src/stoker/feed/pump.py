"""The pump: the one thread of a trainer that owns the feed's sockets.

It asks for batches, receives them, copies each once into pooled memory and decodes it, so that the
thread that trains only takes finished batches.
"""

import os
import platform
import time
import weakref
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import torch
import zmq

from stoker.errors import FeedError, FeedLostError, ProtocolError
from stoker.feed import messages as m
from stoker.feed.connection import GOODBYE_SECONDS, ZmqContext, ZmqSocket
from stoker.feed.landing import Bytes, Landing
from stoker.feed.links import MAX_ROSTER_BYTES, AgentLink, Link
from stoker.feed.pool import Result
from stoker.feed.security import Keys, verify
from stoker.feed.session import LOCAL, Outcome, Session
from stoker.feed.shared import Shared
from stoker.feed.shipping import unpack_error
from stoker.feed.wire import decode
from stoker.settings import ProcessSettings

# Progress to the coordinator, and a look at what no event tells.
_TICK_SECONDS = 1.0
# Beyond the lease: the coordinator's word and the re-dialling take a moment.
_LOST_GRACE_SECONDS = 3.0

_VERSIONS = {
    "python": platform.python_version(),
    "torch": str(torch.__version__),
    "numpy": np.__version__,
}


class Pump:
    """Runs in a thread of its own, by `run`.

    Args:
        shared: What it has in common with the threads that iterate.
    """

    def __init__(self, shared: Shared, settings: ProcessSettings, keys: Keys) -> None:
        self._shared = shared
        self._settings = settings
        self._feed = settings.feed
        self._keys = keys
        self._context: ZmqContext = zmq.Context()
        self._landing = Landing()
        self._unpack_agent = m.Unpacker(m.FromAgent)
        self._unpack_coordinator = m.Unpacker(m.FromCoordinator)
        now = time.monotonic()
        self._links: dict[str, AgentLink] = {}
        self._lost: dict[str, m.Member] = {}
        self._expected: int | None = None
        self._progress_at = now
        host, _, port = (settings.coordinator or "").rpartition(":")
        self._coordinator = Link(
            self._context,
            keys,
            name=host,
            ports=[int(port)],
            now=now,
            post=shared.post,
            max_message_bytes=MAX_ROSTER_BYTES,
        )

    def run(self) -> None:
        """Pumps until the feed is closed; a crash ends every session with its error."""
        shared = self._shared
        try:
            while not shared.is_closing:
                self._turn()
        except BaseException as err:
            failure = FeedError(
                f"the feed's thread failed: {type(err).__name__}: {err}",
                where=f"rank {self._settings.rank}, host {self._settings.host}",
                fix="this is a bug of stoker; its traceback is this error's cause",
            )
            failure.__cause__ = err
            with shared.lock:
                shared.failure = failure
                for session in shared.sessions.values():
                    session.fail(failure)
        finally:
            self._close()

    def _turn(self) -> None:
        now = time.monotonic()
        shared = self._shared
        targets: list[tuple[ZmqSocket | int, int]] = [(shared.wake_fd, zmq.POLLIN)]
        links = [self._coordinator, *self._links.values()]
        targets += [(socket, zmq.POLLIN) for link in links for socket in link.sockets()]
        waits = [_TICK_SECONDS, *(link.wait_seconds(now) for link in links)]
        children: dict[int, Session] = {}
        with shared.lock:
            sessions = list(shared.sessions.values())
            for session in sessions:
                waits.append(session.schedule.next_check(now))
                if session.local is not None:
                    for fileno, wants_write in session.local.sockets().items():
                        children[fileno] = session
                        flags = zmq.POLLIN | zmq.POLLOUT if wants_write else zmq.POLLIN
                        targets.append((fileno, flags))
        seconds = min(wait for wait in waits if wait is not None)
        polled = zmq.zmq_poll(cast("list[tuple[ZmqSocket, int]]", targets), int(seconds * 1000) + 1)
        ready = {cast("ZmqSocket | int", source) for source, _ in polled}
        if shared.wake_fd in ready:
            os.eventfd_read(shared.wake_fd)
        shared.run_posted()
        for fileno, session in children.items():
            if fileno in ready:
                self._take_local(session, fileno)
        for link in links:
            if any(socket in ready for socket in link.sockets()):
                self._serve(link)
        self._tick(time.monotonic())

    def _serve(self, link: Link) -> None:
        # First what came, then what became of the connection: the last words count.
        if isinstance(link, AgentLink):
            link.receive(
                lambda frames: self._take(link, frames),
                lambda frames: self._take_plain(link, frames),
            )
        else:
            link.receive(self._take_roster, self._take_roster)
        if not link.watch(time.monotonic()):
            return
        if not isinstance(link, AgentLink):
            if link.is_up:
                link.send(
                    m.Attend(
                        protocol=m.PROTOCOL_VERSION,
                        run_id=self._settings.run_id,
                        rank=self._settings.rank,
                        host=self._settings.host,
                    )
                )
        elif link.is_up:
            with self._shared.lock:
                for session in self._shared.sessions.values():
                    session.has_news = True
        else:
            self._shared.log.event("agent_connection_lost", agent=link.member.host)
            self._drop_peer(link)
            if not link.is_listed:
                self._remove(link)

    # What comes from the coordinator.

    def _take_roster(self, frames: Sequence[zmq.Frame]) -> None:
        message = self._unpack_coordinator(frames[0].buffer)
        if isinstance(message, m.Refused):
            self._fail_all(
                FeedError(
                    f"the coordinator refuses this rank: {message.reason}",
                    where=f"rank {self._settings.rank}, host {self._settings.host}",
                )
            )
        if not isinstance(message, m.Roster):
            return
        self._expected = message.expected
        self._lost = {member.host: member for member in message.lost}
        listed = {member.host: member for member in message.agents}
        for host, link in list(self._links.items()):
            link.is_listed = host in listed
            if (host in listed and not link.is_same(listed[host])) or host in self._lost:
                self._drop_peer(link)
                self._remove(link)
        for host, member in listed.items():
            if host not in self._links:
                self._links[host] = AgentLink(
                    self._context,
                    self._keys,
                    member,
                    is_encrypted=self._feed.encrypt_batches,
                    now=time.monotonic(),
                    post=self._shared.post,
                    max_message_bytes=self._feed.max_bytes + (16 << 20),
                )

    # What comes from agents.

    def _take(self, link: AgentLink, frames: Sequence[zmq.Frame]) -> None:
        try:
            message = self._unpack_agent(frames[0].buffer)
            frame = frames[1] if len(frames) > 1 else None
            self._handle(link, message, frame, is_encrypted=True)
        except ProtocolError as err:
            self._shared.log.event("message_refused", agent=link.member.host, reason=err.what)
            link.lose(time.monotonic())
            self._drop_peer(link)

    def _take_plain(self, link: AgentLink, frames: Sequence[zmq.Frame]) -> None:
        """A batch that is not encrypted: MAC of the message, message, payload if there is one."""
        is_ours = len(frames) in (2, 3) and verify(
            self._keys.mac_key, frames[1].buffer, frames[0].buffer
        )
        if not is_ours:
            self._shared.log.event("plain_batch_refused", agent=link.member.host)
            return
        message = self._unpack_agent(frames[1].buffer)
        if isinstance(message, m.Made):
            self._handle(link, message, frames[2] if len(frames) == 3 else None, is_encrypted=False)

    def _handle(
        self, link: AgentLink, message: m.Message, frame: zmq.Frame | None, *, is_encrypted: bool
    ) -> None:
        match message:
            case m.Made():
                self._take_batch(link, message, frame, is_encrypted=is_encrypted)
            case m.Raised():
                error = _error_in(frame)
                self._settle(link, message, lambda: Outcome(error=error), frame_bytes=0)
            case m.Dropped():
                self._take_dropped(link, message)
            case m.Need():
                self._ship(link, message.spec)
            case m.Ready():
                self._take_ready(link, message)
            case m.Credits():
                self._grant(link, message.session, message.credits)
            case m.Failed():
                error = _error_in(frame)
                with self._shared.lock:
                    session = self._shared.sessions.get(message.session)
                    if session is not None and _has_spec(session, message.spec):
                        session.fail(error)
            case m.Leaving():
                link.is_leaving = True
                with self._shared.lock:
                    for session in self._shared.sessions.values():
                        session.schedule.leave(link.member.host)

    def _take_batch(
        self, link: AgentLink, made: m.Made, frame: zmq.Frame | None, *, is_encrypted: bool
    ) -> None:
        def land() -> Outcome:
            payload: Bytes | None = None
            if frame is not None and len(frame.buffer):
                payload = self._landing.take(len(frame.buffer))
                np.copyto(payload, np.frombuffer(frame.buffer, dtype=np.uint8))
            return _decoded(made.tree, payload, allow_pickle=is_encrypted)

        frame_bytes = 0 if frame is None else len(frame.buffer)
        self._settle(link, made, land, frame_bytes=frame_bytes)

    def _settle(
        self,
        link: AgentLink,
        message: m.Made | m.Raised | m.Dropped,
        make: Callable[[], Outcome],
        *,
        frame_bytes: int,
    ) -> None:
        """Delivers what `make` gives, unless it is late, a duplicate, or not wanted any more."""
        with self._shared.lock:
            session = self._shared.sessions.get(message.session)
            if session is None or session.epoch != message.epoch or not session.is_busy:
                return
            is_wanted = session.schedule.arrived(
                link.member.host, message.number, frame_bytes=frame_bytes, now=time.monotonic()
            )
        if is_wanted:
            outcome = make()
            with self._shared.lock:
                if session.epoch == message.epoch and session.is_busy:
                    session.deliver(message.number, outcome)

    def _take_dropped(self, link: AgentLink, message: m.Dropped) -> None:
        with self._shared.lock:
            session = self._shared.sessions.get(message.session)
            if session is None or session.epoch != message.epoch or not session.is_busy:
                return
            if message.is_lost or link.is_leaving:
                is_hopeless = session.schedule.dropped(link.member.host, message.number)
            else:
                # It has forgotten the session: this process was silent for too long.
                is_hopeless = False
                session.schedule.lost(link.member.host)
                link.opened.pop(session.name, None)
                link.ready.discard(session.name)
                session.has_news = True
        self._shared.log.event(
            "batch_dropped", agent=link.member.host, batch=message.number, reason=message.reason
        )
        if is_hopeless:
            error = FeedLostError(
                f"batch {message.number} cannot be made: {message.reason}",
                where=f"epoch {message.epoch}, last tried on host {link.member.host}",
                fix="see that host's log; give it more memory, or fewer workers",
            )
            self._settle(link, message, lambda: Outcome(error=error), frame_bytes=0)

    def _take_ready(self, link: AgentLink, message: m.Ready) -> None:
        with self._shared.lock:
            session = self._shared.sessions.get(message.session)
            if session is None or not _has_spec(session, message.spec):
                return
        link.ready.add(message.session)
        self._grant(link, message.session, message.credits)
        self._shared.log.event(
            "agent_ready", agent=link.member.host, workers=message.workers, credits=message.credits
        )

    def _grant(self, link: AgentLink, name: str, credits: int) -> None:
        with self._shared.lock:
            session = self._shared.sessions.get(name)
            if session is None or name not in link.ready or link.is_leaving:
                return
            session.schedule.grant(link.member.host, credits)
            session.had_peers = True
            session.stir()

    def _ship(self, link: AgentLink, digest: str) -> None:
        with self._shared.lock:
            specs = [s.spec for s in self._shared.sessions.values() if _has_spec(s, digest)]
        for spec in specs[:1]:
            if spec is not None:
                link.send(m.Ship(spec=digest), spec.data)

    # What comes from local workers.

    def _take_local(self, session: Session, fileno: int) -> None:
        with self._shared.lock:
            local = session.local
            results = [] if local is None else local.handle(fileno)
        for result in results:
            self._settle_local(session, result)
        with self._shared.lock:
            if local is not None and local is session.local:
                if local.credits:
                    session.schedule.grant(LOCAL, local.credits)
                else:
                    session.schedule.lost(LOCAL)
                session.stir()

    def _settle_local(self, session: Session, result: Result) -> None:
        epoch, number = result.job.key
        assert isinstance(epoch, int)
        assert isinstance(number, int)
        payload, result.payload = result.payload, None
        if payload is not None:
            weakref.finalize(payload, result.release).atexit = False
        size = 0 if payload is None else payload.nbytes
        with self._shared.lock:
            if session.epoch != epoch or not session.is_busy:
                return
            if result.is_lost and not session.schedule.dropped(LOCAL, number):
                return
            is_wanted = session.schedule.arrived(
                LOCAL, number, frame_bytes=size, now=time.monotonic()
            )
        if not is_wanted:
            return
        if result.error is not None:
            outcome = Outcome(error=unpack_error(result.error))
        else:
            outcome = _decoded(result.tree or b"", payload, allow_pickle=True)
        with self._shared.lock:
            if session.epoch == epoch and session.is_busy:
                session.deliver(number, outcome)

    # What follows from it.

    def _tick(self, now: float) -> None:
        for link in [self._coordinator, *self._links.values()]:
            link.tick(now)
        if now >= self._progress_at:
            self._progress_at = now + _TICK_SECONDS
            self._report()
        with self._shared.lock:
            retired = self._shared.take_retired()
            locals_ended = [s.local for s in retired if s.local is not None]
            for session in self._shared.sessions.values():
                locals_ended += session.retired_locals
                session.retired_locals = []
                if session.has_news:
                    self._tell_news(session)
                if session.is_busy:
                    self._ask(session, now)
                    self._judge(session, now)
        for session in retired:
            for agent in self._links.values():
                agent.opened.pop(session.name, None)
                agent.ready.discard(session.name)
                agent.send(m.Close(session=session.name))
        for local in locals_ended:
            local.close()

    def _tell_news(self, session: Session) -> None:
        session.has_news = False
        if session.spec is None:
            return
        before = session.epoch if session.is_busy else session.epoch + 1
        if session.local is not None:
            session.local.forget(before_epoch=before)
        for link in self._links.values():
            if not link.is_up:
                continue
            if link.opened.get(session.name) != session.spec.digest:
                link.opened[session.name] = session.spec.digest
                link.ready.discard(session.name)
                link.send(
                    m.Open(
                        protocol=m.PROTOCOL_VERSION,
                        session=session.name,
                        rank=self._settings.rank,
                        spec=session.spec.digest,
                        spec_bytes=len(session.spec.data),
                        plain_identity=link.plain_identity,
                        seeding=session.seeding,
                        versions=_VERSIONS,
                    )
                )
            link.send(m.Forget(session=session.name, before_epoch=before))

    def _ask(self, session: Session, now: float) -> None:
        schedule = session.schedule
        for number in schedule.overdue(now):
            self._shared.log.event("batch_overdue", epoch=session.epoch, batch=number)
        for peer, number in schedule.assign(now):
            asked = session.asked[number]
            if peer == LOCAL and session.local is not None:
                session.local.ask(
                    epoch=session.epoch, number=number, index=asked.index, seed=asked.seed
                )
            elif isinstance(peer, str) and peer in self._links:
                self._links[peer].send(
                    m.Make(
                        session=session.name, epoch=session.epoch, number=number, seed=asked.seed
                    ),
                    asked.index,
                )
        if session.local is not None:
            session.local.flush()

    def _judge(self, session: Session, now: float) -> None:
        """Ends a session that nobody works for any more."""
        if session.schedule.peers():
            session.alone_since = now
            return
        opening = any(link.is_up and session.name in link.opened for link in self._links.values())
        is_starting = opening or not session.had_peers
        limit = (
            self._feed.start_deadline_seconds
            if is_starting
            else self._feed.lease_seconds + _LOST_GRACE_SECONDS
        )
        if now - session.alone_since > limit:
            session.fail(self._lost_error(session, now))

    def _lost_error(self, session: Session, now: float) -> FeedLostError:
        silent = [
            f"{link.member.host} (no connection for {now - link.down_since:.1f} s)"
            if not link.is_up
            else f"{link.member.host} (connected, not ready)"
            for link in self._links.values()
        ]
        silent += [
            f"{member.host} (lost, last heartbeat {member.silent_seconds:.1f} s before)"
            for member in self._lost.values()
        ]
        seen = ", ".join(silent) or "none seen"
        expected = "?" if self._expected is None else self._expected
        if self._expected is None:
            seen = f"the coordinator at {self._settings.coordinator} did not answer"
        local = f"; local workers: {session.local.last_death}" if session.local else ""
        if session.had_peers:
            what = f"no data worker is left after {now - session.alone_since:.0f} s"
        else:
            what = f"no data worker came within {now - session.alone_since:.0f} s"
        return FeedLostError(
            f"{what}: {expected} data hosts expected, {seen}{local}",
            where=f"rank {self._settings.rank}, host {self._settings.host}, "
            f"epoch {session.epoch}, batch {session.schedule.head}",
            fix="see the logs of the data hosts; with local workers (feed.local_workers) the "
            "training would go on",
        )

    def _report(self) -> None:
        if self._coordinator.is_up:
            timeline = self._shared.timeline
            self._coordinator.send(
                m.Progress(
                    rank=self._settings.rank,
                    steps=timeline.steps,
                    samples=timeline.samples,
                    wait_seconds=timeline.wait_seconds,
                    compute_seconds=timeline.compute_seconds,
                )
            )

    def _drop_peer(self, link: AgentLink) -> None:
        link.opened.clear()
        link.ready.clear()
        link.is_leaving = False
        with self._shared.lock:
            for session in self._shared.sessions.values():
                session.schedule.lost(link.member.host)

    def _remove(self, link: AgentLink) -> None:
        link.close()
        if self._links.get(link.member.host) is link:
            del self._links[link.member.host]

    def _fail_all(self, error: FeedError) -> None:
        with self._shared.lock:
            for session in self._shared.sessions.values():
                session.fail(error)

    def _close(self) -> None:
        with self._shared.lock:
            sessions = [*self._shared.sessions.values(), *self._shared.take_retired()]
            self._shared.sessions.clear()
        for session in sessions:
            for agent in self._links.values():
                agent.send(m.Close(session=session.name))
            for local in [session.local, *session.retired_locals]:
                if local is not None:
                    local.close()
        self._report()
        for link in [self._coordinator, *self._links.values()]:
            link.close(linger_seconds=GOODBYE_SECONDS)
        self._context.term()


def _decoded(tree: bytes, payload: Bytes | None, *, allow_pickle: bool) -> Outcome:
    try:
        return Outcome(decode(tree, payload, allow_pickle=allow_pickle))
    except FeedError as err:
        return Outcome(error=err)


def _error_in(frame: zmq.Frame | None) -> Exception:
    if frame is None:
        return ProtocolError("an error without its frame")
    return unpack_error(frame.buffer)


def _has_spec(session: Session, digest: str) -> bool:
    return session.spec is not None and session.spec.digest == digest
