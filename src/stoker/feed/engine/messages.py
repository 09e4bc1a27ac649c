"""Messages on a worker's connection: orders to it, behind its `facts`, and its answers."""

import msgspec

from stoker.errors import ProtocolError

# The state of an iterable dataset that has one itself; a longer one is not sent.
MAX_OWN_BYTES = 4 << 20
# In the place of a sample that a worker makes: all of the batch in one call, or none.
NO_SAMPLE = -1


class _OnConnection(
    msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True
):
    """Base of the messages: a tag names the type, and unknown fields are refused."""


class OwnState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A state that an iterable dataset, or its iterator, gave of itself; see streams.

    Attributes:
        num_made: Batches of this epoch that the dataset had made then.
        state: Packed, without pickles.
    """

    num_made: int = 0
    state: bytes = b""


class ShardBegin(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How a worker begins an epoch of a shard; its first order in it has one.

    Attributes:
        num_made: Batches that were made of it: the worker goes on behind them.
        own: The last state that the dataset gave of itself, if it gives any.
    """

    num_made: int = 0
    own: OwnState | None = None


class Make(_OnConnection, frozen=True):
    """Orders a batch.

    Attributes:
        number: Of the batch in its epoch.
        epoch_id: Of the session: an answer to an earlier epoch's order is dropped.
        index: What the sampler gave, pickled.
        seed_words: From which random states follow.
        begin: Of a shard, with a worker's first order in an epoch.
    """

    number: int
    epoch_id: int
    index: bytes
    seed_words: tuple[int, ...]
    begin: ShardBegin | None = None


class BadSample(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A sample that its dataset could not make.

    Attributes:
        place: Of the sample in its batch.
        index: What the sampler gave, as text; cut, like the others.
        error: Class of the exception.
        text: Of the exception.
        replaced_by: Index of the sample in its place; empty: the batch is one shorter.
    """

    place: int = 0
    index: str
    error: str
    text: str
    replaced_by: str = ""


class Ready(_OnConnection, frozen=True):
    """The worker's first message: it has the connection's key, and takes orders."""


class Made(_OnConnection, frozen=True):
    """A batch, whose leaves follow as the payload.

    Attributes:
        sizes: Bytes of each leaf.
        pickled: The batch without its leaves.
        cpu_seconds: That it took the worker's process.
        wall_seconds: From the order to the collated batch.
        bad: Samples that were skipped or replaced.
        own: The state that the iterable dataset gave of itself behind the batch, if one was due.
    """

    number: int
    epoch_id: int
    pickled: bytes
    sizes: tuple[int, ...]
    cpu_seconds: float
    wall_seconds: float
    bad: tuple[BadSample, ...] = ()
    own: OwnState | None = None


class Raised(_OnConnection, frozen=True):
    """What the dataset raised in place of a batch, packed."""

    number: int
    epoch_id: int
    error: bytes


class Exhausted(_OnConnection, frozen=True):
    """The shard has ended before that number."""

    number: int
    epoch_id: int


Answer = Ready | Made | Raised | Exhausted

_pack = msgspec.msgpack.Encoder().encode
_to_worker = msgspec.msgpack.Decoder(Make)
_to_trainer: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def pack(message: _OnConnection) -> bytes:
    return _pack(message)


def unpack_order(packed: bytes) -> Make:
    return _to_worker.decode(packed)


def unpack_answer(packed: bytes) -> Answer:
    """Returns a worker's answer; raises ProtocolError if it is none."""
    try:
        return _to_trainer.decode(packed)
    except msgspec.DecodeError as err:
        raise ProtocolError(f"malformed answer of a worker: {err}") from None
