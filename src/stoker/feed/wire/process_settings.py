"""Settings of the script's process that a fork would inherit, as they are sent with a dataset."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Globals:
    """Settings of torch in the script's process other than its defaults: a fork would have them."""

    default_dtype: object = None
    collate_types: tuple[tuple[object, object], ...] = ()

    @classmethod
    def of_this_process(cls) -> "Globals":
        import torch
        from torch.utils.data._utils import collate

        own = collate.default_collate.__module__
        known = collate.default_collate_fn_map.items()
        theirs = tuple((kind, function) for kind, function in known if function.__module__ != own)
        dtype = torch.get_default_dtype()
        return cls(None if dtype == torch.float32 else dtype, theirs)

    def set(self) -> None:
        import torch
        from torch.utils.data._utils import collate

        if self.default_dtype is not None:
            torch.set_default_dtype(self.default_dtype)  # type: ignore[arg-type]
        collate.default_collate_fn_map.update(self.collate_types)  # type: ignore[arg-type]
