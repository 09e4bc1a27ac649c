import importlib.metadata
import json
import pickle
from types import SimpleNamespace

import pytest

from stoker.errors import MissingExtraError, UsageError, install_command


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (
            {"url": "file:///src/my%20stoker", "dir_info": {"editable": True}},
            "pip install -e '/src/my stoker[aws]'",
        ),
        ({"url": "file:///src/stoker", "dir_info": {}}, "pip install '/src/stoker[aws]'"),
        (
            {"url": "https://g/s.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "pip install 'stoker[aws] @ git+https://g/s.git@abc'",
        ),
        # A wheel that is gone meanwhile.
        (
            {"url": "file:///tmp/stoker.whl", "archive_info": {}},
            "pip install '.[aws]' in a checkout of stoker",
        ),
    ],
)
def test_the_command_installs_from_where_stoker_came(origin, command, monkeypatch):
    installed = SimpleNamespace(read_text=lambda _: json.dumps(origin))
    monkeypatch.setattr(importlib.metadata, "distribution", lambda _: installed)
    assert install_command("aws") == command


def test_a_missing_extra_is_an_import_error_that_travels_between_processes():
    err = MissingExtraError.of(ImportError(name="kfp"), extra="kubeflow")
    again = pickle.loads(pickle.dumps(err))
    assert isinstance(again, ImportError)
    assert isinstance(again, UsageError)
    assert again.what == "kfp is not installed"
    assert "[kubeflow]" in again.fix
