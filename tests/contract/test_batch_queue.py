"""A training job goes through a queue of AWS Batch: what is sent, once, followed, stopped."""

import dataclasses
import json
from collections.abc import Callable

import msgspec
import pytest
from botocore.exceptions import ReadTimeoutError

from stoker.catalog import load_catalog
from stoker.errors import NoCapacityError, PlatformError, ServiceError, TerminatedError, UsageError
from stoker.platforms.aws import Aws
from stoker.platforms.base import leader_record
from stoker.platforms.sagemaker import SageMakerPlatform
from stoker.platforms.sagemaker.batch_queue import RUN_TAG
from stoker.platforms.sagemaker.request import REQUEST_TAG, plan_request
from stoker.records import PlatformSettings, to_json
from stoker.records.platforms import QueueSettings
from stoker.train import train
from support import sample_records
from support.aws_answers import Answers, Clock, archive
from support.batch_service import NO_CAPACITY, batch_service
from support.cloudwatch import put_lines
from support.moto_server import ACCOUNT, REGION
from support.policies import is_allowed, s3_arn
from support.sagemaker_job import DATA, DNN, SPOT, group, job, profile_job, settings
from support.sagemaker_service import sagemaker_service

NAME, BUCKET, QUEUE = "mnist-1", "stoker-test", "gpus"
TOKEN = f"s3://{BUCKET}/out/{NAME}/stoker_token/token"
PLAN = {"TrainingPlanArn": f"arn:aws:sagemaker:eu-west-1:{ACCOUNT}:training-plan/p"}


def queued(*groups, queue=None, **changes):
    """Makes a job of one group that goes through the queue."""
    found = queue or QueueSettings(job_queue=QUEUE)
    return job(*(groups or (DNN,)), sagemaker=settings(queue=found, **changes))


def submission(spec) -> dict:
    return json.loads(json.dumps(plan_request(spec).queued))


# ---- what is sent


def test_the_payload_is_the_request_of_a_job_that_starts_at_once_but_for_its_tags():
    asked = submission(queued(request={"Tags": [{"Key": "team", "Value": "vision"}]}))
    body = plan_request(queued(request={"Tags": [{"Key": "team", "Value": "vision"}]})).body
    payload = json.loads(asked["serviceRequestPayload"])
    assert payload == {key: value for key, value in body.items() if key != "Tags"}
    assert asked["tags"]["team"] == "vision"
    assert asked["tags"][REQUEST_TAG]
    assert asked["tags"][RUN_TAG] == asked["jobName"] == NAME
    assert (asked["jobQueue"], asked["serviceJobType"]) == (QUEUE, "SAGEMAKER_TRAINING")


def test_batch_tries_once_as_sagemaker_replaces_broken_hosts():
    asked = submission(queued())
    assert asked["retryStrategy"] == {"attempts": 1}
    assert json.loads(asked["serviceRequestPayload"])["RetryStrategy"]["MaximumRetryAttempts"] == 2


def test_hosts_know_the_runs_name_though_batch_names_the_training_job():
    payload = json.loads(submission(queued())["serviceRequestPayload"])
    assert payload["Environment"]["STOKER_RUN_ID"] == NAME
    assert "STOKER_RUN_ID" not in plan_request(job(DNN)).body["Environment"]


def test_a_workload_without_a_queue_starts_its_jobs_at_once():
    assert plan_request(job(DNN)).queued is None


def test_a_profile_goes_through_the_queue_too():
    spec = profile_job()
    told = msgspec.structs.replace(
        spec.platform_settings.sagemaker, queue=QueueSettings(job_queue=QUEUE)
    )
    spec = dataclasses.replace(spec, platform_settings=PlatformSettings(sagemaker=told))
    assert submission(spec)["jobQueue"] == QUEUE


@pytest.mark.parametrize(
    ("about", "wanted"),
    [
        ({"scheduling_priority": 0}, {"schedulingPriority": 0}),
        ({"scheduling_priority": 9999}, {"schedulingPriority": 9999}),
        ({"share_identifier": "vision"}, {"shareIdentifier": "vision"}),
        ({"quota_share_name": "vision"}, {"quotaShareName": "vision"}),
    ],
)
def test_priority_and_shares_are_passed(about, wanted):
    asked = submission(queued(queue=QueueSettings(job_queue=QUEUE, **about)))
    assert wanted.items() <= asked.items()


@pytest.mark.parametrize(("checkpoints", "retries"), [(None, 0), ("s3://bucket/c", 3)])
def test_a_preempted_job_starts_again_only_where_it_continues(checkpoints, retries):
    shared = QueueSettings(job_queue=QUEUE, quota_share_name="vision")
    asked = submission(queued(queue=shared, checkpoint_uri=checkpoints))
    told = asked["preemptionConfiguration"]
    assert told == {"preemptionRetriesBeforeTermination": retries}
    assert "preemptionConfiguration" not in submission(queued(checkpoint_uri=checkpoints))


@pytest.mark.parametrize(
    ("groups", "changes", "words"),
    [
        ((DNN, DATA), {}, "no data group"),
        ((DNN,), {"further_types": ("ml.g6.2xlarge",)}, "several types"),
        ((DNN,), {"request": SPOT, "max_run_seconds": 3600}, "managed spot"),
        ((DNN,), {"request": {"ResourceConfig": {"KeepAlivePeriodInSeconds": 60}}}, "warm pools"),
        (
            (DNN,),
            {"queue": QueueSettings(job_queue="q", share_identifier="a", quota_share_name="b")},
            "different policies",
        ),
    ],
    ids=["groups", "types", "spot", "warm pool", "two shares"],
)
def test_what_is_not_known_to_go_through_a_queue_is_refused_before_anything_is_sent(
    groups, changes, words
):
    with pytest.raises(UsageError, match=words) as caught:
        plan_request(queued(*groups, **changes))
    assert "sagemaker." in str(caught.value.where)
    assert caught.value.fix


def test_a_training_plan_goes_through_a_queue():
    payload = json.loads(
        submission(queued(request={"ResourceConfig": PLAN}))["serviceRequestPayload"]
    )
    assert PLAN.items() <= payload["ResourceConfig"].items()


def test_a_queue_of_another_region_or_account_is_refused():
    for place in ("us-east-1:123456789012", "eu-west-1:210987654321"):
        arn = f"arn:aws:batch:{place}:job-queue/gpus"
        with pytest.raises(UsageError, match=r"is (in region|of account)") as caught:
            plan_request(queued(queue=QueueSettings(job_queue=arn)))
        assert "sagemaker.queue.job_queue" in str(caught.value.where)


# ---- on the double of Batch, with the double of SageMaker, and moto for the rest


@pytest.fixture
def batch(aws_server, monkeypatch):
    aws_server.make_bucket(BUCKET)
    with sagemaker_service() as sagemaker, batch_service(sagemaker) as service:
        monkeypatch.setenv("AWS_ENDPOINT_URL_SAGEMAKER", sagemaker.url)
        monkeypatch.setenv("AWS_ENDPOINT_URL_BATCH", service.url)
        service.add_queue(QUEUE)
        yield service


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def aws(batch, clock):
    return Aws(region=REGION, sleep=clock.sleep, clock=clock)


@pytest.fixture
def platform(aws):
    return SageMakerPlatform(aws=aws)


def here(tmp_path, *groups, queue=None, **changes):
    """Makes a job whose places are those of moto."""
    place = {"region": REGION, "elsewhere": ("eu-west-1",), "source": None}
    place["output_uri"] = f"s3://{BUCKET}/out"
    spec = queued(*groups, queue=queue, **{**place, **changes})
    return dataclasses.replace(spec, run_dir=tmp_path / "run")


@pytest.fixture
def spec(tmp_path):
    return here(tmp_path)


def follow(run, clock: Clock, *steps: Callable[[], object]) -> list[str]:
    """Reads the run's lines; a step is done in each of the pauses between two looks."""
    left = list(steps)
    clock.on_sleep = lambda _: left.pop(0)() if left else None
    return [f"{line.group}/{line.host} {line.text}" for line in run.lines()]


def training_job(batch) -> str:
    return next(reversed(batch.sagemaker.jobs))


def test_a_job_waits_in_its_place_trains_and_ends(platform, aws, batch, clock, spec):
    other = {"jobName": "o", "jobQueue": QUEUE, "serviceJobType": "SAGEMAKER_TRAINING"}
    aws.call("batch", "SubmitServiceJob", serviceRequestPayload="{}", **other)
    first = batch.only_job()
    run = platform.submit(platform.plan(spec))
    own = next(each for each in batch.jobs.values() if each is not first)
    assert aws.has_object(TOKEN)
    lines = follow(
        run,
        clock,
        lambda: (batch.advance(first, to="RUNNABLE"), batch.advance(own, to="RUNNABLE")),
        lambda: batch.fail(first, "no"),
        lambda: batch.advance(own, to="RUNNING"),
        lambda: put_lines(aws, "algo-1", "step 1", job=training_job(batch)),
        lambda: batch.advance(own, to="SUCCEEDED"),
    )
    told = "\n".join(lines)
    assert f"queue {QUEUE}: RUNNABLE, number 2 in the queue" in told
    assert f"queue {QUEUE}: RUNNABLE, number 1 in the queue" in told
    assert f"training job {training_job(batch)}" in told
    assert "dnn/algo-1 step 1" in lines
    end = run.wait()
    assert (end.status, end.exit_code) == ("succeeded", 0)
    assert not aws.has_object(TOKEN)
    assert training_job(batch).startswith("AWSBatch")


def test_outputs_are_below_the_runs_name_and_found_under_the_one_that_batch_made(
    platform, aws, batch, clock, spec
):
    run = platform.submit(platform.plan(spec))
    own = batch.only_job()

    def leave_outputs() -> None:
        batch.advance(own, to="RUNNING")
        record = to_json(sample_records.training()).encode()
        packed = archive(**{"stoker/training.json": record})
        place = f"s3://{BUCKET}/out/{NAME}/{training_job(batch)}/output"
        aws.write_object(f"{place}/output.tar.gz", packed)
        model = {"S3ModelArtifacts": f"{place}/model.tar.gz"}
        batch.sagemaker.jobs[training_job(batch)]["ModelArtifacts"] = model
        aws.write_object(f"{place}/model.tar.gz", b"a model")

    follow(run, clock, leave_outputs, lambda: batch.advance(own, to="SUCCEEDED"))
    end = run.wait()
    assert leader_record(end.output_dir) is not None
    assert end.model_uri.startswith(f"s3://{BUCKET}/out/{NAME}/AWSBatch")
    # A model may be large: it stays where it is.
    assert not aws.has_object(f"s3://{BUCKET}/out/{NAME}/output/model.tar.gz")


def test_the_training_may_write_its_outputs_where_a_queue_puts_them():
    body = plan_request(queued(output_uri="s3://bucket/stoker")).body
    place = body["OutputDataConfig"]["S3OutputPath"].replace(NAME, "mnist--1")
    made = f"{place}/AWSBatchmnist--1{'0' * 32}/output/output.tar.gz"
    for policy in ("execution", "caller"):
        assert is_allowed(policy, "s3:GetObject", s3_arn(made)), policy
    assert is_allowed("execution", "s3:PutObject", s3_arn(made))
    other = made.replace("mnist--1/", "mnist-stage--1/")
    assert not is_allowed("execution", "s3:PutObject", s3_arn(other))


def test_a_success_waits_for_its_training_job_to_be_shown(platform, aws, batch, clock, spec):
    answers = Answers(aws)
    run = platform.submit(platform.plan(spec))
    own = batch.only_job()
    missing = "Requested resource not found."

    def succeed() -> None:
        batch.advance(own, to="SUCCEEDED")
        look = ("sagemaker", "DescribeTrainingJob", "ValidationException", missing)
        answers.refuse(*look, times=3)

    follow(run, clock, succeed)
    end = run.wait()
    assert (end.status, end.exit_code) == ("succeeded", 0)


def test_tags_of_its_origin_come_from_the_service_job(platform, batch, clock, spec):
    run = platform.submit(platform.plan(spec))
    own = batch.only_job()
    own["tags"]["stoker:made-of-code"] = "sha256:1"
    follow(run, clock, lambda: batch.advance(own, to="SUCCEEDED"))
    assert run.wait().lineage.code == "sha256:1"


# ---- once


def submitted(batch) -> int:
    return len(batch.jobs)


def test_a_second_attempt_adopts_the_job_that_waits_runs_or_has_succeeded(platform, batch, spec):
    platform.submit(platform.plan(spec))
    own = batch.only_job()
    for status in ("RUNNABLE", "RUNNING", "SUCCEEDED"):
        batch.advance(own, to=status)
        assert platform.submit(platform.plan(spec)).name == NAME
    assert submitted(batch) == 1


def test_a_submission_whose_answer_is_lost_is_found_again(platform, aws, batch, clock, spec):
    lost: list[object] = []

    def lose(answer: object) -> None:
        lost.append(answer)
        batch.stale_lists = 2
        raise ReadTimeoutError(endpoint_url=batch.url)

    Answers(aws).change("batch", "SubmitServiceJob", lambda told: lost or lose(told))
    assert platform.submit(platform.plan(spec)).name == NAME
    assert len(lost) == 1
    assert clock.now > 0
    assert submitted(batch) == 1
    assert aws.has_object(TOKEN)


def test_a_job_that_no_list_shows_yet_is_not_submitted_again(platform, aws, batch, spec):
    platform.submit(platform.plan(spec))
    batch.stale_lists = 3
    assert platform.submit(platform.plan(spec)).name == NAME
    assert submitted(batch) == 1
    assert batch.calls.count("SubmitServiceJob") == 2
    # The job reads it.
    assert aws.has_object(TOKEN)


def test_a_lost_answer_that_botocore_repeats_by_itself_leaves_one_job(platform, aws, batch, spec):
    batch.lost_answers.append("SubmitServiceJob")
    batch.stale_lists = 2
    assert platform.submit(platform.plan(spec)).name == NAME
    assert submitted(batch) == 1
    assert aws.has_object(TOKEN)


@pytest.mark.parametrize("way", ["failed", "terminated"])
def test_beside_a_job_that_ended_badly_the_next_name_is_taken(platform, aws, batch, spec, way):
    platform.submit(platform.plan(spec))
    own = batch.only_job()
    if way == "failed":
        batch.fail(own, "Received status from SageMaker: AlgorithmError")
    else:
        aws.call("batch", "TerminateServiceJob", jobId=own["jobId"], reason="no")
    assert platform.submit(platform.plan(spec)).name == f"{NAME}-2"
    assert not aws.has_object(TOKEN)
    assert aws.has_object(TOKEN.replace(NAME, f"{NAME}-2"))


def test_a_job_of_another_request_under_the_name_is_left_alone(platform, batch, spec):
    platform.submit(platform.plan(dataclasses.replace(spec, command=("python", "-m", "other"))))
    assert platform.submit(platform.plan(spec)).name == f"{NAME}-2"
    assert submitted(batch) == 2


def test_an_own_job_is_found_among_namesakes_and_names_that_differ_in_capitals(
    platform, aws, batch, spec
):
    platform.submit(platform.plan(spec))
    of_batch = {"jobQueue": QUEUE, "serviceJobType": "SAGEMAKER_TRAINING"}
    for name in (NAME, NAME.upper(), NAME, f"{NAME}-more"):
        more = {**of_batch, "jobName": name, "serviceRequestPayload": "{}"}
        aws.call("batch", "SubmitServiceJob", **more)
    assert platform.submit(platform.plan(spec)).name == NAME
    assert submitted(batch) == 5


def test_an_attempt_after_a_killed_one_follows_the_same_job(platform, batch, clock, spec):
    platform.submit(platform.plan(spec))
    again = SageMakerPlatform(aws=Aws(region=REGION, sleep=clock.sleep, clock=clock))
    run = again.submit(again.plan(spec))
    own = batch.only_job()
    follow(run, clock, lambda: batch.advance(own, to="SUCCEEDED"))
    assert run.wait().status == "succeeded"
    assert submitted(batch) == 1


@pytest.mark.parametrize(
    ("error", "is_left"), [(KeyboardInterrupt, False), (TerminatedError, True)]
)
def test_a_submission_outlives_sigterm_and_not_ctrl_c(platform, aws, batch, spec, error, is_left):
    def lose(_: object) -> None:
        raise error

    Answers(aws).change("batch", "SubmitServiceJob", lose)
    with pytest.raises(error) as caught:
        platform.submit(platform.plan(spec))
    assert (batch.only_job()["status"] == "SUBMITTED") == is_left
    assert aws.has_object(TOKEN) == is_left
    assert ("adopts it" in str(caught.value)) == is_left


# ---- refused


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"kind": "ECS"}, "of the type ECS"),
        ({"state": "DISABLED"}, "is disabled"),
        ({"policy": "fair"}, "shareIdentifier"),
        ({"policy": "quota"}, "quotaShareName"),
    ],
)
def test_what_batch_refuses_leaves_no_token(platform, aws, batch, spec, about, words):
    batch.add_queue(QUEUE, **about)
    with pytest.raises(ServiceError, match=words):
        platform.submit(platform.plan(spec))
    assert submitted(batch) == 0
    assert not aws.has_object(TOKEN)


def test_a_queue_that_is_not_there_is_named_with_its_key(platform, tmp_path):
    spec = here(tmp_path, queue=QueueSettings(job_queue="gpu"))
    with pytest.raises(UsageError, match="no queue gpu") as caught:
        platform.submit(platform.plan(spec))
    assert "sagemaker.queue.job_queue" in str(caught.value.where)


@pytest.mark.parametrize("call", ["SubmitServiceJob", "ListServiceJobs", "DescribeServiceJob"])
def test_a_missing_right_is_named(platform, batch, spec, call):
    batch.denied.add(call)
    with pytest.raises(PlatformError, match=f"batch:{call} is missing"):
        platform.submit(platform.plan(spec))


def test_without_the_right_to_see_the_queue_a_job_is_followed_all_the_same(
    platform, batch, clock, spec
):
    batch.denied.add("GetJobQueueSnapshot")
    run = platform.submit(platform.plan(spec))
    own = batch.only_job()
    steps = [
        lambda: batch.advance(own, to="RUNNABLE"),
        lambda: None,
        lambda: batch.advance(own, to="SUCCEEDED"),
    ]
    lines = follow(run, clock, *steps)
    assert f"sagemaker/status queue {QUEUE}: RUNNABLE" in lines
    assert batch.calls.count("GetJobQueueSnapshot") == 1
    assert run.wait().status == "succeeded"


# ---- stopped


def test_a_waiting_job_is_stopped_before_it_costs_anything(platform, aws, batch, clock, spec):
    run = platform.submit(platform.plan(spec))
    batch.advance(batch.only_job(), to="RUNNABLE")
    run.stop()
    assert batch.only_job()["status"] == "FAILED"
    assert not batch.sagemaker.jobs
    assert run.remaining() is None
    assert not aws.has_object(TOKEN)
    assert run.wait().status == "stopped"
    run.stop()
    assert batch.calls.count("TerminateServiceJob") == 1


@pytest.mark.parametrize("status", ["SCHEDULED", "STARTING", "RUNNING"])
def test_a_job_with_hosts_is_stopped_with_its_training_job(platform, aws, batch, spec, status):
    run = platform.submit(platform.plan(spec))
    batch.advance(batch.only_job(), to=status)
    run.stop()
    assert batch.sagemaker.jobs[training_job(batch)]["TrainingJobStatus"] == "Stopped"
    assert batch.only_job()["status"] == "FAILED"
    assert run.wait().status == "stopped"
    assert not aws.has_object(TOKEN)


def test_a_stop_that_is_refused_says_how_to_end_the_job(platform, aws, batch, spec):
    run = platform.submit(platform.plan(spec))
    batch.denied.add("TerminateServiceJob")
    run.stop()
    left = run.remaining()
    assert "aws batch terminate-service-job --job-id" in left.fix
    assert batch.only_job()["jobId"] in left.fix
    assert aws.has_object(TOKEN)


# ---- failed


def test_a_failed_training_has_its_exit_code_and_reason(platform, batch, clock, spec):
    run = platform.submit(platform.plan(spec))
    own = batch.only_job()
    reason = "AlgorithmError: no such layer, exit code: 7"
    steps = [
        lambda: batch.advance(own, to="RUNNING"),
        lambda: batch.fail_training(own, reason),
    ]
    follow(run, clock, *steps)
    end = run.wait()
    assert (end.status, end.exit_code, end.failure) == ("failed", 7, reason)


def test_a_payload_that_sagemaker_refuses_fails_with_its_words(platform, batch, clock, spec):
    run = platform.submit(platform.plan(spec))
    own = batch.only_job()
    words = "Received status from SageMaker: ValidationException: could not assume role"
    follow(run, clock, lambda: batch.fail(own, words))
    end = run.wait()
    assert end.status == "failed"
    assert words in end.failure


def test_a_job_that_others_terminate_is_stopped_and_not_failed(platform, aws, batch, clock, spec):
    run = platform.submit(platform.plan(spec))
    ask = {"jobId": batch.only_job()["jobId"], "reason": "the queue is needed"}
    follow(run, clock, lambda: aws.call("batch", "TerminateServiceJob", **ask))
    assert run.wait().status == "stopped"


def test_a_job_without_capacity_waits_again_and_its_next_training_job_is_followed(
    platform, aws, batch, clock, spec
):
    run = platform.submit(platform.plan(spec))
    own = batch.only_job()
    lines = follow(
        run,
        clock,
        lambda: batch.advance(own, to="SCHEDULED"),
        lambda: batch.lacks_capacity(own),
        lambda: None,
        lambda: batch.advance(own, to="RUNNING"),
        lambda: put_lines(aws, "algo-1", "step 1", job=training_job(batch)),
        lambda: batch.advance(own, to="SUCCEEDED"),
    )
    first, second = batch.sagemaker.jobs
    told = "\n".join(lines)
    assert f"number 1 in the queue: {NO_CAPACITY}" in told
    assert told.index(f"training job {first}") < told.index(f"training job {second}")
    assert told.count("CapacityError") == 1
    assert "dnn/algo-1 step 1" in lines
    assert run.wait().status == "succeeded"
    assert submitted(batch) == 1


def test_a_preempted_job_is_followed_to_its_second_training(platform, batch, clock, tmp_path):
    batch.add_queue(QUEUE, policy="quota")
    shared = QueueSettings(job_queue=QUEUE, quota_share_name="vision")
    spec = here(tmp_path, queue=shared, checkpoint_uri=f"s3://{BUCKET}/c")
    run = platform.submit(platform.plan(spec))
    own = batch.only_job()
    follow(
        run,
        clock,
        lambda: batch.advance(own, to="RUNNING"),
        lambda: None,
        lambda: batch.preempt(own),
        lambda: batch.advance(own, to="SUCCEEDED"),
    )
    assert run.wait().status == "succeeded"
    assert len(batch.sagemaker.jobs) == 2


LIMIT = "Terminated by JobStateTimeLimit action due to reason: {}"
QUOTA = (
    "Received status from SageMaker: ResourceLimitExceeded: The account-level service limit "
    "'ml.g5.2xlarge for training job usage' is 0 Instances, with current utilization of 0 "
    "Instances and a request delta of 1 Instances."
)


@pytest.mark.parametrize(
    "reason",
    [
        LIMIT.format("CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY"),
        LIMIT.format("MISCONFIGURATION:SERVICE_ENVIRONMENT_MAX_RESOURCE"),
        QUOTA,
    ],
    ids=["capacity", "too small a queue", "quota"],
)
def test_what_a_queue_gives_up_is_no_capacity_and_not_tried_again(
    platform, aws, batch, clock, spec, reason
):
    run = platform.submit(platform.plan(spec))
    own = batch.only_job()
    steps = [lambda: batch.advance(own, to="RUNNABLE"), lambda: batch.fail(own, reason)]
    follow(run, clock, *steps)
    with pytest.raises(NoCapacityError) as caught:
        run.wait()
    assert not caught.value.may_pass
    assert "ml.g5.2xlarge" in caught.value.what
    assert not aws.has_object(TOKEN)


def test_a_job_that_its_queue_can_never_start_ends_at_once(platform, batch, clock, spec):
    reason = (
        "MISCONFIGURATION:SERVICE_ENVIRONMENT_MAX_RESOURCE - Service environment(s) associated "
        "with the job queue cannot meet the capacity requirement of the job."
    )
    own: list[dict] = []

    def stuck(_: float) -> None:
        own[:] = [batch.only_job()]
        if own[0]["status"] == "SUBMITTED":
            batch.advance(own[0], to="RUNNABLE")
            own[0]["statusReason"] = reason

    clock.on_sleep = stuck
    with pytest.raises(NoCapacityError, match="cannot start it"):
        train(spec, platform=platform, catalog=load_catalog("sagemaker"), sleep=clock.sleep)
    assert own[0]["isTerminated"]
    assert submitted(batch) == 1


def test_a_job_that_waits_too_long_makes_room_for_the_next_plan(platform, batch, clock, tmp_path):
    short = QueueSettings(job_queue=QUEUE, wait_minutes=30)
    spec = here(tmp_path, group("dnn", "ml.g5.2xlarge"), queue=short)
    with pytest.raises(NoCapacityError, match="after 30 min") as caught:
        train(
            spec,
            platform=platform,
            catalog=load_catalog("sagemaker"),
            sleep=clock.sleep,
            clock=clock,
        )
    assert not caught.value.may_pass
    assert batch.only_job()["isTerminated"]
    assert 30 * 60 <= clock.now < 32 * 60
