"""Reads the policies of configs/sagemaker/stoker.yaml as IAM reads them."""

import fnmatch
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from stoker.records import Json, Workload
from stoker.workload_file import read_workload
from support.examples import document

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "configs" / "sagemaker" / "stoker.yaml"
ACCOUNT, REGION = "123456789012", "eu-central-1"
# What the stack of the example is made with, and what it may be made with.
EXAMPLE = {"Name": "mnist", "Bucket": "bucket", "Data": "mnist/"}
EVERYTHING = {
    **EXAMPLE,
    "VpcId": "vpc-1",
    "KmsKey": f"arn:aws:kms:{REGION}:{ACCOUNT}:key/1234abcd-12ab-34cd-56ef-1234567890ab",
    "MlflowArn": f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:mlflow-app/app-0a1b2c",
    "WebhookSecret": f"arn:aws:secretsmanager:{REGION}:{ACCOUNT}:secret:webhook-a1b2c3",
    "TrainingSecrets": f"arn:aws:secretsmanager:{REGION}:{ACCOUNT}:secret:hub-a1b2c3",
    "FailureEmail": "ada@example.org",
}
# By the part of the work.
PARTS = ("execution", "step")
ROLES = {part: f"{part.capitalize()}Role" for part in PARTS}
# Those of people and CI are managed policies, not roles'.
POLICIES = ("caller", *PARTS)


def role_name(part: str) -> str:
    """Returns how the example's stack calls a role: training, step ..."""
    return f"stoker-mnist-{REGION}-{part}"


class _Loader(yaml.SafeLoader):
    """Reads CloudFormation's short forms as its long ones."""


def _function(loader: yaml.SafeLoader, name: str, node: yaml.Node) -> Json:
    match node:
        case yaml.ScalarNode():
            value: Json = loader.construct_scalar(node)
        case yaml.SequenceNode():
            value = loader.construct_sequence(node, deep=True)
        case _:
            raise AssertionError(name)
    return {name if name == "Ref" else f"Fn::{name}": value}


_Loader.add_multi_constructor("!", _function)


@functools.cache
def template() -> dict[str, Json]:
    return yaml.load(TEMPLATE.read_text(), Loader=_Loader)


def stack(given: Mapping[str, str]) -> dict[str, Mapping[str, Json]]:
    """Returns the resources that a stack with these parameters has, as CloudFormation fills in."""
    whole: Mapping[str, Json] = template()
    parameters, named = whole["Parameters"], whole["Resources"]
    names: dict[str, str] = {
        "AWS::Partition": "aws",
        "AWS::Region": REGION,
        "AWS::AccountId": ACCOUNT,
        **{name: str(each.get("Default", "")) for name, each in parameters.items()},
        **given,
    }
    assert names.keys() - parameters.keys() == {"AWS::Partition", "AWS::Region", "AWS::AccountId"}

    lists = {name for name, each in parameters.items() if each["Type"] == "CommaDelimitedList"}

    def filled(value: Json) -> Json:
        match value:
            case {"Ref": str(name)} if name in lists:
                return names[name].split(",")
            case {"Fn::Join": [str(between), joined]}:
                return between.join(filled(joined))
            case {"Ref": str(name)}:
                return None if name == "AWS::NoValue" else names.get(name, name)
            case {"Fn::Sub": str(text)}:
                return re.sub(r"\$\{([\w:]+)\}", lambda found: names[found[1]], text)
            case {"Fn::GetAtt": str(text)}:
                return arn_of(text.removesuffix(".Arn"))
            case {"Fn::If": [name, then, other]}:
                return filled(then if is_so(str(name)) else other)
            case dict():
                return {key: filled(item) for key, item in value.items()}
            case list():
                return [each for each in map(filled, value) if each is not None]
        return value

    def arn_of(resource: str) -> str:
        properties = named[resource].get("Properties", {})
        if "RoleName" in properties:
            return f"arn:aws:iam::{ACCOUNT}:role/{filled(properties['RoleName'])}"
        return f"arn:aws:other:{REGION}:{ACCOUNT}:{resource}"

    def is_so(condition: str) -> bool:
        ((equals,),) = whole["Conditions"][condition].values()
        ((left, right),) = equals.values()
        return filled(left) != right

    return {
        name: filled(resource)
        for name, resource in named.items()
        if "Condition" not in resource or is_so(resource["Condition"])
    }


@functools.cache
def example(*more: str) -> Workload:
    names = (f"sagemaker.region={REGION}", *more)
    return read_workload(document("mnist-sagemaker.yaml"), overrides=names)


@functools.cache
def rendered(*, is_all: bool = False) -> Mapping[str, Mapping[str, Json]]:
    """Returns each part's policy, a role's or the caller's; `is_all`: with every parameter."""
    found: dict[str, list[Json]] = {part: [] for part in POLICIES}
    for name, resource in stack(EVERYTHING if is_all else EXAMPLE).items():
        properties = resource["Properties"]
        document = properties.get("PolicyDocument")
        if not str(resource["Type"]).endswith("Policy") or name == "FailureTopicPolicy":
            continue
        roles = properties.get("Roles", [])
        for part in POLICIES:
            is_peoples = part == "caller" and "Managed" in str(resource["Type"])
            if ROLES.get(part) in roles or is_peoples:
                found[part] += document["Statement"]
    return {part: {"Version": "2012-10-17", "Statement": each} for part, each in found.items()}


def statements(policy: Mapping[str, Json]) -> list[Mapping[str, Json]]:
    assert policy["Version"] == "2012-10-17"
    assert isinstance(policy["Statement"], list)
    return policy["Statement"]


def actions(policy: Mapping[str, Json]) -> Iterator[tuple[str, Mapping[str, Json]]]:
    for statement in statements(policy):
        named = statement["Action"]
        assert isinstance(named, list)
        for action in named:
            yield str(action), statement


def resources(statement: Mapping[str, Json]) -> list[str]:
    named = statement["Resource"]
    return [str(each) for each in named] if isinstance(named, list) else [str(named)]


def is_allowed(name, action, resource, *, context=None, is_all=False) -> bool:
    """Whether a policy of the example allows an action on a resource, as IAM matches both."""
    for allowed, statement in actions(rendered(is_all=is_all)[name]):
        matches = any(fnmatch.fnmatchcase(resource, p) for p in resources(statement))
        if allowed != action or not matches:
            continue
        tests = statement.get("Condition", {}).values()
        wanted = [pair for test in tests for pair in test.items()]
        if all(_matches((context or {}).get(key), value) for key, value in wanted):
            return True
    return False


def _matches(given: str | None, wanted: Json) -> bool:
    patterns = wanted if isinstance(wanted, list) else [wanted]
    return given is not None and any(fnmatch.fnmatchcase(given, str(p)) for p in patterns)


def s3_arn(uri: str) -> str:
    return "arn:aws:s3:::" + uri.removeprefix("s3://")
