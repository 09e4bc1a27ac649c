"""Looks at how fast the CPU itself is: one and the same short computation, again and again.

A virtual machine that shares its cores with others becomes slower and faster without any sign in
/proc: no steal time, no other program. What is measured then holds for those seconds only.
"""

import hashlib
import time
from collections.abc import Sequence
from statistics import fmean, variance

LOOK_SECONDS = 0.1
# About 0.2 ms, outside of the interpreter lock: 0.2 % of a vCPU.
_ROUNDS = 500
# Looks are averaged over so many, which is a second: what differs within it averages out anyway.
_LOOKS_OF_A_WINDOW = 10
_LEAST_WINDOWS = 4


def look() -> float:
    """CPU-seconds of the computation, now."""
    began = time.thread_time()
    hashlib.pbkdf2_hmac("sha256", b"stoker", b"stoker", _ROUNDS)
    return time.thread_time() - began


def speed_spread(looks: Sequence[float]) -> float | None:
    """The standard deviation of the CPU's speed from second to second, as a share of its mean.

    Looks differ by chance as well, for instance by what runs on a core's other hyper-thread at that
    moment. What they differ by within a second is taken off the difference between seconds, as in
    an analysis of variance.

    Args:
        looks: CPU-seconds each, one every LOOK_SECONDS, in order.

    Returns:
        None where there are too few looks to say.
    """
    size = _LOOKS_OF_A_WINDOW
    windows = [looks[at : at + size] for at in range(0, len(looks) - size + 1, size)]
    if len(windows) < _LEAST_WINDOWS:
        return None
    mean = fmean(looks)
    between = variance([fmean(window) for window in windows])
    by_chance = fmean([variance(window) for window in windows]) / size
    return float(max(0.0, between - by_chance) ** 0.5 / mean)
