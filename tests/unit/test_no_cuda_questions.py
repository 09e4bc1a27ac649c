"""Nothing asks whether there is a GPU before the script uses one.

The question starts the driver, and ranks that a script forks afterwards cannot use it any more.
"""

import json

import pytest
import torch
from torch.utils.data import DataLoader

from stoker.environment import from_environment
from stoker.feed.device_events import find_device
from stoker.feed.wire import shared_memory
from stoker.profile import batches
from stoker.profile.file_guard import FileGuard
from stoker.profile.lockstep import LEAD_STEPS, LEAD_STEPS_ON_DEVICE, Board
from stoker.profile.phases import ProfileSession
from stoker.profile.steps import StepClock
from support.device_double import DeviceDouble


@pytest.fixture(autouse=True)
def _no_question(monkeypatch):
    def asked() -> bool:
        raise AssertionError("ranks that are forked later cannot use CUDA any more")

    for name in ("is_available", "device_count"):
        monkeypatch.setattr(torch.cuda, name, asked)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)


def session(folder, **variables):
    environ = {"STOKER_PROFILE": json.dumps({}), "STOKER_OUTPUT": str(folder)} | variables
    return ProfileSession(
        from_environment(environ),
        folder=folder,
        board=Board(folder),
        iterate=DataLoader.__iter__,
        guard=FileGuard(()),
    )


def test_a_profile_begins_without_it(tmp_path):
    assert not session(tmp_path).has_begun
    assert not batches.is_cuda_used()
    assert find_device() is None


def test_nor_does_a_dataset_that_is_sent():
    assert not shared_memory._is_pinned(torch.zeros(4))


def test_ranks_change_phase_later_where_a_device_runs_behind_them(tmp_path):
    ranks = {"RANK": "0", "WORLD_SIZE": "2"}
    on_host, on_device = (session(tmp_path, **ranks) for _ in range(2))
    on_device._reading.clock = StepClock(find=DeviceDouble)
    on_device._reading.clock.mark()
    for rank, lead in ((on_host, LEAD_STEPS), (on_device, LEAD_STEPS_ON_DEVICE)):
        rank._agreement.propose("accelerator", at_step=100)
        assert not rank._agreement.is_due("accelerator", at_step=100 + lead - 1)
        assert rank._agreement.is_due("accelerator", at_step=100 + lead)
