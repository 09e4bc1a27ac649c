"""Several workloads, environments and regions of one account deploy, by the page's own commands."""

import itertools
import re
import shlex
from collections.abc import Iterable
from pathlib import Path

import pytest

from stoker.errors import ServiceError
from stoker.platforms.aws import Aws
from stoker.records.base import mappings
from stoker.workload_file import read_workload
from support.moto_server import ACCOUNT
from support.policies import ROOT

PAGE = ROOT / "docs" / "sagemaker.md"
EXAMPLE = ROOT / "configs" / "mnist-sagemaker.yaml"
FIRST, SECOND = "eu-central-1", "eu-west-1"


def page_lines(page: Path) -> list[str]:
    """Returns the commands of a page, with their continued lines joined."""
    blocks = re.findall(r"(?:^ {4}.*\n)+", page.read_text(), re.MULTILINE)
    joined = (re.sub(r"\\\n\s*", "", block) for block in blocks)
    return [line.strip() for block in joined for line in block.splitlines()]


def environment(region: str) -> dict[str, str]:
    """Returns the variables that the page's own `export` lines set."""
    made = {"HOME": "/home/ada"}
    for line in page_lines(PAGE):
        if line.startswith("export "):
            line = line.replace("$(aws sts get-caller-identity --query Account --output text)", "A")
            for word in shlex.split(line)[1:]:
                name, _, value = word.partition("=")
                made[name] = filled(value, made)
                made |= {"AWS_REGION": region} if name == "AWS_REGION" else {}
                made |= {"ACCOUNT": ACCOUNT} if name == "ACCOUNT" else {}
    return made


def filled(text: str, made: dict[str, str]) -> str:
    return re.sub(r"\$\{?(\w+)(?::\?)?\}?", lambda name: made[name[1]], text)


def deployed(
    region: str, *, name: str = "mnist", more: str = "", without: str = "nothing"
) -> dict[str, str]:
    """Does the page's `aws cloudformation deploy` commands; returns the last stack's outputs.

    Args:
        region: The account's region.
        name: The workload's name.
        more: Further parameters of the last stack.
        without: What is in the command that is left out.
    """
    made = environment(region)
    aws = Aws(region=region)
    outputs: dict[str, str] = {}
    for line in page_lines(PAGE):
        if not line.startswith("aws cloudformation deploy ") or without in line:
            continue
        added = f" {more}" if "Name=mnist" in line else ""
        words = shlex.split(filled(line.replace("mnist", name) + added, made))
        outputs = _deploy(aws, words)
    return outputs


def _deploy(aws: Aws, words: list[str]) -> dict[str, str]:
    def value(option: str) -> str:
        return words[words.index(option) + 1]

    def values(option: str) -> Iterable[str]:
        start = words.index(option) + 1 if option in words else len(words)
        return itertools.takewhile(lambda word: not word.startswith("--"), words[start:])

    stack = value("--stack-name")
    parameters = [word.partition("=") for word in values("--parameter-overrides")]
    request = {
        "StackName": stack,
        "TemplateBody": (ROOT / value("--template-file")).read_text(),
        "Capabilities": [*values("--capabilities")],
        "Parameters": [{"ParameterKey": k, "ParameterValue": v} for k, _, v in parameters],
    }
    try:
        aws.call("cloudformation", "CreateStack", **request)
    except ServiceError as err:
        # `deploy` updates a stack that is there.
        if err.code != "AlreadyExistsException":
            raise
    (found,) = mappings(aws.call("cloudformation", "DescribeStacks", StackName=stack), "Stacks")
    assert found["StackStatus"] == "CREATE_COMPLETE", found
    told = mappings(found, "Outputs")
    return {str(each["OutputKey"]): str(each["OutputValue"]) for each in told}


def named_roles(folder: Path, region: str, *, name: str = "mnist") -> set[str]:
    """Returns the roles that the example names, once the page's `sed` has filled it in."""
    (line,) = (line for line in page_lines(PAGE) if line.startswith("sed -i"))
    text = EXAMPLE.read_text().replace("mnist", name)
    script = shlex.split(filled(line, environment(region)))[2]
    for change in script.split(";"):
        _, word, put, _ = change.strip().split("/")
        text = text.replace(word, put)
    file = folder / f"{region}-{name}.yaml"
    file.write_text(text)
    settings = read_workload(file).sagemaker
    assert settings
    named = (settings.role, settings.control.role, settings.pipeline_role, settings.schedule_role)
    return {str(role) for role in named}


def roles_of(outputs: dict[str, str]) -> set[str]:
    parts = ("ExecutionRole", "StepRole", "PipelineRole", "SchedulerRole")
    return {outputs[part] for part in parts}


@pytest.mark.parametrize(
    "second",
    [
        {"region": FIRST, "name": "digits"},
        {"region": FIRST, "name": "mnist-prod"},
        {"region": FIRST, "name": "mnist-eu-west-1"},
        {"region": SECOND, "name": "mnist"},
        {"region": SECOND, "name": "digits"},
        {"region": "us-gov-west-1", "name": "mnist"},
        {"region": "ap-southeast-4", "name": "a-name-as-long-as-it-may-be-here"},
    ],
    ids=lambda second: f"{second['name']}-{second['region']}",
)
def test_a_second_stack_of_the_account_deploys_and_is_named_by_its_workload(
    aws_server, tmp_path, second
):
    first = deployed(FIRST)
    other = deployed(**second)
    assert roles_of(first) == named_roles(tmp_path, FIRST)
    if not second["region"].startswith("us-gov"):  # the page's ARNs are of the partition aws
        assert roles_of(other) == named_roles(tmp_path, **second)
    assert not roles_of(first) & roles_of(other)


def test_the_pages_commands_change_nothing_the_second_time(aws_server):
    assert deployed(FIRST) == deployed(FIRST)


def test_a_stack_that_was_deleted_deploys_again_over_the_bucket_that_stayed(aws_server):
    outputs = deployed(FIRST)
    aws = Aws(region=FIRST)
    uri = f"s3://{environment(FIRST)['BUCKET']}/stoker/mnist--1/output/model.tar.gz"
    aws.write_object(uri, b"model")
    for stack in ("stoker-mnist", "stoker-shared"):
        aws.call("cloudformation", "DeleteStack", StackName=stack)
    assert aws.read_object(uri) == b"model"
    assert roles_of(deployed(FIRST, without="shared.yaml")) == roles_of(outputs)


def test_an_earlier_stacks_roles_keep_their_names_where_that_is_asked(aws_server):
    outputs = deployed(FIRST, more="Roles=stoker")
    ends = {role.rpartition("/")[2] for role in roles_of(outputs)}
    assert ends == {f"stoker-{part}" for part in ("training", "step", "pipeline", "scheduler")}
