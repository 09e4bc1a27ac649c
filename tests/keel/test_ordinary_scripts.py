"""Small scripts of public style print the same with data hosts as alone."""

import pytest

from support.ordinary_scripts import HEAD, SCRIPTS
from support.same_scripts import holds_for, kept_alone, run_of

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

alone = pytest.fixture(scope="module")(kept_alone)


@pytest.fixture(scope="module")
def fed(tmp_path_factory):
    with run_of(tmp_path_factory, "dnn=local.c1:1", "data=local.c1:1:2") as run:
        yield run


@pytest.mark.parametrize("name", [*SCRIPTS][::2])
def test_an_ordinary_script_prints_what_it_prints_alone(name, fed, alone):
    holds_for(name, fed, alone, train=HEAD + SCRIPTS[name])
