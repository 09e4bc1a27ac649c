"""`--group ROLE=[TYPE:]HOSTS[:WORKERS]` is parsed, and groups are put into words."""

from collections.abc import Sequence

from stoker.errors import UsageError
from stoker.records import Group, Role, nearest

_ROLES: tuple[Role, ...] = ("dnn", "data")
_FIX = "for example --group dnn=1 --group data=ml.c7i.8xlarge:2:32"


def parse_groups(texts: Sequence[str], *, default_type: str | None) -> tuple[Group, ...]:
    """Returns the groups of a cluster, dnn first.

    Args:
        texts: `ROLE=[TYPE:]HOSTS[:WORKERS]` each; WORKERS are data workers of one host.
        default_type: Instance type where none is named.

    Raises:
        UsageError: Naming the text and what is wrong in it.
    """
    groups = [_parse(text, default_type=default_type) for text in texts]
    roles = [group.role for group in groups]
    for role in _ROLES:
        if roles.count(role) > 1:
            raise UsageError(f"--group {role}=... stands there twice", fix="name each role once")
    if "dnn" not in roles:
        raise UsageError("no --group dnn=...: somebody must train", fix=_FIX)
    return tuple(sorted(groups, key=lambda group: group.role != "dnn"))


def _parse(text: str, *, default_type: str | None) -> Group:
    name, equals, rest = text.partition("=")
    role = next((known for known in _ROLES if known == name), None)
    if not equals or role is None:
        hint = nearest(name, _ROLES) if equals else _FIX
        raise UsageError(f"--group {text} is not ROLE=[TYPE:]HOSTS[:WORKERS]", fix=hint)
    parts = rest.split(":")
    instance_type = default_type if _is_number(parts[0]) else parts.pop(0)
    if not instance_type:
        raise UsageError(f"--group {text} names no instance type", fix=_FIX)
    if not 1 <= len(parts) <= 2 or not all(_is_number(part) for part in parts):
        raise UsageError(f"--group {text}: expected [TYPE:]HOSTS[:WORKERS] behind =", fix=_FIX)
    hosts, workers = int(parts[0]), int(parts[1]) if len(parts) == 2 else None
    if hosts < 1:
        raise UsageError(
            f"--group {text}: a group has at least one host", fix="leave the group out"
        )
    if role == "data" and workers == 0:
        raise UsageError(
            f"--group {text}: data hosts without workers make nothing", fix="give them workers"
        )
    return Group(
        name=role, role=role, instance_type=instance_type, count=hosts, workers_per_host=workers
    )


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def describe(groups: Sequence[Group]) -> str:
    """Returns the groups in words: `1 x local.c1 + 2 x local.c1`."""
    return " + ".join(f"{group.count} x {group.instance_type}" for group in groups)
