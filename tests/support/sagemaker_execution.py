"""A double of SageMaker Pipelines: walks an uploaded definition, and runs its jobs for real.

What the service's documentation does not say to work is refused here; what only the SDK's sources
say is counted in `Execution.undocumented`, and docs/sagemaker.md has to admit it.
Waits between attempts are counted instead of waited for.
"""

import contextlib
import functools
import json
import re
import secrets
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path

from botocore.exceptions import ClientError
from botocore.validate import ParamValidator

from support.documents import Json
from support.moto_server import REGION, AwsServer
from support.sagemaker_containers import Body, Containers, Ended, as_list, split_uri
from support.sagemaker_definition import resolved, steps
from support.sagemaker_rules import MODEL, over_limits, rule_problems
from support.sagemaker_service import FINAL, SageMakerService, served

CAPACITY = (
    "CapacityError: Unable to provision requested ML compute capacity. "
    "Please retry using a different ML instance type."
)
_OPERATIONS = {
    "Processing": ("CreateProcessingJob", "ProcessingJobName"),
    "RegisterModel": ("CreateModelPackage", None),
}
_OF_JOBS = ("CreateTrainingJob", "DescribeTrainingJob", "StopTrainingJob")
_EXECUTION = ("PipelineExecutionId", "PipelineExecutionArn", "PipelineName", "PipelineArn")
_COMMON = {"Name", "Type", "Arguments", "DisplayName", "Description", "DependsOn"}
_KEYS = {
    "Processing": _COMMON | {"RetryPolicies", "PropertyFiles"},
    "RegisterModel": _COMMON | {"RetryPolicies"},
    **dict.fromkeys(("Condition", "Fail"), _COMMON),
}
_NAME = re.compile(r"[A-Za-z0-9](-*[A-Za-z0-9]){0,63}")
# Retries are for these alone; what the container did itself is in none of them.
_STEP_KINDS = {"Step.SERVICE_FAULT", "Step.THROTTLING"}
_JOB_KINDS = {
    f"SageMaker.{kind}" for kind in ("RESOURCE_LIMIT", "CAPACITY_ERROR", "JOB_INTERNAL_ERROR")
}


class DefinitionError(AssertionError):
    """A definition, or a part of it, that the service would refuse."""


class Account(SageMakerService):
    """What lasts from run to run: jobs, whose containers run, and faults to come.

    Attributes:
        lacks: Instance types that the region has none of; a job that asks for one gets no hosts.
        faults: Step to what its next attempts end with: a kind that retry policies name.
        lose_host_of: Step to a condition: when it is true, the step's host is lost.
        executing: Ids of runs that are under way.
        endings: How runs have ended, by id.
    """

    def __init__(self, server: AwsServer, containers: Containers) -> None:
        super().__init__()
        self.server = server
        self.containers = containers
        self.lacks: set[str] = set()
        self.faults: dict[str, list[str]] = {}
        self.lose_host_of: dict[str, Callable[[], bool]] = {}
        self.executing: set[str] = set()
        self.endings: dict[str, str] = {}
        self._threads: list[threading.Thread] = []

    def train(self, request: Body, *, is_stopped: Callable[[], bool]) -> Ended:
        problems = [str(problem) for problem in rule_problems(request)]
        if problems:
            raise DefinitionError(f"the service would refuse the job: {problems}")
        if self.lacks & set(_types(request)):
            return Ended(status="Failed", reason=CAPACITY, kind="SageMaker.CAPACITY_ERROR")
        return self.containers.train(request, is_stopped=is_stopped)

    def answered(self, operation, asked) -> tuple[int, Mapping[str, object]] | None:
        """Answers a call about training jobs; None: moto has it."""
        if operation == "DescribePipelineExecution":
            return self._described(asked)
        is_of_a_job = str(asked.get("ResourceArn")).rpartition("/")[2] in self.jobs
        if not is_of_a_job and operation not in _OF_JOBS:
            return None
        status, body = self.answer(operation, asked)
        if operation == "CreateTrainingJob" and status == 200:
            thread = threading.Thread(target=self._run, args=(asked,), name="training job")
            self._threads.append(thread)
            thread.start()
        return status, body

    def _look(self, name: str) -> dict[str, object]:
        # It ends when its containers do.
        return self.jobs[name]

    def _run(self, asked: Body) -> None:
        job = self.jobs[asked["TrainingJobName"]]
        ended = Ended(status="Failed", reason="InternalServerError: of the test")
        try:
            ended = self.train(asked, is_stopped=lambda: job["TrainingJobStatus"] == "Stopping")
        finally:
            self.end(asked["TrainingJobName"], ended.status, reason=ended.reason)
            if ended.model_uri:
                job["ModelArtifacts"] = {"S3ModelArtifacts": ended.model_uri}

    def _described(self, asked: dict[str, Json]) -> tuple[int, dict[str, Json]] | None:
        """Describes a run of this account, which moto would call Succeeded; None: moto has it."""
        arn = str(asked["PipelineExecutionArn"])
        run = arn.rpartition("/")[2]
        status = "Executing" if run in self.executing else self.endings.get(run)
        if status is None:
            return None
        return 200, {"PipelineExecutionArn": arn, "PipelineExecutionStatus": status}

    def close(self) -> None:
        for job in self.jobs.values():
            if job["TrainingJobStatus"] not in FINAL:
                job["TrainingJobStatus"] = "Stopping"
        for thread in self._threads:
            thread.join(120)


@contextlib.contextmanager
def account(folder: Path, server: AwsServer) -> Iterator[Account]:
    """Yields an account whose jobs run; everything that is no training job is moto's."""
    found = Account(server, Containers(folder, server))

    def answer(operation, content, headers) -> tuple[int, Mapping[str, Json]]:
        answered = found.answered(operation, json.loads(content))
        return answered or _of_moto(server, headers, content)

    with served(answer) as found.url:
        found.containers.environ = {"AWS_ENDPOINT_URL_SAGEMAKER": found.url}
        try:
            yield found
        finally:
            found.close()


def _of_moto(server, headers, content) -> tuple[int, dict[str, Json]]:
    kept = {k: v for k, v in headers.items() if k.lower() not in ("host", "content-length")}
    request = urllib.request.Request(server.url, data=content, headers=kept, method="POST")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=30) as answer:
            return int(answer.status), json.loads(answer.read() or b"{}")
    except urllib.error.HTTPError as err:
        return err.code, json.loads(err.read() or b"{}")


@dataclass
class StepRun:
    """What became of a step; what its Describe call tells is `described`, for later steps."""

    status: str
    reason: str = ""
    job: str = ""
    request: Body = field(default_factory=dict)
    waits: list[float] = field(default_factory=list)
    described: Body = field(default_factory=dict)


class Execution:
    """A run of a definition; `undocumented`: what AWS's documentation does not say to work."""

    def __init__(self, account, definition, *, name, parameters=None, execution_id="") -> None:
        self._account = account
        self.id = execution_id or secrets.token_hex(6)
        document = json.loads(definition)
        _only(document, {"Version", "Metadata", "Parameters", "Steps"}, "the definition")
        if document["Version"] != "2020-12-01":
            raise DefinitionError(f"version {document['Version']}")
        self.steps: dict[str, StepRun] = {}
        self.status = ""
        self.reason = ""
        self.undocumented: set[str] = set()
        arn = f"arn:aws:sagemaker:{REGION}:123456789012:pipeline/{name}"
        values = (self.id, f"{arn}/execution/{self.id}", name, arn)
        self._known: dict[str, Json] = {
            f"Execution.{key}": value for key, value in zip(_EXECUTION, values, strict=True)
        }
        self._known |= _parameters(document["Parameters"], parameters or {})
        self._definition: dict[str, Body] = {}
        self._inside: dict[str, tuple[str, str] | None] = {}
        self._collect(document["Steps"], None)
        for step in self._definition.values():
            self._check(step)

    def run(self) -> "Execution":
        self._account.executing.add(self.id)
        try:
            return self._run()
        finally:
            self._account.executing.discard(self.id)
            self._account.endings[self.id] = self.status

    def _run(self) -> "Execution":
        taken: dict[str, str] = {}
        while True:
            left = [name for name in self._definition if name not in self.steps]
            ready = [n for n in left if self._is_settled(n, taken)]
            if not ready:
                break
            for name in ready:
                if not self._may_run(name, taken):
                    self.steps[name] = StepRun("Not run")
                    continue
                step = self._definition[name]
                if step["Type"] == "Condition":
                    conditions = step["Arguments"]["Conditions"]
                    is_met = all(self._holds(each, name) for each in conditions)
                    taken[name] = "IfSteps" if is_met else "ElseSteps"
                    self.steps[name] = StepRun("Succeeded")
                elif step["Type"] == "Fail":
                    self.reason = str(self._resolved(step["Arguments"].get("ErrorMessage"), name))
                    self.steps[name] = StepRun("Failed", reason=self.reason)
                else:
                    self.steps[name] = self._attempted(step)
        assert not left, f"steps wait for each other: {left}"
        failed = {name for name, run in self.steps.items() if run.status == "Failed"}
        awaited = {step for name in self._definition for step in self._awaited_anyhow(name)}
        self.status = "Failed"
        if failed <= awaited:
            self.status = "CompletedWithFailures" if failed else "Succeeded"
        return self

    # -- the definition ------------------------------------------------------------------

    def _collect(self, steps: Json, inside: tuple[str, str] | None) -> None:
        for step in as_list(steps):
            name, kind = step["Name"], step["Type"]
            if kind not in _KEYS:
                raise DefinitionError(f"{name}: steps of type {kind} are not known here")
            _only(step, _KEYS[kind], name)
            if name in self._definition or not _NAME.fullmatch(name):
                raise DefinitionError(f"{name}: a step's name is unique, of letters and digits")
            self._definition[name] = step
            self._inside[name] = inside
            if kind == "Condition":
                arguments = step["Arguments"]
                _only(arguments, {"Conditions", "IfSteps", "ElseSteps"}, name)
                for branch in ("IfSteps", "ElseSteps"):
                    self._collect(arguments.get(branch) or [], (name, branch))

    def _check(self, step: Body) -> None:
        name = step["Name"]
        for waited in [*self._dependencies(name)]:
            if waited not in self._definition:
                raise DefinitionError(f"{name} waits for {waited}, which is not there")
            if self._definition[waited]["Type"] == "Condition":
                raise DefinitionError(f"{name}: a step cannot wait for a condition")
            if self._inside[waited] not in self._around(name):
                raise DefinitionError(f"{name} refers to {waited}, of another branch")
        kinds: list[str] = []
        for policy in as_list(step.get("RetryPolicies")):
            allowed = {"ExceptionType", "IntervalSeconds", "BackoffRate"}
            _only(policy, allowed | {"MaxAttempts", "ExpireAfterMin"}, name)
            if ("MaxAttempts" in policy) == ("ExpireAfterMin" in policy):
                raise DefinitionError(f"{name}: a retry ends by attempts or by minutes")
            kinds += [str(kind) for kind in as_list(policy["ExceptionType"])]
        known = _STEP_KINDS | (_JOB_KINDS if step["Type"] != "RegisterModel" else set())
        if len(kinds) != len(set(kinds)) or not set(kinds) <= known:
            raise DefinitionError(f"{name}: kinds of errors to retry: {kinds}")
        config = step["Arguments"].get("ProcessingOutputConfig", {})
        outputs = {item["OutputName"] for item in config.get("Outputs", [])}
        for file in as_list(step.get("PropertyFiles")):
            if file["OutputName"] not in outputs:
                raise DefinitionError(f"{name}: a property file of no output: {file}")

    def _around(self, name: str) -> list[tuple[str, str] | None]:
        """Lists the branches that a step is in, from its own to the whole."""
        found: list[tuple[str, str] | None] = [self._inside[name]]
        while (inside := found[-1]) is not None:
            found.append(self._inside[inside[0]])
        return found

    def _dependencies(self, name: str) -> dict[str, str]:
        """Maps steps to the outcome waited for: named ones, and those that are referred to."""
        step = self._definition[name]
        found = {}
        is_condition = step["Type"] == "Condition"
        shown = step["Arguments"]["Conditions"] if is_condition else step["Arguments"]
        for referred in re.findall(r'"Steps\.([^."]+)\.', json.dumps(shown)):
            found[referred] = "Succeeded"
        for entry in as_list(step.get("DependsOn")):
            if isinstance(entry, str):
                found[entry] = "Succeeded"
                continue
            _only(entry, {"Step", "Trigger"}, name)
            trigger = entry["Trigger"]
            if trigger not in ("Any", "Failed", "Stopped"):
                raise DefinitionError(f"{name}: {trigger} is no outcome")
            self.undocumented.add(f"a step after another's outcome {trigger}")
            found[entry["Step"]] = trigger
        return found

    def _awaited_anyhow(self, name: str) -> list[str]:
        return [step for step, how in self._dependencies(name).items() if how == "Any"]

    def _is_left_out(self, name: str, taken: Mapping[str, str]) -> bool:
        inside = self._inside[name]
        return inside is not None and taken.get(inside[0]) != inside[1]

    def _is_settled(self, name: str, taken: Mapping[str, str]) -> bool:
        inside = self._inside[name]
        if inside and inside[0] not in self.steps:
            return False
        left_out = self._is_left_out(name, taken)
        return left_out or self._dependencies(name).keys() <= self.steps.keys()

    def _may_run(self, name: str, taken: Mapping[str, str]) -> bool:
        found = ((self.steps[step].status, how) for step, how in self._dependencies(name).items())
        return not self._is_left_out(name, taken) and all(
            status != "Not run" and how in ("Any", status) for status, how in found
        )

    # -- values --------------------------------------------------------------------------

    def _resolved(self, value: Json, step: str) -> Json:
        if isinstance(value, list):
            return [self._resolved(item, step) for item in value]
        if not isinstance(value, Mapping):
            return value
        if set(value) == {"Get"}:
            return self._got(value["Get"], step)
        if set(value) == {"Std:Join"}:
            join = value["Std:Join"]
            _only(join, {"On", "Values"}, step)
            parts = as_list(join["Values"])
            if any(isinstance(part, Mapping) and "Std:Join" in part for part in parts):
                raise DefinitionError(f"{step}: a join inside a join")
            return join["On"].join(in_a_text(self._resolved(part, step)) for part in parts)
        if set(value) == {"Std:JsonGet"}:
            kind = self._definition[step]["Type"]
            if kind != "Condition":
                self.undocumented.add(f"a value of a JSON file in a step of type {kind}")
            return self._from_file(value["Std:JsonGet"], step)
        if any(str(key).startswith("Std:") for key in value):
            raise DefinitionError(f"{step}: {list(value)} is not known here")
        return {str(key): self._resolved(item, step) for key, item in value.items()}

    def _got(self, reference: str, step: str) -> Json:
        if reference in self._known:
            return self._known[reference]
        if not reference.startswith("Steps."):
            raise DefinitionError(f"{step}: there is no {reference}")
        _, other, *path = reference.split(".")
        found = functools.reduce(
            lambda value, key: value.get(key), path, self.steps[other].described
        )
        if found is None:
            raise DefinitionError(f"{step}: {reference} has no value")
        return found

    def _from_file(self, function: Body, step: str) -> Json:
        _only(function, {"PropertyFile", "Path"}, step)
        reference = function["PropertyFile"]["Get"]
        _, other, _, name = reference.split(".")
        made = self._definition[other]
        file = next(
            (f for f in as_list(made.get("PropertyFiles")) if f["PropertyFileName"] == name), None
        )
        if file is None:
            raise DefinitionError(f"{step}: {other} has no property file {name}")
        outputs = self.steps[other].request["ProcessingOutputConfig"]["Outputs"]
        target = next(o for o in outputs if o["OutputName"] == file["OutputName"])
        uri = target["S3Output"]["S3Uri"].rstrip("/")
        bucket, key = split_uri(f"{uri}/{file['FilePath']}")
        s3 = self._account.server.client("s3")
        found = json.loads(s3.get_object(Bucket=bucket, Key=key)["Body"].read())
        for part in function["Path"].split("."):
            if part not in found:
                raise DefinitionError(f"{step}: {file['FilePath']} has no {function['Path']}")
            found = found[part]
        return found

    def _holds(self, condition: Body, step: str) -> bool:
        kind = condition["Type"]
        if kind == "In":
            _only(condition, {"Type", "QueryValue", "Values"}, step)
            query = self._resolved(condition["QueryValue"], step)
            return query in [self._resolved(value, step) for value in as_list(condition["Values"])]
        if kind != "Equals":
            raise DefinitionError(f"{step}: conditions {kind} are not known here")
        _only(condition, {"Type", "LeftValue", "RightValue"}, step)
        left = self._resolved(condition["LeftValue"], step)
        right = self._resolved(condition["RightValue"], step)
        if isinstance(left, bool) != isinstance(right, bool):
            return False
        if isinstance(left, bool):
            self.undocumented.add("a condition on the boolean of a JSON file")
        return left == right

    # -- jobs ----------------------------------------------------------------------------

    def _attempted(self, step: Body) -> StepRun:
        name, kind = step["Name"], step["Type"]
        request = self._resolved(step["Arguments"], name)
        operation, job_key = _OPERATIONS[kind]
        if job_key and job_key in request:
            raise DefinitionError(f"{name}: the service names the job")
        run = StepRun("Failed", request=request)
        attempts: dict[int, int] = {}
        while True:
            run.job = f"pipelines-{self.id}-{name}-{secrets.token_hex(5)}"[:63]
            named = {**request, **({job_key: run.job} if job_key else {})}
            self.check_request(operation, named, name)
            ended = self._once(kind, named, name)
            if ended.status == "Completed":
                run.status = "Succeeded"
                run.described = named
                return run
            run.reason = ended.reason
            wait = _wait(as_list(step.get("RetryPolicies")), ended.kind, attempts)
            if wait is None:
                return run
            run.waits.append(wait)

    def check_request(self, operation: str, request: Body, step: str) -> None:
        shape = MODEL.operation_model(operation).input_shape
        report = ParamValidator().validate(request, shape).generate_report()
        over = over_limits(dict(request), shape, step)
        if report or over:
            raise DefinitionError(f"{step}: {operation} would be refused: {report} {over}")

    def _once(self, kind: str, request: Body, step: str) -> Ended:
        if faults := self._account.faults.get(step):
            fault = faults.pop(0)
            return Ended(status="Failed", reason=fault, kind=fault)
        if kind == "Processing":
            return self._account.containers.process(
                request,
                name=request["ProcessingJobName"],
                lose_when=self._account.lose_host_of.pop(step, None),
            )
        return self._register(request)

    def _register(self, request: Body) -> Ended:
        registry = self._account.server.client("sagemaker")
        # As in AWS's own tutorials, which name a group that does not exist.
        with contextlib.suppress(ClientError):
            registry.create_model_package_group(
                ModelPackageGroupName=request["ModelPackageGroupName"]
            )
        for container in request.get("InferenceSpecification", {}).get("Containers", []):
            uri = container.get("ModelDataUrl")
            if uri and not self._has_object(uri):
                return Ended(status="Failed", reason=f"ValidationException: no object {uri}")
        registry.create_model_package(**request)
        return Ended(status="Completed")

    def _has_object(self, uri: str) -> bool:
        bucket, key = split_uri(uri)
        try:
            self._account.server.client("s3").head_object(Bucket=bucket, Key=key)
        except ClientError:
            return False
        return True


def checked_steps(definition: str) -> dict[str, Body]:
    """Checks each step as the service would, with the parameters' defaults; returns all by name."""
    document = json.loads(definition)
    execution = Execution(None, definition, name="own")
    found = {step["Name"]: step for step in steps(document)}
    for name, step in found.items():
        if step["Type"] not in _OPERATIONS:
            continue
        operation, job = _OPERATIONS[step["Type"]]
        request = resolved(step["Arguments"], document)
        named = {**request, **({job: "job"} if job else {})}
        execution.check_request(operation, named, name)
    return found


def _wait(policies: Sequence[Body], kind: str, attempts: dict[int, int]) -> float | None:
    """Returns the seconds until the next attempt; None: there is none."""
    for index, policy in enumerate(policies):
        if kind not in as_list(policy["ExceptionType"]):
            continue
        number = attempts[index] = attempts.get(index, 0) + 1
        first, rate = float(policy["IntervalSeconds"]), float(policy["BackoffRate"])
        spent = sum(first * rate**n for n in range(number))
        if "MaxAttempts" in policy and number > int(policy["MaxAttempts"]):
            return None
        if "ExpireAfterMin" in policy and spent > 60 * int(policy["ExpireAfterMin"]):
            return None
        return first * rate ** (number - 1)
    return None


def _parameters(listed: Json, given: Mapping[str, str]) -> dict[str, Json]:
    """Returns the run's parameters; takes and ignores names that the definition does not have."""
    found: dict[str, Json] = {}
    for item in as_list(listed):
        name = item["Name"]
        _only(item, {"Name", "Type", "DefaultValue", "EnumValues"}, f"parameter {name}")
        value: Json = given.get(name, item.get("DefaultValue"))
        if value is None:
            raise DefinitionError(f"parameter {name} has no value")
        if item["Type"] == "Integer":
            if not re.fullmatch(r"-?\d+", str(value)):
                raise DefinitionError(f"parameter {name}: {value} is no integer")
            value = int(str(value))
        elif item["Type"] == "Float":
            value = float(str(value))
        elif item["Type"] != "String" or not isinstance(value, str):
            raise DefinitionError(f"parameter {name} of type {item['Type']}: {value}")
        choices = item.get("EnumValues")
        if choices is not None and value not in as_list(choices):
            raise DefinitionError(f"parameter {name}: {value} is none of {choices}")
        found[f"Parameters.{name}"] = value
    return found


def _types(request: Body) -> Iterator[str]:
    resources = request["ResourceConfig"]
    places = [resources, *as_list(resources.get("InstanceGroups"))]
    yield from (place["InstanceType"] for place in places if place.get("InstanceType"))


def _only(value: Body, keys: set[str], where: str) -> None:
    unknown = set(value) - keys
    if unknown:
        raise DefinitionError(f"{where}: unknown property {sorted(unknown)}")


def in_a_text(value: Json) -> str:
    """Spells a value in a text as stoker does not: how the service does it is nowhere said."""
    if isinstance(value, Mapping | list) or value is None:
        raise DefinitionError(f"{value} cannot be joined")
    if isinstance(value, float) and value and not 1e-3 <= abs(value) < 1e7:
        # As Java spells it: 1.0E-5.
        sign, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
        head, rest = str(digits[0]), "".join(map(str, digits[1:])) or "0"
        return f"{'-' if sign else ''}{head}.{rest}E{int(exponent) + len(digits) - 1}"
    # True, as Python spells it, for one that is true.
    return str(value)
