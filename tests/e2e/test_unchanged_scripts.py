"""Scripts as users have them go through `stoker run` without a change of theirs.

Each is fed by a data host, loses what it loses alone under stoker, and has one answer to the
question whether it passed. What it waits for is a matter of time: see test_decide_published.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

from stoker.records import Evaluation, Profile, Training, read_json
from support.command import Done, process
from support.local_job import assert_nothing_left
from support.unchanged import BATCH_SIZE, PLAIN, STREAM, Script, batches_of_data_hosts, losses

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

TIMEOUT_SECONDS = 300
SCRIPTS_OF_USERS = [
    PLAIN,
    STREAM,
    Script(name="loader_each_epoch"),
    Script(name="accelerated", needs="accelerate"),
    Script(name="torchrun_ddp", launcher=("torchrun", "--nproc-per-node", "2"), ranks=2),
    # It counts the steps of an epoch itself.
    pytest.param(
        Script(name="hf_trainer", needs="transformers", epochs=8),
        marks=pytest.mark.library,
        id="hf_trainer",
    ),
]
WORKLOAD = """\
name: unchanged
command: {command}
cluster: {{dnn: {{instance_type: local.c1, count: 1}}}}
training: {{epochs: {epochs}, samples_per_epoch: {samples}, global_batch_size: {batch}}}
constraints: {{objective: time, max_data_hosts: 1, allowed_instance_types: [local.c1]}}
profile: {{budget_seconds: 5}}
"""


# Of the Python that runs the tests: torchrun is next to it.
ENVIRON = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def project(folder: Path, script: Script) -> None:
    script.write(folder)
    sizes = {"samples": 384 * script.ranks, "batch": BATCH_SIZE * script.ranks}
    command = json.dumps(script.command)
    text = WORKLOAD.format(command=command, epochs=script.epochs, **sizes)
    (folder / "workload.yaml").write_text(text)


def printed(run: Path) -> list[str]:
    (log,) = (run / "logs").glob("dnn-*.log")
    return losses(log.read_text())


def answers(done: Done, run: Path, folder: Path) -> dict[str, bool]:
    told = read_json(run / "evaluation.json", Evaluation)
    judged = process("step", "gate", "--gate-of", str(run / "evaluation.json"), cwd=folder)
    page = (run / "report.html").read_text()
    words = [line for line in done.stderr.splitlines() if line.startswith("evaluate")][-1]
    return {
        "terminal": done.returncode == 0 and "no gate" in words and "fail" not in words.lower(),
        "report": "gate failed" not in page and "as good as asked" not in page,
        "evaluation.json": told.passed and not told.reason,
        "the pipeline's gate": judged.returncode == 0,
        "training.json": read_json(run / "training.json", Training).status == "succeeded",
    }


@pytest.mark.parametrize("script", SCRIPTS_OF_USERS, ids=lambda script: script.name)
def test_an_unchanged_script_is_fed_through_the_whole_chain(tmp_path, script):
    if importlib.util.find_spec(script.needs) is None:
        pytest.skip(f"no {script.needs} here: make test-libraries")
    project(tmp_path, script)
    # Where other programs disturb the profile, it trains on these.
    fed_by_data_host = ["--set", "feed.local_workers=0"]
    fed_by_data_host += ["--group", "dnn=local.c1:1", "--group", "data=local.c1:1:1"]
    words = ["run", "workload.yaml", "--yes", *fed_by_data_host]
    done = process(*words, cwd=tmp_path, env=ENVIRON, timeout=TIMEOUT_SECONDS)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()

    assert read_json(run / "training.json", Training).steps == script.steps

    # Fed: every step of every epoch came through the feed, and the data host made all batches.
    fed = run
    if not batches_of_data_hosts(run / "metrics.jsonl"):
        # The profile was quiet, and its advice to keep today's hosts.
        fed = run.with_name("fed")
        words = ["train", "workload.yaml", "--name", "fed", *fed_by_data_host]
        trained = process(*words, cwd=tmp_path, env=ENVIRON, timeout=TIMEOUT_SECONDS)
        assert trained.returncode == 0, trained.stderr
        assert read_json(fed / "training.json", Training).steps == script.steps
    assert batches_of_data_hosts(fed / "metrics.jsonl") >= 1

    profile = read_json(run / "profile.json", Profile)
    assert profile.loader.class_name == script.loader
    assert profile.loader.reach == "torch"
    assert profile.loader.iterable == (script.shards is not None)
    assert profile.loader.shards == script.shards

    said = answers(done, run, tmp_path)
    assert said == dict.fromkeys(said, True)
    assert_nothing_left(run, set())

    # The same losses on today's hosts as with a data host.
    assert len(printed(run)) == script.steps
    words = ["train", "workload.yaml", "--name", "alone"]
    alone = process(*words, cwd=tmp_path, env=ENVIRON, timeout=TIMEOUT_SECONDS)
    assert alone.returncode == 0, alone.stderr
    assert printed(tmp_path / "runs" / "alone") == printed(run) == printed(fed)
