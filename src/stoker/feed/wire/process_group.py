"""The process group of torch.distributed where a rank's stream is made on another host.

A forked worker inherits the group of its rank, and an `__iter__` may ask it for rank and number of
ranks, to divide a stream. On a data host nobody else is in the group: it answers these questions,
and the name of its backend, and refuses to communicate.
"""

from typing import NoReturn

import torch.distributed as dist
from torch.distributed import distributed_c10d


def _refuse(*_: object, **__: object) -> NoReturn:
    raise RuntimeError(
        "a data worker on a data host cannot communicate with other ranks: let the training "
        "process do it, before its loader begins, and keep the result in the dataset"
    )


class AnsweringGroup(dist.ProcessGroup):
    """A group that knows its rank and its size."""

    allgather = allgather_coalesced = allreduce = allreduce_coalesced = _refuse
    alltoall = alltoall_base = barrier = broadcast = gather = monitored_barrier = _refuse
    recv = recv_anysource = reduce = reduce_scatter = scatter = send = _refuse
    _allgather_base = _reduce_scatter_base = _refuse


def group_here() -> tuple[int, int, str] | None:
    """Returns rank, number of ranks and backend of this process's group; None: it has none."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return dist.get_rank(), dist.get_world_size(), dist.get_backend()


def enter_group(value: tuple[int, int, str] | None) -> None:
    """Puts this process into a group that answers what `group_here` returned on the rank."""
    if value is None:
        return
    rank, size, backend = value
    group = AnsweringGroup(rank, size)  # type: ignore[call-arg]
    world = distributed_c10d._world
    # Without a store, by which it would find the others.
    world.pg_map[group] = (distributed_c10d.Backend(backend), None)  # type: ignore[assignment]
    world.pg_group_ranks[group] = {number: number for number in range(size)}
    world.default_pg = group
