"""The CPU quota of this process's control group, in vCPUs: v1 and v2, also of groups around it."""

from collections.abc import Iterator
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def cpu_quota(*, root: Path = CGROUP, membership: Path = MEMBERSHIP) -> float | None:
    """The smallest quota from this process's group up to the root; None: there is none.

    Args:
        root: Where control groups are mounted.
        membership: The kernel's list of the groups that this process is in.
    """
    quotas = [_quota_v2(folder) for folder in _folders_v2(root, membership)]
    quotas += [_quota_v1(folder) for folder in _folders_v1(root, membership)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _folders_v2(root: Path, membership: Path) -> Iterator[Path]:
    # With version 1 beside it, version 2 is mounted below.
    for top in (root, root / "unified"):
        for path in _paths(membership, controller=""):
            yield from _upwards(top, path)


def _folders_v1(root: Path, membership: Path) -> Iterator[Path]:
    for name in ("cpu", "cpu,cpuacct"):
        for path in _paths(membership, controller="cpu"):
            yield from _upwards(root / name, path)


def _paths(membership: Path, *, controller: str) -> list[str]:
    """The group of that controller (empty: of version 2), and the root."""
    found = []
    for line in _lines(membership):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            found.append(path)
    # In a container the path may be the host's, and the mount already its own group.
    return [*found, "/"]


def _upwards(top: Path, path: str) -> Iterator[Path]:
    parts = [part for part in path.split("/") if part not in ("", ".", "..")]
    for depth in range(len(parts), -1, -1):
        yield top.joinpath(*parts[:depth])


def _quota_v2(folder: Path) -> float | None:
    for line in _lines(folder / "cpu.max"):
        quota, _, period = line.partition(" ")
        if quota.isdigit() and period.strip().isdigit() and int(period) > 0:
            return int(quota) / int(period)
    return None


def _quota_v1(folder: Path) -> float | None:
    quota, period = _lines(folder / "cpu.cfs_quota_us"), _lines(folder / "cpu.cfs_period_us")
    if quota and period and quota[0].isdigit() and period[0].isdigit() and int(period[0]) > 0:
        return int(quota[0]) / int(period[0]) or None
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
