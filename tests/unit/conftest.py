"""A unit test is pure: it starts no process."""

import os
import subprocess

import pytest


@pytest.fixture(autouse=True)
def _no_process_is_started(monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        pytest.fail("a unit test starts no process: those that do are in tests/contract")

    monkeypatch.setattr(os, "fork", refuse)
    monkeypatch.setattr(subprocess.Popen, "_execute_child", refuse)
