"""The verbs of pipelines on Kubeflow, on a server that checks requests by the published API."""

import json
import re
import socket
from types import SimpleNamespace

import pytest
import yaml

pytest.importorskip("kfp")

from stoker.errors import PlatformError, ServiceError, UsageError
from stoker.platforms.kubernetes import KubernetesPlatform
from stoker.records import Json
from support.command import stoker, succeeds
from support.kfp_server import KfpServer
from support.kubeflow_backend import KubeflowRun, Pipeline, Step, Store
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


def test_upload_start_status_and_stop_as_people_run_them(server, project):
    early = stoker("start", "kubeflow", "w.yaml")
    assert early.returncode == 2
    assert "pipeline mnist is not uploaded" in early.stderr
    uploaded = succeeds("upload", "kubeflow", "w.yaml")
    (pipeline,) = server.kept["pipelines"]
    assert f"created: {pipeline['pipeline_id']}" in uploaded.stdout
    assert f"/#/pipelines/details/{pipeline['pipeline_id']}/version/" in uploaded.stdout
    assert "next:    stoker start kubeflow w.yaml" in uploaded.stdout
    started = succeeds("start", "kubeflow", "w.yaml", "--param", "epochs=3")
    assert server.run()["runtime_config"] == {"parameters": {"epochs": 3}}
    shown = stoker("status", "kubeflow", "mnist", "--workload", "w.yaml", "--json")
    run = json.loads(shown.stdout)
    assert (shown.returncode, run["run"]) == (0, started.stdout.strip())
    stopped = succeeds("stop", "kubeflow", run["url"], "--host", server.url)
    assert f"{run['run']}  CANCELED" in stopped.stdout
    made = ("pipelines", "pipelines/upload_version", "experiments", "runs")
    paths = (*made, f"runs/{run['run']}:terminate")
    assert server.sent() == [f"POST /{path}" for path in paths]


def test_an_upload_shows_what_changes_and_sends_nothing_if_nothing_does(server, project):
    succeeds("upload", "kubeflow", "w.yaml")
    (versions,) = server.versions.values()
    # Another kfp compiled it.
    versions[0]["pipeline_spec"]["pipeline_spec"]["sdkVersion"] = "kfp-9.9.9"
    before = server.sent()
    again = stoker("upload", "kubeflow", "w.yaml")
    assert (again.returncode, server.sent()) == (0, before)
    assert "pipeline mnist: no change" in again.stderr
    assert again.stdout.startswith("unchanged: ")
    changed = succeeds("upload", "kubeflow", "w.yaml", "--set", "feed.credits=5")
    # The workload is text in the pipeline, and compared by its keys.
    key, steps = [line for line in changed.stderr.splitlines() if line.startswith("  ")]
    assert re.fullmatch(r"  feed\.credits: \S+ -> 5", key)
    # Whose pod carries the digest of what its figures depend on.
    assert steps == "  steps that change: profile"
    assert "next:    stoker start kubeflow w.yaml --set feed.credits=5\n" in changed.stdout
    assert server.sent().count("POST /pipelines") == 1
    # A content that comes back is another version.
    assert upload(server)["action"] == "updated"
    assert len(versions) == 3


def test_a_check_sends_nothing_and_its_exit_code_tells(server, project):
    words = ("upload", "kubeflow", "w.yaml", "--check")
    assert stoker(*words).returncode == 11
    assert server.sent() == []
    succeeds("upload", "kubeflow", "w.yaml")
    before = server.sent()
    assert stoker(*words).returncode == 0
    changed = stoker(*words, "--set", "gate=[{metric: accuracy, min: 0.99}]")
    assert (changed.returncode, changed.stdout) == (10, "changed: mnist\n")
    assert server.sent() == before


def test_a_pipeline_whose_first_version_failed_gets_it_with_the_next_upload(server):
    server.trouble("POST /pipelines/upload_version", 500, "{}", times=1)
    with pytest.raises(PlatformError, match="500"):
        upload(server)
    assert upload(server)["action"] == "updated"
    assert server.sent().count("POST /pipelines") == 1


def test_a_run_has_typed_parameters_and_the_workload_s_account_and_experiment(server):
    upload(server)
    where = "kubernetes.kubeflow={service_account: trainer, experiment: nightly}"
    texts = ("Epochs=3", "gate=accuracy>=0.5", "cache_days=0", "max_usd_per_hour=2.50")
    for _ in range(2):
        client_at(server, where).start(workload(where), texts)
    sent = server.run()
    (experiment,) = server.kept["experiments"]
    assert experiment["display_name"] == "nightly"
    assert sent["experiment_id"] == experiment["experiment_id"]
    assert sent["service_account"] == "trainer"
    typed = {"epochs": 3, "gate": "accuracy>=0.5", "cache_days": 0, "max_usd_per_hour": "2.50"}
    assert sent["runtime_config"]["parameters"] == typed
    ((version,),) = server.versions.values()
    used = sent["pipeline_version_reference"]["pipeline_version_id"]
    assert used == version["pipeline_version_id"]


def test_a_profile_to_reuse_is_sent_as_the_text_of_its_file(server, tmp_path):
    upload(server)
    (tmp_path / "profile.json").write_text('{"kind": "profile"}')
    client_at(server).start(workload(), [f"reuse_profile={tmp_path / 'profile.json'}"])
    config = server.run()["runtime_config"]
    assert config == {"parameters": {"reuse_profile": '{"kind": "profile"}'}}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cache_days=soon", "cache_days=soon: expected a whole number"),
        ("cache_days=true", "cache_days=true: expected a whole number"),
        ("reuse_profile=nowhere.json", "no such file: nowhere.json"),
        ("reuse_profile={", "not a profile.json"),
        ("image=", "image is empty"),
        ("instance_count=0", "at least one host"),
        ("weekday=1", "no parameter weekday"),
    ],
)
def test_a_parameter_that_cannot_be_starts_nothing(server, text, words):
    upload(server)
    with pytest.raises(UsageError, match=words):
        client_at(server).start(workload(), [text])
    assert server.kept["runs"] == []


def test_a_schedule_starts_the_latest_version_and_replaces_the_one_of_its_name(server, project):
    upload(server)
    words = ("schedule", "kubeflow", "w.yaml", "--cron")
    done = succeeds(*words, "0 30 6 * * 1-5", "--param", "epochs=2")
    assert done.stdout.startswith("schedule stoker-mnist: created  0 30 6 * * 1-5  UTC\n  next: ")
    (made,) = server.kept["recurringruns"]
    ((pipeline_id, _),) = server.versions.items()
    assert made["pipeline_version_reference"] == {"pipeline_id": pipeline_id}
    assert made["trigger"] == {"cron_schedule": {"cron": "0 30 6 * * 1-5"}}
    assert made["runtime_config"] == {"parameters": {"epochs": 2}}
    assert (made["status"], made["max_concurrency"], made["no_catchup"]) == ("ENABLED", "1", True)
    succeeds(*words, "@every 12h", "--name", "often")
    replaced = succeeds(*words, "@daily")
    assert "  cron: 0 30 6 * * 1-5 -> @daily\n  kept: epochs=2\n" in replaced.stdout
    (kept,) = (s for s in server.kept["recurringruns"] if s["display_name"] == "stoker-mnist")
    assert kept["runtime_config"] == {"parameters": {"epochs": 2}}
    sent = server.sent()
    assert succeeds(*words, "@daily").stdout.startswith("schedule stoker-mnist: unchanged ")
    assert server.sent() == sent
    triggers = {s["display_name"]: s["trigger"] for s in server.kept["recurringruns"]}
    times = {"stoker-mnist": "@daily", "stoker-mnist-often": "@every 12h"}
    assert triggers == {name: {"cron_schedule": {"cron": cron}} for name, cron in times.items()}


def test_an_upload_makes_and_changes_the_schedule_of_the_workload(server, project):
    own = {"cron": "0 0 5 * * 2", "parameters": {"max_usd": 4, "epochs": 6}}
    words = ("upload", "kubeflow", "w.yaml")
    wanted = ("--set", f"kubernetes.kubeflow.schedule={json.dumps(own)}")
    assert "schedule: created: stoker-mnist\n" in succeeds(*words, *wanted).stdout
    (made,) = server.kept["recurringruns"]
    assert made["trigger"] == {"cron_schedule": {"cron": "0 0 5 * * 2"}}
    assert made["runtime_config"] == {"parameters": {"max_usd": "4", "epochs": 6}}
    again = succeeds(*words, *wanted)
    assert "pipeline mnist: no change" in again.stderr
    assert "schedule: unchanged: stoker-mnist\n" in again.stdout
    changed = succeeds(*words, *wanted, "--set", "kubernetes.kubeflow.schedule.cron='@weekly'")
    assert "cron: 0 0 5 * * 2 -> @weekly" in changed.stderr
    (made,) = server.kept["recurringruns"]
    assert made["trigger"] == {"cron_schedule": {"cron": "@weekly"}}
    left = succeeds(*words)
    assert "schedule stoker-mnist (@weekly UTC) still starts runs" in left.stderr
    assert "kfp recurring-run delete ID" in left.stderr
    hour = stoker(*words, *wanted, "--set", "kubernetes.kubeflow.schedule.cron=0 0 25 * * *")
    assert hour.returncode == 2
    assert "hour 25 is not in 0 to 23" in hour.stderr


def test_a_schedule_that_somebody_switched_off_stays_off(server, project):
    upload(server)
    words = ("schedule", "kubeflow", "w.yaml", "--cron")
    assert "disabled" not in stoker(*words, "@daily").stdout
    (made,) = server.kept["recurringruns"]
    made["status"] = "DISABLED"
    assert "disabled, as before" in stoker(*words, "@every 12h").stdout
    (made,) = server.kept["recurringruns"]
    assert made["status"] == "DISABLED"


def test_a_run_whose_gate_failed_ends_with_3(server, tmp_path, monkeypatch, project):
    """It is told by its tasks: the strict double makes nodes as Kubeflow's compiler and Argo do."""
    upload(server)
    monkeypatch.setattr("stoker.pipelines.base.WAIT_SECONDS", 0.0)

    def execute(step: Step) -> int:
        step.write_outputs()
        return 3 if step.task == "gate" else 0

    pipeline = Pipeline(compiled().definition)
    played = KubeflowRun(pipeline, execute=execute, store=Store(tmp_path / "store"))
    assert played.run() == "FAILED"

    def ends() -> None:
        server.tell(*played.workflow_nodes())
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


@pytest.mark.parametrize(("state", "code"), [("SUCCEEDED", 0), ("FAILED", 4), ("CANCELED", 4)])
def test_a_run_that_ended_otherwise_ends_with_0_or_4(server, project, state, code):
    upload(server)
    client_at(server).start(workload(), ())
    server.end(state, error={"message": "no node"})
    done = stoker("status", "kubeflow", "mnist", "--workload", "w.yaml")
    assert done.returncode == code
    assert f"{state}: no node" in done.stdout


def test_a_run_that_is_not_there_is_named(server):
    upload(server)
    with pytest.raises(UsageError, match="pipeline run mnist not found"):
        client_at(server).status("mnist")
    with pytest.raises(ServiceError, match="404"):
        client_at(server).status("5b1f6c3e-0000-4000-8000-00000000abcd")


@pytest.fixture
def api(tmp_path, monkeypatch):
    """The cluster where steps make jobs."""
    with kubernetes_api() as made:
        use_kube_config(monkeypatch, kube_config(tmp_path, made.url))
        # The folders of runs are below this one.
        monkeypatch.chdir(tmp_path)
        yield made


def make_job(name: str, **settings: Json) -> None:
    platform = KubernetesPlatform()
    spec = kubernetes_job(name=name, settings={"namespace": NAMESPACE, **settings})
    platform.submit(platform.plan(spec))


@pytest.fixture
def begun(server):
    upload(server)
    client = client_at(server, namespace=NAMESPACE)
    return client, client.start(workload(), ()).run


@pytest.mark.parametrize(("kind", "plural"), [("jobset", "jobsets"), ("trainer", "trainjobs")])
def test_stop_deletes_the_jobs_of_the_run_and_no_others(server, api, begun, kind, plural):
    client, run = begun
    name = workload().run_name(run)
    for job in (name, "mnist-0badcafe"):
        make_job(job, api=kind)
    state = client.stop(run)
    assert state.status == "CANCELED"
    assert f"deleted in namespace {NAMESPACE}: " in state.note
    assert name in state.note
    assert api.names(plural) == ["mnist-0badcafe"]
    # Kubeflow of a single user gets no namespace.
    assert all("namespace" not in request.query for request in server.requests)


def test_stop_of_an_ended_run_deletes_the_job_that_its_last_step_could_not(server, api, begun):
    client, run = begun
    server.end("FAILED")
    make_job(workload().run_name(run))
    assert client.stop(run).status == "FAILED"
    assert api.names("jobsets") == []
    assert not any("terminate" in line for line in server.sent())


def test_stop_says_who_ends_the_jobs_if_the_cluster_refuses(api, begun):
    client, run = begun
    api.denied |= {("list", "jobsets"), ("list", "trainjobs")}
    assert "its jobs are left to the run's own last step" in client.stop(run).note


def test_stop_waits_no_longer_than_its_deadline(server, begun):
    client, run = begun
    server.on_terminate = None
    with pytest.raises(PlatformError, match="is CANCELING after 600 s"):
        client.stop(run)


def test_a_run_that_ends_while_it_is_asked_to_stop_is_no_error(server, begun):
    client, run = begun
    server.trouble(".*:terminate", 400, '{"message": "not running"}')
    server.script = [lambda: None, lambda: server.end("SUCCEEDED")]
    assert client.stop(run).status == "SUCCEEDED"


def test_many_users_need_a_namespace_and_it_goes_with_everything(server, project):
    server.multi_user = True
    done = stoker("start", "kubeflow", "w.yaml", "--set", "kubernetes.namespace=null")
    assert done.returncode == 2
    assert "many users, each with a namespace" in done.stderr
    for verb in ("upload", "start"):
        done = succeeds(verb, "kubeflow", "w.yaml", "--namespace", "ada")
    assert "--workload w.yaml --namespace ada" in done.stderr
    assert server.kept["pipelines"][0]["namespace"] == "ada"
    assert server.kept["experiments"][0]["namespace"] == "ada"
    with pytest.raises(UsageError, match="pipeline run mnist not found"):
        client_at(server, namespace="bob").status("mnist")


@pytest.mark.parametrize(
    ("status", "body", "words", "fix"),
    [
        (400, '{"message": "bad token"}', "answers 400: bad token", ""),
        (401, '{"message": "no identity"}', "401: no identity", "--token-file F"),
        (403, '{"message": "not allowed"}', "403: not allowed", "--token-file F"),
        (503, "no healthy upstream", "503: no healthy upstream", ""),
        (200, PAGE, "a web page in place of JSON, such as a login", "https://SITE/pipeline"),
        (404, PAGE, "a web page in place of JSON", "https://SITE/pipeline"),
        (200, "pong", "pong", ""),
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


def test_a_server_that_does_not_answer_is_named_with_the_way_to_it(monkeypatch):
    with KfpServer() as gone:
        pass
    with pytest.raises(ServiceError, match="no answer") as caught:
        upload(gone)
    assert caught.value.where == gone.url
    assert "port-forward" in caught.value.fix
    monkeypatch.setattr("stoker.pipelines.kubeflow.client.TIMEOUT_SECONDS", (5.0, 0.1))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        slow = SimpleNamespace(url=f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(ServiceError, match=r"no answer.*timed out"):
            upload(slow)


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


def test_a_kube_config_s_renewed_login_keeps_the_path_of_the_service(api, tmp_path, monkeypatch):
    from stoker.pipelines.kubeflow.client import KubeflowClient

    config = yaml.safe_load(kube_config(tmp_path, api.url).read_text())
    config["users"][0]["user"] = {"token": "of-the-cluster"}
    file = tmp_path / "with-a-token"
    file.write_text(yaml.safe_dump(config))
    use_kube_config(monkeypatch, file)
    client = KubeflowClient(None)
    for _ in range(2):
        with pytest.raises(ServiceError) as caught:
            client.call("healthz", "get_healthz")
        assert "/services/ml-pipeline:http/proxy" in caught.value.where


def test_flags_of_kubeflow_are_refused_elsewhere(project):
    done = stoker("status", "sagemaker", "mnist", "--host", "http://a")
    assert done.returncode == 2
    assert "--host http://a is only for kubeflow" in done.stderr
