import importlib.metadata
import json
import pickle
from types import SimpleNamespace

import pytest

from stoker.errors import MissingExtraError, UsageError, install_command

GIT = {"vcs_info": {"vcs": "git", "commit_id": "abc"}}


@pytest.mark.parametrize(
    ("url", "more", "command"),
    [
        ("file:///src/my%20stoker", {"dir_info": {"editable": True}}, "-e '/src/my stoker[aws]'"),
        ("file:///src/stoker", {"dir_info": {}}, "'/src/stoker[aws]'"),
        ("https://g/s.git", GIT, "'stoker[aws] @ git+https://g/s.git@abc'"),
        # A wheel that is gone meanwhile.
        ("file:///tmp/stoker.whl", {"archive_info": {}}, "'.[aws]' in a checkout of stoker"),
    ],
)
def test_the_command_installs_from_where_stoker_came(url, more, command, monkeypatch):
    installed = SimpleNamespace(read_text=lambda _: json.dumps({"url": url, **more}))
    monkeypatch.setattr(importlib.metadata, "distribution", lambda _: installed)
    assert install_command("aws") == f"pip install {command}"


def test_a_missing_extra_is_an_import_error_that_travels_between_processes():
    err = MissingExtraError.of(ImportError(name="kfp"), extra="kubeflow")
    again = pickle.loads(pickle.dumps(err))
    assert isinstance(again, ImportError)
    assert isinstance(again, UsageError)
    assert again.what == "kfp is not installed"
    assert "[kubeflow]" in again.fix
