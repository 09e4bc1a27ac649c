"""Threads of this process, those of native code included, which a forked child would not have.

Python counts its threads only. A pool of Rust, C++ or OpenMP holds locks as well: a child that is
forked meanwhile waits for them for ever.
"""

import os
import time

# A pool that is joined when its work is done is no reason not to fork.
SETTLE_SECONDS = 1.0
_LOOK_SECONDS = 0.01


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def num_lasting_threads(before: int) -> int:
    """Returns how many threads more than `before` last; waits for others to end, a second at most.

    Args:
        before: What `num_threads` returned before the code ran that may have started some.
    """
    deadline = time.monotonic() + SETTLE_SECONDS
    while (more := num_threads() - before) > 0 and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
    return max(0, more)
