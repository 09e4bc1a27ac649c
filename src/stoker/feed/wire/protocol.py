"""Messages between the hosts of a run.

Each message is one zmq multipart: the packed message and at most one frame. Long messages to an
agent are sent in pieces, so that encryption, transfer and decryption overlap. There are two
services, both ROUTER sockets with CURVE, on one fixed port a host. Batches are sealed (see sealing)
and come from an agent's next port, which is a plain TCP socket:

coordinator (in the dnn leader's launcher)
    launchers  Join → Welcome | Refused;  Heartbeat → State;  Leave;  unasked, to followers: Start
    ranks      Attend → Roster, and again whenever it changes;  Progress

agent (on a data host)
    trainers   Attach → Ticket | WrongHost
               Open → Need | Ready | Failed | Leaving | WrongHost;  Ship + frame → Ready | Failed
               Make → Made + payload, sealed | Raised + frame | Ended | Declined
               Cancel;  Close;  Piece;  unasked, to trainers: Credits, Leaving

A *session* is one loader of one trainer process. A *spec* is what makes batches: dataset, collate
function, worker_init_fn, pickled together and named by the digest of its bytes; each host gets it
once. `Make` carries the batch's seed words, so a worker knows nothing of epochs or ranks.
"""

import platform
from collections.abc import Mapping
from importlib import metadata
from typing import Annotated, Literal, TypeVar

import msgspec

from stoker.errors import ProtocolError

# Raised with every change that an older peer would misread: of these messages, of a batch's tree
# (codec), of what travels pickled (dataset). tests/contract/test_wire_version.py pins them.
PROTOCOL_VERSION = 1

# Shards of an iterable dataset: workers of one loader of one rank.
MAX_SHARDS = 4096

# The first bytes on a connection for batches: random, so long that none can be guessed.
TICKET_BYTES = 32

# As large as fits a frame (crypto.MAX_CONTROL_BYTES) next to its message. 6 MB, encrypted, on one
# busy machine, from Need to the memory: 29 ms in one piece, its digest included; 12 ms in pieces of
# 512 KiB, the digest taken while the spec is unpickled; 2 ms more in pieces of this size.
PIECE_BYTES = 240 << 10
# Long messages that are under way at a time, one a peer: a data host has few trainers, and one that
# is lost in the middle of a message leaves its pieces here.
_MAX_UNFINISHED = 64

# Arguments of a daemon that a follower starts.
MAX_START_ARGUMENTS = 500
Argument = Annotated[str, msgspec.Meta(max_length=8000)]
Identifier = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
# A base seed of torch has 63 bits.
Word = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
# Random states of a stream: 5 kB, and 16 to 3,000 bytes for each generator of its own.
States = Annotated[bytes, msgspec.Meta(max_length=1 << 20)]
Words = Annotated[tuple[Word, ...], msgspec.Meta(max_length=1 << 20)]


# An engine's commands on one host: `ready`: they take work; `done`: so is the training there, and
# they stay until the run ends.
HostStage = Literal["begun", "ready", "done"]
# And of all hosts: `led`: the leader's take work, so that the others may start theirs; `ready`: all
# do, so that the training may start.
RunStage = Literal["begun", "led", "ready"]


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """All messages derive from this: a tag says which one it is, and unknown fields are refused."""


class Join(Message, frozen=True, kw_only=True):
    """A launcher joins: `agent` on a data host, `follower` on another dnn host.

    Attributes:
        address: Under which trainers reach this host.
        port: Port of its agent; 0 for a follower.
        batch_port: Where an agent sends batches from.
        workers: Data workers of the host.
        incarnation: Random; a host that comes back has another one.
    """

    protocol: int
    run_id: Identifier
    kind: Literal["agent", "follower"]
    host: Identifier
    group: Identifier
    address: Identifier
    port: Count
    batch_port: Count = 0
    workers: Count = 0
    incarnation: Identifier


class Welcome(Message, frozen=True, kw_only=True):
    """The launcher is a member; it must beat every `beat_seconds`."""

    beat_seconds: float
    lease_seconds: float


class Refused(Message, frozen=True, kw_only=True):
    """The launcher is not welcome, and must end."""

    reason: str


class Heartbeat(Message, frozen=True, kw_only=True):
    """Renews the lease of a launcher.

    Attributes:
        stage: How far this host is with the engine's commands.
        has_start: The follower has got its Start.
        unfed_ranks: Ranks of this host: none of them asks, or will ask, for a batch of the feed.
    """

    host: Identifier
    incarnation: Identifier
    stage: HostStage = "begun"
    has_start: bool = False
    unfed_ranks: Annotated[int, msgspec.Meta(ge=0)] = 0


class Start(Message, frozen=True, kw_only=True):
    """A follower is to start the daemon of mpirun, which runs on the leader; repeated until known.

    Attributes:
        arguments: Arguments of the daemon; the follower knows which program that is.
    """

    arguments: Annotated[tuple[Argument, ...], msgspec.Meta(max_length=MAX_START_ARGUMENTS)]


class State(Message, frozen=True, kw_only=True):
    """Tells the run's state, in answer to Heartbeat, and unasked when it changes.

    Attributes:
        outcome: absent while the run goes on. To data hosts only, released: the training goes on,
            and takes no batches from them.
        reason: Why, where it failed.
        unknown: The sender is not (any more) a member: join again.
        stage: How far the engine's commands are.
    """

    outcome: Literal["succeeded", "failed", "stopped", "released"] | None = None
    exit_code: int | None = None
    reason: str = ""
    unknown: bool = False
    stage: RunStage = "begun"


class Leave(Message, frozen=True, kw_only=True):
    """A launcher ends; exit_code is its training command's on a follower."""

    host: Identifier
    incarnation: Identifier
    exit_code: int | None = None
    reason: str = ""


class Attend(Message, frozen=True, kw_only=True):
    """A rank asks for the roster, now and whenever it changes."""

    protocol: int
    run_id: Identifier
    rank: Count
    host: Identifier


class Member(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A member of the roster is an agent that trainers may dial.

    Attributes:
        place: Place of its host among those of the data group, from 0: the same for every rank.
    """

    host: Identifier
    place: Count = 0
    group: Identifier
    address: Identifier
    port: Count
    batch_port: Count
    workers: Count
    incarnation: Identifier
    silent_seconds: float = 0.0


class Roster(Message, frozen=True, kw_only=True):
    """Holds the agents that are there; `expected` hosts make up the data group.

    Attributes:
        lost: Silent for longer than their lease.
        awaited: Hosts that have never come.
    """

    agents: tuple[Member, ...]
    expected: Count
    lost: tuple[Member, ...] = ()
    awaited: tuple[Identifier, ...] = ()


class WorkerWork(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Counts the work of one data worker for a rank so far: batches, and seconds spent on them."""

    worker: Count
    batches: Count
    busy_seconds: float


class HostWork(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Counts the work of one host's data workers for a rank so far.

    Attributes:
        is_local: They are children of the rank.
        batches: Batches that the rank used.
        frame_bytes: Bytes of all that came, duplicates among them.
        duplicates: Batches that came after another host's.
        moved: Batches that were taken away from the host: it was lost, dropped them, or is late.
        in_flight: Batches it is asked for, now.
        credits: How many it may be asked for, now; 0: it is gone.
        busy_seconds: Busy seconds of its workers together, wall clock.
        cpu_seconds: CPU time of its workers together.
        num_workers: Number of workers that have made a batch.
        workers: The first ones, where there are a great many.
    """

    host: Identifier
    is_local: bool = False
    batches: Count = 0
    frame_bytes: Count = 0
    duplicates: Count = 0
    moved: Count = 0
    in_flight: Count = 0
    credits: Count = 0
    busy_seconds: float = 0.0
    cpu_seconds: float = 0.0
    num_workers: Count = 0
    workers: tuple[WorkerWork, ...] = ()


class FeedWork(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Counts the feed's work as a rank sees it.

    Attributes:
        seconds: Seconds of the rank's clock since its feed began; rates are taken over them.
        taken: Batches that the trainer took so far.
        ready_at_takes: Batches that were ready after the one taken, summed over `taken`.
        ready: Batches that are ready now.
        window: How far ahead of the trainer batches are made, now.
        shards: Shards of the iterable datasets that are read; 0: none is.
        shard_workers: Workers that could make a shard each, of all hosts.
    """

    seconds: float
    taken: Count = 0
    ready_at_takes: Count = 0
    ready: Count = 0
    window: Count = 0
    shards: Count = 0
    shard_workers: Count = 0
    hosts: tuple[HostWork, ...] = ()


class Progress(Message, frozen=True, kw_only=True):
    """A rank reports what it did so far with its main loader, about once a second.

    Attributes:
        steady_steps: Steps but the first ones of each epoch, as in a run's record; likewise the
            seconds of these.
    """

    rank: Count
    steps: Count
    samples: Count
    wait_seconds: float
    compute_seconds: float
    steady_steps: Count = 0
    steady_wait_seconds: float = 0.0
    steady_compute_seconds: float = 0.0
    feed: FeedWork | None = None


class Attach(Message, frozen=True, kw_only=True):
    """A trainer asks for a ticket for its connection for batches; an earlier one is void.

    Attributes:
        host: Whom it is for.
    """

    host: Identifier


class Ticket(Message, frozen=True, kw_only=True):
    """Opens one connection for batches, once; never shown.

    Attributes:
        ticket: First bytes of the connection.
        key: The first one that its records are sealed with, see sealing.
    """

    ticket: Annotated[bytes, msgspec.Meta(min_length=TICKET_BYTES, max_length=TICKET_BYTES)]
    key: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]

    def __repr__(self) -> str:
        """Hides the ticket and its key: no log and no error shows them."""
        return "Ticket()"


class Piece(Message, frozen=True, kw_only=True):
    """A packed message that is too long for one frame comes in pieces, in order, one per frame."""

    is_last: bool


class Open(Message, frozen=True, kw_only=True):
    """A trainer opens a session, or changes its spec at the next iter().

    Attributes:
        spec: Digest of the pickled spec.
        spec_bytes: Its size.
        seeding: How a worker seeds each batch.
        base_seed: Seed of the epoch that begins: workers start with it while the spec is on its
            way; None: they start with the first batch that is asked for.
        first_worker: Id of the host's first data worker, for worker_init_fn.
        worker_step: Distance from one id to the next: the ids of other hosts are in between.
        host: The data host that it is for; empty: any.
    """

    protocol: int
    session: Identifier
    rank: Count
    spec: Identifier
    spec_bytes: Count
    seeding: Literal["batch", "sample", "torch"] = "batch"
    base_seed: Word | None = None
    first_worker: Count = 0
    worker_step: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 1
    versions: dict[str, str] = {}
    host: Annotated[str, msgspec.Meta(max_length=200)] = ""


class Need(Message, frozen=True, kw_only=True):
    """The agent does not have that spec."""

    spec: Identifier


class Ship(Message, frozen=True, kw_only=True):
    """Carries a piece of the pickled spec in the frame, from `offset` on; pieces come in order."""

    spec: Identifier
    offset: Count = 0


class Ready(Message, frozen=True, kw_only=True):
    """The session may ask for batches: at most `credits` at a time."""

    session: Identifier
    spec: Identifier
    credits: Count
    workers: Count
    versions: dict[str, str] = {}


class Failed(Message, frozen=True, kw_only=True):
    """The spec cannot be used on this host; the frame is the pickled error.

    Attributes:
        is_of_host: Its processes died, or it has no memory: other hosts may well use it.
    """

    session: Identifier
    spec: Identifier
    reason: str
    is_of_host: bool = False


class Credits(Message, frozen=True, kw_only=True):
    """The session's credits changed."""

    session: Identifier
    credits: Count


class Stream(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Names a stream of an iterable dataset; the position of a batch in it is number // num_shards.

    Attributes:
        shard: Worker id of torch's loader.
        num_shards: Fixed by the script.
        generation: Counts the starts of the shard; a higher one ends what ran before.
        made: Batches of this epoch that have arrived: a process that is new makes them again and
            throws them away.
        digest: Checksum of these.
        shared_seed: Torch's, for data pipes.
        persists: The process goes on with the next epoch.
        state: Random states, as a process of the shard has sent them, for one that is new.
        earlier: Batches of each epoch since `state` that a new process makes again first.
    """

    shard: Count
    num_shards: Annotated[int, msgspec.Meta(ge=1, le=MAX_SHARDS)]
    generation: Count
    made: Count = 0
    digest: Count = 0
    shared_seed: Word | None = None
    persists: bool = False
    state: States = b""
    earlier: Annotated[tuple[Count, ...], msgspec.Meta(max_length=1 << 16)] = ()


class Make(Message, frozen=True, kw_only=True):
    """Asks for batch `number`; every one is answered, unless Cancel or Close takes it back.

    Attributes:
        index: Encoded (see codec.pack_value).
        epoch_id: Only grows within the session: an epoch that is iterated over once more, as after
            load_state_dict, has another one.
        seed: Seed words (base seed, replica, epoch, number); for `sample` seeding, after them how
            often the epoch had each index of the batch before, if it had any. Of a stream: the
            base seed.
        stream: The shard that the batch is of, for an iterable dataset.
    """

    session: Identifier
    epoch_id: Count
    number: Count
    index: bytes
    seed: Words
    stream: Stream | None = None


class Made(Message, frozen=True, kw_only=True):
    """Carries a batch, on a connection for batches only; `tree` describes its payload (see codec).

    Attributes:
        generation: The generation of its stream, see Stream.
        digest: Checksum of all that its stream gave in this epoch.
        state: Random states with which its stream began the epoch.
    """

    session: Identifier
    epoch_id: Count
    number: Count
    tree: bytes
    cpu_seconds: float
    wall_seconds: float
    worker: Count
    generation: Count = 0
    digest: Count = 0
    state: States = b""


class Ended(Message, frozen=True, kw_only=True):
    """The stream has no batch of that number, and none after it.

    Attributes:
        state: Random states with which the next epoch begins.
    """

    session: Identifier
    epoch_id: Count
    number: Count
    generation: Count
    state: States = b""


class Raised(Message, frozen=True, kw_only=True):
    """The dataset or collate function raised; the frame is the pickled error.

    Attributes:
        generation: The generation of its stream, see Stream.
        digest: Checksum of all that its stream gave in this epoch.
        is_final: The stream cannot go on: it is not what it was before it was lost.
        state: State as for a batch.
    """

    session: Identifier
    epoch_id: Count
    number: Count
    summary: str
    generation: Count = 0
    digest: Count = 0
    is_final: bool = False
    state: States = b""


class Declined(Message, frozen=True, kw_only=True):
    """The agent cannot make that batch now (its worker died twice, or it drains): ask elsewhere.

    Attributes:
        is_lost: The workers died that tried it; else the session has to be opened again.
        generation: The generation of its stream, see Stream.
    """

    session: Identifier
    epoch_id: Count
    number: Count
    reason: str
    is_lost: bool = False
    generation: Count = 0


class Cancel(Message, frozen=True, kw_only=True):
    """The trainer no longer wants batches of epochs below `before_epoch_id`."""

    session: Identifier
    before_epoch_id: Count


class Close(Message, frozen=True, kw_only=True):
    """The session ends."""

    session: Identifier


class Leaving(Message, frozen=True, kw_only=True):
    """The agent drains: what it has not begun goes elsewhere."""


class WrongHost(Message, frozen=True, kw_only=True):
    """The session is for another host, which had this address before: look its name up again.

    Attributes:
        host: The one that answers.
    """

    host: str


ToCoordinator = Join | Heartbeat | Leave | Attend | Progress
FromCoordinator = Welcome | Refused | State | Roster | Start
ToAgent = Attach | Open | Ship | Make | Cancel | Close | Piece
FromAgent = (
    Ticket | Need | Ready | Failed | Credits | Ended | Raised | Declined | Leaving | WrongHost
)

_AnyT = TypeVar("_AnyT")
_encoder = msgspec.msgpack.Encoder()


def pack(message: Message) -> bytes:
    """Returns the message as bytes."""
    return _encoder.encode(message)


class Unpacker:
    """Decodes the messages of one direction.

    Args:
        kinds: One of the unions above.
    """

    def __init__(self, kinds: object) -> None:
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(kinds)

    def __call__(self, data: bytes | bytearray | memoryview) -> Message:
        """Decodes a message.

        Raises:
            ProtocolError: If the bytes are no such message.
        """
        try:
            return self._decoder.decode(data)
        # RecursionError: nested lists of a peer, a byte each, go deeper than the stack.
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
            raise ProtocolError(f"not a message of the feed: {err}") from None


def own_versions() -> dict[str, str]:
    """Returns the versions of what the bytes of a batch or of a spec depend on."""
    versions = {"python": platform.python_version(), "processor": platform.machine()}
    for name in ("torch", "numpy", "cloudpickle"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def compare_versions(message: Open, own: Mapping[str, str]) -> tuple[str, str]:
    """Says why a trainer cannot be served, and what it should know; both may be empty."""
    if message.protocol != PROTOCOL_VERSION:
        return (
            f"the trainer speaks protocol {message.protocol}, this host {PROTOCOL_VERSION}: "
            "install the same stoker everywhere"
        ), ""
    theirs = message.versions
    # cloudpickle carries functions as bytecode, which differs between minor versions of Python.
    # Other libraries mostly open each other's pickles, so for them there is a warning.
    if "python" in theirs and _minor(theirs["python"]) != _minor(own["python"]):
        return (
            f"the trainer runs Python {theirs['python']}, this host {own['python']}: functions "
            "cannot travel; use one image"
        ), ""
    differing = [
        f"{name} {theirs[name]} in the trainer, {version} here"
        for name, version in own.items()
        # Without the build (+cpu, +cu124): a data host has no accelerator, and often another build
        # of the same torch.
        if name in theirs and theirs[name].partition("+")[0] != version.partition("+")[0]
    ]
    return "", "; ".join(differing)


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


class Assembly:
    """Collects the pieces of long messages, of several peers at a time.

    Args:
        max_bytes: Limit of one message.
    """

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._parts: dict[bytes, bytearray] = {}

    def take(self, peer: bytes, piece: bytes | memoryview, *, is_last: bool) -> bytearray | None:
        """Adds a piece; returns the message, if it was the last one.

        Raises:
            ProtocolError: If the message is too long; it is forgotten.
        """
        # Taken out and put in again with each piece: the first of the dict is always the peer that
        # has been silent for longest.
        whole = self._parts.pop(peer, None) or bytearray()
        whole += piece
        if len(whole) > self._max_bytes:
            raise ProtocolError(f"a message of more than {self._max_bytes} bytes")
        if is_last:
            return whole
        self._parts[peer] = whole
        while len(self._parts) > _MAX_UNFINISHED:
            # Its peer is gone, most likely: the others send their pieces without a pause.
            del self._parts[next(iter(self._parts))]
        return None
