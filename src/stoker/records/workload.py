"""The workload, read by `stoker.workload_file`: a command, its inputs, gate and today's cluster.

To add a key: a field in `Workload`, the last class, or in the class of its section, with its text
under Attributes; a check that needs more than its type belongs into `workload_file`; whether a
profile is measured again if it changes stands in `stoker.pipelines.base`; then `make docs`.
"""

import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Literal

import msgspec

from stoker.errors import UsageError
from stoker.records.base import (
    Command,
    Fraction,
    ImageName,
    Name,
    Names,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Record,
)
from stoker.records.engine import EngineName, EngineSettings, StrategyName
from stoker.records.hyperparameters import Hyperparameters
from stoker.records.platforms import (
    PLATFORM_INFOS,
    PlatformInfo,
    PlatformName,
    PlatformSettings,
    bare_type,
)
from stoker.records.secrets import SecretArn, SecretSource, source_of

# Names of hyperparameters that leave a step as it is.
SAME_COST = (
    *("lr", "learning_rate", "base_lr", "init_lr", "max_lr", "min_lr", "lr_decay", "lr_gamma"),
    *("weight_decay", "wd", "warmup_steps", "warmup_epochs", "warmup_ratio"),
    *("epochs", "num_epochs", "n_epochs", "max_epochs", "num_train_epochs", "train_epochs"),
    *("seed", "random_seed", "run_name", "run_id", "experiment_name"),
)
_MANAGED = r"arn:aws[a-z-]*:sagemaker:[a-z0-9-]*:[0-9]{12}:mlflow-[a-zA-Z-]*/.*"
# Of a pipeline's run id, in the names of the run's jobs.
_ID_CHARACTERS = 8


class TodaysGroup(Record, frozen=True, kw_only=True):
    """The hosts that train today.

    Attributes:
        instance_type: Type in the catalog. On this machine `local.cN` is N of its cores; on
            Kubernetes it may be a node pool.
        count: Number of hosts.
        processes_per_host: Trainer processes per host. None: one per accelerator, at least one.
    """

    instance_type: Name
    count: PositiveInt = 1
    processes_per_host: PositiveInt | None = None


class Cluster(Record, frozen=True, kw_only=True):
    """Today's cluster.

    Attributes:
        dnn: The hosts that train. Profiles are measured on them, and plans are compared with them.
    """

    dnn: TodaysGroup


class Channel(Record, frozen=True, kw_only=True):
    """An input of the job.

    Attributes:
        uri: A folder (local), s3://..., efs://FILE_SYSTEM/FOLDER, fsx://FILE_SYSTEM/MOUNT/FOLDER
            (SageMaker), or pvc://CLAIM/FOLDER (Kubernetes).
        groups: Instance groups that get it: `dnn`, `data`. None: all.
        data_type: SageMaker: S3Prefix: all objects below the address; ManifestFile: a list of
            objects; AugmentedManifestFile: a list with labels.
        distribution: SageMaker: FullyReplicated: all data on each host; ShardedByS3Key: a share
            each.
        mode: SageMaker: `File` copies the data before the training, `FastFile` reads files on
            access, `Pipe` streams.
        attribute_names: Keys of an augmented manifest that are streamed, in this order.
    """

    uri: Name
    groups: Names | None = None
    data_type: Literal["S3Prefix", "ManifestFile", "AugmentedManifestFile"] = "S3Prefix"
    distribution: Literal["FullyReplicated", "ShardedByS3Key"] = "FullyReplicated"
    mode: Literal["File", "Pipe", "FastFile"] = "File"
    attribute_names: Annotated[Names, msgspec.Meta(max_length=16)] | None = None


Storage = Literal["per_host", "shared", "unknown"]
# By a channel's address. A claim (pvc://) may be either.
_STORAGE_OF_CHANNEL: Mapping[str, Storage] = MappingProxyType(
    {"s3": "per_host", "efs": "shared", "fsx": "shared"}
)


class Constraints(Record, frozen=True, kw_only=True):
    """Limits that plans must respect, and what ranks them.

    Attributes:
        objective: What ranks plans: the cost or the time of a step.
        max_usd_per_hour: Maximum price of the whole cluster, in dollars per hour.
        max_usd: Maximum dollars of one run, retries included. A plan that is predicted to cost more
            is refused. The leader counts hosts, prices and time, and at the limit ends
            the training as SIGTERM does, so that it can save.
        deadline_hours: Maximum hours of the whole training; needs `training`.
        max_data_hosts: Maximum number of data hosts, up to 256; 0: no data group.
        allowed_instance_types: Types that hosts may have, besides today's. None: the whole catalog.
        regions: AWS regions whose prices may be used. None: any.
        prices_file: CSV file of prices, in the catalog's columns, or its text, which pipelines
            get. `--prices` goes before it.
        storage: Read rate of several hosts. per_host: adds up (S3, local copies); shared: one rate
            for all; unknown: planned as shared. None: by platform and channels.
    """

    objective: Literal["cost", "time"] = "cost"
    max_usd_per_hour: PositiveFloat | None = None
    max_usd: PositiveFloat | None = None
    deadline_hours: PositiveFloat | None = None
    max_data_hosts: Annotated[int, msgspec.Meta(ge=0, le=256)] = 8
    allowed_instance_types: Names | None = None
    regions: Names | None = None
    prices_file: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    storage: Storage | None = None


class TrainingSize(Record, frozen=True, kw_only=True):
    """Length of the training: steps, or epochs with samples_per_epoch and global_batch_size.

    Attributes:
        steps: Steps of the whole training; the other keys are then not needed.
        epochs: Passes over the data.
        samples_per_epoch: Samples of an epoch, all ranks.
        global_batch_size: Samples of a step, all ranks.
    """

    steps: PositiveInt | None = None
    epochs: PositiveInt | None = None
    samples_per_epoch: PositiveInt | None = None
    global_batch_size: PositiveInt | None = None

    def total_steps(self) -> int | None:
        if self.steps:
            return self.steps
        if self.epochs and self.samples_per_epoch and self.global_batch_size:
            # Rounded up: the smaller last batch of an epoch is a step, too.
            return self.epochs * -(-self.samples_per_epoch // self.global_batch_size)
        return None


class Gate(Record, frozen=True, kw_only=True):
    """Bounds on a reported metric; the stricter of two lower or upper bounds applies.

    Attributes:
        metric: Name in `stoker.log_metrics(NAME=VALUE)`, or any with `regex`. A metric that was
            not reported fails.
        min: Minimum that passes.
        max: Maximum that passes.
        min_champion: Minimum relative to the model in use (the champion), such as -0.005. The first
            model has no champion, and passes.
        max_champion: Maximum relative to the champion.
        regex: Pattern of Python with a group for the value, such as accuracy (\\S+), for a
            script that only prints it: the last match in the output of the first dnn host counts,
            line by line, 1,000 characters of each, and 0.25 s of CPU.
    """

    metric: Name
    min: float | None = None
    max: float | None = None
    min_champion: float | None = None
    max_champion: float | None = None
    regex: Annotated[str, msgspec.Meta(min_length=1, max_length=400)] | None = None

    def __post_init__(self) -> None:
        if self.regex is None:
            return
        try:
            groups = re.compile(self.regex).groups
            wrong = "" if groups == 1 else f"it has {groups} groups, and one is the value"
        except (re.error, RecursionError, OverflowError) as err:
            wrong = f"it is no pattern of Python: {err}"
        if wrong:
            raise ValueError(f"`regex`: {self.regex!r}: {wrong}; for example 'accuracy (\\S+)'")

    @property
    def needs_champion(self) -> bool:
        return self.min_champion is not None or self.max_champion is not None

    def against(self, champion: float | None) -> "Gate":
        """Returns the gate with its bounds relative to a champion's value made absolute."""
        low = (self.min, _changed(champion, self.min_champion))
        high = (self.max, _changed(champion, self.max_champion))
        return Gate(
            metric=self.metric,
            min=max((bound for bound in low if bound is not None), default=None),
            max=min((bound for bound in high if bound is not None), default=None),
        )


def _changed(value: float | None, by: float | None) -> float | None:
    return None if value is None or by is None else value + by


class FeedSettings(Record, frozen=True, kw_only=True):
    """How the feed makes and sends batches.

    Attributes:
        num_workers: Loaders of PyTorch's own class without workers are read as if the script had
            written this number, if their dataset is map-style and can be pickled whole. Their
            batches are then made ahead of the loop. None: they are left as they are.
        local_workers: Data workers on a dnn host. auto: as the plan says, else the script's
            `num_workers`.
        max_bytes: Maximum bytes of waiting batches per host. None: a quarter of its memory.
        accept_pickles: Whether trainers unpickle batches of custom classes. False: an attacker on a
            data host cannot run code in trainers; such batches are errors, and exceptions arrive as
            text.
        seeding: What seeds the random state of a batch. `batch`: epoch and batch number, so that
            any worker makes the same bytes; `torch`: the worker.
        on_error: What happens with a sample whose `__getitem__` raises. raise: the training gets
            the error; skip: the batch is one sample shorter; replace: another sample is in its
            place, drawn from its seed and index. The same on any host. Errors of a host (a
            full disk, a network) and of `collate_fn` are raised in any case. A batch whose worker
            dies is made again; the third death ends the training.
        max_errors: With `on_error`, how many bad samples of an epoch a rank accepts before the
            training fails, of each loader: below 1 a share of the epoch's samples, from 1 on a
            number of them, and a whole one (1 and 1.0 are one sample; a large number is no limit).
            `on_error: raise` accepts none. It fails as soon as it has more, or where the sampler
            has no length from 100 samples on. More than 1 in 100 is hardly ever a damaged file here
            and there.
        model_parallel_size: Ranks per replica of the model, which get the same batches.
        lease_seconds: Seconds without a message after which a launcher counts as lost. A data host
            that serves a trainer waits longer for a silent leader.
        start_deadline_seconds: Seconds that hosts wait for each other's first message, and a rank
            for a worker that is ready; autoscalers may start a job's hosts minutes apart.
        batch_timeout_seconds: Seconds after which a worker that makes a batch of a data host
            counts as dead. None: the rank waits, and says so after a minute.
        max_dataset_bytes: Maximum size of a pickled dataset. For a larger one use `stoker.remote`.
        replace_dataloader: Whether loaders of PyTorch's own class are fed.
        port: TCP port of coordinator and agents. Port + 1 carries batches, port + 2 is torchrun's
            store.
        metrics_port: TCP port of Prometheus metrics on the first dnn host, at /metrics. Needs
            `stoker[metrics]` in the image.
        metrics_address: IP address of `metrics_port`. None: 127.0.0.1. Metrics are not protected:
            use `0.0.0.0` in a closed network only.
    """

    num_workers: PositiveInt | None = None
    local_workers: Literal["auto"] | NonNegativeInt = "auto"
    max_bytes: PositiveInt | None = None
    accept_pickles: bool = True
    seeding: Literal["batch", "torch"] = "batch"
    on_error: Literal["raise", "skip", "replace"] = "raise"
    max_errors: PositiveFloat = 0.01
    model_parallel_size: PositiveInt = 1
    lease_seconds: Annotated[float, msgspec.Meta(ge=1)] = 30.0
    start_deadline_seconds: PositiveFloat = 1800.0
    batch_timeout_seconds: PositiveFloat | None = None
    max_dataset_bytes: PositiveInt = 1 << 30
    replace_dataloader: bool = True
    port: Annotated[int, msgspec.Meta(ge=1024, le=65534)] = 7600
    metrics_port: Annotated[int, msgspec.Meta(ge=1024, le=65535)] | None = None
    metrics_address: Name | None = None

    def __post_init__(self) -> None:
        if self.max_errors > 1 and self.max_errors % 1:
            raise ValueError(
                "`max_errors`: expected a share of the epoch's samples, below 1, or a whole number "
                "of samples"
            )

    def replica(self, rank: int) -> int:
        """Returns the number of the replica of the model that a rank has a part of."""
        return rank // self.model_parallel_size


class ProfileSettings(Record, frozen=True, kw_only=True):
    """How long a profile may take, and how exact it must be.

    Attributes:
        budget_seconds: Seconds from the first batch to the verdict. Raise it if steps take some
            seconds.
        max_unexplained: Maximum difference between step and sum of its parts, as a share of the
            step; above it nothing is recommended.
        instance_type: Type of the profiled hosts if `cluster` does not name it; `auto` asks the
            host's firmware (EC2).
        same_cost: Hyperparameters, and options of the command, that do not change what a step
            costs: a cached profile is used again whatever they are. `_` and `-` are one.
    """

    # A day at most: waits on a thread cannot be longer than some years.
    budget_seconds: Annotated[float, msgspec.Meta(ge=5, le=86_400)] = 180.0
    max_unexplained: Fraction = 0.15
    instance_type: Name | None = None
    same_cost: Names = SAME_COST


class TrackingSettings(Record, frozen=True, kw_only=True):
    """Experiment tracking with MLflow.

    Attributes:
        mlflow: https://HOST of a tracking server, file:FOLDER, sqlite:FILE, or the ARN of
            SageMaker's managed MLflow. Without password, which MLflow reads from its environment
            variables.
        experiment: Experiment of the runs. None: the workload's name.
    """

    mlflow: (
        Annotated[str, msgspec.Meta(pattern=rf"^(https?://[^/]+|file:.|sqlite:.|{_MANAGED}$)")]
        | None
    ) = None
    experiment: Annotated[str, msgspec.Meta(min_length=1, max_length=256)] | None = None

    @property
    def is_managed(self) -> bool:
        return bool(self.mlflow) and str(self.mlflow).startswith("arn:")

    @property
    def is_local(self) -> bool:
        return bool(self.mlflow) and str(self.mlflow).startswith(("file:", "sqlite:"))


class NotifySettings(Record, frozen=True, kw_only=True):
    """Webhook that is called when a run ends. Its address is a secret and is in no file.

    Attributes:
        on: failure: failed runs, models below their gate, and warnings such as data hosts that did
            nothing; always: all runs.
        variable: Environment variable with the webhook's address.
        secret_arn: SageMaker: ARN of a Secrets Manager secret with the address, for pipelines.
    """

    on: Literal["failure", "always"] = "failure"
    variable: Annotated[str, msgspec.Meta(pattern="^[A-Za-z_][A-Za-z0-9_]*$")] = (
        "STOKER_WEBHOOK_URL"
    )
    secret_arn: (
        Annotated[str, msgspec.Meta(pattern="^arn:aws[a-z-]*:secretsmanager:[^:]+:[0-9]{12}:")]
        | None
    ) = None


def workload_keys(
    *,
    command: Sequence[str],
    strategy: StrategyName,
    engine: EngineName,
    today: TodaysGroup | None = None,
) -> dict[str, str]:
    """Returns the keys of a workload that a measurement depends on, with their values as text."""
    keys = {"command": shlex.join(command), "strategy": strategy, "engine": engine}
    if today:
        processes = today.processes_per_host or "auto"
        hosts = f"{today.count} x {bare_type(today.instance_type)}"
        keys["cluster.dnn"] = f"{hosts}, processes_per_host {processes}"
    return keys


def own_keys(keys: Mapping[str, str] | None, *, is_elsewhere: bool) -> dict[str, str]:
    """Returns the keys that apply to what is made from a profile: elsewhere, none of its hosts."""
    return {
        key: value
        for key, value in (keys or {}).items()
        if not is_elsewhere or key != "cluster.dnn"
    }


def refuse_foreign(
    kind: str,
    keys: Mapping[str, str] | None,
    *,
    workload: "Workload",
    where: str = "",
    fix: str = "",
) -> None:
    """Refuses a record that was made for another workload, as its keys tell.

    Only keys that both have are compared: a bare command names no cluster.

    Args:
        where: The file or option that names the record.
        fix: What to do; empty: make the record again.

    Raises:
        UsageError: With each key that differs, and both values.
    """
    same = workload.profile.same_cost
    known = keys or {}
    differing = [
        f"{key}: {known[key]} -> {value}"
        for key, value in workload.profile_keys().items()
        if key in known and _step_words(known[key], same) != _step_words(value, same)
    ]
    if differing:
        raise UsageError(
            f"the {kind} was made for another workload: {'; '.join(differing)}",
            where=where or kind,
            fix=fix or f"use this workload's {kind}, or make it again",
        )


def _step_words(command: str, same_cost: Collection[str]) -> list[str]:
    """Returns a command's words without options that do not change a step's cost: `--lr 0.1`."""
    kept = []
    words = iter(shlex.split(command))
    for word in words:
        name, equals, _ = word.partition("=")
        if not word.startswith("--") or not is_same_cost(name, same_cost):
            kept.append(word)
        elif not equals:
            # Its value.
            next(words, None)
    return kept


def is_same_cost(name: str, names: Iterable[str]) -> bool:
    """Whether a hyperparameter is among `names`; `_` and `-` are one, as are capitals."""
    return _plain(name) in map(_plain, names)


def _plain(name: str) -> str:
    return name.lower().replace("-", "_").lstrip("_")


class Workload(PlatformSettings, frozen=True, kw_only=True):
    """A training command with its inputs, its gate and today's cluster.

    Attributes:
        schema: Version of the file format; optional.
        name: Name in runs, jobs and pipelines.
        command: Program and arguments, run in the folder where stoker runs.
        image: Container image of all hosts; required on SageMaker and Kubernetes.
        platform: Where jobs run. `--platform` overrides it for one run.
        cluster: Today's cluster. None: this machine; other platforms require it.
        channels: Inputs by name. A script finds each in the folder that SM_CHANNEL_NAME names.
        hyperparameters: Appended to the command as `--name value`, in this order; parameters of a
            pipeline's run. Texts stay texts; unquoted yes, 012 and 1:30 are texts, too.
        environment: Variables of all hosts, as plain text; numbers in quotes.
        secrets: Variables whose value is kept elsewhere, each with an ARN (Secrets Manager, SSM) or
            its place. The hosts that need them read them as they start; on this machine they are
            the caller's variables.
        constraints: Limits that plans must respect, and what ranks them.
        training: Length of the training; needed for a plan's total time and cost.
        gate: Bounds on reported metrics; all must hold.
        feed: How batches reach the trainer.
        strategy: How the processes of the dnn group start. auto: torchrun if more than one trains,
            else none; torchrun: a process per rank; mpi: mpirun; none: a process per host.
        engine: Program that makes data on the data group: a name, or settings with a name.
        profile: How a profile is measured.
        tracking: Experiment tracking besides stoker's own records.
        notify: Webhook for the end of runs.
        watchdog_minutes: Minutes without a step after which a training run is ended as failed, with
            its ranks' stacks in the log; longer than its longest checkpoint or evaluation. None:
            never.
        on_no_capacity: Retries and alternatives while the platform has no hosts.
        sagemaker: Settings for SageMaker; required there.
        kubernetes: Settings for Kubernetes.
    """

    schema: Literal["stoker.workload/v1"] = "stoker.workload/v1"
    # No two dashes in a row: they end a workload's name in the names of SageMaker's jobs.
    name: Annotated[str, msgspec.Meta(pattern="^[a-z0-9]+(-[a-z0-9]+)*$", max_length=40)]
    command: Command
    image: ImageName | None = None
    platform: PlatformName = "local"
    cluster: Cluster | None = None
    channels: dict[Name, Channel] = {}
    hyperparameters: Hyperparameters = {}
    environment: dict[Name, str] = {}
    secrets: dict[Name, SecretArn | SecretSource] = {}
    constraints: Constraints = Constraints()
    training: TrainingSize = TrainingSize()
    gate: tuple[Gate, ...] = ()
    feed: FeedSettings = FeedSettings()
    strategy: StrategyName = "auto"
    engine: EngineName | EngineSettings = "feed"
    profile: ProfileSettings = ProfileSettings()
    tracking: TrackingSettings = TrackingSettings()
    notify: NotifySettings | None = None
    watchdog_minutes: PositiveFloat | None = None

    @property
    def metric_patterns(self) -> dict[str, str]:
        """The patterns of the gates' metrics that the script only prints."""
        return {gate.metric: gate.regex for gate in self.gate if gate.regex is not None}

    @property
    def platform_info(self) -> PlatformInfo:
        return PLATFORM_INFOS[self.platform]

    @property
    def engine_settings(self) -> EngineSettings:
        if isinstance(self.engine, EngineSettings):
            return self.engine
        return EngineSettings(name=self.engine)

    @property
    def secret_sources(self) -> dict[str, SecretSource]:
        """Where each secret variable is kept."""
        return {name: source_of(each) for name, each in self.secrets.items()}

    @property
    def todays_type(self) -> str:
        """Instance type of today's trainer hosts; empty: this machine."""
        if self.cluster is None:
            return ""
        return self.cluster.dnn.instance_type

    @property
    def num_todays_hosts(self) -> int:
        """Today's trainer hosts; 1: this machine."""
        if self.cluster is None:
            return 1
        return self.cluster.dnn.count

    @property
    def max_run_seconds(self) -> int | None:
        """Time limit of a training run on its platform, if it has one."""
        section: object = getattr(self, self.platform, None)
        limit: int | None = getattr(section, "max_run_seconds", None)
        return limit

    @property
    def known_constraints(self) -> Constraints:
        """Constraints as decisions have them: no prices, which are in the catalog then.

        The storage is filled in.
        """
        return msgspec.structs.replace(self.constraints, storage=self._storage(), prices_file=None)

    def _storage(self) -> Storage:
        if self.constraints.storage is not None:
            return self.constraints.storage
        kinds: set[Storage] = {
            _STORAGE_OF_CHANNEL.get(channel.uri.partition("://")[0], "unknown")
            for channel in self.channels.values()
        }
        if self.platform_info.is_this_machine:
            kinds = {"shared"}
        return kinds.pop() if len(kinds) == 1 else "unknown"

    def run_name(self, run_id: str, *, branch: str = "") -> str:
        """Returns the job's name for a pipeline's run: the same on a retry, else another one.

        Args:
            run_id: Id of the pipeline's run.
            branch: Which of the run's training jobs it is; empty: its only one.
        """
        parts = (self.name, re.sub(r"[^a-z0-9]+", "-", branch.lower()), run_id[:_ID_CHARACTERS])
        return "-".join(filter(None, (part.lower().strip("-") for part in parts)))

    def profile_keys(self, *, today: TodaysGroup | None = None) -> dict[str, str]:
        """Returns `workload_keys` of the measured hosts, by default of `cluster`.

        Name, gate, constraints, settings and data are none of them.
        """
        return workload_keys(
            command=self.command,
            strategy=self.strategy,
            engine=self.engine_settings.name,
            today=today or (self.cluster.dnn if self.cluster else None),
        )
