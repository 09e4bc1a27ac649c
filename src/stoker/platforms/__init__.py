"""Where jobs run: one platform a name, all with the interface of `base`."""

from stoker.errors import UsageError
from stoker.platforms.local import LocalPlatform

PLATFORMS = ("local",)


def platform_named(name: str) -> LocalPlatform:
    """The platform of that name.

    Raises:
        UsageError: If there is none.
    """
    if name == "local":
        return LocalPlatform()
    raise UsageError(
        f"platform {name} cannot run jobs yet", fix="known are: " + ", ".join(PLATFORMS)
    )
