"""Which values of modules a script has set, as its text shows, and what of them can be sent."""

import functools
import json
import logging
import re
import sys
import threading
from pathlib import Path

import pytest

from stoker.feed.wire import module_values
from stoker.feed.wire.import_hooks import when_imported
from stoker.feed.wire.module_values import ScriptFiles, set_plain_values
from stoker.feed.wire.process_settings import RANK_SETTINGS_BYTES, InheritedSettings, _packed_in
from stoker.feed.wire.python_settings import started_otherwise, unsent_handlers

LOCK = threading.Lock()
CONFIG = """
from types import SimpleNamespace
SIZE = 1
TABLE = {"a": 1}
class Limits:
    most = 1
options = SimpleNamespace(depth=1, inner=SimpleNamespace(x=1))
def join(text): return text
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Imports a module `cfg_of_test`, and returns what makes a script that is imported."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "cfg_of_test.py").write_text(CONFIG)
    names = ["cfg_of_test"]

    def run(text: str, name: str = "script_of_test") -> dict[str, object]:
        (tmp_path / f"{name}.py").write_text(text)
        names.append(name)
        __import__(name)
        return {
            each.name: each.value for each in ScriptFiles().values() if "cfg_of_test" in each.name
        }

    yield run
    for name in names:
        sys.modules.pop(name, None)


ASSIGNED = [
    ("import cfg_of_test\ncfg_of_test.SIZE = 5", {"cfg_of_test.SIZE": 5}),
    ("import cfg_of_test as c\nc.SIZE: int = 5", {"cfg_of_test.SIZE": 5}),
    ("import cfg_of_test\ncfg_of_test.SIZE += 2", {"cfg_of_test.SIZE": 3}),
    ("import cfg_of_test\ncfg_of_test.Limits.most = 7", {"cfg_of_test.Limits.most": 7}),
    ("from cfg_of_test import Limits\nLimits.most = 7", {"cfg_of_test.Limits.most": 7}),
    ("from cfg_of_test import options as o\no.depth = 9", {"cfg_of_test.options.depth": 9}),
    (
        "from cfg_of_test import (\n    SIZE,\n    options,\n)\noptions.inner.x = 'y'",
        {"cfg_of_test.options.inner.x": "y"},
    ),
    ("from cfg_of_test import TABLE\nTABLE['a'] = 3", {"cfg_of_test.TABLE['a']": 3}),
    (
        "def main():\n    import cfg_of_test\n    cfg_of_test.SIZE = (1, 2)\nmain()",
        {"cfg_of_test.SIZE": (1, 2)},
    ),
    ("import cfg_of_test\nif cfg_of_test.SIZE == 1: pass", {}),
    ("import cfg_of_test\nprint(cfg_of_test.SIZE)\nx = cfg_of_test.SIZE", {}),
    # Others than the module's: a local object of the same name, and names of one rank.
    ("from cfg_of_test import options\noptions = type('O', (), {})()\noptions.depth = 2", {}),
    ("import cfg_of_test\ncfg_of_test.LOCAL_RANK = 3\ncfg_of_test.device = 'cuda:3'", {}),
    ("class A:\n    def f(self):\n        self.cfg_of_test = 1\n", {}),
]


@pytest.mark.parametrize(("text", "found"), ASSIGNED)
def test_what_a_script_assigns_to_is_found_with_its_value(project, text, found):
    assert project(text) == found


def test_values_change_between_epochs_and_are_set_where_they_are_not(project):
    import cfg_of_test  # type: ignore[import-not-found]

    project("import cfg_of_test\ncfg_of_test.SIZE = 5")
    files = ScriptFiles()
    files.values()
    # Not as an assignment: this file's text is read, too.
    vars(cfg_of_test)["SIZE"] = 6
    (value,) = (each for each in files.values() if each.name == "cfg_of_test.SIZE")
    assert value.value == 6
    set_plain_values([("cfg_of_test", ["options", "depth"], False, "(1, 'a')")])
    set_plain_values([("cfg_of_test", ["TABLE", "a"], True, "{2}")])
    # What is not there is passed over.
    set_plain_values([("cfg_of_test", ["nothing", "a"], False, "1")])
    assert (cfg_of_test.options.depth, cfg_of_test.TABLE) == ((1, "a"), {"a": {2}})


def test_a_value_that_is_there_stays_the_same_object_and_none_is_set_where_nothing_is(project):
    import cfg_of_test

    project("import cfg_of_test")
    held = vars(cfg_of_test)["SIZE"] = [1, 2]
    set_plain_values([("cfg_of_test", ["SIZE"], False, "[1, 2]")])
    set_plain_values([("cfg_of_test", ["FRESH"], False, "None")])
    set_plain_values([("cfg_of_test", ["TABLE", "b"], True, "None")])
    assert cfg_of_test.SIZE is held
    assert (cfg_of_test.FRESH, cfg_of_test.TABLE) == (None, {"a": 1, "b": None})


def test_a_data_host_reads_no_texts_to_set_values_in_modules(project, monkeypatch):
    import cfg_of_test

    monkeypatch.setattr(module_values, "script_files", lambda: pytest.fail("texts are read"))
    shared = json.dumps({"values in modules": [["cfg_of_test", ["SIZE"], False, "7"]]})
    InheritedSettings(shared=shared).set()
    assert cfg_of_test.SIZE == 7


@pytest.mark.parametrize(
    ("value", "is_sent"),
    [
        (Path("/data"), True),
        (re.compile("a+"), True),
        (lambda text: text.upper(), True),
        (functools.partial(int, base=2), True),
        (LOCK, False),
        (object(), False),
        ([object()], False),
        (float("nan"), False),
        (functools.partial(print, (each for each in "ab")), False),
        (functools.partial(print, bytes(2 << 20)), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_small_objects_are_sent_and_others_are_named(project, monkeypatch, value, is_sent):
    project("import cfg_of_test\ncfg_of_test.SIZE = None")
    sys.modules["cfg_of_test"].SIZE = value
    files = ScriptFiles()
    monkeypatch.setattr(module_values, "script_files", lambda: files)
    sent = [".".join((module, *path)) for module, path, _, _ in module_values.object_values()]
    assert ("cfg_of_test.SIZE" in sent) is is_sent
    assert ("cfg_of_test.SIZE" in module_values.unsent_values()) is not is_sent


def test_an_action_waits_for_an_import_and_the_last_one_counts(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "late_of_test.py").write_text("X = 1\n")
    called = []
    when_imported("late_of_test", "x", lambda: called.append("former"))
    when_imported("late_of_test", "x", lambda: called.append(sys.modules["late_of_test"].X))
    assert called == []
    import late_of_test  # type: ignore[import-not-found]

    assert called == [late_of_test.X]
    when_imported("late_of_test", "x", lambda: called.append("at once"))
    assert called == [1, "at once"]
    del sys.modules["late_of_test"]


def test_what_is_only_of_this_process_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(logging.root, "handlers", [logging.StreamHandler(sys.stderr)])
    assert unsent_handlers() == []
    file = logging.FileHandler(tmp_path / "log", delay=True)
    monkeypatch.setattr(logging.root, "handlers", [file])
    assert unsent_handlers() == ["logging.FileHandler"]
    assert started_otherwise({"optimize": 2, "dev_mode": 1}) == ["python -OO", "python -X dev"]
    assert started_otherwise({"optimize": 0, "dev_mode": 0}) == []


def test_settings_of_ranks_have_a_bound_and_what_is_beyond_it_is_named():
    packed, too_long = _packed_in({"a": "x" * RANK_SETTINGS_BYTES, "b": 1}, RANK_SETTINGS_BYTES)
    assert (packed, too_long) == ('{"b": 1}', ["a"])
    assert len(InheritedSettings("", packed).packed_of_rank()) == RANK_SETTINGS_BYTES
