"""SageMaker's data-parallel library, if this host has it, else its fallback.

The library is legacy: its last release (2.5.0, October 2024) is for PyTorch 2.4.1 and no type newer
than p4de. The launcher chooses the process group backend; ranks, which have torch, use it.
"""

import functools
import importlib
import subprocess
import sys
from collections.abc import Mapping
from typing import Protocol, cast

from stoker.errors import UsageError
from stoker.records import StrategySettings

BACKEND = "smddp"
MODULE = "smdistributed.dataparallel.torch.torch_smddp"
# Importing torch takes 5 to 20 s on a cold host.
PROBE_SECONDS = 120.0
_LONE_RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


def backend_of(
    strategy: StrategySettings, *, instance_type: str, host: str, environ: Mapping[str, str]
) -> tuple[str, str]:
    """Returns the process group backend to use (smddp, nccl or gloo), and why it is not smddp.

    Blocks while the library is tried.

    Raises:
        UsageError: If the library cannot be used, and there is no fallback.
    """
    refusal = strategy.refusal(instance_type=instance_type, processes_per_host=1)
    if refusal is None and strategy.fallback and instance_type:
        refusal = StrategySettings(name="smddp").refusal(
            instance_type=instance_type, processes_per_host=1
        )
    reason = refusal[0] if refusal and instance_type else _lack(environ)
    if not reason:
        return BACKEND, ""
    if strategy.fallback:
        return strategy.fallback, reason
    raise UsageError(
        reason,
        where=f"host {host}, strategy smddp",
        fix="use SageMaker's PyTorch image with the library, torchrun, or "
        "strategy: {name: smddp, fallback: nccl}",
    )


def _lack(environ: Mapping[str, str]) -> str:
    # Torch is imported only if the package exists.
    package = MODULE.partition(".")[0]
    found = f"importlib.util.find_spec({package!r})"
    code = f"import importlib.util; {found} or __import__({package!r}); import torch, {MODULE}"
    try:
        tried = subprocess.run(
            [sys.executable, "-P", "-c", code],
            env={**environ, **_LONE_RANK},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROBE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"importing SageMaker's data-parallel library took more than {PROBE_SECONDS:g} s"
    if tried.returncode == 0:
        return ""
    words = (tried.stderr.strip().splitlines() or [f"exit code {tried.returncode}"])[-1]
    return (
        f"cannot import SageMaker's data-parallel library: {words[:300]} (its last release, "
        "2.5.0, is for PyTorch 2.4.1)"
    )


class _InitProcessGroup(Protocol):
    def __call__(self, *values: object, **named: object) -> None: ...


def install(backend: str) -> None:
    """Makes `backend` (smddp, nccl or gloo) torch.distributed's default in this process, a rank.

    A backend that the script names wins, with a warning on stderr.
    """
    # Launchers, which have no torch, import this module, too.
    from torch import distributed
    from torch.distributed import distributed_c10d

    if backend == BACKEND:
        importlib.import_module(MODULE)
    init = cast(_InitProcessGroup, distributed.init_process_group)

    @functools.wraps(init)
    def init_process_group(
        named: str | None = None, *others: object, **named_others: object
    ) -> None:
        asked_backend = named_others.pop("backend", named)
        if asked_backend is not None and str(asked_backend).lower() != backend:
            sys.stderr.write(
                f"stoker: the script's backend is {asked_backend}, the strategy's {backend}: call "
                "init_process_group without one, or with STOKER_BACKEND\n"
            )
        init(backend if asked_backend is None else asked_backend, *others, **named_others)

    for module in (distributed, distributed_c10d):
        # Type checkers see different signatures.
        setattr(module, "init_process_group", init_process_group)  # noqa: B010
