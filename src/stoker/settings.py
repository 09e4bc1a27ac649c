"""Settings come from the workload file with its overrides, and from STOKER_* variables.

The environment is read here and in `launch.topology`, nowhere else.

| variable | who sets it | what it says |
| --- | --- | --- |
| STOKER_RUN_ID | platform | id of the run, in every log line |
| STOKER_BASE_DIR | platform | replaces /opt/ml |
| STOKER_TOKEN_FILE | platform | file with the run's token: 32 bytes as hexadecimal digits |
| STOKER_FEED | platform | FeedSettings as JSON |
| STOKER_WORKERS | platform | JSON {"dnn": N, "data": N}: workers a host, where decided |
| STOKER_ENGINE | platform | EngineSettings as JSON, where something else than the feed makes data |
| STOKER_ENGINE_HOSTS | platform | local hosts: JSON {host: {address, ports}}; else as named |
| STOKER_STRATEGY | platform | name of the strategy, or StrategySettings as JSON |
| STOKER_BACKEND | launcher | smddp only: the process group backend to use |
| STOKER_PROCESSES_PER_HOST | platform | trainer processes of a dnn host, where decided |
| STOKER_ADVERTISE | platform | address under which others reach this host; else its own name |
| STOKER_PORT | platform | port of this host's coordinator or agent; else FeedSettings.port |
| STOKER_COORDINATOR | both | host:port of the coordinator; else leader's name and port |
| STOKER_PROFILE | platform | ProfileSettings as JSON: the run is a profile |
| STOKER_WORKLOAD_SHA256 | platform | digest of the workload, for the training record |
| STOKER_HOST, STOKER_GROUP | launcher | this host's name and group |
| STOKER_LAUNCHER_PID | launcher | pid of the launcher, in its own children |
| STOKER_HAS_DATA_GROUP | launcher | 1 where a data group exists: loaders use the feed |
| STOKER_OUTPUT | launcher | folder of this host for timelines, failures, profile results |
| STOKER_METRICS | launcher | file for the metrics that the script reports |
| STOKER_CODE_FILE | platform | package (.tar.gz) of the training's code: the command runs in it |
| STOKER_COMMAND | image, user | JSON list: the command, where the launcher is given just `train` |
| STOKER_PROFILE_FILE | platform | where the leader of a profile writes profile.json |
| STOKER_REPLACE_DATALOADER | platform | 1: torch's DataLoader is replaced, too |
| STOKER_COMES_BACK | platform | 1: data hosts that end badly are started again (Kubernetes) |
| STOKER_INSTANCE_TYPE | user | what this host is called (a node's label instance-type) |
| SM_CURRENT_INSTANCE_TYPE | SageMaker | the same |
| STOKER_GROUPS, STOKER_GROUP | platform | Kubernetes: the run's hosts, this one's group |
| POD_NAME, POD_UID, POD_NAMESPACE | pipeline | the pod that submits a job (KFP_POD_NAME ... too) |
| KF_PIPELINES_ENDPOINT, KF_PIPELINES_UI_ENDPOINT | user | Kubeflow's API; its pages |
| STOKER_KUBEFLOW_NAMESPACE | user | profile's namespace, where Kubeflow has many users |
| STOKER_KUBEFLOW_TOKEN, STOKER_KUBEFLOW_COOKIE | user | what Kubeflow knows its users by |
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec
import yaml
from msgspec.structs import replace

from stoker.errors import UsageError
from stoker.records import (
    EngineSettings,
    FeedSettings,
    Json,
    Place,
    ProfileSettings,
    StrategySettings,
    Workload,
    convert,
    read_text,
)
from stoker.records.base import Record
from stoker.records.engine import EngineHost
from stoker.records.engine_check import check_engine

_RecordT = TypeVar("_RecordT", bound=Record)
# Keys and values of a workload, its aliases expanded; large ones have some hundreds.
MAX_NODES = 100_000
# In STOKER_OUTPUT: the profile ended the command, however its processes ended thereby.
PROFILE_ENDED_FILE = "profile-ended"
# There, too: the data hosts were given back, because no rank takes batches from them.
RELEASED_FILE = "data-hosts-released"
# Where every pod with a service account has its token and namespace.
_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


def unfed_file(rank: int | str) -> str:
    """Returns a file's name in STOKER_OUTPUT: that rank takes no batches from the data hosts."""
    return f"unfed-rank{rank}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    """The settings that a process of a run gets from its environment; see the table above.

    Attributes:
        rank: Global rank of this trainer process (torchrun's RANK), 0 without one.
        world_size: Trainer processes of the run.
        local_rank: Rank within the host.
        local_world_size: Trainer processes of this host.
        workers: Workers a host by role, where decided.
        engine: What makes data on the data group.
        engine_hosts: Hosts that are reached otherwise than under their names and fixed ports.
        coordinator: `host:port`, or None outside a launched run.
    """

    run_id: str
    host: str
    group: str
    base_dir: Path
    token_file: Path | None
    feed: FeedSettings
    workers: Mapping[str, int]
    strategy: StrategySettings
    processes_per_host: int | None
    engine: EngineSettings
    engine_hosts: Mapping[str, EngineHost]
    advertise: str | None
    port: int | None
    coordinator: str | None
    profile: ProfileSettings | None
    workload_sha256: str | None
    has_data_group: bool
    output: Path | None
    metrics: Path | None
    launcher_pid: int | None
    replace_dataloader: bool
    comes_back: bool
    code_file: Path | None
    command: tuple[str, ...] | None
    profile_file: Path | None
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int = 1


def from_environment(environ: Mapping[str, str] | None = None) -> ProcessSettings:
    """Reads STOKER_* (and torchrun's RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE).

    Raises:
        UsageError: If a variable is malformed, naming it.
    """
    env = os.environ if environ is None else environ
    return ProcessSettings(
        run_id=env.get("STOKER_RUN_ID") or env.get("TRAINING_JOB_NAME") or "adhoc",
        host=env.get("STOKER_HOST", "localhost"),
        group=env.get("STOKER_GROUP", ""),
        base_dir=Path(env.get("STOKER_BASE_DIR") or env.get("SAGEMAKER_BASE_DIR") or "/opt/ml"),
        token_file=_path(env, "STOKER_TOKEN_FILE"),
        feed=_record(env, "STOKER_FEED", FeedSettings) or FeedSettings(),
        workers=_workers(env),
        strategy=_strategy(env),
        processes_per_host=_number(env, "STOKER_PROCESSES_PER_HOST"),
        engine=_record(env, "STOKER_ENGINE", EngineSettings) or EngineSettings(),
        engine_hosts=_engine_hosts(env),
        advertise=env.get("STOKER_ADVERTISE") or None,
        port=_number(env, "STOKER_PORT"),
        coordinator=env.get("STOKER_COORDINATOR") or None,
        profile=_record(env, "STOKER_PROFILE", ProfileSettings),
        workload_sha256=env.get("STOKER_WORKLOAD_SHA256") or None,
        has_data_group=env.get("STOKER_HAS_DATA_GROUP") == "1",
        output=_path(env, "STOKER_OUTPUT"),
        metrics=_path(env, "STOKER_METRICS"),
        launcher_pid=_number(env, "STOKER_LAUNCHER_PID"),
        replace_dataloader=env.get("STOKER_REPLACE_DATALOADER") == "1",
        comes_back=env.get("STOKER_COMES_BACK") == "1",
        code_file=_path(env, "STOKER_CODE_FILE"),
        command=_command(env),
        profile_file=_path(env, "STOKER_PROFILE_FILE"),
        rank=_number(env, "RANK") or 0,
        world_size=_number(env, "WORLD_SIZE") or 1,
        local_rank=_number(env, "LOCAL_RANK") or 0,
        local_world_size=_number(env, "LOCAL_WORLD_SIZE") or 1,
    )


def cloud_region(environ: Mapping[str, str] | None = None) -> str | None:
    """Returns the AWS region of the environment; boto3 reads AWS_DEFAULT_REGION only."""
    env = os.environ if environ is None else environ
    return env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION") or None


def named_instance_type(environ: Mapping[str, str] | None = None) -> str | None:
    """Returns the host's type as the environment names it, if it does."""
    env = os.environ if environ is None else environ
    return env.get("STOKER_INSTANCE_TYPE") or env.get("SM_CURRENT_INSTANCE_TYPE") or None


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeflowEnvironment:
    """The environment's settings for Kubeflow Pipelines; empty where it says nothing.

    Attributes:
        endpoint: Address of the API.
        ui: Address of the pages.
        namespace: Of the profile; in a pod the pod's own.
        token: A secret.
        cookie: A secret.
        is_pod: Whether this is a pod of a cluster.
    """

    endpoint: str = ""
    ui: str = ""
    namespace: str = ""
    token: str = field(default="", repr=False)
    cookie: str = field(default="", repr=False)
    is_pod: bool = False


def kubeflow_environment(
    environ: Mapping[str, str] | None = None, *, account: Path = _SERVICE_ACCOUNT
) -> KubeflowEnvironment:
    """Reads KF_PIPELINES_* and STOKER_KUBEFLOW_*, and a pod's folder of its service account."""
    env = os.environ if environ is None else environ
    try:
        own = (account / "namespace").read_text().strip()
    except OSError:
        own = ""
    return KubeflowEnvironment(
        endpoint=env.get("KF_PIPELINES_ENDPOINT", ""),
        ui=env.get("KF_PIPELINES_UI_ENDPOINT", ""),
        namespace=env.get("STOKER_KUBEFLOW_NAMESPACE", "") or own,
        token=env.get("STOKER_KUBEFLOW_TOKEN", "").strip(),
        cookie=env.get("STOKER_KUBEFLOW_COOKIE", "").strip(),
        is_pod=bool(own),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPod:
    """The pod that this process runs in; its namespace may be known elsewhere only."""

    name: str
    uid: str
    namespace: str | None


def own_pod(environ: Mapping[str, str] | None = None) -> OwnPod | None:
    """Returns the pod of this process, where the downward API names it; None outside of pods."""
    env = os.environ if environ is None else environ
    # The second names are those that Kubeflow Pipelines gives to the pods of its steps.
    name = env.get("POD_NAME") or env.get("KFP_POD_NAME")
    uid = env.get("POD_UID") or env.get("KFP_POD_UID")
    if not name or not uid:
        return None
    return OwnPod(name=name, uid=uid, namespace=env.get("POD_NAMESPACE") or None)


def read_workload(path: Path | str, *, overrides: Sequence[str] = ()) -> Workload:
    """Reads a workload file, or the JSON document itself: a text that begins with a brace.

    Args:
        path: The file, or the document.
        overrides: `key.path=value`, the value in YAML.

    Raises:
        UsageError: With file, line and key path, the nearest key for an unknown one.
    """
    is_inline = isinstance(path, str) and path.lstrip().startswith("{")
    text = path if isinstance(path, str) and is_inline else read_text(path)
    path = "the workload's document" if is_inline else path
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        _check_size(node, str(path))
        document: Json = yaml.safe_load(text)
    except RecursionError:
        raise UsageError("nested too deeply", where=str(path), fix="mind brackets") from None
    except yaml.YAMLError as err:
        mark = getattr(err, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        problem = getattr(err, "problem", None) or str(err)
        raise UsageError(
            f"not YAML: {problem}", where=where, fix="mind indents and quotes"
        ) from None
    lines: dict[str, int] = {}
    if node is not None:
        _lines_of(node, "", lines, str(path))
    if not isinstance(document, Mapping):
        raise UsageError(
            "a workload is a mapping of keys", where=str(path), fix="see configs/mnist.yaml"
        )
    return workload_from(document, overrides=overrides, source=str(path), lines=lines)


def workload_from(
    document: Mapping[str, Json],
    *,
    overrides: Sequence[str] = (),
    source: str = "command line",
    lines: Mapping[str, int] | None = None,
) -> Workload:
    """Returns the workload of a parsed document, with `key.path=value` overrides applied.

    Args:
        document: As YAML gives it.
        overrides: Applied in order.
        source: Name of the document in errors.
        lines: Key path to line number, where known.

    Raises:
        UsageError: With source, line and key path, the nearest key for an unknown one.
    """
    changed = dict(document)
    for override in overrides:
        _override(changed, override)
    keys = [override.partition("=")[0].strip() for override in overrides]
    place = Place(source, lines, overridden=keys)
    workload = convert(changed, Workload, place)
    _check_workload(workload, place)
    return _with_pools_text(workload, place)


def _with_pools_text(workload: Workload, place: Place) -> Workload:
    """Puts the text of its pools file into the workload: it must be understood elsewhere."""
    kubernetes = workload.kubernetes
    if kubernetes is None or kubernetes.pools_file is None or "\n" in kubernetes.pools_file:
        return workload
    try:
        text = read_text(kubernetes.pools_file).rstrip("\n") + "\n"
    except UsageError as err:
        where = f"{place.at('kubernetes.pools_file')}, folder {Path.cwd()}"
        raise UsageError(err.what, where=where, fix="run stoker in the project's folder") from None
    return replace(workload, kubernetes=replace(kubernetes, pools_file=text))


def _check_workload(workload: Workload, place: Place) -> None:
    for index, gate in enumerate(workload.gate):
        if gate.min is None and gate.max is None:
            raise UsageError(
                f"gate {gate.metric} has neither min nor max", where=place.at(f"gate[{index}]")
            )
        if gate.min is not None and gate.max is not None and gate.min > gate.max:
            raise UsageError(
                f"gate {gate.metric}: min {gate.min} is above max {gate.max}",
                where=place.at(f"gate[{index}]"),
            )
    check_engine(workload.engine_settings, feed=workload.feed, place=place)
    _check_strategy(workload, place)
    _check_replicas(workload.feed, place)
    if workload.constraints.deadline_hours and workload.training.total_steps() is None:
        raise UsageError(
            "a deadline needs the number of steps",
            where=place.at("constraints.deadline_hours"),
            fix="set training.steps, or epochs with samples_per_epoch and global_batch_size",
        )


def _check_strategy(workload: Workload, place: Place) -> None:
    strategy = workload.strategy_settings
    misfit = strategy.misfit()
    if misfit is not None:
        key, takers = misfit
        raise UsageError(
            f"strategy {strategy.name} has no {key}",
            where=place.at(f"strategy.{key}"),
            fix=f"leave it out, or use {takers}",
        )
    if workload.cluster is None:
        return
    dnn = workload.cluster.dnn
    refusal = strategy.refusal(
        instance_type=dnn.instance_type, processes_per_host=dnn.processes_per_host or 1
    )
    if refusal is not None:
        what, fix = refusal
        raise UsageError(what, where=place.at("strategy"), fix=fix)


def _check_replicas(feed: FeedSettings, place: Place) -> None:
    if feed.replicas is None:
        return
    if feed.model_parallel_size != 1:
        raise UsageError(
            "replicas and model_parallel_size say the same thing",
            where=place.at("feed.replicas"),
            fix="keep one of them",
        )
    ranks = [rank for replica in feed.replicas for rank in replica]
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
    if twice:
        raise UsageError(f"rank {twice[0]} is in two replicas", where=place.at("feed.replicas"))


def _override(document: dict[str, Json], override: str) -> None:
    key, equals, text = override.partition("=")
    steps = key.strip().split(".")
    if not equals or not all(steps):
        raise UsageError(
            f"--set {override} is not key.path=value", fix="for example --set feed.credits=4"
        )
    try:
        _check_size(yaml.compose(text, Loader=yaml.SafeLoader), f"--set {key}=...")
        value: Json = yaml.safe_load(text)
    except RecursionError:
        raise UsageError(f"--set {key}=...: nested too deeply", fix="mind brackets") from None
    except yaml.YAMLError:
        raise UsageError(f"--set {override}: the value is not YAML", fix="quote it") from None
    target = document
    for step in steps[:-1]:
        child = target.get(step)
        copied = dict(child) if isinstance(child, Mapping) else {}
        target[step] = copied
        target = copied
    target[steps[-1]] = value


def _check_size(node: yaml.Node | None, source: str) -> None:
    """Refuses aliases that lead in a circle, or expand to more than a workload can be.

    Before anything is expanded: an alias is the very node that it stands for.
    """
    sizes: dict[int, int] = {}
    open_nodes: set[int] = set()

    def size(each: yaml.Node) -> int:
        if id(each) in open_nodes:
            raise UsageError(
                f"an alias (*) stands within what it names (&), from line "
                f"{each.start_mark.line + 1} on",
                where=source,
                fix="write it out",
            )
        if id(each) not in sizes:
            open_nodes.add(id(each))
            parts: list[yaml.Node] = []
            if isinstance(each, yaml.MappingNode):
                parts = [part for pair in each.value for part in pair]
            elif isinstance(each, yaml.SequenceNode):
                parts = each.value
            sizes[id(each)] = 1 + sum(size(part) for part in parts)
            open_nodes.discard(id(each))
        return sizes[id(each)]

    if node is not None and size(node) > MAX_NODES:
        raise UsageError(
            f"its aliases (*) expand to more than {MAX_NODES} keys and values",
            where=source,
            fix="write out what is meant, without aliases of aliases",
        )


def _lines_of(node: yaml.Node, path: str, lines: dict[str, int], source: str) -> None:
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            name = str(key.value)
            child = f"{path}.{name}" if path else name
            if name in seen:
                raise UsageError(
                    f"key {name} stands there twice",
                    where=f"{source}:{key.start_mark.line + 1}, key {child}",
                    fix="keep one of them",
                )
            seen.add(name)
            lines[child] = key.start_mark.line + 1
            _lines_of(value, child, lines, source)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            child = f"{path}[{index}]"
            lines[child] = item.start_mark.line + 1
            _lines_of(item, child, lines, source)


def _path(env: Mapping[str, str], name: str) -> Path | None:
    return Path(env[name]) if env.get(name) else None


def _number(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name)
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise UsageError(
            f"expected a whole number, found {text!r}", where=f"variable {name}"
        ) from None


def _record(env: Mapping[str, str], name: str, kind: type[_RecordT]) -> _RecordT | None:
    text = env.get(name)
    if not text:
        return None
    try:
        document: Json = msgspec.json.decode(text)
    except msgspec.DecodeError as err:
        raise UsageError(f"not JSON: {err}", where=f"variable {name}") from None
    return convert(document, kind, Place(f"variable {name}"))


def _strategy(env: Mapping[str, str]) -> StrategySettings:
    text = env.get("STOKER_STRATEGY") or "auto"
    if not text.lstrip().startswith("{"):
        return convert({"name": text}, StrategySettings, Place("variable STOKER_STRATEGY"))
    return _record(env, "STOKER_STRATEGY", StrategySettings) or StrategySettings()


def _command(env: Mapping[str, str]) -> tuple[str, ...] | None:
    text = env.get("STOKER_COMMAND")
    if not text:
        return None
    try:
        return msgspec.json.decode(text, type=tuple[str, ...]) or None
    except msgspec.DecodeError as err:
        raise UsageError(
            f"expected a JSON list of words: {err}", where="variable STOKER_COMMAND"
        ) from None


def _engine_hosts(env: Mapping[str, str]) -> Mapping[str, EngineHost]:
    text = env.get("STOKER_ENGINE_HOSTS")
    if not text:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, EngineHost])
    except msgspec.DecodeError as err:
        raise UsageError(
            f"expected a JSON object of hosts: {err}", where="variable STOKER_ENGINE_HOSTS"
        ) from None


def _workers(env: Mapping[str, str]) -> Mapping[str, int]:
    text = env.get("STOKER_WORKERS")
    if not text:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, int])
    except msgspec.DecodeError as err:
        raise UsageError(
            f"expected a JSON object of numbers: {err}", where="variable STOKER_WORKERS"
        ) from None
