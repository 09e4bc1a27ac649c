"""The stack's policies allow what the commands of the pages ask of AWS.

Commands are read from the pages. stoker's are run against moto, and their calls are recorded as
botocore builds them; those of AWS's command line are told by the operation that they name.
"""

import itertools
import re
import shlex
from collections.abc import Iterator, Mapping

import botocore.client
import botocore.session
import pytest
from botocore import xform_name
from botocore.model import OperationModel

from stoker.platforms.aws import Aws
from stoker.platforms.sagemaker.registry import champion_quality
from support.command import stoker
from support.examples import project
from support.policies import ACCOUNT, REGION, ROOT, is_allowed, s3_arn

PAGES = (
    *("README.md", "docs/sagemaker.md", "docs/operations.md", "docs/troubleshooting.md"),
    *("docs/how-to/ci.md", "docs/how-to/monitoring.md", "docs/how-to/secrets.md"),
    *("docs/how-to/resume.md", "docs/how-to/hyperparameters.md", "configs/sagemaker/README.md"),
    "examples/lambda_start/README.md",
)
# Who makes stacks, data and functions has more rights than the stack gives; here, why.
OF_ADMINISTRATORS = {
    "cloudformation deploy": "makes the stacks, so the roles",
    "cloudformation describe-stacks": "reads the stack's outputs once",
    "iam attach-role-policy": "gives the CI its rights",
    "iam create-open-id-connect-provider": "once for an account",
    "iam create-role": "makes the CI's role",
    "lambda create-function": "makes the function",
    "lambda invoke": "tries the function",
    "logs put-retention-policy": "changes log groups of all jobs of the account",
    "s3api put-bucket-lifecycle-configuration": "changes the bucket's rules for all workloads",
    "s3 cp": "puts data into the bucket, which the rights of a run do not change",
}
# They ask for no right, or for more than one operation.
NO_RIGHT = {"sts get-caller-identity"}
OTHER_ACTIONS = {"ecr get-login-password": "ecr:GetAuthorizationToken"}
# Verbs that ask nothing of an account.
WITHOUT_ACCOUNT = {
    *("catalog", "compile", "decide", "launch", "report", "run", "schema", "watch"),
    *("init", "evaluate"),  # but for what COMMANDS has
}

PLACE = f"{REGION}:{ACCOUNT}"
SAGEMAKER = f"arn:aws:sagemaker:{PLACE}"
SCHEDULER = f"arn:aws:scheduler:{PLACE}:schedule/default"
# ARNs by the parameter that names the resource.
ARNS = {
    "PipelineName": f"{SAGEMAKER}:pipeline/{{}}",
    "TrainingJobName": f"{SAGEMAKER}:training-job/{{}}",
    "ModelPackageGroupName": f"{SAGEMAKER}:model-package-group/{{}}",
    "logGroupName": f"arn:aws:logs:{PLACE}:log-group:{{}}:log-stream:any",
    "repositoryName": f"arn:aws:ecr:{PLACE}:repository/{{}}",
    "RoleName": f"arn:aws:iam::{ACCOUNT}:role/{{}}",
}
# What people write in capital letters.
PLACEHOLDERS = {
    "ARN": f"{SAGEMAKER}:pipeline/mnist/execution/x1",
    "BAD": f"{SAGEMAKER}:model-package/mnist/1",
    "BUCKET": "bucket",
    "KEY": "stoker/mnist--1/output/model.tar.gz",
    "NAME": "mnist",
    "GROUP": "mnist",
    "ROLE": f"arn:aws:iam::{ACCOUNT}:role/stoker-mnist-{REGION}-step",
}
IAM_NAMES = {
    "s3:ListObjectsV2": "s3:ListBucket",
    "s3:HeadBucket": "s3:ListBucket",
    "s3:HeadObject": "s3:GetObject",
    "s3:GetBucketLifecycleConfiguration": "s3:GetLifecycleConfiguration",
    "s3:DeleteObjects": "s3:DeleteObject",
}
SERVICES = {"s3api": "s3", "service-quotas": "servicequotas"}


def page_text(page: str) -> str:
    return re.sub(r"\\\n\s*", "", (ROOT / page).read_text())


def aws_commands() -> Iterator[tuple[str, str]]:
    """Yields page and command, of code blocks, in-line code and $(...)."""
    for page in PAGES:
        for found in re.finditer(
            r"(?<![\w/-])aws [a-z0-9-]+ [a-z0-9-]+[^\n`)|#]*", page_text(page)
        ):
            if re.match(r"(\*\*|    |`|\$\()", _before(page, found)):
                yield page, found[0].strip()


def _before(page: str, found: re.Match[str]) -> str:
    text = page_text(page)
    line = text[text.rfind("\n", 0, found.start()) + 1 : found.start()]
    return "    " if line.startswith("    ") else line[-1:] or "    "


def verbs_of_pages() -> set[str]:
    named = re.compile(r"(?:^ {4}(?:\$ )?|`)(?:\w+=\S+ )*stoker ([a-z]+)", re.MULTILINE)
    return {verb for page in PAGES for verb in named.findall(page_text(page))}


def resource_of(action: str, parameters: Mapping[str, object]) -> str:
    """Returns the ARN that IAM compares a statement's resources with; "*": IAM takes none."""
    service = action.partition(":")[0]
    if service == "s3":
        key = str(parameters.get("Key", ""))
        return s3_arn(f"s3://{parameters['Bucket']}{'/' + key if key else ''}")
    if service == "scheduler":
        return f"{SCHEDULER}/{parameters['Name']}" if "Name" in parameters else "*"
    if service == "servicequotas" or action == "sagemaker:ListTrainingJobs":
        return "*"
    for name, value in parameters.items():
        is_resource = name == "ModelPackageName" or (name.endswith("Arn") and name != "RoleArn")
        if is_resource and str(value).startswith("arn:"):
            return str(value)
    for name, form in ARNS.items():
        if name in parameters:
            value = str(parameters[name])
            return value if value.startswith("arn:") else form.format(value)
    return "*"


def passed_roles(parameters: Mapping[str, object]) -> Iterator[str]:
    target = parameters.get("Target")
    inner = target if isinstance(target, Mapping) else {}
    for found in (parameters.get("RoleArn"), inner.get("RoleArn")):
        if found:
            yield str(found)


def is_granted(policies: str, action: str, parameters: Mapping[str, object]) -> bool:
    resource = resource_of(action, parameters)
    return any(is_allowed(policy, action, resource) for policy in policies.split())


@pytest.mark.parametrize(
    "command", sorted({text for _, text in aws_commands()}), ids=lambda text: text[:60]
)
def test_the_policies_allow_the_aws_commands_of_the_pages(command):
    words = command.replace("$BUCKET", "bucket").split()
    _, service, operation = words[:3]
    known = f"{service} {operation}"
    if known in OF_ADMINISTRATORS.keys() | NO_RIGHT:
        return
    if known in OTHER_ACTIONS:
        assert is_allowed("caller", OTHER_ACTIONS[known], "*")
        return
    api = SERVICES.get(service, service)
    model = botocore.session.get_session().get_service_model(api)
    (name,) = (each for each in model.operation_names if xform_name(each, "-") == operation)
    action = f"{SERVICES.get(api, api)}:{name}"
    action = IAM_NAMES.get(action, action)
    given = dict(_options(words[3:], model.operation_model(name)))
    assert is_granted("caller prune", action, given), (action, resource_of(action, given))


def _options(words: list[str], model: OperationModel) -> Iterator[tuple[str, str]]:
    names = {f"--{xform_name(name, '-')}": name for name in model.input_shape.members}
    for option, value in itertools.pairwise([*words, ""]):
        if option in names:
            yield names[option], PLACEHOLDERS.get(value, value)


# What stoker is asked, by the verb; {W} is the example's workload, for this region.
COMMANDS = {
    "upload": ["upload sagemaker {W} --yes", "upload sagemaker {W} --check"],
    "start": ["start sagemaker {W} --param epochs=3 --yes"],
    "schedule": ["schedule sagemaker {W} --cron 'cron(0 3 ? * MON *)' --param epochs=20"],
    "status": ["status sagemaker mnist"],
    "stop": ["stop sagemaker mnist --yes"],
    "prune": ["prune sagemaker {W}"],
    "doctor": ["doctor --aws {W}"],
    "train": ["train {W} --group dnn=ml.g5.xlarge:1 --name mnist--r1 --yes"],
    "profile": ["profile --training-job mnist--r1 --region " + REGION],
    "init": ["init {T} --from-training-job mnist--r1 --region " + REGION],
}


# Operations that moto does not have, with an empty answer.
NOT_IN_MOTO = {
    "ListPipelineExecutionSteps": "PipelineExecutionSteps",
    "ListPipelineVersions": "PipelineVersionSummaries",
    "ListAWSDefaultServiceQuotas": "Quotas",
    "ListServiceQuotas": "Quotas",
}


@pytest.fixture
def calls(monkeypatch):
    """Records the calls of all clients: action and parameters."""
    made: list[tuple[str, Mapping[str, object]]] = []
    call = botocore.client.BaseClient._make_api_call

    def noted(client, operation, asked):
        api = client.meta.service_model.service_name
        action = f"{SERVICES.get(api, api)}:{operation}"
        made.append((IAM_NAMES.get(action, action), dict(asked)))
        if operation in NOT_IN_MOTO:
            return {NOT_IN_MOTO[operation]: []}
        return call(client, operation, asked)

    monkeypatch.setattr(botocore.client.BaseClient, "_make_api_call", noted)
    return made


def test_stoker_makes_no_call_that_the_policies_do_not_allow(aws_server, calls, tmp_path):
    aws_server.make_bucket("bucket")
    folder = project(tmp_path)
    workload = folder / "configs" / "mnist-sagemaker.yaml"
    text = workload.read_text()
    workload.write_text(text.replace("\nsagemaker:\n", f"\nsagemaker:\n  region: {REGION}\n"))
    calls.clear()
    refused: list[str] = []
    reached: set[str] = set()
    for verb in ("upload", "start", "schedule", "status", "doctor", "train", "profile", "init"):
        refused += asked_of(verb, workload, calls, folder, reached)
    for verb in ("stop", "prune"):
        refused += asked_of(verb, workload, calls, folder, reached)
    champion_quality(Aws(region=REGION), "mnist")
    refused += not_granted("evaluate", calls, "caller", reached)
    assert refused == []
    assert reached >= REACHED


# What the verbs must have come to, so that the test looks at something.
REACHED = {
    *("sagemaker:CreatePipeline", "sagemaker:StartPipelineExecution", "scheduler:CreateSchedule"),
    *("sagemaker:CreateTrainingJob", "sagemaker:ListTrainingJobs", "s3:PutObject", "iam:GetRole"),
    *("sagemaker:ListModelPackages", "scheduler:ListSchedules", "cloudwatch:GetMetricData"),
}


def asked_of(verb, workload, calls, folder, reached) -> list[str]:
    refused = []
    for command in COMMANDS[verb]:
        done = stoker(*shlex.split(command.format(W=workload, T=folder / "made")), cwd=folder)
        assert calls, (command, done)
        policies = "caller prune" if verb == "prune" else "caller"
        refused += not_granted(command, calls, policies, reached)
    return refused


def not_granted(command, calls, policies, reached) -> list[str]:
    """Returns a line for each recorded call that is refused, and forgets them all."""
    assert calls, command
    reached |= {action for action, _ in calls}
    found = []
    for action, parameters in calls:
        if action == "sts:GetCallerIdentity":
            continue
        if not is_granted(policies, action, parameters):
            found.append(f"{command}: {action} on {resource_of(action, parameters)}")
        for role in passed_roles(parameters):
            service = action.partition(":")[0]
            context = {"iam:PassedToService": f"{service}.amazonaws.com"}
            if not is_allowed("caller", "iam:PassRole", role, context=context):
                found.append(f"{command}: iam:PassRole of {role} to {service}")
    calls.clear()
    return found


def test_each_verb_of_the_pages_is_run_here_or_asks_nothing_of_an_account():
    assert verbs_of_pages() - WITHOUT_ACCOUNT <= COMMANDS.keys()
    assert len(verbs_of_pages()) > 8
    assert len({text for _, text in aws_commands()}) > 15
