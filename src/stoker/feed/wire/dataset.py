"""Datasets and errors as they are sent: pickled by cloudpickle.

Of the script's environment only what the script itself changed is sent, without likely secrets, and
without what differs between ranks or hosts: a data host holds a dataset once for all ranks.
"""

import builtins
import contextlib
import hashlib
import importlib.util
import io
import json
import mmap
import multiprocessing
import os
import pickle
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal, NamedTuple

from stoker import errors
from stoker.errors import ProtocolError, RebuildingError, ShippingError, StokerError
from stoker.feed import why_unfed
from stoker.feed.why_unfed import Cause, WhyUnfed
from stoker.feed.wire.definitions import (
    Script,
    classes_digest,
    pack_script,
    script_of_this_process,
    unpack_script,
)
from stoker.feed.wire.host_errors import class_name, place_of
from stoker.feed.wire.import_path import ImportPath
from stoker.feed.wire.imported_code import CodeFacts, imported_code
from stoker.feed.wire.in_child import last_made
from stoker.feed.wire.pickling import (
    AnswerUnpickler,
    DatasetFactory,
    SpecPickler,
    SpecUnpickler,
    answer_of,
    culprit,
    factories_in,
    largest,
    path_to_shared,
    unreadable,
)
from stoker.feed.wire.process_settings import RANK_SETTINGS_BYTES, InheritedSettings
from stoker.feed.wire.rebuilding import why_not_made, why_not_rebuilt
from stoker.feed.wire.shared_memory import SharedMemoryError, sharing_of

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


# Matches TOKEN, but not TOKENIZERS_PARALLELISM.
_SECRETS = re.compile(
    r"(TOKENS?|SECRETS?|PASSWORDS?|PASSWD|PASSPHRASE|KEYS?|CREDENTIALS?|AUTH|COOKIE)(_|$)"
)
# user:password@host
_SECRET_VALUE = re.compile(r"://[^/@\s]*:[^/@\s]*@")
# Variables of one rank, one host, a launcher or a communication library.
_OF_ONE_PROCESS = re.compile(
    r"^(STOKER|SM|SAGEMAKER|MASTER|LOCAL|GROUP|NODE|ROLE|TORCHELASTIC|OMPI|PMI|PMIX|PRTE|MPI|SLURM"
    r"|HOROVOD|KUBERNETES|CUDA|NVIDIA|ROCR|HIP|NCCL|TORCH_NCCL|GLOO|UCX|FI|RAY|WANDB"
    r"|TORCHINDUCTOR|TRITON|OMP|KMP|MKL|OPENBLAS|NUMEXPR|LD|DYLD|SSH|CONDA)_"
    r"|(^|_)(RANKS?|WORLD_SIZE)(_|$)|_PROXY$|^PYTHON"
    r"|^(PATH|HOME|PWD|OLDPWD|SHELL|SHLVL|USER|LOGNAME|HOST|HOSTNAME|TMPDIR|TEMP|TMP|TERM|DISPLAY"
    r"|COLUMNS|LINES|VIRTUAL_ENV|XDG_RUNTIME_DIR|LC_CTYPE|_)$"
)
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
_RANK_ARGUMENT = re.compile(r"^--local[-_]rank(=|$)")
# Command lines of multiprocessing's spawned children, and of its fork server.
_SPAWNED = re.compile(r"--multiprocessing-fork|from multiprocessing\.forkserver import main")

# A fixed size, left out of the digest: ranks with different arguments share one dataset.
ARGUMENT_BYTES = 8192
# After them, the length of what the script defines: it stands at the end, and is left out as well.
_LENGTH_BYTES = 8
# At most 8 MiB each.
_MAX_SCRIPTS = 8
# The end of what a SharedMemoryError says, where data hosts are asked for.
UNSEEN = ": a data host would not see what the script changes there"
# How multiprocessing starts processes.
StartMethod = Literal["fork", "spawn", "forkserver"]

# Larger specs are sent, with a warning: they delay the start and use memory on each host.
LARGE_SPEC_BYTES = 64 << 20
# Limits of an error's text, which is shortened in the middle, and of its pickled arguments.
_MAX_ERROR_TEXT = 64 << 10
_MAX_ERROR_BYTES = 1 << 20
# That an error's own code may take: its text, its pickle, and its class in the trainer.
_ERROR_SECONDS = 10.0
# Errors without code of their own, if what they hold is plain. The traceback of an AttributeError
# looks at its object for a name that is alike.
_PLAIN_ERRORS = frozenset(
    kind
    for kind in (*vars(builtins).values(), *vars(errors).values())
    if isinstance(kind, type) and issubclass(kind, BaseException)
) - {AttributeError}
_PLAIN_TYPES = frozenset((str, bytes, int, float, bool, type(None)))
# Errors of a chain that are looked at.
_MAX_BEHIND = 64


@dataclass(frozen=True, slots=True)
class ScriptEnvironment:
    """Environment variables that the script changed (None: deleted), and its arguments."""

    changes: tuple[tuple[str, str | None], ...] = ()
    arguments: tuple[str, ...] = ()

    @classmethod
    def of_this_process(cls, *, has_rank: bool = False) -> "ScriptEnvironment":
        """Reads it; with `has_rank` also what numbers the rank."""
        start = environment_at_start()
        changes = changes_between(start, os.environ) if start is not None else ()
        if has_rank:
            numbers = ((name, os.environ.get(name)) for name in _OF_RANK)
            changes += tuple((name, number) for name, number in numbers if number is not None)
        return cls(changes, arguments_of(sys.argv))

    @classmethod
    def unpacked(cls, changes: bytes, arguments: bytes) -> "ScriptEnvironment":
        variables = tuple((name, value) for name, value in json.loads(changes))
        return cls(variables, tuple(json.loads(arguments)))

    def packed_changes(self) -> bytes:
        return json.dumps(self.changes).encode()

    def packed_arguments(self) -> bytes:
        """Returns ARGUMENT_BYTES bytes; no arguments if they are longer."""
        packed = json.dumps(self.arguments).encode()
        # Filled with spaces, which mean nothing in JSON.
        return (packed if len(packed) <= ARGUMENT_BYTES else b"[]").ljust(ARGUMENT_BYTES)

    def set(self) -> None:
        for name, value in self.changes:
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if self.arguments:
            sys.argv[:] = self.arguments


def environment_at_start(pid: str = "self") -> Mapping[str, str] | None:
    """Returns the environment that this script was started with; None if unknown."""
    # Children of multiprocessing start with what the script had set by then.
    parent = multiprocessing.parent_process()
    try:
        if pid == "self" and parent is not None and _SPAWNED.search(" ".join(sys.orig_argv)):
            pid = str(parent.pid)
            # The parent may be another child of multiprocessing.
            while _SPAWNED.search(Path(f"/proc/{pid}/cmdline").read_text(errors="replace")):
                # The second word after the command's name, which may have spaces and parentheses.
                status = Path(f"/proc/{pid}/stat").read_text(errors="replace")
                pid = status.rpartition(")")[2].split()[1]
        # The kernel keeps it as it was when the program was started.
        text = os.fsdecode(Path(f"/proc/{pid}/environ").read_bytes())
    except OSError:
        return None
    variables = dict(line.split("=", 1) for line in text.split("\0") if "=" in line)
    # setproctitle overwrites the environment.
    return variables if any(name.startswith("STOKER_") for name in variables) else None


def changes_between(
    start: Mapping[str, str], now: Mapping[str, str]
) -> tuple[tuple[str, str | None], ...]:
    names = sorted(name for name in {*start, *now} if start.get(name) != now.get(name))
    return tuple((name, now.get(name)) for name in names if may_travel(name, now.get(name)))


def may_travel(name: str, value: str | None) -> bool:
    """Returns whether a variable may be sent: no likely secret, and not of one rank or host."""
    if is_secret(name) or _OF_ONE_PROCESS.search(name.upper()):
        return False
    return value is None or not _SECRET_VALUE.search(value)


def is_secret(name: str) -> bool:
    return _SECRETS.search(name.upper()) is not None


def arguments_of(arguments: Sequence[str]) -> tuple[str, ...]:
    """Drops the rank that some launchers add to each process."""
    kept: list[str] = []
    is_value = False
    for argument in arguments:
        if not is_value and not _RANK_ARGUMENT.match(argument):
            kept.append(argument)
        # Its value may be the next word.
        is_value = not is_value and argument in ("--local-rank", "--local_rank")
    return tuple(kept)


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True)
class DatasetSpec:
    """The parts of a loader that a data worker needs.

    Attributes:
        auto_collation: False with `batch_size=None`: an index is one sample.
        num_workers: The script's, for `get_worker_info()` while a batch is made, of a stream 1; 0:
            it is None then, as in a script without workers.
        has_workers: Whether the script asked for any.
        start_method: How torch would start the loader's workers.
        on_error: What is done with a sample that the dataset cannot make.
        outlives_epochs: Whether a worker keeps the dataset from epoch to epoch, and so would not
            see an epoch that is set in a copy.
        streams: Those of Hugging Face in it, which are told each epoch; see stream_epochs.
    """

    dataset: object
    collate_fn: Callable[[object], object]
    worker_init_fn: Callable[[int], object] | None = None
    auto_collation: bool = True
    num_workers: int = 1
    has_workers: bool = True
    num_threads: int = 1
    is_iterable: bool = False
    drop_last: bool = False
    start_method: StartMethod = "fork"
    settings: InheritedSettings = field(default_factory=InheritedSettings)
    on_error: Literal["raise", "skip", "replace"] = "raise"
    outlives_epochs: bool = False
    streams: tuple[object, ...] = ()

    @property
    def streams_told(self) -> tuple[object, ...] | None:
        """What a pickler has to know of streams; see SpecPickler."""
        return self.streams if self.outlives_epochs else None


@dataclass(frozen=True, slots=True)
class DatasetPlace:
    """Where a spec comes from; sent in front of the spec, and read without unpickling it.

    Attributes:
        classes: Digest of the script's classes: with other ones it is another spec.
        script_bytes: Length of what the script defines, at the end.
    """

    path: ImportPath
    modules: tuple[str, ...]
    environment: ScriptEnvironment
    code: CodeFacts
    start_method: StartMethod = "fork"
    classes: str = ""
    script_bytes: int = 0
    settings: InheritedSettings = field(default_factory=InheritedSettings)

    @classmethod
    def of_spec(
        cls, spec: DatasetSpec, *, modules: Iterable[str], checks_code: bool
    ) -> "DatasetPlace":
        return cls(
            ImportPath.of_this_process(),
            tuple(sorted(modules)),
            # A stream is of one rank; a map-style dataset is held once for all.
            ScriptEnvironment.of_this_process(has_rank=spec.is_iterable),
            imported_code().facts(modules) if checks_code else CodeFacts(),
            spec.start_method,
            classes_digest(),
            settings=spec.settings,
        )

    def packed(self) -> bytes:
        """Returns all but the script's arguments and definitions, and settings of a rank."""
        # Code as text: a pickle depends on which strings are one object.
        code = json.dumps((dict(self.code.files), dict(self.code.versions))).encode()
        changes = self.environment.packed_changes()
        path = self.path
        where = (path.directory, path.entries, path.variable, path.kept)
        shared = self.settings.shared.encode()
        head = (where, self.modules, changes, code, self.start_method, self.classes, shared)
        return pickle.dumps(head)

    def enter(self) -> None:
        """Applies it to this process; to be called before its modules are imported."""
        self.environment.set()
        self.path.enter()


@dataclass(frozen=True, slots=True)
class PackedSpec:
    """A pickled spec, named by its digest, with warnings for the user."""

    data: bytes
    digest: str
    warnings: tuple[str, ...] = ()
    num_workers: int = 1


def pack_spec(
    spec: DatasetSpec, *, max_bytes: int, checks_code: bool = True, copies_shared: bool = False
) -> PackedSpec:
    """Pickles a spec, with its place and the facts of its modules' code.

    Args:
        max_bytes: Maximum size of the pickle.
        checks_code: Data hosts compare their code with this process's.
        copies_shared: What is shared in memory is copied like everything else.

    Raises:
        SharedMemoryError: If a part is shared in memory, and not copied; `where` is its path.
        ShippingError: If a part cannot be pickled (names the attribute) or lies on an accelerator,
            or the pickle is larger than `max_bytes`.
    """
    buffer = io.BytesIO()
    pickler = SpecPickler(buffer, copies_shared=copies_shared, streams_told=spec.streams_told)
    try:
        _dump(spec, pickler)
    except ShippingError:
        raise
    except Exception as err:
        raise _why(spec, err).error(ShippingError) from err
    place = DatasetPlace.of_spec(spec, modules=pickler.modules, checks_code=checks_code)
    counted = (place.packed(), buffer.getbuffer())
    # In a thread, as the hash of a large spec takes long.
    with _meanwhile(partial(_digest_of, counted)) as digested:
        if _scripts:
            script = _script_with(digested(), wanted=pickler.annotated)
        else:
            # Of the process's first spec none is kept: its name is not needed to know that.
            script = _packed_script(wanted=pickler.annotated)
        # Arguments, length and a rank's settings first, of a fixed size: `digest` leaves them out.
        length = len(script).to_bytes(_LENGTH_BYTES, "little")
        uncounted = (place.environment.packed_arguments(), length, spec.settings.packed_of_rank())
        data = b"".join((*uncounted, *counted, script))
    name = digested()
    _scripts.setdefault(name, script)
    if len(data) > max_bytes:
        why = why_unfed.too_large(len(data), most=max_bytes, largest=largest(_parts(spec)))
        raise why.error(ShippingError)
    warnings: tuple[str, ...] = ()
    if len(data) > LARGE_SPEC_BYTES:
        warnings = (
            f"the pickled dataset has {len(data) >> 20} MiB, sent once to each data host; "
            f"{largest(_parts(spec))}; stoker.remote('module:function') builds it there instead",
        )
    return PackedSpec(data, name, warnings, max(1, spec.num_workers))


# What the script defined when a spec was packed, by its digest: hosts have that one.
_scripts: dict[str, bytes] = {}


def _script_with(name: str, *, wanted: Iterable[str]) -> bytes:
    """Returns what the script defines, as of the spec's first epoch: it takes 5 ms to look at."""
    if name not in _scripts:
        # The oldest goes: a dictionary keeps the order of insertion.
        while len(_scripts) >= _MAX_SCRIPTS:
            del _scripts[next(iter(_scripts))]
        _scripts[name] = _packed_script(wanted=wanted)
    return _scripts[name]


def _packed_script(*, wanted: Iterable[str]) -> bytes:
    return pack_script(script_of_this_process(is_secret=is_secret, wanted=wanted))


@contextlib.contextmanager
def _meanwhile(compute: Callable[[], str]) -> Iterator[Callable[[], str]]:
    """Computes in another thread what holds no lock of Python's; yields what waits for it."""
    results: list[str] = []
    thread = threading.Thread(target=lambda: results.append(compute()), name="stoker-digest")
    has_begun = False
    # At a limit of tasks it is computed here, once it is asked for.
    with contextlib.suppress(RuntimeError):
        thread.start()
        has_begun = True

    def result() -> str:
        if has_begun:
            thread.join()
        return results[0] if results else compute()

    try:
        yield result
    finally:
        # It reads memory of the caller's.
        if has_begun:
            thread.join()


class Refusal(NamedTuple):
    """Why a spec cannot be sent, and what to do; empty: it can."""

    what: str = ""
    fix: str = ""


def refusal_of(spec: DatasetSpec, *, max_bytes: int, max_seconds: float) -> Refusal:
    """Returns why `pack_spec` fails, by what can be seen within bounds of size and CPU time.

    What is shared in memory counts as copied; see `what_is_shared`.

    Args:
        spec: What would be packed.
        max_bytes: Of the pickle that are looked at.
        max_seconds: CPU time, at most.
    """
    return _look(SpecPickler(_BoundedFile(max_bytes, max_seconds), copies_shared=True), spec)


def what_is_shared(spec: DatasetSpec, *, max_bytes: int, max_seconds: float) -> str:
    """Returns which part of a spec is shared in memory, as half a sentence; empty: none.

    Args:
        spec: What would be packed.
        max_bytes: Of the pickle that are looked at.
        max_seconds: CPU time, at most.
    """
    file = _BoundedFile(max_bytes, max_seconds)
    try:
        _dump(spec, SpecPickler(file, streams_told=spec.streams_told))
    except SharedMemoryError as err:
        return err.what
    except Exception:
        # What else is wrong with it is for `refusal_of`.
        return ""
    return ""


def _look(pickler: SpecPickler, spec: DatasetSpec) -> Refusal:
    try:
        _dump(spec, pickler)
    except _BoundReachedError:
        return Refusal()
    except ShippingError as err:
        return Refusal(err.what, err.fix)
    except Exception as err:
        why = _why(spec, err)
        return Refusal(why.what, why.fix)
    return Refusal()


def _dump(spec: DatasetSpec, pickler: SpecPickler) -> None:
    """Pickles `spec`; raises SharedMemoryError with the path of what is shared in memory."""
    try:
        pickler.dump(spec)
    except SharedMemoryError:
        path, value = path_to_shared(_parts(spec), streams_told=spec.streams_told)
    else:
        path, value = pickler.shared_global()
    if path:
        raise SharedMemoryError(
            f"{path} is {sharing_of(value)}{UNSEEN}",
            where=path,
            fix="if it is only read: --set feed.shared_memory=copy",
        )


def _why(spec: DatasetSpec, err: Exception) -> WhyUnfed:
    return why_unfed.not_picklable(culprit(_parts(spec)), raised=f"{type(err).__name__}: {err}")


class _BoundReachedError(Exception):
    """The check of a spec has reached its bounds."""


class _BoundedFile(io.BytesIO):
    """File that discards a pickle and ends it at its bounds."""

    def __init__(self, max_bytes: int, max_seconds: float) -> None:
        super().__init__()
        self._left = max_bytes
        # Of this thread: what is found must not depend on other programs.
        self._until = time.thread_time() + max_seconds

    def write(self, data: "ReadableBuffer", /) -> int:
        nbytes = memoryview(data).nbytes
        self._left -= nbytes
        if self._left < 0 or time.thread_time() > self._until:
            raise _BoundReachedError
        return nbytes


def unpack_spec(data: bytes | memoryview) -> DatasetSpec:
    """Returns the spec with its dataset; raises ShippingError if it cannot be rebuilt here."""
    return read_spec(io.BytesIO(data))


def read_spec(
    file: BinaryIO, *, host: str = "", entered: DatasetPlace | None = None
) -> DatasetSpec:
    """Returns the spec in a file; raises ShippingError if it cannot be rebuilt here.

    Args:
        host: This data host; empty: another process.
        entered: The spec's place, if this process has entered it: the file is then behind it.
    """
    place = entered
    try:
        # First: unpickling imports modules, which need the path and may read the environment.
        if place is None:
            place = read_place(file)
            place.enter()
        place.settings.enter()
        rebuilding = _read_script(file, place.script_bytes).enter()
        spec = SpecUnpickler(file).load()
        rebuilding.fill()
    except ShippingError:
        raise
    # Also what ends a process: a module may call sys.exit as it is imported.
    except BaseException as err:
        code, modules = (place.code, place.modules) if place else (None, ())
        side = why_unfed.of_data_host(host)
        why = why_not_rebuilt(err, side, code=code, modules=modules)
        is_of_dataset = why.cause == Cause.REBUILDING_FAILED
        raise why.error(RebuildingError if is_of_dataset else ShippingError) from err
    if not isinstance(spec, DatasetSpec):
        raise ShippingError(f"expected a spec, found a {type(spec).__name__}")
    return built(spec)


def unreadable_part(spec: DatasetSpec) -> str:
    """Returns what cannot be read back from its pickle here, as `dataset.rng (lib.Random)`.

    Tries in a forked child, for 10 s at most: whatever it does changes nothing in this process.
    Empty: all can be, or it is not known.
    """

    def named() -> Iterator[bytes]:
        yield unreadable(_parts(spec)).encode()

    return (last_made(named, max_seconds=_ERROR_SECONDS) or b"").decode()


def reopened_spec(memory: int) -> BinaryIO:
    """Opens a spec in memory that other processes read as well: each at its own position."""
    return open(f"/proc/self/fd/{memory}", "rb")


def read_place(file: BinaryIO) -> DatasetPlace:
    arguments = file.read(ARGUMENT_BYTES)
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    of_rank = file.read(RANK_SETTINGS_BYTES).decode().rstrip()
    where, modules, changes, code, start_method, classes, shared = pickle.load(file)
    environment = ScriptEnvironment.unpacked(changes, arguments)
    facts = CodeFacts(*json.loads(code))
    path = ImportPath(*where)
    settings = InheritedSettings(shared.decode(), of_rank)
    return DatasetPlace(path, modules, environment, facts, start_method, classes, length, settings)


def _read_script(file: BinaryIO, nbytes: int) -> Script:
    """Returns what the script defines; the file is then where it was."""
    before = file.tell()
    file.seek(-nbytes, os.SEEK_END)
    data = file.read(nbytes)
    file.seek(before)
    return unpack_script(data)


def built(spec: DatasetSpec) -> DatasetSpec:
    """Returns the spec with the dataset in place of its factory; builds factories within it."""
    if isinstance(spec.dataset, DatasetFactory):
        return replace(spec, dataset=spec.dataset.build())
    for factory in factories_in(spec.dataset):
        factory.build()
    return spec


def digest(data: bytes | memoryview) -> str:
    """Returns a digest of a pickled spec, its name.

    It leaves out the script's arguments, settings in which ranks differ, and what it defines beyond
    what the dataset refers to.
    """
    end = ARGUMENT_BYTES + _LENGTH_BYTES
    length = int.from_bytes(data[ARGUMENT_BYTES:end], "little")
    begin = end + RANK_SETTINGS_BYTES
    return _digest_of((memoryview(data)[begin : max(begin, len(data) - length)],))


def _digest_of(parts: "Iterable[ReadableBuffer]") -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


class Arrival:
    """A spec that arrives in pieces, in memory that other processes can map."""

    def __init__(self, name: str, *, nbytes: int) -> None:
        self._name = name
        self._nbytes = nbytes
        self._taken = 0
        self.descriptor = os.memfd_create(f"stoker-spec-{name}", os.MFD_CLOEXEC)

    def take(self, piece: bytes | memoryview, *, offset: int) -> bool:
        """Writes the next piece; returns True if it was the last, ProtocolError if out of order."""
        end = offset + len(piece)
        # A peer could send empty pieces without end.
        if offset != self._taken or end > self._nbytes or not len(piece):
            raise ProtocolError(f"piece of a spec from {offset} to {end}, expected {self._taken}")
        view = memoryview(piece)
        while view:
            view = view[os.write(self.descriptor, view) :]
        self._taken = end
        return end == self._nbytes

    def is_right(self) -> bool:
        """Returns whether the digest is right; takes 0.8 ms per MB."""
        with mmap.mmap(self.descriptor, 0, prot=mmap.PROT_READ) as whole, memoryview(whole) as view:
            return digest(view) == self._name

    def close(self) -> None:
        descriptor = self.descriptor
        self.descriptor = -1
        if descriptor >= 0:
            os.close(descriptor)


@dataclass(frozen=True, slots=True)
class _PackedError:
    kind: bytes | None
    name: str
    message: str
    arguments: bytes | None = None
    why: WhyUnfed | None = None


def pack_error(
    err: BaseException, *, host: str, where: str, side: why_unfed.Side | None = None
) -> bytes:
    """Pickles a worker's exception; blocks for up to 10 s if the exception's own code hangs.

    That code runs here as it is pickled, and in the trainer as it is unpickled. So both are tried
    in a child first: what hangs there, or ends it, does not travel.

    Args:
        err: The exception.
        host: Where it was raised.
        where: Worker and sample: `data worker 1, index 41`.
        side: The host in words, where the error may say something of it: a data host.
    """
    place = place_of(err) or "code that has no file"
    name = class_name(err)
    words = f"Caught {name} in {where} on host {host}.\n"
    words += f"Original {name}, which cannot be shown, in {place}"
    packed = _PackedError(None, name, words)

    def stages() -> Iterator[_PackedError]:
        return _stages(err, host=host, where=where, side=side)

    def tried() -> Iterator[bytes]:
        for stage in stages():
            data = pickle.dumps(stage)
            unpack_error(data)
            yield data

    if not _is_plain(err):
        data = last_made(tried, max_seconds=_ERROR_SECONDS)
        if data is not None:
            return data or pickle.dumps(packed)
    # Its own attributes may raise.
    with contextlib.suppress(Exception):
        for stage in stages():
            packed = stage
    return pickle.dumps(packed)


def _stages(
    err: BaseException, *, host: str, where: str, side: why_unfed.Side | None
) -> "Iterator[_PackedError]":
    """Yields an error with ever more of it; each needs more of the error's own code."""
    trace = traceback.TracebackException.from_exception(err)
    _cut_texts(trace)
    text = _cut("".join(trace.format()))
    # Not `class_name`: of a class without one nothing else can be shown either.
    name = type(err).__name__
    message = f"Caught {name} in {where} on host {host}.\nOriginal {text}"
    packed = _PackedError(None, name, message)
    yield packed
    # Before its class travels: without attributes an error is of no use to the trainer.
    long = sum(len(argument) for argument in err.args if isinstance(argument, str | bytes))
    if side is not None and not isinstance(err, StokerError):
        packed = replace(packed, why=why_not_made(err, side))
    packed = replace(packed, kind=answer_of(type(err)))
    yield packed
    arguments = answer_of(err) if long <= _MAX_ERROR_BYTES else None
    # The error has to fit a message.
    if arguments is not None and len(arguments) <= _MAX_ERROR_BYTES:
        yield replace(packed, arguments=arguments)


def _is_plain(err: BaseException) -> bool:
    """Returns whether neither an error nor one behind it has code of its own."""
    behind: list[BaseException | None] = [err]
    for error in behind:
        if error is None:
            continue
        # First: what it holds may be its own code's to say.
        if type(error) not in _PLAIN_ERRORS or len(behind) > _MAX_BEHIND:
            return False
        values = [*error.args, getattr(error, "filename", None), *vars(error).values()]
        if any(type(value) not in _PLAIN_TYPES for value in values):
            return False
        behind += (error.__cause__, error.__context__)
    return True


def _cut(text: str) -> str:
    half = _MAX_ERROR_TEXT // 2
    return text if len(text) <= 2 * half else f"{text[:half]}\n[...]\n{text[-half:]}"


def _cut_texts(trace: traceback.TracebackException) -> None:
    """Cuts the texts of an exception and of those behind it before they are copied into one."""
    traces = [trace]
    for part in traces:
        # Private, so that it may have no effect elsewhere: then `_cut` of the whole has to do.
        vars(part)["_str"] = _cut(str(part))
        traces += filter(None, (part.__cause__, part.__context__))


def unpack_error(data: bytes | memoryview) -> Exception:
    """Returns the exception to be raised in the trainer, of its original type if possible."""
    try:
        packed = pickle.loads(data)
    except Exception as err:
        raise ShippingError(f"cannot read an error from a data worker: {err}") from err
    if not isinstance(packed, _PackedError):
        raise ShippingError(f"expected an error, found a {type(packed).__name__}")
    # Separately: the type may be known here although the arguments cannot be rebuilt.
    kind = _try_unpickle(packed.kind)
    advice = "" if packed.why is None else _advice(packed.why)
    message = packed.message + (f"\ntry:   {advice}\n" if advice else "")
    if kind is KeyError:
        return KeyError(_Text(message))
    original = _try_unpickle(packed.arguments)
    if isinstance(original, StokerError):
        # Rebuilt from a text, it would lose its `where` and `fix`.
        # What was made and not raised has nothing more to show.
        if "Traceback (most recent call last)" in packed.message:
            original.add_note(packed.message)
        return original
    if not isinstance(kind, type) or not issubclass(kind, Exception):
        return RuntimeError(message)
    rebuilt = _rebuilt(kind, message)
    if rebuilt is not None:
        return rebuilt
    if isinstance(original, Exception):
        # The constructor takes other arguments: the original gets a note, as tracebacks show.
        _add_note(original, message)
        return original
    return RuntimeError(message)


def _rebuilt(kind: type[Exception], message: str) -> Exception | None:
    """Returns an error of a class with that message; None: its constructor makes no such error."""
    with contextlib.suppress(Exception, SystemExit):
        # As torch does: such a class takes its message by name.
        words = {"message": message}
        error = kind(**words) if getattr(kind, "message", None) else kind(message)
        # Its own __str__ may raise, or leave the message out.
        if isinstance(error, kind) and str(error):
            return error
    return None


def _add_note(err: Exception, note: str) -> None:
    try:
        err.add_note(note)
    except AttributeError:
        # A frozen dataclass refuses assignments.
        vars(err)["__notes__"] = [*getattr(err, "__notes__", ()), note]


def _advice(why: WhyUnfed) -> str:
    """Returns what to do, by what this process has of what the worker lacked."""
    name = why.subject
    is_there = bool(name)
    match why.cause:
        case Cause.MISSING_MODULE:
            is_there = name in sys.modules or _can_find(name.partition(".")[0])
        case Cause.MISSING_FILE:
            is_there = os.path.exists(name)
    return why_unfed.advice_in_trainer(why, is_there=is_there)


def _can_find(package: str) -> bool:
    with contextlib.suppress(Exception):
        return importlib.util.find_spec(package) is not None
    return False


class _Text(str):
    """Message of a KeyError that keeps its line breaks: KeyError shows the repr."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _parts(spec: DatasetSpec) -> Mapping[str, object]:
    return {
        "dataset": spec.dataset,
        "collate_fn": spec.collate_fn,
        "worker_init_fn": spec.worker_init_fn,
    }


def _try_unpickle(data: bytes | None) -> object:
    with contextlib.suppress(Exception, SystemExit):
        return None if data is None else AnswerUnpickler(io.BytesIO(data)).load()
    return None
