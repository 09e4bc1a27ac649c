"""Which rank this process is: of torch's process group where there is one, else by its variables.

Launchers inside a script (Lightning, torch.multiprocessing) set no RANK before they start a rank.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed

from stoker.settings import ProcessSettings

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A trainer process among the others.

    Attributes:
        leads_host: The first of its host.
        ranks_on_host: Trainer processes there; None where no variable says.
    """

    rank: int
    world_size: int
    leads_host: bool
    ranks_on_host: int | None


def place_of(settings: ProcessSettings) -> Place:
    """As far as it is known now."""
    rank, world_size = settings.rank, settings.world_size
    if has_group():
        rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    told = settings.processes_per_host or settings.local_world_size
    return Place(
        rank=rank,
        world_size=world_size,
        leads_host=settings.local_rank == 0,
        ranks_on_host=told if told > 1 or world_size == 1 else None,
    )


def has_group() -> bool:
    """Whether the script has made its process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def store() -> "Store | None":
    """The process group's store of notes, if there is one."""
    return torch.distributed.distributed_c10d._get_default_store() if has_group() else None
