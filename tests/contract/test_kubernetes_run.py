"""The real client takes a job on Kubernetes from submit() to its end, on an API server's double."""

import dataclasses
import json
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, product
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from stoker.catalog import load_catalog
from stoker.errors import (
    JobStoppedError,
    NoCapacityError,
    PlatformError,
    TerminatedError,
    UsageError,
)
from stoker.feed.timeline import COLUMNS
from stoker.platforms.base import JobSpec, leader_record
from stoker.platforms.kubernetes import KubernetesPlatform
from stoker.platforms.kubernetes import api as connection
from stoker.platforms.kubernetes.api import ClusterApi, Resource
from stoker.platforms.kubernetes.job import ASK_SECONDS
from stoker.platforms.kubernetes.layout import WORKLOAD_NAME_ANNOTATION
from stoker.platforms.kubernetes.rights import rules
from stoker.platforms.kubernetes.streams import LAST_WORDS_SECONDS
from stoker.platforms.kubernetes.submit import keep_runtime
from stoker.platforms.kubernetes.troubles import (
    DEAD_SECONDS,
    FIRST_REPEAT_SECONDS,
    IMAGE_SECONDS,
    QUOTA_SECONDS,
    REPEAT_SECONDS,
    START_SECONDS,
    UNFIT_SECONDS,
)
from stoker.profile import profile
from stoker.profile.rank_results import AcceleratorOnly, RankResult, quartiles
from stoker.records import Channel, Group, to_json, write_json
from stoker.records.base import Document
from stoker.records.training import InputVersion
from stoker.run.training_run import FollowedTraining, train_and_keep
from stoker.workload_file import workload_from
from support.command import succeeds
from support.kubernetes_api import GRACE_SECONDS, NAMESPACE, USER, Fault, KubernetesApi, kube_config
from support.kubernetes_jobs import POOLS, WORKLOAD, leader_lines
from support.kubernetes_jobs import job as described_job
from support.local_job import until
from support.platform_jobs import use_kube_config
from support.sample_records import profile as sample_profile
from support.sample_records import training

NAME = "mnist-1"
QUEUED = {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "training"}}}
EXIT_CODE = 7
NEXT_BEST = "1 x g5.2xlarge + 2 x c6i.4xlarge (80.0 ms per step, $2.00 per hour)"
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
    found = described_job(name=NAME)
    return dataclasses.replace(found, run_dir=tmp_path / "run", next_best=NEXT_BEST)


@pytest.fixture
def platform(cluster):
    return KubernetesPlatform(cluster=cluster)


def with_settings(job: JobSpec, **settings: Any) -> JobSpec:
    found = described_job(name=NAME, settings=settings)
    return dataclasses.replace(found, run_dir=job.run_dir, next_best=job.next_best)


@pytest.fixture
def step(api, monkeypatch):
    """Makes this process the pod of a Workflow's step from here on."""

    def become(name="step-1", *, workflow="w", run_id=""):
        if workflow and not api.has("workflows", workflow):
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
def run(submit):
    return submit()


@pytest.fixture
def followed(follow, run):
    return follow(run)


@pytest.fixture
def running(api, followed):
    api.run_pods(NAME)
    until(lambda: f"{LEADER}: runs" in followed.status, what="it runs")
    return followed


def only_pod(api: KubernetesApi, host: str = LEADER) -> str:
    (found,) = [name for name in api.names("pods") if name.startswith(f"{host}-")]
    return found


def lacked_nodes(followed, *types, may_pass=False):
    error = followed.failed()
    assert isinstance(error, NoCapacityError)
    assert (error.types, error.may_pass) == (frozenset(types), may_pass)
    return error


def complete(api, followed):
    """Ends the leader and the job well; returns the run's end."""
    api.end_pod(only_pod(api))
    api.end_job(NAME)
    end = followed.ended()
    assert end.status == "succeeded"
    return end


def another_look(api, followed):
    """Waits until the run has looked at its troubles once more."""
    for _ in range(2):
        said = f"look {api.version}"
        api.tell("Job", f"{NAME}-data-0", "Looked", said)
        until(lambda said=said: said in followed.status, what="a look")


def are_gone(api, *plurals):
    return not [name for plural in plurals for name in api.names(plural)]


def trained(api, followed, *, api_name="jobset", lines):
    api.run_pods(NAME)
    leader = only_pod(api, f"{NAME}-{TRAINS[api_name]}-0-0")
    api.say(leader, "hello", *lines)
    for host in (FIRST, SECOND):
        api.say(only_pod(api, host), f"{host} serves")
    until(lambda: bool(followed.texts(SECOND) and followed.texts(FIRST)), what="the data hosts")
    api.end_pod(leader)
    api.end_job(NAME)


@pytest.mark.parametrize("is_denied", [False, True])
def test_the_lineage_names_the_job_and_readable_claims(api, follow, platform, job, is_denied):
    api.denied |= {("get", "persistentvolumeclaims")} if is_denied else set()
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "digits"}}
    api.put("persistentvolumeclaims", claim)
    reads = dataclasses.replace(job, channels={"train": Channel(uri="pvc://digits/train")})
    followed = follow(platform.submit(platform.plan(reads)))
    api.run_pods(NAME)
    lineage = complete(api, followed).lineage
    assert lineage.job_id == api.get("jobsets", NAME)["metadata"]["uid"]
    uid = api.get("persistentvolumeclaims", "digits")["metadata"]["uid"]
    known = {"train": InputVersion(address="pvc://digits/train", claim_uid=uid)}
    assert lineage.inputs == ({} if is_denied else known)


# --- making the objects


@BOTH
def test_the_workflows_of_all_attempts_own_the_job(api, api_name, submit, step):
    for number in ("1", "2"):
        step(f"step-{number}", workflow=f"w{number}")
        submit(api=api_name)
        api.remove("pods", f"step-{number}")
    owners = api.get(PLURAL[api_name], NAME)["metadata"]["ownerReferences"]
    assert [owner["name"] for owner in owners] == ["w1", "w2"]
    api.remove("workflows", "w1")
    assert api.names(PLURAL[api_name]) == [NAME]
    api.remove("workflows", "w2")
    assert are_gone(api, PLURAL[api_name], "secrets", "configmaps", "trainingruntimes")


@pytest.mark.parametrize("is_denied", [False, True])
def test_a_pod_without_a_readable_workflow_owns_nothing(api, is_denied, capfd, submit, step):
    step(workflow="w" if is_denied else None)
    api.denied |= {("get", "pods")} if is_denied else set()
    api.reviews_work = False
    submit()
    assert api.get("jobsets", NAME)["metadata"]["ownerReferences"] == []
    assert ("owner_unknown" in capfd.readouterr().err) == is_denied


def test_a_secret_that_cannot_be_made_leaves_no_job(api, submit):
    words = "exceeded quota: secrets=0"
    api.faults.append(Fault("POST", "secrets", code=403, reason="Forbidden", message=words))
    with pytest.raises(PlatformError, match="quota"):
        submit()
    assert api.names("jobsets") == []


@pytest.mark.parametrize("plural", ["jobsets", "secrets", "configmaps"])
def test_an_answer_that_is_lost_makes_nothing_twice(api, plural, submit):
    api.faults.append(Fault("POST", plural, is_answer_lost=True))
    run = submit()
    assert api.names("jobsets") == [NAME]
    assert api.names("secrets") == [f"{NAME}-token"]
    run.stop()


def test_a_runtime_that_others_applied_must_be_that_of_the_plan(api, platform, job):
    request = platform.plan(with_settings(job, api="trainer", runtime="shared"))
    with pytest.raises(PlatformError, match="TrainingRuntime shared does not exist"):
        platform.submit(request)
    api.put("trainingruntimes", {**request.runtime, "metadata": {"name": "shared"}})
    with pytest.raises(PlatformError, match="is for another plan or workload"):
        platform.submit(request)
    api.remove("trainingruntimes", "shared")
    api.put("trainingruntimes", {**request.runtime})
    platform.submit(request).stop()
    assert api.names("trainingruntimes") == ["shared"]


# --- trying again


@BOTH
def test_a_retry_makes_what_is_missing_and_a_failed_job_again(api, platform, job, api_name):
    request, plural = platform.plan(with_settings(job, api=api_name)), PLURAL[api_name]
    platform.submit(request)
    api.remove("secrets", f"{NAME}-token")
    api.remove("configmaps", f"{NAME}-config")
    assert platform.submit(request).is_adopted
    assert api.names("secrets") == [f"{NAME}-token"]
    assert f"{NAME}-config" in api.names("configmaps")
    uid, token = api.get(plural, NAME)["metadata"]["uid"], api.token(NAME)
    api.end_job(NAME, "Failed", message="jobset failed")
    assert not platform.submit(request).is_adopted
    assert api.get(plural, NAME)["metadata"]["uid"] != uid
    assert api.token(NAME) != token


@BOTH
def test_a_job_that_is_being_deleted_is_waited_for(api, platform, job, api_name):
    request, plural = platform.plan(with_settings(job, api=api_name)), PLURAL[api_name]

    def num_tries() -> int:
        return sum(call.startswith("POST") and f"/{plural}" in call for call in list(api.calls))

    first = platform.submit(request)
    uid = api.get(plural, NAME)["metadata"]["uid"]
    api.is_deletion_held = True
    with ThreadPoolExecutor() as pool:
        pool.submit(first.stop)
        until(lambda: "deletionTimestamp" in api.get(plural, NAME)["metadata"], what="it is marked")
        creations = num_tries()
        second = pool.submit(platform.submit, request)
        until(lambda: num_tries() > creations + 1, what="it is tried again")
        api.finish_deletions()
        assert not second.result(150).is_adopted
    assert api.get(plural, NAME)["metadata"]["uid"] != uid


def test_a_runtime_is_not_taken_from_the_next_train_job(api, cluster, monkeypatch, submit):
    def references() -> list[Document]:
        return api.get("trainingruntimes", NAME)["metadata"].get("ownerReferences", [])

    def owners() -> list[str]:
        return [owner["uid"] for owner in references()]

    submit(api="trainer")
    uid = api.get("trainjobs", NAME)["metadata"]["uid"]
    assert owners() == [uid]
    # Another attempt has made the next TrainJob in the meantime, whose runtime it is now.
    keep_runtime(cluster, NAME, [], job_uid="of the one before")
    assert owners() == [uid]
    own, find = references(), cluster.find
    api.change("trainingruntimes", NAME, {"metadata": {"ownerReferences": []}})

    def overtaken(resource: Resource, name: str) -> Document | None:
        found = find(resource, name)
        if not owners():
            api.change("trainingruntimes", NAME, {"metadata": {"ownerReferences": own}})
        return found

    # Or makes it as this one looks.
    monkeypatch.setattr(cluster, "find", overtaken)
    keep_runtime(cluster, NAME, [], job_uid="of the one before")
    assert owners() == [uid]
    keep_runtime(cluster, NAME, [], job_uid=uid)
    assert references() == []


def test_another_job_of_that_name_is_left_alone(api, platform, job, submit):
    submit()
    uid = api.get("jobsets", NAME)["metadata"]["uid"]
    other = dataclasses.replace(job, hyperparameters={"epochs": 4})
    with pytest.raises(PlatformError, match="another JobSet has this name") as caught:
        platform.submit(platform.plan(other))
    assert "--name" in caught.value.fix
    assert api.get("jobsets", NAME)["metadata"]["uid"] == uid


def test_a_secret_of_somebody_else_ends_the_attempt(api, monkeypatch, submit):
    monkeypatch.setattr("stoker.platforms.kubernetes.submit.LEFTOVER_SECONDS", 0.0)
    api.put("secrets", {"metadata": {"name": f"{NAME}-token"}, "stringData": {"token": "x"}})
    with pytest.raises(PlatformError, match="not this run's"):
        submit()
    assert api.names("jobsets") == []
    assert api.names("secrets") == [f"{NAME}-token"]


def trained_from(job, platform, *, assume_yes, quiet=False):
    """Trains as the command line does, without a terminal."""
    run = FollowedTraining(
        job=job,
        workload=workload_from(WORKLOAD),
        platform=platform,
        catalog=load_catalog("local"),
        decision=None,
        quiet=quiet,
        echo=False,
        assume_yes=assume_yes,
    )
    return train_and_keep(run)


def test_a_run_whose_job_is_gone_needs_yes_to_train_again(
    api, job, platform, start, monkeypatch, capsys
):
    trained = []
    monkeypatch.setattr(
        "stoker.run.training_run.train", lambda job, **_: trained.append(job) or training()
    )
    followed = start()
    until(lambda: "the job exists" in followed.status, what="it is followed")
    # The terminal is closed; the job ends, and its TTL deletes it.
    followed.run.leave()
    followed.run.stop()
    assert platform.vanished(platform.plan(job)) == ""
    trained_from(job, platform, assume_yes=False)
    api.remove("jobsets", NAME)
    words = f"JobSet {NAME} was submitted at .* and is gone"
    with pytest.raises(UsageError, match=words) as caught:
        trained_from(job, platform, assume_yes=False)
    assert "another --name, or train again with --yes" in caught.value.fix
    assert len(trained) == 1
    trained_from(job, platform, assume_yes=True)
    assert len(trained) == 2
    # With --yes it is no question, but it is said.
    assert re.search(
        f"warning: {words}.*; it is trained again", " ".join(capsys.readouterr().err.split())
    )


def test_a_run_whose_end_was_seen_may_be_trained_again(api, job, platform, running):
    complete(api, running)
    api.remove("jobsets", NAME)
    assert platform.vanished(platform.plan(job)) == ""
    found = json.loads((job.run_dir / "submitted.json").read_text())
    assert (found["job"], found["namespace"]) == (NAME, NAMESPACE)
    assert found["ended"] >= found["when"]
    run = platform.submit(platform.plan(job))
    assert "ended" not in json.loads((job.run_dir / "submitted.json").read_text())
    run.stop()
    assert platform.vanished(platform.plan(job)) == ""


# --- following


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
    assert "ended with exit code 0" in followed.status
    assert not any("output_part" in line.text for line in followed.lines)
    assert end.output_dir == job.run_dir / "output"
    assert (end.output_dir / "stoker" / "timeline-rank0.csv").read_text() == timeline
    assert leader_record(end.output_dir) == record
    assert "the job has succeeded" in [event.what for event in end.events]
    until(lambda: api.num_streams == 0, what="all streams are closed")
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith(("watch ", "log "))]
    # A JobSet keeps its logs until its TTL; a TrainJob has none.
    followed.run.clean_up()
    assert api.names(PLURAL[api_name]) == ([NAME] if api_name == "jobset" else [])


STEPS_AS_IS = f"{COLUMNS}\n0,0,0,0.0,0.1,0.2,8,1,1\n"


def test_a_profile_s_results_come_back_in_the_leader_s_log(api, platform, tmp_path, monkeypatch):
    took = quartiles([0.1])
    alone = AcceleratorOnly(step_seconds=took, trainer_cpu_seconds=took, cached_batches=8)
    where = {"rank": 0, "world_size": 1, "host": LEADER, "vcpus": 8, "ranks_on_host": 1}
    result, output = RankResult(**where, accelerator=alone), tmp_path / "leader"
    output.mkdir()
    (output / "profile-rank0.json").write_bytes(msgspec.json.encode(result))
    (output / "baseline-timeline-rank0.csv").write_text(STEPS_AS_IS)
    combine = Mock(return_value=sample_profile())
    monkeypatch.setattr("stoker.profile.profiled_job.combine", combine)
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
    assert msgspec.structs.replace(profiled, origin=None) == sample_profile()
    assert profiled.origin is not None
    assert profiled.origin.image == "registry.example/mnist:1"
    assert [[*call.args[0]] for call in combine.call_args_list] == [[result]]
    assert (run_dir / "baseline-timeline.csv").read_text() == STEPS_AS_IS


def test_a_host_s_log_goes_on_with_its_next_container_and_its_next_pod(api, job, running):
    pod = only_pod(api, FIRST)
    api.say(pod, "one")
    until(lambda: "one" in running.texts(FIRST), what="the first container's log")
    with api.changed:
        api.say(pod, "two")
        api.restart_container(pod, 5)
    api.say(pod, "three")
    until(lambda: "three" in running.texts(FIRST), what="the new container's log")
    restarted = f"{FIRST}: runs on node node-1, restarted"
    until(lambda: restarted in running.status, what="a log and a pod are followed apart")
    new = api.evict_pod(pod)
    api.start_pod(new, node="node-2")
    api.say(new, "four")
    until(lambda: "four" in running.texts(FIRST), what="the new pod's log")
    assert running.texts(FIRST) == ["one", "two", "three", "four"]
    replaced = f"{FIRST}: runs on node node-2, replacing an earlier pod"
    until(lambda: replaced in running.status, what="the new pod")
    assert f"{FIRST}: lost: TerminationByKubelet" in running.status
    complete(api, running)
    assert (job.run_dir / "logs" / f"data-{FIRST}.log").read_text() == "one\ntwo\nthree\nfour\n"
    assert any("lost: " in e.what and e.host == FIRST for e in running.run.events)


def test_a_tag_that_is_pushed_again_is_told_once_and_the_first_digest_recorded(api, running):
    first, api.image_digest = api.image_digest, "sha256:" + "b" * 64
    for host in (FIRST, SECOND):
        api.start_pod(api.evict_pod(only_pod(api, host)))
        until(lambda host=host: f"{host}: runs on node node-1, repl" in running.status, what=host)
    told = f"{FIRST}: registry.example/mnist:1 is {api.image_digest} here, and {first} on earlier"
    end = complete(api, running)
    assert told in running.status
    assert running.status.count(api.image_digest) == 1
    assert end.lineage.image_digest == first
    assert any(event.host == FIRST and "its digest" in event.what for event in end.events)


@pytest.mark.parametrize(
    ("reason", "words"),
    [("OOMKilled", "more memory than its limit, 28Gi"), ("Error", "ended with signal 9 (SIGKILL)")],
)
def test_a_host_that_took_too_much_memory_says_so(api, reason, words, running):
    api.end_pod(only_pod(api), 137, reason=reason)
    api.end_job(NAME, "Failed", message="jobset failed")
    assert words in str(running.ended().failure)


@pytest.mark.parametrize("settings", [{}, {"output": "pvc://outputs"}])
def test_a_dnn_pod_whose_node_is_cut_off_is_told_and_bounded(api, follow, clock, settings, submit):
    submitted = submit(**settings)
    api.run_pods(NAME)
    leader = only_pod(api)
    assert api.cut_off_node(leader, overdue_seconds=7200) == ""
    # Hours ahead by another host's clock: that counts for nothing.
    followed = follow(submitted)
    another_look(api, followed)
    # What is to come is told at once; that the node is dead, after the grace period.
    until(lambda: "is not ready, and pod" in followed.status, what="it is foretold")
    assert "should have ended" not in followed.status
    clock.ahead += GRACE_SECONDS + DEAD_SECONDS
    told = f"kubectl delete pod {leader} -n {NAMESPACE} --force --grace-period=0"
    until(lambda: "should have ended" in followed.status, what="it is told")
    assert told in followed.status
    clock.ahead += 30 * 60 - 90
    another_look(api, followed)
    assert api.names("jobsets")
    clock.ahead += 90
    until(lambda: set(api.names("pods")) == {leader}, what="the other hosts are let go")
    api.free_pod(leader)
    end = followed.ended()
    assert (end.status, api.names("jobsets")) == ("failed", [])
    assert f"pod {leader} should have ended by" in str(end.failure)
    assert "kubectl delete node node-1" in str(end.failure)


def test_all_hosts_that_are_started_again_are_followed_again(api, start):
    followed = start(max_restarts=1)
    api.run_pods(NAME)
    api.say(only_pod(api), "first try")
    api.end_pod(only_pod(api), 1)
    until(lambda: "first try" in followed.texts(LEADER), what="the first try's log")
    for name in api.names("pods"):
        api.remove("pods", name)
    api.set_status("jobsets", NAME, restarts=1)
    api.run_pods(NAME, attempt=1)
    api.say(only_pod(api), "second try")
    api.end_pod(only_pod(api))
    api.end_job(NAME, restarts=1)
    end = followed.ended()
    assert (end.status, end.exit_code) == ("succeeded", 0)
    assert followed.texts(LEADER) == ["first try", "second try"]
    assert "all hosts are restarted (restart 1)" in followed.status


@pytest.mark.parametrize("how", ["cut", "end"])
def test_watches_and_logs_that_reconnect_lose_and_repeat_nothing(api, how, running):
    leader = only_pod(api)
    said = []
    for number in range(6):
        lines = [f"line {number}.{i}" for i in range(20)]
        said += lines
        api.say(leader, *lines)
        until(lambda n=number: f"line {n}.0" in running.texts(LEADER), what="they arrive")
        until(lambda: api.drop_streams(how) > 0, what="there is a stream to break")
    complete(api, running)
    assert running.texts(LEADER) == said


@pytest.mark.parametrize("how", ["cut", "end"])
def test_a_log_that_ends_early_is_read_on_in_the_midst_of_a_line(api, how, start):
    said = [f"line {i} with some length so that half of it is something else" for i in range(9)]
    followed = start()
    for name in api.make_pods(NAME):
        api.break_log(name, after=3, how=how)
        api.break_log(name, after=2, how=how)
        api.say(name, *said)
        api.start_pod(name)
    for host in (LEADER, FIRST):
        until(lambda h=host: len(followed.texts(h)) >= 9, what="all lines")
        assert followed.texts(host) == said


def test_a_version_that_is_too_old_is_no_end(api, running):
    leader = only_pod(api)
    lists = api.count(f"GET /apis/jobset.x-k8s.io/v1alpha2/namespaces/{NAMESPACE}/jobsets?")
    api.faults.append(Fault("WATCH", "jobsets", times=2, code=503))
    api.drop_streams()
    # While nobody watches: what happens now is never told by a watch.
    api.say(leader, "bye")
    api.end_pod(leader)
    api.end_job(NAME)
    api.forget_history()
    end = running.ended()
    assert end.status == "succeeded"
    assert running.texts(LEADER) == ["bye"]
    assert api.count(f"GET /apis/jobset.x-k8s.io/v1alpha2/namespaces/{NAMESPACE}/jobsets?") > lists


@pytest.mark.parametrize(
    ("code", "words", "fix"),
    [
        (503, "cannot answer now", ""),
        (401, "does not accept these credentials", ""),
        (None, "watch pods", "kubectl apply -k configs/kubernetes"),
    ],
)
def test_a_cluster_that_stays_away_leaves_the_job_and_a_way_back(
    api, clock, code, words, fix, followed
):
    until(lambda: "the job exists" in followed.status, what="it is followed")
    api.denied = set() if code else {("watch", "pods")}
    for plural in ("jobsets", "pods") if code else ():
        api.faults.append(Fault("WATCH", plural, times=10**6, code=code))
    api.drop_streams()
    told = "retrying" if code else "the right watch pods is missing"
    until(lambda: told in followed.status, what="it is seen")
    clock.ahead += 901
    error = followed.failed()
    assert words in error.what
    assert fix in error.fix
    assert "for 15 minutes" in error.what
    assert f"the job {NAME} keeps running" in error.fix
    assert f"--name {NAME}" in error.fix
    assert f"kubectl delete jobsets {NAME} -n team-a" in error.fix
    # As `train` does after an error.
    followed.run.stop()
    assert api.names("jobsets") == [NAME]


# --- waiting


NO_GPU = (
    "0/5 nodes are available: 2 Insufficient nvidia.com/gpu, 3 node(s) didn't match Pod's node "
    "affinity/selector. preemption: 0/5 nodes are available: 5 No preemption victims found."
)


def test_pods_without_a_node_for_wait_minutes_end_the_job(api, follow, clock, submit):
    submitted = submit()
    api.make_pods(NAME)
    for name in api.pods(NAME, "data"):
        api.pod_finds_no_node(name, NO_GPU)
    # Now, so that both pods are seen with one look: what is said of one is said again much later.
    followed = follow(submitted)
    clock.ahead += 7200
    until(lambda: "2 of 2 data hosts wait" in followed.status, what="it is said")
    assert followed.error is None
    api.pod_finds_no_node(only_pod(api), NO_GPU)
    until(lambda: "1 of 1 dnn hosts wait" in followed.status, what="it is said")
    clock.ahead += 7190
    another_look(api, followed)
    assert followed.error is None
    clock.ahead += 10
    # It has waited: another plan has its turn, one without what is short.
    error = lacked_nodes(followed, "g5.2xlarge")
    assert "2 Insufficient nvidia.com/gpu" in error.what
    assert "for 120 min, on_no_capacity.wait_minutes" in error.what
    assert NEXT_BEST in error.fix
    assert not error.had_hosts
    followed.run.stop()
    assert api.names("jobsets") == []
    assert followed.run.remaining() is None


LOST = "rank 0 on mnist-1-dnn-0-0: FeedLostError: no data worker came within 1800 s"
SHIPPING = "rank 0 on mnist-1-dnn-0-0: ShippingError: cannot send the dataset"
QUOTA = (
    'Error creating: pods "x" is forbidden: exceeded quota: gpus, requested: '
    "requests.nvidia.com/gpu=1, used: requests.nvidia.com/gpu=4, limited: "
    "requests.nvidia.com/gpu=4"
)


@pytest.mark.parametrize(
    ("code", "words", "ran_seconds", "is_refused", "is_shortage"),
    [
        (5, LOST, 0, False, True),
        # Not even its words were left.
        (5, "", 1800, False, True),
        # A quota refused the pods: there were none.
        (5, LOST, 0, True, True),
        # Failures of the script's own, which may end with that code, too.
        (5, SHIPPING, 0, False, False),
        (5, "", 0, False, False),
        (EXIT_CODE, LOST, 1800, False, False),
    ],
)
def test_trainers_that_load_nothing_without_data_hosts_lacked_nodes(
    api, platform, job, follow, code, words, ran_seconds, is_refused, is_shortage
):
    alone = msgspec.structs.replace(job.groups[0], workers_per_host=0)
    fed = dataclasses.replace(job, groups=(alone, *job.groups[1:]))
    followed = follow(platform.submit(platform.plan(fed)))
    if is_refused:
        leader = api.make_pod(NAME, "dnn", 0)
        api.tell("Job", f"{NAME}-data-0", "FailedCreate", QUOTA)
        until(lambda: "pods of data are refused" in followed.status, what="it is said")
    else:
        leader, *others = api.make_pods(NAME)
        for name in others:
            api.pod_finds_no_node(name, NO_GPU)
    api.start_pod(leader)
    until(lambda: f"{LEADER}: runs" in followed.status, what="it runs")
    api.fail_pod(leader, code, message=words, ran_seconds=ran_seconds)
    if not is_shortage:
        end = followed.ended()
        assert (end.status, end.exit_code) == ("failed", code)
        assert words in str(end.failure)
    else:
        lacked_nodes(followed, "c7i.4xlarge")


def test_a_job_whose_deadline_came_before_its_nodes_lacked_them(api, start):
    followed = start(max_run_seconds=7200)
    api.pod_finds_no_node(api.make_pods(NAME)[0], NO_GPU)
    until(lambda: "1 of 1 dnn hosts wait" in followed.status, what="it is said")
    api.pass_deadline(NAME)
    error = lacked_nodes(followed, "g5.2xlarge")
    assert "no dnn host began within kubernetes.max_run_seconds, 7200 s" in error.what
    assert "2 Insufficient nvidia.com/gpu" in error.what
    assert "on_no_capacity.wait_minutes" in error.fix


CPU_ONLY = Group(name="dnn", role="dnn", instance_type="c6i.4xlarge", count=1)
ALL_POOLS = {**POOLS, "c6i.4xlarge": {"cpu": 15, "memory": "28Gi", "gpus": 0}}


def of_plan(job: JobSpec, number: int) -> JobSpec:
    name = f"{NAME}-plan{number}"
    return dataclasses.replace(job, name=name, run=NAME, groups=(CPU_ONLY,), next_best="")


def test_a_further_plan_s_job_is_found_by_the_run_s_name(api, platform, job):
    job = with_settings(job, pools=ALL_POOLS)
    request = platform.plan(of_plan(job, 2))
    assert platform.resumed([platform.plan(job), request]) == 0
    platform.submit(request)
    assert platform.resumed([platform.plan(job), request]) == 1
    words = platform.clean_up(NAME, job.platform_settings)
    assert words == f"JobSet {NAME}-plan2 in namespace {NAMESPACE} was still there: deleted"
    assert api.names("jobsets") == []
    platform.submit(request)
    api.end_job(f"{NAME}-plan2")
    assert platform.resumed([platform.plan(job), request]) == 1
    # One that failed is no plan to go on with; none that has ended is deleted.
    api.end_job(f"{NAME}-plan2", "Failed", message="jobset failed")
    assert platform.resumed([platform.plan(job), request]) == 0
    assert platform.clean_up(NAME, job.platform_settings) == ""
    assert api.names("jobsets") == [f"{NAME}-plan2"]


def test_a_runtime_that_is_there_already_is_of_one_plan(job):
    of_trainer = with_settings(job, api="trainer", runtime="mnist-runtime", pools=ALL_POOLS)
    with pytest.raises(UsageError, match="first plan"):
        KubernetesPlatform().plan(of_plan(of_trainer, 2))


def test_an_image_that_does_not_come_is_an_error_after_its_deadline(api, clock, followed):
    api.pod_waits(api.make_pods(NAME)[0], "ImagePullBackOff", "manifest unknown")
    until(lambda: "manifest unknown" in followed.status, what="it is said")
    assert followed.error is None
    clock.ahead += IMAGE_SECONDS
    error = followed.failed()
    assert "registry.example/mnist:1 (ImagePullBackOff): manifest unknown" in error.what
    assert "image_pull_secrets" in error.fix


def test_a_quota_s_refusal_does_not_end_a_job_that_a_queue_holds_later(api, clock, start):
    followed = start(jobset=QUEUED)
    api.tell("Job", f"{NAME}-dnn-0", "FailedCreate", QUOTA)
    until(lambda: "exceeded quota: gpus" in followed.status, what="it is said")
    api.run_pods(NAME)
    until(lambda: f"{LEADER}: runs" in followed.status, what="it runs")
    # Kueue takes its room back for others: without a new refusal nothing is refused.
    held = {"type": "Suspended", "reason": "JobSuspended"}
    for is_held in (False, True, False):
        for name in api.names("pods"):
            api.remove("pods", name)
        status = "True" if is_held else "False"
        api.set_status("jobsets", NAME, conditions=[{**held, "status": status}])
        for _ in range(2):
            clock.ahead += QUOTA_SECONDS + 1
            api.tell("JobSet", NAME, "Looked", f"at {clock.ahead}")
            until(lambda: f"Looked: at {clock.ahead}" in followed.status, what="a look")
        assert followed.error is None
    until(lambda: "the job is admitted" in followed.status, what="the queue has let it go")
    assert "waits for admission by queue training" in followed.status
    # One that is told again, in the same words, counts.
    api.tell("Job", f"{NAME}-dnn-0", "FailedCreate", QUOTA, seconds_later=60)
    until(lambda: followed.status.count("dnn are refused") == 2, what="it is said again")
    clock.ahead += QUOTA_SECONDS
    # It may be free later: asked again for as long as the workload says, from now on.
    error = lacked_nodes(followed, may_pass=True)
    assert "kubectl describe quota" in error.fix
    assert error.had_hosts


WEBHOOK = 'Internal error occurred: failed calling webhook "vjob.kb.io": connection refused'
POD_WEBHOOK = f"Error creating: {WEBHOOK}"
NO_PROCESS = "on node node-1 has no process (ContainerCreating); last event: "
PULL = 'Pulling image "registry.example/mnist:1"'
NO_SECRET = 'MountVolume.SetUp failed for volume "token" : secret "mnist-1-token" not found'


@pytest.mark.parametrize(
    ("state", "event", "words"),
    [
        # No controller, or a webhook that is down.
        ("none", {}, "1 of 1 dnn hosts have no pod"),
        ("none", {"JobSet": ("JobCreationFailed", WEBHOOK)}, "have no pod; last event: "),
        ("none", {"Job": ("FailedCreate", POD_WEBHOOK)}, "have no pod; last event: "),
        # No scheduler.
        ("made", {}, "has no node, and no scheduler says why"),
        ("held", {}, "is held by scheduling gates: example.com/topology"),
        ("prepared", {"Pod": ("Pulling", PULL)}, NO_PROCESS),
        ("prepared", {"Pod": ("FailedMount", NO_SECRET)}, "(ContainerCreating); last event: "),
        # No controller.
        ("ended", {}, "has ended with exit code 1, and the job neither ends nor restarts"),
    ],
)
def test_each_wait_is_told_hourly_and_bounded(api, follow, clock, submit, state, event, words):
    submitted = submit()
    leader = "" if state == "none" else api.make_pods(NAME)[0]
    if state == "held":
        api.hold_pod(leader, "example.com/topology")
    elif state == "prepared":
        api.prepare_pod(leader)
    elif state == "ended":
        api.start_pod(leader)
        api.end_pod(leader, 1)
    names = {"JobSet": NAME, "Job": f"{NAME}-dnn-0", "Pod": leader}
    for kind, (reason, text) in event.items():
        api.tell(kind, names[kind], reason, text, type="Normal" if text is PULL else "Warning")
        words += f"{reason}: {text}"
    followed = follow(submitted)
    another_look(api, followed)
    assert words not in followed.status
    for number, seconds in enumerate((START_SECONDS, FIRST_REPEAT_SECONDS, REPEAT_SECONDS), 1):
        clock.ahead += seconds
        until(lambda n=number: followed.status.count(words) == n, what=f"it is told {number} times")
        another_look(api, followed)
        assert followed.status.count(words) == number
    assert followed.error is None
    clock.ahead += 7200 - START_SECONDS - FIRST_REPEAT_SECONDS - REPEAT_SECONDS
    error = followed.failed()
    assert isinstance(error, JobStoppedError)
    assert not isinstance(error, NoCapacityError)
    assert words in error.what
    assert "kubectl get pods -n jobset-system" in error.fix
    assert "kubectl get nodes" in error.fix


def test_a_wait_is_not_ended_by_what_was_seen_before_an_outage(api, clock, start, step):
    step()
    followed = start()
    leader = api.make_pods(NAME)[0]
    api.pod_finds_no_node(leader, NO_GPU)
    until(lambda: "1 of 1 dnn hosts wait" in followed.status, what="it is told")
    api.faults += [Fault("GET", plural, times=10_000, code=503) for plural in ("jobsets", "pods")]
    api.forget_history()
    api.drop_streams()
    until(lambda: "retrying" in followed.status, what="it cannot be seen")
    clock.ahead += 7300
    api.tell("JobSet", NAME, "Looked", "now")
    until(lambda: "Looked: now" in followed.status, what="a look")
    assert followed.error is None
    api.start_pod(leader)
    api.faults.clear()
    until(lambda: f"{LEADER}: runs" in followed.status, what="it is seen again")
    complete(api, followed)


def test_a_job_that_a_queue_holds_is_told_hourly_and_ended_after_a_week(api, follow, clock, submit):
    submitted = submit(jobset=QUEUED)
    words = "couldn't assign flavors to pod set dnn: insufficient unused quota"
    api.set_status("jobsets", NAME, conditions=[{"type": "Suspended", "status": "True"}])
    api.tell("Workload", f"jobset-{NAME}-12345", "Pending", words, type="Normal")
    followed = follow(submitted)
    another_look(api, followed)
    told = f"the job waits for admission by queue training; last event: Pending: {words} (for"
    for number in range(1, 4):
        clock.ahead += REPEAT_SECONDS
        until(lambda n=number: followed.status.count(told) == n, what="it is told")
    clock.ahead += 100 * REPEAT_SECONDS
    another_look(api, followed)
    assert followed.error is None
    clock.ahead += 65 * REPEAT_SECONDS
    error = followed.failed()
    assert isinstance(error, NoCapacityError)
    assert "the job waits for admission by queue training" in error.what
    assert "(for 10080 min, kubernetes.queue_wait_minutes)" in error.what


def test_a_job_whose_hosts_have_succeeded_is_ended_where_its_controller_does_not(
    api, clock, running, tmp_path
):
    leader = only_pod(api)
    api.say(leader, *record_lines(tmp_path))
    api.end_pod(leader)
    until(lambda: "ended with exit code 0" in running.status, what="its end is seen")
    another_look(api, running)
    clock.ahead += START_SECONDS
    until(lambda: "have succeeded, and their job does not end" in running.status, what="it is told")
    clock.ahead += 7200
    end = running.ended()
    assert (end.status, api.names("jobsets")) == ("succeeded", [])


@pytest.fixture
def unread(api, submit):
    """A job that has ended, whose leader's log was not read."""
    submitted = submit(output="pvc://outputs/runs")
    api.run_pods(NAME)
    leader = only_pod(api)
    api.say(leader, "hello")
    api.end_pod(leader)
    api.end_job(NAME)
    return submitted


RECORD_OF_LEADER = f"pvc://outputs/runs/{NAME}/output/0/data/stoker/training.json"


def test_a_run_whose_leader_s_node_went_before_its_log_was_read_is_unknown(api, follow, unread):
    # The autoscaler took the node, and the garbage collector the pod.
    api.remove("pods", only_pod(api))
    end = follow(unread).ended()
    assert (end.status, end.unfetched) == ("succeeded", RECORD_OF_LEADER)


def test_a_log_that_its_node_has_deleted_was_not_read(api, clock, follow, unread):
    leader = only_pod(api)
    api.delete_log(leader)
    followed = follow(unread)
    log = f"GET /api/v1/namespaces/{NAMESPACE}/pods/{leader}/log"
    until(lambda: api.count(log) > 1, what="it is asked for again")
    clock.ahead += LAST_WORDS_SECONDS
    end = followed.ended()
    assert (end.status, end.unfetched) == ("succeeded", RECORD_OF_LEADER)
    assert followed.texts(LEADER) == []


def test_hosts_that_fit_no_group_of_the_autoscaler_take_the_next_plan(api, follow, clock, submit):
    submitted = submit()
    leader = api.make_pods(NAME)[0]
    labels = "2 node(s) didn't match Pod's node affinity/selector"
    api.pod_finds_no_node(leader, f"0/2 nodes are available: {labels}.")
    words = f"pod didn't trigger scale-up: {labels}"
    api.tell("Pod", leader, "NotTriggerScaleUp", words, type="Normal")
    followed = follow(submitted)
    until(lambda: f"selector; {words}" in followed.status, what="it is told")
    clock.ahead += UNFIT_SECONDS
    lacked_nodes(followed, "g5.2xlarge")


def test_a_quota_below_the_request_takes_the_next_plan_at_once(api, start):
    followed = start()
    api.tell("Job", f"{NAME}-dnn-0", "FailedCreate", QUOTA.replace("gpu=4", "gpu=0"))
    lacked_nodes(followed, "g5.2xlarge")


# --- stopping


def stopped_meanwhile(api, run):
    api.is_deletion_held = True
    stopping = threading.Thread(target=run.stop)
    stopping.start()
    until(lambda: api.count("DELETE") == 1, what="it is being deleted")
    return stopping


def record_lines(folder):
    """Lines of a leader that tell the record of its training."""
    write_json(folder / "leader" / "training.json", training())
    return leader_lines(folder / "leader", run=NAME)


def test_what_hosts_say_while_they_are_stopped_is_read(api, tmp_path, running):
    followed, leader = running, only_pod(api)
    api.say(leader, "training")
    until(lambda: followed.texts(LEADER) == ["training"], what="it runs")
    stopping = stopped_meanwhile(api, followed.run)
    api.say(leader, "saving", *record_lines(tmp_path))
    api.end_pod(leader, 143)
    api.finish_deletions()
    stopping.join(150)
    end = followed.ended()
    assert end.status == "stopped"
    assert followed.texts(LEADER) == ["training", "saving"]
    assert (end.output_dir / "stoker" / "training.json").is_file()


def test_stop_waits_no_longer_than_it_says_and_does_not_raise(api, clock, capfd, run):
    stopping = stopped_meanwhile(api, run)
    clock.ahead += 1000
    stopping.join(150)
    assert not stopping.is_alive()
    assert "job_still_stopping" in capfd.readouterr().err
    assert "it is not gone after" in str(run.remaining())


def test_stop_without_the_right_to_says_so_and_does_not_raise(api, capfd, run):
    api.denied.add(("delete", "jobsets"))
    run.stop()
    said = capfd.readouterr().err
    assert "job_delete_failed" in said
    assert "delete jobsets.jobset.x-k8s.io" in said
    left = run.remaining()
    assert f"kubectl delete jobsets {NAME}" in left.fix


@BOTH
def test_a_drained_dnn_host_restarts_the_job_and_one_that_fails_ends_it(api, api_name, start):
    followed = start(api=api_name, output="pvc://runs")
    api.run_pods(NAME)
    host = f"{NAME}-{TRAINS[api_name]}-0-0"
    for attempt in (1, 2):
        until(lambda n=attempt: followed.status.count(f"{host}: runs") == n, what="it runs")
        leader = only_pod(api, host)
        assert not api.may_evict(leader)
        # Its node is taken away all the same, as spot nodes are.
        api.disrupt_pod(leader)
        status = api.get("jobsets", NAME)["status"]
        assert (status["restarts"], status["restartsCountTowardsMax"]) == (attempt, 0)
    until(lambda: followed.status.count(f"{host}: runs") == 3, what="it runs")
    # A TrainJob does not say so, but its pods do.
    assert followed.status.count("all hosts are restarted (restart 2)") == 1
    api.fail_pod(only_pod(api, host), EXIT_CODE)
    end = followed.ended()
    assert (end.status, end.exit_code) == ("failed", EXIT_CODE)


def test_a_drain_waits_for_the_followers_of_a_workflow_s_jobs(api, platform, job, step):
    # The profile's job lives as long as its logs; another training of the Workflow runs, too.
    names = ("profile", "other", "train")
    for name in names:
        step(name)
        platform.submit(platform.plan(dataclasses.replace(job, name=f"{NAME}-{name}"))).leave()
    assert not api.may_evict("profile")
    api.end_pod("profile")
    assert [api.may_evict(name) for name in names] == [True, False, False]
    budgets = [name for name in api.names("poddisruptionbudgets") if name.startswith("w-")]
    assert sorted(budgets) == ["w-other", "w-profile", "w-train"]
    api.remove("workflows", "w")
    assert api.names("poddisruptionbudgets") == []


def test_without_the_right_to_a_disruption_budget_the_job_runs_all_the_same(api, capfd, submit):
    api.denied.add(("create", "poddisruptionbudgets"))
    submit().stop()
    assert "disruption_budget_create_failed" in capfd.readouterr().err


@pytest.mark.parametrize("kind", ["Completed", "Failed"])
@pytest.mark.parametrize("is_pod", [False, True])
def test_an_ended_train_job_is_deleted_by_its_follower_and_a_pipeline_s_by_the_last_step(
    api, platform, cluster, clock, job, start, step, kind, is_pod
):
    if is_pod:
        step()
    followed = start(api="trainer")
    api.run_pods(NAME)
    api.end_job(NAME, kind)
    api.pass_seconds_after_end(10**9)
    assert api.trained_again == []
    followed.ended()
    followed.run.stop()
    assert api.names("trainjobs") == [NAME]
    # For longer than a call that does not matter is repeated.
    cluster.sleep = lambda seconds: setattr(clock, "ahead", clock.ahead + seconds)
    api.faults.append(Fault("DELETE", "trainjobs", code=503, times=12))
    followed.run.clean_up()
    if is_pod:
        assert api.names("trainjobs") == [NAME]
        platform.clean_up(NAME, with_settings(job, api="trainer").platform_settings)
    assert are_gone(api, "trainjobs", "trainingruntimes", "configmaps", "secrets")


def test_a_trainer_that_does_not_know_a_field_is_too_old_and_that_is_said(api, submit):
    api.unknown_fields = {"spec.activeDeadlineSeconds", "spec.runtimePatches"}
    with pytest.raises(PlatformError, match="runtimePatches") as caught:
        submit(api="trainer")
    assert "update Kubeflow Trainer to 2.2 or newer" in caught.value.fix
    assert are_gone(api, "trainjobs", "trainingruntimes")


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
    # Without a word on its workload, as an older stoker made it.
    older = "mnist-big-older"
    for name in (*own, *big, older):
        workload = "mnist-big" if name in big else "mnist"
        spec = described_job(name=name, settings={"api": api_name}, workload=workload)
        platform.submit(platform.plan(spec))
        if has_ended:
            api.end_job(name)
    unsaid = {"metadata": {"annotations": {WORKLOAD_NAME_ANNOTATION: None}}}
    api.change(PLURAL[api_name], older, unsaid)
    settings = described_job(settings={"api": api_name}).platform_settings
    assert platform.clean_up("mnist-0badcafe", settings, run_id="0badcafe-0000") == ""
    platform.clean_up("mnist-5b1f6c3e", settings, run_id=run_id)
    assert api.names(PLURAL[api_name]) == sorted([*big, older])
    platform.clean_up(older, settings, run_id=run_id)
    assert api.names(PLURAL[api_name]) == big


# --- being told to end


def test_a_step_follows_its_job_for_as_long_as_that_may_last(api, clock, start, step):
    step(workflow=None)
    followed = start()
    until(lambda: "the job exists" in followed.status, what="it is followed")
    api.denied = {("watch", "pods"), ("watch", "jobsets")}
    api.drop_streams()
    until(lambda: "watch jobsets" in followed.status, what="it is told")
    clock.ahead += 86400
    api.denied = set()
    trained(api, followed, lines=[])
    assert followed.ended().status == "succeeded"


TERMINATED = {"activeDeadlineSeconds": 0}
DELETED = {"deletionTimestamp": "2026-11-20T09:00:00Z"}


# What is gone has had its jobs collected: nothing is left to be stopped but this process.
@pytest.mark.parametrize(
    "end", [{"spec": TERMINATED}, {"spec": {"shutdown": "Terminate"}}, {"metadata": DELETED}, None]
)
def test_a_follower_of_a_run_that_is_being_cancelled_does_not_leave_its_job(api, end, submit, step):
    step()
    run = submit()
    if end is None:
        api.remove("workflows", "w")
    else:
        api.change("workflows", "w", end)
    assert run.leave() == ""
    run.stop()
    assert api.names("jobsets") == []


@pytest.mark.parametrize("why", ["runs", "denied", "away", "silent"])
def test_a_follower_leaves_its_job_unless_its_run_is_known_to_be_cancelled(api, why, submit, step):
    step()
    run = submit()
    if why != "runs":
        api.terminate_workflow("w")
    if why == "denied":
        api.denied.add(("get", "workflows"))
    if why == "away":
        api.faults.append(Fault("GET", "workflows", code=503, times=100))
    if why == "silent":
        api.silent.add("workflows")
    asked = time.monotonic()
    assert f"the job {NAME} keeps running" in run.leave()
    assert time.monotonic() - asked < 50  # without a bound a silent server takes a minute
    run.stop()
    assert api.names("jobsets") == [NAME]
    assert api.count("DELETE") == 0


def test_a_terminal_s_follower_leaves_its_job_and_says_how_to_stop_it(api, run):
    words = run.leave()
    assert f"the same command with --name {NAME}" in words
    assert f"kubectl delete jobsets {NAME} -n team-a" in words
    run.stop()
    assert api.names("jobsets") == [NAME]


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_sigterm_while_adopting_ends_a_job_only_with_its_run(
    api, is_cancelled, submit, step, monkeypatch
):
    step()
    submit()
    step("step-2")
    if is_cancelled:
        api.terminate_workflow("w")

    terminated = Mock(side_effect=TerminatedError)
    monkeypatch.setattr("stoker.platforms.kubernetes.submit._provide_parts", terminated)
    with pytest.raises(TerminatedError):
        submit()
    assert api.names("jobsets") == ([] if is_cancelled else [NAME])


# --- what is left to a pipeline's last step, and to a retry


RUN_ID = "5b1f6c3e-0000"
RECORDS = {"step": "train", "workload.json": "{}"}
NOW_UTC = "stoker.platforms.kubernetes.state.now_utc"


def test_a_step_keeps_with_its_job_what_the_last_step_needs_to_follow_it(api, platform, job, step):
    step("train", run_id=RUN_ID)
    request = platform.plan(dataclasses.replace(job, records=RECORDS))
    assert request.request_sha256 == platform.plan(job).request_sha256
    platform.submit(request).leave()
    step("finish", run_id=RUN_ID)
    assert platform.lost(NAME, job.platform_settings, run_id=RUN_ID) == [{**RECORDS, "run": NAME}]
    assert platform.lost("mnist-2", job.platform_settings, run_id="") == []
    platform.keep(request, "")
    assert platform.lost(NAME, job.platform_settings, run_id=RUN_ID) == []
    # A retry makes another job of the name and the request: of that nobody has told yet.
    api.end_job(NAME, "Failed")
    platform.submit(request).leave()
    assert platform.lost(NAME, job.platform_settings, run_id=RUN_ID) == [{**RECORDS, "run": NAME}]
    assert not platform.is_cancelled(job.platform_settings)
    api.terminate_workflow("w")
    assert platform.is_cancelled(job.platform_settings)


# Kubeflow 2.17 says RUNNING to the last step where nothing was published before it: a pod was
# killed, or a condition at the end was not taken. Nodes as Argo has them.
@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ({"g": ("DAG", "Succeeded"), "if": ("Skipped", "Skipped")}, "succeeded"),
        # Tried again.
        ({"g": ("DAG", "Succeeded"), "try": ("Pod", "Failed")}, "succeeded"),
        ({"g": ("DAG", "Failed"), "a": ("Pod", "Error")}, "failed"),
        # Kept compressed, or in a database.
        ({}, "failed"),
    ],
)
def test_the_last_step_asks_the_workflow_how_a_run_ended_that_kubeflow_calls_running(
    api, job, step, tmp_path, monkeypatch, nodes, words
):
    use_kube_config(monkeypatch, kube_config(tmp_path, api.url))
    step("finish", run_id=RUN_ID)
    told = {name: {"type": kind, "phase": phase} for name, (kind, phase) in nodes.items()}
    api.change("workflows", "w", {"status": {"nodes": told}})
    given = {"workload": to_json(job.platform_settings), "run_id": RUN_ID}
    given["outcome"] = {"state": "RUNNING", "error": {}}
    read = {"inputs": {"parameterValues": given}, "outputs": {"outputFile": "unused"}}
    done = succeeds("train", "--finish", "--executor-input", json.dumps(read))
    assert f": {words}" in done.stdout.splitlines()[0]


@pytest.mark.parametrize("state", ["COMPLETE", "RUNNING"])
@pytest.mark.parametrize("is_skipped", [True, False])
def test_the_last_step_of_a_skipped_run_says_why(
    api, job, step, tmp_path, monkeypatch, is_skipped, state
):
    use_kube_config(monkeypatch, kube_config(tmp_path, api.url))
    step("finish", run_id=RUN_ID)
    api.change("workflows", "w", {"status": {"nodes": {"g": {"type": "DAG"}}}})
    words = "nothing changed since digits-1a2b3c4d of 2026-11-19: skipped"
    if is_skipped:
        api.make_step("unchanged-1", workflow="w")
        ended = {"containerStatuses": [{"name": "main", "state": {"terminated": {}}}]}
        labels = {"labels": {"pipeline/runid": RUN_ID}}
        api.change("pods", "unchanged-1", {"metadata": labels, "status": ended})
        api.say("unchanged-1", words)
    own = msgspec.structs.replace(job.platform_settings, skip_unchanged=True)
    given = {"workload": to_json(own), "run_id": RUN_ID, "outcome": {"state": state, "error": {}}}
    read = {"inputs": {"parameterValues": given}, "outputs": {"outputFile": "unused"}}
    done = succeeds("train", "--finish", "--executor-input", json.dumps(read))
    assert done.stdout.splitlines()[0].endswith(f": {words}") == is_skipped


@pytest.mark.parametrize("is_allowed", [True, False])
def test_a_workflow_of_another_namespace_is_asked_there(
    api, platform, job, monkeypatch, is_allowed, step
):
    step("train", run_id=RUN_ID)
    # The double has one set of objects for all namespaces.
    api.namespaces.add("kubeflow")
    monkeypatch.setenv("POD_NAMESPACE", "kubeflow")
    run = platform.submit(platform.plan(job))
    assert api.get("jobsets", NAME)["metadata"]["ownerReferences"] == []
    assert api.count("GET /apis/argoproj.io") == 0
    api.terminate_workflow("w")
    if not is_allowed:
        api.denied.add(("get", "workflows"))
    assert platform.is_cancelled(job.platform_settings) is is_allowed
    assert [call for call in api.calls if "/namespaces/kubeflow/workflows/w" in call]
    assert bool(run.leave()) is not is_allowed


@BOTH
@pytest.mark.parametrize("kind", ["Completed", "Failed"])
def test_the_last_follower_reads_an_ended_job(api, platform, job, follow, api_name, kind, step):
    step("train", run_id=RUN_ID)
    request = platform.plan(with_settings(job, api=api_name))
    first = platform.submit(request)
    api.run_pods(NAME)
    leader = only_pod(api, f"{NAME}-{TRAINS[api_name]}-0-0")
    api.say(leader, "the last line")
    api.end_pod(leader, code=0 if kind == "Completed" else 1)
    api.end_job(NAME, kind)
    first.leave()
    uid = api.get("jobsets", NAME)["metadata"]["uid"]
    step("finish", run_id=RUN_ID)
    followed = follow(platform.adopting().submit(request))
    assert followed.ended().status == ("succeeded" if kind == "Completed" else "failed")
    assert "the last line" in followed.texts(leader.rpartition("-")[0])
    assert api.get("jobsets", NAME)["metadata"]["uid"] == uid
    api.remove("trainjobs" if api_name == "trainer" else "jobsets", NAME)
    with pytest.raises(PlatformError, match=f"the job {NAME} is gone"):
        platform.adopting().submit(request)
    assert api.names("jobsets") == []


def test_the_last_follower_ends_the_job_of_an_ended_run(api, platform, job, clock, submit, step):
    step("train", run_id=RUN_ID)
    submit().leave()
    api.run_pods(NAME)
    step("finish", run_id=RUN_ID)
    run = platform.adopting().submit(platform.plan(job))
    lines = run.lines()
    next(lines)
    api.terminate_workflow("w")
    clock.ahead += 2 * ASK_SECONDS
    # Argo signals no pod of an exit handler.
    with pytest.raises(TerminatedError) as ended:
        for _ in lines:
            pass
    assert ended.value.args == ()
    assert run.leave() == ""
    run.stop()
    assert api.names("jobsets") == []


@pytest.mark.parametrize(("num_bytes", "num_kept"), [(1, 50), (300 << 10, 2)])
def test_as_many_last_records_are_kept_as_a_configmap_holds(
    api, platform, job, monkeypatch, num_bytes, num_kept
):
    monkeypatch.setattr(NOW_UTC, iter(map(str, range(100, 200))).__next__)
    names = [f"mnist-{number}" for number in range(num_kept + 2)]
    for name in names:
        platform.keep(platform.plan(dataclasses.replace(job, name=name)), "x" * num_bytes)
    data = api.get("configmaps", "stoker-mnist-finished")["data"]
    assert sorted(data) == sorted(names[-num_kept:])
    last = dataclasses.replace(job, name=names[-1])
    platform.keep(platform.plan(last), "again")
    assert platform.kept(platform.plan(last)) == "again"
    changed = dataclasses.replace(last, hyperparameters={"epochs": 4})
    assert platform.kept(platform.plan(changed)) == ""


def test_without_the_right_to_read_records_a_run_goes_its_way(api, platform, job, capfd):
    api.denied |= {("get", "configmaps")}
    request = platform.plan(job)
    platform.keep(request, "{}")
    assert platform.kept(request) == ""
    assert platform.lost(NAME, job.platform_settings, run_id=RUN_ID) == ()
    said = capfd.readouterr().err
    events = ("record_save_failed", "record_read_failed", "records_read_failed")
    assert [event for event in events if event in said] == list(events)


LEASE = f"{NAME}-follower"


def lease(api):
    return api.get("configmaps", LEASE)["data"]


@BOTH
def test_a_pod_s_follower_keeps_a_lease_that_the_next_renews(
    api, platform, job, follow, monkeypatch, api_name, step
):
    monkeypatch.setattr("stoker.platforms.kubernetes.follower.RENEW_SECONDS", 0.05)
    times = (str(number) for number in range(10**6))
    monkeypatch.setattr("stoker.platforms.kubernetes.follower.now_utc", lambda: next(times))
    step()
    request = platform.plan(with_settings(job, api=api_name))
    first = follow(platform.submit(request))
    assert lease(api)["minutes"] == "240"
    (owner,) = api.get("configmaps", LEASE)["metadata"]["ownerReferences"]
    assert owner["name"] == NAME
    before = lease(api)["renewed"]
    until(lambda: lease(api)["renewed"] != before, what="it is renewed")
    assert first.run.leave()
    first.run.stop()
    renewed = lease(api)["renewed"]
    step("step-2")
    second = follow(platform.submit(request))
    assert second.run.is_adopted
    assert lease(api)["renewed"] != renewed
    second.run.stop()
    assert api.names("configmaps") == []


@pytest.mark.parametrize(
    ("is_pod", "settings", "minutes"),
    [
        (False, {}, []),
        (False, {"follower_lease_minutes": 30}, ["30"]),
        (True, {}, ["240"]),
        (True, {"follower_lease_minutes": 0}, []),
    ],
)
def test_a_pod_s_follower_keeps_a_lease_and_another_where_asked(
    api, submit, step, is_pod, settings, minutes
):
    if is_pod:
        step(workflow=None)
    submit(**settings)
    kept = [api.get("configmaps", name)["data"] for name in api.names("configmaps")]
    assert [data["minutes"] for data in kept if "minutes" in data] == minutes


def test_a_terminal_that_adopts_a_pod_s_job_ends_the_lease(api, monkeypatch, submit, step):
    step(workflow=None)
    submit()
    monkeypatch.delenv("POD_NAME")
    assert submit().is_adopted
    assert lease(api)["minutes"] == "0"


def test_a_follower_that_may_not_renew_its_lease_leaves_it_without_an_end(api, capfd, submit, step):
    step(workflow=None)
    api.denied.add(("patch", "configmaps"))
    run = submit()
    assert lease(api) == {"renewed": "", "minutes": "0"}
    assert "permission_missing" in capfd.readouterr().err
    run.stop()


@BOTH
def test_the_rendered_role_has_exactly_a_run_s_rights(api, platform, job, follow, api_name, step):
    settings = with_settings(job, api=api_name)
    role = rules(settings.platform_settings.kubernetes)
    api.role = role
    request = platform.plan(settings)
    for number in ("1", "2"):
        api.make_workflow(f"w{number}")
        step(f"step-{number}", workflow=f"w{number}")
        followed = follow(platform.submit(request))
        until(lambda: api.num_streams >= 3, what="it is followed")
        if number == "1":
            assert followed.run.leave()
            followed.run.stop()
            until(lambda: api.num_streams == 0, what="it is left")
    trained(api, followed, api_name=api_name, lines=[])
    assert followed.ended().status == "succeeded"
    platform.submit(request).stop()
    platform.keep(request, "{}")
    assert platform.kept(request) == "{}"
    platform.lost(NAME, settings.platform_settings, run_id="")
    platform.clean_up(NAME, settings.platform_settings)
    if api_name == "trainer":
        # Of an earlier run of the name, whose TrainJob is gone.
        api.put("trainingruntimes", {"metadata": {"name": NAME}})
    platform.submit(request).stop()
    given = [product(rule["verbs"], rule["apiGroups"], rule["resources"]) for rule in role]
    assert api.used == {*chain.from_iterable(given)}


# --- refusals


@pytest.mark.parametrize("reviews_work", [True, False])
def test_missing_rights_are_named_with_the_role_before_anything_is_made(api, reviews_work, submit):
    api.denied = {("create", "jobsets"), ("get", "pods/log")}
    api.reviews_work = reviews_work
    with pytest.raises(PlatformError) as caught:
        submit()
    error = caught.value
    assert f"namespace {NAMESPACE}" in error.what
    assert "create jobsets.jobset.x-k8s.io" in error.what
    assert ("get pods/log" in error.what) == reviews_work
    assert "kind: Role\n" in error.fix
    assert "kubectl apply -k configs/kubernetes" in error.fix
    assert (USER in error.where) == (not reviews_work)
    assert api.names("jobsets") == []


def test_without_the_right_to_events_a_run_is_followed(api, start):
    api.denied = {("list", "events"), ("watch", "events"), ("get", "events")}
    followed = start()
    trained(api, followed, lines=[])
    assert followed.ended().status == "succeeded"
    assert "the right list events is missing" in followed.status


def refused(job, platform, error=PlatformError):
    with pytest.raises(error) as caught:
        platform.submit(platform.plan(job))
    return caught.value


@pytest.mark.usefixtures("cluster")
def test_a_namespace_or_context_that_is_not_there_is_named(job):
    error = refused(with_settings(job, namespace="team-b"), KubernetesPlatform())
    assert "namespace team-b does not exist" in f"{error.what} {error.where}"
    error = refused(with_settings(job, context="prod"), KubernetesPlatform())
    assert "key kubernetes.context, prod" in f"{error.what} {error.where}"


def test_no_kube_config_says_where_one_would_be(job, tmp_path, monkeypatch):
    use_kube_config(monkeypatch, tmp_path / "none")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    error = refused(job, KubernetesPlatform())
    assert "no cluster is configured" in str(error)
    assert "KUBECONFIG" in error.where


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
    # Its key in the configuration is another one since the client of 2026.
    assert configuration.auth_settings()["BearerToken"]["value"] == "bearer of-the-pod"


@pytest.mark.parametrize(
    ("change", "words", "is_retried"),
    [
        (lambda url: "http://127.0.0.1:1", "does not answer", True),
        (lambda url: url.replace("http:", "https:"), "no safe connection", False),
    ],
)
def test_a_server_that_cannot_be_reached_is_retried_for_seconds_and_an_unsafe_one_is_not(
    job, api, tmp_path, monkeypatch, change, words, is_retried
):
    use_kube_config(monkeypatch, kube_config(tmp_path, change(api.url)))
    waited = []
    cluster = ClusterApi(sleep=waited.append, clock=lambda: sum(waited))
    error = refused(job, KubernetesPlatform(cluster=cluster))
    assert words in str(error)
    assert error.fix
    assert bool(waited) == is_retried
    assert sum(waited) < 30


def test_without_the_client_the_package_is_named(job, monkeypatch):
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    assert "not installed" in str(refused(job, KubernetesPlatform(), UsageError))
