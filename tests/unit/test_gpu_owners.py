"""Which GPUs of a host are a run's own: by the processes that the driver names."""

import pytest

from stoker.host.gpu_owners import GpuOwners
from stoker.host.gpus import Gpu

FIRST, SECOND, THIRD = (Gpu(index=n, uuid=f"GPU-{n}") for n in range(3))
GPUS = (FIRST, SECOND, THIRD)
OWN, THEIRS, UNSEEN = 100, 200, 300
SEEN = {OWN: True, THEIRS: False}


class Driver:
    """Names these processes; None: it refuses the question."""

    def __init__(self, *pids):
        self.gpus = GPUS
        self.pids = dict(zip(GPUS, pids, strict=True))
        self.asked = []

    def pids_on(self, gpu):
        self.asked.append(gpu)
        return self.pids[gpu]


def owners(*pids):
    found = GpuOwners(is_own=SEEN.get)
    driver = Driver(*pids)
    found.look(driver)
    return found, driver


@pytest.mark.parametrize(
    ("pids", "own", "is_known"),
    [
        (((THEIRS,), (OWN,), ()), (SECOND,), True),
        (((THEIRS, OWN), (), ()), (FIRST,), True),
        (((OWN,), (OWN,), (THEIRS,)), (FIRST, SECOND), True),
        # Whose the idle ones are is no question: nobody computes there.
        (((THEIRS,), (), ()), (SECOND, THIRD), True),
        (((THEIRS,), (THEIRS,), (THEIRS,)), (), True),
        (((), (), ()), GPUS, False),
        ((None, None, None), GPUS, False),
        # The host's pids, in a container.
        (((UNSEEN,), (UNSEEN,), ()), GPUS, False),
        (((UNSEEN,), (THEIRS,), ()), (FIRST, THIRD), True),
    ],
)
def test_the_gpus_of_a_run_are_those_that_its_processes_use(pids, own, is_known):
    found, _ = owners(*pids)
    assert (found.of_run(GPUS), found.is_known) == (own, is_known)


def test_a_gpu_stays_a_runs_own_when_its_process_has_ended_and_is_asked_for_no_more():
    found, driver = owners((OWN,), (THEIRS,), ())
    driver.pids[FIRST] = ()
    driver.asked.clear()
    found.look(driver)
    assert found.of_run(GPUS) == (FIRST,)
    assert driver.asked == [SECOND, THIRD]


def test_a_run_that_comes_to_a_gpu_later_has_it():
    found, driver = owners((THEIRS,), (THEIRS,), ())
    driver.pids[SECOND] = (THEIRS, OWN)
    found.look(driver)
    assert found.of_run(GPUS) == (SECOND,)


def test_a_process_is_looked_up_once():
    looked_up = []

    def is_own(pid):
        looked_up.append(pid)
        return False

    found = GpuOwners(is_own=is_own)
    driver = Driver((THEIRS,), (), ())
    for _ in range(5):
        found.look(driver)
    assert looked_up == [THEIRS]
