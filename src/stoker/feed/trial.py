"""One worker of torch's own loader beside data hosts, for two questions that only it can answer.

Is a first batch of a data host what the script's own loader makes (`verdict_of`)? Is an error of a
data host the script's, or the host's (`made_again`)?
"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader

from stoker.feed.engine.messages import BadSample
from stoker.feed.local_sources import Epoch, WorkersSource
from stoker.feed.seeding import Numbered
from stoker.feed.tolerance import ToleratedBatch

# For the worker's answer: at least so long, or so many times the host's own.
_LEAST_SECONDS = 60.0
_TIMES = 4.0
# Of the range of a leaf of floats, which last bits of another CPU stay far below.
_FLOAT_SHARE = 0.01
# Of values of 8 bits, which decoders round each in their way.
_BYTE_STEPS = 2

# Of any type: NumPy has no name for it.
_Array = npt.NDArray[np.float64]


def made_again(
    loader: "DataLoader[object]", numbered: Numbered, epoch: Epoch, *, seconds: float = 0.0
) -> tuple[object, tuple[BadSample, ...]]:
    """Returns a batch as torch's own worker makes it on this host, and its bad samples.

    Raises what the worker raises.

    Args:
        loader: The script's.
        numbered: What the batch is made of; of an iterable dataset it is the first one.
        epoch: Its epoch.
        seconds: After which it raises RuntimeError; 0: as the script's loader.
    """
    progress = replace(epoch.progress, stream=None)
    own = replace(epoch, progress=progress, indices=iter((numbered,)), pins=False)
    timeout = loader.timeout or seconds
    worker = WorkersSource(
        loader, own, num_processes=1, timeout=timeout, is_rest=True, as_first=True
    )
    try:
        batch = worker.take()
    finally:
        worker.close()
    if isinstance(batch, ToleratedBatch):
        return batch.batch, batch.bad
    return batch, ()


def verdict_of(
    loader: "DataLoader[object]",
    batch: object,
    numbered: Numbered,
    epoch: Epoch,
    *,
    seconds: float,
) -> tuple[str, list[object]]:
    """Compares a data host's batch with those of torch's own workers.

    Args:
        loader: Its loader.
        batch: The data host's.
        numbered: What it was made of.
        epoch: Its epoch.
        seconds: That the data host took, or more.

    Returns:
        What is to be said, if anything; torch's own batch, if the data host's is another one.
    """
    limit = max(_LEAST_SECONDS, _TIMES * seconds)
    try:
        here, _ = made_again(loader, numbered, epoch, seconds=limit)
        leaf = difference(batch, here)
        if not leaf:
            return "", []
        again, _ = made_again(loader, numbered, epoch, seconds=limit)
    except Exception as err:
        # A file that is not here, or no answer in time: it is the data host's to make.
        why = f"{type(err).__name__}: {err}".partition("\n")[0]
        return f"the first batch of a data host was not checked: {why}", []
    if difference(again, here):
        return f"this loader gives other batches each time ({leaf})", []
    return f"another first batch ({leaf})", [here]


def difference(one: object, other: object, path: str = "batch") -> str:
    """Returns where two batches differ, as a path and how; empty: they are equal.

    Structures, types, shapes, texts, bools and integers are compared exactly, values of 8 bits
    within 2, floats within 1 % of the range of their leaf.
    """
    is_leaf = hasattr(one, "dtype") or isinstance(one, str | bytes | int | float | None)
    if type(one) is not type(other) or is_leaf:
        if type(one) is type(other) and _are_equal(_plain(one), _plain(other)):
            return ""
        there, here = _shown(one), _shown(other)
        return f"{path}: {f'{there} there, {here} here' if there != here else 'other values'}"
    theirs, ours = _parts(one), _parts(other)
    if list(theirs) != list(ours):
        return f"{path}: other keys, or another length"
    found = (difference(part, ours[key], f"{path}[{key!r}]") for key, part in theirs.items())
    return next(filter(None, found), "")


def _parts(value: object) -> dict[object, object]:
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    return value if isinstance(value, dict) else getattr(value, "__dict__", {})


def _shown(leaf: object) -> str:
    shape = getattr(leaf, "shape", None)
    return repr(leaf)[:60] if shape is None else f"{leaf.dtype} of {tuple(shape)}"  # type: ignore[attr-defined]


def _are_equal(a: _Array, b: _Array) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype.kind in "fc":
        finite = b[np.isfinite(b)].real
        spread = float(np.ptp(finite)) if finite.size else 0.0
        # Of one value, or of equal ones, the value itself.
        reach = _FLOAT_SHARE * (spread or float(np.abs(finite).max(initial=0.0)))
        return bool(np.isclose(a, b, rtol=0.0, atol=reach, equal_nan=True).all())
    if a.dtype.itemsize == 1 and a.dtype.kind in "iu":
        return bool((np.abs(a.astype(int) - b.astype(int)) <= _BYTE_STEPS).all())
    # Objects are not compared.
    return a.dtype.kind in "OV" or np.array_equal(a, b)


def _plain(leaf: object) -> _Array:
    """Returns a leaf's values as NumPy has them; of a tensor without plain values how it looks."""
    if not isinstance(leaf, torch.Tensor):
        return np.asarray(leaf)
    if leaf.layout != torch.strided or leaf.is_quantized:
        return np.asarray(_shown(leaf))
    tensor = leaf.float() if leaf.dtype == torch.bfloat16 else leaf
    array: _Array = tensor.detach().numpy()
    return array
