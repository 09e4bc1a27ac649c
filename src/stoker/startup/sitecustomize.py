"""Startup of a training run's Python processes; `launch.job_environment` puts it on PYTHONPATH.

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
# Of an error's text, the head, and of its traceback the tail.
_MAX_CHARACTERS = 64 << 10
_TORCH = ("torch", "torch.utils.data")
# torchdata's subclass of torch's loader, which iterates in its own way.
_STATEFUL = ("torchdata.stateful_dataloader.stateful_dataloader",)
_PROBE = "profile.session.install"


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
    parents = [str(os.getppid())]
    with contextlib.suppress(OSError):
        with open(f"/proc/{os.getppid()}/stat", encoding="utf-8", errors="replace") as file:
            # The name, in parentheses, may contain anything: count from its end.
            parents.append(file.read().rpartition(")")[2].split()[1])
    return launcher in parents


def _settings() -> "dict[str, object]":
    """Returns the content of the run's run.json, without stoker; empty: there is none."""
    run = os.environ.get("STOKER_RUN", "")
    if not run:
        return {}
    # Here: most processes need no parser.
    import json

    try:
        if not run.startswith("{"):
            with open(run, encoding="utf-8") as file:
                run = file.read()
        return dict(json.loads(run))
    except (OSError, ValueError):
        # Whoever needs the settings says what is wrong with them.
        return {}


def _without_secrets(text: str) -> str:
    """Hides the values of secrets, as `stoker.records.secrets.hidden`; this Python may lack it."""
    names = _settings().get("secrets")
    for name in names if isinstance(names, dict) else ():
        value = os.environ.get(name, "")
        for part in (value, *value.splitlines()):
            if len(part.strip()) >= 6:
                text = text.replace(part.strip(), "***")
    return text


def _keep_failures() -> None:
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return
    previous = sys.excepthook

    def write(error: BaseException) -> None:
        import time
        import traceback

        text = "".join(traceback.format_exception(error))
        more = {
            "py_callstack": _without_secrets(text)[-_MAX_CHARACTERS:],
            "timestamp": str(int(time.time())),
            # Lightning's children, which it starts itself, have no RANK.
            "rank": int(os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or 0),
        }
        message = f"{type(error).__name__}: {_without_secrets(str(error))[:_MAX_CHARACTERS]}"
        # As torch's own `record` writes it.
        _write(file, {"message": {"message": message, "extraInfo": more}})

    def keep(
        kind: type[BaseException], error: BaseException, trace: "TracebackType | None"
    ) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            _guarded(lambda: write(error))
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


def _when_imported(modules: "Sequence[str]", kind: str, install: str) -> None:
    """Calls stoker's function `install` with the class `kind` of the last of `modules`."""

    def call() -> None:
        from importlib import import_module

        module, _, function = install.rpartition(".")
        try:
            patch = getattr(import_module(f"stoker.{module}"), function)
            patch(getattr(sys.modules[modules[-1]], kind))
        except Exception as err:
            if install == _PROBE:
                _record_modules(problem=f"{type(err).__name__}: {err}")
            raise

    sys.meta_path.insert(0, _Finder(modules, call))


def _replace_loader() -> None:
    settings = _settings()
    if "profile" in settings:
        _when_imported(_TORCH, "DataLoader", _PROBE)
        _when_imported(("stoker.feed.timed",), "TimedEpoch", "profile.timed_probe.install")
        _when_imported(_STATEFUL, "StatefulDataLoader", "profile.session.install_subclass")
        # Child processes of multiprocessing belong to the process that started them.
        if "--multiprocessing-fork" not in sys.orig_argv:
            import atexit

            pid = os.getpid()
            atexit.register(lambda: _guarded(_record_modules) if os.getpid() == pid else None)
        return
    if os.environ.get("STOKER_OUTPUT"):
        _when_imported(_TORCH, "DataLoader", "feed.rank_reports.install")
    if settings.get("replace_dataloader"):
        _when_imported(_TORCH, "DataLoader", "feed.replace.install")
        _when_imported(_STATEFUL, "StatefulDataLoader", "feed.replace.install_stateful")


def _write(name: str, document: "dict[str, object]") -> None:
    import json

    path = os.path.join(os.environ.get("STOKER_OUTPUT", ""), name)
    # Renamed when complete: the launcher may read it at any time.
    with open(f"{path}.{os.getpid()}", "w", encoding="utf-8", errors="replace") as file:
        json.dump(document, file)
    os.replace(f"{path}.{os.getpid()}", path)


def _record_modules(problem: str = "") -> None:
    """Writes the modules of a process of a profile, as it may not use torch."""
    name = f"seen-{os.getpid()}.json"
    if os.path.exists(os.path.join(os.environ.get("STOKER_OUTPUT", ""), name)) and not problem:
        return
    loaders: list[str] = []
    # A Python without stoker has none.
    with contextlib.suppress(ImportError):
        from stoker.feed.foreign_loaders import own_loaders

        loaders = own_loaders()
    # Whose batches come from no loader of torch.
    packages = {"tensorflow", "jax"} & sys.modules.keys()
    _write(name, {"packages": sorted(packages), "problem": problem, "loaders": loaders})


def _write_stacks_on_signal() -> None:
    """Makes this process write its threads' stacks when the watchdog asks, hung in C code or not.

    A handler that the script sets later replaces this one.
    """
    import faulthandler

    # Not `signal`, which imports enum: most processes need neither.
    from _signal import SIG_DFL, SIGURG, getsignal  # type: ignore[import-not-found]

    if getsignal(SIGURG) in (SIG_DFL, None):
        faulthandler.register(SIGURG, file=2, all_threads=True)


def _guarded(function: "Callable[[], None]") -> None:
    try:
        function()
    except Exception as err:
        words = " ".join(str(err).split())
        sys.stderr.write(f"stoker: sitecustomize: {type(err).__name__}: {words}\n")


_guarded(_chain_on)
if _is_rank():
    _guarded(_keep_failures)
    _guarded(_end_with_torchrun)
if os.environ.get("STOKER_LAUNCHER_PID"):
    # At any depth: the trainer may be started by a script's script.
    _guarded(_write_stacks_on_signal)
    _guarded(_replace_loader)
