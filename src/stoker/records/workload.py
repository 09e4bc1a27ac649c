"""A workload is the user's training command with its inputs, gate and today's cluster."""

import shlex
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Literal

import msgspec

from stoker.errors import UsageError
from stoker.records.base import (
    Fraction,
    ImageName,
    Name,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Record,
    Scalar,
    sha256_of,
)
from stoker.records.engine import EngineName, EngineSettings, StrategyName, StrategySettings
from stoker.records.platforms import (
    PLATFORM_INFOS,
    PlatformInfo,
    PlatformName,
    PlatformSettings,
    bare_type,
)

_MANAGED = r"arn:aws[a-z-]*:sagemaker:[a-z0-9-]*:[0-9]{12}:mlflow-[a-zA-Z-]*/.*"
# How a record is made again.
_VERBS = {"profile": "profile", "decision": "decide", "training": "train"}
# Of a pipeline's run id, in the names of the run's jobs.
_ID_CHARACTERS = 8


class TodaysGroup(Record, frozen=True, kw_only=True):
    """Names the hosts that train today.

    Attributes:
        instance_type: Type of these hosts, as the catalog calls it, with or without `ml.`: on this
            machine `local.cN` is N of its cores, on Kubernetes it may be the name of a node pool.
        count: Number of hosts.
        processes_per_host: Trainer processes of one host. Absent: one per accelerator, at least
            one.
    """

    instance_type: Name
    count: PositiveInt = 1
    processes_per_host: PositiveInt | None = None


class Cluster(Record, frozen=True, kw_only=True):
    """Describes today's cluster.

    Attributes:
        dnn: The hosts that train today. Profiles are measured on them, and every plan is compared
            with them.
    """

    dnn: TodaysGroup


class Channel(Record, frozen=True, kw_only=True):
    """Describes one input of the job.

    Attributes:
        uri: Where the data is: a folder (local), an s3:// address, efs://FILE_SYSTEM/FOLDER or
            fsx://FILE_SYSTEM/MOUNT/FOLDER (SageMaker), or pvc://CLAIM/FOLDER (Kubernetes).
        groups: Names of the instance groups that get it: `dnn`, `data`. Absent: all.
        data_type: What the address means, on SageMaker. S3Prefix: all objects below it;
            ManifestFile: a list of objects; AugmentedManifestFile: a list of objects with labels.
        distribution: What a host gets, on SageMaker. FullyReplicated: all of the data, which a
            random sampler over the whole dataset needs; ShardedByS3Key: a part of its own.
        mode: How SageMaker brings the data: `File` copies it to each host's disk before the
            training begins, `FastFile` reads each file from S3 when it is opened, `Pipe` streams
            it. The default is the service's own.
        attribute_names: Keys of an augmented manifest that are streamed, in this order.
        record_wrapper: Whether RecordIO delimits the records that a pipe streams. Absent: RecordIO
            for augmented manifests, else None.
    """

    uri: Name
    groups: tuple[Name, ...] | None = None
    data_type: Literal["S3Prefix", "ManifestFile", "AugmentedManifestFile"] = "S3Prefix"
    distribution: Literal["FullyReplicated", "ShardedByS3Key"] = "FullyReplicated"
    mode: Literal["File", "Pipe", "FastFile"] = "File"
    attribute_names: Annotated[tuple[Name, ...], msgspec.Meta(max_length=16)] | None = None
    record_wrapper: Literal["None", "RecordIO"] | None = None


Storage = Literal["per_host", "shared", "unknown"]
# By the address of a channel. Each host reads from S3 itself, or copies it to a disk of its own; a
# file system is one for all hosts. Behind a claim (pvc://) there may be either.
_STORAGE_OF_CHANNEL: Mapping[str, Storage] = MappingProxyType(
    {"s3": "per_host", "efs": "shared", "fsx": "shared"}
)


class Constraints(Record, frozen=True, kw_only=True):
    """Holds the bounds that a plan must respect.

    Attributes:
        objective: What ranks the plans. cost: the cost of a step; time: its time. The default is
            cost, so that a faster step that costs more is chosen only if you ask for it.
        max_usd_per_hour: Upper limit on the price of the whole cluster, in dollars per hour.
            Absent: no limit.
        max_usd_per_run: Upper limit on what one training can cost, in dollars: the price of its
            hosts for `max_run_seconds` of the platform. A training that could cost more is refused
            before it starts; a decision counts with the dollars per hour that this leaves. Absent:
            no limit.
        deadline_hours: Upper limit on the whole training, in hours; the number of its steps has to
            be known (`training`). Absent: no limit.
        max_data_hosts: Largest number of data hosts that a plan may have; 0: no data group. 8
            bounds what is tried; raise it where the plan with 8 is still limited by CPU.
        allowed_instance_types: Types that dnn and data hosts may have; today's type is always
            allowed. Absent: all types of the catalog.
        regions: AWS regions whose prices may be used. Absent: any; the catalog's region is printed.
        storage: Whether more hosts read faster. per_host: each host brings a storage rate of its
            own (S3, local copies); shared: all hosts read from one storage; unknown: a plan is
            taken to share it, and what it would gain otherwise is said. Absent: as platform and
            channels tell (S3 is per_host; EFS, FSx and this machine are shared; behind a claim may
            be either), else unknown.
    """

    objective: Literal["cost", "time"] = "cost"
    max_usd_per_hour: PositiveFloat | None = None
    max_usd_per_run: PositiveFloat | None = None
    deadline_hours: PositiveFloat | None = None
    max_data_hosts: NonNegativeInt = 8
    allowed_instance_types: tuple[Name, ...] | None = None
    regions: tuple[Name, ...] | None = None
    storage: Storage | None = None


class TrainingSize(Record, frozen=True, kw_only=True):
    """Says how long a training is: steps, or epochs with samples_per_epoch and global_batch_size.

    It turns the seconds and dollars of a step into those of the whole training.

    Attributes:
        steps: Steps of the whole training; if given, the other three keys are not needed.
        epochs: Passes over the data.
        samples_per_epoch: Samples of one epoch, of all ranks together.
        global_batch_size: Samples of one step, of all ranks together.
    """

    steps: PositiveInt | None = None
    epochs: PositiveInt | None = None
    samples_per_epoch: PositiveInt | None = None
    global_batch_size: PositiveInt | None = None

    def total_steps(self) -> int | None:
        """Returns the steps of the whole training, or None where that is not known."""
        if self.steps:
            return self.steps
        if self.epochs and self.samples_per_epoch and self.global_batch_size:
            # Rounded up: the smaller batch at the end of an epoch is a step, too.
            return self.epochs * -(-self.samples_per_epoch // self.global_batch_size)
        return None


class Gate(Record, frozen=True, kw_only=True):
    """Bounds one metric that the training reports.

    At least one of the four bounds is needed; of two lower (or upper) ones the stricter holds.

    Attributes:
        metric: Name of the metric, as `stoker.log_metrics(NAME=VALUE)` reports it. A metric that
            was not reported fails the gate.
        min: Smallest value that passes, in the metric's own unit.
        max: Largest value that passes, in the metric's own unit.
        min_champion: At least the champion's value plus this, in the metric's own unit, such as
            -0.005; the champion is the model that is in use. The first model has none to compare
            with, and passes.
        max_champion: At most the champion's value plus this, in the metric's own unit.
    """

    metric: Name
    min: float | None = None
    max: float | None = None
    min_champion: float | None = None
    max_champion: float | None = None

    @property
    def needs_champion(self) -> bool:
        """Returns whether it holds the metric against another model's."""
        return self.min_champion is not None or self.max_champion is not None

    def against(self, champion: float | None) -> "Gate":
        """Returns the gate with the bounds that a champion's value gives it."""
        if champion is None:
            return Gate(metric=self.metric, min=self.min, max=self.max)
        low = [self.min] if self.min is not None else []
        low += [champion + self.min_champion] if self.min_champion is not None else []
        high = [self.max] if self.max is not None else []
        high += [champion + self.max_champion] if self.max_champion is not None else []
        # The stricter one of two bounds.
        return Gate(metric=self.metric, min=max(low, default=None), max=min(high, default=None))


ReplaceDataLoader = Literal["auto"] | bool


class FeedSettings(Record, frozen=True, kw_only=True):
    """These settings change how the feed makes and sends batches.

    Attributes:
        local_workers: Data workers on a dnn host. auto: as many as the plan says, else the script's
            `num_workers`. A number takes the place of the script's, and plans keep to it; 0, where
            dnn hosts need their CPUs for other work.
        credits: Batches asked for ahead, per worker. With 1 each batch waits for a round trip (+3 %
            on a step of 20 ms), beyond 2 nothing is gained. It adapts up to 8 to how much the cost
            of batches varies, so it is seldom worth a change.
        max_bytes: Bytes of batches that may wait in one host, made or under way, of all its loaders
            and ranks together; each loader may always hold one batch. Lower it where the training
            needs the memory. Absent: a quarter of the host's memory (of its cgroup's limit, where
            there is one).
        receive_threads: Has no effect any more: each data host is received by a thread of its own.
        encrypt_batches: Has no effect any more: batches are always encrypted, which costs 0.1
            CPU-seconds per GB on each side.
        accept_pickles: Whether trainers accept what data hosts can only send pickled (objects that
            are no tensors, arrays, numbers, strings or containers of them, and exceptions). False:
            whoever takes over a data host cannot run code in the trainers that way; such a batch is
            an error, and of an exception only the text arrives. True by default, as custom batch
            classes are common, and data hosts belong to the same run.
        seeding: What the random state is set from before a batch is made. `batch`: base seed,
            replica, epoch and the batch's number, so that a batch has the same bytes on any worker
            and host; `sample`: base seed, epoch, the sample's index and how often the epoch had it
            before, so that a sample is the same with another batch size or number of ranks, too;
            `torch`: as torch does it, by worker, so that a batch depends on who makes it.
        model_parallel_size: Ranks that one replica of the model is spread over: ranks 0 to N - 1
            are the first replica, N to 2 N - 1 the second. The ranks of a replica that load data
            get the same batches, byte for byte, if their samplers and generators are the same. 1:
            every rank is a replica, as in data parallel training.
        replicas: The ranks of each replica of the model, where `model_parallel_size` cannot say
            them. A rank in none of these lists is a replica alone. Absent: as model_parallel_size
            says.
        lease_seconds: Seconds without a message after which a launcher counts as lost. 60 survives
            the interruptions of up to a minute that networks of a cloud have. A process that died
            is noticed within 10 s, and a data host that serves a trainer is never given up for its
            silence alone.
        start_deadline_seconds: Seconds that hosts wait for the first message of each other; on
            Kubernetes trainers wait as long for a data pod to come back if all are gone. 30
            minutes, as clouds and autoscalers may bring the hosts of a job minutes apart.
        max_dataset_bytes: Largest pickled dataset that is sent to data hosts, in bytes. For a
            larger one use `stoker.remote`. 1 GiB, as every data host receives it before its first
            batch.
        unshippable: What becomes of a loader whose dataset or collate function cannot travel.
            error: the training ends with an error; local: the trainer's host makes its batches, as
            torch does, and a line on the terminal names it. Absent: local with `num_workers=0`,
            where torch pickles nothing either, and for PyTorch's own loaders with
            `replace_dataloader: auto`; else error.
        replace_dataloader: Whether loaders of PyTorch's own class are fed like stoker's, without a
            change of the script. auto: they are, unless the script imports stoker's DataLoader,
            which says which loaders are meant; true: always; false: never, so that only loaders of
            stoker's class take batches from data hosts. Random draws are seeded per batch then, as
            `seeding` says.
        shards: Shards of an iterable dataset, for each rank, in place of `num_workers` in the
            script: a shard is made by one worker, so that more workers than shards find nothing to
            do. Only for a dataset that divides itself by `get_worker_info()`: another one gives
            each sample once per shard. It has no effect on a dataset with `__getitem__`. Absent:
            `num_workers`, at least 1.
        port: TCP port of coordinator and agents, the same on every host; agents send batches on
            port + 1, and torchrun's store is on port + 2. Change it where another program has one
            of the three.
        metrics_port: TCP port on which the first dnn host serves Prometheus metrics of the feed, at
            /metrics. Absent: none. Needs `stoker[metrics]` in the image.
        metrics_address: IP address on which that port listens. Absent: 127.0.0.1, so that only the
            host itself can read the metrics. They are neither encrypted nor protected: use
            `0.0.0.0` in a closed network only.
    """

    local_workers: Literal["auto"] | NonNegativeInt = "auto"
    credits: Annotated[int, msgspec.Meta(ge=1, le=64)] = 2
    max_bytes: PositiveInt | None = None
    receive_threads: Annotated[int, msgspec.Meta(ge=1, le=16)] | None = None
    encrypt_batches: bool = True
    accept_pickles: bool = True
    seeding: Literal["batch", "sample", "torch"] = "batch"
    model_parallel_size: PositiveInt = 1
    replicas: tuple[tuple[NonNegativeInt, ...], ...] | None = None
    lease_seconds: Annotated[float, msgspec.Meta(ge=1)] = 60.0
    start_deadline_seconds: PositiveFloat = 1800.0
    max_dataset_bytes: PositiveInt = 1 << 30
    unshippable: Literal["error", "local"] | None = None
    replace_dataloader: ReplaceDataLoader = "auto"
    shards: Annotated[int, msgspec.Meta(ge=1, le=4096)] | None = None
    port: Annotated[int, msgspec.Meta(ge=1024, le=65534)] = 7600
    metrics_port: Annotated[int, msgspec.Meta(ge=1024, le=65535)] | None = None
    metrics_address: Name | None = None

    @property
    def ports(self) -> dict[int, str]:
        """Returns the ports that it takes on a host, each with the key that says so."""
        # From `port` on: coordinator and agents, batches, the store of torchrun.
        taken = {self.port + index: "feed.port" for index in range(3)}
        if self.metrics_port:
            taken[self.metrics_port] = "feed.metrics_port"
        return taken

    def replica(self, rank: int) -> int:
        """Returns the number of the replica that a rank is part of."""
        if self.replicas is None:
            return rank // self.model_parallel_size
        for number, ranks in enumerate(self.replicas):
            if rank in ranks:
                return number
        # A number of its own, which no replica that is listed has.
        return len(self.replicas) + rank


class ProfileSettings(Record, frozen=True, kw_only=True):
    """These settings say how long a profile may take, and how exact it must be.

    Attributes:
        budget_seconds: Seconds from the first batch to the verdict. 180 is enough for the medians
            of steps below some seconds; raise it for slower steps, lower it for a first look.
        max_unexplained: Fraction of the measured step, 0 to 1, by which the sum of the parts may
            miss it before the profile says *unexplained*, and nothing is recommended. 0.15 is about
            the noise of a shared machine.
        instance_type: What the profiled hosts are called in a catalog, where the cluster does not
            say it; `auto` asks the cloud's metadata service. Absent: what the environment says,
            and on EC2 the metadata service.
    """

    # A day at most: the clock of a thread takes no more than some years.
    budget_seconds: Annotated[float, msgspec.Meta(ge=5, le=86_400)] = 180.0
    max_unexplained: Fraction = 0.15
    instance_type: Name | None = None


class TrackingSettings(Record, frozen=True, kw_only=True):
    """Names the services that keep the figures of runs, to compare them with others'.

    Attributes:
        mlflow: Address of MLflow: https://HOST of a tracking server, file:FOLDER or sqlite:FILE on
            this machine, or the ARN of SageMaker's managed MLflow. It must hold no password: MLflow
            reads MLFLOW_TRACKING_TOKEN, or _USERNAME and _PASSWORD. Absent: runs are kept in their
            own folders only, and MLflow need not be installed.
        experiment: Experiment of the runs; absent: one named as the workload.
        secret: Kubernetes: Secret with MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and
            MLFLOW_TRACKING_PASSWORD, for the steps of a pipeline; absent: the server asks for none.
        timeout_seconds: Seconds that MLflow may take each time, before and after a training; then
            the run goes on without it. 60: importing MLflow takes up to 15 s on a cold disk, the
            rest is for some files over a slow network.
        tensorboard: Whether the script is told a folder for TensorBoard, in STOKER_TENSORBOARD,
            that is kept: runs/ID/tensorboard, the folder of `kubernetes.output`, or S3. Off, as
            only a script that writes there has a use for it.
    """

    mlflow: (
        Annotated[str, msgspec.Meta(pattern=rf"^(https?://[^/]+|file:.|sqlite:.|{_MANAGED}$)")]
        | None
    ) = None
    experiment: Annotated[str, msgspec.Meta(min_length=1, max_length=256)] | None = None
    secret: Name | None = None
    timeout_seconds: PositiveFloat = 60.0
    tensorboard: bool = False

    @property
    def is_managed(self) -> bool:
        """Returns whether it is SageMaker's own MLflow, which a training job can name."""
        return bool(self.mlflow) and str(self.mlflow).startswith("arn:")

    @property
    def is_local(self) -> bool:
        """Returns whether only this machine reaches it."""
        return bool(self.mlflow) and str(self.mlflow).startswith(("file:", "sqlite:"))


class NotifySettings(Record, frozen=True, kw_only=True):
    """Says which webhook is told how a run ended. Its address is a secret, and is in no file.

    Attributes:
        on: failure: only of runs that failed, a model below its gate among them; always: of all.
        format: text: `text` and `stoker` with the facts, as Slack and most receivers take it;
            teams: a card, which the workflows of Microsoft Teams ask for.
        variable: Environment variable that holds the webhook's address.
        secret: Kubernetes: Secret whose key `url` is the address; the last step of a pipeline on
            Kubeflow gets it. Absent: such a pipeline tells nobody.
        secret_arn: SageMaker: ARN of a secret of Secrets Manager whose value is the address; the
            small steps of a pipeline read it. Absent: such a pipeline tells nobody.
        timeout_seconds: Seconds that the webhook may take; then the run ends without it. 10, as
            Slack answers within a second.
    """

    on: Literal["failure", "always"] = "failure"
    format: Literal["text", "teams"] = "text"
    variable: Annotated[str, msgspec.Meta(pattern="^[A-Za-z_][A-Za-z0-9_]*$")] = (
        "STOKER_WEBHOOK_URL"
    )
    secret: Name | None = None
    secret_arn: (
        Annotated[str, msgspec.Meta(pattern="^arn:aws[a-z-]*:secretsmanager:[^:]+:[0-9]{12}:")]
        | None
    ) = None
    timeout_seconds: PositiveFloat = 10.0


class _Identity(Record, frozen=True, kw_only=True):
    """The facts that make a training the same one."""

    command: tuple[str, ...]
    strategy: StrategyName
    engine: EngineName


def workload_keys(
    *,
    command: Sequence[str],
    strategy: StrategyName,
    engine: EngineName,
    today: TodaysGroup | None = None,
) -> dict[str, str]:
    """Returns the keys of a workload that a measurement depends on, with their values as text.

    Args:
        command: Program and arguments.
        strategy: How trainer processes are started.
        engine: What makes data on the data group.
        today: The hosts that train today; None: the workload does not name them.
    """
    keys = {"command": shlex.join(command), "strategy": strategy, "engine": engine}
    if today:
        name = bare_type(today.instance_type)
        # Without accelerators there is one process anyway.
        alone = 1 if name.startswith("local.") else "auto"
        keys |= {
            "cluster.dnn.instance_type": name,
            "cluster.dnn.count": f"{today.count}",
            "cluster.dnn.processes_per_host": f"{today.processes_per_host or alone}",
        }
    return keys


def own_keys(keys: Mapping[str, str] | None, *, is_elsewhere: bool) -> dict[str, str] | None:
    """Returns the keys of a profile that bind what is made of it.

    Args:
        keys: Its `workload_keys`.
        is_elsewhere: Whether it was taken for hosts of another type: its own bind nothing then.
    """
    if keys is None or not is_elsewhere:
        return {**keys} if keys else None
    return {key: value for key, value in keys.items() if not key.startswith("cluster.")}


RecordKind = Literal["profile", "decision", "training"]


def refuse_foreign(
    kind: RecordKind,
    *,
    keys: Mapping[str, str] | None,
    digest: str | None,
    workload: "Workload",
    where: str = "",
    fix: str = "",
) -> None:
    """Refuses a record that was made for another workload.

    Only keys that both of them have are compared: a bare command names no cluster. A record with
    neither digest nor keys, made of bare figures or by hand, is taken as it is.

    Args:
        kind: What the record is.
        keys: Its `workload_keys`.
        digest: Its `workload_sha256`.
        workload: The workload that it is used for.
        where: The file or option that names the record.
        fix: What to do; empty: to make the record again.

    Raises:
        UsageError: If it was; it names each key that differs, with both values.
    """
    # Of one digest: hosts write a command with its arguments, which is the same one all the same.
    is_same = digest in (None, workload.digest())
    keys = keys or {}
    differing = [
        f"{key}: {keys[key]} -> {value}"
        for key, value in workload.profile_keys().items()
        if keys.get(key, value) != value and (key.startswith("cluster.") or not is_same)
    ]
    if differing or not is_same:
        raise UsageError(
            f"the {kind} was made for another workload: "
            + ("; ".join(differing) or "its command, strategy or engine differs"),
            where=where or kind,
            fix=fix or f"use the {kind} of this workload, or make it: stoker {_VERBS[kind]}",
        )


def _short_id(run_id: str) -> str:
    return run_id[:_ID_CHARACTERS].lower().strip("-")


def is_run_of(name: str, run_id: str) -> bool:
    """Returns whether a job's name is one that `Workload.run_name` gives for a pipeline's run."""
    return bool(_short_id(run_id)) and name.endswith(f"-{_short_id(run_id)}")


# Its keys for the platforms are those of `PlatformSettings`.
class Workload(PlatformSettings, frozen=True, kw_only=True):
    """Describes the user's training command with its inputs, gate and today's cluster.

    Attributes:
        schema: Version of this file's form; may be left out.
        name: Name of the workload, in the names of its runs, jobs and pipelines: up to 40 lowercase
            letters, digits and hyphens.
        command: Program and arguments; relative paths are relative to the folder stoker runs in.
        image: Container image of all hosts. SageMaker and Kubernetes need it; on this machine none
            is run.
        platform: Where jobs run. local: on this machine; sagemaker: as SageMaker training jobs;
            kubernetes: on a cluster. `--platform` on the command line says otherwise for one run.
        cluster: Today's cluster. Absent: this machine, on the platform local; other platforms need
            it.
        channels: Inputs of the job, by name. On every platform a script finds each in the folder
            that the variable SM_CHANNEL_NAME names.
        hyperparameters: Arguments put after the command as `--name value`, on every platform; each
            is a parameter of a pipeline's run, too.
        constraints: Bounds that plans must respect, and what ranks them.
        training: Length of the whole training; without it plans have no total time and cost.
        gate: Bounds on the metrics that the training reports; all must hold. Without any, every
            training that succeeded passes.
        feed: How batches get to the trainer.
        strategy: How the processes of the dnn group are started; a name, or settings with a name.
        engine: What makes data on the data group; a name, or settings with a name.
        profile: How a profile is measured.
        tracking: Where the figures of runs are kept next to their records: MLflow, TensorBoard.
        notify: The webhook that is told of runs that failed; absent: nobody is told.
    """

    schema: Literal["stoker.workload/v1"] = "stoker.workload/v1"
    name: Annotated[str, msgspec.Meta(pattern="^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")]
    command: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    image: ImageName | None = None
    platform: PlatformName = "local"
    cluster: Cluster | None = None
    channels: dict[Name, Channel] = msgspec.field(default_factory=dict)
    hyperparameters: dict[Name, Scalar] = msgspec.field(default_factory=dict)
    constraints: Constraints = Constraints()
    training: TrainingSize = TrainingSize()
    gate: tuple[Gate, ...] = ()
    feed: FeedSettings = FeedSettings()
    strategy: StrategyName | StrategySettings = "auto"
    engine: EngineName | EngineSettings = "feed"
    profile: ProfileSettings = ProfileSettings()
    tracking: TrackingSettings = TrackingSettings()
    notify: NotifySettings | None = None

    @property
    def platform_info(self) -> PlatformInfo:
        """Returns the facts about its platform."""
        return PLATFORM_INFOS[self.platform]

    @property
    def strategy_settings(self) -> StrategySettings:
        """Returns the strategy; where only its name is given, all else is as by default."""
        if isinstance(self.strategy, StrategySettings):
            return self.strategy
        return StrategySettings(name=self.strategy)

    @property
    def engine_settings(self) -> EngineSettings:
        """Returns the engine; where only its name is given, all else is as by default."""
        if isinstance(self.engine, EngineSettings):
            return self.engine
        return EngineSettings(name=self.engine)

    @property
    def max_run_seconds(self) -> int | None:
        """Returns the seconds after which the platform ends a training, where it does."""
        settings = {"sagemaker": self.sagemaker, "kubernetes": self.kubernetes}.get(self.platform)
        return settings.max_run_seconds if settings else None

    @property
    def known_constraints(self) -> Constraints:
        """Returns the constraints; where no key names the storage, platform and channels do.

        What a run may cost is dollars per hour there.
        """
        known = msgspec.structs.replace(self.constraints, storage=self._storage())
        if known.max_usd_per_run is None or self.max_run_seconds is None:
            return known
        most = known.max_usd_per_run / (self.max_run_seconds / 3600)
        return msgspec.structs.replace(
            known, max_usd_per_hour=min(most, known.max_usd_per_hour or most)
        )

    def _storage(self) -> Storage:
        if self.constraints.storage is not None:
            return self.constraints.storage
        kinds: set[Storage] = {
            _STORAGE_OF_CHANNEL.get(channel.uri.partition("://")[0], "unknown")
            for channel in self.channels.values()
        }
        if self.platform_info.is_this_machine:
            kinds = {"shared"}
        # Of both kinds it cannot be told which of them the training waits for; nor where no channel
        # is known to be the data: its script may read them from a disk of all hosts.
        is_data = kinds != {"per_host"} or bool({"train", "training"} & self.channels.keys())
        return kinds.pop() if len(kinds) == 1 and is_data else "unknown"

    def run_name(self, run_id: str) -> str:
        """Names the job of a pipeline's run: the same on a retry, and no other run's.

        Args:
            run_id: The pipeline's own, such as a UUID; its first 8 characters count.
        """
        return f"{self.name}-{_short_id(run_id)}"

    def digest(self) -> str:
        """Returns the digest that records carry as `workload_sha256`: 64 hexadecimal digits.

        It covers what is trained: command, strategy and engine. Name, gate, constraints, settings,
        length and the day's data leave it as it is. Today's cluster is compared key by key, where
        a record was measured on it (`profile_keys`).
        """
        # Not a whole workload: a key that a later stoker knows must not make a profile another's.
        identity = _Identity(
            command=self.command,
            strategy=self.strategy_settings.name,
            engine=self.engine_settings.name,
        )
        return sha256_of(identity)

    def profile_keys(self, *, today: TodaysGroup | None = None) -> dict[str, str]:
        """Returns the keys that a measurement depends on, with their values as text.

        Args:
            today: The hosts that were measured; None: those of `cluster`, if it names any.
        """
        return workload_keys(
            command=self.command,
            strategy=self.strategy_settings.name,
            engine=self.engine_settings.name,
            today=today or (self.cluster.dnn if self.cluster else None),
        )


__all__ = [
    "Channel",
    "Cluster",
    "Constraints",
    "FeedSettings",
    "Gate",
    "NotifySettings",
    "PlatformName",
    "ProfileSettings",
    "RecordKind",
    "Storage",
    "TodaysGroup",
    "TrackingSettings",
    "TrainingSize",
    "Workload",
    "own_keys",
    "refuse_foreign",
    "workload_keys",
]
