"""Open files, locks, loggers and the like in a dataset are made again in another process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.reopened_objects import ALL, LIBRARIES, REFUSED, REFUSED_OF_LIBRARIES, is_here

TESTS = str(Path(__file__).parents[1])


def named(*cases):
    libraries = LIBRARIES | REFUSED_OF_LIBRARIES
    names = [name for several in cases for name in several]
    return [name for name in names if name not in libraries or is_here(name)]


def run(action, folder, names):
    code = f"from support.reopened_objects import {action}; {action}()"
    words = [sys.executable, "-c", code, str(folder), *names]
    done = subprocess.run(words, capture_output=True, text=True, cwd=TESTS, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("objects")


@pytest.fixture(scope="module")
def facts(folder):
    """Facts of all objects, by the process that made them and by another one."""
    return run("pack_objects", folder, named(ALL)), run("unpack_objects", folder, named(ALL))


@pytest.mark.parametrize("name", named(ALL))
def test_it_is_the_same_in_another_process(facts, name):
    here, there = facts
    assert there[name] == here[name]


@pytest.fixture(scope="module")
def refusals(folder):
    return run("refuse_objects", folder, named(REFUSED, REFUSED_OF_LIBRARIES))


@pytest.mark.parametrize("name", named(REFUSED, REFUSED_OF_LIBRARIES))
def test_what_cannot_safely_be_made_again_is_refused_with_its_name(refusals, name):
    _, why = (REFUSED | REFUSED_OF_LIBRARIES)[name]
    assert refusals[name].startswith("ShippingError: cannot send dataset.held")
    assert why in refusals[name]


def test_two_ranks_give_a_dataset_with_open_files_one_name(folder, tmp_path):
    names = ["binary", "text", "zip", "memmap", "locks", "tree"]
    first, second = (run("digests_of_objects", folder, names) for _ in range(2))
    assert first == second
    assert len(first) == len(names)
