"""Ranks of processes that a script itself has started, without torchrun's variables.

Without them each would count as rank 0, and overwrite the others' timeline and bad samples.
"""

import multiprocessing
import sys
from dataclasses import replace

from stoker.environment import ProcessSettings


def with_rank(settings: ProcessSettings) -> ProcessSettings:
    """Returns the settings of this process with its rank, where the script has set none.

    The rank is that of `torch.distributed`, of Lightning, which sets only LOCAL_RANK, or the number
    that `torch.multiprocessing.spawn` has given to a process.
    """
    if settings.rank:
        return settings
    if settings.local_rank:
        return replace(settings, rank=settings.local_rank)
    if settings.world_size > 1:
        return settings
    # Light: a script may not use torch.
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return replace(settings, rank=dist.get_rank(), world_size=dist.get_world_size())
    return replace(settings, rank=_spawned_number())


def _spawned_number() -> int:
    """Returns which process of `torch.multiprocessing.spawn` this is; 0: the first, or none."""
    process = multiprocessing.current_process()
    target = getattr(process, "_target", None)
    arguments: tuple[object, ...] = getattr(process, "_args", ())
    if getattr(target, "__module__", "") != "torch.multiprocessing.spawn" or len(arguments) < 2:
        return 0
    # It calls `_wrap(function, number, arguments, ...)`.
    number = arguments[1]
    return number if isinstance(number, int) else 0
