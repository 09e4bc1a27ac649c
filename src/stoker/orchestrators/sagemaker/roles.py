"""Roles have policies with the rights that a workload needs, and no others; a stack makes them.

Whoever runs a part of the work has a policy of its own: the hosts of the training (`execution`),
the pipeline's small steps (`step`), the pipeline, the scheduler, the function of
`examples/lambda_start` (`starter`), and people (`caller`). Where the workload gives two of them
the same role, that role has the rights of both.

A test holds the actions here against the calls in stoker's sources: none is missing, and each one
that stoker does not call itself is one that the service makes under the role.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import yaml

from stoker.errors import UsageError
from stoker.orchestrators.base import sagemaker_of, schedule_name
from stoker.orchestrators.sagemaker.client import MAX_AGE_SECONDS, RETRIES, SCHEDULE_GROUP
from stoker.platforms.aws import split_uri
from stoker.platforms.sagemaker.checks import file_system
from stoker.records import Json, SageMakerSettings, TrackingSettings, Workload
from stoker.records.base import mapping
from stoker.settings import cloud_region

Part = Literal["execution", "step", "pipeline", "scheduler", "starter", "caller"]
Statement = dict[str, Json]

_ROLE = re.compile(r"arn:(?P<partition>aws[a-z-]*):iam::(?P<account>\d{12}):role/?(?P<name>.+)")
_IMAGE = re.compile(
    r"(?P<account>\d{12})\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.amazonaws\.com(?:\.cn)?/"
    r"(?P<repository>[^:@]+)(?::(?P<tag>[^@]+))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_VERSION = "2012-10-17"
_SAGEMAKER = "sagemaker.amazonaws.com"
SERVICES: Mapping[Part, str] = {
    "execution": _SAGEMAKER,
    "step": _SAGEMAKER,
    "pipeline": _SAGEMAKER,
    "scheduler": "scheduler.amazonaws.com",
    "starter": "lambda.amazonaws.com",
}


def role_account(arn: str) -> str:
    """Returns the account that a role's ARN names."""
    return arn.split(":")[4]


@dataclass(frozen=True, slots=True, kw_only=True)
class EcrImage:
    """Names an image in ECR; `tag` and `digest` are empty where its name has none."""

    account: str
    region: str
    repository: str
    tag: str = ""
    digest: str = ""


def ecr_image(name: str) -> EcrImage | None:
    """Returns the parts of an image's name; None where it is not in ECR."""
    found = _IMAGE.fullmatch(name)
    if found is None:
        return None
    return EcrImage(**{key: value or "" for key, value in found.groupdict().items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsRole:
    """A workload needs this role, or, for what people may do, this policy without a role.

    Attributes:
        parts: Jobs or services whose rights it has.
        arn: ARN as in the workload; empty where the workload does not name it.
        service: Who may take it on; empty: it is a policy for people.
    """

    parts: tuple[Part, ...]
    arn: str
    service: str
    statements: tuple[Statement, ...]

    @property
    def name(self) -> str:
        """Returns the role's name, without its path."""
        return self.arn.rpartition("/")[2]

    @property
    def policy(self) -> dict[str, Json]:
        """Returns the policy document."""
        return {"Version": _VERSION, "Statement": list(self.statements)}

    def trust(self, account: str) -> dict[str, Json]:
        """Returns the trust policy: one service, working for one account."""
        statement: Statement = {
            "Sid": "TheServiceInThisAccount",
            "Effect": "Allow",
            "Principal": {"Service": self.service},
            "Action": "sts:AssumeRole",
        }
        # So that nobody else's job can borrow the role. Lambda sends no such condition.
        if self.service != SERVICES["starter"]:
            statement["Condition"] = {"StringEquals": {"aws:SourceAccount": account}}
        return {"Version": _VERSION, "Statement": [statement]}


def role_arns(settings: SageMakerSettings) -> dict[Part, str]:
    """Returns the ARN of each role that the workload names."""
    found: dict[Part, str] = {
        "execution": settings.role,
        "step": settings.control.role or settings.role,
        "pipeline": settings.pipeline_role or settings.role,
    }
    if settings.schedule_role:
        found["scheduler"] = settings.schedule_role
    return found


def roles_of(workload: Workload) -> list[AwsRole]:
    """Returns the roles of the workload's jobs, pipeline and schedule, and the callers' policy.

    Args:
        workload: Workload with settings for SageMaker, a region and an image in ECR.

    Raises:
        UsageError: If the workload lacks what the policies name.
    """
    rights = _Rights.of(workload)
    arns = role_arns(rights.settings)
    parts = [part for part in SERVICES if part in arns or part == "starter"]
    held: dict[str, list[Part]] = {}
    for part in parts:
        held.setdefault(arns.get(part, ""), []).append(part)
    roles = [
        AwsRole(
            parts=tuple(of),
            arn=arn,
            service=_only_service(arn, of),
            statements=_merged(statement for part in of for statement in rights.of_part(part)),
        )
        for arn, of in held.items()
    ]
    caller = AwsRole(
        parts=("caller",), arn="", service="", statements=_merged(rights.of_part("caller"))
    )
    return [*roles, caller]


def iam_files(workload: Workload) -> dict[str, dict[str, Json]]:
    """Returns the policies and trust policies, by the names of their files.

    Raises:
        UsageError: As `roles_of`.
    """
    account = role_account(sagemaker_of(workload).role)
    files: dict[str, dict[str, Json]] = {}
    trusts: dict[str, dict[str, Json]] = {}
    for role in roles_of(workload):
        is_role = bool(role.service)
        files[f"{role.parts[0]}{'-role' if is_role else ''}.json"] = role.policy
        if is_role:
            trusts[f"trust-{role.service.partition('.')[0]}.json"] = role.trust(account)
    return {**files, **trusts}


def stack(workload: Workload) -> str:
    """Returns a CloudFormation template, as YAML: roles, callers' policy, schedule, mail.

    The schedule is made where the stack's parameter ScheduleExpression is set, and mail of runs
    that fail, or that a schedule could not start, is sent where FailureEmail is.

    Raises:
        UsageError: As `roles_of`.
    """
    settings = sagemaker_of(workload)
    account = role_account(settings.role)
    resources: dict[str, Json] = {}
    outputs: dict[str, Json] = {}
    for role in roles_of(workload):
        if role.service and role.arn:
            id = f"{role.parts[0].capitalize()}Role"
            resources[id] = _role_resource(role, account)
            outputs[id] = {"Value": {"Fn::GetAtt": [id, "Arn"]}}
        elif not role.service:
            for number, document in enumerate(_managed(role), start=1):
                id = f"CallerPolicy{number if number > 1 else ''}"
                resources[id] = {
                    "Type": "AWS::IAM::ManagedPolicy",
                    "Properties": {
                        "Description": f"Submits and follows runs of {workload.name} by stoker",
                        "PolicyDocument": document,
                    },
                }
                outputs[id] = {"Value": {"Ref": id}}
    template: dict[str, Json] = {
        "AWSTemplateFormatVersion": "2010-09-09",
        "Description": f"Roles of {workload.name}, and its schedule; by stoker render "
        "cloudformation",
    }
    parameters = {"FailureEmail": _parameter("Is told of runs that fail; empty: nobody is")}
    conditions = {"HasFailureEmail": _is_given("FailureEmail")}
    resources |= _mail_resources(workload)
    if settings.schedule_role:
        parameters["ScheduleExpression"] = _parameter(
            "When the pipeline starts, as cron(0 3 ? * MON *) or rate(1 day); empty: no schedule"
        )
        parameters["TimeZone"] = _parameter("Of a cron expression, as Europe/Berlin", "UTC")
        conditions["HasSchedule"] = _is_given("ScheduleExpression")
        resources["Schedule"] = _schedule_resource(workload, settings)
        resources["ScheduleAlarm"] = _schedule_alarm(workload)
    template["Parameters"] = dict(parameters)
    template["Conditions"] = dict(conditions)
    tags: list[Json] = [
        {"Key": key, "Value": value} for key, value in sorted(settings.tags.items())
    ]
    for name, made in resources.items():
        resource = mapping(made)
        if tags and resource["Type"] in _TAGGED:
            properties = {**mapping(resource["Properties"]), "Tags": tags}
            resources[name] = {**resource, "Properties": properties}
    template["Resources"] = resources
    template["Outputs"] = outputs
    written: str = yaml.dump(template, Dumper=TemplateDumper, sort_keys=False, width=100)
    return written


# A schedule has no tags: its group has, which is the service's own.
_TAGGED = ("AWS::CloudWatch::Alarm", "AWS::Events::Rule", "AWS::IAM::Role", "AWS::SNS::Topic")


def _parameter(words: str, default: str = "") -> Json:
    return {"Type": "String", "Default": default, "Description": words}


def _is_given(parameter: str) -> Json:
    return {"Fn::Not": [{"Fn::Equals": [{"Ref": parameter}, ""]}]}


class TemplateDumper(yaml.SafeDumper):
    """Writes a value that occurs twice out twice: CloudFormation takes no aliases."""

    def ignore_aliases(self, data: object) -> bool:
        """Returns that no value is referred to."""
        return True


def _role_resource(role: AwsRole, account: str) -> Json:
    found = _ROLE.fullmatch(role.arn)
    assert found
    path, _, name = found["name"].rpartition("/")
    properties: dict[str, Json] = {
        "RoleName": name,
        "AssumeRolePolicyDocument": role.trust(account),
        "Policies": [{"PolicyName": "stoker", "PolicyDocument": role.policy}],
    }
    if path:
        properties["Path"] = f"/{path}/"
    return {"Type": "AWS::IAM::Role", "Properties": properties}


# Characters of a managed policy; IAM does not count white space.
_MAX_MANAGED = 6144


def _managed(role: AwsRole) -> Iterator[dict[str, Json]]:
    """Yields the policy in as many parts as a managed policy's size takes."""
    part: list[Json] = []
    for statement in role.statements:
        longer: dict[str, Json] = {"Version": _VERSION, "Statement": [*part, statement]}
        # As IAM counts; the blanks in a condition's values are none that matter.
        if part and len(json.dumps(longer, separators=(",", ":"))) > _MAX_MANAGED:
            yield {"Version": _VERSION, "Statement": part}
            part = []
        part.append(statement)
    yield {"Version": _VERSION, "Statement": part}


def _schedule_resource(workload: Workload, settings: SageMakerSettings) -> Json:
    rights = _Rights.of(workload)
    queue = settings.dead_letter_queue
    target: dict[str, Json] = {
        "Arn": rights.sagemaker(f"pipeline/{workload.name}"),
        # Of the stack itself where it makes that role: a schedule is made after its role.
        "RoleArn": {"Fn::GetAtt": ["SchedulerRole", "Arn"]},
        "RetryPolicy": {
            "MaximumRetryAttempts": RETRIES,
            "MaximumEventAgeInSeconds": MAX_AGE_SECONDS,
        },
    }
    if queue:
        target["DeadLetterConfig"] = {"Arn": queue}
    return {
        "Type": "AWS::Scheduler::Schedule",
        "Condition": "HasSchedule",
        "Properties": {
            # As stoker schedule calls it, which lists this one, too.
            "Name": schedule_name(workload, None),
            "Description": f"Starts the pipeline {workload.name}; made by stoker",
            "ScheduleExpression": {"Ref": "ScheduleExpression"},
            "ScheduleExpressionTimezone": {"Ref": "TimeZone"},
            "FlexibleTimeWindow": {"Mode": "OFF"},
            "Target": target,
        },
    }


def _schedule_alarm(workload: Workload) -> Json:
    """Returns an alarm on starts that EventBridge has given up: no run has failed then."""
    return {
        "Type": "AWS::CloudWatch::Alarm",
        "Condition": "HasFailureEmail",
        "Properties": {
            "AlarmDescription": f"A schedule of the group {SCHEDULE_GROUP}, such as "
            f"{schedule_name(workload, None)}, could not start its run",
            "Namespace": "AWS/Scheduler",
            # The service counts by groups of schedules: those of `stoker schedule` are in this one.
            "MetricName": "InvocationDroppedCount",
            "Dimensions": [{"Name": "ScheduleGroup", "Value": SCHEDULE_GROUP}],
            "Statistic": "Sum",
            "Period": 300,
            "EvaluationPeriods": 1,
            "Threshold": 0,
            "ComparisonOperator": "GreaterThanThreshold",
            # Between two starts there are no figures.
            "TreatMissingData": "notBreaching",
            "AlarmActions": [{"Ref": "FailureTopic"}],
        },
    }


def _mail_resources(workload: Workload) -> dict[str, Json]:
    """Returns a topic with an address, and the rule that tells it of runs that have failed."""
    pipeline = _Rights.of(workload).sagemaker(f"pipeline/{workload.name}")
    topic: Json = {"Ref": "FailureTopic"}
    may_publish: Json = [
        {
            "Sid": "TheRule",
            "Effect": "Allow",
            "Principal": {"Service": "events.amazonaws.com"},
            "Action": "sns:Publish",
            # Without a condition: in a topic's policy EventBridge supports none.
            "Resource": topic,
        },
        {
            "Sid": "TheAlarm",
            "Effect": "Allow",
            "Principal": {"Service": "cloudwatch.amazonaws.com"},
            "Action": "sns:Publish",
            "Resource": topic,
            "Condition": {"StringEquals": {"aws:SourceAccount": {"Ref": "AWS::AccountId"}}},
        },
    ]
    found: dict[str, tuple[str, dict[str, Json]]] = {
        "FailureTopic": (
            "AWS::SNS::Topic",
            {"Subscription": [{"Protocol": "email", "Endpoint": {"Ref": "FailureEmail"}}]},
        ),
        "FailureTopicPolicy": (
            "AWS::SNS::TopicPolicy",
            {
                "Topics": [topic],
                "PolicyDocument": {"Version": _VERSION, "Statement": may_publish},
            },
        ),
        "FailureRule": (
            "AWS::Events::Rule",
            {
                "Description": f"Runs of the pipeline {workload.name} that failed or were stopped",
                "EventPattern": {
                    "source": ["aws.sagemaker"],
                    "detail-type": ["SageMaker Model Building Pipeline Execution Status Change"],
                    "detail": {
                        "pipelineArn": [pipeline],
                        "currentPipelineExecutionStatus": ["Failed", "Stopped"],
                    },
                },
                "Targets": [{"Id": "mail", "Arn": topic}],
            },
        ),
    }
    return {
        name: {"Type": kind, "Condition": "HasFailureEmail", "Properties": properties}
        for name, (kind, properties) in found.items()
    }


def _only_service(arn: str, parts: Sequence[Part]) -> str:
    services = {SERVICES[part] for part in parts}
    if len(services) > 1:
        raise UsageError(
            f"role {arn} is for jobs and for the scheduler: each service needs a role of its own",
            where="key sagemaker.schedule_role",
            fix="name another role there",
        )
    return services.pop()


def _merged(statements: Iterator[Statement]) -> tuple[Statement, ...]:
    """Returns the statements, each once; others of the same name get a number."""
    kept: list[Statement] = []
    for statement in statements:
        if statement in kept:
            continue
        name, number = str(statement["Sid"]), 2
        taken = {each["Sid"] for each in kept}
        sid = name
        while sid in taken:
            sid, number = f"{name}{number}", number + 1
        kept.append({**statement, "Sid": sid})
    return tuple(kept)


def _allow(
    sid: str,
    actions: Sequence[str],
    resources: Sequence[str] | None = None,
    *,
    condition: Mapping[str, Json] | None = None,
) -> Statement:
    """Returns a statement; without resources it is on what IAM knows no resources of."""
    statement: Statement = {
        "Sid": sid,
        "Effect": "Allow",
        "Action": sorted(set(actions)),
        "Resource": "*" if resources is None else list(dict.fromkeys(resources)),
    }
    if condition:
        statement["Condition"] = dict(condition)
    return statement


def _with_folders(uris: Sequence[str]) -> list[str]:
    """Returns the addresses and their folders: a folder is listed without its slash, too."""
    return [each for uri in uris for each in (uri, uri.removesuffix("/*"))]


_PULL = (
    "ecr:BatchCheckLayerAvailability",
    "ecr:BatchGetImage",
    "ecr:GetDownloadUrlForLayer",
)
_PUSH = (
    "ecr:CompleteLayerUpload",
    "ecr:InitiateLayerUpload",
    "ecr:PutImage",
    "ecr:UploadLayerPart",
)
_JOB = (
    "sagemaker:AddTags",
    "sagemaker:CreateTrainingJob",
    "sagemaker:DescribeTrainingJob",
    "sagemaker:ListTags",
    "sagemaker:StopTrainingJob",
)
# Made by MLflow's client. Files go to the bucket of the MLflow server, which it is to be told.
_MLFLOW = (
    "sagemaker-mlflow:AccessUI",
    "sagemaker-mlflow:CreateExperiment",
    "sagemaker-mlflow:CreateRun",
    "sagemaker-mlflow:GetExperiment",
    "sagemaker-mlflow:GetExperimentByName",
    "sagemaker-mlflow:GetRun",
    "sagemaker-mlflow:ListArtifacts",
    "sagemaker-mlflow:LogBatch",
    "sagemaker-mlflow:LogMetric",
    "sagemaker-mlflow:LogParam",
    "sagemaker-mlflow:SearchRuns",
    "sagemaker-mlflow:SetTag",
    "sagemaker-mlflow:UpdateRun",
)
_READ_LOG = ("logs:DescribeLogStreams", "logs:GetLogEvents")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rights:
    """Makes the statements of one workload, with the names of its account."""

    workload: Workload
    settings: SageMakerSettings
    partition: str
    account: str
    region: str

    @classmethod
    def of(cls, workload: Workload) -> "_Rights":
        """Returns the statements' names.

        Raises:
            UsageError: If no region is known.
        """
        settings = sagemaker_of(workload)
        region = settings.region or cloud_region()
        if not region:
            raise UsageError(
                "policies name a region, and none is known",
                where="key sagemaker.region",
                fix="set AWS_REGION, or add --set sagemaker.region=REGION",
            )
        found = _ROLE.fullmatch(settings.role)
        assert found
        return cls(
            workload=workload,
            settings=settings,
            partition=found["partition"],
            account=found["account"],
            region=region,
        )

    def of_part(self, part: Part) -> Iterator[Statement]:
        """Yields the statements of whoever runs a part of the work."""
        match part:
            case "execution":
                return self._execution()
            case "step":
                return self._step()
            case "pipeline":
                return self._pipeline()
            case "scheduler":
                return self._scheduler()
            case "starter":
                return self._starter()
            case "caller":
                return self._caller()

    # --- names

    def sagemaker(self, resource: str) -> str:
        """Returns the ARN of something in SageMaker."""
        return f"arn:{self.partition}:sagemaker:{self.region}:{self.account}:{resource}"

    def _below(self, *paths: str) -> list[str]:
        """Returns the ARNs of objects below the workload's output prefix."""
        return [self._object(f"{self.settings.output_uri.rstrip('/')}/{path}") for path in paths]

    def _object(self, uri: str) -> str:
        bucket, key = split_uri(uri)
        return f"arn:{self.partition}:s3:::{bucket}/{key}"

    def _bucket(self, bucket: str) -> str:
        return f"arn:{self.partition}:s3:::{bucket}"

    def _logs(self, *groups: str) -> list[str]:
        home = f"arn:{self.partition}:logs:{self.region}:{self.account}:log-group"
        return [f"{home}:{group}{end}" for group in groups for end in ("", ":*")]

    @property
    def _name(self) -> str:
        return self.workload.name

    @property
    def _group(self) -> str:
        return self.settings.model.group or self._name

    def _data(self) -> Iterator[str]:
        """Yields the objects of the channels: those of a prefix, or of a list's folder."""
        for channel in self.workload.channels.values():
            if file_system(channel.uri):
                continue
            uri = channel.uri
            if channel.data_type != "S3Prefix":
                yield f"{uri.rpartition('/')[0]}/*"
            else:
                # The start of keys, not a folder: s3://bucket/day is day-1/a and day.csv, too.
                yield f"{uri}*" if split_uri(uri)[1] else f"{uri.rstrip('/')}/*"

    def _checkpoints(self) -> list[str]:
        named = (self.settings.checkpoint_uri, self.settings.resume_from)
        return [f"{uri.rstrip('/')}/*" for uri in named if uri]

    # --- what several of them may do

    def _list(self, sid: str, uris: Sequence[str]) -> Iterator[Statement]:
        prefixes: dict[str, list[Json]] = {}
        for uri in uris:
            bucket, key = split_uri(uri)
            prefixes.setdefault(bucket, []).append(key or "*")
        for bucket, keys in prefixes.items():
            yield _allow(
                sid,
                ["s3:ListBucket"],
                [self._bucket(bucket)],
                condition={"StringLike": {"s3:prefix": list(dict.fromkeys(keys))}},
            )

    def _find(self) -> Iterator[Statement]:
        return self._list("FindThem", [f"{self.settings.output_uri.rstrip('/')}/*"])

    def _tell_missing(self) -> Statement:
        # With a condition on the prefix S3 says "denied" of an object that is only not there.
        bucket, _ = split_uri(self.settings.output_uri)
        return _allow("TellMissingFromDenied", ["s3:ListBucket"], [self._bucket(bucket)])

    def _write_log(self, group: str) -> Iterator[Statement]:
        yield _allow(
            "WriteItsLog",
            [
                "logs:CreateLogGroup",
                "logs:CreateLogStream",
                "logs:DescribeLogStreams",
                "logs:PutLogEvents",
            ],
            self._logs(f"/aws/sagemaker/{group}"),
        )
        yield _allow(
            "WriteItsMetrics",
            ["cloudwatch:PutMetricData"],
            condition={"StringLike": {"cloudwatch:namespace": ["/aws/sagemaker/*"]}},
        )

    def _images(self, *images: str | None) -> list[str]:
        """Returns the ARNs of the repositories of the images, each once.

        Raises:
            UsageError: If one is not in ECR, the only registry that SageMaker pulls from.
        """
        found = []
        for name in images:
            image = ecr_image(name or "")
            if image is None:
                raise UsageError(
                    f"{name or 'no image'} is not an image in ECR, from where SageMaker pulls",
                    where=f"workload {self._name}, key image",
                    fix="name it as ACCOUNT.dkr.ecr.REGION.amazonaws.com/REPOSITORY:TAG",
                )
            place = f"{image.region}:{image.account}"
            found.append(f"arn:{self.partition}:ecr:{place}:repository/{image.repository}")
        return found

    def _pull(self, *images: str | None) -> Iterator[Statement]:
        yield _allow("PullTheImage", _PULL, self._images(*images))
        yield _allow("LogInToTheRegistry", ["ecr:GetAuthorizationToken"])

    def _pass(self, sid: str, arns: Sequence[str], service: str) -> Statement:
        return _allow(
            sid,
            ["iam:PassRole"],
            arns,
            condition={"StringEquals": {"iam:PassedToService": service}},
        )

    def _run_jobs(self, sid: str) -> Statement:
        return _allow(sid, _JOB, [self.sagemaker(f"training-job/{self._name}-*")])

    def _network(self) -> Iterator[Statement]:
        vpc = self.settings.vpc
        if vpc is None:
            return
        home = f"arn:{self.partition}:ec2:{self.region}:{self.account}"
        yield _allow(
            "JoinTheNetwork",
            [
                "ec2:CreateNetworkInterface",
                "ec2:CreateNetworkInterfacePermission",
                "ec2:DeleteNetworkInterface",
                "ec2:DeleteNetworkInterfacePermission",
            ],
            [
                f"{home}:network-interface/*",
                *(f"{home}:subnet/{subnet}" for subnet in vpc.subnets),
                *(f"{home}:security-group/{group}" for group in vpc.security_groups),
            ],
        )
        yield _allow(
            "LookAtTheNetwork",
            [
                "ec2:DescribeDhcpOptions",
                "ec2:DescribeNetworkInterfaces",
                "ec2:DescribeSecurityGroups",
                "ec2:DescribeSubnets",
                "ec2:DescribeVpcs",
            ],
        )

    def _keys(self) -> Iterator[Statement]:
        keys = (self.settings.output_kms_key, self.settings.volume_kms_key)
        for key in dict.fromkeys(key for key in keys if key):
            resource, condition = self._key(key)
            yield _allow(
                "UseTheKey",
                ["kms:Decrypt", "kms:DescribeKey", "kms:GenerateDataKey"],
                [resource],
                condition=condition,
            )
            yield _allow(
                "LendItToVolumes",
                ["kms:CreateGrant"],
                [resource],
                condition={**condition, "Bool": {"kms:GrantIsForAWSResource": "true"}},
            )

    def _key(self, name: str) -> tuple[str, dict[str, Json]]:
        home = f"arn:{self.partition}:kms:{self.region}:{self.account}:key"
        alias = name.rpartition(":")[2]
        if alias.startswith("alias/"):
            # IAM allows the use of keys, and knows their aliases as a condition.
            return f"{home}/*", {"ForAnyValue:StringEquals": {"kms:ResourceAliases": alias}}
        return (name if name.startswith("arn:") else f"{home}/{name}"), {}

    @property
    def _tracking(self) -> TrackingSettings:
        return self.workload.tracking

    def _mlflow(self) -> Iterator[Statement]:
        """Yields the calls of MLflow's client, in SageMaker's own words for them."""
        if self._tracking.is_managed:
            address = self._tracking.mlflow or ""
            # An app asks for this one, too, for all of its API.
            of_app = ["sagemaker:CallMlflowAppApi"] if ":mlflow-app/" in address else []
            yield _allow("KeepFiguresInMlflow", [*_MLFLOW, *of_app], [address])

    # --- each of them

    def _execution(self) -> Iterator[Statement]:
        settings, data, checkpoints = self.settings, list(self._data()), self._checkpoints()
        if data:
            yield _allow("ReadTheData", ["s3:GetObject"], [self._object(uri) for uri in data])
            yield from self._list("ListTheData", _with_folders(data))
        code = settings.source if settings.source and "://" in settings.source else None
        yield _allow(
            "ReadTokenAndCode",
            ["s3:GetObject"],
            [
                *self._below(
                    f"{self._name}-*/stoker_token/token",
                    f"{self._name}-*/stoker_code/*",
                    f"pipelines/{self._name}/*/token/token",
                    "stoker/inputs/*",
                ),
                *([self._object(code)] if code else []),
            ],
        )
        # Not the folders of runs: decision and evaluation are out of the training's reach.
        yield _allow(
            "WriteOutputsAndProfiles",
            ["s3:GetObject", "s3:PutObject"],
            self._below(
                f"{self._name}-*/output/*",
                f"{self._name}-*/profile/*",
                *([f"{self._name}-*/tensorboard/*"] if self._tracking.tensorboard else []),
                f"stoker/jobs/{self._name}/*",
                f"stoker/profiles/{self._name}/*",
            ),
        )
        if checkpoints:
            yield _allow(
                "KeepCheckpoints",
                ["s3:DeleteObject", "s3:GetObject", "s3:PutObject"],
                [self._object(uri) for uri in checkpoints],
            )
            yield from self._list("ListCheckpoints", _with_folders(checkpoints))
        yield from self._find()
        yield from self._mlflow()
        yield from self._write_log("TrainingJobs")
        yield from self._pull(self.workload.image)
        yield from self._network()
        yield from self._keys()

    def _step(self) -> Iterator[Statement]:
        settings = self.settings
        # Tags tell an earlier attempt's job.
        yield self._run_jobs("RunTheTrainingJob")
        yield self._pass("HandTheJobItsRole", [settings.role], _SAGEMAKER)
        pipeline = [self.sagemaker(f"pipeline/{self._name}")]
        if settings.overlap == "refuse":
            yield _allow("LookForOtherRuns", ["sagemaker:ListPipelineExecutions"], pipeline)
            yield _allow(
                "LookAtOtherRuns",
                ["sagemaker:ListPipelineExecutionSteps"],
                [f"{pipeline[0]}/execution/*"],
            )
        yield _allow(
            "LookAtTheChampion",
            ["sagemaker:DescribeModelPackage", "sagemaker:ListModelPackages"],
            [
                self.sagemaker(f"model-package-group/{self._group}"),
                self.sagemaker(f"model-package/{self._group}/*"),
            ],
        )
        # That object and no other: it is there for the minutes of the job.
        yield _allow(
            "WriteAndDeleteTheToken",
            ["s3:DeleteObject", "s3:GetObject", "s3:PutObject"],
            self._below(f"{self._name}-*/stoker_token/token"),
        )
        yield _allow(
            "ReadInputsAndOutputs",
            ["s3:GetObject"],
            self._below(
                f"{self._name}-*/output/*",
                f"pipelines/{self._name}/*",
                "stoker/inputs/*",
                f"stoker/jobs/{self._name}/*",
                f"stoker/profiles/{self._name}/*",
            ),
        )
        # The model: of a job that had to take another name, copied to the name that is known.
        yield _allow(
            "WriteRecords",
            ["s3:PutObject"],
            self._below(
                f"pipelines/{self._name}/*",
                f"{self._name}-*/stoker_code/*",
                f"{self._name}-*/output/model.tar.gz",
            ),
        )
        yield self._tell_missing()
        yield from self._mlflow()
        notify = self.workload.notify
        if notify and notify.secret_arn:
            yield _allow("ReadTheWebhook", ["secretsmanager:GetSecretValue"], [notify.secret_arn])
        yield _allow("ReadTheJobsLog", _READ_LOG, self._logs("/aws/sagemaker/TrainingJobs"))
        yield _allow("ReadTheJobsLoad", ["cloudwatch:GetMetricData"])
        yield from self._write_log("ProcessingJobs")
        yield from self._pull(settings.control.image or self.workload.image)
        yield from self._network()
        yield from self._keys()

    def _pipeline(self) -> Iterator[Statement]:
        arns = role_arns(self.settings)
        yield _allow(
            "RunTheStepsJobs",
            [*_JOB, *(action.replace("Training", "Processing") for action in _JOB)],
            # As the service calls the jobs of steps.
            [
                self.sagemaker("processing-job/pipelines-*"),
                self.sagemaker("training-job/pipelines-*"),
            ],
        )
        yield self._pass("HandTheStepsTheirRoles", [arns["step"], arns["execution"]], _SAGEMAKER)
        yield _allow(
            "RegisterTheModel",
            [
                "sagemaker:AddTags",
                "sagemaker:CreateModelPackage",
                "sagemaker:CreateModelPackageGroup",
                "sagemaker:DescribeModelPackage",
                "sagemaker:DescribeModelPackageGroup",
            ],
            [
                self.sagemaker(f"model-package-group/{self._group}"),
                self.sagemaker(f"model-package/{self._group}"),
                self.sagemaker(f"model-package/{self._group}/*"),
            ],
        )
        yield _allow(
            "ReadDefinitionRecordsAndModel",
            ["s3:GetObject"],
            self._below("stoker/*", f"pipelines/{self._name}/*", f"{self._name}-*/output/*"),
        )
        yield from self._find()
        yield from self._keys()

    def _scheduler(self) -> Iterator[Statement]:
        pipeline = self.sagemaker(f"pipeline/{self._name}")
        yield _allow("StartThePipeline", ["sagemaker:StartPipelineExecution"], [pipeline])
        queue = self.settings.dead_letter_queue
        if queue:
            yield _allow("KeepWhatDidNotStart", ["sqs:SendMessage"], [queue])

    def _starter(self) -> Iterator[Statement]:
        yield _allow(
            "StartThePipeline",
            ["sagemaker:DescribePipeline", "sagemaker:StartPipelineExecution"],
            [self.sagemaker(f"pipeline/{self._name}")],
        )
        yield _allow(
            "WriteItsLog",
            ["logs:CreateLogGroup", "logs:CreateLogStream", "logs:PutLogEvents"],
            self._logs(f"/aws/lambda/start-{self._name}"),
        )

    def _caller(self) -> Iterator[Statement]:
        settings, arns = self.settings, role_arns(self.settings)
        pipeline = self.sagemaker(f"pipeline/{self._name}")
        yield _allow(
            "UploadThePipeline",
            [
                "sagemaker:AddTags",
                "sagemaker:CreatePipeline",
                "sagemaker:DescribePipeline",
                "sagemaker:ListPipelineExecutions",
                "sagemaker:ListTags",
                "sagemaker:StartPipelineExecution",
                "sagemaker:UpdatePipeline",
            ],
            [pipeline],
        )
        yield _allow(
            "FollowItsRuns",
            [
                "sagemaker:DescribePipelineExecution",
                "sagemaker:ListPipelineExecutionSteps",
                "sagemaker:StopPipelineExecution",
            ],
            [f"{pipeline}/execution/*"],
        )
        yield _allow(
            "FollowTheirJobs",
            ["sagemaker:DescribeTrainingJob", "sagemaker:StopTrainingJob"],
            [self.sagemaker("training-job/pipelines-*")],
        )
        yield self._run_jobs("RunTrainingJobs")
        yield _allow("FindTheTriesOfATraining", ["sagemaker:ListTrainingJobs"])
        yield self._pass("HandOverRoles", [arns["pipeline"], arns["execution"]], _SAGEMAKER)
        if settings.schedule_role:
            yield self._pass(
                "HandTheSchedulerItsRole", [settings.schedule_role], SERVICES["scheduler"]
            )
            home = f"arn:{self.partition}:scheduler:{self.region}:{self.account}:schedule/default"
            yield _allow(
                "ScheduleThePipeline",
                [
                    "scheduler:CreateSchedule",
                    "scheduler:DeleteSchedule",
                    "scheduler:GetSchedule",
                    "scheduler:UpdateSchedule",
                ],
                # The one without a name of its own, and those that have one.
                [f"{home}/stoker-{self._name}", f"{home}/stoker-{self._name}-*"],
            )
            yield _allow("ListSchedules", ["scheduler:ListSchedules"])
        yield _allow(
            "WriteInputsAndRecords",
            ["s3:GetObject", "s3:PutObject"],
            self._below("stoker/*", f"{self._name}-*"),
        )
        yield _allow("ReadWhatRunsLeft", ["s3:GetObject"], self._below(f"pipelines/{self._name}/*"))
        yield _allow(
            "DeleteTokens", ["s3:DeleteObject"], self._below(f"{self._name}-*/stoker_token/token")
        )
        yield self._tell_missing()
        yield _allow(
            "ReadLogs",
            _READ_LOG,
            self._logs("/aws/sagemaker/TrainingJobs", "/aws/sagemaker/ProcessingJobs"),
        )
        yield _allow("ReadTheJobsLoad", ["cloudwatch:GetMetricData"])
        images = (self.workload.image, settings.control.image or self.workload.image)
        yield _allow("PushTheImage", [*_PULL, *_PUSH, "ecr:DescribeImages"], self._images(*images))
        yield _allow("LogInToTheRegistry", ["ecr:GetAuthorizationToken"])
        yield from self._keys()
