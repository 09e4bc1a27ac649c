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


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_ordinary_script_prints_what_it_prints_alone(name, cluster, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(HEAD + SCRIPTS[name])
    expected = run_script({}, script=str(script)).finish()
    fed = {"ORDINARY_IS_FED": "1", "STOKER_REPLACE_DATALOADER": "auto"}
    assert expected
    assert cluster.train(script=str(script), env=fed, workers=0).finish() == expected


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_ordinary_script_prints_the_same_under_a_plans_workers(name, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(HEAD + SCRIPTS[name])
    expected = run_script({}, script=str(script)).finish()
    planned = {
        "ORDINARY_IS_FED": "1",
        "STOKER_REPLACE_DATALOADER": "auto",
        "STOKER_WORKERS": json.dumps({"dnn": 2}),
    }
    assert expected
    assert run_script({}, env=planned, script=str(script)).finish() == expected
