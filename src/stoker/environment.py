"""The environment of a process: STOKER_* variables and others', and the files of STOKER_OUTPUT.

The environment is read only here and in `launch.topology`; the workload's file is read in
`workload_file`. To add a setting of runs: a field of `RunEnvironment` with its variable, a line
under its Attributes, and where it comes from in `RunEnvironment.of`.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Self, get_args, get_type_hints

import msgspec

from stoker.errors import UsageError
from stoker.records import (
    EngineSettings,
    FeedSettings,
    Json,
    Place,
    ProfileSettings,
    Role,
    StrategySettings,
    WatchdogSettings,
    Workload,
    convert,
    to_document,
)
from stoker.records.base import Record
from stoker.records.engine import EngineHost
from stoker.records.hyperparameters import forms_of, values_of
from stoker.records.training import Budget
from stoker.records.workload import ReplaceDataLoader

# In STOKER_OUTPUT: the profile ended the command; exit codes of its processes do not count.
PROFILE_ENDED_FILE = "profile-ended"
# In STOKER_OUTPUT: the data hosts were released, because no rank takes batches from them.
RELEASED_FILE = "data-hosts-released"
# Variable of a pipeline's step: the whole workload, of which its input is a part.
STEP_WORKLOAD = "STOKER_STEP_WORKLOAD"
# Lease of a job's follower on Kubernetes: time of renewal, and duration (0: forever).
LEASE_RENEWED_FILE = "renewed"
LEASE_MINUTES_FILE = "minutes"
# Folder of a pod's service account.
_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


def unfed_file(rank: int | str) -> str:
    """Returns a file's name in STOKER_OUTPUT: that rank takes no batches from the data hosts."""
    return f"unfed-rank{rank}.json"


def _text_of(value: object) -> str:
    match value:
        # Before int, which includes bool.
        case bool():
            return "1" if value else "0"
        case str() | int():
            return str(value)
        case Path():
            return value.as_posix()
        case StrategySettings() if value == StrategySettings(name=value.name):
            return value.name
        case EngineSettings():
            # Without defaults: SageMaker allows 512 characters.
            return msgspec.json.encode(value).decode()
        case msgspec.Struct():
            return json.dumps(to_document(value))
        case _:
            return json.dumps(msgspec.to_builtins(value))


def _choice(text: str, choices: Mapping[str, object], *, words: str, where: str) -> object:
    if text not in choices:
        raise UsageError(f"expected {words}, found {text!r}", where=where)
    return choices[text]


def _value_of(text: str, kind: object, *, where: str) -> object:
    """Returns a variable's text as a value of a type; raises UsageError for a text of another."""
    if kind is str:
        return text
    if kind is Path:
        return Path(text)
    if kind is bool:
        return _choice(text, {"1": True, "0": False}, words="1 (on) or 0 (off)", where=where)
    if kind == ReplaceDataLoader:
        # true and false are a pipeline parameter's values, which may set the variable.
        choices = {"true": True, "false": False, "1": True, "0": False, "auto": "auto"}
        return _choice(text, choices, words="auto, 1 (on) or 0 (off)", where=where)
    if kind is int:
        try:
            return int(text)
        except ValueError:
            raise UsageError(f"expected a whole number, found {text!r}", where=where) from None
    # `_text_of` writes just the name if nothing else is set.
    if kind is StrategySettings and not text.lstrip().startswith("{"):
        text = json.dumps({"name": text})
    try:
        if not (isinstance(kind, type) and issubclass(kind, Record)):
            return msgspec.json.decode(text, type=kind)
        document: Json = msgspec.json.decode(text)
    except msgspec.DecodeError as err:
        raise UsageError(f"malformed: {err}", where=where) from None
    return convert(document, kind, Place(where))


@dataclass(frozen=True, slots=True)
class Variable:
    """The environment variable of a setting; `instead` is read if `name` is not set."""

    name: str
    instead: str = ""
    is_always_sent: bool = False


@cache
def _variables(kind: object) -> Mapping[str, tuple[Variable, object]]:
    """Returns variable and type of each field of RunEnvironment or ProcessSettings."""
    variables = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        hinted, variable = get_args(hint)
        if isinstance(hinted, UnionType):
            # None is not written.
            kinds = [kind for kind in get_args(hinted) if kind is not NoneType]
            hinted = kinds[0] if len(kinds) == 1 else hinted
        variables[name] = variable, hinted
    return variables


class RunGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group of the run, as pods know it; `hosts` is the pattern of its names in DNS."""

    name: str
    instance_type: str = ""
    count: Annotated[int, msgspec.Meta(ge=1)]
    hosts: str

    def host(self, index: int) -> str:
        return self.hosts.replace("{index}", str(index))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnvironment:
    """Settings of a run that a platform writes into variables and a launcher reads.

    Attributes:
        run_id: Id of the run, in every log line.
        host: Name of this host, from a platform whose hosts do not know it.
        group: Name of this host's instance group.
        base_dir: Folder in place of /opt/ml.
        token_file: File with the run's token: 32 bytes as hexadecimal digits.
        feed: The workload's key `feed`, as JSON, such as {"credits": 4}.
        workers: Data workers per host by role, as JSON, such as {"dnn": 2, "data": 15}. Default: by
            feed.local_workers and the hosts' vCPUs.
        strategy: The workload's key `strategy`: a name, or settings as JSON.
        engine: The workload's key `engine`: a name, or settings as JSON.
        engine_hosts: Addresses and ports of hosts whose own differ, as JSON.
        processes_per_host: Trainer processes per dnn host. Default: one per accelerator, at least
            one.
        roles: Roles of groups by name, as JSON. Groups named `data...` need none.
        advertise: Address of this host for others. Default: its name.
        port: TCP port of this host's coordinator or agent. Default: `feed.port`.
        coordinator: `host:port` of the coordinator. Default: the leader's name and port.
        profile: The workload's key `profile`, as JSON. Default: the run is no profile.
        profile_file: File to which the leader of a profile writes profile.json.
        workload_sha256: Digest of the workload, for the training record.
        image: Container image of a profile's hosts, for its record.
        code_digest: Digest of a profile's code, for its record.
        code_file: Package (.tar.gz) of the training's code, in which the command runs.
        requirements: SageMaker: the workload's key sagemaker.requirements. Default: auto.
        command: The training command, as a JSON list, for an image started with just `train`.
        replace_dataloader: 1: stoker's DataLoader replaces torch's; auto: unless the script imports
            stoker's; 0: it does not.
        tensorboard: Folder for what the script writes for TensorBoard.
        comes_back: 1: Kubernetes restarts failed data hosts.
        pod_groups: Kubernetes: all groups of the run, as JSON.
        follower_lease: Kubernetes: folder with the lease of the process that follows the run.
        restarts: Kubernetes: how often all hosts were restarted.
        max_fresh_starts: Kubernetes: maximum restarts of all hosts without a checkpoint. Default:
            no maximum.
        max_run_seconds: Kubernetes: limit on all attempts together. Default: none.
        watchdog: The workload's key `watchdog`, as JSON.
        budget: Prices by group, limit and prediction of the run, as JSON.
        hyperparameter_order: Order of the hyperparameters: the place of each among their sorted
            names, as JSON, such as [1, 0]. Default: sorted.
        hyperparameter_forms: How each hyperparameter is written into the command: a letter for each
            of the sorted names, v: --name value; o: the same, unless it is empty; f: a flag; s:
            --name or --no-name; w: several words. Default: all v.
        metric_patterns: Patterns of the metrics that the script only prints, by name, as JSON.
        literal_hyperparameters: Hyperparameters that are texts in quotes without JSON's escapes, as
            places among the sorted names, as JSON. A pipeline on SageMaker, which fills in their
            values, sets it.
        more_hyperparameters: File with further hyperparameters, as JSON: those that leave the cost
            of a step as it is, in a profile that may be used again.
        secret_names: Variables whose values are shown nowhere, as JSON.
    """

    run_id: Annotated[str, Variable("STOKER_RUN_ID", "TRAINING_JOB_NAME")] = "adhoc"
    host: Annotated[str, Variable("STOKER_HOST")] = "localhost"
    group: Annotated[str, Variable("STOKER_GROUP")] = ""
    base_dir: Annotated[Path, Variable("STOKER_BASE_DIR", "SAGEMAKER_BASE_DIR")] = Path("/opt/ml")
    token_file: Annotated[Path | None, Variable("STOKER_TOKEN_FILE")] = None
    feed: Annotated[FeedSettings, Variable("STOKER_FEED", is_always_sent=True)] = field(
        default_factory=FeedSettings
    )
    workers: Annotated[Mapping[str, int], Variable("STOKER_WORKERS", is_always_sent=True)] = field(
        default_factory=dict
    )
    strategy: Annotated[StrategySettings, Variable("STOKER_STRATEGY", is_always_sent=True)] = field(
        default_factory=StrategySettings
    )
    processes_per_host: Annotated[int | None, Variable("STOKER_PROCESSES_PER_HOST")] = None
    roles: Annotated[Mapping[str, Role], Variable("STOKER_ROLES")] = field(default_factory=dict)
    engine: Annotated[EngineSettings, Variable("STOKER_ENGINE")] = field(
        default_factory=EngineSettings
    )
    engine_hosts: Annotated[Mapping[str, EngineHost], Variable("STOKER_ENGINE_HOSTS")] = field(
        default_factory=dict
    )
    advertise: Annotated[str | None, Variable("STOKER_ADVERTISE")] = None
    port: Annotated[int | None, Variable("STOKER_PORT")] = None
    coordinator: Annotated[str | None, Variable("STOKER_COORDINATOR")] = None
    profile: Annotated[ProfileSettings | None, Variable("STOKER_PROFILE")] = None
    profile_file: Annotated[Path | None, Variable("STOKER_PROFILE_FILE")] = None
    workload_sha256: Annotated[str | None, Variable("STOKER_WORKLOAD_SHA256")] = None
    image: Annotated[str | None, Variable("STOKER_IMAGE")] = None
    code_digest: Annotated[str, Variable("STOKER_CODE_DIGEST")] = ""
    code_file: Annotated[Path | None, Variable("STOKER_CODE_FILE")] = None
    requirements: Annotated[str, Variable("STOKER_REQUIREMENTS")] = "auto"
    command: Annotated[tuple[str, ...] | None, Variable("STOKER_COMMAND")] = None
    replace_dataloader: Annotated[ReplaceDataLoader, Variable("STOKER_REPLACE_DATALOADER")] = False
    tensorboard: Annotated[Path | None, Variable("STOKER_TENSORBOARD")] = None
    comes_back: Annotated[bool, Variable("STOKER_COMES_BACK")] = False
    pod_groups: Annotated[tuple[RunGroup, ...], Variable("STOKER_GROUPS")] = ()
    follower_lease: Annotated[Path | None, Variable("STOKER_FOLLOWER_LEASE")] = None
    restarts: Annotated[int, Variable("STOKER_RESTARTS")] = 0
    max_fresh_starts: Annotated[int | None, Variable("STOKER_MAX_FRESH_STARTS")] = None
    max_run_seconds: Annotated[int | None, Variable("STOKER_MAX_RUN_SECONDS")] = None
    watchdog: Annotated[WatchdogSettings, Variable("STOKER_WATCHDOG")] = field(
        default_factory=WatchdogSettings
    )
    budget: Annotated[Budget | None, Variable("STOKER_BUDGET")] = None
    hyperparameter_order: Annotated[tuple[int, ...], Variable("STOKER_HYPERPARAMETER_ORDER")] = ()
    hyperparameter_forms: Annotated[str, Variable("STOKER_HYPERPARAMETER_FORMS")] = ""
    metric_patterns: Annotated[Mapping[str, str], Variable("STOKER_METRIC_PATTERNS")] = field(
        default_factory=dict
    )
    literal_hyperparameters: Annotated[
        tuple[int, ...], Variable("STOKER_LITERAL_HYPERPARAMETERS")
    ] = ()
    more_hyperparameters: Annotated[Path | None, Variable("STOKER_MORE_HYPERPARAMETERS")] = None
    secret_names: Annotated[tuple[str, ...], Variable("STOKER_SECRET_NAMES")] = ()

    @classmethod
    def of(cls, workload: Workload, *, profile: ProfileSettings | None = None) -> "RunEnvironment":
        replaced = workload.feed.replace_dataloader
        most = workload.constraints.max_usd
        if profile or (replaced == "auto" and workload.engine_settings.name != "feed"):
            # A profile measures the script's own loaders; other engines feed differently.
            replaced = False
        return cls(
            feed=workload.feed,
            strategy=workload.strategy_settings,
            engine=workload.engine_settings,
            workload_sha256=workload.digest(),
            hyperparameter_forms=forms_of(values_of(workload.hyperparameters), workload.options),
            metric_patterns=workload.metric_patterns,
            profile=profile,
            replace_dataloader=replaced,
            # A profile has its own limits of time.
            watchdog=WatchdogSettings() if profile else workload.watchdog,
            budget=Budget(max_usd=most) if most and not profile else None,
            secret_names=tuple(sorted(workload.secrets)),
        )

    @classmethod
    def from_environ(cls, environ: Mapping[str, str], *only: str) -> Self:
        """Reads the given fields, else all; unset or empty variables mean the default."""
        values = {}
        kind: object = cls
        for name, (variable, hinted) in _variables(kind).items():
            source = variable.name if environ.get(variable.name) else variable.instead
            if environ.get(source) and (not only or name in only):
                values[name] = _value_of(environ[source], hinted, where=f"variable {source}")
        return cls(**values)  # type: ignore[arg-type]

    def to_environ(self, *only: str) -> dict[str, str]:
        """Returns the given fields as variables; by default all that differ from their defaults."""
        default = type(self)()
        variables = {}
        kind: object = type(self)
        for name, (variable, _) in _variables(kind).items():
            value = getattr(self, name)
            says_something = variable.is_always_sent or value != getattr(default, name)
            if name in only or (says_something and not only):
                variables[variable.name] = _text_of(value)
        return variables


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings(RunEnvironment):
    """Settings of a process of a run: the run's, and its launcher's.

    Attributes:
        has_data_group: Whether loaders take batches from the feed.
        output: Folder of this host for timelines, failures and profile results.
        metrics: File for the script's metrics: a JSON object of names and numbers.
        launcher_pid: Process id of the launcher, in its children.
        backend: smddp: process group backend to use.
        rank: Global rank of this trainer process (torchrun's RANK), 0 without one.
        world_size: Trainer processes of the run.
        local_rank: Rank within the host.
        local_world_size: Trainer processes of this host.
    """

    has_data_group: Annotated[bool, Variable("STOKER_HAS_DATA_GROUP")] = False
    output: Annotated[Path | None, Variable("STOKER_OUTPUT")] = None
    metrics: Annotated[Path | None, Variable("STOKER_METRICS")] = None
    launcher_pid: Annotated[int | None, Variable("STOKER_LAUNCHER_PID")] = None
    backend: Annotated[str | None, Variable("STOKER_BACKEND")] = None
    rank: Annotated[int, Variable("RANK")] = 0
    world_size: Annotated[int, Variable("WORLD_SIZE")] = 1
    local_rank: Annotated[int, Variable("LOCAL_RANK")] = 0
    local_world_size: Annotated[int, Variable("LOCAL_WORLD_SIZE")] = 1

    @property
    def is_first_of_host(self) -> bool:
        """Whether this rank says what is so for all of its host."""
        return self.rank % max(1, self.local_world_size) == 0


def from_environment(environ: Mapping[str, str] = os.environ) -> ProcessSettings:
    """Reads STOKER_* and torchrun's variables; raises UsageError if one is malformed."""
    return ProcessSettings.from_environ(environ)


def cloud_region(environ: Mapping[str, str] = os.environ) -> str | None:
    """Returns the AWS region of the environment; boto3 reads AWS_DEFAULT_REGION only."""
    # In the order of AWS's own tools.
    return environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") or None


def webhook_url(variable: str, environ: Mapping[str, str] = os.environ) -> str:
    # A secret. They usually come from files, with a line break at the end.
    return environ.get(variable, "").strip()


def pipeline_run(environ: Mapping[str, str] = os.environ) -> str:
    """Returns the id of the SageMaker pipeline's run that this is a step of, else an empty text."""
    return environ.get("STOKER_PIPELINE_RUN", "")


def pipeline_execution(environ: Mapping[str, str] = os.environ) -> str:
    """Returns the ARN of the SageMaker pipeline's run whose training this process follows."""
    return environ.get("STOKER_PIPELINE_EXECUTION", "")


def named_instance_type(environ: Mapping[str, str] | None = None) -> str | None:
    env = os.environ if environ is None else environ
    return env.get("STOKER_INSTANCE_TYPE") or env.get("SM_CURRENT_INSTANCE_TYPE") or None


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeflowEnvironment:
    """Settings for Kubeflow Pipelines; kfp itself reads KF_PIPELINES_ENDPOINT."""

    namespace: str = ""
    token: str = field(default="", repr=False)


def kubeflow_environment(
    environ: Mapping[str, str] = os.environ, *, account: Path = _SERVICE_ACCOUNT
) -> KubeflowEnvironment:
    """Reads STOKER_KUBEFLOW_*, and the namespace of a pod's service account."""
    try:
        # A variable has the namespace only if the pod's spec asks for it.
        namespace_of_account = (account / "namespace").read_text().strip()
    except OSError:
        namespace_of_account = ""
    return KubeflowEnvironment(
        namespace=environ.get("STOKER_KUBEFLOW_NAMESPACE", "") or namespace_of_account,
        token=environ.get("STOKER_KUBEFLOW_TOKEN", "").strip(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPod:
    """The pod of this process, with the id of the Kubeflow run that it is a step of, if any."""

    name: str
    uid: str
    namespace: str | None
    run_id: str = ""


def step_workload(environ: Mapping[str, str] = os.environ) -> str | None:
    """Returns the workload of this pipeline's step, as JSON, if its pod has it."""
    return environ.get(STEP_WORKLOAD) or None


def own_pod(environ: Mapping[str, str] = os.environ) -> OwnPod | None:
    """Returns this process's pod if the downward API names it, else None."""
    # The second names are set by Kubeflow Pipelines.
    name = environ.get("POD_NAME") or environ.get("KFP_POD_NAME")
    uid = environ.get("POD_UID") or environ.get("KFP_POD_UID")
    if not name or not uid:
        return None
    return OwnPod(
        name=name,
        uid=uid,
        namespace=environ.get("POD_NAMESPACE") or None,
        run_id=environ.get("POD_RUN_ID", ""),
    )


def api_server(environ: Mapping[str, str] = os.environ) -> tuple[str, int] | None:
    """Returns host and port of the API server of this process's pod; None outside of pods."""
    host, port = (environ.get(f"KUBERNETES_SERVICE_{key}", "") for key in ("HOST", "PORT"))
    if host and port.isdigit():
        return (host, int(port))
    return None
