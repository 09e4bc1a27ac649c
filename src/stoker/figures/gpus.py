"""The load of a dnn host's GPUs, looked at once a second in a thread of the launcher.

A driver in trouble may block any call for good: the thread is then left. The leader takes the means
for each of its rows (`figures.intervals`), other hosts for each of their states.
"""

import threading
from collections.abc import Mapping, Sequence

import msgspec

from stoker.host.gpus import GpuReader, GpuState, GpusUnreadError, has_devices
from stoker.logs import EventName, Log
from stoker.units import known_mean

_LOOK_SECONDS = 1.0
# For a call of the driver that is under way.
_CLOSE_SECONDS = 3.0


class GpuLog:
    """The load of the GPUs that a command may use, read in a separate thread.

    Args:
        environ: Variables of the command.
    """

    def __init__(self, *, environ: Mapping[str, str], log: Log) -> None:
        self._environ = environ
        self._log = log
        self._looks: dict[int, list[GpuState]] = {}
        self._lock = threading.Lock()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpus", daemon=True)

    def take(self) -> tuple[GpuState, ...]:
        """Returns the means of each GPU's samples since the last call."""
        with self._lock:
            looks = self._looks
            self._looks = {}
        return tuple(_mean(states) for states in looks.values())

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, and leaves it if the driver hangs; may be called twice."""
        self._is_closing.set()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            reader = GpuReader(self._environ)
        except GpusUnreadError as err:
            # On a host without a GPU it is no news.
            if has_devices():
                self._log.event(EventName.GPU_LOAD_UNREAD, text=f"GPU load: {err}")
            return
        while not self._is_closing.wait(_LOOK_SECONDS):
            with self._lock:
                for state in reader.look():
                    self._looks.setdefault(state.index, []).append(state)
        reader.close()


def _mean(looks: Sequence[GpuState]) -> GpuState:
    return msgspec.structs.replace(
        looks[-1],
        utilization=known_mean(look.utilization for look in looks),
        memory_bytes=known_mean(look.memory_bytes for look in looks),
    )
