"""Hosts that make batches for this process, as its control thread sees them.

A session is opened on each host: the host then has the dataset, and workers may be started there.
A data host is behind its agent, and this host behind a `LocalLink`, with processes of its own. Both
answer with the messages of an agent.
"""

import socket
import threading
from collections import deque
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from functools import partial

import zmq

from stoker.errors import FeedLostError
from stoker.feed.engine import run_messages as messages
from stoker.feed.engine.batch_socket import Connection
from stoker.feed.engine.control_connection import GOODBYE_SECONDS, Link
from stoker.feed.engine.hosting import Attach, Hosting
from stoker.feed.engine.loader_spec import PackedSpec
from stoker.feed.engine.receiver import Receiver
from stoker.feed.engine.records import new_key
from stoker.feed.engine.run_messages import HostWork, Member, Message
from stoker.feed.engine.session import EpochRequest, FeedSession, Worker
from stoker.logs import Log

# Connections for each worker that a host has which may be lost in a row without a batch.
MAX_FRUITLESS = 5
# After one of them.
_PAUSE_SECONDS = 1.0
# Stands for the number of a worker, where a dataset is read.
DATASET = -1
# Of local workers.
_NICENESS = 10


@dataclass(slots=True)
class Opening:
    """A session on a host.

    Attributes:
        opened_at: Monotonic seconds; 0: it is not open.
        reason: Why the host makes no batches of that loader; empty: it does.
    """

    session: FeedSession
    spec: PackedSpec
    opened_at: float = 0.0
    reason: str = ""
    error: BaseException | None = None


@dataclass(eq=False)
class Host:
    """A host, and the sessions that are open on it; used by the control thread.

    Attributes:
        work: What it has made.
        num_workers: That a data host has for a session of this process.
        openings: By session.
        workers: Whose processes have not ended, by their ids.
        not_before: When something may be started again; monotonic seconds.
    """

    member: Member
    link: "Link | LocalLink"
    receiver: Receiver
    work: HostWork
    num_workers: int
    openings: dict[str, Opening] = field(default_factory=dict)
    not_before: float = 0.0
    workers: dict[int, Worker] = field(default_factory=dict)
    _num_fruitless: int = 0

    def __post_init__(self) -> None:
        self.name = self.member.host
        self.is_remote = not self.work.is_local

    def room_for(self, request: EpochRequest) -> int:
        """Returns how many workers it has for a session."""
        return self.num_workers if self.is_remote else request.local_workers

    def opening_of(self, session: str, dataset: str) -> Opening | None:
        """Returns what is open on it of a session, if that has this dataset."""
        opening = self.openings.get(session)
        return None if opening is None or opening.spec.digest != dataset else opening

    def open(self, session: FeedSession, spec: PackedSpec) -> bool:
        """Returns whether a session is open; opens it for this dataset if it is not."""
        opening = self.openings.get(session.name)
        # Whatever fails here once, does so for all datasets of a loader.
        if opening is None or not (opening.reason or spec.digest == opening.spec.digest):
            opening = self.openings[session.name] = Opening(session, spec)
            self.link.send(
                messages.Open(
                    session=session.name,
                    host=self.name,
                    dataset=spec.digest,
                    dataset_bytes=len(spec.data),
                )
            )
        return opening.opened_at > 0.0

    def start(self, worker: Worker) -> None:
        """Orders a worker; it joins its session once it is there."""
        self.workers[worker.id] = worker
        self.link.send(messages.Start(session=worker.session.name, worker=worker.id))

    def fate(self, session: str) -> str:
        """Returns why it makes nothing for a session."""
        opening = self.openings.get(session)
        return (opening and opening.reason) or "not ready"

    def close_session(self, name: str) -> None:
        if self.openings.pop(name, None) is not None:
            self.link.send(messages.Close(session=name))

    def note_lost(self, worker: Worker, now: float) -> bool:
        """Notes that a connection has ended; returns whether the host may still deliver batches."""
        if worker.num_made:
            self._num_fruitless = 0
            return True
        self.not_before = now + _PAUSE_SECONDS
        self._num_fruitless = (self._num_fruitless + 1) % (MAX_FRUITLESS * self.num_workers)
        return self._num_fruitless > 0

    def take_ticket(self, ticket: messages.Ticket) -> None:
        """Connects to a worker, or to what reads a dataset."""
        worker = self.workers.get(ticket.worker)
        data = b""
        if ticket.dataset:
            opening = self.opening_of(ticket.session, ticket.dataset)
            if opening is None:
                return
            # For the loss of the connection.
            worker = Worker(opening.session, self.work, DATASET)
            data = opening.spec.data
        if worker is not None and not worker.is_lost:
            # A host that does not answer, and a large dataset, delay nothing else.
            connect = partial(self._connect, ticket, worker, data)
            threading.Thread(target=connect, name="stoker-connect", daemon=True).start()

    def _connect(self, ticket: messages.Ticket, worker: Worker, data: bytes) -> None:
        try:
            connection = Connection(
                self.link.connect(self.member.batch_port, ticket.ticket),
                ticket.key,
                max_packed_bytes=self.receiver.max_bytes,
            )
            if ticket.dataset:
                connection.write(b"", (memoryview(data),))
                connection.close()
            else:
                connection.write(worker.facts)
                self.receiver.add(worker, connection)
        except OSError as err:
            self.receiver.on_lost(worker, str(err.strerror or err))

    def forget(self) -> None:
        """Forgets what it has, as its control connection is lost."""
        self.openings.clear()
        self.workers.clear()
        self._num_fruitless = 0

    def close(self) -> None:
        self.link.close(linger_seconds=GOODBYE_SECONDS)
        self.receiver.close(wait_seconds=GOODBYE_SECONDS)


@dataclass(eq=False)
class LocalLink:
    """What a Link is to an agent: to workers that are children of this process."""

    name: str
    log: Log
    wake: Callable[[], None]
    _hosting: Hosting | None = None
    _answers: deque[Message] = field(default_factory=deque)
    _connections: dict[bytes, socket.socket] = field(default_factory=dict)

    @property
    def is_up(self) -> bool:
        return self._hosting is not None

    def register(self, poller: zmq.Poller) -> None:
        for fileno in () if self._hosting is None else self._hosting.filenos():
            poller.register(fileno, zmq.POLLIN)

    def turn(self, ready: Container[object], take: Callable[[bytes], None]) -> bool:
        """Takes what processes report; True if `is_up` changed."""
        if self._hosting is None:
            self._hosting = Hosting(
                host=self.name,
                log=self.log,
                tell=lambda _, answer: self._answer(answer),
                invite=self._invite,
                # They take what the training leaves of its CPUs.
                niceness=_NICENESS,
            )
            return True
        try:
            self._hosting.handle(ready)
        except FeedLostError:
            # The next turn begins another one.
            self.close()
            return True
        while self._answers:
            take(messages.pack(self._answers.popleft()))
        return False

    def send(self, message: Message) -> None:
        if self._hosting is not None:
            self._hosting.obey(message)

    def mark_lost(self) -> None:
        """Does nothing: these processes are this process's own."""

    def connect(self, port: int, ticket: bytes) -> socket.socket:
        """Returns the connection that a ticket is for."""
        return self._connections.pop(ticket)

    def close(self, *, linger_seconds: float = 0.0) -> None:
        if self._hosting is not None:
            self._hosting.close()
        self._hosting = None
        self._answers.clear()

    def _invite(self, session: str, worker: int, dataset: str, attach: Attach) -> None:
        ours, theirs = socket.socketpair()
        key, ticket = new_key(), new_key()
        # If nothing is started for it, the connection ends here.
        with theirs:
            attach(theirs.fileno(), key)
        self._connections[ticket] = ours
        answer = messages.Ticket(
            session=session, worker=worker, dataset=dataset, ticket=ticket, key=key
        )
        self._answer(answer)

    def _answer(self, answer: Message) -> None:
        self._answers.append(answer)
        # It is taken in the next turn.
        self.wake()
