"""What an error says of the host that raised it: a full disk, no right, no library, no network.

Found by class, number, traceback and text; also of what it was raised from, or of the first errors
in a group. For the words alone: the script gets the error in `FeedSession.next`.
"""

import errno
import locale
import os
import re
import traceback
from collections.abc import Callable, Iterator
from types import FrameType, MappingProxyType

from stoker.feed import why_unfed
from stoker.feed.why_unfed import Side, WhyUnfed
from stoker.feed.wire.imported_code import INSTALLED

# Errors of one chain or group that are looked at.
_MAX_ERRORS = 16
_MAX_CHARACTERS = 400
_OF_STOKER = re.compile(r"[/\\]stoker[/\\]feed[/\\]")

_NETWORK_NUMBERS = frozenset(
    (
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.ECONNABORTED,
        errno.ENETUNREACH,
        errno.EHOSTUNREACH,
        errno.ETIMEDOUT,
        errno.ENOTCONN,
        errno.EHOSTDOWN,
    )
)
_STORAGE_NUMBERS = _NETWORK_NUMBERS | {errno.EIO, errno.ESTALE, errno.EREMOTEIO}
# Of urllib, urllib3, requests, httpx, aiohttp, botocore: by name, for none of them is imported.
_NETWORK_NAMES = frozenset(
    (
        "ConnectionError",
        "EndpointConnectionError",
        "ConnectTimeoutError",
        "ConnectTimeout",
        "ConnectError",
        "ClientConnectorError",
        "MaxRetryError",
        "NewConnectionError",
        "NameResolutionError",
        "gaierror",
    )
)
_CREDENTIALS_NAMES = frozenset(
    (
        "NoCredentialsError",
        "PartialCredentialsError",
        "CredentialRetrievalError",
        "DefaultCredentialsError",
    )
)
# Characters of an error that are searched for its cause.
_MAX_TEXT = 1 << 14
_NO_LIBRARY = ": cannot open shared object file"
_NO_SYMBOL = ": undefined symbol: "
_LIBRARY = re.compile(r"(\S+\.so[\w.]*|\S+\.dylib|\S+\.dll): cannot open shared object file")
_SYSTEM = re.compile(r"version [`'](\w+_[\d.]+)' not found(?: \(required by ([^)]+)\))?")
_SYMBOL = re.compile(r"(\S+\.so[\w.]*): undefined symbol: (\w+)")
# HDF5's own words, which carry no number in Python.
_HDF5 = re.compile(r"name = '([^']+)', errno = (\d+)")
_SQLITE = re.compile(r"unable to open database file")
_FULL = re.compile(r"No space left on device")
_FULL_FILE = re.compile(r"to file <([^>]+)>")
_MEMORY = re.compile(r"(?i)can't allocate memory|cannot allocate memory|bad_alloc|out of memory")
_FILES = re.compile(r"Too many open files")
_THREADS = re.compile(r"can't start new thread|Resource temporarily unavailable")
_ACCELERATOR = re.compile(
    r"deserialize object on a \w+ device|No CUDA GPUs|Found no NVIDIA driver|not compiled with CUDA"
    r"|No HIP GPUs|CUDA driver version is insufficient|no CUDA-capable device"
)

_BY_TEXT = (
    (_ACCELERATOR, why_unfed.needs_accelerator),
    (_MEMORY, why_unfed.out_of_memory),
    (_FILES, why_unfed.too_many_files),
    (_THREADS, why_unfed.too_many_tasks),
)


def class_name(err: BaseException) -> str:
    """Returns the name of an error's class, also of one whose metaclass has no name to show."""
    name: str = type.__dict__["__name__"].__get__(type(err))
    return name


def text_of(err: BaseException) -> str:
    """Returns an error's text in one line; of a long one the first and the last part."""
    try:
        text = str(err)
    except KeyboardInterrupt:
        raise
    # An exception's own __str__ may raise.
    except BaseException:
        return "its text cannot be shown"
    if len(text) > _MAX_TEXT:
        # A dataset may raise with all that it holds: the first and the last part are searched.
        text = f"{text[: _MAX_TEXT // 2]} ... {text[-_MAX_TEXT // 2 :]}"
    return " ".join(text.split())


def words_of_error(err: BaseException) -> str:
    """Returns an error's class and text in one line, of a group its first errors as well."""
    words = f"{class_name(err)}: {text_of(err)}".rstrip(": ")
    if isinstance(err, BaseExceptionGroup):
        words += ": " + "; ".join(words_of_error(error) for error in err.exceptions[:2])
    return words[:_MAX_CHARACTERS]


def place_of(err: BaseException) -> str:
    """Returns where the user's own code raised it: `__setstate__ (data.py:12)`; empty: unknown."""
    frames = traceback.extract_tb(err.__traceback__)
    # The innermost of them, as libraries raise below the user's code.
    for frame in reversed(frames):
        file = frame.filename
        is_own = not (INSTALLED.search(file) or _OF_STOKER.search(file) or file.startswith("<"))
        if is_own:
            return f"{frame.name} ({os.path.basename(file)}:{frame.lineno})"
    return ""


def errors_behind(err: BaseException) -> Iterator[BaseException]:
    """Yields an error, what it was raised from, and the errors of a group, at most 16."""
    waiting: list[BaseException] = [err]
    for _ in range(_MAX_ERRORS):
        if not waiting:
            return
        # The nearest first: what lies behind it says less of this host.
        error = waiting.pop(0)
        yield error
        if isinstance(error, BaseExceptionGroup):
            waiting += error.exceptions
        # urllib's URLError holds the system's error.
        for behind in (getattr(error, "reason", None), error.__cause__):
            if isinstance(behind, BaseException):
                waiting.append(behind)


def cause_on_host(err: BaseException, side: Side, *, raised: str) -> WhyUnfed | None:
    """Returns what one error says of the host that raised it; None: nothing.

    Args:
        err: The error itself: not what it was raised from.
        side: The host, in words.
        raised: What was raised, in words.
    """
    text = text_of(err)
    match err:
        case KeyError() if _is_of_environment(err):
            return why_unfed.missing_variable(str(err.args[0]), side, raised=raised)
        case MemoryError():
            return why_unfed.out_of_memory(side, raised=raised)
        case locale.Error():
            return why_unfed.missing_locale(side, raised=raised)
        case BrokenPipeError():
            # Rather a program that the code had started than another machine.
            return None
        case OSError():
            why = _of_os_error(err, side, raised=raised)
            if why is not None:
                return why
    # By name: the libraries that raise these need not be there.
    names = {kind.__name__ for kind in type(err).__mro__}
    if names & _CREDENTIALS_NAMES:
        return why_unfed.no_credentials(side, raised=raised)
    why = _of_text(text, side, raised=raised)
    if why is None and names & _NETWORK_NAMES:
        return why_unfed.no_network(side, raised=raised)
    return why


def _of_os_error(err: OSError, side: Side, *, raised: str) -> WhyUnfed | None:
    path = err.filename if isinstance(err.filename, str) else ""
    if err.errno == errno.ENOENT and path and _is_of_subprocess(err):
        return why_unfed.missing_program(path, side, raised=raised)
    # With a path the same numbers are a file system's.
    if err.errno in _NETWORK_NUMBERS and not path:
        return why_unfed.no_network(side, raised=raised)
    return _of_number(err.errno or 0, path, side, raised=raised)


def _of_number(number: int, path: str, side: Side, *, raised: str) -> WhyUnfed | None:
    if number in _STORAGE_NUMBERS and path:
        return why_unfed.storage_failed(path, side, raised=raised)
    sentence = _BY_NUMBER.get(number)
    if sentence is None:
        return None
    return sentence(path, side, raised)


def _missing_file(path: str, side: Side, raised: str) -> WhyUnfed | None:
    if not path:
        return None
    return why_unfed.missing_file(path, side, raised=raised)


def _no_right(path: str, side: Side, raised: str) -> WhyUnfed | None:
    if not path:
        return None
    return why_unfed.no_right(path, side, raised=raised)


_ByNumber = Callable[[str, Side, str], WhyUnfed | None]
_BY_NUMBER: MappingProxyType[int, _ByNumber] = MappingProxyType(
    {
        errno.ENOENT: _missing_file,
        errno.ENOTDIR: _missing_file,
        errno.EACCES: _no_right,
        errno.EPERM: _no_right,
        errno.ENOSPC: lambda path, side, raised: why_unfed.disk_full(path, side, raised=raised),
        errno.EDQUOT: lambda path, side, raised: why_unfed.disk_full(path, side, raised=raised),
        errno.EROFS: lambda path, side, raised: why_unfed.read_only(path, side, raised=raised),
        errno.EMFILE: lambda _, side, raised: why_unfed.too_many_files(side, raised=raised),
        errno.ENFILE: lambda _, side, raised: why_unfed.too_many_files(side, raised=raised),
        errno.ENOMEM: lambda _, side, raised: why_unfed.out_of_memory(side, raised=raised),
        errno.EAGAIN: lambda _, side, raised: why_unfed.too_many_tasks(side, raised=raised),
    }
)


def _of_text(text: str, side: Side, *, raised: str) -> WhyUnfed | None:
    why = _of_library(text, side, raised=raised)
    if why is not None:
        return why
    hdf5 = _HDF5.search(text)
    if hdf5:
        return _of_number(int(hdf5[2]), hdf5[1], side, raised=raised)
    if _SQLITE.search(text):
        return why_unfed.missing_file("the SQLite database", side, raised=raised)
    if _FULL.search(text):
        file = _FULL_FILE.search(text)
        # Torch shares memory by files that have no folder in their names.
        path = f"/dev/shm{file[1]}" if file and file[1].startswith("/torch_") else ""
        return why_unfed.disk_full(path, side, raised=raised)
    for pattern, sentence in _BY_TEXT:
        if pattern.search(text):
            return sentence(side, raised=raised)
    return None


def _of_library(text: str, side: Side, *, raised: str) -> WhyUnfed | None:
    """Returns what the dynamic linker says of a library; None: nothing."""
    # A search for what ends so takes a second in a long text without spaces.
    library = _LIBRARY.search(text) if _NO_LIBRARY in text else None
    if library:
        return why_unfed.missing_library(library[1], side, raised=raised)
    system = _SYSTEM.search(text)
    if system:
        return why_unfed.old_system(system[1], side, needs=system[2] or "", raised=raised)
    symbol = _SYMBOL.search(text) if _NO_SYMBOL in text else None
    if symbol:
        return why_unfed.unlike_libraries(symbol[1], side, raised=raised)
    return None


def _last_frame(err: BaseException) -> FrameType | None:
    frames = list(traceback.walk_tb(err.__traceback__))
    return frames[-1][0] if frames else None


def _is_of_environment(err: KeyError) -> bool:
    frame = _last_frame(err)
    # A KeyError of another mapping has the same form: only the frame tells them apart.
    return frame is not None and frame.f_locals.get("self") is os.environ


def _is_of_subprocess(err: OSError) -> bool:
    frame = _last_frame(err)
    return frame is not None and frame.f_code.co_filename.endswith("subprocess.py")
