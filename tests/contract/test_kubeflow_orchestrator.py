"""Kubeflow's verbs work by kfp's client, on a server that checks requests by the published API."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

pytest.importorskip("kfp")

from kfp import dsl

from stoker import kubeflow, orchestrators
from stoker.errors import PlatformError, UsageError
from stoker.orchestrators.kubeflow.compile import spec_of_text, tasks_of
from stoker.orchestrators.kubeflow.runs import RunOptions
from stoker.platforms.kubernetes import KubernetesPlatform
from stoker.records import Json, Profile, read_json, to_json, write_json
from support import sample_records
from support.command import process, stoker
from support.kfp_server import KfpServer, pod_of
from support.kubeflow_backend import KubeflowRun, Pipeline, Step, Store
from support.kubeflow_orchestrator import (
    ROOT,
    WORKLOAD,
    compiled,
    nodes_played,
    target_at,
    tasks,
    upload,
    workload,
)
from support.kubernetes_api import NAMESPACE, Fault, KubernetesApi, kube_config, kubernetes_api
from support.kubernetes_jobs import job as kubernetes_job
from support.platform_jobs import use_kube_config

pytestmark = pytest.mark.usefixtures("quick_kfp")

IN_NAMESPACE = f"kubernetes.namespace={NAMESPACE}"


@pytest.fixture
def server() -> Iterator[KfpServer]:
    with KfpServer() as made:
        yield made
    assert made.problems == []


@pytest.fixture
def project(tmp_path: Path, server: KfpServer, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes a project folder with the product's pipelines, and a workload."""
    (tmp_path / "pipelines").symlink_to(ROOT / "pipelines")
    document = json.loads(json.dumps(WORKLOAD))
    document["kubernetes"]["kubeflow"] = {"host": server.url}
    (tmp_path / "w.yaml").write_text(yaml.safe_dump(document))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KF_PIPELINES_ENDPOINT", server.url)
    return tmp_path


def test_upload_start_status_and_stop_as_people_run_them(server: KfpServer, project: Path) -> None:
    uploaded = stoker("upload", "kubeflow", "w.yaml")
    assert uploaded.returncode == 0, uploaded.stderr
    (pipeline,) = server.kept["pipelines"]
    (version,) = server.versions[str(pipeline["pipeline_id"])]
    assert f"created: {pipeline['pipeline_id']}" in uploaded.stdout
    assert f"version: {version['name']}  {version['pipeline_version_id']}" in uploaded.stdout
    assert f"/#/pipelines/details/{pipeline['pipeline_id']}/version/" in uploaded.stdout
    assert "next:    stoker start kubeflow w.yaml" in uploaded.stdout
    started = stoker("start", "kubeflow", "w.yaml", "--param", "epochs=3", "--json")
    assert started.returncode == 0, started.stderr
    told = json.loads(started.stdout)
    assert told["parameters"] == {"epochs": "3"}
    shown = process("status", "kubeflow", "mnist", "--workload", "w.yaml", "--json")
    assert json.loads(shown.stdout)["run"] == told["run"]
    assert [e["run"] for e in json.loads(shown.stdout)["executions"]] == [told["run"]]
    stopped = stoker("stop", "kubeflow", told["url"], "--workload", "w.yaml")
    assert stopped.returncode == 0, stopped.stderr
    assert "has ended: stopped" in stopped.stderr
    assert server.sent() == [
        "POST /pipelines",
        "POST /pipelines/upload_version",
        "POST /experiments",
        "POST /runs",
        f"POST /runs/{told['run']}:terminate",
    ]


def test_the_uploaded_file_is_the_compiled_one(server: KfpServer, project: Path) -> None:
    assert stoker("compile", "kubeflow", "w.yaml", "--out", "p.yaml").returncode == 0
    assert stoker("upload", "kubeflow", "w.yaml").returncode == 0
    assert server.last("POST /pipelines/upload_version").file == Path("p.yaml").read_text()


def test_upload_of_the_same_again_sends_nothing_and_says_so(
    server: KfpServer, project: Path
) -> None:
    assert stoker("upload", "kubeflow", "w.yaml").returncode == 0
    before = server.sent()
    again = stoker("upload", "kubeflow", "w.yaml")
    assert (again.returncode, server.sent()) == (0, before)
    assert "pipeline mnist: no change" in again.stderr
    assert again.stdout.startswith("unchanged: ")


def test_another_workload_adds_a_version_and_shows_what_changes(
    server: KfpServer, project: Path
) -> None:
    assert stoker("upload", "kubeflow", "w.yaml").returncode == 0
    changed = stoker("upload", "kubeflow", "w.yaml", "--set", "feed.credits=5")
    assert changed.returncode == 0, changed.stderr
    assert "- DefaultValue.feed.credits = 2" in changed.stderr
    assert "+ DefaultValue.feed.credits = 5" in changed.stderr
    assert "next:    stoker start kubeflow w.yaml --set feed.credits=5\n" in changed.stdout
    assert changed.stdout.startswith("updated: ")
    assert server.sent().count("POST /pipelines") == 1
    (versions,) = server.versions.values()
    assert len({version["name"] for version in versions}) == 2


def test_an_upload_says_the_server_s_version_and_what_it_cannot_do(
    server: KfpServer, project: Path
) -> None:
    assert "server: Kubeflow Pipelines 2.17.0\n" in stoker("upload", "kubeflow", "w.yaml").stderr
    server.version = "2.15.2"
    done = stoker("upload", "kubeflow", "w.yaml")
    assert done.returncode == 0
    assert "note: before 2.16 steps run as the user of their image" in done.stderr
    server.version = "unknown"
    told = stoker("upload", "kubeflow", "w.yaml", "--json")
    assert "needs 2.14 or later" in json.loads(told.stdout)["notes"][0]


def test_a_server_on_which_each_run_would_fail_gets_no_upload(
    server: KfpServer, project: Path
) -> None:
    server.version = "2.5.0"
    done = stoker("upload", "kubeflow", "w.yaml")
    assert done.returncode == 2
    assert "this Kubeflow Pipelines is 2.5.0; the pipeline needs 2.14" in done.stderr
    assert server.sent() == []


def test_a_run_without_cache_asks_for_a_new_profile(server: KfpServer, project: Path) -> None:
    upload(server)
    assert stoker("start", "kubeflow", "w.yaml", "--no-cache").returncode == 0
    assert server.run()["runtime_config"] == {"parameters": {"cache_days": 0}}
    both = stoker("start", "kubeflow", "w.yaml", "--no-cache", "--param", "cache_days=3")
    assert both.returncode == 2
    assert "exclude each other" in both.stderr


def test_a_profile_to_re_use_is_sent_as_its_text(server: KfpServer, project: Path) -> None:
    upload(server)
    (project / "old").mkdir()
    write_json(project / "old" / "profile.json", sample_records.profile())
    for named in ("old", "old/profile.json", to_json(sample_records.profile())):
        started = target_at(server).start(workload(), parameters=[f"reuse_profile={named}"])
        sent = started.parameters["reuse_profile"]
        assert read_json(sent, Profile) == sample_records.profile()
    with pytest.raises(UsageError, match="no such file: none"):
        target_at(server).start(workload(), parameters=["reuse_profile=none"])


def test_a_version_is_named_by_its_content_and_a_content_that_comes_back_by_a_number(
    server: KfpServer,
) -> None:
    first, second, third = (upload(server, *of) for of in ((), ("feed.credits=5",), ()))
    assert (first.action, second.action, third.action) == ("created", "updated", "updated")
    assert third.version == f"{first.version}-2"
    assert second.version.removeprefix("mnist-") != first.version.removeprefix("mnist-")


def test_a_pipeline_with_no_version_gets_its_first(server: KfpServer) -> None:
    server.trouble("POST /pipelines/upload_version", 500, "{}", times=1)
    with pytest.raises(PlatformError, match="Kubeflow failed"):
        upload(server)
    assert upload(server).action == "updated"
    assert server.sent().count("POST /pipelines") == 1


def test_a_version_that_somebody_uploaded_by_another_kfp_is_no_change(server: KfpServer) -> None:
    upload(server)
    (versions,) = server.versions.values()
    spec = versions[0]["pipeline_spec"]
    assert isinstance(spec, dict)
    spec["pipeline_spec"]["sdkVersion"] = "kfp-9.9.9"  # type: ignore[index,call-overload]
    assert upload(server).action == "unchanged"


def test_a_pipeline_that_somebody_else_creates_meanwhile_is_not_overwritten(
    server: KfpServer,
) -> None:
    target = target_at(server)
    plan = target.plan(compiled())
    upload(server)
    with pytest.raises(UsageError, match="somebody else created pipeline mnist just now"):
        target.upload(plan)


def test_start_sends_typed_parameters_experiment_account_and_the_version(
    server: KfpServer, project: Path
) -> None:
    uploaded = upload(server)
    words = ("--experiment", "nightly", "--service-account", "trainer", "--run-name", "first")
    done = stoker("start", "kubeflow", "w.yaml", "--param", "epochs=3", *words)
    assert done.returncode == 0, done.stderr
    body = server.last("POST /runs").body
    assert isinstance(body, dict)
    (experiment,) = server.kept["experiments"]
    assert experiment["display_name"] == "nightly"
    assert body["experiment_id"] == experiment["experiment_id"]
    assert (body["display_name"], body["service_account"]) == ("first", "trainer")
    assert body["runtime_config"] == {"parameters": {"epochs": 3}}
    assert body["pipeline_version_reference"] == {
        "pipeline_id": uploaded.id,
        "pipeline_version_id": uploaded.version_id,
    }
    assert "warning" not in done.stderr


def test_an_experiment_that_is_there_is_used_again(server: KfpServer) -> None:
    upload(server)
    for _ in range(2):
        target_at(server).start(workload(), parameters=())
    (experiment,) = server.kept["experiments"]
    assert experiment["display_name"] == "mnist"
    assert {item["experiment_id"] for item in server.kept["runs"]} == {experiment["experiment_id"]}


def test_an_archived_experiment_is_refused(server: KfpServer) -> None:
    upload(server)
    target_at(server).start(workload(), parameters=())
    server.kept["experiments"][0]["storage_state"] = "ARCHIVED"
    with pytest.raises(UsageError, match="experiment mnist is archived"):
        target_at(server).start(workload(), parameters=())


def test_an_older_version_runs_when_it_is_named(server: KfpServer, project: Path) -> None:
    first = upload(server)
    upload(server, "feed.credits=5")
    done = stoker("start", "kubeflow", "w.yaml", "--version", first.version)
    assert done.returncode == 0, done.stderr
    reference = server.run()["pipeline_version_reference"]
    assert isinstance(reference, dict)
    assert reference["pipeline_version_id"] == first.version_id
    by_id = stoker("start", "kubeflow", "w.yaml", "--version", first.version_id)
    assert by_id.returncode == 0, by_id.stderr
    wrong = stoker("start", "kubeflow", "w.yaml", "--version", first.version + "x")
    assert wrong.returncode == 2
    assert f"did you mean {first.version}?" in wrong.stderr


def test_a_file_that_differs_from_the_uploaded_workload_is_warned_about(
    server: KfpServer, project: Path
) -> None:
    upload(server, "feed.credits=5")
    done = stoker("start", "kubeflow", "w.yaml")
    assert done.returncode == 0
    assert "was uploaded with another workload than this file's" in done.stderr


@pytest.mark.parametrize(
    ("parameter", "words"),
    [
        ("epoch=3", ["has no parameter epoch", "did you mean epochs?"]),
        ("gate=accuracy >= champion", ["nothing says which that is", "kubernetes.champion"]),
        ("epochs=many", ["epochs=many: expected a whole number"]),
        ("objective=best", ["objective=best is not possible", "use cost, time"]),
        ("approval=Approved", ["has no parameter approval, the workload has"]),
        ("epochs", ["not NAME=VALUE"]),
    ],
)
def test_a_parameter_that_cannot_be_is_refused_before_anything_starts(
    server: KfpServer, project: Path, parameter: str, words: list[str]
) -> None:
    upload(server)
    done = stoker("start", "kubeflow", "w.yaml", "--param", parameter)
    assert done.returncode == 2, done.stderr
    assert server.kept["runs"] == []
    for word in words:
        assert word in done.stderr


def test_start_before_the_upload_says_what_to_do(server: KfpServer, project: Path) -> None:
    done = stoker("start", "kubeflow", "w.yaml")
    assert done.returncode == 2
    assert "pipeline mnist is not uploaded" in done.stderr
    assert "stoker upload kubeflow WORKLOAD" in done.stderr


@pytest.mark.parametrize(
    ("told", "state", "code", "words"),
    [
        ({"evaluate": "SUCCEEDED"}, "SUCCEEDED", 0, "has succeeded"),
        ({"gate": "FAILED main: Error (exit code 1)"}, "FAILED", 3, "gate: main: Error"),
        ({"decide": "FAILED ImagePullBackOff"}, "FAILED", 4, "decide: ImagePullBackOff"),
        ({"train": "FAILED main: Error (exit code 1)"}, "FAILED", 6, "train: main: Error"),
        ({"train": "FAILED main: Error (exit code 4)"}, "FAILED", 4, "exit code 4"),
    ],
)
def test_waiting_gives_the_run_s_exit_code(
    server: KfpServer,
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    told: dict[str, str],
    state: str,
    code: int,
    words: str,
) -> None:
    upload(server)
    monkeypatch.setattr(orchestrators, "POLL_SECONDS", 0.0)

    def begin() -> None:
        server.run()["state"] = "RUNNING"
        server.tell(*tasks(profile="RUNNING"))

    def end() -> None:
        server.tell(*tasks(profile="SUCCEEDED", **told))
        server.end(state)

    server.script = [begin, end]
    done = stoker("start", "kubeflow", "w.yaml", "--wait")
    assert done.returncode == code, done.stderr
    # The id alone, for scripts.
    assert done.stdout == f"{server.run()['run_id']}\n"
    assert "profile                  running" in done.stderr
    assert words in done.stderr


def test_waiting_tells_each_step_s_begin_and_end_and_nothing_of_argo_s(
    server: KfpServer, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(server)
    monkeypatch.setattr(orchestrators, "POLL_SECONDS", 0.0)
    spec = spec_of_text(compiled().definition)
    names = [task.name for task in tasks_of(spec) if task.kind == "Container"]
    groups = [task.name for task in tasks_of(spec) if task.kind == "Condition"]

    def look(ended: list[str], running: list[str]) -> Callable[[], None]:
        told = {name.replace("-", "_"): "SUCCEEDED" for name in ended}
        told |= {name.replace("-", "_"): "RUNNING" for name in running}
        return lambda: server.tell(*tasks(**told))

    for at, name in enumerate(names):
        server.script += [look(names[:at], [name])] * 2
    server.script += [look(names, []), lambda: server.end("SUCCEEDED")]
    done = stoker("start", "kubeflow", "w.yaml", "--wait")
    assert done.returncode == 0, done.stderr
    told = [line.split()[1:3] for line in done.stderr.splitlines() if re.match(r"\d\d:\d\d", line)]
    for name in names:
        assert [words for words in told if words[0] == name] == [
            [name, "running"],
            [name, "succeeded"],
        ]
    assert {words[0] for words in told} <= {*names, *groups}


def test_a_failed_step_is_shown_with_its_reason_and_its_last_lines_by_both_verbs(
    server: KfpServer, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(server)
    monkeypatch.setattr(orchestrators, "POLL_SECONDS", 0.0)
    found = tasks(profile="SUCCEEDED", gate="FAILED main: Error (exit code 1)", finish="SUCCEEDED")
    log = (ROOT / "tests" / "data" / "kubeflow_logs" / "gate.log").read_text()
    (pod,) = (pod_of(n) for n in found if str(n["name"]).endswith(".gate(0).executor(0)"))
    server.logs[pod] = log

    def end() -> None:
        server.tell(*found)
        server.end("FAILED")

    server.script = [end]
    done = stoker("start", "kubeflow", "w.yaml", "--wait")
    assert done.returncode == 3, done.stderr
    id = done.stdout.strip()
    assert f"{id} has failed: gate: accuracy is 0.61, asked for at least 0.9\n" in done.stderr
    own = ["error: accuracy is 0.61, asked for at least 0.9", "where: the gate"]
    last = "the last lines of gate:\n" + "".join(f"    {line}\n" for line in own)
    assert last in done.stderr
    # The pods are gone, and Argo has kept the log.
    server.logs.clear()
    server.kept_logs[pod] = log
    shown = stoker("status", "kubeflow", id)
    assert shown.returncode == 0, shown.stderr
    lines = [line.strip() for line in shown.stdout.splitlines()]
    at = lines.index("why:  accuracy is 0.61, asked for at least 0.9")
    assert lines[at + 1 : at + 3] == own
    # Neither Kubeflow's lines nor Argo's, and no node of theirs.
    assert "launcher_v2" not in done.stderr + shown.stdout
    for name in ("-driver", "onExit", "executor", "root", "(0)"):
        assert name not in done.stderr + shown.stdout


def test_nodes_that_the_strict_double_made_are_told_as_the_pipeline_s_tasks(
    server: KfpServer, tmp_path: Path
) -> None:
    """The double follows Argo's and Kubeflow's sources step by step; `tasks` only draws nodes."""
    upload(server)
    target = target_at(server)
    id = target.start(workload(), parameters=()).run

    def execute(step: Step) -> int:
        outputs = step.executor_input["outputs"]
        for name in (*outputs["artifacts"], *outputs.get("parameters", {})):
            if name != "executor-logs":
                step.output(name).write_text("1")
        return 3 if step.task == "gate" else 0

    run = KubeflowRun(
        Pipeline(compiled().definition), execute=execute, store=Store(tmp_path), run_id=id
    )
    assert run.run() == "FAILED"
    server.tell(*nodes_played(run))
    server.end("FAILED")
    (pod,) = (n.pod for n in run.nodes.values() if n.name.endswith(".gate(0).executor(0)"))
    server.logs[pod] = (ROOT / "tests" / "data" / "kubeflow_logs" / "gate.log").read_text()
    state = target.status(id)
    ended = {step.name: step.status for step in state.steps}
    assert ended["gate"] == "failed"
    assert ended["finish"] == ended["evaluate"] == "succeeded"
    assert not {"waiting", "running"} & set(ended.values())
    (gate,) = (step for step in state.steps if step.name == "gate")
    assert (gate.job, gate.reason) == (pod, "accuracy is 0.61, asked for at least 0.9")
    assert state.exit_code == 3
    # The API's tasks alone, without the Workflow, tell the same states.
    server.trouble("GET /apis/v1beta1.*", 404, "Not Found")
    assert {step.name: step.status for step in target.status(id).steps} == ended


@dsl.container_component
def named(text: str, aside: str = "own"):  # type: ignore[no-untyped-def]
    """Names an input in its arguments that a caller may leave out."""
    return dsl.ContainerSpec(image="a/b", command=["say"], args=[text, f"--aside={aside}"])


@dsl.pipeline(name="small")
def careless(word: str = "x") -> None:
    """Leaves an input out that the component names in its arguments."""
    first = named(text=word)
    named(text="y").after(first)


def test_a_step_whose_driver_failed_on_the_strict_double_has_the_driver_s_reason(
    server: KfpServer, tmp_path: Path
) -> None:
    upload(server)
    target = target_at(server)
    id = target.start(workload(), parameters=()).run
    definition = kubeflow.compiled(careless)
    run = KubeflowRun(
        Pipeline(definition), execute=lambda step: 0, store=Store(tmp_path), run_id=id
    )
    assert run.run() == "FAILED"
    server.run()["pipeline_spec"] = dict(spec_of_text(definition).pipeline)
    server.tell(*nodes_played(run))
    server.end("FAILED")
    server.logs = {run.nodes[name].pod: log for name, log in run.logs.items()}
    state = target.status(id)
    assert [(step.name, step.status) for step in state.steps] == [
        ("named", "failed"),
        ("named-2", "not run"),
    ]
    assert state.steps[0].reason == (
        "failed to resolve container args: failed to resolve input parameters: "
        'parameter "aside" not found in executor input'
    )
    assert state.exit_code == 4


def test_interrupting_the_wait_leaves_the_run_running(server: KfpServer, project: Path) -> None:
    upload(server)
    child = subprocess.Popen(
        [sys.executable, "-m", "stoker.cli", "start", "kubeflow", "w.yaml", "--wait"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "KF_PIPELINES_ENDPOINT": server.url},
    )
    deadline = time.monotonic() + 60
    while not any(line.startswith("GET /runs/") for line in server.sent("GET")):
        assert time.monotonic() < deadline
        assert child.poll() is None
        time.sleep(0.02)
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "the run goes on" in said
    assert f"stoker stop kubeflow {server.run()['run_id']} --workload w.yaml" in said
    assert not any("terminate" in line for line in server.sent())


def test_status_prints_the_tree_with_reasons_and_next_commands(
    server: KfpServer, project: Path
) -> None:
    upload(server)
    id = target_at(server).start(workload(), parameters=["epochs=3"]).run
    server.tell(*tasks(profile="SUCCEEDED", decide="FAILED main: Error (exit code 1)"))
    server.end("FAILED")
    done = stoker("status", "kubeflow", id)
    assert done.returncode == 0, done.stderr
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    assert lines[0].startswith(f"{id}  failed")
    assert f"  page: {server.url}/#/runs/details/{id}" in lines
    assert "  with: epochs = 3" in lines
    assert any(
        line.startswith("  profile                Container      succeeded") for line in lines
    )
    assert "        why:  main: Error (exit code 1)".removeprefix("  ") in lines
    assert any(line.split()[:3] == ["evaluate", "Container", "not"] for line in lines)
    assert not any(line.startswith("stop:") for line in lines)


def test_a_run_is_found_by_id_page_and_pipeline(server: KfpServer) -> None:
    upload(server)
    target = target_at(server)
    older, newer = (target.start(workload(), parameters=()) for _ in range(2))
    assert target.status(older.run.upper()).run == older.run
    assert target.status(older.url).run == older.run
    assert target.status("mnist").run == newer.run
    assert [item.run for item in target.runs("mnist")] == [newer.run, older.run]
    assert target.runs(older.run) == ()


def test_runs_of_other_pipelines_are_not_this_one_s(server: KfpServer) -> None:
    upload(server)
    target = target_at(server)
    mine = target.start(workload(), parameters=())
    foreign = {**server.run(), "run_id": "foreign"}
    foreign["pipeline_version_reference"] = {"pipeline_id": "another"}
    server.kept["runs"].append(foreign)
    assert target.status("mnist").run == mine.run
    assert [item.run for item in target.runs("mnist")] == [mine.run]


@pytest.mark.parametrize(
    ("run_name", "words"),
    [
        ("00000000-0000-4000-8000-000000000000", "there is no run 00000000"),
        ("mnits", "there is no pipeline and no run mnits"),
        ("mnist", "pipeline mnist has not run yet"),
    ],
)
def test_a_run_that_is_not_there_is_named(server: KfpServer, run_name: str, words: str) -> None:
    upload(server)
    with pytest.raises(UsageError, match=words):
        target_at(server).status(run_name)


def test_stop_of_a_run_that_has_ended_sends_nothing(server: KfpServer, project: Path) -> None:
    upload(server)
    id = target_at(server).start(workload(), parameters=()).run
    server.end("SUCCEEDED")
    done = stoker("stop", "kubeflow", id)
    assert done.returncode == 0, done.stderr
    assert "had already ended: succeeded" in done.stderr
    assert not any("terminate" in line for line in server.sent())


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesApi]:
    """Plays the cluster where steps make jobs."""
    with kubernetes_api() as made:
        use_kube_config(monkeypatch, kube_config(tmp_path, made.url))
        yield made


def make_job(name: str, **settings: Json) -> None:
    """Makes the job that a step of a run follows."""
    platform = KubernetesPlatform()
    spec = kubernetes_job(name=name, settings={"namespace": NAMESPACE, **settings})
    platform.submit(platform.plan(spec))


@pytest.mark.parametrize(
    ("api_name", "plural"), [("jobset", "jobsets"), ("trainer", "trainjobs")], ids=str
)
def test_stop_deletes_the_jobs_of_the_run_and_no_others(
    server: KfpServer,
    api: KubernetesApi,
    monkeypatch: pytest.MonkeyPatch,
    api_name: str,
    plural: str,
) -> None:
    upload(server, namespace=NAMESPACE)
    target = target_at(server, namespace=NAMESPACE)
    id = target.start(workload(), parameters=()).run
    name = workload().run_name(id)
    for job in (name, "mnist-0badcafe"):
        make_job(job, api=api_name)
    # A profile's name has nothing of the run: its step says whose it is.
    for key, value in {"POD_NAME": "step", "POD_UID": "uid", "POD_RUN_ID": id}.items():
        monkeypatch.setenv(key, value)
    make_job("mnist-profile-20261122-110000", api=api_name)
    state = target.stop(id)
    assert state.status == "stopped"
    (note,) = state.notes
    assert note.startswith(f"deleted in namespace {NAMESPACE}: ")
    assert name in note
    assert "mnist-profile-20261122-110000" in note
    assert api.names(plural) == ["mnist-0badcafe"]


def test_stop_of_a_run_that_has_ended_deletes_the_job_that_its_last_step_could_not(
    server: KfpServer, api: KubernetesApi, project: Path
) -> None:
    upload(server)
    id = target_at(server).start(workload(), parameters=()).run
    server.end("FAILED")
    make_job(workload().run_name(id))
    done = stoker("stop", "kubeflow", id, "--workload", "w.yaml", "--set", IN_NAMESPACE)
    assert done.returncode == 0, done.stderr
    assert f"deleted in namespace {NAMESPACE}: JobSet {workload().run_name(id)}" in done.stderr
    assert api.names("jobsets") == []
    assert not any("terminate" in line for line in server.sent())


@pytest.mark.parametrize("why", ["denied", "away"])
def test_stop_says_who_ends_the_jobs_where_the_cluster_refuses(
    server: KfpServer, api: KubernetesApi, why: str
) -> None:
    upload(server, namespace=NAMESPACE)
    target = target_at(server, namespace=NAMESPACE)
    id = target.start(workload(), parameters=()).run
    make_job(workload().run_name(id))
    if why == "denied":
        api.denied |= {("list", "jobsets"), ("list", "trainjobs")}
    else:
        api.faults.append(Fault("GET", "jobsets", code=503, times=100))
    state = target.stop(id)
    assert state.status == "stopped"
    (note,) = state.notes
    assert "its jobs are left to the run's own last step" in note


def test_stop_waits_no_longer_than_its_deadline(server: KfpServer) -> None:
    server.on_terminate = None
    upload(server)
    target = target_at(server)
    id = target.start(workload(), parameters=()).run
    with pytest.raises(PlatformError, match="is stopping after 600 s"):
        target.stop(id)


def test_a_run_that_ends_while_it_is_asked_to_stop_is_no_error(server: KfpServer) -> None:
    upload(server)
    target = target_at(server)
    id = target.start(workload(), parameters=()).run
    server.trouble(".*:terminate", 400, '{"message": "not running"}')
    server.run()["state"] = "RUNNING"
    server.script = [lambda: None, lambda: server.end("SUCCEEDED")]
    assert target.stop(id).status == "succeeded"


def test_a_run_that_failed_because_it_was_stopped_was_stopped(server: KfpServer) -> None:
    server.on_terminate = "FAILED"
    upload(server)
    target = target_at(server)
    assert target.stop(target.start(workload(), parameters=()).run).status == "stopped"


def test_many_users_need_a_namespace_and_it_goes_with_everything(
    server: KfpServer, project: Path
) -> None:
    server.multi_user = True
    done = stoker("start", "kubeflow", "w.yaml")
    assert done.returncode == 2
    assert "which is yours?" in done.stderr
    words = ("--namespace", "ada")
    for verb in ("upload", "start"):
        done = stoker(verb, "kubeflow", "w.yaml", *words)
        assert done.returncode == 0, done.stderr
    assert "--workload w.yaml --namespace ada" in done.stderr
    assert server.kept["pipelines"][0]["namespace"] == "ada"
    assert server.kept["experiments"][0]["namespace"] == "ada"
    assert stoker("status", "kubeflow", "mnist", *words).returncode == 0
    assert stoker("status", "kubeflow", "mnist", "--namespace", "bob").returncode == 2


def test_one_user_s_kubeflow_gets_no_namespace_though_one_is_named(server: KfpServer) -> None:
    upload(server, namespace="ada")
    assert all("namespace" not in request.query for request in server.requests)


def test_flags_of_kubeflow_are_refused_elsewhere(project: Path) -> None:
    done = stoker("status", "sagemaker", "mnist", "--host", "http://x")
    assert done.returncode == 2
    assert "--host is only for kubeflow" in done.stderr


def test_options_of_a_run_have_defaults_of_the_workload(server: KfpServer) -> None:
    upload(server)
    of = workload("kubernetes.kubeflow={experiment: weekly, service_account: robot}")
    target_at(server, options=RunOptions(run_name="x")).start(of, parameters=())
    assert server.run()["service_account"] == "robot"
    assert server.kept["experiments"][0]["display_name"] == "weekly"
