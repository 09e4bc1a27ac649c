"""The verbs of pipelines on Kubeflow, on a server that checks requests by the published API."""

import json

import pytest

pytest.importorskip("kfp")

from stoker.errors import ServiceError, UsageError
from stoker.platforms.kubernetes import KubernetesPlatform
from stoker.records import Json
from support.command import stoker, succeeds
from support.kfp_server import KfpServer
from support.kubeflow_uploads import (
    client_at,
    compiled,
    upload,
    workload,
    write_project,
)
from support.kubernetes_api import NAMESPACE, kube_config, kubernetes_api
from support.kubernetes_jobs import job as kubernetes_job
from support.platform_jobs import use_kube_config

PAGE = "<!DOCTYPE html><html><title>Log in</title></html>"


@pytest.fixture
def server():
    with KfpServer() as made:
        yield made
    assert made.problems == []


@pytest.fixture
def project(tmp_path, server, monkeypatch):
    write_project(tmp_path, host=server.url)
    monkeypatch.chdir(tmp_path)


def test_an_upload_shows_what_changes_and_sends_nothing_if_nothing_does(server, project):
    succeeds("upload", "kubeflow", "w.yaml")
    (versions,) = server.versions.values()
    # Another kfp compiled it.
    versions[0]["pipeline_spec"]["pipeline_spec"]["sdkVersion"] = "kfp-9.9.9"
    before = server.sent()
    again = stoker("upload", "kubeflow", "w.yaml")
    assert (again.returncode, server.sent()) == (0, before)
    assert "pipeline mnist: unchanged" in again.stderr
    assert again.stdout.startswith("unchanged: ")
    changed = succeeds("upload", "kubeflow", "w.yaml", "--set", "feed.max_errors=5")
    assert "next:    stoker start kubeflow w.yaml\n" in changed.stdout
    assert server.sent().count("POST /pipelines/upload") == 1
    # A content that comes back is another version.
    assert upload(server)["action"] == "updated"
    assert len(versions) == 3


def test_a_run_has_typed_parameters_and_the_workload_s_account_and_experiment(server):
    upload(server)
    where = "kubernetes.kubeflow={service_account: trainer, experiment: nightly}"
    texts = ("epochs=3", "gate=accuracy>=0.5", "max_data_hosts=0", "max_usd_per_hour=2.50")
    for _ in range(2):
        client_at(server, where).start(workload(where), texts)
    sent = server.run()
    (experiment,) = server.kept["experiments"]
    assert experiment["display_name"] == "nightly"
    assert sent["experiment_id"] == experiment["experiment_id"]
    assert sent["service_account"] == "trainer"
    typed = {"epochs": 3, "gate": "accuracy>=0.5", "max_data_hosts": 0, "max_usd_per_hour": "2.50"}
    assert sent["runtime_config"]["parameters"] == typed
    ((version,),) = server.versions.values()
    used = sent["pipeline_version_reference"]["pipeline_version_id"]
    assert used == version["pipeline_version_id"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("epochs=soon", "epochs=soon: expected a whole number"),
        ("reuse_profile=nowhere.json", "no such file: nowhere.json"),
        ("weekday=1", "no parameter weekday"),
    ],
)
def test_a_parameter_that_cannot_be_starts_nothing(server, project, text, words):
    upload(server)
    done = stoker("start", "kubeflow", "w.yaml", "--yes", "--param", text)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert server.kept["runs"] == []


def test_an_upload_makes_and_changes_the_schedule_of_the_workload(server, project):
    own = {"cron": "0 0 5 * * 2", "parameters": {"max_usd_per_hour": 4, "epochs": 6}}
    words = ("upload", "kubeflow", "w.yaml")
    wanted = ("--set", f"kubernetes.kubeflow.schedule={json.dumps(own)}")
    assert "schedule stoker-mnist: created  " in succeeds(*words, *wanted).stdout
    (made,) = server.kept["recurringruns"]
    assert made["trigger"] == {"cron_schedule": {"cron": "0 0 5 * * 2"}}
    assert made["runtime_config"] == {"parameters": {"max_usd_per_hour": "4", "epochs": 6}}
    changed = succeeds(*words, *wanted, "--set", "kubernetes.kubeflow.schedule.cron='@weekly'")
    assert "pipeline mnist: unchanged" in changed.stderr
    (made,) = server.kept["recurringruns"]
    assert made["trigger"] == {"cron_schedule": {"cron": "@weekly"}}
    zone = stoker(*words, *wanted, "--set", "kubernetes.kubeflow.schedule.time_zone=Asia/Tokyo")
    assert zone.returncode == 2
    assert "knows UTC alone" in zone.stderr


def test_a_run_whose_gate_failed_ends_with_3(server, tmp_path, monkeypatch, project):
    upload(server)
    monkeypatch.setattr("stoker.pipelines.base.WAIT_SECONDS", 0.0)
    drivers = dict.fromkeys(("root", "root-driver", "exit-handler-1", "gate-driver"), "Succeeded")
    tasks = {"evaluate": "Succeeded", "gate": "Failed", "gate(0)": "Failed", "finish": "Succeeded"}

    def ends() -> None:
        phases = {**drivers, **tasks, "executor": "Failed"}
        server.tell(*({"id": n, "displayName": n, "phase": p} for n, p in phases.items()))
        server.end("FAILED")

    server.script = [lambda: None, ends]
    waited = stoker("start", "kubeflow", "w.yaml", "--wait")
    assert waited.returncode == 3, waited.stderr
    shown = stoker("status", "kubeflow", "mnist", "--workload", "w.yaml", "--json")
    assert shown.returncode == 3
    steps = {step["name"]: step["status"] for step in json.loads(shown.stdout)["steps"]}
    assert steps["gate"] == "FAILED"
    assert steps["finish"] == steps["evaluate"] == "SUCCEEDED"
    assert not any("driver" in name or "(" in name or name == "root" for name in steps)


@pytest.fixture
def api(tmp_path, monkeypatch):
    """The cluster where steps make jobs."""
    with kubernetes_api() as made:
        use_kube_config(monkeypatch, kube_config(tmp_path, made.url))
        # The folders of runs are below this one.
        monkeypatch.chdir(tmp_path)
        yield made


def make_job(name: str, **settings: Json) -> None:
    """Makes the job of a step of a pipeline's run, whose pod this process is."""
    platform = KubernetesPlatform()
    spec = kubernetes_job(name=name, settings={"namespace": NAMESPACE, **settings})
    platform.submit(platform.plan(spec))


@pytest.fixture
def begun(server):
    upload(server)
    client = client_at(server, namespace=NAMESPACE)
    return client, client.start(workload(), ()).run


@pytest.mark.parametrize(("kind", "plural"), [("jobset", "jobsets"), ("trainer", "trainjobs")])
def test_stop_deletes_the_jobs_of_the_run_and_no_others(
    server, api, begun, kind, plural, monkeypatch
):
    client, run = begun
    name = workload().run_name(run)
    for job, run_id in ((name, run), ("mnist-0badcafe", "0badcafe-0000")):
        for key, value in api.make_step(f"{job}-step", workflow="", run_id=run_id).items():
            monkeypatch.setenv(key, value)
        make_job(job, api=kind)
    state = client.stop(run)
    assert state.status == "CANCELED"
    assert f"deleted in namespace {NAMESPACE}: " in state.note
    assert name in state.note
    assert api.names(plural) == ["mnist-0badcafe"]
    # Kubeflow of a single user gets no namespace.
    assert all("namespace" not in request.query for request in server.requests)


def test_many_users_need_a_namespace_and_it_goes_with_everything(server, project):
    server.multi_user = True
    done = stoker("start", "kubeflow", "w.yaml", "--set", "kubernetes.namespace=null")
    assert done.returncode == 2
    assert "many users, each with a namespace" in done.stderr
    for verb in ("upload", "start"):
        succeeds(verb, "kubeflow", "w.yaml", "--set", "kubernetes.kubeflow.namespace=ada")
    assert server.kept["pipelines"][0]["namespace"] == "ada"
    assert server.kept["experiments"][0]["namespace"] == "ada"
    with pytest.raises(UsageError, match="pipeline run mnist not found"):
        client_at(server, namespace="bob").status("mnist")


@pytest.mark.parametrize(
    ("status", "body", "words", "fix"),
    [
        (401, '{"message": "no identity"}', "401: no identity", "token_file: F"),
        (503, "no healthy upstream", "503: no healthy upstream", ""),
        (200, PAGE, "a web page in place of JSON, such as a login", "https://SITE/pipeline"),
    ],
)
def test_a_refusal_is_one_sentence_with_what_to_do(server, status, body, words, fix):
    server.trouble(".*", status, body)
    with pytest.raises(ServiceError) as caught:
        client_at(server).status("5b1f6c3e-0000-4000-8000-00000000abcd")
    error = caught.value
    assert words in error.what
    assert fix in error.fix
    assert "<" not in error.what
    assert (error.where, error.exit_code) == (server.url, 4)


def test_a_token_is_read_before_each_call_and_is_in_no_error(server, tmp_path, monkeypatch):
    server.token = "second"
    file = tmp_path / "token"
    file.write_text("first")
    client = client_at(server, token_file=file)
    with pytest.raises(ServiceError, match="401") as caught:
        client.compared(compiled())
    assert "first" not in f"{caught.value.what} {caught.value.fix}"
    file.write_text("second\n")
    assert client.compared(compiled())[0] is None
    monkeypatch.setenv("STOKER_KUBEFLOW_TOKEN", "second")
    assert client_at(server).compared(compiled())[0] is None
    with pytest.raises(UsageError, match="no such file"):
        client_at(server, token_file=tmp_path / "none").compared(compiled())
