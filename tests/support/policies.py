"""Reads what `stoker render iam` writes, as IAM reads it: actions, resources and conditions."""

import fnmatch
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

from stoker.orchestrators.sagemaker.roles import iam_files
from stoker.records import Json, Workload
from stoker.settings import read_workload
from support.examples import document

ROOT = Path(__file__).parents[2]
ACCOUNT, REGION = "123456789012", "eu-central-1"
REGISTRY = f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com"
# What a workload may say and the example does not, so that every statement is there.
EVERYTHING = (
    "sagemaker.checkpoint_uri=s3://bucket/checkpoints",
    "sagemaker.output_kms_key=alias/outputs",
    "sagemaker.volume_kms_key=1234abcd-12ab-34cd-56ef-1234567890ab",
    "sagemaker.overlap=refuse",
    f"sagemaker.dead_letter_queue=arn:aws:sqs:{REGION}:{ACCOUNT}:starts",
    "sagemaker.vpc.subnets=[subnet-1]",
    "sagemaker.vpc.security_groups=[sg-1]",
    "tracking.tensorboard=true",
    f"tracking.mlflow=arn:aws:sagemaker:{REGION}:{ACCOUNT}:mlflow-tracking-server/team",
    f"notify.secret_arn=arn:aws:secretsmanager:{REGION}:{ACCOUNT}:secret:webhook-a1b2c3",
)
POLICIES = (
    "caller.json",
    "execution-role.json",
    "pipeline-role.json",
    "scheduler-role.json",
    "starter-role.json",
    "step-role.json",
)
TRUSTS = ("trust-lambda.json", "trust-sagemaker.json", "trust-scheduler.json")


@functools.cache
def example(*more: str) -> Workload:
    """Reads the example's workload with an account's names."""
    names = (f"sagemaker.region={REGION}", *more)
    return read_workload(document("mnist-sagemaker.yaml"), overrides=names)


@functools.cache
def rendered(*more: str) -> Mapping[str, Mapping[str, Json]]:
    """Renders the example's policies: file name to policy."""
    return iam_files(example(*more))


def everything() -> Iterator[tuple[str, Mapping[str, Json]]]:
    """Yields (file name, policy) with all that a workload may say."""
    yield from rendered(*EVERYTHING).items()


def statements(policy: Mapping[str, Json]) -> list[Mapping[str, Json]]:
    """Returns the statements of a policy."""
    assert policy["Version"] == "2012-10-17"
    found = policy["Statement"]
    assert isinstance(found, list)
    return [statement for statement in found if isinstance(statement, Mapping)]


def actions(policy: Mapping[str, Json]) -> Iterator[tuple[str, Mapping[str, Json]]]:
    """Yields (action, its statement) of a policy."""
    for statement in statements(policy):
        named = statement["Action"]
        assert isinstance(named, list)
        for action in named:
            yield str(action), statement


def resources(statement: Mapping[str, Json]) -> list[str]:
    """Lists what a statement is about."""
    named = statement["Resource"]
    return [str(each) for each in named] if isinstance(named, list) else [str(named)]


def is_allowed(
    name: str,
    action: str,
    resource: str,
    *,
    context: Mapping[str, str] | None = None,
) -> bool:
    """Says whether a policy of the example allows an action on a resource, as IAM matches both."""
    for allowed, statement in actions(rendered()[name]):
        matches = any(fnmatch.fnmatchcase(resource, p) for p in resources(statement))
        if allowed != action or not matches:
            continue
        tests = statement.get("Condition", {})
        assert isinstance(tests, Mapping)
        wanted = [pair for test in tests.values() for pair in test.items()]  # type: ignore[union-attr]
        if all(_matches((context or {}).get(key), value) for key, value in wanted):
            return True
    return False


def _matches(given: str | None, wanted: Json) -> bool:
    patterns = wanted if isinstance(wanted, list) else [wanted]
    return given is not None and any(fnmatch.fnmatchcase(given, str(p)) for p in patterns)


def s3_arn(uri: str) -> str:
    """Makes the ARN of an s3:// address."""
    return "arn:aws:s3:::" + uri.removeprefix("s3://")
