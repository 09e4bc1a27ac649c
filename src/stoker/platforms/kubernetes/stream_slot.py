"""A stream that one thread reads and any other may close."""

import contextlib
import threading
from collections.abc import Iterator

from stoker.platforms.kubernetes.connection import Stream


class StreamSlot:
    """Holds the stream that is read now, if any."""

    def __init__(self) -> None:
        self._stream: Stream | None = None
        self._lock = threading.Lock()
        self._is_closed = False

    def close(self) -> None:
        """Closes what is read now and what would be read later; may be called twice."""
        with self._lock:
            self._is_closed = True
            if self._stream:
                self._stream.close()

    @contextlib.contextmanager
    def reading(self, stream: Stream) -> Iterator[Stream]:
        """Holds `stream` meanwhile, and releases it."""
        with self._lock:
            self._stream = stream
            if self._is_closed:
                stream.close()
        try:
            yield stream
        finally:
            with self._lock:
                self._stream = None
            stream.release()
