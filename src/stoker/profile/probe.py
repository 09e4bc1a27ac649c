"""The profiler inside a trainer process: replaces how DataLoaders are iterated."""

import atexit
import contextlib
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType

import msgspec
import torch.utils.data
from torch.optim.optimizer import register_optimizer_step_pre_hook

from stoker.environment import from_environment
from stoker.errors import UsageError
from stoker.feed.foreign_loaders import own_loaders
from stoker.feed.replace import note_makings
from stoker.profile.batches import watch_streams
from stoker.profile.file_guard import FileGuard
from stoker.profile.loader_phases import Iterate, Loader
from stoker.profile.lockstep import Board
from stoker.profile.phases import ProfileSession
from stoker.profile.user_files import own_folders

_ENOUGH_STEPS = 20


def install(dataloader_class: type[Loader]) -> None:
    """Makes every `iter(loader)` of this process part of the profile that STOKER_PROFILE asks for.

    `__iter__` of torch's class is replaced: `for` calls it on every loader, however imported, and
    subclasses override `_get_iterator` at most. Not without STOKER_PROFILE, nor twice.

    Raises:
        UsageError: If STOKER_OUTPUT, the folder for the results, is not set.
    """
    settings = from_environment()
    original: Iterate = dataloader_class.__iter__
    if settings.profile is None or hasattr(original, "stoker_session"):
        return
    if settings.output is None:
        raise UsageError(
            "a profile needs a folder for its results",
            where="variable STOKER_OUTPUT",
            fix="run the script through stoker profile",
        )
    folder = settings.output
    guard = FileGuard(own_folders(settings))
    guard.listen()
    watch_streams(folder)
    board = Board(folder)
    sessions = _Sessions(
        partial(ProfileSession, settings, folder=folder, board=board, iterate=original, guard=guard)
    )
    _replace(dataloader_class, sessions)
    _leave_word_of_steps(sessions, folder)


def install_subclass(subclass: type[Loader]) -> None:
    sessions = getattr(torch.utils.data.DataLoader.__iter__, "stoker_session", None)
    if isinstance(sessions, _Sessions) and not hasattr(subclass.__iter__, "stoker_session"):
        _replace(subclass, sessions)


class _Sessions:
    """The session of this process; a forked rank begins another one."""

    def __init__(self, new: Callable[[], ProfileSession]) -> None:
        self._new = new
        self.current = new()

    def for_epoch(self) -> ProfileSession | None:
        """None in a worker."""
        session = self.current
        if not session.is_here:
            # A loader's worker and what it starts; but a script may fork its ranks, too.
            if session.has_begun or torch.utils.data.get_worker_info() is not None:
                return None
            session = self.current = self._new()
        if not session.has_begun:
            atexit.register(session.at_exit)
            _listen(session)
        session.begin_epoch()
        return session


def _replace(cls: type[Loader], sessions: _Sessions) -> None:
    original: Iterate = cls.__iter__

    def iterate(loader: Loader) -> Iterator[object]:
        session = sessions.for_epoch()
        return original(loader) if session is None else ProfiledIterator(session, loader, original)

    iterate.stoker_session = sessions  # type: ignore[attr-defined]
    cls.__iter__ = iterate  # type: ignore[assignment]
    note_makings(cls)


def _leave_word_of_steps(sessions: _Sessions, folder: Path) -> None:
    """Writes which packages a script uses that trains without a loader known to the profiler."""
    count = itertools.count(1)

    def before_step(optimizer: object, arguments: object, keywords: object) -> None:
        # A hook costs a little in each step, so it goes when it is of no use.
        if sessions.current.has_begun:
            handle.remove()
        # 20 steps without a loader: this script trains on batches that the profile cannot see.
        elif next(count) == _ENOUGH_STEPS:
            handle.remove()
            # Now, not at the end: the command may be killed before.
            packages = {name.partition(".")[0] for name in sys.modules}
            word = {
                "packages": sorted(
                    packages | {"nvidia.dali", "torchdata.nodes"} & sys.modules.keys()
                ),
                "loaders": own_loaders(),
            }
            (folder / f"seen-{os.getpid()}.json").write_bytes(msgspec.json.encode(word))

    handle = register_optimizer_step_pre_hook(before_step)


class ProfiledIterator:
    """One epoch of a loader; to the script it is torch's iterator."""

    def __init__(self, session: ProfileSession, loader: Loader, original: Iterate) -> None:
        self._session = session
        self._loader = loader
        self._delivered = 0
        self._inner: Iterator[object] | None = None
        if session.is_replaying(loader):
            return
        # -1: before its first batch it cannot take the place of another loader.
        is_main = session.is_main(loader, delivered=-1)
        if is_main:
            session.end_epoch()
        began = time.monotonic()
        self._inner = original(loader)
        if is_main:
            session.opened(time.monotonic() - began)

    def __iter__(self) -> "ProfiledIterator":
        return self

    def __next__(self) -> object:
        session, loader = self._session, self._loader
        if not session.is_here:
            assert self._inner is not None
            batch = next(self._inner)
        elif not session.is_main(loader, delivered=self._delivered):
            assert self._inner is not None
            batch = session.other_batch(loader, self._inner, delivered=self._delivered)
        else:
            try:
                batch = session.next_batch(loader, self._inner)
            except StopIteration:
                session.end_epoch()
                raise
        self._delivered += 1
        return batch

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> object:
        """Returns attributes of torch's own iterator, which scripts read."""
        # A copy that is being made has no `_inner` yet: asking for it would recurse.
        if name.startswith("__") or name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)


def _listen(session: ProfileSession) -> None:
    """Makes Ctrl-C and SIGTERM end the profile at the next step, with a verdict if there is one."""
    if threading.current_thread() is not threading.main_thread():
        return
    # Python sets handlers in the main thread only; a loader may be read by another.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, partial(_handle, session, signal.getsignal(number)))


def _handle(
    session: ProfileSession, previous: object, number: int, frame: FrameType | None
) -> None:
    if session.is_here and session.has_verdict:
        session.interrupt()
        # A second signal ends the process as it would have without a profile.
        signal.signal(number, signal.SIG_DFL)
    elif callable(previous):
        previous(number, frame)
    elif previous is signal.SIG_DFL or previous is None:
        # The process ends here, without its exit handlers.
        if session.is_here:
            with contextlib.suppress(Exception):
                session.leave_word()
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
