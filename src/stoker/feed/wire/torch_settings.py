"""Settings of torch that forked workers inherit."""

import dataclasses
from typing import TYPE_CHECKING

from stoker.feed.wire.import_hooks import when_imported
from stoker.feed.wire.inherited import InheritedObjects, setting

if TYPE_CHECKING:
    import torch

# Contexts that are entered for the rest of a worker's life.
_ENTERED: list[object] = []
# Torch's own, in a fresh process.
_PRINTED = {
    "precision": 4,
    "threshold": 1000,
    "edgeitems": 3,
    "linewidth": 80,
    "sci_mode": None,
}


def unsent_device() -> list[str]:
    """Returns the default device in words, unless it is the processor."""
    import torch

    device = torch.get_default_device()
    return [] if device.type == "cpu" else [f"torch.set_default_device('{device}')"]


def _dtype(name: str) -> "torch.dtype":
    import torch

    dtype: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return dtype


def _default_dtype() -> object:
    import torch

    return str(torch.get_default_dtype())


def _set_default_dtype(name: str) -> None:
    import torch

    torch.set_default_dtype(_dtype(name))


def _group() -> object:
    # It imports torch.
    from stoker.feed.wire.process_group import group_here

    return group_here()


def _enter_group(value: tuple[int, int, str] | None) -> None:
    from stoker.feed.wire.process_group import enter_group

    enter_group(value)


def _accelerate() -> object:
    from stoker.feed.wire.process_group import accelerate_here

    return accelerate_here()


def _tell_accelerate(facts: dict[str, object] | None) -> None:
    from stoker.feed.wire.process_group import tell_accelerate

    # A stream may import it first in its `__iter__`.
    when_imported("accelerate.state", "PartialState", lambda: tell_accelerate(facts))


def _deterministic() -> object:
    import torch

    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    return [torch.are_deterministic_algorithms_enabled(), warns, fills]


def _set_deterministic(value: list[bool]) -> None:
    import torch

    is_on, warns, fills = value
    torch.use_deterministic_algorithms(is_on, warn_only=warns)
    torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]


def _grad_mode() -> object:
    import torch

    return [torch.is_grad_enabled(), torch.is_inference_mode_enabled()]


def _set_grad_mode(value: list[bool]) -> None:
    import torch

    has_gradients, infers = value
    if infers and not torch.is_inference_mode_enabled():
        context = torch.inference_mode()
        context.__enter__()
        _ENTERED.append(context)
    torch._C._set_grad_enabled(has_gradients)


def _autocast() -> object:
    import torch

    return [torch.is_autocast_enabled("cpu"), str(torch.get_autocast_dtype("cpu"))]


def _set_autocast(value: tuple[bool, str]) -> None:
    import torch

    is_on, dtype = value
    torch.set_autocast_enabled("cpu", is_on)
    torch.set_autocast_dtype("cpu", _dtype(dtype))


def _matmul_precision() -> object:
    import torch

    return torch.get_float32_matmul_precision()


def _set_matmul_precision(value: str) -> None:
    import torch

    torch.set_float32_matmul_precision(value)


def _mkldnn() -> object:
    import torch

    return torch._C._get_mkldnn_enabled()


def _set_mkldnn(is_on: bool) -> None:
    import torch

    torch._C._set_mkldnn_enabled(is_on)


def _flushes_denormal() -> object:
    # Torch cannot be asked, and it is the processor's state for all arithmetic of the thread.
    smallest = float("5e-324")
    return smallest * 1.0 == 0.0


def _set_flush_denormal(is_on: bool) -> None:
    import torch

    torch.set_flush_denormal(is_on)


def _warns_always() -> object:
    import torch

    return torch.is_warn_always_enabled()


def _set_warn_always(is_on: bool) -> None:
    import torch

    torch.set_warn_always(is_on)


def _anomaly() -> object:
    import torch

    return [torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()]


def _set_anomaly(value: list[bool]) -> None:
    import torch

    is_on, checks_nan = value
    torch.set_anomaly_enabled(is_on, checks_nan)


def _print_options() -> object:
    from torch import _tensor_str

    return dataclasses.asdict(_tensor_str.PRINT_OPTS)


def _set_print_options(options: dict[str, object]) -> None:
    from torch import _tensor_str

    for name, option in options.items():
        setattr(_tensor_str.PRINT_OPTS, name, option)


TORCH_SETTINGS = (
    setting(
        "torch.distributed's rank and number of ranks",
        _group,
        _enter_group,
        module="torch.distributed",
        default=None,
        is_of_streams=True,
    ),
    setting(
        "accelerate's PartialState",
        _accelerate,
        _tell_accelerate,
        module="torch.distributed",
        default=None,
        is_of_streams=True,
    ),
    setting(
        "torch.set_default_dtype",
        _default_dtype,
        _set_default_dtype,
        module="torch",
        default="torch.float32",
    ),
    setting(
        "torch.use_deterministic_algorithms",
        _deterministic,
        _set_deterministic,
        module="torch",
        default=[False, False, True],
    ),
    setting(
        "torch.no_grad, torch.inference_mode",
        _grad_mode,
        _set_grad_mode,
        module="torch",
        default=[True, False],
    ),
    setting(
        "torch.autocast('cpu')",
        _autocast,
        _set_autocast,
        module="torch",
        default=[False, "torch.bfloat16"],
    ),
    setting(
        "torch.set_float32_matmul_precision",
        _matmul_precision,
        _set_matmul_precision,
        module="torch",
        default="highest",
    ),
    setting("torch.backends.mkldnn", _mkldnn, _set_mkldnn, module="torch", default=True),
    setting(
        "torch.set_flush_denormal",
        _flushes_denormal,
        _set_flush_denormal,
        module="torch",
        default=False,
    ),
    setting(
        "torch.set_warn_always", _warns_always, _set_warn_always, module="torch", default=False
    ),
    setting(
        "torch.autograd.set_detect_anomaly",
        _anomaly,
        _set_anomaly,
        module="torch",
        default=[False, True],
    ),
    setting(
        "torch.set_printoptions",
        _print_options,
        _set_print_options,
        module="torch",
        default=_PRINTED,
        differs_by_rank=True,
    ),
)


def _collate_types() -> object:
    from torch.utils.data._utils import collate

    # What torch registers is there in every process.
    torchs = collate.default_collate.__module__
    registered = list(collate.default_collate_fn_map.items())
    return [(kind, function) for kind, function in registered if function.__module__ != torchs]


def _add_collate_types(value: object) -> None:
    from torch.utils.data._utils import collate

    collate.default_collate_fn_map.update(value)  # type: ignore[call-overload]


def _safe_globals() -> object:
    import torch

    listed = torch.serialization.get_safe_globals()
    # Torch adds further ones; a class may stand with another name.
    return [
        entry for entry in listed if not _is_torchs(entry[0] if isinstance(entry, tuple) else entry)
    ]


def _is_torchs(found: object) -> bool:
    return str(getattr(found, "__module__", "")).partition(".")[0] == "torch"


def _add_safe_globals(value: object) -> None:
    import torch

    torch.serialization.add_safe_globals(value)  # type: ignore[arg-type]


TORCH_OBJECTS = (
    InheritedObjects(
        name="default_collate_fn_map",
        module="torch",
        read=_collate_types,
        write=_add_collate_types,
    ),
    InheritedObjects(
        name="torch.serialization.add_safe_globals",
        module="torch",
        read=_safe_globals,
        write=_add_safe_globals,
    ),
)
