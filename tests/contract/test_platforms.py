"""Every platform keeps the interface of `stoker.platforms.base` in the same way."""

import dataclasses
import json

import msgspec
import pytest

from stoker.errors import PlatformError, UsageError
from stoker.records import Channel
from support.local_job import until
from support.platform_jobs import (
    EXIT_CODE,
    LOCAL_JOBS,
    NAME,
    REASON,
    SERVICE_JOBS,
    Followed,
    platform_job,
)

ADOPT = pytest.mark.parametrize("job", SERVICE_JOBS, indirect=True)
LOCAL = pytest.mark.parametrize("job", LOCAL_JOBS, indirect=True)


@pytest.fixture(params=(*LOCAL_JOBS, *SERVICE_JOBS))
def job(request, tmp_path, monkeypatch):
    with platform_job(request.param, tmp_path, request, monkeypatch) as found:
        yield found


def submit(job):
    return job.platform.submit(job.platform.plan(job.spec))


def begin(job, follow):
    followed = follow(submit(job))
    job.run_hosts(followed.run)
    return followed


def test_plan_is_pure_and_described_as_json(job):
    plan = job.platform.plan(job.spec)
    assert job.platform.plan(job.spec) == plan
    assert list(job.calls()) == []
    described = json.dumps(job.platform.describe(plan))
    assert NAME in described
    assert " ".join(job.spec.command[:2]) in described.replace('", "', " ")
    assert all(each.instance_type in described for each in job.spec.groups)


def with_channel(job, name="train", **changes):
    channel = next(iter(job.spec.channels.values()), Channel(uri="data"))
    changed = msgspec.structs.replace(channel, **{"groups": None, **changes})
    return dataclasses.replace(job.spec, channels={name: changed})


def with_groups(job, *, dnn=None, data=None, order=1):
    changes = zip(job.spec.groups, (dnn, data), strict=True)
    groups = tuple(msgspec.structs.replace(group, **(change or {})) for group, change in changes)
    return dataclasses.replace(job.spec, groups=groups[::order])


NO_SUCH_GROUP = "unknown instance group gpu"


@pytest.mark.parametrize(
    ("change", "what", "where"),
    [
        (lambda j: with_channel(j, groups=("gpu",)), NO_SUCH_GROUP, "channels.train"),
        (lambda j: with_channel(j, uri=j.wrong_uri), "://", "train"),
        (lambda j: with_groups(j, dnn={"instance_type": "no.c9"}), "no.c9", "group dnn"),
        (lambda j: with_groups(j, data={"role": "dnn"}), "exactly one dnn group", "groups"),
    ],
)
def test_what_cannot_run_is_refused_with_what_where_and_what_to_do(job, change, what, where):
    with pytest.raises(UsageError) as caught:
        job.platform.plan(change(job))
    assert what in caught.value.what
    assert where in caught.value.where
    assert caught.value.fix
    assert list(job.calls()) == []


@pytest.mark.parametrize("name", ["../x", "", "a b"])
@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda j, name: dataclasses.replace(j.spec, name=name), "run"),
        (lambda j, name: with_groups(j, data={"name": name}), "group"),
        (with_channel, "channel"),
    ],
)
def test_names_that_could_lead_out_of_a_folder_are_refused(job, change, what, name):
    with pytest.raises(UsageError) as caught:
        job.platform.plan(change(job, name))
    assert caught.value.what == f"invalid {what} name {name!r}"
    assert caught.value.where
    assert "letters, digits" in caught.value.fix
    assert list(job.calls()) == []


def test_each_run_has_a_token_of_its_own_that_is_told_nobody(job, follow, capfd):
    tokens = []
    for _ in range(2):
        request = job.platform.plan(job.spec)
        followed = follow(job.platform.submit(request))
        job.run_hosts(followed.run)
        tokens.append(job.token(followed.run))
        job.say("step 1")
        until(lambda f=followed: all(map(f.texts, job.hosts)), what="its hosts are followed")
        said = [*job.kept(), json.dumps(job.platform.describe(request))]
        followed.run.stop()
        followed.ended()
        said += [*capfd.readouterr(), *(line.text for line in followed.lines)]
        assert not [text for text in said if tokens[-1] in text]
    assert [len(bytes.fromhex(token)) for token in tokens] == [32, 32]
    assert tokens[0] != tokens[1]


def test_a_platform_that_refuses_a_job_is_an_error_with_the_reason_and_nothing_is_left(job):
    words = job.deny()
    request = job.platform.plan(job.spec)
    with pytest.raises(PlatformError) as caught:
        job.platform.submit(request)
    assert words in caught.value.what
    assert caught.value.where
    assert list(job.left()) == []


@ADOPT
def test_a_second_submit_adopts_the_running_job_with_its_token_and_all_its_lines(job, follow):
    first = submit(job)
    started, token = job.started(), job.token(first)
    job.run_hosts(first)
    job.say("one", "two")
    second = submit(job)
    assert second.name == first.name
    assert (job.started(), job.token(second)) == (started, token)
    followed = follow(second)
    leader = next(iter(job.hosts))
    until(lambda: said_by(followed, leader, "one", "two") == ["one", "two"], what="all lines")
    job.succeed()
    assert followed.ended().status == "succeeded"
    # A job that has succeeded gives its end, and nothing runs again.
    assert follow(submit(job)).ended().status == "succeeded"
    assert job.started() == started


@LOCAL
def test_a_second_submit_of_a_local_run_is_refused_while_it_runs_and_harms_nothing(job, follow):
    followed = begin(job, follow)
    started, token = job.started(), job.token(followed.run)
    with pytest.raises(PlatformError, match=f"run {NAME} is still running") as caught:
        submit(job)
    assert str(job.spec.run_dir) in caught.value.where
    assert "--name" in caught.value.fix
    assert (job.started(), job.token(followed.run)) == (started, token)
    job.say("still here")
    leader = next(iter(job.hosts))
    until(lambda: said_by(followed, leader, "still here") != [], what="it goes on")
    job.succeed()
    assert followed.ended().status == "succeeded"


def said_by(followed: Followed, host: str, *texts: str) -> list[str]:
    """Returns those of these texts that a host said, in order and as often as they came."""
    return [text for text in followed.texts(host) if text in texts]


def test_lines_come_once_in_order_with_their_host_and_group_while_the_job_runs(job, follow):
    followed = begin(job, follow)
    leader, *others = job.hosts
    texts = [f"step {number}" for number in range(20)]
    job.say(*texts[:10])
    until(lambda: said_by(followed, leader, *texts) == texts[:10], what="the first lines")
    job.say(*texts[10:])
    until(lambda: said_by(followed, leader, *texts) == texts, what="the other lines")
    until(lambda: all(map(followed.texts, others)), what="all hosts' lines")
    job.succeed()
    followed.ended()
    assert said_by(followed, leader, *texts) == texts
    groups = {(line.host, line.group) for line in followed.lines if line.host != "status"}
    assert groups == set(job.hosts.items())
    logs = job.spec.run_dir / "logs"
    for host, group_name in job.hosts.items():
        kept = (logs / f"{group_name}-{host}.log").read_text().splitlines()
        assert kept == followed.texts(host)


def test_following_ends_with_the_job_and_a_stop_after_its_end_changes_nothing(job, follow):
    followed = begin(job, follow)
    job.succeed()
    end = followed.ended()
    assert (end.status, end.exit_code, end.failure) == ("succeeded", 0, None)
    # Its end is told as often as asked.
    assert followed.run.wait() == end
    started = job.started()
    followed.run.stop()
    followed.run.stop()
    assert followed.run.wait() == end
    assert job.stops() == 0
    assert job.started() == started


def test_the_end_of_a_failed_job_carries_its_exit_code_and_reason(job, follow):
    followed = begin(job, follow)
    job.fail()
    end = followed.ended()
    assert (end.status, end.exit_code) == ("failed", EXIT_CODE)
    assert REASON in end.failure
    assert end.model_uri is None


def test_stopping_twice_asks_once_and_leaves_nothing(job, follow, capfd):
    followed = begin(job, follow)
    job.say("step 1")
    until(lambda: all(map(followed.texts, job.hosts)), what="its hosts are followed")
    followed.run.stop()
    assert list(job.left()) == []
    followed.run.stop()
    assert followed.ended().status == "stopped"
    assert job.stops() == 1
    assert "_not_" not in capfd.readouterr().err
