"""The random states of a stream, handed from one process to another.

Of the three global generators, and of those that the dataset and its collate function hold.
"""

from collections.abc import Iterator, Mapping

from stoker.errors import ShippingError
from stoker.feed.generators import Kind, global_generators, kind_of
from stoker.feed.held_generators import HeldGenerators
from stoker.feed.wire import pack_value, unpack_value


def states_here(roots: Mapping[str, object]) -> bytes:
    """Returns the random states of this process, for `set_states`; empty: they cannot travel.

    Args:
        roots: What makes batches, by the names that paths of generators begin with.
    """
    states = {path: kind.read(value) for path, value, kind in _all(roots)}
    try:
        return pack_value(states, allow_pickle=False)
    except ShippingError:
        # Of a subclass with a state of its own kind.
        return b""


def set_states(states: bytes, roots: Mapping[str, object]) -> set[str]:
    """Sets the random states; returns the paths of generators that are not there.

    Raises:
        ProtocolError: If they are none.
    """
    given = unpack_value(states, allow_pickle=False)
    assert isinstance(given, dict)
    here = {path: (value, kind) for path, value, kind in _all(roots)}
    for path in given.keys() & here.keys():
        value, kind = here[path]
        kind.write(value, given[path])
    return given.keys() - here.keys()


def _all(roots: Mapping[str, object]) -> Iterator[tuple[str, object, Kind]]:
    for name, value in zip(("torch", "python", "numpy"), global_generators(), strict=False):
        kind = kind_of(value)
        if kind is not None:
            yield name, value, kind
    for path, value, kind, _ in HeldGenerators(roots).found:
        yield path, value, kind
