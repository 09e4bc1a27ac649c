"""Whether a trainer and a data host fit together: the protocol, and what pickles depend on."""

import platform
from collections.abc import Mapping
from importlib import metadata

from stoker.feed.messages import PROTOCOL_VERSION, Open


def own_versions() -> dict[str, str]:
    """Versions of what the bytes of a batch or of a spec depend on."""
    versions = {"python": platform.python_version()}
    for name in ("torch", "numpy", "cloudpickle"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def compare_versions(message: Open, own: Mapping[str, str]) -> tuple[str, str]:
    """Why a trainer cannot be served, and what it should know; both may be empty."""
    if message.protocol != PROTOCOL_VERSION:
        return (
            f"the trainer speaks protocol {message.protocol}, this host {PROTOCOL_VERSION}: "
            "install the same stoker everywhere"
        ), ""
    theirs = message.versions
    if "python" in theirs and _minor(theirs["python"]) != _minor(own["python"]):
        return (
            f"the trainer runs Python {theirs['python']}, this host {own['python']}: functions "
            "cannot travel; use one image"
        ), ""
    differing = [
        f"{name} {theirs[name]} in the trainer, {version} here"
        for name, version in own.items()
        if name in theirs and theirs[name].partition("+")[0] != version.partition("+")[0]
    ]
    return "", "; ".join(differing)


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]
