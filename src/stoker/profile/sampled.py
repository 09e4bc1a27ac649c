"""Which functions a worker's CPU time goes to: looks at the stack, by the CPU clock."""

import random
import signal
import sysconfig
import time
from collections import Counter
from collections.abc import Mapping
from types import CodeType, FrameType

# The kernel's clock ticks every 1 to 10 ms. Looks at equal distances would fall on the same place
# of each sample where one takes a multiple of it.
_SHORTEST_SECONDS, _LONGEST_SECONDS = 0.001, 0.008
_MAX_DEPTH = 200


# Names of frames that only pass an item on.
_PASSING = frozenset(
    {"__getitem__", "__getitems__", "__iter__", "__next__", "<listcomp>", "<genexpr>", "<lambda>"}
)
# A function with more than this of a row's time is taken apart further.
_DOMINATES = 0.7

Path = tuple[str, ...]


class StackSampler:
    """Adds up CPU-seconds by place while it is entered; in the main thread only.

    A look comes when the CPU clock has moved on, and counts for what it moved since the look
    before: a long call into C, in which none can come, is charged to who called it.

    Args:
        marks: Name of a row for the code of the frame that the row is below.
        skipped: Code of frames below which nothing is counted: it is, elsewhere.

    Attributes:
        seconds: CPU-seconds by row and path: functions from the outermost on, of a library's only
            the one that the user's called.
        looks: Looks, by the same.
    """

    def __init__(
        self, marks: dict[CodeType, str], *, skipped: frozenset[CodeType] = frozenset()
    ) -> None:
        self.seconds: dict[tuple[str, Path], float] = {}
        self.looks: Counter[tuple[str, Path]] = Counter()
        self._marks = marks
        self._skipped = skipped
        self._before = 0.0
        # Not the script's: what it draws stays as it is.
        self._random = random.Random(0)
        self._libraries = _library_folders()

    def __enter__(self) -> "StackSampler":
        signal.signal(signal.SIGPROF, self._look)
        self._before = time.process_time()
        self._wind()
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        # One that is still on its way must not end the process.
        signal.signal(signal.SIGPROF, signal.SIG_IGN)

    def clear(self) -> None:
        """Forgets what was seen."""
        self.seconds.clear()
        self.looks.clear()
        self._before = time.process_time()

    def _look(self, number: int, frame: FrameType | None) -> None:
        now = time.process_time()
        passed, self._before = now - self._before, now
        found = self._place(frame)
        if found is not None:
            self.seconds[found] = self.seconds.get(found, 0.0) + passed
            self.looks[found] += 1
        self._wind()

    def _wind(self) -> None:
        pause = self._random.uniform(_SHORTEST_SECONDS, _LONGEST_SECONDS)
        signal.setitimer(signal.ITIMER_PROF, pause)

    def _place(self, frame: FrameType | None) -> tuple[str, Path] | None:
        below: list[FrameType] = []
        for _ in range(_MAX_DEPTH):
            if frame is None or frame.f_code in self._skipped:
                return None
            row = self._marks.get(frame.f_code)
            if row is not None:
                return (row, self._path(below[::-1])) if below else None
            below.append(frame)
            frame = frame.f_back
        return None

    def _path(self, frames: "list[FrameType]") -> Path:
        path: list[str] = []
        is_users = False
        for frame in frames:
            is_library = frame.f_code.co_filename.startswith(self._libraries)
            path.append(_name_of(frame))
            if is_library and is_users:
                break
            is_users = is_users or not is_library
        kept = [name for name in path if name.rpartition(".")[2] not in _PASSING]
        return tuple(kept or path[-1:])


def functions_of(seconds: Mapping[Path, float]) -> dict[str, list[Path]]:
    """The paths by the function that tells most: the outermost one, or, where that holds nearly
    all, with those that it calls: `outer > inner`.
    """
    return _expanded(seconds, depth=0)


def _expanded(seconds: Mapping[Path, float], *, depth: int) -> dict[str, list[Path]]:
    whole = sum(seconds.values())
    groups: dict[str, dict[Path, float]] = {}
    for path, spent in seconds.items():
        name = path[min(depth, len(path) - 1)]
        groups.setdefault(name, {})[path] = spent
    found: dict[str, list[Path]] = {}
    for name, paths in groups.items():
        is_all = sum(paths.values()) > _DOMINATES * whole
        if is_all and any(len(path) > depth + 1 for path in paths):
            parts = _expanded(paths, depth=depth + 1)
            inner = {
                part if part == name else f"{name} > {part}": own for part, own in parts.items()
            }
        else:
            inner = {name: list(paths)}
        for each, own in inner.items():
            found.setdefault(each, []).extend(own)
    return found


def _name_of(frame: FrameType) -> str:
    code = frame.f_code
    module = str(frame.f_globals.get("__name__", ""))
    name = code.co_qualname.replace(".<locals>", "")
    return name if module in ("", "__main__", "__mp_main__") else f"{module}.{name}"


def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    found = {
        paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib") if name in paths
    }
    return (*sorted(found), "<frozen")
