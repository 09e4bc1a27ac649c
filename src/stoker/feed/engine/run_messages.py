"""Messages over control connections: of a run's hosts, and between a rank and a data host's agent.

    launchers  HostState → RunState, every second
    ranks      Progress → RunState, every second
    trainer    Open, Start, Close
    agent      Ticket, Opened, Failed, Ended, Probe, WrongHost

Each is one zmq message, over CURVE. A *session* is one loader of one rank. A *dataset* is what
makes batches, pickled, and named by its digest; a host gets it once for all ranks. With a ticket
the trainer opens a connection to the agent's batch port: to send a dataset, or to a worker.
"""

from typing import Literal

import msgspec

from stoker.errors import ProtocolError
from stoker.host.gpus import GpuState

# To be raised with every change that an older peer would misread: of these messages, of a worker's,
# of what is pickled. tests/contract/test_wire_version.py pins them.
PROTOCOL_VERSION = 31

# Random first bytes of a connection to the batch port.
TICKET_BYTES = 32

# An engine's commands on one host: `ready`: they accept work; `done`: the training there has ended,
# and they run until the run ends.
HostStage = Literal["begun", "ready", "done"]
# On all hosts: `led`: the leader's accept work, so the others may start theirs; `ready`: all accept
# work, so the training may start; `ending`: a rule ends the run, so ranks get SIGTERM and may save.
RunStage = Literal["begun", "led", "ready", "ending"]


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages: a tag names the type, and unknown fields are refused."""


class MemoryPeak(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The highest use of a launcher's memory so far, and the use now; see the record HostMemory."""

    limit_bytes: int
    peak_bytes: int
    used_bytes: int
    kills: int = 0


class HostEnd(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a host's part ended.

    Attributes:
        exit_code: Of its command. None: it has none, as on a data host, or its engine failed.
        reason: Why, as text; empty: in good order.
        is_signalled: It was asked to end, as by a drain.
    """

    exit_code: int | None = None
    reason: str = ""
    is_signalled: bool = False


class HostState(Message, frozen=True, kw_only=True):
    """All that is so about a host, except the leader.

    Attributes:
        incarnation: Random: a host that comes back has another one.
        port: Of its agent; 0: it has none.
        end: None: it has not ended.
        gpus: Means of its GPUs since the last time that they were told.
    """

    protocol: int
    host: str
    address: str
    port: int = 0
    batch_port: int = 0
    workers: int = 0
    incarnation: str
    stage: HostStage = "begun"
    end: HostEnd | None = None
    memory: MemoryPeak | None = None
    gpus: tuple[GpuState, ...] = ()


class Member(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An agent that trainers may connect to."""

    host: str
    address: str = ""
    port: int = 0
    batch_port: int = 0
    workers: int
    incarnation: str = ""


class RunState(Message, frozen=True, kw_only=True):
    """All that is so about the run.

    Attributes:
        refusal: Why whom it is sent to may not take part; empty: it may.
        outcome: None while the run lasts.
        stage: Of an engine's commands.
        daemons: Arguments of mpirun's daemons, by the host that is to start them.
        expected: Number of the run's data hosts.
        agents: Data hosts that are there.
        lost: Data hosts that have been silent beyond the lease.
        awaited: Data hosts that have never been heard.
        left: Why data hosts have ended, by host: their agent could not start, for example.
    """

    refusal: str = ""
    outcome: Literal["succeeded", "failed", "stopped"] | None = None
    exit_code: int | None = None
    reason: str = ""
    stage: RunStage = "begun"
    daemons: dict[str, tuple[str, ...]] = {}
    expected: int = 0
    agents: tuple[Member, ...] = ()
    lost: tuple[str, ...] = ()
    awaited: tuple[str, ...] = ()
    left: dict[str, str] = {}


class HostWork(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Work of one host's data workers for a rank so far.

    Attributes:
        batches: Those that the rank used: not what came after another host's.
        credits: Batches that it may have in the making; 0: the host is gone.
        num_workers: Workers of one loader, at most.
    """

    host: str
    is_local: bool = False
    batches: int = 0
    frame_bytes: int = 0
    credits: int = 0
    busy_seconds: float = 0.0
    cpu_seconds: float = 0.0
    num_workers: int = 0


class FeedWork(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Work of the feed as a rank sees it; rates are taken over `seconds`, since the feed began.

    Attributes:
        ready_at_takes: Batches that were ready after the one taken, summed over `taken`.
    """

    seconds: float
    taken: int = 0
    ready_at_takes: int = 0
    ready: int = 0
    shards: int = 0
    hosts: tuple[HostWork, ...] = ()


class Progress(Message, frozen=True, kw_only=True):
    """Progress of a rank with its main loader; `steady_`: without the first steps of epochs.

    Attributes:
        between_seconds: From the last steps of epochs to the requests for the next ones' first
            batches.
        bad_samples: Samples that were skipped or replaced.
        has_begun: False: this process only asks for the run's state. A child of the trainer's, or
            one that only made its loaders.
    """

    protocol: int = PROTOCOL_VERSION
    has_begun: bool = True
    rank: int
    steps: int
    samples: int
    wait_seconds: float
    compute_seconds: float
    steady_steps: int = 0
    steady_wait_seconds: float = 0.0
    steady_compute_seconds: float = 0.0
    between_seconds: float = 0.0
    bad_samples: int = 0
    feed: FeedWork | None = None


ToLeader = HostState | Progress

# ---- between a trainer and the agent of a data host


class Open(Message, frozen=True, kw_only=True):
    """Opens a session, or changes its dataset.

    Attributes:
        host: The data host that is meant: addresses are used again.
        dataset: Digest of the pickle.
    """

    session: str
    host: str
    dataset: str
    dataset_bytes: int


class Start(Message, frozen=True, kw_only=True):
    """Orders a worker for a session."""

    session: str
    worker: int


class Close(Message, frozen=True, kw_only=True):
    """Closes a session."""

    session: str


class Ticket(Message, frozen=True, kw_only=True):
    """Opens one connection: its first bytes, and its key; shown nowhere.

    Attributes:
        worker: To whom it leads.
        dataset: That is to be sent over it, which the agent lacks; empty: it leads to a worker.
    """

    session: str
    worker: int = 0
    dataset: str = ""
    ticket: bytes
    key: bytes

    def __repr__(self) -> str:
        return f"Ticket(session={self.session!r}, worker={self.worker})"


class Opened(Message, frozen=True, kw_only=True):
    """The dataset is loaded: workers may be ordered."""

    session: str
    dataset: str


class Failed(Message, frozen=True, kw_only=True):
    """This host cannot serve the session; `error` is packed.

    Without an error the dataset's process has died with its workers: the session is opened again.
    """

    session: str
    dataset: str
    error: bytes


class Ended(Message, frozen=True, kw_only=True):
    """A worker's process has ended.

    Attributes:
        how: In words; empty: as its connection was closed.
        making: Id of the epoch, number of the batch, and place of the sample that it made; -1: none
            or not known.
    """

    session: str
    worker: int
    how: str
    making: tuple[int, int, int] = (-1, -1, -1)


class Probe(Message, frozen=True, kw_only=True):
    """Means nothing: whether it can be sent says that the trainer is connected."""


class WrongHost(Message, frozen=True, kw_only=True):
    """The address belongs to another host by now, which answers."""

    host: str


ToAgent = Open | Start | Close
FromAgent = Ticket | Opened | Failed | Ended | Probe | WrongHost

_encoder = msgspec.msgpack.Encoder()


def pack(message: Message) -> bytes:
    return _encoder.encode(message)


class Unpacker:
    """Decoder of the messages of one direction, one of the unions above."""

    def __init__(self, kinds: object) -> None:
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(kinds)

    def __call__(self, data: bytes | bytearray | memoryview) -> Message:
        """Raises ProtocolError if the message is malformed."""
        try:
            return self._decoder.decode(data)
        # RecursionError: a peer's nested lists, a byte each, may exceed the stack.
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
            raise ProtocolError(f"malformed message: {err}") from None
