"""Small scripts of public style print the same with data hosts, or a plan's workers, as alone."""

import json

import pytest

from support.cluster import Cluster, run_script
from support.ordinary_scripts import HEAD, SCRIPTS

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cluster():
    with Cluster(agents=2, workers=1) as made:
        made.wait_for_agents()
        yield made


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Returns a function that writes a script, and runs it without a feed the first time."""
    ends = {}

    def of(name):
        if name not in ends:
            script = tmp_path_factory.mktemp("alone") / "train.py"
            script.write_text(HEAD + SCRIPTS[name])
            ends[name] = str(script), run_script({}, script=str(script)).finish()
        script, expected = ends[name]
        assert expected
        return script, expected

    return of


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_ordinary_script_prints_what_it_prints_alone(name, cluster, alone):
    script, expected = alone(name)
    fed = {"ORDINARY_IS_FED": "1", "STOKER_REPLACE_DATALOADER": "auto"}
    assert cluster.train(script=script, env=fed, workers=0).finish() == expected


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_ordinary_script_prints_the_same_under_a_plans_workers(name, alone):
    script, expected = alone(name)
    planned = {
        "ORDINARY_IS_FED": "1",
        "STOKER_REPLACE_DATALOADER": "auto",
        "STOKER_WORKERS": json.dumps({"dnn": 2}),
    }
    assert run_script({}, env=planned, script=script).finish() == expected
