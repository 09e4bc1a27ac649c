"""How many threads a trainer process receives on.

Of a sealed batch, libzmq's I/O thread reads (0.2 CPU-seconds a GB), the pump decrypts it to where
it will live (0.1); neither holds the interpreter's lock for it. So one I/O thread is the limit at
about 5 GB/s, the pump at 8. What comes by CURVE the I/O thread decrypts, too: 1.8 GB/s. In plain
text both do 0.13 where batches are pinned, and a second I/O thread would bring nothing. A data host
keeps to one I/O thread, which is chosen here: libzmq's own choice puts connections that are dialled
at the same time on the same one.
"""

import os
from collections import Counter
from collections.abc import Iterable

from stoker.records import FeedSettings

# The pump, which decrypts or copies, is the next limit.
MAX_AUTO = 4


def num_receive_threads(feed: FeedSettings, *, processes: int, cores: int | None = None) -> int:
    """libzmq's I/O threads of one trainer process; one that has nothing to do costs nothing.

    Args:
        processes: Trainer processes of this host, which share its cores.
        cores: Of this host; absent: those that this process may use.
    """
    if feed.receive_threads is not None:
        return feed.receive_threads
    if not feed.encrypt_batches:
        return 1
    # Half of the cores: the rest is the training's, and that of local workers.
    usable = len(os.sched_getaffinity(0)) if cores is None else cores
    return max(1, min(MAX_AUTO, usable // (2 * processes)))


def quietest(used: Iterable[int], *, num_threads: int) -> int:
    """The I/O thread for one more data host.

    Args:
        used: Those of the hosts that there are.
    """
    counts = Counter(used)
    return min(range(num_threads), key=lambda number: counts[number])
