"""A pipeline's steps are real processes; what follows a job dies, and the run's last step goes on.

The pods of Profile, Train and Finish get from the double what Kubeflow and Argo give them. When an
attempt is made, and in which order steps run, is told by the tests.
"""

import contextlib
import json
import os
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stoker.figures.passive_profile import FILE
from stoker.platforms.kubernetes.layout import WORKLOAD_NAME_ANNOTATION
from stoker.records import Plan, write_json
from support import sample_records
from support.kubernetes_api import KubernetesApi, kube_config, kubernetes_api
from support.kubernetes_jobs import DATA, DNN, POOLS, WORKLOAD, leader_lines
from support.local_job import until
from support.train_command import END_SECONDS, Verb

pytestmark = pytest.mark.fault

RUN_ID = "5f0c1a2b-77aa-4c1e-9d53-0123456789ab"
RUN = "mnist-5f0c1a2b"
# Of a step whose pod was killed nothing is published: to Kubeflow 2.17 it is still running then
# (backend/src/v2/driver/resolve.go), whether the run has failed or was terminated.
OUTCOME = {"state": "RUNNING", "error": {}}
GATED = {
    **WORKLOAD,
    "gate": [{"metric": "accuracy", "min": 0.9}],
    "kubernetes": {"pools": POOLS, "output": "pvc://outputs/runs"},
}


class Step(Verb):
    def __init__(self, folder: Path, words: list[str], environ: Mapping[str, str]) -> None:
        super().__init__(folder, words, environ)
        self.folder = folder
        self.name = words[1] if words[0] == "step" else words[0]

    def record(self, name: str) -> Any:
        return json.loads((self.folder / "out" / name).read_text())

    @property
    def last_line(self) -> str:
        return self.said.splitlines()[-1]


@pytest.fixture
def api():
    with kubernetes_api() as found:
        found.make_workflow("w")
        yield found


@pytest.fixture
def step(tmp_path, api):
    """Starts a step of the run; each has a pod and a folder of its own."""
    environ = {**os.environ, "KUBECONFIG": str(kube_config(tmp_path, api.url))}
    begun = contextlib.ExitStack()

    def make(verb: str, pod: str, *, workflow: str = "w", **inputs: object) -> Step:
        folder = tmp_path / pod
        (folder / "out").mkdir(parents=True)
        names = ("record", "evaluation", "report", "model", "summary", "profile")
        kinds = {"metrics": "system.Metrics", "model": "system.Model"}
        artifacts = {}
        for name in (*names, "metrics"):
            artifact = {"type": {"schemaTitle": kinds.get(name, "")}, "uri": f"s3://{name}"}
            artifacts[name] = {"artifacts": [artifact]}
        values = {"workload": json.dumps(GATED), "image": "stoker:1", **inputs}
        document = {
            "inputs": {"parameterValues": values},
            "outputs": {"outputFile": str(folder / "told.json"), "artifacts": artifacts},
        }
        if verb == "profile":
            words = ["profile", "--out=out/profile", "--summary=out/summary", "--yes"]
        elif verb == "train":
            write_json(folder / "decision", decision())
            write_json(folder / "profile", profile())
            words = [
                "step",
                "train",
                "--profile=profile",
                "--decision=decision",
                "--out=out/record",
            ]
            words += ["--summary=out/summary", "--model=out/model", "--always", "--yes"]
            values["run_id"] = RUN_ID
        else:
            words = ["step", "finish", "--out=out/record", "--evaluation=out/evaluation"]
            words += ["--report=out/report", "--model=out/model"]
            values |= {"run_id": RUN_ID, "outcome": OUTCOME}
        told = api.make_step(pod, workflow=workflow, run_id=RUN_ID)
        found = Step(
            folder, [*words, "--executor-input", json.dumps(document)], {**environ, **told}
        )
        begun.callback(found.kill)
        return found

    with begun:
        yield make


def decision() -> Any:
    plan = Plan(action="heterogeneous", groups=(DNN, DATA))
    found = sample_records.decision()
    return msgspec.structs.replace(found, plan=plan, plans=(plan,), workload_sha256=None)


def profile() -> Any:
    found = sample_records.profile()
    return msgspec.structs.replace(found, workload_sha256=None, unmeasured=("cached batches",))


def lines_of(folder: Path, run: str, name: str, record: Any) -> list[str]:
    output = folder / f"leader-{run}"
    write_json(output / name, record)
    return leader_lines(output, run=run)


def leader_of(api: KubernetesApi, run: str = RUN) -> str:
    (found,) = api.pods(run, "dnn")
    return found


def follow(step: Step, api: KubernetesApi, run: str = RUN) -> None:
    until(lambda: api.has("poddisruptionbudgets", f"w-{step.name}"), what="the job is made")
    api.run_pods(run)
    api.say(leader_of(api, run), "a line of the leader")
    until(lambda: api.num_streams >= 3, what="the job is followed")


def end(api: KubernetesApi, folder: Path, run: str = RUN, *, record: Any = None) -> None:
    name = FILE if run.endswith("-profile") else "training.json"
    left = record or (profile() if name == FILE else sample_records.training())
    leader = leader_of(api, run)
    api.say(leader, *lines_of(folder, run, name, left))
    api.end_pod(leader)
    api.end_job(run)


def followed(finish: Step, runs: Iterable[str]) -> str:
    return next((run for run in runs if run in finish.said), "")


def lose(api: KubernetesApi, pod: str, step: Step, how: str) -> None:
    """The follower ends with an exit code, which Kubeflow Pipelines 2.17 never tries again."""
    if how == "node":
        assert api.take_node(pod, step.process, seconds=END_SECONDS) == 143, step.said
        return
    # kill -9, and what the kernel does to a container beyond its memory limit: exit code 137.
    step.process.kill()
    assert step.ended_with() == -signal.SIGKILL
    api.end_pod(pod, 137, reason="OOMKilled")


def test_two_trainings_of_a_run_whose_followers_were_killed_are_both_finished(step, api, tmp_path):
    """Branches and items of loops have their own jobs, records and models; one budget holds all."""
    runs = {"low": "mnist-low-5f0c1a2b", "64": "mnist-64-5f0c1a2b"}
    inputs = {"low": {"branch": "low"}, "64": {"branch_item_0": 64.0}}
    for number, (branch, run) in enumerate(runs.items()):
        train = step("train", f"train-{number}", **inputs[branch])
        until(lambda run=run: api.has("jobsets", run), what="the job is made")
        follow(train, api, run)
        assert not api.may_evict(f"train-{number}")
        lose(api, f"train-{number}", train, "OOM")
    finish = step("finish", "finish")
    left = set(runs.values())
    while left:
        # The one that was made first; within the same second, which is all that a cluster tells,
        # the first by name.
        until(lambda: followed(finish, left), what="the last step follows a job")
        run = followed(finish, left)
        end(api, tmp_path, run)
        left.remove(run)
    assert finish.ended_with() == 0, finish.said
    words = "the training is finished though the run has FAILED: Retry"
    assert all(words in line for line in finish.said.splitlines()[-2:])
    created = api.count("POST /apis/jobset.x-k8s.io")
    for number, branch in enumerate(runs):
        retried = step("train", f"train-{number + 10}", **inputs[branch])
        assert retried.ended_with() == 0, retried.said
        assert "is its record" in retried.said
        model = json.loads((retried.folder / "told.json").read_text())["artifacts"]["model"]
        address = model["artifacts"][0]["metadata"]["model_uri"]
        assert address == f"pvc://outputs/runs/{runs[branch]}/model"
    assert api.count("POST /apis/jobset.x-k8s.io") == created


@pytest.fixture
def lost_train(step, api):
    train = step("train", "train-1")
    follow(train, api)
    lose(api, "train-1", train, "OOM")


@pytest.mark.parametrize(
    ("how", "is_gone"),
    [
        pytest.param("OOM", True, id="OOM, job gone"),
        pytest.param("node", False, id="node, job there"),
        pytest.param("node", True, id="node, job gone", marks=pytest.mark.soak),
    ],
)
def test_a_training_whose_follower_was_lost_is_finished_and_its_retry_trains_no_second_time(
    step, api, tmp_path, how, is_gone
):
    train = step("train", "train-1")
    follow(train, api)
    assert not api.may_evict("train-1")
    uid = api.get("jobsets", RUN)["metadata"]["uid"]
    lose(api, "train-1", train, how)
    finish = step("finish", "finish")
    until(lambda: "a line of the leader" in finish.said, what="the last step follows the job")
    assert not api.may_evict("finish")
    end(api, tmp_path)
    assert finish.ended_with() == 0, finish.said
    assert api.get("jobsets", RUN)["metadata"]["uid"] == uid
    assert finish.record("record")["status"] == "succeeded"
    assert finish.record("evaluation")["gates"][0]["metric"] == "accuracy"
    assert "<html" in (finish.folder / "out" / "report").read_text()
    told = json.loads((finish.folder / "told.json").read_text())["artifacts"]
    model = told["model"]["artifacts"][0]["metadata"]["model_uri"]
    assert model == f"pvc://outputs/runs/{RUN}/model"
    assert told["metrics"]["artifacts"][0]["metadata"]["step_seconds"] > 0
    assert f"run {RUN}: failed" in finish.said
    assert "the training is finished though the run has FAILED: Retry" in finish.last_line
    if is_gone:
        api.remove("workflows", "w")
        assert api.names("jobsets") == []
        api.make_workflow("w")
    created = api.count("POST /apis/jobset.x-k8s.io")
    retried = step("train", "train-2")
    assert retried.ended_with() == 0, retried.said
    assert "is its record" in retried.said
    assert api.count("POST /apis/jobset.x-k8s.io") == created
    assert retried.record("record")["status"] == "succeeded"


def test_a_training_that_ended_while_nobody_followed_it_is_read_by_the_last_step(
    step, api, tmp_path, lost_train
):
    failed = msgspec.structs.replace(
        sample_records.training(), status="failed", exit_code=1, failure="ValueError: bad"
    )
    leader = leader_of(api)
    api.say(leader, *lines_of(tmp_path, RUN, "training.json", failed))
    api.end_pod(leader, 1)
    api.end_job(RUN, "Failed")
    uid = api.get("jobsets", RUN)["metadata"]["uid"]
    finish = step("finish", "finish")
    assert finish.ended_with() == 0, finish.said
    # Not made again, as a retried Train would do.
    assert api.get("jobsets", RUN)["metadata"]["uid"] == uid
    assert finish.record("record")["failure"] == "ValueError: bad"
    assert "the training failed" in finish.last_line


def test_a_retry_without_the_last_step_adopts_the_job_and_one_after_it_has_its_record(
    step, api, tmp_path, lost_train
):
    second = step("train", "train-2")
    until(lambda: "job_resumed" in second.said, what="the job is adopted")
    end(api, tmp_path)
    assert second.ended_with() == 0, second.said
    # The run fails for another reason: nothing is lost.
    finish = step("finish", "finish")
    assert finish.ended_with() == 0, finish.said
    assert finish.last_line == "no job of the run was left"
    assert not (finish.folder / "out" / "record").exists()
    assert api.count("DELETE") == 0


@pytest.mark.parametrize("when", ["before", "while it follows"])
def test_the_job_of_a_run_that_somebody_ends_is_deleted_by_the_last_step(
    step, api, when, lost_train
):
    if when == "before":
        api.terminate_workflow("w")
    finish = step("finish", "finish")
    if when == "while it follows":
        until(lambda: "a line of the leader" in finish.said, what="the last step follows the job")
        api.terminate_workflow("w")
    assert finish.ended_with() == 0, finish.said
    assert f"run {RUN}: {'cancelled' if when == 'before' else 'failed'}" in finish.said
    assert api.names("jobsets") == []
    assert not (finish.folder / "out" / "record").exists()


def test_a_last_step_that_is_lost_leaves_the_job_to_a_retry(step, api, tmp_path, lost_train):
    finish = step("finish", "finish")
    until(lambda: "a line of the leader" in finish.said, what="the last step follows the job")
    assert api.take_node("finish", finish.process, seconds=END_SECONDS) == 143, finish.said
    assert api.names("jobsets") == [RUN]
    retried = step("train", "train-2")
    until(lambda: "job_resumed" in retried.said, what="the job is adopted")
    end(api, tmp_path)
    assert retried.ended_with() == 0, retried.said


@pytest.mark.parametrize(
    ("how", "is_finished"),
    [
        pytest.param("node", False, id="node, tried again"),
        pytest.param("OOM", True, id="OOM, finished"),
        pytest.param("OOM", False, id="OOM, tried again", marks=pytest.mark.soak),
    ],
)
def test_a_profile_whose_follower_was_lost_is_taken_up_and_not_measured_again(
    step, api, tmp_path, how, is_finished
):
    run = f"{RUN}-profile"
    first = step("profile", "profile-1")
    follow(first, api, run)
    assert api.get("jobsets", run)["metadata"]["annotations"][WORKLOAD_NAME_ANNOTATION] == "mnist"
    uid = api.get("jobsets", run)["metadata"]["uid"]
    lose(api, "profile-1", first, how)
    assert api.names("jobsets") == [run]
    if is_finished:
        finish = step("finish", "finish")
        until(lambda: "job_resumed" in finish.said, what=f"it is followed {finish.said}")
        end(api, tmp_path, run)
        assert finish.ended_with() == 0, finish.said
        assert finish.record("record")["step"]["step_seconds"] > 0
        assert "the profile is finished though the run has FAILED: Retry" in finish.last_line
        api.remove("workflows", "w")
        api.make_workflow("w")
        assert api.names("jobsets") == []
    second = step("profile", "profile-2")
    if not is_finished:
        until(lambda: "job_resumed" in second.said, what="the job is adopted")
        end(api, tmp_path, run)
    assert second.ended_with() == 0, second.said
    assert second.record("profile")["step"]["step_seconds"] > 0
    left = [api.get("jobsets", name)["metadata"]["uid"] for name in api.names("jobsets")]
    assert left == ([] if is_finished else [uid])


def test_a_profile_of_a_run_that_somebody_ends_is_deleted(step, api):
    first = step("profile", "profile-1")
    follow(first, api, f"{RUN}-profile")
    api.terminate_workflow("w")
    first.process.terminate()
    assert first.ended_with() == 143, first.said
    assert api.names("jobsets") == []


def test_a_profile_that_failed_by_itself_is_not_followed_again(step, api):
    run = f"{RUN}-profile"
    first = step("profile", "profile-1")
    follow(first, api, run)
    leader = leader_of(api, run)
    api.end_pod(leader, 1)
    api.end_job(run, "Failed")
    assert first.ended_with() == 6, first.said
    finish = step("finish", "finish")
    assert finish.ended_with() == 0, finish.said
    assert finish.last_line == "no job of the run was left"
