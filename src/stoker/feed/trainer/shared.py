"""The I/O thread and the threads that iterate share one lock, the sessions, and a wake-up."""

import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable

from stoker.feed.timeline import Timeline
from stoker.feed.trainer.connections import BatchReceiver
from stoker.feed.trainer.session import FeedSession
from stoker.logs import Log


class SharedState:
    """The state that the I/O thread of a feed and the threads that iterate share.

    Attributes:
        lock: Over the sessions and all that is theirs; held for microseconds.
        sessions: Name to session.
        failure: Ends every session, later ones too.
        wake_fd: An eventfd for the I/O thread's poll; see `sleeps`.
        receivers: Of batches, as long as anybody has them.
    """

    def __init__(self, *, timeline: Timeline, log: Log) -> None:
        self.lock = threading.Lock()
        self.sessions: dict[str, FeedSession] = {}
        self.failure: BaseException | None = None
        self.is_closing = False
        self.timeline = timeline
        self.log = log
        self.receivers: weakref.WeakSet[BatchReceiver] = weakref.WeakSet()
        self._pid = os.getpid()
        self._is_asleep = self._is_called = False
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Appended to by finalizers and threads, emptied by the I/O thread: atomic operations only.
        self._retired: deque[FeedSession] = deque()
        self._posted: deque[Callable[[], None]] = deque()

    def fail(self, error: BaseException) -> None:
        """Ends every session, also those to come; the first error counts."""
        with self.lock:
            self.failure = self.failure or error
            for session in self.sessions.values():
                session.fail(error)

    def wake(self) -> None:
        """Ends the I/O thread's wait, or its next one; safe in a finalizer, and after the end."""
        self._is_called = True
        if not self._is_asleep:
            # It looks at what it is called for before it sleeps.
            return
        self._is_asleep = False
        with contextlib.suppress(OSError):
            # Not in a forked child, where the number may be another file's.
            if self.wake_fd >= 0 and os.getpid() == self._pid:
                os.eventfd_write(self.wake_fd, 1)

    def sleeps(self) -> bool:
        """Notes that the I/O thread is about to poll; False if it was called, and must not wait."""
        # In this order: who calls between the two finds it asleep, and writes.
        self._is_asleep = True
        return not self._is_called

    def is_up(self, *, is_rung: bool) -> None:
        """Notes that the I/O thread has polled, before it looks at anything.

        Args:
            is_rung: `wake_fd` was readable.
        """
        self._is_asleep = False
        self._is_called = False
        if is_rung:
            os.eventfd_read(self.wake_fd)

    def post(self, action: Callable[[], None]) -> None:
        """Has the I/O thread run `action`."""
        self._posted.append(action)
        self.wake()

    def run_posted(self) -> None:
        """Runs what was posted; for the I/O thread."""
        while self._posted:
            self._posted.popleft()()

    def retire(self, session: FeedSession) -> None:
        """Has the I/O thread end the session of a loader that is gone; safe in a finalizer."""
        self._retired.append(session)
        self.wake()

    def take_retired(self) -> list[FeedSession]:
        """Returns the sessions to end, forgotten here; for the I/O thread, under the lock."""
        retired = []
        while self._retired:
            session = self._retired.popleft()
            if self.sessions.pop(session.name, None) is not None:
                retired.append(session)
        return retired

    def close(self) -> None:
        """Frees the descriptor, after the I/O thread's end; may be called twice."""
        descriptor, self.wake_fd = self.wake_fd, -1
        if descriptor >= 0:
            os.close(descriptor)
