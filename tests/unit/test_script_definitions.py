"""What a script defines is sent to data hosts, also where other programs have the CPUs."""

import sys
import time
from types import ModuleType

import pytest

from stoker.feed.why_unfed import of_data_host
from stoker.feed.wire import definitions
from stoker.feed.wire.definitions import Rebuilding, script_of_this_process
from stoker.feed.wire.rebuilding import why_not_rebuilt

SCRIPT = """
from test_script_definitions import Waits

class First:
    waits = Waits()

def last():
    return 7
"""
WAIT_SECONDS = 0.6


class Waits:
    """Its pickling takes time and no CPU, as any has on a busy machine."""

    def __reduce__(self):
        time.sleep(WAIT_SECONDS)
        return Waits, ()


@pytest.fixture
def script(monkeypatch):
    module = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    exec(SCRIPT, vars(module))
    return module


def test_definitions_are_not_missing_because_time_has_passed(script):
    assert definitions._MAX_SECONDS < WAIT_SECONDS
    found = script_of_this_process(is_secret=lambda name: False)
    assert {"First", "Waits", "last"} <= found.definitions.keys()
    assert not found.left_out


def test_what_is_left_out_is_said_with_its_reason_where_a_batch_needs_it(script, monkeypatch):
    monkeypatch.setattr(definitions, "_MAX_SECONDS", 0.0)
    found = script_of_this_process(is_secret=lambda name: False)
    assert found.left_out["last"] == "the script defines too much to look at all of it"
    # As on a data host, where pickle's own error has no reason.
    there = ModuleType("__main__")
    vars(there)["__getattr__"] = Rebuilding(found, there).get
    monkeypatch.setitem(sys.modules, "__main__", there)
    error = AttributeError("Can't get attribute 'last' on <module '__main__' from 'train.py'>")
    why = why_not_rebuilt(error, of_data_host("algo-7"))
    assert "does not have last of the training script" in why.what
    assert "the script defines too much to look at all of it" in why.what
