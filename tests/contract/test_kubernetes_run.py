"""The real client takes a job on Kubernetes from submit() to its end, on an API server's double."""

import dataclasses
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, product
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.errors import NoCapacityError
from stoker.feed.timeline import COLUMNS
from stoker.platforms.base import JobSpec, leader_record
from stoker.platforms.kubernetes import KubernetesPlatform
from stoker.platforms.kubernetes import api as connection
from stoker.platforms.kubernetes.api import ClusterApi
from stoker.platforms.kubernetes.state import keep_profile, kept_profile
from stoker.profile import profile
from stoker.records import Group, write_json
from stoker.workload_file import workload_from
from support.cluster_files import rbac
from support.kubernetes_api import NAMESPACE, Fault, KubernetesApi, kube_config
from support.kubernetes_jobs import POOLS, WORKLOAD, leader_lines
from support.kubernetes_jobs import job as described_job
from support.local_job import until
from support.platform_jobs import use_kube_config
from support.sample_records import profile as sample_profile
from support.sample_records import training

NAME = "mnist-1"
EXIT_CODE = 7
LEADER, FIRST, SECOND = (f"{NAME}-{place}" for place in ("dnn-0-0", "data-0-0", "data-0-1"))
BOTH = pytest.mark.parametrize("api_name", ["jobset", "trainer"])
PLURAL = {"jobset": "jobsets", "trainer": "trainjobs"}
TRAINS = {"jobset": "dnn", "trainer": "node"}


@pytest.fixture
def clock():
    return SimpleNamespace(ahead=0.0)


@pytest.fixture
def cluster(api, clock, tmp_path, monkeypatch):
    use_kube_config(monkeypatch, kube_config(tmp_path, api.url))
    return ClusterApi(
        sleep=lambda seconds: time.sleep(min(seconds, 0.05)),
        clock=lambda: time.monotonic() + clock.ahead,
    )


@pytest.fixture
def job(tmp_path):
    return dataclasses.replace(described_job(name=NAME), run_dir=tmp_path / "run")


@pytest.fixture
def platform(cluster):
    return KubernetesPlatform(cluster=cluster)


def with_settings(job: JobSpec, **settings: Any) -> JobSpec:
    found = described_job(name=NAME, settings=settings)
    return dataclasses.replace(found, run_dir=job.run_dir)


@pytest.fixture
def step(api, monkeypatch):
    """Makes this process the pod of a Workflow's step from here on."""

    def become(name="step-1", *, workflow="w", run_id=""):
        if not api.has("workflows", workflow):
            api.make_workflow(workflow)
        for key, value in api.make_step(name, workflow=workflow, run_id=run_id).items():
            monkeypatch.setenv(key, value)

    return become


@pytest.fixture
def submit(platform, job):
    return lambda **settings: platform.submit(platform.plan(with_settings(job, **settings)))


@pytest.fixture
def start(follow, submit):
    return lambda **settings: follow(submit(**settings))


@pytest.fixture
def running(api, start):
    followed = start()
    api.run_pods(NAME)
    until(lambda: f"{LEADER}: runs" in followed.status, what="it runs")
    return followed


def only_pod(api: KubernetesApi, host: str = LEADER) -> str:
    (found,) = [name for name in api.names("pods") if name.startswith(f"{host}-")]
    return found


def trained(api, followed, *, api_name="jobset", lines):
    api.run_pods(NAME)
    leader = only_pod(api, f"{NAME}-{TRAINS[api_name]}-0-0")
    api.say(leader, "hello", *lines)
    for host in (FIRST, SECOND):
        api.say(only_pod(api, host), f"{host} serves")
    until(lambda: bool(followed.texts(SECOND) and followed.texts(FIRST)), what="the data hosts")
    api.end_pod(leader)
    api.end_job(NAME)


@BOTH
def test_the_workflow_of_the_step_owns_the_job(api, api_name, submit, step):
    step()
    submit(api=api_name)
    api.remove("pods", "step-1")
    assert api.names(PLURAL[api_name]) == [NAME]
    api.remove("workflows", "w")
    for plural in (PLURAL[api_name], "secrets", "configmaps", "trainingruntimes"):
        assert api.names(plural) == []


@pytest.mark.parametrize("plural", ["jobsets", "secrets", "configmaps"])
def test_an_answer_that_is_lost_makes_nothing_twice(api, plural, submit):
    api.faults.append(Fault("POST", plural, is_answer_lost=True))
    run = submit()
    assert api.names("jobsets") == [NAME]
    assert api.names("secrets") == [f"{NAME}-token"]
    run.stop()


@BOTH
def test_a_retry_makes_what_is_missing_and_a_failed_job_again(api, platform, job, api_name):
    request, plural = platform.plan(with_settings(job, api=api_name)), PLURAL[api_name]
    platform.submit(request)
    first = api.get(plural, NAME)["metadata"]["uid"]
    api.remove("secrets", f"{NAME}-token")
    api.remove("configmaps", f"{NAME}-config")
    platform.submit(request)
    assert api.names("secrets") == [f"{NAME}-token"]
    assert f"{NAME}-config" in api.names("configmaps")
    assert api.get(plural, NAME)["metadata"]["uid"] == first
    token = api.token(NAME)
    api.end_job(NAME, "Failed", message="jobset failed")
    platform.submit(request)
    assert api.get(plural, NAME)["metadata"]["uid"] != first
    assert api.token(NAME) != token


@BOTH
def test_a_run_is_followed_to_its_end_with_its_records(api, job, tmp_path, api_name, start):
    record = training()
    output, timeline = tmp_path / "leader", "loader,epoch\n" + "0,1\n" * 100
    write_json(output / "training.json", record)
    (output / "timeline-rank0.csv").write_text(timeline)
    followed = start(api=api_name)
    trained(api, followed, api_name=api_name, lines=leader_lines(output, run=NAME))
    end = followed.ended()
    assert (end.status, end.failure) == ("succeeded", None)
    assert not any("output_part" in line.text for line in followed.lines)
    assert end.output_dir == job.run_dir / "output"
    assert (end.output_dir / "stoker" / "timeline-rank0.csv").read_text() == timeline
    assert leader_record(end.output_dir) == record
    assert "the job has succeeded" in [event.what for event in end.events]
    # A run is billed from a pod's place on a node; the image is the leader's.
    assert end.lineage["image_digest"] == api.image_digest
    until(lambda: api.num_streams == 0, what="all streams are closed")
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("log ")]


STEPS_AS_IS = f"{COLUMNS}\n0,0,0,0.0,0.1,0.2,8,1\n"


def test_a_profile_comes_back_in_the_leader_s_log(api, platform, tmp_path):
    output = tmp_path / "leader"
    write_json(output / "profile.json", sample_profile())
    (output / "baseline-timeline.csv").write_text(STEPS_AS_IS)
    run_dir = tmp_path / NAME
    with ThreadPoolExecutor() as pool:
        found = pool.submit(profile, workload_from(WORKLOAD), platform=platform, run_dir=run_dir)
        until(lambda: api.has("configmaps", f"{NAME}-config"), what="the job is made")
        api.run_pods(NAME)
        leader = only_pod(api)
        api.say(leader, *leader_lines(output, run=NAME))
        api.end_pod(leader)
        api.end_job(NAME)
        profiled = found.result(150)
    assert profiled.step == sample_profile().step
    assert profiled.measured_at is not None
    assert (run_dir / "baseline-timeline.csv").read_text() == STEPS_AS_IS


@pytest.mark.parametrize(
    ("reason", "words"),
    [("OOMKilled", "more memory than its limit"), ("Error", "ended with signal 9 (SIGKILL)")],
)
def test_a_host_that_took_too_much_memory_says_so(api, reason, words, running):
    api.end_pod(only_pod(api), 137, reason=reason)
    api.end_job(NAME, "Failed", message="jobset failed")
    assert words in str(running.ended().failure)


def test_logs_that_break_off_lose_and_repeat_nothing(api, running):
    leader = only_pod(api)
    said = []
    for number in range(6):
        lines = [f"line {number}.{i}" for i in range(20)]
        said += lines
        api.say(leader, *lines)
        until(lambda n=number: f"line {n}.0" in running.texts(LEADER), what="they arrive")
        until(lambda: api.drop_streams() > 0, what="there is a stream to break")
    api.end_pod(leader)
    api.end_job(NAME)
    assert running.ended().status == "succeeded"
    assert running.texts(LEADER) == said


@pytest.mark.parametrize(
    ("code", "words", "fix"),
    [
        (503, "request timed out", ""),
        (None, "list pods", "kubectl apply -k configs/kubernetes"),
    ],
)
def test_a_cluster_that_stays_away_leaves_the_job_and_a_way_back(
    api, clock, code, words, fix, running
):
    if code:
        api.faults.append(Fault("GET", "jobsets", times=10**6, code=code))
    else:
        api.denied = {("list", "pods")}
    until(lambda: "retrying" in running.status, what="it is seen")
    clock.ahead += 901
    error = running.failed()
    assert words in error.what
    assert fix in error.fix
    assert "for 15 minutes" in error.what
    assert f"the job {NAME} keeps running" in error.fix
    assert f"--name {NAME}" in error.fix
    assert f"kubectl delete jobsets {NAME} -n team-a" in error.fix
    # As `train` does after an error.
    running.run.stop()
    assert api.names("jobsets") == [NAME]


# --- waiting

NO_NODE = "0/5 nodes are available: 2 Insufficient nvidia.com/gpu"
QUOTA = 'Error creating: pods "x" is forbidden: exceeded quota: gpus'


def test_hosts_without_nodes_are_told_once_and_end_the_wait_after_wait_minutes(api, clock, start):
    followed = start()
    for pod in api.make_pods(NAME):
        api.pod_finds_no_node(pod, NO_NODE)
    until(lambda: f"2 of 2 data hosts wait: pod {NAME}" in followed.status, what="it is told")
    assert followed.status.count(NO_NODE) == 2
    clock.ahead += 120 * 60
    error = followed.failed()
    assert isinstance(error, NoCapacityError)
    assert (error.types, error.may_pass) == ({"g5.2xlarge"}, False)
    assert NO_NODE in error.what


def test_the_wait_for_a_node_is_no_part_of_the_wait_for_a_start(api, clock, start):
    followed = start()
    for pod in api.make_pods(NAME):
        api.pod_finds_no_node(pod, NO_NODE)
    until(lambda: f"1 of 1 dnn hosts wait: pod {NAME}" in followed.status, what="it is told")
    clock.ahead += 120 * 60 - 30
    leader = only_pod(api)
    api.change("pods", leader, {"status": {"conditions": []}})
    api.pod_waits(leader, "ContainerCreating", "a large image")
    until(lambda: "ContainerCreating: a large image" in followed.status, what="it is told")
    clock.ahead += 60
    seen = api.count("GET")
    until(lambda: api.count("GET") > seen + 8, what="it is looked at again")
    assert followed.error is None
    followed.run.stop()


def test_what_refuses_pods_is_told_in_the_cluster_s_words(api, start):
    followed = start()
    api.tell("Job", f"{NAME}-dnn-0", "FailedCreate", QUOTA)
    words = f"1 of 1 dnn hosts wait: no pod has been made: FailedCreate: {QUOTA}"
    until(lambda: words in followed.status, what="it is told")
    followed.run.stop()


def test_a_suspended_job_waits_without_limit(api, clock, start):
    followed = start()
    # Its hosts have been awaited before a queue suspends it.
    until(lambda: "the job exists" in followed.status, what="it is told")
    api.set_status("jobsets", NAME, conditions=[{"type": "Suspended", "status": "True"}])
    until(lambda: "waits for admission" in followed.status, what="it is told")
    clock.ahead += 30 * 86400
    api.set_status("jobsets", NAME, conditions=[])
    until(lambda: "the job is admitted" in followed.status, what="it is told")
    followed.run.stop()


@pytest.mark.parametrize("seconds", [119, 121])
def test_an_image_that_cannot_be_pulled_ends_the_wait_after_two_minutes(api, clock, start, seconds):
    followed = start()
    leader = next(name for name in api.make_pods(NAME) if name.startswith(LEADER))
    api.pod_waits(leader, "ErrImagePull", "not found")
    until(lambda: "ErrImagePull: not found" in followed.status, what="it is told")
    clock.ahead += seconds
    if seconds > 120:
        assert "not found" in followed.failed().what
    else:
        api.start_pod(leader)
        until(lambda: f"{LEADER}: runs" in followed.status, what="it runs")
        followed.run.stop()


CPU_ONLY = Group(name="dnn", role="dnn", instance_type="c6i.4xlarge", count=1)
ALL_POOLS = {**POOLS, "c6i.4xlarge": {"cpu": 15, "memory": "28Gi", "gpus": 0}}


def test_a_further_plan_s_job_is_found_by_the_run_s_name(api, platform, job, step):
    step(run_id="0badcafe-0000")
    job = with_settings(job, pools=ALL_POOLS)
    further = dataclasses.replace(job, name=f"{NAME}-plan2", run=NAME, groups=(CPU_ONLY,))
    request = platform.plan(further)
    assert platform.resumed([platform.plan(job), request]) == 0
    platform.submit(request)
    assert platform.resumed([platform.plan(job), request]) == 1
    words = platform.clean_up(NAME, job.platform_settings, run_id="0badcafe-0000")
    assert words == f"deleted in namespace {NAMESPACE}: jobsets {NAME}-plan2"
    assert api.names("jobsets") == []
    platform.submit(request)
    api.end_job(f"{NAME}-plan2")
    assert platform.resumed([platform.plan(job), request]) == 1
    # One that failed is no plan to go on with; none that has ended is deleted.
    api.end_job(f"{NAME}-plan2", "Failed", message="jobset failed")
    assert platform.resumed([platform.plan(job), request]) == 0
    assert platform.clean_up(NAME, job.platform_settings, run_id="0badcafe-0000") == ""
    assert api.names("jobsets") == [f"{NAME}-plan2"]


# --- stopping


def test_stop_without_the_right_to_says_so_and_does_not_raise(api, capfd, submit):
    run = submit()
    api.denied.add(("delete", "jobsets"))
    run.stop()
    said = capfd.readouterr().err
    assert "job_stop_failed" in said
    assert "delete jobsets.jobset.x-k8s.io" in said
    assert f"kubectl delete jobsets {NAME}" in run.remaining().fix


@BOTH
def test_a_drained_dnn_host_restarts_the_job_and_one_that_fails_ends_it(api, api_name, start):
    followed = start(api=api_name, output="pvc://runs")
    api.run_pods(NAME)
    host = f"{NAME}-{TRAINS[api_name]}-0-0"
    for attempt in (1, 2):
        until(lambda n=attempt: followed.status.count(f"{host}: runs") == n, what="it runs")
        api.disrupt_pod(only_pod(api, host))
        status = api.get("jobsets", NAME)["status"]
        assert (status["restarts"], status["restartsCountTowardsMax"]) == (attempt, 0)
    until(lambda: followed.status.count(f"{host}: runs") == 3, what="it runs")
    assert followed.status.count("all hosts are restarted (restart 2)") == 1
    api.fail_pod(only_pod(api, host), EXIT_CODE)
    end = followed.ended()
    assert (end.status, end.exit_code) == ("failed", EXIT_CODE)


@pytest.mark.parametrize(
    ("api_name", "has_ended"), [("jobset", False), ("trainer", False), ("trainer", True)]
)
def test_the_last_step_deletes_a_profile_of_its_run_and_no_job_of_another_workload(
    api, platform, api_name, has_ended, step, tmp_path, monkeypatch
):
    # A run's folder is below this one.
    monkeypatch.chdir(tmp_path)
    run_id = "5b1f6c3e-0000-4000-8000-00000000abcd"
    step(run_id=run_id)
    # Two trainings, each with its profile; the second's name begins as the first's.
    own, big = ["mnist-5b1f6c3e", "mnist-profile-1"], ["mnist-big-5b1f6c3e", "mnist-big-profile-1"]
    for name in (*own, *big):
        workload = "mnist-big" if name in big else "mnist"
        spec = described_job(name=name, settings={"api": api_name}, workload=workload)
        platform.submit(platform.plan(spec))
        if has_ended:
            api.end_job(name)
    settings = described_job(settings={"api": api_name}).platform_settings
    assert platform.clean_up("mnist-0badcafe", settings, run_id="0badcafe-0000") == ""
    platform.clean_up("mnist-5b1f6c3e", settings, run_id=run_id)
    assert api.names(PLURAL[api_name]) == big


@BOTH
def test_the_role_has_exactly_a_run_s_rights(api, platform, job, follow, api_name, step):
    settings = with_settings(job, api=api_name)
    api.role = rbac(namespace=NAMESPACE, account="runner", api=api_name)[0]["rules"]
    request = platform.plan(settings)
    step(run_id="0badcafe-0000")
    followed = follow(platform.submit(request))
    until(lambda: "the job exists" in followed.status, what="it is followed")
    assert followed.run.leave()
    followed.run.stop()
    followed = follow(platform.submit(request))
    trained(api, followed, api_name=api_name, lines=[])
    assert followed.ended().status == "succeeded"
    for _ in range(2):
        keep_profile(platform._cluster, NAME, "key", "{}")
    assert kept_profile(platform._cluster, NAME, "key") == "{}"
    api.end_job(NAME, "Failed")
    platform.submit(request)
    platform.clean_up(NAME, settings.platform_settings, run_id="0badcafe-0000")
    if api_name == "trainer":
        # Of an earlier attempt, which made no TrainJob.
        api.put("trainingruntimes", {"metadata": {"name": NAME}})
    platform.submit(request).stop()
    given = [product(rule["verbs"], rule["apiGroups"], rule["resources"]) for rule in api.role]
    assert api.used == {*chain.from_iterable(given)}


def test_in_a_pod_its_own_account_and_namespace_are_used(tmp_path, monkeypatch):
    use_kube_config(monkeypatch, tmp_path / "none")
    (tmp_path / "token").write_text("of-the-pod")
    (tmp_path / "ca.crt").write_text("a certificate")
    (tmp_path / "namespace").write_text("kubeflow-user\n")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    loader = "kubernetes.config.incluster_config"
    monkeypatch.setattr(f"{loader}.SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(f"{loader}.SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    monkeypatch.setattr(connection, "NAMESPACE_FILE", tmp_path / "namespace")
    made: Any
    made, namespace = connection.connect(None)
    configuration = made.configuration
    assert namespace == "kubeflow-user"
    assert configuration.host == "https://10.0.0.1:443"
    assert configuration.auth_settings()["BearerToken"]["value"] == "bearer of-the-pod"
