"""Sets up what holds for all tests, and divides them between processes for `make test`."""

import ctypes
import fcntl
import gc
import importlib
import itertools
import os
import signal
import sys
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import IO

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from support import forked_workers
from support.full_pipe import full_pipe
from support.huge_pages import HugePages
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

# Of what tests start: see there. In one process (`make soak`, `make faults`) it is as for users.
_RARE_GC = str(Path(__file__).parent / "support" / "rare_gc")
_HUGE_PAGES = pytest.StashKey[HugePages]()


def _make_gc_rare_in_what_is_started() -> None:
    places = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if _RARE_GC not in places:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_RARE_GC, *places]))


if "PYTEST_XDIST_WORKER" in os.environ:
    _make_gc_rare_in_what_is_started()
    # Rare here, too: with kfp, moto and SageMaker's SDK imported, each whole collection takes 0.2
    # CPU-seconds. What a test makes is soon gone, and most of it is in no cycle.
    gc.set_threshold(20_000, 20, 20)

# A busy machine is no counterexample.
for _name, _count in PROFILES.items():
    settings.register_profile(
        _name, max_examples=_count, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
settings.load_profile("stoker")

# Those that nothing else may run beside come first, when nobody is in a test that they wait for.
# Then the longest, for what begins last must not be what lasts. These wait more than they compute:
# after each of their files come some that only compute, and take the cores that are left.
_ORDER = ("alone", "engine", "fault", "e2e", "browser")
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
        gc.enable()
        if torch := sys.modules.get("torch"):
            # Its threads spin until the others have a core: up to ten times the CPU.
            torch.set_num_threads(1)
            # Of support/, with torch: not of tests that need none.
            importlib.import_module("support.abandoned_workers").end_them_at_once()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Makes forks of a process that shares the tests cheap, once it has read all of them.

    Workers of loaders are forked of it, and it has 500 to 800 MB: 33 CPU-milliseconds each.
    """
    if hasattr(session.config, "workerinput"):
        gc.freeze()
        session.config.stash[_HUGE_PAGES] = HugePages()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Forks of the next test are cheap again."""
    pages = item.config.stash.get(_HUGE_PAGES, None)
    if pages is not None:
        pages.renew()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[object]) -> None:
    """Forks the processes that share the tests; what measures them is not forked with them."""
    if "COVERAGE_RUN" not in os.environ:
        # Some tests read it as they are imported.
        _make_gc_rare_in_what_is_started()
        gc.disable()
        forked_workers.fork(len(specs), config.args)
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadFileScheduling:
    """Keeps a file in one process, with its fixtures, if there are several (`pytest -n 2`)."""
    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("cacheprovider")
    group.addoption("--last-skipped", action="store_true", help="run only what was skipped last")


def pytest_configure(config: pytest.Config) -> None:
    """The process that hears of all tests remembers which were skipped."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Skipped(config), "last-skipped")


class Skipped:
    """Remembers the tests and files that were skipped, until they have run."""

    CACHE_KEY = "stoker/last_skipped"

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._names = self.names(config)

    @classmethod
    def names(cls, config: pytest.Config) -> set[str]:
        cache = getattr(config, "cache", None)
        return set(cache.get(cls.CACHE_KEY, [])) if cache else set()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._update(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped or report.when == "call":
            self._update(report)

    def pytest_sessionfinish(self) -> None:
        cache = getattr(self._config, "cache", None)
        if cache and not self._config.option.collectonly:
            cache.set(self.CACHE_KEY, sorted(self._names))

    def _update(self, report: pytest.CollectReport | pytest.TestReport) -> None:
        if report.skipped:
            self._names.add(report.nodeid)
        else:
            # Several processes tell of a file only that it was skipped, not that it no longer is.
            self._names -= {report.nodeid, report.nodeid.partition("::")[0]}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps what was skipped last, if asked for; slow tests come first where tests are shared."""
    if config.option.last_skipped:
        wanted = Skipped.names(config)
        chosen = [own for own in items if {own.nodeid, own.nodeid.partition("::")[0]} & wanted]
        config.hook.pytest_deselected(items=[own for own in items if own not in set(chosen)])
        items[:] = chosen
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
        files.append(file)
        if turn:
            files += itertools.islice(computing, _COMPUTING_PER_WAITING_FILE)
    return [*files, *computing]


_ROOM = pytest.StashKey[IO[str] | None]()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Runs tests that measure while no other test runs: they are marked `alone`.

    Everybody passes the gate into the room; who must be alone keeps the gate shut until the others
    have left. Who is followed by another of that kind, in its own process, stays. A test's time
    limit begins in the room.
    """
    worker = getattr(item.config, "workerinput", None)
    if worker is None:
        return (yield)
    room = item.config.stash.get(_ROOM, None) or _enter(item, run=worker["testrunuid"])
    try:
        return (yield)
    finally:
        if _is_alone(item) and nextitem is not None and _is_alone(nextitem):
            item.config.stash[_ROOM] = room
        else:
            item.config.stash[_ROOM] = None
            # Not only closed: processes that the test forked have it open as well.
            fcntl.flock(room, fcntl.LOCK_UN)
            room.close()


def _enter(item: pytest.Item, *, run: str) -> IO[str]:
    """Waits until the test may run; it may while what is returned is open."""
    folder = Path(tempfile.gettempdir())
    with (folder / f"{run}.gate").open("w") as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)
        room = (folder / f"{run}.room").open("w")
        fcntl.flock(room, fcntl.LOCK_EX if _is_alone(item) else fcntl.LOCK_SH)
        return room


def _is_alone(item: pytest.Item) -> bool:
    return item.get_closest_marker("alone") is not None


def pytest_unconfigure(config: pytest.Config) -> None:
    """The locks' files go with the run."""
    worker = getattr(config, "workerinput", None)
    for name in ("gate", "room") if worker else ():
        (Path(tempfile.gettempdir()) / f"{worker['testrunuid']}.{name}").unlink(missing_ok=True)
