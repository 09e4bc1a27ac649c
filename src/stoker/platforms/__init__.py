"""Platforms that run jobs: each is a subclass of `base.Platform`, and its jobs are `base.Run`s.

Each has six methods: `plan`, `describe`, `manifest`, `submit`, and for jobs that outlive stoker
`resumed` and `clean_up`. A new one is added in three places: a module here with the
class; a line in `_CLASSES` below; and its name, facts and settings in `records/platforms.py`. See
docs/architecture.md.

Who may stop or end a running job: who follows it, where following fails or is interrupted
(`base.leave_or_stop`); the run itself (`launch`: nobody follows it, a hang, the budget, a lost
host); a profile's deadline (`profile/profiled_job.py`); and the stop of a pipeline's run.
"""

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

from stoker.errors import UsageError

if TYPE_CHECKING:
    from stoker.platforms.base import Platform
    from stoker.records import PlatformSettings

# By name: `--help` needs the names, and must not import the platforms or the records.
_CLASSES = MappingProxyType(
    {
        "local": "local.LocalPlatform",
        "sagemaker": "sagemaker.SageMakerPlatform",
        "kubernetes": "kubernetes.KubernetesPlatform",
    }
)
PLATFORMS = tuple(_CLASSES)


def platform_named(name: str, *, settings: "PlatformSettings | None" = None) -> "Platform[object]":
    """Returns the platform of that name, each with its own type of requests."""
    if name not in _CLASSES:
        raise UsageError(f"unknown platform {name}", fix="use one of " + ", ".join(PLATFORMS))
    module, _, class_name = _CLASSES[name].partition(".")
    platform: type[Platform[object]] = getattr(import_module(f"{__name__}.{module}"), class_name)
    return platform.of(settings)
