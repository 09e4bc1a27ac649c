"""What a dataset raised on a data host, as the trainer raises it: like torch's ExceptionWrapper.

The error keeps its class, by name, with the worker's traceback as its text. Where its constructor
takes something else it is a RuntimeError with that text. Classes and functions of the script go by
their names: a data host never runs the script, and the trainer looks them up in its `__main__`.
"""

import contextlib
import io
import pickle
import sys
import traceback
from types import FunctionType

import msgspec

from stoker.errors import StokerError

# The second one in processes that multiprocessing spawned, also ranks.
SCRIPT_NAMES = ("__main__", "__mp_main__")

# Of an error's text, whose end is kept: it fits a packet of a loader process.
_MAX_TEXT = 32 << 10
_HINTS = {
    "ModuleNotFoundError": "install it in the image of the data hosts",
    "FileNotFoundError": "give the data hosts the same files under the same paths",
    "No space left on device": "give the data hosts a larger disk, or have the dataset write less",
    "MemoryError": "use fewer workers per host, or hosts with more memory",
}


class PackedError(msgspec.Struct, frozen=True, array_like=True):
    """An error on its way to the trainer.

    Attributes:
        summary: Class and text in one line.
        text: With the traceback.
        kind: Its class, pickled; empty: it cannot be.
    """

    summary: str
    text: str
    kind: bytes = b""


_unpack = msgspec.msgpack.Decoder(PackedError).decode


def pack_error(err: BaseException, *, where: str) -> bytes:
    """Returns an error for the trainer.

    Args:
        where: Who raised it: `index 41 of data worker 1 on host algo-2`.
    """
    name = type(err).__name__
    try:
        text = "".join(traceback.format_exception(err))
        said = " ".join(str(err).split())[:400]
    except Exception:
        # Its own code raises.
        text = said = "an error that cannot be shown\n"
    hint = next((fix for mark, fix in _HINTS.items() if mark in text), "")
    if hint:
        text += f"try:   {hint}\n"
    packed = PackedError(
        summary=err.what if isinstance(err, StokerError) else f"{name}: {said}",
        text=f"Caught {name} in {where}.\nOriginal {text[-_MAX_TEXT:]}",
        kind=_pickled(type(err)),
    )
    return msgspec.msgpack.encode(packed)


def unpack_error(data: bytes | memoryview, *, accept_pickles: bool = True) -> Exception:
    """Returns the error to be raised in the script.

    Args:
        accept_pickles: False: its class is not looked for, and only its text arrives.
    """
    packed = _unpack(data)
    if not accept_pickles:
        return RuntimeError(f"{packed.text}(text only, because feed.accept_pickles is false)")
    from torch._utils import KeyErrorMessage

    with contextlib.suppress(Exception):
        # As torch's ExceptionWrapper does: some classes take their message by name.
        kind = pickle.loads(packed.kind)
        text = KeyErrorMessage(packed.text) if kind is KeyError else packed.text
        error = kind(message=text) if getattr(kind, "message", None) else kind(text)
        # Its own __str__ may leave the message out.
        if isinstance(error, Exception) and str(error):
            return error
    return RuntimeError(packed.text)


def summary_of(data: bytes | memoryview) -> str:
    return _unpack(data).summary


def _pickled(kind: type) -> bytes:
    file = io.BytesIO()
    with contextlib.suppress(Exception):
        NamingPickler(file, protocol=5).dump(kind)
        return file.getvalue()
    return b""


class NamingPickler(pickle.Pickler):
    """Pickler for which what the script defines goes by name."""

    # typeshed's type of it has Any.
    def reducer_override(self, value: object) -> object:  # type: ignore[override]
        if isinstance(value, type | FunctionType) and value.__module__ in SCRIPT_NAMES:
            return (of_script, (value.__qualname__,))
        return NotImplemented


def of_script(name: str) -> object:
    """Returns a class or function of the script; pickles name this function."""
    found: object = sys.modules["__main__"]
    for part in name.split("."):
        found = getattr(found, part)
    return found
