"""The feed as a trainer process has it: one client, one pump, any number of loaders."""

import atexit
import functools
import os
import secrets
import sys
import threading
import weakref
from collections.abc import Callable
from types import TracebackType

from stoker.errors import FeedError, UsageError
from stoker.feed import memory
from stoker.feed.process import LoaderBooks, Process
from stoker.feed.pump import Pump
from stoker.feed.security import Keys, read_token
from stoker.feed.session import Session
from stoker.feed.shared import Shared
from stoker.feed.streams import Streams
from stoker.logs import Log

# The pump's last words take milliseconds; ending local workers may take a little longer.
CLOSE_SECONDS = 8.0


class Feed:
    """Batches from the data group and from local workers, for the loaders of this process.

    Raises:
        UsageError: If the run's token is missing, or the coordinator's address is none.
    """

    def __init__(self, process: Process) -> None:
        settings = process.settings
        if settings.token_file is None:
            raise UsageError(
                "there is a data group, but no token to speak to it",
                where="variable STOKER_TOKEN_FILE",
                fix="start the training with `stoker train` or `stoker launch`",
            )
        host, _, port = (settings.coordinator or "").rpartition(":")
        if not host or not port.isdigit():
            raise UsageError(
                f"expected host:port, found {settings.coordinator!r}",
                where="variable STOKER_COORDINATOR",
            )
        keys = Keys.from_token(read_token(settings.token_file))
        log = Log(run=settings.run_id, host=settings.host)
        self._settings = settings
        self._pid = os.getpid()
        self.shared = Shared(timeline=process.timeline, log=log)
        pump = Pump(self.shared, settings, keys)
        self._thread = threading.Thread(target=pump.run, name="stoker-feed", daemon=True)
        self._thread.start()

    def session_for(
        self, books: LoaderBooks, *, new_streams: Callable[[int], Streams] | None = None
    ) -> Session:
        """A session of that loader which no pass uses now; a new one if there is none.

        Args:
            new_streams: Of an iterable dataset: the books of a new session, given its max_bytes.
        """
        shared = self.shared
        with shared.lock:
            for known in list(books.sessions):
                if not known.is_idle() or known.name not in shared.sessions:
                    continue
                if isinstance(known.schedule, Streams) and known.schedule.persists:
                    # Its processes go on where they are; a new iterator's begin, as torch's do.
                    books.sessions.remove(known)
                    shared.retire(known)
                    continue
                known.reserve()
                return known
            name = f"r{self._settings.rank}-l{books.number}-{secrets.token_hex(8)}"
            share = memory.max_bytes(self._settings.feed) // self._settings.local_world_size
            session = Session(
                name,
                lock=shared.lock,
                wake=shared.wake,
                max_bytes=share,
                streams=new_streams(share) if new_streams else None,
            )
            session.reserve()
            session.failure = shared.failure
            shared.sessions[name] = session
            books.sessions.append(session)
        weakref.finalize(books, shared.retire, session).atexit = False
        return session

    def close(self) -> None:
        """Says goodbye to the agents and ends the local workers; may be called twice.

        Blocks for at most CLOSE_SECONDS. Does nothing in a forked child.
        """
        if os.getpid() != self._pid:
            return
        self.shared.is_closing = True
        self.shared.wake()
        self._thread.join(CLOSE_SECONDS)
        if not self._thread.is_alive():
            self.shared.close()

    def __enter__(self) -> "Feed":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def feed_of(process: Process) -> Feed:
    """The feed of this process, opened at the first call, closed at its exit.

    A forked child gets one of its own: nothing of its parent's is used.
    """
    _show_errors(os.getpid())
    return connect(process)


def connect(process: Process) -> Feed:
    """The same for a process that may never ask for a batch: what it does is as it was."""
    return _feed(os.getpid(), process)


@functools.lru_cache(maxsize=1)
def _feed(pid: int, process: Process) -> Feed:
    feed = Feed(process)
    atexit.register(feed.close)
    return feed


@functools.lru_cache(maxsize=1)
def _show_errors(pid: int) -> None:
    sys.excepthook = functools.partial(_show_and_exit, sys.excepthook)


def _show_and_exit(
    show: Callable[[type[BaseException], BaseException, TracebackType | None], object],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """An uncaught error of the feed ends the script with its own exit code, not with 1."""
    show(kind, error, trace)
    if isinstance(error, FeedError):
        raise SystemExit(error.exit_code)
