"""What holds for all tests, and how `make test` divides them between processes."""

import fcntl
import signal
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler.loadscope import LoadScopeScheduling

from support.moto import aws_server, moto_process

__all__ = ["aws_server", "moto_process"]

# A shell starts what it puts in the background with SIGINT ignored, and children inherit that: the
# tests that press Ctrl-C would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine is no counterexample.
settings.register_profile("stoker", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("stoker")

# The longest first: what begins last must not be what lasts.
_ORDER = ("docker", "engine", "fault", "e2e", "browser")


class ByFile(LoadScopeScheduling):
    """A file stays in one process, with its fixtures; all Docker tests do, with their engine."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return "docker" if "/docker/" in path else path


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByFile:
    """Used where there are several processes: `pytest -n 2`."""
    config.option.loadscopereorder = False
    return ByFile(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Slow tests first, where several processes share them."""
    if hasattr(config, "workerinput"):
        items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    found = [turn for turn, name in enumerate(_ORDER) if item.get_closest_marker(name)]
    return min(found, default=len(_ORDER))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Tests that measure run while no other does: they are marked `alone`.

    Everybody passes the gate; who must be alone keeps it shut until the others have left. A test's
    time limit begins behind it.
    """
    worker = getattr(item.config, "workerinput", None)
    if worker is None:
        return (yield)
    is_alone = item.get_closest_marker("alone") is not None
    folder = Path(tempfile.gettempdir())
    with (
        (folder / f"{worker['testrunuid']}.gate").open("w") as gate,
        (folder / f"{worker['testrunuid']}.room").open("w") as room,
    ):
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        return (yield)


def pytest_unconfigure(config: pytest.Config) -> None:
    """The locks' files go with the run."""
    worker = getattr(config, "workerinput", None)
    for name in ("gate", "room") if worker else ():
        (Path(tempfile.gettempdir()) / f"{worker['testrunuid']}.{name}").unlink(missing_ok=True)
