"""Messages between the hosts of a run.

Each message is one zmq multipart: the packed message and at most one frame. Long messages to an
agent are sent in pieces, so that encryption, transfer and decryption overlap. There are two
services, both ROUTER sockets with CURVE, on one fixed port a host. Batches are sealed (see sealing)
and come from an agent's next port, which is a plain TCP socket:

coordinator (in the dnn leader's launcher)
    launchers  Join → Welcome | Refused;  Heartbeat → State;  Leave;  unasked, to followers: Start
    followers  GpuReport
    ranks      Attend → Roster, and again whenever it changes;  Progress

agent (on a data host)
    trainers   Attach → Ticket | WrongHost
               Open → Need | Ready | Failed | Leaving | WrongHost;  Ship + frame → Ready | Failed
               Make → Made + payload, sealed | Raised + frame | Ended | Declined
               Make (only) → any number of BatchPart + payload, sealed;  Share;  BatchPart
               Inquire → Makers;  Cancel;  Close;  Piece;  unasked, to trainers: Credits, Leaving

A *session* is one loader of one trainer process. A *spec* is what makes batches: dataset, collate
function and worker_init_fn, pickled together and named by the digest of the bytes; each host gets
it once. `Make` has the batch's seed words, so a worker knows neither epochs nor ranks.
"""

import contextlib
import platform
from collections.abc import Mapping
from importlib import metadata
from typing import Annotated, Literal, NamedTuple

import msgspec

from stoker.errors import ProtocolError
from stoker.feed import why_unfed
from stoker.feed.lost_samples import SampleInWork
from stoker.feed.why_unfed import WhyUnfed
from stoker.host.gpus import GpuState

# To be raised with every change that an older peer would misread: of these messages, of a batch's
# tree (codec), of what is pickled (dataset). tests/contract/test_wire_version.py pins them.
PROTOCOL_VERSION = 13

# Shards of an iterable dataset: workers of one loader of one rank.
MAX_SHARDS = 4096

# Of the threads of one worker; the rest is cut.
MAX_STACK_CHARACTERS = 32 << 10

# Random first bytes of a connection for batches.
TICKET_BYTES = 32

# Fits a frame (crypto.MAX_CONTROL_BYTES) with its message. 6 MB took 29 ms in one piece, digest
# included; 12 ms in pieces of 512 KiB, digest taken while the spec is unpickled; 14 ms in these.
PIECE_BYTES = 240 << 10
# Incomplete messages, one a peer: a trainer that is lost in the middle of one leaves its pieces.
_MAX_UNFINISHED = 64

# GPUs of one host, or their slices: eight of seven slices are 56.
MAX_GPUS = 64
# A GPU's load is 900 bytes.
MAX_GPU_LOADS_BYTES = 60 << 10

# Arguments of a daemon that a follower starts.
MAX_START_ARGUMENTS = 500
Argument = Annotated[str, msgspec.Meta(max_length=8000)]
Identifier = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
# A base seed of torch has 63 bits.
Word = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
# Random states of a stream: 5 kB, and 16 to 3,000 bytes for each further generator.
MAX_STATES_BYTES = 1 << 20
States = Annotated[bytes, msgspec.Meta(max_length=MAX_STATES_BYTES)]
# What a stream without workers has changed in an epoch. One message: on a line of 75 Mb/s it takes
# as long as a heartbeat may.
MAX_CHANGES_BYTES = 132 << 20
# The state of an iterable dataset that has one itself; a longer one is not sent.
MAX_OWN_BYTES = 4 << 20
# 8 bytes for each sample of a batch.
Sizes = Annotated[bytes, msgspec.Meta(max_length=8 << 20)]
ShortText = Annotated[str, msgspec.Meta(max_length=200)]
Words = Annotated[tuple[Word, ...], msgspec.Meta(max_length=1 << 20)]
# Of streams within one dataset.
StreamEpochNumbers = Annotated[tuple[int, ...], msgspec.Meta(max_length=1 << 10)]
# Of samples in their batch: the first one, and the one behind the last.
Places = tuple[Count, Count]


# An engine's commands on one host: `ready`: they accept work; `done`: the training there has ended,
# and they run until the run ends.
HostStage = Literal["begun", "ready", "done"]
# On all hosts: `led`: the leader's accept work, so the others may start theirs; `ready`: all accept
# work, so the training may start; `ending`: a rule ends the run, so ranks get SIGTERM and may save.
RunStage = Literal["begun", "led", "ready", "ending"]


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages: a tag names the type, and unknown fields are refused."""


class Join(Message, frozen=True, kw_only=True):
    """Registers a launcher: `agent` on a data host, `follower` on another dnn host.

    `port` is 0 for a follower; `incarnation` is random: a host that comes back has another one.
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
    """Accepts a launcher, which must send heartbeats."""

    beat_seconds: float
    lease_seconds: float


class Refused(Message, frozen=True, kw_only=True):
    """Refuses a launcher, which must exit."""

    reason: str


class OthersCpu(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """CPU-seconds of other programs on a launcher's vCPUs since its first look, `seconds` ago."""

    seconds: Annotated[float, msgspec.Meta(ge=0)]
    cpu_seconds: Annotated[float, msgspec.Meta(ge=0)]
    vcpus: Annotated[float, msgspec.Meta(gt=0)]


class MemoryNow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a host's memory has in use now, of the limit that is nearest.

    Attributes:
        waiting_share: The share of `feed.max_bytes` that may wait on a data host.
    """

    limit_bytes: Annotated[int, msgspec.Meta(gt=0)]
    used_bytes: Count
    waiting_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0


class MemoryPeak(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The highest use of a launcher's memory so far; see `HostMemory` in the records."""

    limit_bytes: Annotated[int, msgspec.Meta(gt=0)]
    peak_bytes: Count
    is_cgroups: bool
    ours_bytes: Count | None = None
    swapped_bytes: Count = 0
    least_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    kills: Count = 0
    now: MemoryNow | None = None


class Heartbeat(Message, frozen=True, kw_only=True):
    """Renews a launcher's lease; `unfed_ranks` of its host do not use the feed, and will not."""

    host: Identifier
    incarnation: Identifier
    stage: HostStage = "begun"
    has_start: bool = False
    unfed_ranks: Annotated[int, msgspec.Meta(ge=0)] = 0
    others: OthersCpu | None = None
    memory: MemoryPeak | None = None


class Start(Message, frozen=True, kw_only=True):
    """Tells a follower to start the daemon of mpirun; repeated until acknowledged."""

    arguments: Annotated[tuple[Argument, ...], msgspec.Meta(max_length=MAX_START_ARGUMENTS)]


class State(Message, frozen=True, kw_only=True):
    """State of the run, in answer to Heartbeat, and unasked when it changes.

    Attributes:
        outcome: None while the run lasts. To data hosts only, released: the training continues
            without their batches.
        unknown: The sender is not a member, or no longer: join again.
        stacks: How often the leader has asked for the stacks of ranks.
    """

    outcome: Literal["succeeded", "failed", "stopped", "released"] | None = None
    exit_code: int | None = None
    reason: str = ""
    unknown: bool = False
    stage: RunStage = "begun"
    stacks: Count = 0


class Leave(Message, frozen=True, kw_only=True):
    """Deregisters a launcher; it was asked to end, as by a drain, if `is_signalled`."""

    host: Identifier
    incarnation: Identifier
    exit_code: int | None = None
    reason: str = ""
    is_signalled: bool = False


class GpuReport(Message, frozen=True, kw_only=True):
    """GPUs of a dnn host: their latest samples, and once the command has ended their loads.

    `loads` is JSON of records (GpuLoad), which data workers, who read this module, need not import.
    """

    host: Identifier
    states: Annotated[tuple[GpuState, ...], msgspec.Meta(max_length=MAX_GPUS)] = ()
    loads: Annotated[bytes, msgspec.Meta(max_length=MAX_GPU_LOADS_BYTES)] = b""


class Attend(Message, frozen=True, kw_only=True):
    """Subscribes a rank to the roster."""

    protocol: int
    run_id: Identifier
    rank: Count
    host: Identifier


class Member(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An agent that trainers may connect to; `place` is its index, the same for every rank."""

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
    """The agents, those `lost` (silent beyond their lease), and hosts that have never joined.

    Attributes:
        refused: Why hosts that are awaited may not join, by host; by address where it is not known
            which one it is.
        left: Why hosts have said goodbye, by host: their agent could not start, for example.
    """

    agents: tuple[Member, ...]
    expected: Count
    lost: tuple[Member, ...] = ()
    awaited: tuple[Identifier, ...] = ()
    refused: dict[Identifier, str] = {}
    left: dict[Identifier, str] = {}


class WorkerWork(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Work of one data worker for a rank so far."""

    worker: Count
    batches: Count
    busy_seconds: float


class HostWork(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Work of one host's data workers for a rank so far.

    Attributes:
        batches: Those that the rank used, without `duplicates`, which came after another host's.
        moved: Batches reassigned because the host was lost, declined them, or was late.
        shared_samples: Samples that it made for batches which another host put together.
        credits: Limit of `in_flight`; 0: the host is gone.
        num_workers: Workers that have made a batch; `workers` are the first ones.
    """

    host: Identifier
    is_local: bool = False
    batches: Count = 0
    frame_bytes: Count = 0
    duplicates: Count = 0
    moved: Count = 0
    shared_samples: Count = 0
    in_flight: Count = 0
    credits: Count = 0
    busy_seconds: float = 0.0
    cpu_seconds: float = 0.0
    num_workers: Count = 0
    workers: tuple[WorkerWork, ...] = ()


class FeedWork(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Work of the feed as a rank sees it; rates are taken over `seconds`, since the feed began.

    Attributes:
        ready_at_takes: Batches that were ready after the one taken, summed over `taken`.
        window: How far ahead of the trainer batches are made, now.
        shard_workers: Workers of all hosts that could make a shard each.
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
    """Progress of a rank with its main loader; `steady_`: without the first steps of epochs.

    Attributes:
        begins: Epochs that began after another one.
        first_wait_seconds: Waits for their first batches.
        between_seconds: From the last steps of epochs to the requests for these batches.
        bad_samples: Samples that were skipped or replaced.
        memory_share: The share of `feed.max_bytes` that may wait here, now.
        least_memory_share: The least of it so far.
    """

    rank: Count
    steps: Count
    samples: Count
    wait_seconds: float
    compute_seconds: float
    steady_steps: Count = 0
    steady_wait_seconds: float = 0.0
    steady_compute_seconds: float = 0.0
    begins: Count = 0
    first_wait_seconds: float = 0.0
    between_seconds: float = 0.0
    bad_samples: Count = 0
    memory_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    least_memory_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    feed: FeedWork | None = None


class Attach(Message, frozen=True, kw_only=True):
    """Requests a ticket for a connection for batches; voids an earlier one."""

    host: Identifier


class Ticket(Message, frozen=True, kw_only=True):
    """Opens one connection for batches, once: its first bytes, and the first key; never shown."""

    ticket: Annotated[bytes, msgspec.Meta(min_length=TICKET_BYTES, max_length=TICKET_BYTES)]
    key: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]

    def __repr__(self) -> str:
        return "Ticket()"


class Piece(Message, frozen=True, kw_only=True):
    """A piece, in the frame, of a message that is too long for one frame; pieces come in order."""

    is_last: bool


class Open(Message, frozen=True, kw_only=True):
    """Opens a session, or changes its spec (a digest) at the next iter().

    Attributes:
        base_seed: Seed of the epoch that begins: workers start while the spec is being sent. None:
            they start with the first request.
        first_worker: Id of the host's first data worker, for worker_init_fn; the next ones are
            `worker_step` apart.
        host: The data host that it is for; empty: any.
    """

    protocol: int
    session: Identifier
    rank: Count
    spec: Identifier
    spec_bytes: Count
    seeding: Literal["batch", "stretch", "place", "sample", "torch"] = "batch"
    base_seed: Word | None = None
    first_worker: Count = 0
    worker_step: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 1
    versions: dict[str, str] = {}
    host: Annotated[str, msgspec.Meta(max_length=200)] = ""


class Need(Message, frozen=True, kw_only=True):
    """Requests a spec that the agent does not have."""

    spec: Identifier


class Ship(Message, frozen=True, kw_only=True):
    """A piece of the pickled spec, in the frame, from `offset`; pieces come in order.

    Attributes:
        spec_bytes: Length of this rank's pickle; 0: that of `Open`. Ranks' pickles of one spec may
            differ in what their script defines.
    """

    spec: Identifier
    offset: Count = 0
    spec_bytes: Count = 0


class Ready(Message, frozen=True, kw_only=True):
    """The session may have up to `credits` open requests.

    Attributes:
        warning: This host's code differs.
        copied: Each worker has its own copy of the dataset; the words say why.
    """

    session: Identifier
    spec: Identifier
    credits: Count
    workers: Count
    versions: dict[str, str] = {}
    warning: str = ""
    copied: str = ""


class Failed(Message, frozen=True, kw_only=True):
    """The spec cannot be used; the frame is the error. Others may be able to if `is_of_host`."""

    session: Identifier
    spec: Identifier
    reason: str
    is_of_host: bool = False


class Credits(Message, frozen=True, kw_only=True):
    """The session's credits changed."""

    session: Identifier
    credits: Count


class OwnState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A state that an iterable dataset, or its iterator, gave of itself; see workers.own_states.

    Attributes:
        num_made: Batches of this epoch that the dataset had made then; 0: the state that a process
            was given did not lead to the same batches, and it began with the first batch.
        digest: Checksum of these.
        state: Packed, without pickles.
        why_unused: Why there is no state, and what to do; empty: there is one, or it was wrong.
        seconds: What it took; infinite: the dataset is not to be asked again.
    """

    num_made: Count = 0
    digest: Count = 0
    state: Annotated[bytes, msgspec.Meta(max_length=MAX_OWN_BYTES)] = b""
    why_unused: Annotated[str, msgspec.Meta(max_length=1000)] = ""
    seconds: float = 0.0


class ShardOrigin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whose shard it was, in a run with another number of ranks; see rank_streams.

    Attributes:
        shard: Worker id in that rank.
        num_workers: What `get_worker_info()` says in the dataset; 0: it is None.
        base_seed: Of that rank's epoch.
    """

    rank: Count
    world_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    shard: Count
    num_workers: Annotated[int, msgspec.Meta(ge=0, le=MAX_SHARDS)]
    base_seed: Word


class EarlierEpoch(NamedTuple):
    """An epoch of a stream that is over.

    Attributes:
        num_made: Batches of a shard that torch's worker would have made of it.
        epochs: Those of Hugging Face's streams in the dataset; see stream_epochs.
    """

    num_made: Count
    epochs: StreamEpochNumbers = ()


class Stream(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A stream of an iterable dataset; a batch's position in it is batch_number // num_shards.

    Attributes:
        shard: Worker id of torch's loader.
        generation: Number of starts of the shard; a higher one ends the process before.
        made: Batches of this epoch that have arrived, and `digest` their checksum: a new process
            makes them again and discards them.
        persists: The process continues with the next epoch.
        state: Random states that a process of the shard has sent, for a new one.
        earlier: The epochs since `state`: before the process begins another epoch, it makes their
            batches, but for those that it has made.
        epochs: Those of Hugging Face's streams in the dataset, of processes that persist.
        epochs_before: Epochs of the same iterator before this one.
        own_state: That of the dataset from before `made`, with which a new process begins: what
            followed it is made again, and all only if that differs.
        own_seconds: What the dataset's last state took, in any process; infinite: it is not asked.
        origin: Of a shard of a rank of an earlier run: its dataset, seeds and worker id.
        is_saved: The script asks for states, so what these do not have is looked for.
    """

    shard: Count
    num_shards: Annotated[int, msgspec.Meta(ge=1, le=MAX_SHARDS)]
    generation: Count
    made: Count = 0
    digest: Count = 0
    shared_seed: Word | None = None
    persists: bool = False
    state: States = b""
    earlier: Annotated[tuple[EarlierEpoch, ...], msgspec.Meta(max_length=1 << 16)] = ()
    epochs: StreamEpochNumbers = ()
    epochs_before: Count = 0
    own_state: OwnState | None = None
    own_seconds: float = 0.0
    origin: ShardOrigin | None = None
    is_saved: bool = False


class OfBatch(Message, frozen=True, kw_only=True):
    """Base of messages about a batch; within a session `epoch_id` only grows."""

    session: Identifier
    epoch_id: Count
    batch_number: Count = msgspec.field(name="number")


class Make(OfBatch, frozen=True, kw_only=True):
    """Requests a batch; always answered, unless Cancel or Close revokes it.

    Places in it are those where a stretch of samples begins (see stretches), or the batch ends.

    Attributes:
        seed_words: Base seed, replica, epoch, batch number; for `sample` seeding, after them how
            often each index of the batch has occurred in the epoch before, if any has. Of a stream:
            the base seed.
        is_among_last: The epoch has no more batches than workers, and the trainer waits.
        part_samples: Samples of a part, where several hosts make the batch; 0: one host does.
        elsewhere: Places of samples that other hosts make as well; they come as `BatchPart`, or
            never: this host makes them where they are late.
        only: Nothing but the samples of these places is wanted; another host collates them. Not
            answered where they cannot be made.
    """

    index: bytes
    seed_words: Words = msgspec.field(name="seed")
    stream: Stream | None = None
    is_among_last: bool = False
    part_samples: Count = 0
    elsewhere: Annotated[tuple[Places, ...], msgspec.Meta(max_length=1 << 10)] = ()
    only: Places | None = None


class Share(OfBatch, frozen=True, kw_only=True):
    """Other hosts make samples as well of a batch that this host was asked for; not answered.

    Attributes:
        part_samples, elsewhere: As in `Make`.
    """

    part_samples: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    elsewhere: Annotated[tuple[Places, ...], msgspec.Meta(max_length=1 << 10)]


class BadSample(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A sample that its dataset could not make.

    Attributes:
        place: Of the sample in its batch.
        index: What the sampler gave, as text; cut, like the others.
        error: Class of the exception.
        text: Of the exception.
        replaced_by: Index of the sample in its place; empty: the batch is one shorter.
    """

    place: Count = 0
    index: ShortText
    error: ShortText
    text: ShortText
    replaced_by: ShortText = ""

    def at(self, place: int) -> "BadSample":
        return msgspec.structs.replace(self, place=place)


class SampleNotes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is known of a batch's samples besides the batch.

    Attributes:
        sizes: Their bytes (balance.sizes_of), if the session balances.
        bad: Those that were skipped or replaced.
    """

    sizes: Sizes = b""
    bad: Annotated[tuple[BadSample, ...], msgspec.Meta(max_length=1 << 20)] = ()


NO_NOTES = SampleNotes()


class Made(OfBatch, frozen=True, kw_only=True):
    """A batch, on a connection for batches only; `tree` describes its payload (see codec).

    `digest` is of all batches of its stream in this epoch, `state` the random states at its
    beginning, `own_state` that of the dataset after the batch, now and then.
    """

    tree: bytes
    cpu_seconds: float
    wall_seconds: float
    worker: Count
    generation: Count = 0
    digest: Count = 0
    state: States = b""
    own_state: OwnState | None = None
    samples: SampleNotes = NO_NOTES


class BatchPart(OfBatch, frozen=True, kw_only=True):
    """Samples of a batch from place `first` on, without pickles, for the host that collates them.

    From the host that made them to the trainer on a connection for batches only, with the payload
    behind it; from there to the other host, with the payload in it. The trainer does not open it.

    Attributes:
        tree: Describes the payload, a list of samples (see codec).
        wall_seconds: It took to make them, and `send_seconds` to write them.
        bad: Those that were skipped or replaced.
    """

    first: Count
    num_samples: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    tree: bytes
    cpu_seconds: float
    wall_seconds: float
    send_seconds: float
    bad: Annotated[tuple[BadSample, ...], msgspec.Meta(max_length=1 << 20)] = ()
    payload: bytes = b""


class Ended(OfBatch, frozen=True, kw_only=True):
    """The stream ends before that number; `state` is for the next epoch."""

    generation: Count
    state: Annotated[bytes, msgspec.Meta(max_length=MAX_CHANGES_BYTES)] = b""


class Raised(OfBatch, frozen=True, kw_only=True):
    """The dataset or collate function raised; the frame is the pickled error.

    If `is_final`, the stream cannot continue: it differs from before it was lost.
    """

    summary: str
    generation: Count = 0
    digest: Count = 0
    is_final: bool = False
    state: States = b""


class Declined(OfBatch, frozen=True, kw_only=True):
    """The agent cannot make that batch: its workers died (`is_lost`), or reopen the session."""

    reason: str
    is_lost: bool = False
    generation: Count = 0


class Inquire(OfBatch, frozen=True, kw_only=True):
    """Asks who makes that batch, which is waited for."""


class Makers(OfBatch, frozen=True, kw_only=True):
    """The workers that have a batch.

    Attributes:
        seconds: For how long one that was ready has it; None: no such worker has it.
        stacks: Of the threads of the one that has it for longest.
        sample: The one that it makes.
    """

    seconds: Annotated[float, msgspec.Meta(ge=0)] | None = None
    workers: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_SHARDS)] = ()
    stacks: Annotated[str, msgspec.Meta(max_length=MAX_STACK_CHARACTERS)] = ""
    sample: SampleInWork | None = None


class Cancel(Message, frozen=True, kw_only=True):
    """Cancels requests of epochs below `before_epoch_id`."""

    session: Identifier
    before_epoch_id: Count


class Close(Message, frozen=True, kw_only=True):
    """Closes the session."""

    session: Identifier


class Leaving(Message, frozen=True, kw_only=True):
    """The agent drains: what it has not begun has to be requested elsewhere."""


class WrongHost(Message, frozen=True, kw_only=True):
    """The address now belongs to `host`, which answers; resolve the name again."""

    host: str


ToCoordinator = Join | Heartbeat | Leave | Attend | Progress | GpuReport
FromCoordinator = Welcome | Refused | State | Roster | Start
ToAgent = Attach | Open | Ship | Make | Share | BatchPart | Inquire | Cancel | Close | Piece
# Sealed, on a connection for batches.
ToTrainer = Made | BatchPart
FromAgent = (
    Ticket
    | Need
    | Ready
    | Failed
    | Credits
    | Ended
    | Raised
    | Declined
    | Makers
    | Leaving
    | WrongHost
)

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


def own_versions() -> dict[str, str]:
    # Kinds of CPUs differ in the last bits of floats.
    versions = {"python": platform.python_version(), "processor": platform.machine()}
    for name in ("torch", "numpy", "cloudpickle"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def compare_versions(
    message: Open, own: Mapping[str, str], *, host: str
) -> tuple[WhyUnfed | None, str]:
    """Returns why data host `host` cannot serve a trainer, if so, and a warning, else empty."""
    if message.protocol != PROTOCOL_VERSION:
        return why_unfed.other_protocol(message.protocol, own=PROTOCOL_VERSION, host=host), ""
    theirs = message.versions
    # cloudpickle pickles functions as bytecode; pickles of other libraries mostly work: a warning.
    if "python" in theirs and theirs["python"].split(".")[:2] != own["python"].split(".")[:2]:
        who = f"data host {host} runs"
        return why_unfed.other_python(theirs["python"], own=own["python"], who=who), ""
    differing = [
        f"{name} {theirs[name]} in the trainer, {version} here"
        for name, version in own.items()
        # Without the build (+cpu, +cu124), which often differs on data hosts.
        if name in theirs and theirs[name].partition("+")[0] != version.partition("+")[0]
    ]
    return None, "; ".join(differing)


class Assembly:
    """Pieces of long messages of several peers."""

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._parts: dict[bytes, bytearray] = {}

    def take(self, peer: bytes, piece: bytes | memoryview, *, is_last: bool) -> bytearray | None:
        """Adds a piece; returns a complete message; raises ProtocolError if it is too long."""
        # Moved to the end of the dict with each piece: the first peer is silent for longest.
        whole = self._parts.pop(peer, None) or bytearray()
        whole += piece
        if len(whole) > self._max_bytes:
            raise ProtocolError(f"message of more than {self._max_bytes} bytes")
        if is_last:
            return whole
        self._parts[peer] = whole
        while len(self._parts) > _MAX_UNFINISHED:
            # Most likely that peer is gone: others send their pieces without a pause.
            del self._parts[next(iter(self._parts))]
        return None
