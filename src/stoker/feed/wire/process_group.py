"""The process group of torch.distributed where a rank's stream is made on another host.

A forked worker inherits the group of its rank, and an `__iter__` may ask it for rank and number of
ranks, to divide a stream. On a data host nobody else is in the group: it answers these questions,
and the name of its backend, and refuses to communicate.

Accelerate asks the group only where it finds an accelerator: on a data host its `PartialState` is
told the rank.
"""

import os
import sys
from typing import NoReturn, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

# Facts of accelerate's PartialState that are the rank's; the device is the host's.
_FACTS = ("process_index", "num_processes", "local_process_index", "backend", "_cpu")


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


def accelerate_here() -> dict[str, object] | None:
    """Returns what accelerate says, or would say in a forked worker, of this process's rank.

    None: it is no rank among others.
    """
    state = _accelerate_facts()
    if state:
        facts = {name: state[name] for name in _FACTS}
        facts["distributed_type"] = str(getattr(state["distributed_type"], "value", ""))
        return facts if state["num_processes"] != 1 else None
    group = group_here()
    local_rank = os.environ.get("LOCAL_RANK", "")
    if group is None or not local_rank.isdecimal() or not torch.cuda.is_available():
        return None
    rank, size, backend = group
    facts = dict(zip(_FACTS, (rank, size, int(local_rank), backend, False), strict=True))
    return facts | {"distributed_type": "MULTI_GPU"}


def tell_accelerate(facts: dict[str, object] | None) -> None:
    """Has accelerate say of this process what `accelerate_here` returned on the rank.

    Args:
        facts: None: nothing is told, and accelerate finds out itself.
    """
    state = _accelerate_facts()
    if facts is None or state is None:
        return
    state.clear()
    state.update(facts, device=torch.device("cpu"), debug=False)
    module = sys.modules["accelerate.state"]
    state["distributed_type"] = module.DistributedType(facts["distributed_type"])


def _accelerate_facts() -> dict[str, object] | None:
    """Returns what all PartialStates of this process share; empty: there was none yet."""
    module = sys.modules.get("accelerate.state")
    if module is None:
        return None
    return cast("dict[str, object]", module.PartialState._shared_state)
