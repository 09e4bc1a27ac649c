"""What the agent does for its trainers: their sessions, and the specs that these use.

The loop is `agent`'s; how the batches of all sessions are made is in `dispatch`.
"""

import math
import time
from collections.abc import Iterable

from stoker.errors import FeedError, FeedLostError
from stoker.feed import messages
from stoker.feed.dispatch import Dispatch
from stoker.feed.held_spec import HeldSpec
from stoker.feed.outbox import Outbox, Transport
from stoker.feed.requests import Session
from stoker.feed.shipping import pack_error
from stoker.feed.specs import Specs
from stoker.feed.versions import compare_versions, own_versions
from stoker.logs import Log
from stoker.records import FeedSettings

# A trainer whose connection is gone may come back within this.
UNREACHABLE_SECONDS = 15.0
# Silent sessions are spoken to this often: a trainer that is gone is noticed.
PROBE_SECONDS = 10.0
# A trainer that was asked for a spec and does not ship it: the others are asked, too.
SHIP_SECONDS = 120.0
_HOST_FIX = "see that host's log; give it more memory, or fewer workers"


class Service:
    """Serves batches to sessions.

    Args:
        workers: Batches made at a time.
        host: This host's name, in errors and logs.

    Attributes:
        reached_at: When a trainer that asks for nothing was last reached; monotonic seconds.
    """

    def __init__(
        self,
        specs: Specs,
        transport: Transport,
        *,
        workers: int,
        feed: FeedSettings,
        log: Log,
        host: str,
    ) -> None:
        self._specs = specs
        self._outbox = Outbox(transport)
        self._workers = workers
        self._feed = feed
        self._log = log
        self._host = host
        self._sessions: dict[str, Session] = {}
        self._dispatch = Dispatch(
            specs, self._outbox, sessions=self._sessions, workers=workers, feed=feed, log=log
        )
        self._is_draining = False
        self._warned: set[tuple[bytes, str]] = set()
        self._versions = own_versions()
        self._probed_at = time.monotonic()
        self.reached_at = -math.inf

    @property
    def num_begun(self) -> int:
        """Batches that workers have, to make now or next."""
        return self._dispatch.num_begun

    @property
    def num_sent(self) -> int:
        """Batches sent so far, over all sessions."""
        return self._outbox.num_sent

    @property
    def sent_bytes(self) -> int:
        """Bytes of batches that the transport still holds."""
        return self._outbox.sent_bytes

    def work(self, ready: Iterable[int]) -> None:
        """Takes what the workers and holders say on those descriptors, and keeps them busy."""
        for spec in self._specs.handle(ready):
            self._announce(spec)
        self._dispatch.work()

    def tick(self, now: float) -> None:
        """What is due once a second."""
        self._dispatch.tick()
        if now - self._probed_at >= PROBE_SECONDS:
            self._probed_at = now
            for session in self._sessions.values():
                if session.is_ready and not session.requests:
                    message = messages.Credits(session=session.name, credits=session.credits)
                    self._outbox.send(session, message)
                    if session.unreachable_since is None:
                        self.reached_at = now
        for session in list(self._sessions.values()):
            since = session.unreachable_since
            if since is not None and now - since > UNREACHABLE_SECONDS:
                self._end_session(session.name, "unreachable")
        for held in self._specs.overdue(now - SHIP_SECONDS):
            self._need(held)

    def drain(self) -> None:
        """Begins nothing any more, and says so."""
        self._is_draining = True
        self._log.event("agent_drains", begun=self.num_begun, queued=self._dispatch.num_queued)
        for session in self._sessions.values():
            self._outbox.send(session, messages.Leaving())
        self._dispatch.drop("the agent drains")

    def warn(self, identity: bytes, event: str, reason: str) -> None:
        """Logs what is wrong with a peer, once; not with every message."""
        if (identity, event) not in self._warned and len(self._warned) < 1000:
            self._warned.add((identity, event))
            self._log.event(event, peer=identity.hex(), reason=reason[:200])

    def take(self, identity: bytes, message: messages.Message, frame: memoryview) -> None:
        """Does what a trainer asks.

        Raises:
            ProtocolError: If it makes no sense.
        """
        match message:
            case messages.Attach():
                self._attach(identity, message)
            case messages.Open():
                self._open_session(identity, message)
            case messages.Ship():
                self._ship(identity, message, frame)
            case messages.Make():
                self._make(identity, message)
            case messages.Forget(session=name, before_pass=before_pass):
                self._forget(name, before_pass)
            case messages.Close(session=name):
                self._end_session(name, "closed")

    def _attach(self, identity: bytes, message: messages.Attach) -> None:
        if message.host == self._host:
            self._outbox.give_ticket(identity)
        else:
            self._outbox.answer(identity, messages.WrongHost(host=self._host))

    def _open_session(self, identity: bytes, message: messages.Open) -> None:
        if message.host not in ("", self._host):
            # Were it opened, the session's other connection would get no answers any more.
            self._outbox.answer(identity, messages.WrongHost(host=self._host))
            return
        if self._is_draining:
            self._outbox.answer(identity, messages.Leaving())
            return
        session = self._sessions.get(message.session)
        if session is None:
            session = Session(
                name=message.session,
                identity=identity,
                rank=message.rank,
                spec=message.spec,
                seeding=message.seeding,
            )
            self._log.event("session_opens", session=session.name, rank=session.rank)
        left = session.spec
        if left != message.spec:
            self._specs.forget_streams(session.name)
        before, session.identity = session.identity, identity
        session.spec, session.seeding = message.spec, message.seeding
        session.base_seed = message.base_seed
        # The trainer says next which passes are over.
        session.before_pass = 0
        session.is_ready, session.unreachable_since = False, None
        problem, warning = compare_versions(message, self._versions)
        if not problem and message.spec_bytes > self._feed.max_dataset_bytes:
            problem = (
                f"the pickled dataset has {message.spec_bytes} bytes, more than "
                f"feed.max_dataset_bytes ({self._feed.max_dataset_bytes})"
            )
        if problem:
            self._fail(session, problem)
            return
        if warning:
            self.warn(identity, "versions_differ", warning)
        self._sessions[session.name] = session
        held = self._specs.find(message.spec)
        if held is None:
            now, nbytes = time.monotonic(), message.spec_bytes
            self._specs.expect(message.spec, nbytes=nbytes, shipper=identity, now=now)
            self._outbox.send(session, messages.Need(spec=message.spec))
        elif held.state == "ready":
            self._announce(held)
        elif held.state == "expected" and before != identity and before == held.shipper:
            # The connection that it was to come over is lost.
            self._need(held)
        self._specs.number_workers(
            message.spec, first=message.first_worker, step=message.worker_step
        )
        if left != message.spec:
            self._is_left(left)
        self._retire()

    def _ship(self, identity: bytes, message: messages.Ship, piece: memoryview) -> None:
        held = self._specs.find(message.spec)
        if held is None or held.state != "expected":
            return
        try:
            is_complete = held.arrives(
                piece, offset=message.offset, shipper=identity, now=time.monotonic()
            )
        except OSError as err:
            held.fail(f"no memory for the dataset: {err.strerror}")
            self._announce(held)
            return
        if not is_complete:
            return
        self._log.event("spec_arrives", spec=held.digest, bytes=held.nbytes)
        self._specs.hold(held)
        for session in self._sessions.values():
            if session.spec == held.digest and session.base_seed is not None:
                self._specs.begin(held, seeding=session.seeding, base_seed=session.base_seed)
        self._specs.check(held)

    def _announce(self, held: HeldSpec) -> None:
        """Tells the sessions of a spec what became of it."""
        for session in [s for s in self._sessions.values() if s.spec == held.digest]:
            if held.state == "ready" and not session.is_ready:
                session.is_ready = True
                session.credits = self._dispatch.share(session)
                ready = messages.Ready(
                    session=session.name,
                    spec=held.digest,
                    credits=session.credits,
                    workers=self._workers,
                    versions=self._versions,
                    module_values=held.module_values,
                )
                self._outbox.send(session, ready)
            elif held.state == "failed":
                # Until it is opened again: on another connection, or for the next pass.
                session.is_ready = False
                self._fail(session, held.reason, held.error, is_of_host=not held.error)
        if held.state == "failed":
            self._log.event("spec_fails", spec=held.digest, reason=held.reason)
            self._specs.forget(held)
            self._dispatch.drop("the dataset failed on this host", spec=held.digest)

    def _fail(
        self, session: Session, reason: str, error: bytes = b"", *, is_of_host: bool = False
    ) -> None:
        if not error:
            kind, fix = (FeedLostError, _HOST_FIX) if is_of_host else (FeedError, "")
            raised = kind(reason, where=f"host {self._host}", fix=fix)
            error = pack_error(raised, host=self._host, where="the agent")
        failed = messages.Failed(
            session=session.name, spec=session.spec, reason=reason, is_of_host=is_of_host
        )
        self._outbox.send(session, failed, error)

    def _make(self, identity: bytes, message: messages.Make) -> None:
        session = self._sessions.get(message.session)
        if session is None or self._is_draining or not session.is_ready:
            reason = "the agent knows no such session" if session is None else "the agent drains"
            if session is not None and not self._is_draining:
                reason = "the session is not ready"
            self._outbox.refuse(identity, message, reason)
            return
        session.identity, session.unreachable_since = identity, None
        if message.stream is None:
            self._dispatch.ask(identity, session, message)
        else:
            self._dispatch.ask_stream(identity, session, message, message.stream)

    def _forget(self, name: str, before_pass: int) -> None:
        session = self._sessions.get(name)
        if session is None:
            return
        session.before_pass = max(session.before_pass, before_pass)
        for key, request in list(session.requests.items()):
            if request.pass_number < session.before_pass:
                request.is_dropped = True
                del session.requests[key]
        self._specs.forget_streams(name, before_pass=session.before_pass)

    def _end_session(self, name: str, reason: str) -> None:
        session = self._sessions.pop(name, None)
        if session is None:
            return
        for request in session.requests.values():
            request.is_dropped = True
        session.requests.clear()
        self._specs.forget_streams(name)
        self._log.event("session_ends", session=name, rank=session.rank, reason=reason)
        self._is_left(session.spec)
        self._retire()
        self._dispatch.share_credits()

    def _is_left(self, spec: str) -> None:
        """A session has it no more: a trainer ships what it has, and it may be the one asked."""
        held = self._specs.find(spec)
        if held is not None and held.state == "expected":
            self._need(held)

    def _need(self, held: HeldSpec) -> None:
        """Asks for a spec again, if it is wanted: who was asked first is gone, or silent."""
        wanting = [s for s in self._sessions.values() if s.spec == held.digest]
        if not wanting:
            self._specs.forget(held)
            return
        now = time.monotonic()
        self._specs.expect(held.digest, nbytes=held.nbytes, shipper=b"", now=now)
        for session in wanting:
            self._outbox.send(session, messages.Need(spec=held.digest))

    def _retire(self) -> None:
        used = {session.spec for session in self._sessions.values()}
        used.update(r.spec for s in self._sessions.values() for r in s.requests.values())
        self._specs.retire(used)
