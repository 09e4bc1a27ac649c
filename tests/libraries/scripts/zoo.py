"""Says each batch that a library gives as a hash, for all scripts of this folder.

Prints one JSON line per batch; before batch STOKER_TEST_PAUSE_AT, {"pause": n}, and waits for a
line.
"""

import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping

import numpy as np
import torch

SAMPLES = 64
BATCH_SIZE = 4

_count = 0

# Libraries print, too; what is read is only what `say` says.
sys.stdout = sys.stderr


def image(index: int) -> torch.Tensor:
    """Makes the same bytes in every process."""
    return torch.arange(48, dtype=torch.float32).add(index).sin().reshape(3, 4, 4)


class Images(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return image(index), index


def took(batch: object, **facts: object) -> None:
    global _count
    if os.environ.get("STOKER_TEST_PAUSE_AT") == str(_count):
        say(pause=_count)
        sys.stdin.readline()
    say(batch=_count, hash=digest(batch), **facts)
    _count += 1


def say(**facts: object) -> None:
    print(json.dumps(facts), file=sys.__stdout__, flush=True)


def digest(batch: object) -> str:
    """Hashes all bytes, shapes, types and keys of a batch."""
    whole = hashlib.sha256()
    for part in _parts(batch):
        whole.update(part)
    return whole.hexdigest()[:16]


def _parts(value: object) -> Iterator[bytes]:
    if isinstance(value, torch.Tensor):
        value = value.detach().numpy()
    if isinstance(value, np.ndarray):
        yield f"{value.dtype} {value.shape}".encode()
        yield np.ascontiguousarray(value).tobytes()
    elif isinstance(value, Mapping):
        for key in sorted(value):
            yield str(key).encode()
            yield from _parts(value[key])
    elif isinstance(value, list | tuple):
        yield f"{len(value)}".encode()
        for item in value:
            yield from _parts(item)
    elif dataclasses.is_dataclass(value):
        yield from _parts(vars(value))
    else:
        yield f"{type(value).__name__} {value!r}".encode()
