"""What a data worker is given to do, and what became of it."""

from collections.abc import Callable
from dataclasses import dataclass

from stoker.feed import channel as messages
from stoker.feed.layout import Bytes1D


@dataclass(frozen=True, slots=True)
class Job:
    """A batch to make.

    Attributes:
        key: The caller's name for it.
        index: `wire.pack_value` of the sampler's index.
        seed: Seed words.
        next: Of a stream, in place of index and seed.
    """

    key: tuple[object, ...]
    index: bytes = b""
    seed: tuple[int, ...] = ()
    next: messages.Next | None = None


@dataclass(eq=False)
class Result:
    """What became of a job: a batch, an error, or nothing.

    Attributes:
        tree: Of the batch (see wire); None for an error.
        payload: uint8 view of the worker's shared memory, to be given back by `release`; its base
            is no array. None for an error, and for a batch without payload.
        error: For shipping.unpack_error; also set where the job is lost.
        summary: One line of it.
        is_lost: The workers died that tried it.
        digest: Of a stream: checksum of all it made so far.
        state: Of a stream that persists: random states, see channel.
        is_end: Of a stream: it has no batch there.
        is_final: Of a stream that raised: it cannot go on.
    """

    job: Job
    worker: int
    tree: bytes | None = None
    payload: Bytes1D | None = None
    has_pickle: bool = False
    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0
    error: bytes | None = None
    summary: str = ""
    is_lost: bool = False
    digest: int = 0
    state: bytes = b""
    is_end: bool = False
    is_final: bool = False
    _release: Callable[[], None] | None = None

    def release(self) -> None:
        """Gives the memory back; any thread may call it, twice too. No view may be used after."""
        release, self._release = self._release, None
        if release is not None:
            release()
