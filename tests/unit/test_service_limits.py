"""What the service's model limits is refused before it is sent, and nothing else is."""

import json
import re

import pytest
from botocore.loaders import Loader
from botocore.model import ServiceModel

from stoker.errors import UsageError
from stoker.pipelines.sagemaker.limits import check_definition
from stoker.platforms.aws import Aws
from stoker.platforms.sagemaker.checks import notes
from stoker.platforms.service_limits import can_match, input_shape, over_limits, tag_problems
from stoker.records import Channel
from support.sagemaker_job import DNN, ROLE, group, job, plan_body, settings

LONG = "x" * 3000


def asked(**request):
    return settings(request=request)


def tags(*keys):
    return asked(Tags=[{"Key": key, "Value": "v"} for key in keys])


# A change of a job, where the user wrote it, and the limit.
REFUSED = [
    ({"name": "n" * 64}, "--name", "has 64 characters, at most 63"),
    ({"image": "i" * 256}, "key image", "at most 255"),
    ({"command": ("python", "a" * 257)}, "key command", "at most 256"),
    ({"command": ("python", "-c", "import a\nimport b")}, "key command", "does not match"),
    ({"command": ("python", *["-v"] * 100)}, "key command", "has 101 entries, at most 100"),
    ({"hyperparameters": {"lr": LONG}}, "key hyperparameters.lr", "at most 2500"),
    ({"hyperparameters": {f"h{n}": n for n in range(101)}}, "hyperparameters", "at most 100"),
    ({"environment": {"A": LONG}}, "key environment.A", "at most 512"),
    ({"environment": {"MY-NAME": "x"}}, "key environment.MY-NAME", "the name does not match"),
    ({"environment": {f"E{n}": "x" for n in range(101)}}, "environment", "entries, at most 100"),
    (
        {"channels": {"a b": Channel(uri="s3://bkt/x")}},
        "key channels.a b",
        "invalid channel name",
    ),
    ({"channels": {"c" * 65: Channel(uri="s3://bkt/x")}}, "key channels.c", "at most 64"),
    ({"channels": {"c": Channel(uri=f"s3://bkt/{LONG}")}}, "key channels.c.uri", "at most 1024"),
    (
        {"channels": {f"c{n}": Channel(uri="s3://bkt/x") for n in range(21)}},
        "key sagemaker.request.InputDataConfig",
        "at most 20",
    ),
    ({"sagemaker": settings(role="arn:aws:iam::12:role/x-y-z")}, "key sagemaker.role", "match"),
    (
        {"sagemaker": settings(output_uri=f"s3://bkt/{LONG}")},
        "sagemaker.output_uri",
        "at most 1024",
    ),
    ({"sagemaker": settings(max_run_seconds=29 * 86400)}, "sagemaker.max_run_seconds", "28 days"),
    ({"sagemaker": asked(ResourceConfig={"VolumeSizeInGB": 20000})}, "VolumeSizeInGB", "16384"),
    ({"sagemaker": asked(ResourceConfig={"VolumeKmsKeyId": "a key"})}, "KmsKeyId", "match"),
    ({"sagemaker": asked(RetryStrategy={"MaximumRetryAttempts": 31})}, "Attempts", "is 31, at"),
    ({"sagemaker": tags(*(f"t{n}" for n in range(51)))}, "request.Tags", "at most 50"),
    ({"sagemaker": tags("k" * 129)}, "request.Tags[0].Key", "at most 128"),
    ({"sagemaker": tags("a;b")}, "request.Tags[0].Key", "does not match"),
    ({"sagemaker": tags("aws:team")}, "request.Tags[0].Key", "AWS keeps for itself"),
    (
        {"sagemaker": asked(VpcConfig={"SecurityGroupIds": ["sg-1"] * 6, "Subnets": ["s-1"]})},
        "VpcConfig.SecurityGroupIds",
        "has 6 entries, at most 5",
    ),
    (
        {
            "sagemaker": asked(
                AlgorithmSpecification={"MetricDefinitions": [{"Name": LONG, "Regex": "x"}]}
            )
        },
        "MetricDefinitions[0].Name",
        "at most 255",
    ),
    ({"sagemaker": asked(OutputDataConfig={"CompressionType": "ZIP"})}, "Compression", "none of"),
]


@pytest.mark.parametrize(("changes", "where", "words"), REFUSED)
def test_a_job_over_a_limit_is_refused_at_the_users_key(changes, where, words):
    with pytest.raises(UsageError) as caught:
        plan_body(job(DNN, **changes))
    assert where in f"{caught.value.where} {caught.value.what}"
    assert words in caught.value.what
    # The value is named, but not in full.
    assert len(caught.value.what) < 500


TAKEN = [
    {"channels": {"c": Channel(uri="s3://bkt/a b/ü+{x}%20/(1).tar=~")}},
    {"channels": {"c-1.x_y": Channel(uri="s3://arn:aws:s3:eu-west-1:1:accesspoint/p/k")}},
    {"hyperparameters": {"prompt": "Grüße, 世界 🎉", "spec": '{"a": [1, 2]}', "no": ""}},
    {"environment": {"TEXT": "two\nlines\tand 世界", "_x9": ""}},
    {"sagemaker": tags("Größe", "チーム", "a b/c:d=e+f-g@h", "x" * 128, "AwsTeam")},
    {"sagemaker": asked(OutputDataConfig={"KmsKeyId": "alias/mine"})},
    {"sagemaker": settings(max_run_seconds=28 * 86400)},
]


@pytest.mark.parametrize("changes", TAKEN)
def test_what_the_service_takes_is_not_refused(changes):
    plan_body(job(DNN, **changes))


@pytest.mark.parametrize(
    ("partition", "region"),
    [
        ("aws", "eu-west-1"),
        ("aws-cn", "cn-north-1"),
        ("aws-us-gov", "us-gov-west-1"),
        ("aws-iso", "eu-west-1"),
        ("aws-eusc", "eu-west-1"),
    ],
)
def test_arns_of_all_partitions_are_taken(partition, region):
    role = f"arn:{partition}:iam::123456789012:role/a/path/My.Role_1+x=y@z-,"
    key = f"arn:{partition}:kms:{region}:123456789012:key/1234abcd-12ab-34cd-56ef-1234567890ab"
    request = {"OutputDataConfig": {"KmsKeyId": key}}
    image = f"123456789012.dkr.ecr.{region}.amazonaws.com/stoker:1"
    own = settings(role=role, region=region, request=request)
    plan_body(job(DNN, image=image, sagemaker=own))


def test_a_type_newer_than_the_model_is_a_note_and_a_misspelt_one_is_refused():
    body = plan_body(job(group("dnn", "ml.p9en.48xlarge")))
    assert any("knows no training type ml.p9en.48xlarge" in each for each in notes(body))
    for wrong in ("ml.g5.2xlrge", "ml.g5", "ml.g5.2XLARGE", "g5"):
        with pytest.raises(UsageError, match="no instance type"):
            plan_body(job(group("dnn", wrong)))


PATTERNS = [
    (r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}", ["a", "a--b", "9"], ["", "-a", "a-", "a_b", "ä", "a\n"]),
    (r"^[a-z]+$", ["ab"], ["ab1", "ab\n"]),
    (
        r"([\p{L}\p{Z}\p{N}_.:/=+\-@]*)",
        ["", "Maß 1", "チーム", "a\u00a0b", "²"],
        ["a;b", "🎉", "%"],
    ),
    (r"([\p{L}\p{Z}\p{N}_.:\/=+\-@]*)${1,128}", ["ab", ""], ["a;"]),
    (r"[\p{L}\p{M}\p{S}\p{N}\p{P}]+", ["🎉", "e\u0301", "$%§"], ["a b", ""]),
    (r"arn:[\p{Alnum}\-]+:lambda:.*", ["arn:aws-cn:lambda:x"], ["arn:ä:lambda:x"]),
    (
        r"[\u0020-\uD7FF\uE000-\uFFFD\uD800\uDC00-\uDBFF\uDFFF\t]*",
        ["a\tb", "世界", "🎉"],
        ["a\x00b", "a\nb"],
    ),
    (r"\d{12}", ["123456789012"], ["١٢٣٤٥٦٧٨٩٠١٢"]),
    (r"[\w-_]*", ["a-b_c"], ["a b", "ä"]),
    (r"(fs-[0-9a-f]{8,})", ["fs-01234567"], ["fs-0123456", "xfs-01234567"]),
    # Not one of Python's: the service is asked.
    (r"a\p{IsGreek}", ["anything"], []),
    (r"(?<n>x)", ["anything"], []),
]


@pytest.mark.parametrize(("pattern", "good", "bad"), PATTERNS)
def test_a_pattern_matches_the_whole_text_as_javas_do(pattern, good, bad):
    assert [text for text in good if not can_match(pattern, text)] == []
    assert [text for text in bad if can_match(pattern, text)] == []


@pytest.mark.parametrize("service", ["sagemaker", "scheduler", "logs", "s3", "cloudwatch"])
def test_every_pattern_of_a_service_that_is_used_can_be_read(service):
    model = ServiceModel(Loader().load_service_model(service, "service-2"))
    patterns = {model.shape_for(name).metadata.get("pattern") for name in model.shape_names}
    # A letter would be matched, or not: neither takes long or raises.
    for pattern in patterns - {None}:
        can_match(pattern, "x" * 30)


def test_a_long_text_is_measured_and_not_matched():
    assert can_match(r"(a+)+b", "a" * 100_000)


def test_variables_of_a_pipeline_and_wrong_types_are_passed_over():
    shape = input_shape("sagemaker", "CreateTrainingJob")
    variables = {"TrainingJobName": {"Get": "Parameters.Name"}, "RoleArn": 3, "New": LONG}
    joined = {"OutputDataConfig": {"S3OutputPath": {"Std:Join": {"On": "/", "Values": [LONG]}}}}
    assert list(over_limits(variables | joined, shape)) == []


def test_tags_that_no_request_may_have_are_named():
    listed = [{"Key": "AWS:x"}, {"Key": "a"}, {"Key": "a"}, {"Key": {"Get": "x"}}, None]
    assert [each.place for each in tag_problems(listed)] == ["Tags[0].Key", "Tags[2].Key"]


class Listening:
    """A client that knows its service, and is never to be called."""

    def __init__(self, service: str) -> None:
        model = ServiceModel(Loader().load_service_model(service, "service-2"))
        self.meta = type("Meta", (), {"service_model": model})


TARGET = {"Arn": "arn:aws:sagemaker:eu-west-1:123456789012:pipeline/p", "RoleArn": ROLE}
# Of each service that gets a user's texts: a call, and where it is over a limit.
CALLS = [
    ("scheduler", "CreateSchedule", {"Name": "n" * 65}, "Name has 65 characters, at most 64"),
    ("scheduler", "CreateSchedule", {"Name": "a b"}, "Name does not match"),
    (
        "scheduler",
        "UpdateSchedule",
        {"Target": {**TARGET, "RetryPolicy": {"MaximumRetryAttempts": 200}}},
        "Target.RetryPolicy.MaximumRetryAttempts is 200, at most 185",
    ),
    (
        "scheduler",
        "CreateSchedule",
        {"Target": {**TARGET, "DeadLetterConfig": {"Arn": "arn:aws:sns:x:1:queue"}}},
        "DeadLetterConfig.Arn does not match",
    ),
    ("sagemaker", "CreatePipeline", {"PipelineName": "p_1"}, "PipelineName does not match"),
    (
        "sagemaker",
        "StartPipelineExecution",
        {"PipelineParameters": [{"Name": "A", "Value": LONG}]},
        "PipelineParameters[0].Value has 3000 characters, at most 1024",
    ),
    (
        "sagemaker",
        "CreateModelPackageGroup",
        {"ModelPackageGroupName": "g", "Tags": [{"Key": "aws:x", "Value": ""}]},
        "AWS keeps for itself",
    ),
    (
        "sagemaker",
        "CreateProcessingJob",
        {"ProcessingResources": {"ClusterConfig": {"InstanceCount": 101}}},
        "InstanceCount is 101, at most 100",
    ),
    ("logs", "CreateLogGroup", {"logGroupName": "a b"}, "logGroupName does not match"),
    ("ecr", "CreateRepository", {"repositoryName": "UPPER"}, "repositoryName does not match"),
]


@pytest.mark.parametrize(("service", "operation", "parameters", "words"), CALLS)
def test_a_call_that_the_service_would_refuse_is_not_made(service, operation, parameters, words):
    aws = Aws(region="eu-west-1", clients={service: Listening(service)})
    setattr(aws.client(service), re.sub(r"(?<!^)(?=[A-Z])", "_", operation).lower(), None)
    with pytest.raises(UsageError) as caught:
        aws.call(service, operation, **parameters)
    assert words in caught.value.what


def test_a_refused_call_names_where_its_values_are_written():
    aws = Aws(region="eu-west-1", clients={"scheduler": Listening("scheduler")})
    aws.client("scheduler").create_schedule = None
    wrong = {"Name": "n" * 65, "ScheduleExpression": "x" * 257, "Description": "d" * 513}
    with pytest.raises(UsageError) as caught:
        aws.call("scheduler", "CreateSchedule", **wrong)
    assert caught.value.fix == "change --cron and --name"
    assert "Description has 513 characters, at most 512" in caught.value.what


def test_an_object_with_too_long_a_key_is_not_written():
    aws = Aws(region="eu-west-1", clients={"s3": None})
    # Bytes count, not characters.
    for write in (aws.write_object, aws.create_object):
        with pytest.raises(UsageError, match="1026 bytes, at most 1024"):
            write(f"s3://bkt/{'ä' * 513}", b"")


def pipeline(*steps):
    definition = json.dumps({"Version": "2020-12-01", "Steps": steps})
    return {"PipelineName": "mine", "RoleArn": ROLE, "PipelineDefinition": definition}


def step(kind, name="S", **arguments):
    return {"Name": name, "Type": kind, "Arguments": arguments}


WRONG_STEPS = [
    (
        step("Training", HyperParameters={"a": LONG}),
        "step S (CreateTrainingJob): HyperParameters.a",
    ),
    (step("Processing", Environment={"A": LONG}), "step S (CreateProcessingJob): Environment.A"),
    (step("RegisterModel", ModelPackageDescription=LONG), "(CreateModelPackage)"),
    (step("Transform", MaxConcurrentTransforms=-1), "(CreateTransformJob)"),
    (
        step("Condition", IfSteps=[step("Training", "In", RoleArn="me and you, and all of us")]),
        "step In (CreateTrainingJob): RoleArn does not match",
    ),
    (step("Training", Tags=[{"Key": "aws:x", "Value": ""}]), "AWS keeps for itself"),
]


@pytest.mark.parametrize(("wrong", "words"), WRONG_STEPS)
def test_a_step_whose_request_the_service_would_refuse_is_refused_before_the_upload(wrong, words):
    with pytest.raises(UsageError) as caught:
        check_definition(pipeline(wrong))
    assert words in caught.value.what


def test_a_steps_variables_newer_types_and_unknown_kinds_are_for_the_service():
    check_definition(
        pipeline(
            step("Training", ResourceConfig={"InstanceType": "ml.p9.48xlarge", "InstanceCount": 1}),
            step("Processing", RoleArn={"Get": "Parameters.Role"}, ProcessingJobName="_"),
            step("Lambda", Anything=LONG),
            step("Training", Environment={"A": {"Std:Join": {"On": "", "Values": [LONG]}}}),
        )
    )


def test_a_pipeline_whose_name_the_service_would_refuse_is_not_compiled():
    with pytest.raises(UsageError, match="PipelineName has 257 characters, at most 256"):
        check_definition({**pipeline(), "PipelineName": "p" * 257})
