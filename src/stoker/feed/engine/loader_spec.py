"""What a data host gets of a loader: its parts as one pickle, and where the script runs.

    byte   1: each worker reads it for itself, as the script asks for spawn, or it holds handles
    head   Python, working folder, sys.path, arguments, environment variables of the script
    body   the LoaderSpec, by `pickler`

A host unpickles it once for all ranks, in a process that has entered the head. The entries of the
script's path keep their order; in place of the trainer's installed directories stand the data
host's. What ranks differ in comes with each worker (`facts`). Nothing of the script is run on a
data host.
"""

import contextlib
import functools
import hashlib
import io
import json
import os
import pickle
import platform
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from stoker.errors import ShippingError
from stoker.feed.engine.pickler import (
    BoundedFile,
    BoundReachedError,
    DatasetFactory,
    LoaderPickler,
    culprit,
    factories_in,
)
from stoker.host.installed import INSTALLED, is_installed
from stoker.records.secrets import is_secret

# Variables of one rank, one host, a launcher or a communication library.
_OF_ONE_PROCESS = re.compile(
    r"^(STOKER|SM|SAGEMAKER|MASTER|LOCAL|GROUP|NODE|ROLE|TORCHELASTIC|OMPI|PMI|PMIX|PRTE|MPI|SLURM"
    r"|HOROVOD|KUBERNETES|CUDA|NVIDIA|ROCR|HIP|NCCL|TORCH_NCCL|GLOO|UCX|FI|RAY|WANDB"
    r"|TORCHINDUCTOR|TRITON|OMP|KMP|MKL|OPENBLAS|NUMEXPR|LD|DYLD|SSH|CONDA)_"
    r"|(^|_)(RANKS?|WORLD_SIZE)(_|$)|_PROXY$|^PYTHON"
    r"|^(PATH|HOME|PWD|OLDPWD|SHELL|SHLVL|USER|LOGNAME|HOST|HOSTNAME|TMPDIR|TEMP|TMP|TERM|DISPLAY"
    r"|COLUMNS|LINES|VIRTUAL_ENV|XDG_RUNTIME_DIR|LC_CTYPE|_)$"
)
# On PYTHONPATH of each training run: its only module is stoker's sitecustomize.
_STARTUP = str(Path(__file__).parents[2] / "startup")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSpec:
    """The parts of a loader that a worker needs.

    Attributes:
        auto_collation: False with `batch_size=None`: an index is one sample.
        num_workers: The script's, for `get_worker_info()`; 0: that is None there.
        is_spawned: The script asks for workers that are not forked.
        on_error: What is done with a sample that the dataset cannot make.
        outlives_epochs: Workers keep the dataset from epoch to epoch.
    """

    dataset: object
    collate_fn: Callable[[object], object]
    worker_init_fn: Callable[[int], object] | None = None
    auto_collation: bool = True
    num_workers: int = 1
    is_iterable: bool = False
    drop_last: bool = False
    is_spawned: bool = False
    on_error: Literal["raise", "skip", "replace"] = "raise"
    outlives_epochs: bool = False


@dataclass(frozen=True, slots=True)
class PackedSpec:
    """A pickled loader, named by its digest."""

    data: bytes
    digest: str


def pack_spec(spec: LoaderSpec, *, max_bytes: int) -> PackedSpec:
    """Pickles a loader's parts.

    Raises:
        SharedMemoryError: If a part is shared between processes.
        ShippingError: If a part cannot be pickled (names the attribute) or lies on an accelerator,
            or the pickle is larger than `max_bytes`.
    """
    file = io.BytesIO()
    file.write(b"\0")
    pickle.dump(_place_of_script(), file)
    file.getbuffer()[0] = _pickle(spec, file) or spec.is_spawned
    data = file.getvalue()
    if len(data) > max_bytes:
        raise ShippingError(
            f"the pickled dataset has {len(data)} bytes, more than feed.max_dataset_bytes "
            f"({max_bytes})",
            fix="build it on the data hosts: stoker.remote('module:function'), or raise "
            "feed.max_dataset_bytes",
        )
    digest = hashlib.blake2b(data, digest_size=16).hexdigest()
    return PackedSpec(data, digest)


def _pickle(spec: LoaderSpec, file: io.BytesIO) -> bool:
    """Pickles a spec; returns whether it holds handles, which forks would share."""
    pickler = LoaderPickler(file)
    try:
        pickler.dump(spec)
    except BoundReachedError:
        raise
    except Exception as err:
        names = ("dataset", "collate_fn", "worker_init_fn")
        path, value = culprit({name: getattr(spec, name) for name in names})
        if isinstance(err, ShippingError):
            raise type(err)(f"{path} is {err.what}", fix=err.fix) from err
        named = f"{path} ({type(value).__module__}.{type(value).__qualname__})"
        raise ShippingError(
            f"cannot send {named} to a data host: {type(err).__name__}: {err}",
            fix="make it in worker_init_fn or at first use, leave it out in __getstate__, or name "
            "the dataset by stoker.remote('module:function')",
        ) from err
    return pickler.has_handles


def refusal_of(spec: LoaderSpec, *, max_bytes: int) -> ShippingError | None:
    """Returns why `pack_spec` fails, by what is seen in so many bytes of the pickle."""
    try:
        _pickle(spec, BoundedFile(max_bytes))
    except ShippingError as err:
        return err
    except BoundReachedError:
        pass
    return None


def read_spec(file: BinaryIO) -> LoaderSpec:
    """Returns the spec in a file, in a process that is only for it; builds what `remote` names."""
    file.read(1)
    # First: unpickling imports modules, which need the path and may read the environment.
    _enter(pickle.load(file))
    spec: object = pickle.load(file)
    if not isinstance(spec, LoaderSpec):
        raise ShippingError(f"expected a loader, found a {type(spec).__name__}")
    if isinstance(spec.dataset, DatasetFactory):
        object.__setattr__(spec, "dataset", spec.dataset.build())
    else:
        for factory in factories_in(spec.dataset):
            factory.build()
    return spec


# ---- where the script runs


def _place_of_script() -> str:
    """Returns version, working folder, sys.path, sys.argv, and the variables that it changed.

    As text: a pickle depends on which strings are one object. A variable without a value was
    deleted.
    """
    try:
        folder = os.getcwd()
    except OSError:
        # It was removed.
        folder = ""
    variables = changes_between(_environment_at_start(), os.environ)
    python = platform.python_version()
    return json.dumps((python, folder, entries_of(sys.path, folder), sys.argv, variables))


def _enter(packed: str) -> None:
    python, folder, entries, arguments, variables = json.loads(packed)
    own = platform.python_version()
    # Functions are sent as bytecode, which other versions cannot run.
    if python.split(".")[:2] != own.split(".")[:2]:
        raise ShippingError(
            f"the trainer runs Python {python}, this host runs {own}: functions cannot be sent",
            fix=f"use one Python version: {own}, or one image",
        )
    for name, value in variables:
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    sys.argv[:] = arguments
    # The trainer's folder may be a volume that this host does not have.
    if os.path.isdir(folder):
        os.chdir(folder)
    sys.path[:] = arranged(entries, here=sys.path)


def entries_of(paths: Iterable[object], folder: str) -> list[str]:
    """Returns the entries of a path, in order; INSTALLED for all installed directories."""
    entries: dict[str, None] = {}
    for path in paths:
        # An empty entry means the working folder, which may have been removed.
        if isinstance(path, str) and (folder or path):
            full = os.path.normpath(os.path.join(folder, path))
            if full != _STARTUP:
                entries[INSTALLED if is_installed(full) else full] = None
    return list(entries)


def arranged(entries: Sequence[str], *, here: Sequence[str]) -> list[str]:
    """Returns a path with the order of `entries`, and with all of this process's path, `here`."""
    in_order: dict[str, None] = {}
    for entry in entries:
        if entry == INSTALLED:
            in_order |= dict.fromkeys(filter(is_installed, here))
        elif os.path.exists(entry):
            in_order[entry] = None
    return list(in_order | dict.fromkeys(here))


@functools.cache
def _environment_at_start() -> Mapping[str, str]:
    """Returns the environment that this process was started with; if unknown, what it is now."""
    text = ""
    with contextlib.suppress(OSError):
        # The kernel keeps it as it was when the program was started.
        text = os.fsdecode(Path("/proc/self/environ").read_bytes())
    variables = dict(line.split("=", 1) for line in text.split("\0") if "=" in line)
    # setproctitle overwrites the environment.
    is_whole = any(name.startswith("STOKER_") for name in variables)
    return variables if is_whole else dict(os.environ)


def changes_between(
    start: Mapping[str, str], now: Mapping[str, str]
) -> list[tuple[str, str | None]]:
    """Returns the variables that differ: no likely secret, and none of one rank or host."""
    names = sorted(name for name in {*start, *now} if start.get(name) != now.get(name))
    return [
        (name, now.get(name))
        for name in names
        if not (is_secret(name, now.get(name, "")) or _OF_ONE_PROCESS.search(name.upper()))
    ]
