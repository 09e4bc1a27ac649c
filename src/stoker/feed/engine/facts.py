"""What a worker gets besides its dataset: settings and globals of the script, and its rank.

It is the first message on a worker's connection, set in its process after the dataset's modules are
imported, and no part of the dataset's digest: ranks that differ in it still share one dataset.

Ten settings of the process travel, and the globals of every loaded module whose file lies outside
the installed packages: those that pickle to at most 64 KiB, all in one pickle. Of torch.distributed
a worker has a group that answers rank and size, and refuses to communicate.
"""

import contextlib
import csv
import decimal
import importlib
import io
import locale
import os
import pickle
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import NoReturn, cast

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from stoker.feed.engine.pickler import BoundedFile, LoaderPickler
from stoker.feed.seeding import Seeding
from stoker.host.installed import INSTALLED_FILE

_STOKER = str(Path(__file__).parents[2]) + os.sep
_MAX_GLOBAL_BYTES = 64 << 10
# By which a stream may divide itself: torchrun's, and Open MPI's.
_OF_RANK = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "NODE_RANK",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
# Names of a module that Python sets, or that stand for another module's.
_KEPT = ("__builtins__", "__cached__", "__doc__", "__file__", "__loader__", "__spec__")


# Settings that are attributes of modules, which the script has imported.
_ATTRIBUTES = {"PIL.ImageFile": "LOAD_TRUNCATED_IMAGES", "PIL.Image": "MAX_IMAGE_PIXELS"}


class WorkerFacts(msgspec.Struct, frozen=True, array_like=True):
    """What numbers a worker, and what its rank is.

    Attributes:
        worker: For worker_init_fn; of a stream its shard.
        num_workers: Of `get_worker_info()` there; of a stream its shards.
        base_seed: Of worker_init_fn, and of all of a stream.
        script: As `script_facts` gave it.
    """

    worker: int
    num_workers: int
    base_seed: int
    seeding: Seeding
    script: bytes


pack_facts = msgspec.msgpack.encode
unpack_facts = msgspec.msgpack.Decoder(WorkerFacts).decode


def script_facts() -> bytes:
    """Returns rank, settings and globals of this process, pickled, for `enter_rank`."""
    rank = {name: os.environ[name] for name in _OF_RANK if name in os.environ}
    file = io.BytesIO()
    pickle.dump((rank, group_here()), file)
    LoaderPickler(file).dump((_settings(), _module_globals()))
    return file.getvalue()


def enter_rank(facts: WorkerFacts) -> None:
    """Makes this process one of a rank's."""
    file = io.BytesIO(facts.script)
    # First: modules that the rest imports may read the environment.
    rank, group = pickle.load(file)
    os.environ.update(rank)
    enter_group(group)
    settings, values = pickle.load(file)
    # As in torch's workers, unless worker_init_fn sets more.
    torch.set_num_threads(1)
    torch.set_default_dtype(settings["dtype"])
    np.seterr(**settings["errors"])
    decimal.setcontext(settings["decimal"])
    csv.field_size_limit(settings["csv"])
    cast("list[object]", warnings.filters)[:] = settings["warnings"]
    warnings._filters_mutated()  # type: ignore[attr-defined]
    # This host may lack a locale, or a library that is not needed here.
    with contextlib.suppress(locale.Error):
        locale.setlocale(locale.LC_ALL, settings["locale"])
    with contextlib.suppress(ImportError):
        if settings["cv2"] is not None:
            importlib.import_module("cv2").setNumThreads(settings["cv2"])
    for (module, name), value in values.items():
        with contextlib.suppress(ImportError):
            if module in sys.modules or module in _ATTRIBUTES:
                setattr(importlib.import_module(module), name, value)


def _module_globals() -> dict[tuple[str, str], object]:
    """Returns the globals of the user's own modules that are small enough, by module and name."""
    values: dict[tuple[str, str], object] = {}
    # A copy: another thread may import during this.
    for name, module in sys.modules.copy().items():
        file = getattr(module, "__file__", None)
        # Stoker's own may be installed from its source.
        is_users = isinstance(file, str) and not (
            INSTALLED_FILE.search(file) or file.startswith(_STOKER)
        )
        if not is_users or name in ("__main__", "__mp_main__"):
            continue
        for attribute, value in list(vars(module).items()):
            # Others are what the module's own text defines.
            is_value = not (isinstance(value, ModuleType | type) or callable(value))
            if attribute not in _KEPT and is_value and _is_small(value):
                values[name, attribute] = value
    for name, attribute in _ATTRIBUTES.items():
        if name in sys.modules:
            values[name, attribute] = getattr(sys.modules[name], attribute)
    return values


def _is_small(value: object) -> bool:
    """Returns whether a value pickles to at most 64 KiB."""
    with contextlib.suppress(Exception):
        LoaderPickler(BoundedFile(_MAX_GLOBAL_BYTES)).dump(value)
        return True
    return False


def _settings() -> dict[str, object]:
    """Returns the settings that have functions."""
    cv2 = sys.modules.get("cv2")
    threads = None if cv2 is None else cv2.getNumThreads()
    # As many as CPUs: the default, which differs between hosts.
    is_set = cv2 is not None and threads != cv2.getNumberOfCPUs()
    return {
        "dtype": torch.get_default_dtype(),
        "errors": np.geterr(),
        "warnings": [*filter(_is_small, warnings.filters)],
        "decimal": decimal.getcontext().copy(),
        "csv": csv.field_size_limit(),
        "locale": locale.setlocale(locale.LC_ALL),
        "cv2": threads if is_set else None,
    }


# ---- the process group


def _refuse(*_: object, **__: object) -> NoReturn:
    raise RuntimeError(
        "a data worker on a data host cannot communicate with other ranks: let the training "
        "process do it, before its loader begins, and keep the result in the dataset"
    )


class AnsweringGroup(dist.ProcessGroup):
    """A group that knows its rank and its size."""

    allgather = allgather_coalesced = allreduce = allreduce_coalesced = _refuse
    alltoall = alltoall_base = barrier = broadcast = gather = monitored_barrier = _refuse
    recv = recv_anysource = reduce = reduce_scatter = scatter = send = _refuse
    _allgather_base = _reduce_scatter_base = _refuse


def group_here() -> tuple[int, int, str] | None:
    """Returns rank, number of ranks and backend of this process's group; None: it has none."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return dist.get_rank(), dist.get_world_size(), dist.get_backend()


def enter_group(value: tuple[int, int, str] | None) -> None:
    """Puts this process into a group that answers what `group_here` returned on the rank."""
    if value is None:
        return
    rank, size, backend = value
    group = AnsweringGroup(rank, size)  # type: ignore[call-arg]
    world = distributed_c10d._world
    # Without a store, by which it would find the others.
    world.pg_map[group] = (distributed_c10d.Backend(backend), None)  # type: ignore[assignment]
    world.pg_group_ranks[group] = {number: number for number in range(size)}
    world.default_pg = group
