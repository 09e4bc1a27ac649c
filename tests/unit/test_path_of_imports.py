"""A path of a data host has the trainer's order."""

import os
import sys

import pytest

from stoker.feed.engine.loader_spec import arranged, entries_of
from stoker.host.installed import INSTALLED, is_installed

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
    [(LIBRARY, True), (PACKAGES, True), ("/project", False), (f"{sys.prefix}/src/mine", False)],
)
def test_a_folder_of_the_user_is_not_installed(path, expected):
    assert is_installed(path) is expected


def test_stokers_startup_folder_is_left_out_and_an_empty_entry_is_the_working_folder(
    tmp_path,
):
    from stoker.launch.job_environment import STARTUP_DIR

    path = ["", str(STARTUP_DIR), LIBRARY, PACKAGES, "after"]
    found = entries_of(path, str(tmp_path))
    assert found == [str(tmp_path), INSTALLED, str(tmp_path / "after")]
