"""Answers of agents and local workers, received and handed to sessions.

A thread for each data host receives its batches to where they will live: pinned, where the loader
pins. The I/O thread reads everything else. What a dataset raised (`protocol.Raised`) goes to its
session, too, whose `FeedSession.next` raises it in the script.
"""

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import cast

import numpy as np
import zmq

from stoker.errors import FeedError, FeedLostError, ProtocolError
from stoker.feed import memory
from stoker.feed.bookkeeping import known_process
from stoker.feed.trainer.buffers import BatchBuffers, BatchOutcome, error_in
from stoker.feed.trainer.control_connection import MAX_PAUSE_SECONDS
from stoker.feed.trainer.links import AgentLink
from stoker.feed.trainer.observer import Observer
from stoker.feed.trainer.receiver import BatchReceiver
from stoker.feed.trainer.scheduler import Peer
from stoker.feed.trainer.session import LOCAL, FeedSession, HeadMaker, SharedState
from stoker.feed.why_unfed import advice_on
from stoker.feed.wire import protocol
from stoker.feed.wire.stream import BufferPool, Bytes
from stoker.feed.workers.jobs import Result
from stoker.logs import EventName
from stoker.pending_error import PendingError
from stoker.records import FeedSettings

_NOTHING: Bytes = np.empty(0, dtype=np.uint8)


def reassign(
    session: FeedSession, peer: Peer, batch_number: int, *, generation: int, reason: str, host: str
) -> None:
    """Has another peer make a batch whose workers are gone; the caller holds the lock.

    After enough tries the script gets an error in its place.

    Args:
        session: Of the batch.
        peer: That had it.
        batch_number: In its epoch.
        generation: Of a shard's process.
        reason: What became of the workers, in words.
        host: Of the peer, by name.
    """
    schedule = session.schedule
    if not schedule.mark_failed(peer, batch_number, generation=generation):
        return
    error = FeedLostError(
        schedule.words(batch_number, reason),
        where=f"rank {session.rank}, {session.batch_words(batch_number)}, "
        f"last tried on host {host}",
        fix=advice_on(reason),
    )
    # In place of the batch, so that the epoch continues after it.
    if schedule.arrived(
        peer, batch_number, frame_bytes=0, now=time.monotonic(), generation=generation
    ):
        session.deliver(batch_number, BatchOutcome(error=PendingError(error)))
    else:
        # A shard ends with its process: nothing comes after it either.
        session.mark_failed(error)


def reassign_local(session: FeedSession, result: Result, *, host: str) -> None:
    _, batch_number, generation = cast("tuple[int, int, int]", result.job.key)
    reassign(session, LOCAL, batch_number, generation=generation, reason=result.summary, host=host)


class Answers:
    """Answers of the agents; the lock is never held while memory is written."""

    def __init__(
        self,
        shared: SharedState,
        observer: Observer,
        pool: BufferPool,
        feed: FeedSettings,
        *,
        on_lost: Callable[[AgentLink], None],
        pass_on: Callable[[AgentLink, protocol.BatchPart, Bytes], None],
    ) -> None:
        self._on_lost = on_lost
        self._pass_on = pass_on
        self._shared = shared
        self._observer = observer
        self._pool = pool
        self._max_bytes = memory.max_message_bytes(feed)
        self._accepts_pickles = feed.accept_pickles
        self._unpack_agent = protocol.Unpacker(protocol.FromAgent)
        self._warned: set[tuple[str, str]] = set()
        self._unpack_sealed = protocol.Unpacker(protocol.ToTrainer)

    def take(self, link: AgentLink, frames: Sequence[zmq.Frame]) -> None:
        """Handles a message on the encrypted connection; a malformed one costs the connection."""
        try:
            message = self._unpack_agent(frames[0].buffer)
            frame = frames[1] if len(frames) > 1 else None
            self._handle(link, message, frame)
        except ProtocolError as err:
            self._refuse(link, err)

    def _receive_batches(self, link: AgentLink, ticket: protocol.Ticket) -> None:
        receiver = BatchReceiver(
            address=link.address,
            port=link.member.batch_port,
            ticket=ticket,
            buffers=BatchBuffers(self._pool, self._shared.pinned),
            pool=self._pool,
            take=partial(self._take_batch, link),
            ended=lambda ended: self._shared.post(partial(self._lost_batches, link, ended)),
            max_head_bytes=self._max_bytes,
        )
        # Before it starts: its end is compared with the link's receiver.
        link.receive_by(receiver)
        # For forks, which have to close their descriptors.
        self._shared.receivers.add(receiver)
        receiver.start()

    def _take_batch(
        self, link: AgentLink, receiver: BatchReceiver, packed: bytes, nbytes: int
    ) -> None:
        """Receives a batch, or a part of one, whose header is there; in the receiver's thread."""
        batch = self._unpack_sealed(packed)
        assert isinstance(batch, protocol.Made | protocol.BatchPart)
        # Without the lock: if the session ends during this, `_take_made` drops the batch.
        session = self._shared.sessions.get(batch.session)
        if nbytes > self._max_bytes:
            error = FeedError(
                f"batch too large: {nbytes} bytes, limit {self._max_bytes} bytes",
                where=f"batch {batch.batch_number}, from host {link.member.host}",
                fix="make smaller batches, or send uint8 and convert on the accelerator",
            )
            if session is not None:
                with self._shared.lock:
                    session.mark_failed(error)
            # The payload stays unread, so that no next head can be found: the connection is lost.
            raise ProtocolError(error.what)
        payload = _NOTHING
        is_part = isinstance(batch, protocol.BatchPart)
        began = time.monotonic()
        # Also for a session that is gone: the next header comes after this payload.
        if nbytes:
            pins_on = None if session is None or is_part else session.pins_on
            payload = receiver.buffers.room(nbytes, pins_on)
            receiver.reader.read(payload.data)
        if session is None:
            return
        if isinstance(batch, protocol.BatchPart):
            self._shared.post(partial(self._pass_on, link, batch, payload))
            return
        read_seconds = time.monotonic() - began
        self._take_made(link, receiver, session, batch, payload, read_seconds=read_seconds)

    def _lost_batches(self, link: AgentLink, receiver: BatchReceiver) -> None:
        """Handles the end of the connection for batches; in the I/O thread."""
        if link.receiver is not receiver:
            # Closed by us, with its connection, and replaced.
            return
        failure = receiver.failure
        if not isinstance(failure, OSError | ProtocolError):
            raise failure or FeedError("the thread that receives batches ended")
        refused = isinstance(failure, ProtocolError)
        event = EventName.MESSAGE_REFUSED if refused else EventName.BATCHES_LOST
        self._shared.log.event(event, agent=link.member.host, reason=receiver.words())
        error = link.mark_batches_lost(time.monotonic())
        if error is None:
            self._on_lost(link)
            return
        with self._shared.lock:
            for session in self._shared.sessions.values():
                self._mark_failed(link, session, error.what, error)
        self._log_excluded(link, error.what)

    def _refuse(self, link: AgentLink, err: ProtocolError) -> None:
        self._shared.log.event(EventName.MESSAGE_REFUSED, agent=link.member.host, reason=err.what)
        link.mark_lost(time.monotonic())
        mark_peer_lost(self._shared, link)

    def _handle(self, link: AgentLink, message: protocol.Message, frame: zmq.Frame | None) -> None:
        match message:
            case protocol.Ticket():
                self._receive_batches(link, message)
            case protocol.Raised() | protocol.Ended() | protocol.Declined():
                self._take_answer(link, message, frame)
            case protocol.Need():
                self._ship(link, message.spec)
            case protocol.Ready():
                self._take_ready(link, message)
            case protocol.Credits():
                self._grant(link, message.session, message.credits)
            case protocol.Failed():
                self._take_failed(link, message, self._error_of(message, frame))
            case protocol.Makers():
                self._take_making(link, message)
            case protocol.Leaving():
                self._mark_draining(link)
            case protocol.WrongHost():
                # Another host has the address now. The name server may still return it.
                self._shared.log.event(
                    EventName.AGENT_ADDRESS_REUSED, agent=link.member.host, found=message.host
                )
                link.mark_lost(time.monotonic(), pause_seconds=MAX_PAUSE_SECONDS)
                mark_peer_lost(self._shared, link)

    def _ship(self, link: AgentLink, digest: str) -> None:
        with self._shared.lock:
            specs = [session.spec for session in self._shared.sessions.values()]
        for spec in specs:
            if spec is not None and spec.digest == digest:
                # Several sessions may have it.
                link.ship(spec)
                return

    def _mark_draining(self, link: AgentLink) -> None:
        link.is_draining = True
        with self._shared.lock:
            for session in self._shared.sessions.values():
                session.schedule.mark_draining(link.member.host)

    def _take_making(self, link: AgentLink, message: protocol.Makers) -> None:
        now = time.monotonic()
        with self._shared.lock:
            session = self._shared.sessions.get(message.session)
            if session is None or session.epoch_id != message.epoch_id:
                return
            # An answer about an earlier batch came too late.
            if message.batch_number == session.schedule.head and session.waits_since is not None:
                session.inquiries.pop(link.member.host, None)
                session.makers[link.member.host] = HeadMaker(
                    heard_at=now,
                    begun_at=None if message.seconds is None else now - message.seconds,
                    workers=message.workers,
                    stacks=message.stacks,
                    sample=message.sample,
                )

    def _take_made(
        self,
        link: AgentLink,
        receiver: BatchReceiver,
        session: FeedSession,
        made: protocol.Made,
        payload: Bytes,
        *,
        read_seconds: float,
    ) -> None:
        """Delivers a batch; in the receiver's thread.

        Args:
            read_seconds: In which its payload was received.
        """
        # To make views costs less than to ask first whether the batch is wanted.
        outcome = receiver.buffers.decoded(
            made.tree,
            payload,
            allow_pickle=self._accepts_pickles,
            keeps_block=session.keeps_blocks,
        )
        outcome.samples = made.samples
        outcome.maker = (link.member.host, made.worker)
        host = link.member.host
        nbytes = payload.nbytes
        now = time.monotonic()
        with self._shared.lock:
            if session.epoch_id != made.epoch_id or not session.is_busy:
                return
            session.sharing.add_batch(made.wall_seconds, nbytes=nbytes, read_seconds=read_seconds)
            is_wanted = session.schedule.arrived(
                host,
                made.batch_number,
                frame_bytes=nbytes,
                now=now,
                generation=made.generation,
                digest=made.digest,
                random_state=made.state,
                own=made.own_state,
            )
            if is_wanted:
                session.deliver(made.batch_number, outcome)
                _tell_of_shares(self._shared, self._observer, session, made.batch_number, host)
            self._observer.note_batch(host, made, frame_bytes=nbytes, is_wanted=is_wanted)
            if session.is_due:
                session.ring()
            has_work = session.schedule.may_assign() or session.schedule.may_share()
        # After the lock is released: the I/O thread takes it at once.
        if has_work:
            self._shared.wake()

    def _take_answer(
        self,
        link: AgentLink,
        message: protocol.Raised | protocol.Ended | protocol.Declined,
        frame: zmq.Frame | None,
    ) -> None:
        """Handles the end of a request without a batch, if a session still waits for it."""
        host = link.member.host
        batch_number = message.batch_number
        generation = message.generation
        # Without the lock, because it may run the dataset's code.
        error = self._error_of(message, frame) if isinstance(message, protocol.Raised) else None
        with self._shared.lock:
            session = self._shared.sessions.get(message.session)
            if session is None or session.epoch_id != message.epoch_id or not session.is_busy:
                return
            schedule = session.schedule
            match message:
                case protocol.Raised():
                    if schedule.arrived(
                        host,
                        batch_number,
                        frame_bytes=0,
                        now=time.monotonic(),
                        generation=generation,
                        digest=message.digest,
                        random_state=message.state,
                    ):
                        outcome = BatchOutcome(error=PendingError(error))
                        session.deliver(batch_number, outcome, is_final=message.is_final)
                case protocol.Ended():
                    schedule.ended(
                        host, batch_number, generation=generation, random_state=message.state
                    )
                    session.stir(is_head=True)
                case protocol.Declined():
                    self._take_declined(link, session, message)

    def _take_declined(
        self, link: AgentLink, session: FeedSession, message: protocol.Declined
    ) -> None:
        host = link.member.host
        batch_number = message.batch_number
        reason = message.reason
        if link.has_failed(session.name):
            # The batch is not to blame where all processes are gone.
            return
        if message.is_lost or link.is_draining:
            generation = message.generation
            reassign(session, host, batch_number, generation=generation, reason=reason, host=host)
        else:
            # The host has closed the session: this process was silent for too long.
            session.schedule.mark_lost(host)
            link.close_session(session.name)
            session.has_news = True
        self._shared.log.event(
            EventName.BATCH_DROPPED, agent=host, batch=batch_number, reason=reason
        )

    def _take_ready(self, link: AgentLink, message: protocol.Ready) -> None:
        with self._shared.lock:
            session = self._shared.sessions.get(message.session)
            if session is None or session.spec is None or session.spec.digest != message.spec:
                # Of an earlier spec; the answer to the current one follows.
                return
        if link.has_failed(message.session):
            return
        link.opened[message.session] = message.spec, session.seeding
        link.ready.add(message.session)
        self._grant(link, message.session, message.credits)
        self._shared.log.event(
            EventName.AGENT_READY,
            agent=link.member.host,
            workers=message.workers,
            credits=message.credits,
        )
        host = link.member.host
        warning = message.warning
        copied = message.copied
        if copied and (host, copied) not in self._warned:
            self._warned.add((host, copied))
            self._shared.log.event(EventName.DATASET_COPIED, agent=host, text=copied)
        if warning and (host, warning) not in self._warned:
            self._warned.add((host, warning))
            text = f"data host {host} makes batches with {warning}"
            self._shared.log.event(EventName.CODE_DIFFERS, agent=host, text=text)

    def _take_failed(self, link: AgentLink, message: protocol.Failed, error: BaseException) -> None:
        with self._shared.lock:
            session = self._shared.sessions.get(message.session)
            if session is None or session.spec is None or session.spec.digest != message.spec:
                return
            if not message.is_of_host:
                session.mark_failed(error)
                return
            self._mark_failed(link, session, message.reason, error)
        self._log_excluded(link, message.reason)

    def _mark_failed(
        self, link: AgentLink, session: FeedSession, reason: str, error: BaseException
    ) -> None:
        link.mark_failed(session.name, epoch_id=session.epoch_id, reason=reason, error=error)
        session.schedule.mark_lost(link.member.host)

    def _log_excluded(self, link: AgentLink, reason: str) -> None:
        text = f"data host {link.member.host} makes no batches in this epoch: {reason}"
        if (process := known_process()) is not None:
            process.note_made_here(f"data host {link.member.host}: {reason}")
        self._shared.log.event(EventName.HOST_EXCLUDED, agent=link.member.host, text=text)

    def _grant(self, link: AgentLink, name: str, credits: int) -> None:
        with self._shared.lock:
            session = self._shared.sessions.get(name)
            if session is None or name not in link.ready or link.is_draining:
                return
            session.schedule.grant(link.member.host, credits)
            session.had_peers = True
            session.stir()

    def _error_of(
        self, message: protocol.Raised | protocol.Failed, frame: zmq.Frame | None
    ) -> Exception:
        if frame is None:
            return ProtocolError("error message without its frame")
        if self._accepts_pickles:
            return error_in(frame.buffer)
        if isinstance(message, protocol.Failed) and message.is_of_host:
            return FeedLostError(message.reason)
        words = getattr(message, "summary", None) or getattr(message, "reason", "")
        return RuntimeError(
            f"{words} (raised on a data host; text only, because feed.accept_pickles is false)"
        )


def _tell_of_shares(
    shared: SharedState, observer: Observer, session: FeedSession, batch_number: int, host: str
) -> None:
    """Counts and logs which hosts' samples a batch had, if several made them; under the lock.

    Args:
        host: That put it together.
    """
    passed_on = session.sharing.passed_on.pop(batch_number, None)
    if passed_on:
        observer.note_shared(passed_on)
        samples = ", ".join(f"{number} of {other}" for other, number in passed_on.items())
        shared.log.event(
            EventName.BATCH_SHARED,
            agent=host,
            epoch=session.epoch,
            batch=batch_number,
            samples=samples,
        )


def mark_peer_lost(shared: SharedState, link: AgentLink) -> None:
    link.discard_all()
    with shared.lock:
        for session in shared.sessions.values():
            session.schedule.mark_lost(link.member.host)


class LocalAnswers:
    """Answers of this process's own workers."""

    def __init__(
        self, shared: SharedState, observer: Observer, buffers: BatchBuffers, *, host: str
    ) -> None:
        self._host = host
        self._shared = shared
        self._observer = observer
        self._buffers = buffers

    def take(self, session: FeedSession, fileno: int) -> None:
        with self._shared.lock:
            local = session.local
        # Without the lock: a worker that died is waited for, and replaced.
        results = [] if local is None else local.handle(fileno)
        self.settle(session, results)
        with self._shared.lock:
            if local is not None and local is session.local:
                if local.is_alive:
                    session.schedule.grant(LOCAL, local.credits)
                else:
                    session.schedule.mark_lost(LOCAL)
                session.stir()

    def settle(self, session: FeedSession, results: Iterable[Result]) -> None:
        """Delivers what its workers have made; takes the lock."""
        for result in results:
            self._settle(session, result)

    def _settle(self, session: FeedSession, result: Result) -> None:
        epoch_id, batch_number, generation = cast("tuple[int, int, int]", result.job.key)
        payload = result.payload
        result.payload = None
        if payload is not None:
            # Its last view gives the worker its memory back.
            weakref.finalize(payload, result.release).atexit = False
        size = 0 if payload is None else payload.nbytes
        with self._shared.lock:
            if session.epoch_id != epoch_id or not session.is_busy:
                return
            schedule = session.schedule
            if result.is_lost:
                reassign_local(session, result, host=self._host)
                return
            if result.is_end:
                schedule.ended(
                    LOCAL, batch_number, generation=generation, random_state=result.state
                )
                session.stir(is_head=True)
                return
            # Before the batch is copied below, so that no other peer is asked for it during the
            # copy.
            is_wanted = schedule.arrived(
                LOCAL,
                batch_number,
                frame_bytes=size,
                now=time.monotonic(),
                generation=generation,
                digest=result.digest,
                random_state=result.state,
                own=result.own_state,
            )
            if result.error is None:
                self._observer.note_batch(None, result, frame_bytes=size, is_wanted=is_wanted)
        if not is_wanted:
            return
        # Without the lock: to pin a batch takes a copy.
        if result.error is not None:
            outcome = BatchOutcome(error=PendingError(error_in(result.error)))
        else:
            if payload is not None and session.pins_on is not None:
                payload = self._buffers.copied(payload, session.pins_on)
            outcome = self._buffers.decoded(
                result.tree or b"",
                payload,
                allow_pickle=True,
                keeps_block=session.keeps_blocks,
            )
            outcome.samples = result.samples
            outcome.maker = (self._host, result.worker)
        with self._shared.lock:
            if session.epoch_id == epoch_id and session.is_busy:
                _tell_of_shares(self._shared, self._observer, session, batch_number, self._host)
                session.deliver(batch_number, outcome, is_final=result.is_final)
