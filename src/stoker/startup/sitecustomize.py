"""Startup of a training run's Python processes; `launch.strategies.start` puts it on PYTHONPATH.

It runs the next sitecustomize, keeps the traceback of a failing rank, ends ranks with their
torchrun, lets processes write their stacks, and replaces torch's loader where requested. A failure
here is one line on stderr: it must never break the user's process. Modules are imported inside of
functions: most processes need none.
"""

import contextlib
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType, TracebackType

_SIGKILL = 9
# Of an error's text and of its traceback: half from the head, half from the tail.
_MAX_CHARACTERS = 64 << 10
_TORCH = ("torch", "torch.utils.data")
# torchdata's subclass of torch's loader, which iterates in its own way.
_STATEFUL = ("torchdata.stateful_dataloader.stateful_dataloader",)
_PROBE = "profile.phases.install"
_UNFED = "feed.unfed.install"


def _chain_on() -> None:
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    here = os.path.dirname(os.path.abspath(__file__))
    others = [path for path in sys.path if os.path.abspath(path or ".") != here]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


def _is_rank() -> bool:
    """Returns whether this process is the command itself, or a child of it: a rank of torchrun."""
    launcher = os.environ.get("STOKER_LAUNCHER_PID")
    return bool(launcher) and launcher in (str(os.getppid()), _grandparent())


def _grandparent() -> str:
    try:
        with open(f"/proc/{os.getppid()}/stat", encoding="utf-8", errors="replace") as file:
            # The name, in parentheses, may contain anything: count from its end.
            return file.read().rpartition(")")[2].split()[1]
    except OSError:
        return ""


def _rank() -> int:
    # Lightning's children, which it starts itself, have no RANK.
    return int(os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or 0)


def _cut(text: str) -> str:
    half = _MAX_CHARACTERS // 2
    if len(text) <= 2 * half:
        return text
    return f"{text[:half]}\n[...]\n{text[-half:]}"


def _without_secrets(text: str) -> str:
    """Hides the values of secrets, as `stoker.records.secrets.hidden`; this Python may lack it."""
    import json

    for name in json.loads(os.environ.get("STOKER_SECRET_NAMES") or "[]"):
        value = os.environ.get(name, "")
        for part in (value, *value.splitlines()):
            if len(part.strip()) >= 6:
                text = text.replace(part.strip(), "***")
    return text


def _keep_failures() -> None:
    output = os.environ.get("STOKER_OUTPUT")
    if not output:
        return
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        # A failure of an earlier attempt is not the cause of this one's end.
        with contextlib.suppress(OSError):
            os.remove(os.path.join(output, f"failure-rank{_rank()}.json"))
    previous = sys.excepthook

    def write(
        kind: type[BaseException], error: BaseException, trace: "TracebackType | None"
    ) -> None:
        import json
        import traceback

        rank = _rank()
        failure = {
            "rank": rank,
            "host": os.environ.get("STOKER_HOST", ""),
            "type": kind.__name__,
            "message": _cut(_without_secrets(str(error))),
            "traceback": _cut(
                _without_secrets("".join(traceback.format_exception(kind, error, trace)))
            ),
        }
        path = os.path.join(output, f"failure-rank{rank}.json")
        # Renamed when complete: the launcher may read it at any time.
        with open(f"{path}.{os.getpid()}", "w", encoding="utf-8", errors="replace") as file:
            json.dump(failure, file)
        os.replace(f"{path}.{os.getpid()}", path)

    def keep(
        kind: type[BaseException], error: BaseException, trace: "TracebackType | None"
    ) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            _guarded(lambda: write(kind, error, trace))
        previous(kind, error, trace)

    sys.excepthook = keep


def _end_with_torchrun() -> None:
    if "RANK" in os.environ:
        from runpy import run_path

        # By its path: this Python may not have stoker.
        package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        run_path(os.path.join(package, "host", "spawn.py"))["end_with_parent"](_SIGKILL)


class _Finder:
    """Calls back once some modules are completely imported; imports none."""

    def __init__(self, names: "Sequence[str]", callback: "Callable[[], None]") -> None:
        self._callback = callback
        self._missing = {*names}
        self._is_looking = False

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if name not in self._missing or self._is_looking:
            return None
        from importlib.util import find_spec

        # `find_spec` asks all finders, also this one, which must not answer now.
        self._is_looking = True
        try:
            spec = find_spec(name)
        finally:
            self._is_looking = False
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_tell(module: "ModuleType") -> None:
            execute(module)
            self._missing.discard(name)
            if not self._missing and self in sys.meta_path:
                sys.meta_path.remove(self)
                _guarded(self._callback)

        # On this loader object, so that its type, which others check, stays the same.
        setattr(spec.loader, "exec_module", execute_and_tell)  # noqa: B010
        return spec


def _when_imported(modules: "Sequence[str]", kind: str, install: str, **options: object) -> None:
    """Calls stoker's function `install` with the class `kind` of the last of `modules`."""

    def call() -> None:
        from importlib import import_module

        module, _, function = install.rpartition(".")
        try:
            _hide_users_modules()
            patch = getattr(import_module(f"stoker.{module}"), function)
            patch(getattr(sys.modules[modules[-1]], kind), **options)
        except Exception as err:
            if install == _PROBE:
                _record_modules(problem=f"{type(err).__name__}: {err}")
            if install == _UNFED and isinstance(err, ImportError):
                _watch_without_stoker(err)
            is_told = os.environ.get("STOKER_HAS_DATA_GROUP") and isinstance(err, ImportError)
            if not is_told or install == _PROBE:
                raise

    sys.meta_path.insert(0, _Finder(modules, call))


def _hide_users_modules() -> None:
    """Has stoker's modules import what is installed, though the script has files of such names."""
    from stoker.host.installed import hide_users_modules

    hide_users_modules()


def _replace_loader() -> None:
    replaced = os.environ.get("STOKER_REPLACE_DATALOADER")
    if os.environ.get("STOKER_PROFILE"):
        _when_imported(_TORCH, "DataLoader", _PROBE)
        _when_imported(("stoker.feed.timed",), "TimedEpoch", "profile.timed_probe.install")
        _when_imported(_STATEFUL, "StatefulDataLoader", "profile.phases.install_subclass")
        _record_modules_at_exit()
        return
    if os.environ.get("STOKER_OUTPUT"):
        _when_imported(_TORCH, "DataLoader", _UNFED)
        if os.environ.get("STOKER_HAS_DATA_GROUP"):
            _tell_without_stoker_at_exit()
    if replaced in ("1", "true", "auto"):
        is_auto = replaced == "auto"
        _when_imported(_TORCH, "DataLoader", "feed.replace.install", is_auto=is_auto)
        _when_imported(
            _STATEFUL, "StatefulDataLoader", "feed.replace.install_stateful", is_auto=is_auto
        )


def _watch_without_stoker(err: ImportError) -> None:
    """Counts a run's steps where its Python has no stoker, and tells the launcher of it."""
    import atexit
    from importlib import import_module

    pid = os.getpid()
    steps = 0

    def before_step(*_: object) -> None:
        nonlocal steps
        steps += 1
        if steps == 1:
            _guarded(lambda: _tell_without_stoker(err, steps=1))

    def at_exit() -> None:
        # A forked child inherits the handler, and must not write.
        if os.getpid() == pid:
            _guarded(lambda: _tell_without_stoker(err, steps=steps))

    hooks = import_module("torch.optim.optimizer")
    hooks.register_optimizer_step_pre_hook(before_step)
    # Registered last, so called before the handler of `_tell_without_stoker_at_exit`.
    atexit.register(at_exit)


def _tell_without_stoker_at_exit() -> None:
    """Makes a process whose Python has no stoker say so at exit: it may not use torch."""
    import atexit

    def tell() -> None:
        if os.getpid() != pid or "stoker" in sys.modules:
            return
        from importlib.util import find_spec

        path = os.path.join(os.environ.get("STOKER_OUTPUT", ""), f"loading-{pid}.json")
        if find_spec("stoker") is None and not os.path.exists(path):
            _tell_without_stoker(ModuleNotFoundError("No module named 'stoker'"), steps=0)

    # Child processes of multiprocessing belong to the process that started them.
    if "--multiprocessing-fork" not in sys.orig_argv:
        pid = os.getpid()
        atexit.register(lambda: _guarded(tell))


def _tell_without_stoker(err: ImportError, *, steps: int) -> None:
    """Writes what `feed.rank_reports` reads, and after a step what releases the data hosts."""
    import json

    folder = os.environ.get("STOKER_OUTPUT", "")
    if not os.path.isdir(folder):
        return
    python = {
        "python": sys.executable,
        "version": ".".join(map(str, sys.version_info[:3])),
        "problem": f"{type(err).__name__}: {err}",
    }
    files = {f"loading-{os.getpid()}.json": {"optimizer_steps": steps, "has_optimizer": steps > 0}}
    if steps == 1:
        rank = _rank()
        files[f"unfed-rank{rank}.json"] = {"rank": rank}
    for name, facts in files.items():
        path = os.path.join(folder, name)
        # Renamed when complete: the launcher may read it at any time.
        with open(f"{path}.new", "w", encoding="utf-8", errors="replace") as file:
            json.dump({**facts, **python}, file)
        os.replace(f"{path}.new", path)


def _record_modules_at_exit() -> None:
    """Makes each process of a profile record its modules at exit, as it may not use torch."""
    import atexit

    # Child processes of multiprocessing belong to the process that started them.
    if "--multiprocessing-fork" not in sys.orig_argv:
        pid = os.getpid()
        atexit.register(lambda: _guarded(_record_modules) if os.getpid() == pid else None)


def _record_modules(problem: str = "") -> None:
    import json

    folder = os.environ.get("STOKER_OUTPUT", "")
    path = os.path.join(folder, f"seen-{os.getpid()}.json")
    if not os.path.isdir(folder) or (os.path.exists(path) and not problem):
        return
    loaders: list[str] = []
    # A Python without stoker has none.
    with contextlib.suppress(ImportError):
        from stoker.feed.foreign_loaders import own_loaders

        loaders = own_loaders()
    # Whole packages, and parts of namespaces that packages share.
    packages = {name.partition(".")[0] for name in sys.modules}
    packages |= {"nvidia.dali", "torchdata.nodes"} & sys.modules.keys()
    with open(path, "w", encoding="utf-8", errors="replace") as file:
        json.dump({"packages": sorted(packages), "problem": problem, "loaders": loaders}, file)


def _abort_with_mpi() -> None:
    """Restarts a rank of mpirun as `python -m mpi4py ...`, which aborts all ranks if it fails.

    Otherwise MPI_Finalize waits for the others at exit, and mpirun never learns of the failure.
    """
    from importlib.util import find_spec

    # Options and program; `python -m MODULE` has one word less in sys.argv.
    words = len(sys.argv) + (sys.argv[0] in ("-m", "-c"))
    options = sys.orig_argv[1:-words]
    program = sys.orig_argv[-words:]
    is_rank = "OMPI_COMM_WORLD_RANK" in os.environ and program[1:2] != ["mpi4py"]
    if is_rank and sys.argv[0] and find_spec("mpi4py"):
        os.execv(sys.executable, [sys.executable, *options, "-m", "mpi4py", *program])


def _write_stacks_on_signal() -> None:
    """Makes this process write its threads' stacks when the watchdog asks, hung in C code or not.

    A handler that the script sets later replaces this one.
    """
    import faulthandler

    # Not `signal`, which imports enum: most processes need neither.
    from _signal import SIG_DFL, SIGURG, getsignal  # type: ignore[import-not-found]

    if getsignal(SIGURG) in (SIG_DFL, None):
        faulthandler.register(SIGURG, file=2, all_threads=True)


def _choose_backend() -> None:
    backend = os.environ.get("STOKER_BACKEND", "")

    def choose() -> None:
        _hide_users_modules()
        from stoker.launch.strategies.smddp import install

        install(backend)

    if backend:
        sys.meta_path.insert(0, _Finder(_TORCH, choose))


def _guarded(function: "Callable[[], None]") -> None:
    try:
        function()
    except Exception as err:
        words = " ".join(str(err).split())
        sys.stderr.write(f"stoker: sitecustomize: {type(err).__name__}: {words}\n")


_guarded(_chain_on)
if _is_rank():
    _guarded(_abort_with_mpi)
    _guarded(_keep_failures)
    _guarded(_end_with_torchrun)
if os.environ.get("STOKER_LAUNCHER_PID"):
    # At any depth: the trainer may be started by a script's script.
    _guarded(_write_stacks_on_signal)
    _guarded(_replace_loader)
    _guarded(_choose_backend)
