"""A rank of strategy smddp uses the process group backend that the launcher chose.

The library is imported, which makes the backend known to torch, and `init_process_group` without a
backend takes it. A backend that the script names is the script's decision; it is told on stderr.
"""

import functools
import importlib
import sys
from typing import Protocol, cast

from torch import distributed
from torch.distributed import distributed_c10d

from stoker.launch.strategies import smddp


class _InitProcessGroup(Protocol):
    def __call__(self, *values: object, **named: object) -> None: ...


def install(backend: str) -> None:
    """Makes `backend` (smddp, nccl or gloo) the one of torch.distributed in this process."""
    if backend == smddp.BACKEND:
        importlib.import_module(smddp.MODULE)
    init = cast(_InitProcessGroup, distributed.init_process_group)

    @functools.wraps(init)
    def init_process_group(
        named: str | None = None, *others: object, **named_others: object
    ) -> None:
        asked = named_others.pop("backend", named)
        if asked is not None and str(asked).lower() != backend:
            sys.stderr.write(
                f"stoker: the script asks for backend {asked}, the strategy for {backend}: call "
                "init_process_group without one, or with STOKER_BACKEND\n"
            )
        init(backend if asked is None else asked, *others, **named_others)

    for module in (distributed, distributed_c10d):
        # Not a plain assignment: to type checkers the two signatures differ.
        setattr(module, "init_process_group", init_process_group)  # noqa: B010
