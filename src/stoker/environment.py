"""The settings of a run (run.json) and of its processes, and other variables of the environment.

A platform writes run.json beside the run's token; STOKER_RUN names it, or is the document itself.
What differs between hosts and processes are variables of their own. The environment is read only
here and in `launch.topology`. To add a setting of runs: a field of `RunSettings` with a line under
its Attributes, and where it comes from in `RunSettings.of`.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import msgspec

from stoker.errors import UsageError
from stoker.records import (
    EngineSettings,
    FeedSettings,
    Json,
    ProfileSettings,
    Role,
    SecretSource,
    Workload,
)
from stoker.records.base import Document
from stoker.records.engine import EngineHost, StrategyName
from stoker.records.training import Budget

# In STOKER_OUTPUT: the profile ended the command; exit codes of its processes do not count.
PROFILE_ENDED_FILE = "profile-ended"
# The file with a run's settings, and the variable that names it, or is the document itself.
RUN_FILE = "run.json"
RUN_VARIABLE = "STOKER_RUN"
# Beside run.json, of runs with several hosts: 32 bytes as hexadecimal digits.
TOKEN_FILE = "token"
# Of a pod's service account.
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class RunGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group of the run, as pods know it; `hosts` is the pattern of its names in DNS."""

    name: str
    instance_type: str = ""
    count: Annotated[int, msgspec.Meta(ge=1)]
    hosts: str

    def host(self, index: int) -> str:
        return self.hosts.replace("{index}", str(index))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Settings of a run, the same on all its hosts: the content of run.json.

    Attributes:
        run_id: Id of the run, in every log line.
        feed: The workload's key `feed`.
        workers: Data workers per host by role, such as {"dnn": 2, "data": 15}. Default: by
            feed.local_workers and the hosts' vCPUs.
        loader_workers: Workers of loaders that have none in their script, by the line that makes
            them, such as {"train.py:41": 4}. As `feed.num_workers`, for these alone.
        strategy: The workload's key `strategy`.
        engine: The workload's key `engine`.
        engine_hosts: Addresses and ports of hosts whose own differ.
        processes_per_host: Trainer processes per dnn host. None: one per accelerator, at least one.
        roles: Roles of groups by name. Groups named `data...` need none.
        profile: The workload's key `profile`. None: the run is no profile.
        profile_file: File to which the leader of a profile writes profile.json.
        code_file: Package (.tar.gz) of the training's code, in which the command runs.
        requirements: SageMaker: the workload's key sagemaker.requirements.
        replace_dataloader: Whether stoker's iterators replace those of torch's loaders.
        comes_back: Kubernetes restarts failed data hosts.
        pod_groups: Kubernetes: all groups of the run.
        max_run_seconds: Kubernetes: limit on all attempts together. None: there is none.
        watchdog_minutes: The workload's key `watchdog_minutes`.
        budget: Prices by group, limit and prediction of the run.
        metric_patterns: Patterns of the metrics that the script only prints, by name.
        secrets: Variables whose values are shown nowhere, and where these are kept.
    """

    run_id: str = "adhoc"
    feed: FeedSettings = field(default_factory=FeedSettings)
    workers: Mapping[str, int] = field(default_factory=dict)
    loader_workers: Mapping[str, int] = field(default_factory=dict)
    strategy: StrategyName = "auto"
    processes_per_host: int | None = None
    roles: Mapping[str, Role] = field(default_factory=dict)
    engine: EngineSettings = field(default_factory=EngineSettings)
    engine_hosts: Mapping[str, EngineHost] = field(default_factory=dict)
    profile: ProfileSettings | None = None
    profile_file: Path | None = None
    code_file: Path | None = None
    requirements: str = "auto"
    replace_dataloader: bool = False
    comes_back: bool = False
    pod_groups: tuple[RunGroup, ...] = ()
    max_run_seconds: int | None = None
    watchdog_minutes: float | None = None
    budget: Budget | None = None
    metric_patterns: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, SecretSource] = field(default_factory=dict)

    @classmethod
    def of(cls, workload: Workload, *, profile: ProfileSettings | None = None) -> "RunSettings":
        most = workload.constraints.max_usd
        # A profile measures the script's own loaders; other engines feed differently.
        is_fed = workload.engine_settings.name == "feed" and not profile
        return cls(
            feed=workload.feed,
            strategy=workload.strategy,
            engine=workload.engine_settings,
            metric_patterns={} if profile else workload.metric_patterns,
            profile=profile,
            replace_dataloader=is_fed and workload.feed.replace_dataloader,
            # A profile has its own limits of time.
            watchdog_minutes=None if profile else workload.watchdog_minutes,
            budget=Budget(max_usd=most) if most and not profile else None,
            secrets=workload.secret_sources,
        )

    def to_document(self) -> dict[str, Json]:
        """Returns all that differs from the defaults, as JSON."""
        defaults = msgspec.to_builtins(RunSettings(), enc_hook=str)
        written: dict[str, Json] = msgspec.to_builtins(self, enc_hook=str)
        return {name: written[name] for name in defaults if defaults[name] != written[name]}

    def to_json(self) -> str:
        return _written(self.to_document())

    def to_compare(self) -> str:
        """Returns what two attempts of one job have in common: prices and limit may change."""
        document = self.to_document()
        document.pop("budget", None)
        return _written(document)


def _written(document: Document) -> str:
    return json.dumps(document, sort_keys=True, separators=(",", ":"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings(RunSettings):
    """Settings of a process of a run: the run's, its host's, and its launcher's.

    Attributes:
        token_file: File with the run's token, beside run.json. None: there is none.
        host: Name of this host, from a platform whose hosts do not know it.
        group: Name of this host's instance group.
        base_dir: Folder in place of /opt/ml.
        command: The training command, as a JSON list, for an image started with just `train`.
        advertise: Address of this host for others. None: its name.
        port: TCP port of this host's coordinator or agent. None: `feed.port`.
        coordinator: `host:port` of the coordinator. None: the leader's name and port.
        restarts: Kubernetes: how often all hosts were restarted.
        has_data_group: Whether loaders take batches from the feed.
        output: Folder of this host for timelines, failures and profile results.
        metrics: File for the script's metrics: a JSON object of names and numbers.
        launcher_pid: Process id of the launcher, in its children.
        rank: Global rank of this trainer process (torchrun's RANK), 0 without one.
        world_size: Trainer processes of the run.
        local_rank: Rank within the host.
        local_world_size: Trainer processes of this host.
    """

    token_file: Path | None = None
    host: str = "localhost"
    group: str = ""
    base_dir: Path = Path("/opt/ml")
    command: tuple[str, ...] | None = None
    advertise: str | None = None
    port: int | None = None
    coordinator: str | None = None
    restarts: int = 0
    has_data_group: bool = False
    output: Path | None = None
    metrics: Path | None = None
    launcher_pid: int | None = None
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @property
    def is_first_of_host(self) -> bool:
        """Whether this rank says what is so for all of its host."""
        return self.rank % max(1, self.local_world_size) == 0

    def to_environ(self, *names: str) -> dict[str, str]:
        """Returns the given settings of a process as variables."""
        variables = {}
        for name in names:
            value = getattr(self, name)
            variables[VARIABLES[name]] = str(int(value)) if value in (True, False) else str(value)
        return variables


# torchrun's settings of a process; the others have the prefix STOKER_.
_OF_TORCHRUN = ("rank", "world_size", "local_rank", "local_world_size")
# Variable of each setting of a process.
VARIABLES: Mapping[str, str] = MappingProxyType(
    {
        name: name.upper() if name in _OF_TORCHRUN else f"STOKER_{name.upper()}"
        for name in ProcessSettings.__annotations__
        if name != "token_file"
    }
)


def from_environment(environ: Mapping[str, str] = os.environ) -> ProcessSettings:
    """Reads run.json, STOKER_* and torchrun's variables; raises UsageError if one is malformed."""
    try:
        values = dict(_document_of(environ.get(RUN_VARIABLE, "")))
        if environ.get("TRAINING_JOB_NAME"):
            values.setdefault("run_id", environ["TRAINING_JOB_NAME"])
        for name, variable in VARIABLES.items():
            if text := environ.get(variable):
                values[name] = json.loads(text) if name == "command" else text
        # Variables are texts, also those of numbers.
        return msgspec.convert(values, ProcessSettings, strict=False, dec_hook=_path)
    except (OSError, ValueError) as err:
        named = (VARIABLES[name] for name in VARIABLES if f"$.{name}" in str(err))
        raise UsageError(
            f"cannot read the run's settings: {err}",
            where=f"variable {next(named, RUN_VARIABLE)}",
            fix="use one version of stoker everywhere",
        ) from None


@lru_cache(maxsize=8)
def _document_of(run: str) -> Document:
    """Returns the settings in a run.json, or in the document itself, by name."""
    if not run:
        return {}
    is_inline = run.startswith("{")
    document: dict[str, Json] = json.loads(run if is_inline else Path(run).read_text("utf-8"))
    if unknown := document.keys() - RunSettings.__dataclass_fields__:
        raise ValueError(f"unknown setting {min(unknown)}")
    token = Path(run).with_name(TOKEN_FILE)
    if not is_inline and token.exists():
        document["token_file"] = str(token)
    return document


def _path(kind: type, value: object) -> object:
    return kind(value)


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


def poll_seconds(default: float, environ: Mapping[str, str] = os.environ) -> float:
    """Returns the seconds between two looks at a job, or at a run of a pipeline."""
    return float(environ.get("STOKER_POLL_SECONDS", default))


def named_instance_type(environ: Mapping[str, str] = os.environ) -> str | None:
    named = environ.get("STOKER_INSTANCE_TYPE") or environ.get("SM_CURRENT_INSTANCE_TYPE")
    return named or None


def kubeflow_token(environ: Mapping[str, str] = os.environ) -> str:
    return environ.get("STOKER_KUBEFLOW_TOKEN", "").strip()


def kubeflow_namespace(environ: Mapping[str, str] = os.environ) -> str:
    """Returns the namespace in STOKER_KUBEFLOW_NAMESPACE, or of a pod's service account."""
    named = environ.get("STOKER_KUBEFLOW_NAMESPACE", "")
    # A variable has the pod's namespace only if its spec asks for it.
    with suppress(OSError):
        named = named or _NAMESPACE_FILE.read_text().strip()
    return named


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPod:
    """The pod of this process, with the id of the Kubeflow run that it is a step of, if any."""

    name: str
    uid: str
    namespace: str | None
    run_id: str = ""


def own_pod(environ: Mapping[str, str] = os.environ) -> OwnPod | None:
    """Returns this process's pod if the downward API names it, else None."""
    name, uid = environ.get("POD_NAME"), environ.get("POD_UID")
    if not name or not uid:
        return None
    return OwnPod(
        name=name,
        uid=uid,
        namespace=environ.get("POD_NAMESPACE") or None,
        run_id=environ.get("POD_RUN_ID", ""),
    )
