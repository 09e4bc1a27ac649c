"""Limits of a host that are below what it needs: one error that names the limit and the mend."""

import pytest

from stoker.host.limits import MIN_FILES, MIN_TASKS, HostLimits, limits_here, too_low


@pytest.mark.parametrize("role", ["dnn", "data"])
@pytest.mark.parametrize(
    ("limits", "words", "fix"),
    [
        (HostLimits(files=24), "at most 24 files", "ulimit -n"),
        (HostLimits(tasks=5, tasks_of="ulimit -u is 30"), "ulimit -u is 30", "ulimit -u"),
        (HostLimits(tasks=0, tasks_of="pids.max of the cgroup is 9"), "pids.max", "--pids-limit"),
        (HostLimits(tasks=-3, tasks_of="ulimit -u is 1"), "only 0 more", "ulimit -u"),
        (HostLimits(address_bytes=400 << 20), "limited to 400 MiB", "ulimit -v"),
    ],
)
def test_a_limit_that_is_too_low_is_named_with_its_mend(role, limits, words, fix):
    found = too_low(limits, role=role)
    assert found is not None
    assert words in found[0]
    assert fix in found[1]


@pytest.mark.parametrize("role", ["dnn", "data"])
def test_enough_is_enough(role):
    enough = HostLimits(files=MIN_FILES, tasks=MIN_TASKS[role], address_bytes=1 << 30)
    assert too_low(enough, role=role) is None
    assert too_low(HostLimits(), role=role) is None


def test_this_machine_has_enough():
    for role in MIN_TASKS:
        assert too_low(limits_here(), role=role) is None
