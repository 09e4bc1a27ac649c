"""Scripts of several files or processes, and others, print the same with data hosts as alone."""

import pytest

from support.ordinary_scripts import ARGUMENTS, COLD, HEAD, SCRIPTS, STARTING
from support.same_scripts import holds_for, kept_alone, run_of

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

alone = pytest.fixture(scope="module")(kept_alone)


@pytest.fixture(scope="module")
def fed(tmp_path_factory):
    with run_of(tmp_path_factory, "dnn=local.c1:1", "data=local.c1:1:2") as run:
        yield run


@pytest.mark.parametrize("name", STARTING)
def test_a_script_with_files_or_processes_prints_what_it_prints_alone(name, fed, alone):
    argv = ARGUMENTS.get(name, ["train.py"])
    holds_for(name, fed, alone, argv, is_cold=name in COLD, **STARTING[name])


# The others: test_ordinary_scripts.py.
@pytest.mark.parametrize("name", [*SCRIPTS][1::2])
def test_another_ordinary_script_prints_what_it_prints_alone(name, fed, alone):
    holds_for(name, fed, alone, train=HEAD + SCRIPTS[name])


PLANNED = [name for name in SCRIPTS if name in {*[*SCRIPTS][::14], "namedtuple samples"}]


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """A run without data hosts whose plan gives each rank two workers."""
    with run_of(tmp_path_factory, "dnn=local.c1:1:2") as run:
        yield run


@pytest.mark.parametrize("name", PLANNED)
def test_an_ordinary_script_prints_the_same_under_a_plans_workers(name, planned, alone):
    holds_for(name, planned, alone, has_data_hosts=False, train=HEAD + SCRIPTS[name])
