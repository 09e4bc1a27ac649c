"""Processes of a run, forked of a Python that has torch: `stoker train`, launchers, scripts, ranks.

Importing torch takes 1.7 CPU-seconds, in each rank and data host; what a test claims begins after.
`Popen` here is subprocess's, but a Python of a run that it starts is forked: the new process is
this one's child, with the streams, session, environment and command line that it was given, and
where it is to start others, the same class replaces subprocess's in it. A container's first process
(container_words.py) is forked, too, and so is what it starts in there.

The process that forks is a *zygote*: it has imported torch and packages, has executed stoker's
modules (see executed_ahead.py), and has no threads. Each process that starts others has one, forked
when it began, and ended with it. A forked process becomes the child of the zygote's parent in the
way of orphans: it is forked of a process that ends at once, while that parent adopts orphans.

A script whose words name `spawn` has a zygote for multiprocessing's processes alone.

What reads how Python itself was started (its options, `/proc/self/cmdline`, whether torch is
imported) is started by subprocess. As a script this is the first zygote; its argument is a socket.
"""

import atexit
import builtins
import contextlib
import ctypes
import dataclasses
import fcntl
import functools
import gc
import importlib
import importlib.machinery
import importlib.util
import inspect
import io
import json
import multiprocessing.util
import os
import random
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

# As a script it finds modules of its own folder.
_HERE = "" if __name__ == "__main__" else "support."
container_words = importlib.import_module(f"{_HERE}container_words")
_REAL = subprocess.Popen
_spawn_really = multiprocessing.util.spawnv_passfds
_execute_really = vars(_REAL)["_execute_child"]
_PARAMETERS = [*inspect.signature(_execute_really).parameters][1:]
# Variables of what is to import torch itself, with all that it starts.
COLD = {"TESTS_START_COLD": "1"}
# Those of a fork: what else Popen can be asked for is asked of subprocess.
_PLAIN: dict[str, object] = {"executable": None, "preexec_fn": None, "shell": False}
_PLAIN |= {"gid": None, "gids": None, "uid": None, "umask": -1}
# Variables that Python or torch read as they start, and those among them that a fork can be given.
# Not OMP_NUM_THREADS: the local platform gives a script all cores, and torch has one thread in each
# fork, which is enough for what tests compute.
_READ_AT_START = ("PYTHON", "MKL_", "LD_", "TORCH", "CUDA")
_GIVEN = (
    *("PYTHONPATH", "PYTHONUNBUFFERED", "TORCHELASTIC_", "TORCH_NCCL_", "TORCH_DISABLE_"),
    # Torch reads it when it compiles, and sets it for itself in a process that imports Lightning.
    "TORCHINDUCTOR_CACHE_DIR",
)
_OPTIONS = ("-P", "-u")
# Their processes start others.
_TORCHRUN = "torch.distributed.run"
_CLI = "stoker.cli"
_STARTERS = (_CLI, "stoker.launch", "stoker.launch.strategies.torchrun", _TORCHRUN)
_MODULES = (*_STARTERS, "stoker.feed.agent.forkserver")
# What pip installs, whose one line calls the module.
_PROGRAMS = {
    str(Path(sys.executable).with_name("torchrun")): _TORCHRUN,
    str(Path(sys.executable).with_name("stoker")): _CLI,
}
# Imported ahead, it has subprocess's class already.
_OF_TORCHRUN = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
# What stoker's processes and most scripts import.
_AHEAD = (
    # The second comes with the first optimizer, the third with torchrun.
    *("torch", "torch._dynamo", _TORCHRUN, _OF_TORCHRUN, "torch.utils.data"),
    *("numpy.random", "psutil", "msgspec", "cloudpickle", "zmq", "yaml", "click"),
    *("PIL.Image", "PIL.ImageEnhance", "PIL.ImageFilter", "PIL.ImageOps"),
    *("asyncio", "concurrent.futures.thread", "multiprocessing.connection"),
    *("cryptography.hazmat.primitives.ciphers.aead", "typer", "numpy.typing", "zmq.utils.z85"),
)
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_MESSAGE_BYTES = 2**17
_MOST_DESCRIPTORS = 32
_FIRST_FREE_DESCRIPTOR = 300
_ADOPTED_SECONDS = 150.0
# /proc shows variables where they were when the process began: this is room for others.
_ROOM = "STOKER_TEST_ROOM"
_ROOM_BYTES = 2**16

_prctl = ctypes.CDLL(None).prctl
_asking = threading.Lock()


class Popen(_REAL):
    """subprocess.Popen, which forks what it can of this process's zygote."""

    def _execute_child(self, *given: object) -> None:
        asked = dict(zip(_PARAMETERS, given, strict=True))
        order = _order_of(asked)
        if order is None or not self._forked(order, asked):
            _execute_really(self, *given)

    def _forked(self, order: dict, asked: Mapping) -> bool:
        """Returns False if there is no zygote any more."""
        ends = [asked[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        streams = [number if end == -1 else end for number, end in enumerate(ends)]
        pid = _fork(order, [*streams, *asked["pass_fds"]])
        if pid is None:
            return False
        self.pid = pid
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        vars(_REAL)["_close_pipe_fds"](self, *(asked[name] for name in pipes))
        return True


def _fork(order: dict, descriptors: Sequence[int]) -> int | None:
    """Returns the pid of a forked child; None: there is no zygote any more."""
    with _asking, _orphans_adopted():
        facts, told = os.pipe()
        with open(facts, "rb", buffering=0) as reader:
            try:
                socket.send_fds(_zygote(), [json.dumps(order).encode()], [*descriptors, told])
            except OSError:
                return None
            finally:
                os.close(told)
            pid = reader.read(16)
    return int(pid) if pid else None


def _spawn(path: bytes, words: Sequence[str], passed: Sequence[int]) -> int:
    """multiprocessing's way of starting processes by `spawn`, which forks what it can."""
    asked = _PLAIN | {"args": words, "env": None, "cwd": None, "pass_fds": sorted(passed)}
    order = _order_of(asked | {"start_new_session": False, "process_group": None})
    pid = None
    if order is not None and _spawns(order["words"]):
        pid = _fork(order, [0, 1, 2, *order["passed"]])
    return _spawn_really(path, words, passed) if pid is None else pid


def _spawns(words: Sequence[str]) -> bool:
    """Whether a script is told to start processes by `spawn`, or is such a process itself."""
    return any("spawn" in word for word in words[1:])


def started(words: Sequence[str], log: Path, **how) -> Popen:
    """Does as `processes.started`, forked if it can be."""
    with log.open("ab") as file:
        return Popen(words, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, **how)


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """Has code in this process start what it starts by this module's class."""
    vars(subprocess)["Popen"] = Popen
    try:
        yield
    finally:
        vars(subprocess)["Popen"] = _REAL


def _order_of(asked: Mapping) -> dict | None:
    """Returns what a zygote is told of a process; None: it is not one to be forked."""
    env = dict(os.environ if asked["env"] is None else asked["env"])
    if any(asked[name] != value for name, value in _PLAIN.items()):
        return None
    words = asked["args"]
    words = (
        [os.fsdecode(words)] if isinstance(words, str | os.PathLike) else [*map(os.fsdecode, words)]
    )
    from stoker.host import spawn

    bound = None
    if words[1:4] == ["-I", "-S", spawn.__file__]:
        bound, words = words[4:7], words[8:]
    container, words = container_words.read_words(words)
    program = _program_of(words, path=env.get("PATH"))
    if program is None:
        return None
    kind, name, arguments, is_safe = program
    folder = os.path.abspath(os.fspath(asked["cwd"] or "."))
    begins_in = folder if container is None else container.folder
    if not _may_be_forked(env) or _hides_imported(env, kind, name, begins_in):
        return None
    return {
        "words": words,
        "bound": bound,
        "container": container and dataclasses.asdict(container),
        "kind": kind,
        "name": name,
        "arguments": arguments,
        "is_safe": is_safe,
        "env": env,
        "folder": folder,
        "has_session": asked["start_new_session"],
        "group": asked["process_group"],
        "passed": [*asked["pass_fds"]],
        "parent": os.getpid(),
        "has_zygote": name in _STARTERS or _spawns(words),
    }


def _program_of(
    words: Sequence[str], *, path: str | None
) -> tuple[str, str, list[str], bool] | None:
    """Returns kind, name and arguments of what Python runs, and whether its path is safe (-P)."""
    if not words:
        return None
    program = shutil.which(words[0], path=path)
    if program in _PROGRAMS:
        return "module", _PROGRAMS[program], [*words[1:]], True
    if words[0] != sys.executable:
        return None
    rest = [*words[1:]]
    options = []
    while rest and rest[0] in _OPTIONS:
        options.append(rest.pop(0))
    if rest[:1] == ["-m"]:
        found = ("module", rest[1], rest[2:], "-P" in options)
        return found if rest[1] in _MODULES else None
    if rest[:1] == ["-c"]:
        return "code", rest[1], rest[2:], "-P" in options
    if not rest or rest[0].startswith("-"):
        return None
    return "script", rest[0], rest[1:], "-P" in options


def _may_be_forked(env: Mapping[str, str]) -> bool:
    if COLD.items() <= env.items():
        return False
    born_with = _clean_environ()
    names = [name for name in {*born_with, *env} if name.startswith(_READ_AT_START)]
    fixed = [name for name in names if not name.startswith(_GIVEN)]
    return all(env.get(name) == born_with.get(name) for name in fixed)


def _hides_imported(env: Mapping[str, str], kind: str, name: str, folder: str) -> bool:
    """Returns whether a module of the process's own path has the name of one that a fork has."""
    folders = [each for each in env.get("PYTHONPATH", "").split(os.pathsep) if each]
    if kind != "module":
        folders.append(os.path.dirname(name) if kind == "script" else "")
    # Nothing hides those that are built in, as `sys` in the machine's uppermost folder.
    names = sys.stdlib_module_names - {*sys.builtin_module_names}
    # Torch imports the last one, if it is there.
    names |= {each.partition(".")[0] for each in _AHEAD} | {"pynvml"}
    for each in folders:
        with contextlib.suppress(OSError):
            files = os.listdir(Path(folder, each))
            if any(file.removesuffix(".py") in names for file in files):
                return True
    return False


@functools.cache
def _clean_environ() -> dict[str, str]:
    """Returns the variables that the first zygote begins with."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("STOKER_", "SM_"))}
    return kept | {"OMP_NUM_THREADS": "1"}


@contextlib.contextmanager
def _orphans_adopted() -> Iterator[None]:
    was_adopting = ctypes.c_int()
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(was_adopting), 0, 0, 0)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _prctl(_PR_SET_CHILD_SUBREAPER, was_adopting.value, 0, 0, 0)


@functools.cache
def _zygote() -> socket.socket:
    """Returns the channel to this process's zygote; a forked one is given its own."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = _REAL(
            [sys.executable, __file__, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            # No test's own folder, in which that test may look for processes that are left.
            cwd="/",
            env=_clean_environ() | {_ROOM: "x" * _ROOM_BYTES},
        )

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def num_sockets() -> int:
    """Returns how many sockets this module has open in a process of tests: one or none."""
    return _zygote.cache_info().currsize


# What follows runs in a zygote, or in what it forks.


def _serve(channel: socket.socket) -> tuple[dict, list[int]]:
    """Returns in each forked process, with its order and descriptors."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, _MESSAGE_BYTES, _MOST_DESCRIPTORS)
        if not message:
            os._exit(0)
        first = os.fork()
        if first == 0:
            if os.fork():
                os._exit(0)
            channel.detach()
            return json.loads(message), descriptors
        for descriptor in descriptors:
            os.close(descriptor)
        os.waitpid(first, 0)


def _become(order: dict, descriptors: list[int]) -> None:
    """Gives this process what Popen was asked for, and tells its parent that it is there."""
    deadline = time.monotonic() + _ADOPTED_SECONDS
    while os.getppid() != order["parent"]:
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.0005)
    # First out of the way of the numbers that they are to have.
    found = [fcntl.fcntl(each, fcntl.F_DUPFD, _FIRST_FREE_DESCRIPTOR) for each in descriptors]
    _close_all_but(found)
    *given, facts = found
    for number, descriptor in zip([0, 1, 2, *order["passed"]], given, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if order["has_session"]:
        os.setsid()
    if order["group"] not in (None, -1):
        os.setpgid(0, order["group"])
    os.chdir(order["folder"])
    if order["bound"]:
        parent, number, cores = order["bound"]
        _end_with(int(parent), int(number))
        if cores != "-":
            os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    os.write(facts, f"{os.getpid()}".encode().ljust(16))
    os.close(facts)


def _close_all_but(kept: Sequence[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(name))


def _end_with(parent: int, number: int) -> None:
    _prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(128 + number)


def _begin_zygote(channel: socket.socket) -> None:
    """Lets go of what its parent has open; it ends with it."""
    _end_with(os.getppid(), signal.SIGKILL)
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    _close_all_but([0, 1, 2, channel.fileno()])


def _set_up(order: dict) -> None:
    """Does what Python does before it runs a program."""
    env = order["env"]
    _set_environment(env)
    if env.get("PYTHONUNBUFFERED"):
        for number, name in ((1, "stdout"), (2, "stderr")):
            raw = io.FileIO(number, "w", closefd=False)
            errors = "strict" if number == 1 else "backslashreplace"
            text = io.TextIOWrapper(raw, encoding="utf-8", errors=errors, write_through=True)
            setattr(sys, name, text)
            setattr(sys, f"__{name}__", text)
    sys.orig_argv[:] = order["words"]
    sys.argv[:] = [order["name"] if order["kind"] == "script" else "-c", *order["arguments"]]
    sys.path[:] = [*_places(env), *_PLACES]
    random.seed()
    sys.modules["numpy.random"].seed()
    # Where spawned processes look for the script, if its path is a relative one.
    vars(sys.modules["multiprocessing.process"])["ORIGINAL_DIR"] = os.getcwd()
    sys.modules.pop("sitecustomize", None)
    if importlib.util.find_spec("sitecustomize"):
        importlib.import_module("sitecustomize")
        _call_those_that_wait_for_torch()
    first = {"script": os.path.dirname(os.path.abspath(order["name"])), "code": ""}
    if not order["is_safe"]:
        sys.path.insert(0, first.get(order["kind"], os.getcwd()))
    main = types.ModuleType("__main__")
    vars(main)["__builtins__"] = builtins
    sys.modules["__main__"] = main
    # As multiprocessing does it where it is imported.
    sys.modules["__mp_main__"] = main


def _places(env: Mapping[str, str]) -> list[str]:
    return [os.path.abspath(each) for each in env.get("PYTHONPATH", "").split(os.pathsep) if each]


def _call_those_that_wait_for_torch() -> None:
    """Calls what stoker's sitecustomize has called when torch is imported, which it is here."""
    waiting = [each for each in sys.meta_path if type(each).__name__ == "_Finder"]
    # The one that is inserted last stands first, and is called last.
    for each in reversed(waiting):
        finder = vars(each)
        if finder["_missing"] <= sys.modules.keys():
            sys.meta_path.remove(each)
            finder["_missing"].clear()
            sys.modules["sitecustomize"]._guarded(finder["_callback"])


def _set_environment(env: Mapping[str, str]) -> None:
    """Sets the variables of this process, also those that /proc shows."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    os.environ.clear()
    os.environ.update(env)
    shown = b"".join(os.fsencode(f"{key}={value}") + b"\0" for key, value in env.items())
    assert len(shown) <= end - start
    ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)


def _execute(order: dict) -> None:
    main = sys.modules["__main__"]
    if order["kind"] == "module":
        vars(runpy)["_run_module_as_main"](order["name"])
        return
    if order["kind"] == "code":
        exec(compile(order["name"], "<string>", "exec", dont_inherit=True), vars(main))
        return
    path = order["name"]
    main.__file__ = path
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    exec(code, vars(main))


def _run(order: dict) -> NoReturn:
    """Runs a program to the end of its threads and exit handlers, and ends as Python does."""
    status = 0
    is_interrupted = False
    try:
        _execute(order)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not isinstance(end.code, int | None):
            sys.stderr.write(f"{end.code}\n")
    except BaseException as err:
        is_interrupted = isinstance(err, KeyboardInterrupt)
        # Without the frames of this file.
        trace = err.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__):
            trace = trace.tb_next
        status = 1
        try:
            sys.excepthook(type(err), err.with_traceback(trace), trace)
        except SystemExit as end:
            # The feed's errors have exit codes of their own.
            status = end.code if isinstance(end.code, int) else 1
    vars(threading)["_shutdown"]()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    if is_interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status & 0xFF)


def _start_others_with(channel: socket.socket, *, is_script: bool) -> None:
    globals()["_zygote"] = lambda: channel
    vars(multiprocessing.util)["spawnv_passfds"] = _spawn
    # What a script starts otherwise is its own.
    for name in () if is_script else ("subprocess", _OF_TORCHRUN):
        vars(sys.modules[name])["Popen"] = Popen


def _main(channel: socket.socket) -> NoReturn:
    while True:
        order, descriptors = _serve(channel)
        _become(order, descriptors)
        if order["container"]:
            container_words.enter(container_words.Container(**order["container"]))
        if not order["has_zygote"]:
            break
        ours, channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork():
            channel.close()
            _start_others_with(ours, is_script=order["name"] not in _STARTERS)
            break
        ours.detach()
        _begin_zygote(channel)
    _set_up(order)
    _run(order)


if __name__ == "__main__":
    _clean_environ()
    os.environ.pop(_ROOM)
    for _name in _AHEAD:
        importlib.import_module(_name)
    # Of this file's folder.
    importlib.import_module("executed_ahead").execute_ahead()
    importlib.import_module("inherited_exits").forget()
    # Of what Python itself has found, without this file's folder and PYTHONPATH.
    _PLACES = [each for each in sys.path[1:] if each not in _places(os.environ)]
    gc.freeze()
    importlib.import_module("huge_pages").use_huge_pages()
    _main(socket.socket(fileno=int(sys.argv[1])))
