"""Reinforcement learning runs for real: simulators on the data group, by `engine: command`."""

import json
import re

import pytest

from support.engine_python import REPO, EngineRun, python_with

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

EXAMPLE = REPO / "examples" / "rl_simulators"


@pytest.fixture
def engine_run(tmp_path):
    python = python_with("gymnasium", variable="STOKER_ENGINE_PYTHON_RAY", venv=".venv-ray")
    return EngineRun(python, tmp_path)


SIMULATOR = [
    *("python", str(EXAMPLE / "simulator.py"), "--listen={address:simulator}"),
    "--secret-file={secret_file}",
]


def trained(engine_run, command, simulator, *, data):
    return engine_run.train(
        REPO / "configs" / "rl-simulators.yaml",
        groups=("dnn=local.c1:1", f"data=local.c1:{data}"),
        settings=(f"command={json.dumps(command)}", f"engine.data.command={json.dumps(simulator)}"),
    )


def test_a_policy_learns_from_the_simulators_of_two_data_hosts(engine_run):
    simulator = [*SIMULATOR, "--processes={workers}"]
    learner = ["python", str(EXAMPLE / "learner.py"), "--updates", "40"]
    training = trained(engine_run, learner, simulator, data=2)
    assert "2 simulators, on 127.0.0.1:" in engine_run.output
    found = re.findall(r"update .* return ([\d.]+)", engine_run.output)
    returns = [*map(float, found)]
    # Who acts at random keeps the pole up for 20 steps or so, of 500.
    assert len(returns) == 4
    assert training.metrics["return"] == pytest.approx(returns[-1], abs=0.1)
    assert returns[-1] > max(150, 1.5 * returns[0])
    # A step is an update; waiting is for trajectories.
    assert training.measured.steps == 40
    assert training.measured.samples_per_second > 0
