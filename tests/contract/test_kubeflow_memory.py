"""Pipelines on Kubeflow that remember: runs that are skipped, and decisions that stay.

The strict double of Kubeflow 2.17 runs the compiled pipeline; stoker's verbs are the real ones.
"""

import functools
import json
import os
from typing import Any

import msgspec
import pytest

pytest.importorskip("kfp")

from stoker.errors import UsageError
from stoker.host.listing import MAX_FILES
from stoker.pipelines.kubeflow.compile import compile_kubeflow, kubeflow_request
from stoker.records import Decision, Profile, Training, Workload, read_json
from stoker.workload_file import workload_from
from support import builders, sample_records
from support import kubeflow_pipeline as sample
from support.kubeflow_backend import KubeflowRun
from support.kubeflow_steps import Installation, tasks_of
from support.kubernetes_api import kube_config
from support.platform_jobs import use_kube_config

IMAGE = f"registry/stoker@sha256:{'a' * 64}"
MEMORY = "kubernetes.memory=pvc://runs/digits/memory"
# Both groups of the plans that data hosts pay for in part.
POOLS = """\
instance_type,family,vcpus,memory_gib,gpus,gpu_model,gpu_memory_gib_each,network_gbps,coremark_per_vcpu,ec2_usd_per_hour_us_east_1,priced_on
gpu,g5,32,120,1,A10G,24,25,17408,2.448,2026-11-01
cpu,c7i,16,30,0,,,12.5,23923,0.714,2026-11-01
cpu-large,c7i,48,90,0,,,25,23923,2.142,2026-11-01
"""
BEFORE = ["period", "profile", "decide", "train", "evaluate", "gate"]
TRAINED = ["compare", *BEFORE, "remember", "finish"]
SKIPPED = ["compare", "unchanged", "finish"]
# A loading between those where data hosts clearly pay and clearly do not.
PAYS = 6.2


def workload(*overrides: str) -> Workload:
    document: dict[str, Any] = json.loads(json.dumps(sample.DOCUMENT))
    document["kubernetes"] |= {"pools": {}, "dnn": {}}
    document["kubernetes"]["pools_file"] = POOLS
    document["cluster"]["dnn"]["instance_type"] = "gpu"
    document["gate"] = [{"metric": "accuracy", "min": 0.9}]
    document["constraints"] = {"objective": "cost", "max_data_hosts": 2}
    return workload_from(document, overrides=[f"image={IMAGE}", *overrides])


@functools.cache
def definition(*overrides: str) -> str:
    return compile_kubeflow(workload(*overrides), folder=sample.ROOT).definition


def skipping(*overrides: str) -> str:
    return definition("skip_unchanged=true", MEMORY, *overrides)


def measured(loading: float) -> Profile:
    seconds = max(0.08, loading / 31)
    return builders.starved(
        "gpu", loader_cpu_seconds=loading, step_seconds=seconds, predicted=seconds
    )


def trained(**changes: object) -> Training:
    job = msgspec.structs.replace(sample_records.training().job, platform="kubernetes")
    return msgspec.structs.replace(sample_records.training(), job=job, **changes)


@pytest.fixture
def installation(tmp_path):
    made = Installation(tmp_path)
    (made.claim("datasets", "digits") / "a.csv").write_text("1\n")
    made.claim("runs", "digits/memory")
    return made


def ran(installation: Installation, text: str, **given: Any) -> KubeflowRun:
    known = {"profile": measured(PAYS), "training": trained(), **given}
    return installation.run(text, **known)


def test_a_run_without_a_change_is_skipped_and_green(installation):
    first = ran(installation, skipping())
    assert (first.state, tasks_of(first)) == ("SUCCEEDED", TRAINED), installation.told
    second = ran(installation, skipping())
    assert (second.state, tasks_of(second)) == ("SUCCEEDED", SKIPPED), installation.told
    assert "nothing changed since digits-00000001 of 2026-11-20" in (
        installation.told["unchanged"].stdout
    )
    # How Kubeflow tells the last step that a run is over.
    outcome = json.loads(second.steps[-1].command[-1])["inputs"]["parameterValues"]["outcome"]
    assert outcome["state"] == "COMPLETE"


def data_folder(installation):
    return installation.claim("datasets", "digits")


CHANGES = {
    "new data": lambda at: (at / "b.csv").write_text("2\n"),
    "longer data": lambda at: (at / "a.csv").write_text("10\n"),
    "touched data": lambda at: os.utime(at / "a.csv", (1, 1)),
    "other names": lambda at: (at / "a.csv").rename(at / "c.csv"),
    "less data": lambda at: ((at / "c.csv").write_text(""), (at / "a.csv").unlink()),
    "no data": lambda at: (at / "a.csv").unlink(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_files_of_a_claim_train(change, installation):
    ran(installation, skipping())
    change(data_folder(installation))
    run = ran(installation, skipping())
    assert tasks_of(run) == TRAINED
    assert "train" in installation.told["compare"].stdout


def test_data_that_changes_between_the_first_step_and_the_training_leads_to_no_skip(installation):
    """It came back afterwards: the next run sees what the first step saw, and no training did."""
    file = data_folder(installation) / "a.csv"
    before = file.stat()

    def change(step):
        if step.task == "train":
            file.write_text("10\n")
        if step.task == "evaluate":
            file.write_text("1\n")
            os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))

    assert tasks_of(ran(installation, skipping(), before=change)) == TRAINED
    assert tasks_of(ran(installation, skipping())) == TRAINED
    assert tasks_of(ran(installation, skipping())) == SKIPPED


def test_more_files_than_a_training_lists_at_its_begin_are_compared(installation):
    """Of most pictures a training's own record has no version: it may cost it some seconds only."""
    folder = data_folder(installation)
    for number in range(MAX_FILES + 1):
        (folder / f"{number}.png").touch()
    assert tasks_of(ran(installation, skipping())) == TRAINED
    assert tasks_of(ran(installation, skipping())) == SKIPPED
    (folder / "0.png").unlink()
    assert tasks_of(ran(installation, skipping())) == TRAINED


UNREAD = {
    "a linked folder": (
        lambda at: (at / "latest").symlink_to(at.parent, target_is_directory=True),
        "linked folders",
    ),
    "an empty claim": (lambda at: (at / "a.csv").unlink(), "is empty"),
    "too many files": (
        lambda at: [(at / f"{number}").touch() for number in range(20)],
        "could not be read whole",
    ),
}


@pytest.mark.parametrize(("make", "words"), UNREAD.values(), ids=UNREAD)
def test_data_that_cannot_be_read_whole_always_trains(make, words, installation, monkeypatch):
    monkeypatch.setattr("stoker.run.pipeline_facts._MAX_FILES", 20)
    make(data_folder(installation))
    for _ in range(2):
        assert tasks_of(ran(installation, skipping())) == TRAINED
    assert words in installation.told["compare"].stdout


@pytest.mark.parametrize(
    ("parameters", "fact"),
    [
        ({"epochs": 20}, "hyperparameters"),
        ({"image": IMAGE.replace("a", "b")}, "image"),
        ({"gate": "accuracy>=0.95"}, "gate"),
        ({"instance_count": 2}, "cluster"),
        ({"input_data": "pvc://datasets/others"}, "train"),
        ({"skip_unchanged": "false"}, "skip_unchanged"),
    ],
)
def test_changed_parameters_of_a_run_train(parameters, fact, installation):
    ran(installation, skipping())
    run = ran(installation, skipping(), parameters=parameters)
    assert tasks_of(run)[:2] == ["compare", "period"]
    assert fact in installation.told["compare"].stdout
    # A run with the same parameters as the last one that passed is skipped again.
    assert tasks_of(ran(installation, skipping()))[1] in ("unchanged", "period")


@pytest.mark.parametrize("change", ["hyperparameters.epochs=11", f"image={IMAGE[:-1]}c"])
def test_another_workload_or_image_trains(change, installation):
    ran(installation, skipping())
    assert tasks_of(ran(installation, skipping(change))) == TRAINED


TAG = "registry/stoker:digits"


@pytest.fixture
def pull(api, tmp_path, monkeypatch):
    """Makes the pod of the step that compares, with this digest of the image of a tag."""
    use_kube_config(monkeypatch, kube_config(tmp_path, api.url))
    for key, value in api.make_step("compare-1", workflow="").items():
        monkeypatch.setenv(key, value)

    def pulled(letter: str) -> None:
        image_id = f"registry/stoker@sha256:{letter * 64}"
        containers = {"containers": [{"name": "main", "image": TAG}]}
        statuses = {"containerStatuses": [{"name": "main", "imageID": image_id}]}
        api.change("pods", "compare-1", {"spec": containers, "status": statuses})

    return pulled


def test_an_image_by_its_tag_is_the_one_that_the_step_s_own_pod_has_pulled(api, installation, pull):
    text = skipping(f"image={TAG}")
    pull("a")
    assert tasks_of(ran(installation, text)) == TRAINED
    assert tasks_of(ran(installation, text)) == SKIPPED
    # Pushed again.
    pull("b")
    assert tasks_of(ran(installation, text)) == TRAINED
    assert "2026-11-20: image" in installation.told["compare"].stdout
    # A run with another image than the pod's.
    again = ran(installation, text, parameters={"image": "registry/stoker:letters"})
    assert tasks_of(again) == TRAINED
    assert "runs another image" in installation.told["compare"].stdout
    api.remove("pods", "compare-1")
    assert tasks_of(ran(installation, text)) == TRAINED


BAD = {
    "a model below its gate": {"metrics": {"accuracy": 0.1}},
    "a crash": {"status": "failed", "exit_code": 1, "failure": "ValueError"},
    "a stop": {"status": "stopped", "exit_code": None},
}


@pytest.mark.parametrize("changes", BAD.values(), ids=BAD)
def test_a_failed_run_never_leads_to_a_skip(changes, installation):
    failed = ran(installation, skipping(), training=trained(**changes))
    assert failed.state == "FAILED"
    assert "remember" not in tasks_of(failed)
    assert tasks_of(ran(installation, skipping())) == TRAINED
    # Nor does it hide the run before it, that passed.
    ran(
        installation,
        skipping(),
        training=trained(**changes),
        parameters={"skip_unchanged": "false"},
    )
    assert tasks_of(ran(installation, skipping())) == SKIPPED


@pytest.mark.parametrize("task", ["compare", "decide", "evaluate", "gate", "remember"])
def test_a_run_that_is_killed_before_it_is_remembered_leads_to_no_skip(task, installation):
    installation.kills = {task: "write"} if task == "remember" else {task: "end"}
    assert ran(installation, skipping()).state == "FAILED"
    installation.kills = {}
    assert tasks_of(ran(installation, skipping())) == TRAINED
    assert tasks_of(ran(installation, skipping())) == SKIPPED


def test_two_runs_at_once_are_both_remembered(installation):
    inner: list[KubeflowRun] = []

    def before(step):
        if step.task == "remember" and not inner:
            inner.append(installation.run(skipping(), profile=measured(PAYS), training=trained()))

    outer = ran(installation, skipping(), before=before)
    assert (outer.state, inner[0].state) == ("SUCCEEDED", "SUCCEEDED")
    assert len(list(installation.claim("runs", "digits/memory").glob("*.json"))) == 2
    assert tasks_of(ran(installation, skipping())) == SKIPPED


def test_the_memory_of_another_pipeline_is_not_ones_own(installation):
    ran(installation, skipping("name=letters"))
    run = ran(installation, skipping())
    assert tasks_of(run) == TRAINED
    decision = decision_of(run)
    assert decision.previous is None


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": "stoker.memory/v9"}'])
def test_a_memory_that_cannot_be_read_trains_and_ends_nothing(text, installation):
    ran(installation, skipping())
    folder = installation.claim("runs", "digits/memory")
    (folder / "99991231T235959Z--digits-ffffffff.json").write_text(text)
    run = ran(installation, skipping())
    assert (run.state, tasks_of(run)) == ("SUCCEEDED", TRAINED)
    assert "cannot be read" in installation.told["compare"].stdout
    assert "cannot be read" in str(decision_of(run).warnings)


def test_a_claim_that_is_missing_skips_nothing_and_fails(installation):
    installation.claim("runs").rename(installation.folder / "away")
    run = ran(installation, skipping())
    assert run.state == "FAILED"
    assert "train" not in tasks_of(run)


def test_a_memory_that_may_not_be_written_does_not_fail_a_run_that_passed(installation):
    (installation.claim("runs", "digits/champions") / "memory").write_text("")
    run = ran(installation, definition("kubernetes.champion=pvc://runs/digits/champions"))
    assert (run.state, tasks_of(run)[-2]) == ("SUCCEEDED", "remember")
    assert "this run is not remembered" in installation.told["remember"].stderr
    # The report shows it.
    assert "so no run is remembered" in str(decision_of(run).warnings)


def decision_of(run: KubeflowRun) -> Decision:
    (step,) = (step for step in run.steps if step.task == "decide")
    return read_json(step.output("decision"), Decision)


def plan_of(decision: Decision) -> list[tuple[str, int]]:
    return [(group.instance_type, group.count) for group in decision.plan.groups]


def test_a_decision_stays_until_another_plan_is_clearly_better(installation):
    text = definition(MEMORY)
    first = ran(installation, text)
    assert tasks_of(first) == [*BEFORE, "remember", "finish"]
    before = decision_of(first)
    assert before.action == "heterogeneous"
    for loading in (4.2, 4.0, 3.8, 3.6, 3.4, 3.2):
        fresh = ran(installation, definition(), profile=measured(loading))
        again = ran(installation, text, profile=measured(loading))
        found = decision_of(again)
        assert found.previous is not None
        if found.previous.is_held:
            break
    assert found.previous.is_held
    assert plan_of(found) == plan_of(before)
    assert plan_of(decision_of(fresh)) != plan_of(before)
    assert found.plan.reason.startswith("as in digits-0000")


def test_a_decision_is_calibrated_by_the_pipelines_own_runs(installation):
    own = kubeflow_request(workload(MEMORY)).workload
    keys = {"workload_sha256": own.digest(), "workload_keys": own.profile_keys()}
    profile = msgspec.structs.replace(measured(PAYS), **keys)
    for _ in range(4):
        run = ran(installation, definition(MEMORY), profile=profile)
    calibration = decision_of(run).calibration
    assert calibration is not None
    assert calibration.runs == 3


def test_without_a_claim_no_decision_has_a_memory(installation):
    ran(installation, definition())
    run = ran(installation, definition())
    assert tasks_of(run) == [*BEFORE, "finish"]
    assert decision_of(run).previous is None


def test_the_champions_claim_keeps_the_memory_too(installation):
    champion = "kubernetes.champion=pvc://runs/digits/champions"
    text = definition("skip_unchanged=true", champion)
    assert tasks_of(ran(installation, text)) == TRAINED
    assert tasks_of(ran(installation, text)) == SKIPPED
    folder = installation.claim("runs", "digits/champions")
    assert sorted(each.name for each in folder.iterdir()) == ["000001.json", "memory"]


REFUSED = {
    "no place": (("skip_unchanged=true",), "kubernetes.memory: pvc://CLAIM/FOLDER"),
    "a registry": (
        ("skip_unchanged=true", "kubernetes.champion=registry:digits"),
        "kubernetes.memory: pvc://CLAIM/FOLDER",
    ),
    "no channels": (("skip_unchanged=true", MEMORY, "channels={}"), "names no channels"),
}


@pytest.mark.parametrize(("overrides", "words"), REFUSED.values(), ids=REFUSED)
def test_what_a_skip_needs_is_said_when_the_pipeline_is_compiled(overrides, words):
    with pytest.raises(UsageError) as raised:
        compile_kubeflow(workload(*overrides), folder=sample.ROOT)
    assert words in f"{raised.value.what} {raised.value.fix}"


def test_a_projects_own_pipeline_without_the_steps_is_refused(tmp_path):
    own = (sample.ROOT / "pipelines" / "kubeflow.py").read_text()
    (tmp_path / "pipelines").mkdir()
    changed = own.replace(", if_changed(run) as run:", ":")
    assert changed != own
    (tmp_path / "pipelines" / "kubeflow.py").write_text(changed)
    with pytest.raises(UsageError, match="no step compare"):
        compile_kubeflow(workload("skip_unchanged=true", MEMORY), folder=tmp_path)


def test_the_step_that_compares_runs_the_jobs_image_with_the_data_and_is_never_cached():
    by_tag = workload("skip_unchanged=true", MEMORY, "image=registry/stoker:digits")
    compiled = compile_kubeflow(by_tag, folder=sample.ROOT).definition
    pipeline, pods = sample.read(compiled)
    task = sample.tasks(pipeline)["compare"]
    assert not task["cachingOptions"]
    mounted = {
        mount["mountPath"]: (mount["constant"], mount["subPath"])
        for mount in pods["exec-compare"]["pvcMount"]
    }
    assert mounted == {
        "/mnt/memory": ("runs", "digits/memory"),
        "/mnt/channels/train": ("datasets", "digits"),
    }
    # Of another run, a node may still have the image that the tag named then.
    assert pods["exec-compare"]["imagePullPolicy"] == "Always"
    assert "imagePullPolicy" not in pods["exec-decide"]
    for name in ("decide", "remember"):
        assert not sample.tasks(pipeline)[name]["cachingOptions"]
        (mount,) = pods[f"exec-{name}"]["pvcMount"]
        assert mount["mountPath"] == "/mnt/memory"
