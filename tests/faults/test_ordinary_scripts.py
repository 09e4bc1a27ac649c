"""Small scripts of public style print the same with data hosts, or a plan's workers, as alone."""

import json

import pytest

from support.cluster import Cluster, run_script
from support.ordinary_scripts import HEAD, SCRIPTS

# Whose batches or errors are of classes that only the script has.
OF_OWN_CLASSES = (
    "namedtuple samples",
    "enums and flags in batches",
    "tensor subclass",
    "an exception with two arguments",
)

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cluster():
    # One host: what a dataset needs is imported and unpickled once for each script.
    with Cluster(agents=1, workers=2) as made:
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


# Nothing travels to these workers: what they promise is in contract/test_loader_dropin.py.
PLANNED = {*list(SCRIPTS)[::9], *OF_OWN_CLASSES}


@pytest.mark.parametrize(
    "name",
    [name if name in PLANNED else pytest.param(name, marks=pytest.mark.soak) for name in SCRIPTS],
)
def test_an_ordinary_script_prints_the_same_under_a_plans_workers(name, alone):
    script, expected = alone(name)
    planned = {
        "ORDINARY_IS_FED": "1",
        "STOKER_REPLACE_DATALOADER": "auto",
        "STOKER_WORKERS": json.dumps({"dnn": 2}),
    }
    assert run_script({}, env=planned, script=script).finish() == expected


@pytest.mark.parametrize(
    "name",
    [
        name if name in OF_OWN_CLASSES else pytest.param(name, marks=pytest.mark.soak)
        for name in SCRIPTS
    ],
)
def test_an_ordinary_script_prints_the_same_with_watched_workers(name, alone):
    script, expected = alone(name)
    watched = {
        "ORDINARY_IS_FED": "1",
        "STOKER_REPLACE_DATALOADER": "auto",
        "STOKER_FEED": json.dumps({"sample_timeout_seconds": 60.0}),
    }
    assert run_script({}, env=watched, script=script).finish() == expected
