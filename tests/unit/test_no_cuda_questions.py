"""Nothing asks whether there is a GPU before the script uses one.

The question starts the driver, and ranks that a script forks afterwards cannot use it any more.
"""

import json

import pytest
import torch
from torch.utils.data import DataLoader

from stoker.environment import from_environment
from stoker.feed.device_events import find_device
from stoker.profile.session import Session


@pytest.fixture(autouse=True)
def _no_question(monkeypatch):
    def asked() -> bool:
        raise AssertionError("ranks that are forked later cannot use CUDA any more")

    for name in ("is_available", "device_count"):
        monkeypatch.setattr(torch.cuda, name, asked)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)


def test_a_profile_begins_without_it(tmp_path):
    environ = {"STOKER_RUN": json.dumps({"profile": {}}), "STOKER_OUTPUT": str(tmp_path)}
    session = Session(from_environment(environ), folder=tmp_path, iterate=DataLoader.__iter__)
    assert session.is_here
    assert find_device() is None
