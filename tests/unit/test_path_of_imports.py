"""A path of a data host has the trainer's order."""

import os
import sys

import pytest

from stoker.feed.wire.import_path import ImportPath, arranged
from stoker.host.installed import INSTALLED, front_of, is_installed, modules_in

LIBRARY = os.path.dirname(os.__file__)
PACKAGES = f"{sys.prefix}/lib/python3/site-packages"


def test_the_hosts_installed_folders_stand_in_place_of_the_trainers(tmp_path):
    first, last = tmp_path / "first", tmp_path / "last"
    for folder in (first, last):
        folder.mkdir()
    entries = [str(first), str(tmp_path / "not here"), INSTALLED, str(last)]
    here = ["/of/host", LIBRARY, PACKAGES]
    expected = [str(first), LIBRARY, PACKAGES, str(last), "/of/host"]
    assert arranged(entries, here=here) == expected
    assert arranged(entries, here=expected) == expected


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (LIBRARY, True),
        (f"{LIBRARY}/lib-dynload", True),
        (PACKAGES, True),
        (f"{sys.base_prefix}/lib/python{sys.version_info.major}{sys.version_info.minor}.zip", True),
        ("/project", False),
        ("/project/vendor/site-packages", False),
        (f"{sys.prefix}/src/mine", False),
    ],
)
def test_a_folder_of_the_user_is_not_installed(path, expected):
    assert is_installed(path) is expected


def test_a_folder_without_a_module_hides_nothing(tmp_path):
    (tmp_path / "statistics.py").touch()
    (tmp_path / "queue").mkdir()
    (tmp_path / "queue" / "__init__.py").touch()
    # As wandb makes it, and checkpoints in a folder `torch`.
    (tmp_path / "wandb").mkdir()
    (tmp_path / "csv.txt").touch()
    names = ["statistics", "queue", "wandb", "csv", "torch"]
    assert modules_in([str(tmp_path)], names) == {"statistics", "queue"}
    assert modules_in([str(tmp_path / "none")], names) == set()


def test_what_hides_is_in_front_of_what_is_installed():
    assert front_of(["/a", INSTALLED, "/b"]) == ("/a",)
    assert front_of(["/a"]) == ("/a",)


def test_stokers_startup_folder_is_left_out_and_an_empty_entry_is_the_working_folder(
    tmp_path, monkeypatch
):
    from stoker.launch.strategies.start import STARTUP_DIR

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", str(STARTUP_DIR), LIBRARY, PACKAGES, "after"])
    monkeypatch.setenv("PYTHONPATH", f"{STARTUP_DIR}:more")
    found = ImportPath.of_this_process()
    assert found.entries == (str(tmp_path), INSTALLED, str(tmp_path / "after"))
    assert found.variable == (str(tmp_path / "more"),)
