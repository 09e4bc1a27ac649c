"""Sets up what holds for all tests, and divides them between processes for `make test`."""

import ctypes
import gc
import itertools
import json
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from support.full_pipe import full_pipe
from support.moto_server import aws_server, moto_process
from support.property_tests import PROFILES

__all__ = ["aws_server", "full_pipe", "moto_process"]

# A shell starts what it puts in the background with SIGINT ignored, and children inherit that: the
# tests that press Ctrl-C would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Images for Python often forbid it to keep what it compiles: each of a thousand processes would
# compile stoker (0.15 CPU-seconds), and each of `make test` all tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Of what tests start: see there. In one process (`pytest`) it is as for users.
_RARE_GC = str(Path(__file__).parent / "support" / "rare_gc")


def _make_gc_rare_in_what_is_started() -> None:
    places = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if _RARE_GC not in places:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_RARE_GC, *places]))


if "PYTEST_XDIST_WORKER" in os.environ:
    _make_gc_rare_in_what_is_started()

# A busy machine is no counterexample. The same examples each time: a change is not red by chance.
for _name, _count in PROFILES.items():
    settings.register_profile(
        _name,
        max_examples=_count,
        derandomize=_name == "stoker",
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile("stoker")

# The longest come first, for what begins last must not be what lasts. These wait more than they
# compute: after each of their files come some that only compute, and take the cores that are left.
_ORDER = ("keel", "engine", "fault", "e2e")
_COMPUTING_PER_WAITING_FILE = 2

_PR_SET_CHILD_SUBREAPER = 36


@pytest.fixture(autouse=True)
def _orphans_are_not_adopted_for_ever():
    """A launcher that a test calls in this process adopts orphans, and ends with its process.

    Here it would go on: what later tests kill would stay as zombies, by the hundred.
    """
    yield
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@pytest.fixture(autouse=True)
def _tests_end_only_processes_of_their_own():
    """Scripts are forked from one process: a test that ends it would make others fail."""
    yield
    if warm_python := sys.modules.get("support.warm_python"):
        warm_python.check_alive()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keeps what is collected: nobody looks for garbage in it, meanwhile or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        if "PYTEST_XDIST_WORKER" not in os.environ:
            gc.enable()
        if torch := sys.modules.get("torch"):
            # Its threads spin until the others have a core: up to ten times the CPU.
            torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Between files garbage is collected, and not in the threads of a server or a feed.

    In a process of `make test`; it takes 0.2 CPU-seconds with kfp and SageMaker's SDK imported.
    """
    try:
        return (yield)
    finally:
        if not gc.isenabled() and (nextitem is None or nextitem.path != item.path):
            gc.collect()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadFileScheduling:
    """Keeps a file in one process, with its fixtures, if there are several (`pytest -n 2`)."""
    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log)


def pytest_configure(config: pytest.Config) -> None:
    """The process that hears of all tests notes their seconds."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Seconds(config.rootpath / ".cache" / "test-seconds.json"))


class Seconds:
    """How long each test took: the sum of each file is kept, and the ten dearest are printed."""

    NUM_PRINTED = 10

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        dearest = sorted(self._seconds.items(), key=lambda each: -each[1])[: self.NUM_PRINTED]
        if len(self._seconds) > self.NUM_PRINTED:
            terminalreporter.section("dearest tests")
            for name, seconds in dearest:
                terminalreporter.line(f"{seconds:6.1f} s  {name}")
        self._keep()

    def _keep(self) -> None:
        kept = json.loads(self._file.read_text()) if self._file.is_file() else {}
        files: dict[str, float] = defaultdict(float)
        for name, seconds in self._seconds.items():
            files[name.partition("::")[0]] += seconds
        kept |= {name: round(seconds, 2) for name, seconds in files.items()}
        self._file.parent.mkdir(exist_ok=True)
        self._file.write_text(json.dumps(dict(sorted(kept.items())), indent=2) + "\n")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Slow tests come first where tests are shared."""
    if hasattr(config, "workerinput"):
        items.sort(key=_turn)
        places = {file: place for place, file in enumerate(_files_in_turn(items))}
        items.sort(key=lambda item: places[item.path])


def _turn(item: pytest.Item) -> int:
    found = [turn for turn, name in enumerate(_ORDER) if item.get_closest_marker(name)]
    return min(found, default=len(_ORDER))


def _files_in_turn(items: list[pytest.Item]) -> list[Path]:
    """Returns the files by their first test's turn, those that compute between those that wait."""
    turns: dict[Path, int] = {}
    for item in items:
        turns.setdefault(item.path, _turn(item))
    computing = iter([file for file, turn in turns.items() if turn == len(_ORDER)])
    files = []
    for file, turn in turns.items():
        if turn == len(_ORDER):
            continue
        files += [file, *itertools.islice(computing, _COMPUTING_PER_WAITING_FILE)]
    return [*files, *computing]
