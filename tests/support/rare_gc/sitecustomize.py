"""Makes the garbage collector rare in each Python that a test starts: a fifth of its CPU time.

Most of these processes are short: they import torch, or stoker, of which nothing is garbage, and
end. What they hold at their end is not searched for cycles either. No files depend on it.
"""

import atexit
import gc

gc.set_threshold(200_000, 10, 10)
atexit.register(gc.freeze)
