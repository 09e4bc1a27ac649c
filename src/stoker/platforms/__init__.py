"""Platforms run jobs: each has a name and the interface of `base`.

What some can do beyond that, and the method that has it:

                                                        local  sagemaker  kubernetes
    finds the hosts of an earlier attempt  `resumed`      -        x          x
    says how busy its hosts are            `load_words`   -        x          -
    leaves a job running as stoker ends    `leave`        -        -          x
    has a form of its own for a request    `manifest`     -        -          x
    ends what is left of a run's jobs      `clean_up`     -        -          x
    recovers a run whose step was lost     `lost`         -        -          x

A new one is a package here, a name and a class below, and its name, facts and settings in
`records/platforms.py`; docs/architecture.md has the rest.
"""

from typing import TYPE_CHECKING, cast

from stoker.errors import UsageError

if TYPE_CHECKING:
    from stoker.platforms.base import Platform
    from stoker.records import PlatformSettings

# The help of verbs names them, which must not wait for the records to be imported.
PLATFORMS = ("local", "sagemaker", "kubernetes")


def platform_named(name: str, *, settings: "PlatformSettings | None" = None) -> "Platform[object]":
    """Returns the platform of that name; each plans and submits requests of a type of its own.

    Args:
        name: One of PLATFORMS.
        settings: Those of the workload, if there is one.

    Raises:
        UsageError: If there is none.
    """
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
    raise UsageError(
        f"platform {name} cannot run jobs yet", fix="known are: " + ", ".join(PLATFORMS)
    )
