"""What imports do at a process's end is no part of what the tests fork of it.

Torch takes back its operators, and makes a table of compile times: 50 CPU-milliseconds in each
forked process, four times as much as all else of its start and end.
"""

import atexit
import sys
import weakref


def forget() -> None:
    """Has processes that are forked from now on do at their end what they register themselves."""
    for finalizer in [*vars(weakref.finalize)["_registry"]]:
        finalizer.atexit = False
    if dynamo := sys.modules.get("torch._dynamo.utils"):
        atexit.unregister(dynamo.dump_compile_times)
