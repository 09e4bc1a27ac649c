"""stoker keeps accelerators fed from CPU hosts.

A training script needs none of these names: `stoker train` feeds PyTorch's own loaders. They are
imported on first use, so that `import stoker` is cheap.

Where to find what in the source: a command begins in `cli/main.py`, a run's life is in `run`;
`profile` measures a step, `decide` chooses the hosts, `platforms` submits and follows jobs,
`launch` is the program on each host of a job, `feed` makes batches and brings them to trainers,
`report` draws. What they pass to each other is in `records`, what a command exits with in
`errors.py`.
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from stoker.feed.device import to_device as to_device
    from stoker.feed.loader import DataLoader as DataLoader
    from stoker.feed.remote import remote as remote
    from stoker.feed.timed import log_metrics as log_metrics
    from stoker.feed.timed import timed as timed

__all__ = ["DataLoader", "__version__", "log_metrics", "remote", "timed", "to_device"]

_HOMES = {
    "DataLoader": "stoker.feed.loader",
    "log_metrics": "stoker.feed.timed",
    "remote": "stoker.feed.remote",
    "timed": "stoker.feed.timed",
    "to_device": "stoker.feed.device",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from stoker.host.installed import imported

    value: object = getattr(imported(_HOMES[name]), name)
    # Kept for the next access, and as a sign of what the script imports (see feed/replace.py).
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
