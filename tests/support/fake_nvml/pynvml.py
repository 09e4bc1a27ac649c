"""The package's name, for a process whose PYTHONPATH begins with this folder."""

from support.nvml import from_environment

_double = from_environment()
globals().update(
    {name: getattr(_double, name) for name in dir(_double) if name[:4].lower() == "nvml"}
)
