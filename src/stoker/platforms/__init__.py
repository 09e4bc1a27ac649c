"""Platforms that run jobs, each with the interface of `base`.

Optional abilities and their methods:

                                                    local  sagemaker  kubernetes
finds the hosts of an earlier attempt  `resumed`      -        x          x
reports how busy its hosts are         `load_words`   -        x          -
leaves a job running as stoker ends    `leave`        -        -          x
has another form of a request          `manifest`     -        -          x
deletes what is left of a run's jobs   `clean_up`     -        -          x
recovers a run whose step was lost     `lost`         -        -          x

A new one is a package here, a name and a class below, and its name, facts and settings in
`records/platforms.py`; see docs/architecture.md.
"""

from typing import TYPE_CHECKING, cast

from stoker.errors import UsageError

if TYPE_CHECKING:
    from stoker.platforms.base import Platform
    from stoker.records import PlatformSettings

# Needed by `--help`, which must not import the records.
PLATFORMS = ("local", "sagemaker", "kubernetes")


def platform_named(name: str, *, settings: "PlatformSettings | None" = None) -> "Platform[object]":
    """Returns the platform of that name, each with its own type of requests."""
    match name:
        case "local":
            from stoker.platforms.local import LocalPlatform

            return cast("Platform[object]", LocalPlatform())
        case "sagemaker":
            from stoker.platforms.sagemaker import SageMakerPlatform

            sagemaker = settings.sagemaker if settings else None
            region = sagemaker.region if sagemaker else None
            return cast("Platform[object]", SageMakerPlatform(region=region))
        case "kubernetes":
            from stoker.platforms.kubernetes import KubernetesPlatform

            return cast("Platform[object]", KubernetesPlatform())
    raise UsageError(f"unknown platform {name}", fix="use one of " + ", ".join(PLATFORMS))
