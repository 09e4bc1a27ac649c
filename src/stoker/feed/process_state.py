"""What all samples of a process share: a bad one may leave it changed, which later ones would see.

A script's own way to begin (`np.seterr` in the first sample) is no harm: it is the same in each
worker. What a sample did not take back as it failed is: it makes later samples other ones, on that
worker alone. Its timers and limit of recursion are taken back instead: see `left_behind`.

Near settings are read before each batch. The others, which forked workers would inherit, take too
long for that: they are read as a worker begins, and when its first batch has had its way.
"""

import contextlib
import locale
import os
import resource
import signal
import socket
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self, TypeVar, cast

import numpy as np
import torch

from stoker.feed.wire.inherited import UNKNOWN, InheritedSetting
from stoker.feed.wire.process_settings import SETTINGS, value_here

ValueT = TypeVar("ValueT")

# A sample may limit its time by these, and leave its handler.
_TIMERS = {signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF}
_STANDARD_DESCRIPTORS = (0, 1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSetting:
    """Something that the samples of a process share.

    Attributes:
        words: What it is called.
        write: Puts a value back; None: that cannot be done.
    """

    words: str
    read: Callable[[], object]
    write: Callable[[object], object] | None = None

    def is_still(self, value: object) -> bool:
        """Returns whether it has that value: not, where no file can be opened any more."""
        try:
            return self.read() == value
        except (OSError, MemoryError, ValueError):
            return False


def _shared(
    words: str, read: Callable[[], ValueT], write: Callable[[ValueT], object] | None = None
) -> SharedSetting:
    """Returns a setting, whose `write` takes what its `read` returns."""
    return SharedSetting(
        words=words, read=read, write=cast("Callable[[object], object] | None", write)
    )


def _default_device() -> torch.device:
    return torch.empty(0).device


def _set_default_device(device: torch.device) -> None:
    # Without one, calls are not looked at one by one.
    torch.set_default_device(None if device.type == "cpu" else device)


def _gradients() -> tuple[bool, bool]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled()


def _set_gradients(value: tuple[bool, bool]) -> None:
    # Of inference mode only its context knows the way out.
    torch.set_grad_enabled(value[0])


def _numpy_errors() -> Mapping[str, str]:
    return cast("Mapping[str, str]", np.geterr())


def _set_numpy_errors(value: Mapping[str, str]) -> None:
    np.seterr(**value)  # type: ignore[arg-type]


def _warnings_as_errors() -> list[object]:
    # Others are added as modules are imported.
    return [entry for entry in warnings.filters if entry[0] == "error"]


def _set_warnings_as_errors(before: list[object]) -> None:
    kept = [entry for entry in warnings.filters if entry[0] != "error" or entry in before]
    warnings.filters[:] = kept  # type: ignore[index]
    # Its end has modules forget which warnings they gave.
    with warnings.catch_warnings():
        pass


def _closed_streams() -> list[object]:
    return [getattr(stream, "closed", None) for stream in (sys.stdout, sys.stderr)]


def _pillow_reads_truncated() -> object:
    module = sys.modules.get("PIL.ImageFile")
    return getattr(module, "LOAD_TRUNCATED_IMAGES", False)


def _set_pillow_reads_truncated(value: object) -> None:
    module = sys.modules.get("PIL.ImageFile")
    if module is not None:
        module.LOAD_TRUNCATED_IMAGES = value  # type: ignore[attr-defined]


def _working_folder() -> str:
    try:
        return os.getcwd()
    except OSError:
        # It is deleted.
        return ""


_FOLDER = _shared("the working folder", _working_folder, os.chdir)
_NEAR = (
    _FOLDER,
    _shared("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    _shared("the default device", _default_device, _set_default_device),
    _shared("gradients", _gradients, _set_gradients),
    _shared("numpy.seterr", _numpy_errors, _set_numpy_errors),
    _shared("warnings as errors", _warnings_as_errors, _set_warnings_as_errors),
    _shared("socket.setdefaulttimeout", socket.getdefaulttimeout, socket.setdefaulttimeout),
    _shared(
        "the locale",
        lambda: locale.setlocale(locale.LC_ALL),
        lambda value: locale.setlocale(locale.LC_ALL, value),
    ),
    _shared(
        "SIGCHLD",
        lambda: signal.getsignal(signal.SIGCHLD),
        lambda handler: signal.signal(signal.SIGCHLD, handler),
    ),
    _shared("stdout or stderr", _closed_streams),
    _shared("sys.settrace", sys.gettrace, sys.settrace),
    _shared("the user", os.geteuid),
    _shared(
        "ImageFile.LOAD_TRUNCATED_IMAGES", _pillow_reads_truncated, _set_pillow_reads_truncated
    ),
)


def _handlers() -> dict[int, object]:
    numbers = signal.valid_signals() - _TIMERS
    return {number: signal.getsignal(number) for number in numbers}


def _limits() -> dict[str, tuple[int, int]]:
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return {name: resource.getrlimit(getattr(resource, name)) for name in names}


def _standard_files() -> list[object]:
    """Returns which files the standard descriptors are of."""
    files: list[object] = []
    for descriptor in _STANDARD_DESCRIPTORS:
        file: object = None
        with contextlib.suppress(OSError):
            status = os.fstat(descriptor)
            file = status.st_dev, status.st_ino
        files.append(file)
    return files


def _value_or_default(inherited: InheritedSetting) -> object:
    value = value_here(inherited)
    return inherited.default if value is UNKNOWN else value


def _of_fork(inherited: InheritedSetting) -> SharedSetting:
    return SharedSetting(words=inherited.name, read=lambda: _value_or_default(inherited))


# Those that ranks have in common, and that take no long time to read.
_INHERITED = tuple(
    _of_fork(inherited)
    for inherited in SETTINGS
    if inherited.is_compared and not inherited.differs_by_rank
)
_FAR = (
    _shared("handlers of signals", _handlers),
    _shared("blocked signals", lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    _shared("limits (ulimit)", _limits),
    _shared("torch.set_num_threads", torch.get_num_threads),
    _shared("os.sched_setaffinity", lambda: os.sched_getaffinity(0)),
    _shared("os.nice", lambda: os.getpriority(os.PRIO_PROCESS, 0)),
    _shared("the files of stdin, stdout or stderr", _standard_files),
    _shared("sys.stdout or sys.stderr", lambda: (id(sys.stdout), id(sys.stderr))),
    _shared("sys.path", lambda: [*sys.path]),
    *_INHERITED,
)


@dataclass(frozen=True, slots=True)
class ProcessState:
    """What samples share in a process.

    Attributes:
        settings: With their values; none may change.
        variables: Of the environment: modules that are imported may add some.
    """

    settings: tuple[tuple[SharedSetting, object], ...]
    variables: Mapping[str, str]

    @classmethod
    def of_this_process(cls) -> Self:
        """Reads the near settings; takes about 20 us."""
        return cls(_values_of(_NEAR), os.environ.copy())

    @classmethod
    def folder(cls) -> Self:
        """Reads the working folder alone."""
        return cls(_values_of((_FOLDER,)), {})

    @classmethod
    def far_of_this_process(cls) -> Self:
        """Reads the others; takes up to a few milliseconds."""
        return cls(_values_of(_FAR), {})

    def changes(self) -> list[str]:
        """Returns what is another one by now, in words."""
        changed = [setting.words for setting, value in self.settings if not setting.is_still(value)]
        if self._changed_variables():
            changed.append("the environment")
        return changed

    def put_back(self) -> None:
        """Puts back what is another one by now, as far as that can be done in this process."""
        for setting, value in self.settings:
            if setting.write is None or setting.is_still(value):
                continue
            # Handlers of signals, for one, are the main thread's to set.
            with contextlib.suppress(Exception):
                setting.write(value)
        os.environ.update(self._changed_variables())

    def _changed_variables(self) -> dict[str, str]:
        """Returns variables that are not what they were, with their former values."""
        now = os.environ
        return {name: value for name, value in self.variables.items() if now.get(name) != value}


def _values_of(settings: tuple[SharedSetting, ...]) -> tuple[tuple[SharedSetting, object], ...]:
    return tuple((setting, setting.read()) for setting in settings)
