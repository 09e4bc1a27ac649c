"""Hosts that make batches for this process, as its control thread sees them.

A session is opened on each host: the host then has the dataset, and workers may be started there.
A data host is behind its agent, and this host behind a `LocalLink`, with processes of its own. Both
answer with the messages of an agent.
"""

import math
import platform
import socket
import threading
from collections import deque
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import zmq

from stoker.errors import FeedLostError
from stoker.feed.engine import run_messages as messages
from stoker.feed.engine.batch_socket import Connection
from stoker.feed.engine.control_connection import GOODBYE_SECONDS, Link
from stoker.feed.engine.hosting import Attach, Hosting
from stoker.feed.engine.loader_spec import PackedSpec
from stoker.feed.engine.receiver import Receiver
from stoker.feed.engine.records import new_key
from stoker.feed.engine.run_messages import Member, Message
from stoker.feed.engine.session import FeedSession, Worker
from stoker.logs import Log

# Connections for each worker that a host has which may be lost in a row without a batch.
MAX_FRUITLESS = 5
# After one of them.
_PAUSE_SECONDS = 1.0
# Of local workers.
_NICENESS = 10


@dataclass(slots=True)
class Opening:
    """What became of a session on a host; `failed`: it makes no batches of that loader."""

    spec: PackedSpec
    state: Literal["opening", "opened", "failed"] = "opening"
    reason: str = ""
    error: BaseException | None = None


@dataclass(eq=False)
class Host:
    """A host, and the sessions that are open on it; used by the control thread.

    Attributes:
        on_lost: Called in any thread with the names of host and session, and why a dataset could
            not be sent.
        num_workers: That a data host has for a session of this process.
        openings: By session.
        workers: Whose processes have not ended, by their ids.
        not_before: When something may be started again; monotonic seconds.
    """

    member: Member
    link: "Link | LocalLink"
    receiver: Receiver
    on_lost: Callable[[str, str, str], None]
    num_ranks: int
    openings: dict[str, Opening] = field(default_factory=dict)
    not_before: float = 0.0
    workers: dict[int, Worker] = field(default_factory=dict)
    _num_fruitless: int = 0

    def __post_init__(self) -> None:
        self.name = self.member.host
        self.is_remote = isinstance(self.link, Link)
        most = self.member.workers
        # Ranks share a host; one that waits leaves its part to the others.
        share = -(-most // max(1, self.num_ranks))
        self.num_workers = max(1, min(most, 2 * share))

    def state_of(self, session: FeedSession) -> str:
        opening = self.openings.get(session.name)
        return "" if opening is None else opening.state

    def opening_of(self, session: str, dataset: str) -> Opening | None:
        """Returns what is open on it of a session, if that has this dataset."""
        opening = self.openings.get(session)
        return None if opening is None or opening.spec.digest != dataset else opening

    def open(self, session: FeedSession, spec: PackedSpec) -> bool:
        """Returns whether a session is open; opens it for this dataset if it is not."""
        opening = self.openings.get(session.name)
        is_same = opening is not None and spec.digest == opening.spec.digest
        if opening is None or not (is_same or opening.state == "failed"):
            opening = self.openings[session.name] = Opening(spec)
            self.link.send(
                messages.Open(
                    session=session.name,
                    host=self.name,
                    dataset=spec.digest,
                    dataset_bytes=len(spec.data),
                    is_spawned=spec.is_spawned,
                    python=platform.python_version(),
                )
            )
        return opening.state == "opened"

    def start(self, worker: Worker) -> None:
        """Orders a worker; it joins its session once it is there."""
        self.workers[worker.id] = worker
        self.link.send(messages.Start(session=worker.session.name, worker=worker.id))

    def close_session(self, name: str) -> None:
        if self.openings.pop(name, None) is not None:
            self.link.send(messages.Close(session=name))

    def note_lost(self, why: str, *, num_made: int, now: float) -> str:
        """Notes that a connection has ended; returns what to say if no batch ever comes."""
        self._num_fruitless = 0 if num_made else self._num_fruitless + 1
        if not num_made:
            self.not_before = now + _PAUSE_SECONDS
        if self._num_fruitless < MAX_FRUITLESS * self.num_workers:
            return ""
        self._num_fruitless = 0
        return (
            f"host {self.name} delivers no batches: connections to its workers were lost again and "
            f"again, at last: {why}; open port feed.port + 1 of data hosts to the trainers; if it "
            "is open, large packets may be lost (the network's MTU)"
        )

    def take_ticket(self, ticket: messages.Ticket) -> None:
        """Connects to a worker, or to what reads a dataset."""
        worker = self.workers.get(ticket.worker)
        opening = self.opening_of(ticket.session, ticket.dataset)
        if opening is not None or (worker is not None and not worker.is_lost):
            # A host that does not answer, and a large dataset, delay nothing else.
            connect = partial(self._connect, ticket, opening, worker)
            threading.Thread(target=connect, name="stoker-connect", daemon=True).start()

    def _connect(
        self, ticket: messages.Ticket, opening: Opening | None, worker: Worker | None
    ) -> None:
        try:
            connection = Connection(
                self.link.connect(self.member.batch_port, ticket.ticket),
                ticket.key,
                max_packed_bytes=self.receiver.max_bytes,
            )
            if worker is not None:
                connection.write(worker.facts)
                self.receiver.add(worker, connection)
            elif opening is not None:
                connection.write(b"", (memoryview(opening.spec.data),))
                connection.close()
        except OSError as err:
            why = str(err.strerror or err)
            if worker is not None:
                self.receiver.on_lost(worker, why)
            else:
                self.on_lost(self.name, ticket.session, why)

    def forget(self) -> None:
        """Forgets what it has, as its control connection is lost."""
        self.openings.clear()
        self.workers.clear()

    def close(self) -> None:
        self.link.close(linger_seconds=GOODBYE_SECONDS)
        self.receiver.close(wait_seconds=GOODBYE_SECONDS)


@dataclass(eq=False)
class LocalLink:
    """What a Link is to an agent: to workers that are children of this process."""

    name: str
    log: Log
    _hosting: Hosting | None = None
    _answers: deque[Message] = field(default_factory=deque)
    _connections: dict[bytes, socket.socket] = field(default_factory=dict)

    @property
    def is_up(self) -> bool:
        return self._hosting is not None

    @property
    def dial_at(self) -> float:
        return 0.0 if self._answers or self._hosting is None else math.inf

    def register(self, poller: zmq.Poller) -> None:
        for fileno in () if self._hosting is None else self._hosting.filenos():
            poller.register(fileno, zmq.POLLIN)

    def turn(self, ready: Container[object], take: Callable[[bytes], None]) -> bool:
        """Takes what processes report; True if `is_up` changed."""
        if self._hosting is None:
            self._hosting = Hosting(
                host=self.name,
                log=self.log,
                tell=lambda _, answer: self._answers.append(answer),
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
        self._answers.append(answer)
