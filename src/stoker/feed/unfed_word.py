"""A rank that takes no batches from its data hosts leaves this word for its launcher."""

import msgspec


class Unfed(msgspec.Struct, frozen=True):
    """The word of a rank that takes none.

    Attributes:
        world_size: Of the training: data hosts are given back when all ranks say the same.
        text: Why, and what helps.
    """

    rank: int
    world_size: int
    text: str
