"""Datasets and workers on one host: the part of an agent that knows nothing of the network.

An agent has one for the trainers of its run, and a rank has one for its local workers. A trainer
sends a dataset to a loader process of its own, which reads it once; then workers are started, each
with its connection. A dataset that no session has ends with its workers.

An agent and its loader processes exchange packets with descriptors over Unix sockets: `Load`, with
a dataset's channel and connection, and `Work`, with a worker's connection; `Loaded`, `Failed` and
run_messages.Ended answer them.
"""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from stoker.errors import FeedLostError
from stoker.feed.engine import run_messages as messages
from stoker.feed.engine.raised import pack_error, summary_of
from stoker.feed.engine.run_messages import Message
from stoker.logs import EventName, Log

_STARTUP = str(Path(__file__).parents[2] / "startup")
_PROGRAM = "stoker.feed.engine.loader_process"
# Of a packet: of an error, the longest, it fits the usual socket buffer of 208 KiB.
_MAX_BYTES = 192 << 10

# Takes the descriptor of a connection and its key.
Attach = Callable[[int, bytes], None]


class Load(msgspec.Struct, frozen=True, tag=True):
    """Forks a process for a dataset.

    Attributes:
        key: Of the connection over which the pickle comes.
        nbytes: Of the pickle.
    """

    key: bytes
    nbytes: int


class Work(msgspec.Struct, frozen=True, tag=True):
    """Forks a worker; `session` and `worker` name it in `Ended`, and `key` is of its connection."""

    key: bytes
    session: str
    worker: int


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The dataset is there; workers may be ordered."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The dataset cannot be loaded here: what unpickling raised, packed; empty: it has not come."""

    error: bytes


unpack_order = msgspec.msgpack.Decoder(Load | Work).decode
_unpack_report = msgspec.msgpack.Decoder(Loaded | Failed | messages.Ended).decode


def send(channel: socket.socket, message: msgspec.Struct, *descriptors: int) -> None:
    """Sends a message, and copies of descriptors; the other end may be gone.

    Whoever receives sees its end.
    """
    with contextlib.suppress(OSError):
        socket.send_fds(channel, [msgspec.msgpack.encode(message)], descriptors)


def receive(channel: socket.socket) -> tuple[bytes, list[int]]:
    """Waits for a packed message and its descriptors; nothing: the other end is gone."""
    try:
        packed, descriptors, _, _ = socket.recv_fds(channel, _MAX_BYTES, 2)
    except OSError:
        return b"", []
    return packed, descriptors


def _channel() -> tuple[socket.socket, socket.socket]:
    """Returns both ends of a packet socket; closing one tells the other that it is gone."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


@dataclass(slots=True)
class _Dataset:
    """A dataset on this host.

    Attributes:
        sender: The session that was asked for it.
        sessions: Names of those that use it.
        channel: To its loader process; None: it is not there yet.
    """

    digest: str
    sender: str
    sessions: set[str] = field(default_factory=set)
    is_loaded: bool = False
    channel: socket.socket | None = None


@dataclass(eq=False)
class Hosting:
    """The datasets and workers of one host; used by one thread.

    Attributes:
        host: Its name, for errors.
        tell: Takes a session's name and what is answered.
        invite: Has a session's trainer connect to its worker of a number, or send a dataset;
            `attach` takes the connection.
        niceness: Of all processes here.
    """

    host: str
    log: Log
    tell: Callable[[str, Message], object]
    invite: Callable[[str, int, str, Attach], None]
    niceness: int = 0
    _datasets: dict[str, _Dataset] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._channel, end = _channel()
        # -P: a module in the working folder must not replace one of ours.
        arguments = [str(end.fileno()), self.host, str(self.niceness)]
        command = [sys.executable, "-P", "-m", _PROGRAM, *arguments]
        # Without what makes a Python of a run one of its ranks.
        paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        kept = [path for path in paths if path and os.path.abspath(path) != _STARTUP]
        # In a group of its own: Ctrl-C is for the process above.
        with end:
            self._process = subprocess.Popen(
                command,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(kept)},
                pass_fds=[end.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,
            )

    def filenos(self) -> list[int]:
        """Returns what to poll for reading."""
        channels = [each.channel for each in self._datasets.values() if each.channel is not None]
        return [channel.fileno() for channel in (self._channel, *channels)]

    def handle(self, ready: Container[object]) -> None:
        """Takes what loader processes report.

        Raises:
            FeedLostError: The first process, which forks all others, has died.
        """
        if self._channel.fileno() in ready and not receive(self._channel)[0]:
            raise FeedLostError(
                "the process that forks the data workers died, perhaps out of memory",
                where=f"host {self.host}",
                fix="use fewer workers per host, or hosts with more memory",
            )
        for dataset in list(self._datasets.values()):
            if dataset.channel is not None and dataset.channel.fileno() in ready:
                self._take(receive(dataset.channel)[0], dataset)

    def obey(self, message: Message) -> None:
        """Does what a trainer asks for."""
        match message:
            case messages.Open():
                self._open(message)
            case messages.Start(session=session, worker=worker):
                self.invite(session, worker, "", partial(self._start, session, worker))
            case messages.Close(session=session):
                self._leave(session, but=None)

    def close(self) -> None:
        """Ends all processes: those below the first one end with it."""
        self._process.kill()
        self._process.wait()
        self._channel.close()
        for dataset in list(self._datasets.values()):
            self._drop(dataset)

    # ---- what trainers ask for

    def _open(self, message: messages.Open) -> None:
        """Has a session use a dataset; what it used before ends, if nobody else does."""
        session, digest = message.session, message.dataset
        dataset = self._datasets.setdefault(digest, _Dataset(digest, sender=session))
        dataset.sessions.add(session)
        self._leave(session, but=dataset)
        if dataset.is_loaded:
            self.tell(session, messages.Opened(session=session, dataset=digest))
        elif dataset.sender == session:
            self.invite(session, 0, digest, partial(self._load, dataset, message))

    def _load(self, dataset: _Dataset, message: messages.Open, connection: int, key: bytes) -> None:
        """Has a process read a dataset from a connection."""
        if self._datasets.get(dataset.digest) is not dataset or dataset.channel is not None:
            return
        dataset.channel, end = _channel()
        with end:
            order = Load(key, message.dataset_bytes)
            send(self._channel, order, end.fileno(), connection)

    def _start(self, session: str, worker: int, connection: int, key: bytes) -> None:
        """Starts a worker for a connection; without its dataset the trainer sees its end."""
        for dataset in self._datasets.values():
            if session in dataset.sessions and dataset.channel is not None and dataset.is_loaded:
                send(dataset.channel, Work(key, session, worker), connection)

    def _leave(self, session: str, *, but: _Dataset | None) -> None:
        for dataset in list(self._datasets.values()):
            if dataset is but or session not in dataset.sessions:
                continue
            dataset.sessions.discard(session)
            # Without who sends it, the others open it again.
            if not dataset.sessions or (dataset.sender == session and dataset.channel is None):
                self._drop(dataset)

    # ---- what processes report

    def _take(self, packed: bytes, dataset: _Dataset) -> None:
        match _unpack_report(packed) if packed else None:
            case messages.Ended(session=session, how=how) as ended:
                if how:
                    self.log.event(EventName.WORKER_DIED, how=how)
                self.tell(session, ended)
            case Loaded():
                dataset.is_loaded = True
                self.log.event(EventName.SPEC_RECEIVED, spec=dataset.digest)
                for name in dataset.sessions:
                    self.tell(name, messages.Opened(session=name, dataset=dataset.digest))
            case Failed(error):
                self._drop(dataset, error)
            case None if dataset.is_loaded:
                self._drop(dataset)
            case None:
                died = FeedLostError("the process that reads the dataset died, perhaps of memory")
                where = f"the loading of the dataset on {self.host}"
                self._drop(dataset, pack_error(died, where=where))

    def _drop(self, dataset: _Dataset, error: bytes = b"") -> None:
        """Ends a dataset's process, and its workers with it, by closing its channel.

        Args:
            error: Why no batches of it are made here; without one it may be opened again.
        """
        digest = dataset.digest
        del self._datasets[digest]
        if dataset.channel is not None:
            dataset.channel.close()
        if error:
            self.log.event(EventName.SPEC_FAILED, spec=digest, reason=summary_of(error))
        for name in dataset.sessions:
            self.tell(name, messages.Failed(session=name, dataset=digest, error=error))
