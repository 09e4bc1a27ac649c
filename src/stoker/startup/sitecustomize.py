"""This file runs at the start of each Python process of a training: the launcher puts it in front.

It hands on to the next sitecustomize, keeps the traceback of a rank that fails, ends ranks with
their torchrun, and puts stoker's loader into torch's where that is asked for. Whatever goes wrong
here is one line on stderr: it must never break a process that is not ours.
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
# Where torchdata keeps its subclass of torch's loader, which iterates in its own way.
_STATEFUL_LOADER = "torchdata.stateful_dataloader.stateful_dataloader"


def _chain_on() -> None:
    """Runs the sitecustomize that would have run without this one."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    here = os.path.dirname(os.path.abspath(__file__))
    others = [path for path in sys.path if os.path.abspath(path or ".") != here]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


def _is_rank() -> bool:
    """Returns whether this process is the command itself, or one below it: a rank of torchrun."""
    launcher = os.environ.get("STOKER_LAUNCHER_PID")
    return bool(launcher) and launcher in (str(os.getppid()), _grandparent())


def _grandparent() -> str:
    try:
        with open(f"/proc/{os.getppid()}/stat", encoding="utf-8", errors="replace") as file:
            # The name, in parentheses, may hold anything: count from its end.
            return file.read().rpartition(")")[2].split()[1]
    except OSError:
        return ""


def _keep_failures() -> None:
    output = os.environ.get("STOKER_OUTPUT")
    if not output:
        return
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        # What an earlier attempt of this rank wrote is not the cause of this one's end.
        with contextlib.suppress(OSError):
            os.remove(os.path.join(output, f"failure-rank{int(os.environ.get('RANK') or 0)}.json"))
    previous = sys.excepthook

    def keep(
        kind: type[BaseException], error: BaseException, trace: "TracebackType | None"
    ) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            _guarded(lambda: _write_failure(output, kind, error, trace))
        previous(kind, error, trace)

    sys.excepthook = keep


def _write_failure(
    output: str, kind: type[BaseException], error: BaseException, trace: "TracebackType | None"
) -> None:
    import json
    import traceback

    rank = int(os.environ.get("RANK") or 0)
    failure = {
        "rank": rank,
        "host": os.environ.get("STOKER_HOST", ""),
        "type": kind.__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(kind, error, trace)),
    }
    path = os.path.join(output, f"failure-rank{rank}.json")
    # Renamed when it is whole: the launcher may read it at any time.
    with open(f"{path}.{os.getpid()}", "w", encoding="utf-8", errors="replace") as file:
        json.dump(failure, file)
    os.replace(f"{path}.{os.getpid()}", path)


def _end_with_torchrun() -> None:
    if "RANK" in os.environ:
        from runpy import run_path

        # By its path: this Python may not have stoker.
        package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        run_path(os.path.join(package, "host", "spawn.py"))["end_with_parent"](_SIGKILL)


class _Finder:
    """Calls back once some modules are all wholly imported; imports none."""

    def __init__(self, names: "set[str]", callback: "Callable[[], None]") -> None:
        self._callback = callback
        self._missing = names
        self._is_looking = False

    def find_spec(
        self,
        name: str,
        path: "Sequence[str] | None" = None,
        target: "ModuleType | None" = None,
    ) -> "ModuleSpec | None":
        if name not in self._missing or self._is_looking:
            return None
        from importlib.util import find_spec

        # `find_spec` asks all finders, this one among them: it must not answer now.
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

        # Set on this loader object: others look at its type, which stays what it was.
        setattr(spec.loader, "exec_module", execute_and_tell)  # noqa: B010
        return spec


class _TorchFinder(_Finder):
    """Calls back with torch's DataLoader."""

    def __init__(self, callback: "Callable[[type], None]") -> None:
        super().__init__(
            {"torch", "torch.utils.data"},
            lambda: callback(sys.modules["torch.utils.data"].DataLoader),
        )


def _replace_loader() -> None:
    if os.environ.get("STOKER_PROFILE"):
        sys.meta_path.insert(0, _TorchFinder(_install_probe))
        sys.meta_path.insert(0, _Finder({"stoker.feed.timed"}, _install_timed_probe))
        sys.meta_path.insert(0, _Finder({_STATEFUL_LOADER}, _install_stateful_probe))
        _leave_word_of_modules()
    elif os.environ.get("STOKER_REPLACE_DATALOADER") in ("1", "true", "auto"):
        sys.meta_path.insert(0, _TorchFinder(_install_loader))
        sys.meta_path.insert(0, _Finder({_STATEFUL_LOADER}, _install_stateful_loader))


def _watch_steps() -> None:
    if os.environ.get("STOKER_OUTPUT") and not os.environ.get("STOKER_PROFILE"):
        sys.meta_path.insert(0, _TorchFinder(_install_watch))


def _install_watch(loader: type) -> None:
    from stoker.feed.unfed import install

    install(loader)


def _install_probe(loader: type) -> None:
    try:
        from stoker.profile.probe import install

        install(loader)
    except Exception as err:
        _leave_word(problem=f"{type(err).__name__}: {err}")
        raise


def _install_timed_probe() -> None:
    from stoker.profile.timed_probe import install

    install(sys.modules["stoker.feed.timed"].TimedEpoch)


def _install_stateful_probe() -> None:
    from stoker.profile.probe import install_subclass

    install_subclass(sys.modules[_STATEFUL_LOADER].StatefulDataLoader)


def _leave_word_of_modules() -> None:
    """Makes each process of a profile say at its end what it worked with: it may use no torch."""
    import atexit

    # Processes of multiprocessing are a part of the one that started them.
    if "--multiprocessing-fork" not in sys.orig_argv:
        pid = os.getpid()
        atexit.register(lambda: _guarded(_leave_word) if os.getpid() == pid else None)


def _parts() -> set[str]:
    """Returns packages inside a namespace that others share."""
    return {"nvidia.dali", "torchdata.nodes"} & sys.modules.keys()


def _own_loaders() -> list[str]:
    """Returns classes of other libraries' loaders that this process has."""
    try:
        from stoker.feed.own_loaders import own_loaders
    except ImportError:
        # A Python without stoker.
        return []
    return own_loaders()


def _leave_word(problem: str = "") -> None:
    import json

    folder = os.environ.get("STOKER_OUTPUT", "")
    if os.path.isdir(folder):
        path = os.path.join(folder, f"seen-{os.getpid()}.json")
        if problem or not os.path.exists(path):
            packages = sorted({name.partition(".")[0] for name in sys.modules} | _parts())
            with open(path, "w", encoding="utf-8", errors="replace") as file:
                found = {"packages": packages, "problem": problem, "loaders": _own_loaders()}
                json.dump(found, file)


def _install_loader(loader: type) -> None:
    from stoker.feed.replace import install

    install(loader, is_auto=_is_auto())


def _install_stateful_loader() -> None:
    from stoker.feed.replace import install_stateful

    install_stateful(sys.modules[_STATEFUL_LOADER].StatefulDataLoader, is_auto=_is_auto())


def _is_auto() -> bool:
    return os.environ.get("STOKER_REPLACE_DATALOADER") == "auto"


def _abort_with_mpi() -> None:
    """Starts a rank of mpirun again as `python -m mpi4py ...`, which aborts all ranks if it fails.

    Else mpi4py calls MPI_Finalize when Python ends, whatever the reason, and waits for the others;
    mpirun then never hears of the failure.
    """
    from importlib.util import find_spec

    # Options and program; `python -m MODULE` has one word less in sys.argv.
    words = len(sys.argv) + (sys.argv[0] in ("-m", "-c"))
    options, program = sys.orig_argv[1:-words], sys.orig_argv[-words:]
    is_rank = "OMPI_COMM_WORLD_RANK" in os.environ and program[1:2] != ["mpi4py"]
    if is_rank and sys.argv[0] and find_spec("mpi4py"):
        os.execv(sys.executable, [sys.executable, *options, "-m", "mpi4py", *program])


def _choose_backend() -> None:
    """Chooses torch's process group backend for the strategy smddp."""
    backend = os.environ.get("STOKER_BACKEND")
    if backend:
        sys.meta_path.insert(0, _TorchFinder(lambda _: _install_backend(backend)))


def _install_backend(backend: str) -> None:
    from stoker.launch.strategies.smddp import install

    install(backend)


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
    # At any depth: who trains may be started by a script that is started by a script.
    _guarded(_watch_steps)
    _guarded(_replace_loader)
    _guarded(_choose_backend)
