"""The workload, read by `stoker.workload_file`: a command, its inputs, gate and today's cluster.

To add a key: a field in `Workload`, the last class, or in the class of its section, with its text
under Attributes; a check that needs more than its type belongs into `workload_file`; whether a
profile is measured again if it changes stands in `profile_key`; then `make docs`.
"""

import hashlib
import re
import shlex
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal

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
    sha256_of,
)
from stoker.records.engine import EngineName, EngineSettings, StrategyName, StrategySettings
from stoker.records.hyperparameters import HyperparameterName, Hyperparameters, ScriptOption
from stoker.records.platforms import (
    PLATFORM_INFOS,
    PlatformInfo,
    PlatformName,
    PlatformSettings,
    bare_type,
)
from stoker.records.profile_origin import undated_word
from stoker.records.secrets import SecretArn, SecretSource, source_of
from stoker.records.step_cost import SAME_COST, split_command

_MANAGED = r"arn:aws[a-z-]*:sagemaker:[a-z0-9-]*:[0-9]{12}:mlflow-[a-zA-Z-]*/.*"
_REGISTRY = re.compile(r"[0-9]{12}\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.amazonaws\.com")
# How a record is made again.
_VERBS = {"profile": "profile", "decision": "decide", "training": "train"}
# Of a pipeline's run id, in the names of the run's jobs.
_ID_CHARACTERS = 8
# Of a run's folder; and of its branch, of which Kubernetes shows the most in a name of 40.
_MAX_RUN_NAME = 63
_MAX_BRANCH = 20
_BRANCH_DIGEST = 6
# Seedings with which several workers may make one batch: what a sample draws does not depend on
# samples of its batch that others make.
SEEDS_EACH = frozenset(("stretch", "place", "sample"))
# And a batch that takes less is made by one of them: its messages alone cost some ms.
MIN_SPLIT_SECONDS = 0.02
# As many parts has a batch of one host at most (feed.stretches). Up to so many samples each is one.
MAX_STRETCHES = 32


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
        record_wrapper: How a pipe delimits records. None: RecordIO for augmented manifests only.
    """

    uri: Name
    groups: Names | None = None
    data_type: Literal["S3Prefix", "ManifestFile", "AugmentedManifestFile"] = "S3Prefix"
    distribution: Literal["FullyReplicated", "ShardedByS3Key"] = "FullyReplicated"
    mode: Literal["File", "Pipe", "FastFile"] = "File"
    attribute_names: Annotated[Names, msgspec.Meta(max_length=16)] | None = None
    record_wrapper: Literal["None", "RecordIO"] | None = None


Storage = Literal["per_host", "shared", "unknown"]
# By a channel's address. A claim (pvc://) may be either.
_STORAGE_OF_CHANNEL: Mapping[str, Storage] = MappingProxyType(
    {"s3": "per_host", "efs": "shared", "fsx": "shared"}
)


Followed = Literal["sure", "probable"]


class Constraints(Record, frozen=True, kw_only=True):
    """Limits that plans must respect, and what ranks them.

    Attributes:
        objective: What ranks plans: the cost or the time of a step.
        max_usd_per_hour: Maximum price of the whole cluster, in dollars per hour.
        max_usd_per_run: Maximum dollars of one training run, if it ran for `max_run_seconds` of its
            platform.
        max_usd: Maximum dollars of one run, retries included. A plan that is predicted to cost more
            is refused. The leader counts hosts, prices and time, warns at 80%, and at 100% ends
            the training as SIGTERM does, so that it can save.
        deadline_hours: Maximum hours of the whole training; needs `training`.
        max_data_hosts: Maximum number of data hosts; 0: no data group.
        allowed_instance_types: Types that hosts may have, besides today's. None: the whole catalog.
        regions: AWS regions whose prices may be used. None: any.
        prices_file: CSV file of prices, in the catalog's columns, or its text, which pipelines
            get; `{region}` in its path stands for the job's AWS region, and a region without such
            a file has the catalog's prices. `--prices` goes before it.
        follow: Which recommendations are followed unattended. sure: plans whose gain exceeds its
            error band; probable: also a plan that probably gains. None: probable on this machine,
            where a try is free, else sure.
        storage: Read rate of several hosts. per_host: adds up (S3, local copies); shared: one rate
            for all; unknown: planned as shared. None: by platform and channels.
    """

    objective: Literal["cost", "time"] = "cost"
    max_usd_per_hour: PositiveFloat | None = None
    max_usd_per_run: PositiveFloat | None = None
    max_usd: PositiveFloat | None = None
    deadline_hours: PositiveFloat | None = None
    max_data_hosts: NonNegativeInt = 8
    allowed_instance_types: Names | None = None
    regions: Names | None = None
    prices_file: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    follow: Followed | None = None
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
        regex: Pattern of Python with a group for the value, such as accuracy ([0-9.]+), for a
            script that only prints it: the last match in the output of the first dnn host counts,
            line by line, 1,000 characters of each, and 0.25 s of CPU.
    """

    metric: Name
    min: float | None = None
    max: float | None = None
    min_champion: float | None = None
    max_champion: float | None = None
    regex: Annotated[str, msgspec.Meta(min_length=1, max_length=400)] | None = None

    @property
    def needs_champion(self) -> bool:
        return self.min_champion is not None or self.max_champion is not None

    def against(self, champion: float | None) -> "Gate":
        """Returns the gate with its bounds relative to a champion's value made absolute."""
        if champion is None:
            return Gate(metric=self.metric, min=self.min, max=self.max)
        low = []
        high = []
        if self.min is not None:
            low.append(self.min)
        if self.min_champion is not None:
            low.append(champion + self.min_champion)
        if self.max is not None:
            high.append(self.max)
        if self.max_champion is not None:
            high.append(champion + self.max_champion)
        return Gate(metric=self.metric, min=max(low, default=None), max=min(high, default=None))


ReplaceDataLoader = Literal["auto"] | bool


class FeedSettings(Record, frozen=True, kw_only=True):
    """How the feed makes and sends batches.

    Attributes:
        local_workers: Data workers on a dnn host. auto: as the plan says, else the script's
            `num_workers`.
        credits: Batches requested ahead per worker. 1 waits for a round trip per batch; above 2
            nothing is gained. Adapts up to 8 if the cost of batches varies.
        max_bytes: Maximum bytes of waiting batches per host. None: a quarter of its memory.
        accept_pickles: Whether trainers unpickle batches of custom classes. False: an attacker on a
            data host cannot run code in trainers; such batches are errors, and exceptions arrive as
            text.
        seeding: What seeds the random state of a batch. `batch`: epoch and batch number, so that
            any worker makes the same bytes; `sample`: epoch and sample, also with another batch
            size or number of ranks; `torch`: the worker.
        split_batches: Whether several workers may make one batch. auto: the first and last batches
            of an epoch, if they take long enough, a batch with a heavy sample, and a late one, each
            on one host; the first one also on several data hosts, where that is worth it. true: the
            same, of any length. false: one worker makes a batch. The bytes are the same with each.
        balance: Which rank gets which samples of a global batch. cost: as many as before, dealt so
            that all ranks have about the same bytes to train on, where samples differ in length;
            for loaders with workers and a sampler that all ranks can see. None: as the script's
            sampler does.
        on_error: What happens with a sample whose `__getitem__` raises. raise: the training gets
            the error; skip: the batch is one sample shorter; replace: another sample is in its
            place, drawn from its seed and index. The same on any host. A sample that ends its
            process counts, too, where workers make it: with `num_workers=0` from the third batch
            on, but for the first ones of `next(iter(loader))` in a loop. Errors of a host (a full
            disk, a network) and of `collate_fn` are raised in any case.
        max_errors: With `on_error`, how many bad samples of an epoch a rank accepts before the
            training fails, of each loader: below 1 a share of the epoch's samples, from 1 on a
            number of them, and a whole one (1 and 1.0 are one sample; a large number is no limit).
            `on_error: raise` accepts none. It fails as soon as it has more, or where the sampler
            has no length from 100 samples on. More than 1 in 100 is hardly ever a damaged file here
            and there.
        model_parallel_size: Ranks per replica of the model, which get the same batches.
        replicas: Ranks of each replica, if `model_parallel_size` cannot express them.
        lease_seconds: Seconds without a message after which a launcher counts as lost. A process
            that died is noticed within about 11 s; a data host that serves a trainer waits longer
            for a silent leader.
        start_deadline_seconds: Seconds that hosts wait for each other's first message, and a rank
            for a worker that is ready; autoscalers may start a job's hosts minutes apart.
        sample_timeout_seconds: Seconds that a rank waits for a batch since a worker that was ready
            began it, before the training fails and names its samples. With `on_error` other than
            raise: that one sample takes, before its worker is killed and it counts as bad. Not for
            what the script's own process makes (with `num_workers=0` the first two batches), nor
            without data hosts for iterable datasets. None: it waits, and says so after a minute.
        max_dataset_bytes: Maximum size of a pickled dataset. For a larger one use `stoker.remote`.
        unshippable: If a dataset cannot be pickled: error fails the training, local makes its
            batches on the trainer's host. None: local with `num_workers=0` and for PyTorch's own
            loaders with `replace_dataloader: auto`; else error. A run whose data hosts could make
            no batch for it has failed (exit code 6), except with local, written down.
        until_ready: What happens to a loader of PyTorch's own class without workers as long as no
            data host is ready for its dataset. make: the trainer makes its batches, in order, as
            without stoker; wait: it waits after the first two.
        shared_memory: What happens to a loader whose dataset, sampler or collate function holds
            something that processes share in memory (tensors after `share_memory_()`,
            multiprocessing's values, arrays, queues and locks, writable memory maps). auto: it is
            made on the trainer's host, as by PyTorch, so that changes are seen; copy: it is sent
            like everything else, once an epoch, for memory that is only read.
        code_check: If a data host has imported other code than the trainer, of the modules that a
            dataset uses: error makes no batches there, warn only says so.
        replace_dataloader: Whether PyTorch's own loaders are fed. auto: unless the script imports
            stoker's.
        pin: Whether batches lie in pinned memory where the script gives its loader no `pin_memory`,
            so that copies with `non_blocking=True` do not wait. auto: under a data group, once the
            process uses an accelerator; script: only with `pin_memory=True`.
        shards: Shards of an iterable dataset per rank, in place of `num_workers`. Only for datasets
            that split themselves by `get_worker_info()`; others repeat every sample in each shard.
        port: TCP port of coordinator and agents. Port + 1 carries batches, port + 2 is torchrun's
            store.
        metrics_port: TCP port of Prometheus metrics on the first dnn host, at /metrics. Needs
            `stoker[metrics]` in the image.
        metrics_address: IP address of `metrics_port`. None: 127.0.0.1. Metrics are not protected:
            use `0.0.0.0` in a closed network only.
    """

    local_workers: Literal["auto"] | NonNegativeInt = "auto"
    credits: Annotated[int, msgspec.Meta(ge=1, le=64)] = 2
    max_bytes: PositiveInt | None = None
    accept_pickles: bool = True
    seeding: Literal["batch", "sample", "torch"] = "batch"
    split_batches: Literal["auto"] | bool = "auto"
    balance: Literal["cost"] | None = None
    on_error: Literal["raise", "skip", "replace"] = "raise"
    max_errors: PositiveFloat = 0.01
    model_parallel_size: PositiveInt = 1
    replicas: tuple[tuple[NonNegativeInt, ...], ...] | None = None
    lease_seconds: Annotated[float, msgspec.Meta(ge=1)] = 60.0
    start_deadline_seconds: PositiveFloat = 1800.0
    sample_timeout_seconds: PositiveFloat | None = None
    max_dataset_bytes: PositiveInt = 1 << 30
    unshippable: Literal["error", "local"] | None = None
    until_ready: Literal["make", "wait"] = "make"
    shared_memory: Literal["auto", "copy"] = "auto"
    code_check: Literal["error", "warn", "off"] = "error"
    replace_dataloader: ReplaceDataLoader = "auto"
    pin: Literal["auto", "script"] = "auto"
    shards: Annotated[int, msgspec.Meta(ge=1, le=4096)] | None = None
    port: Annotated[int, msgspec.Meta(ge=1024, le=65534)] = 7600
    metrics_port: Annotated[int, msgspec.Meta(ge=1024, le=65535)] | None = None
    metrics_address: Name | None = None

    def __post_init__(self) -> None:
        if self.max_errors > 1 and self.max_errors % 1:
            raise ValueError(
                "`max_errors`: expected a share of the epoch's samples, below 1, or a whole number "
                "of samples"
            )

    @property
    def seeds_by(self) -> Literal["batch", "stretch", "sample", "torch"]:
        """What the random state of a sample follows from."""
        return "stretch" if self.seeding == "batch" else self.seeding

    @property
    def splits(self) -> bool:
        """Whether several workers of a data host may make one batch."""
        return self.seeds_by in SEEDS_EACH and self.split_batches is not False

    @property
    def looks_for_deadly_samples(self) -> bool:
        """Whether samples that end or block their process are found, also without data hosts."""
        return self.on_error != "raise" or self.sample_timeout_seconds is not None

    @property
    def ports(self) -> dict[int, str]:
        """Ports in use on a host, each with the key that sets it."""
        # Coordinator and agents, batches, torchrun's store.
        taken = {self.port + index: "feed.port" for index in range(3)}
        if self.metrics_port:
            taken[self.metrics_port] = "feed.metrics_port"
        return taken

    def replica(self, rank: int) -> int:
        if self.replicas is None:
            return rank // self.model_parallel_size
        for number, ranks in enumerate(self.replicas):
            if rank in ranks:
                return number
        # Beyond the numbers of all listed replicas.
        return len(self.replicas) + rank


class ProfileSettings(Record, frozen=True, kw_only=True):
    """How long a profile may take, and how exact it must be.

    Attributes:
        budget_seconds: Seconds from the first batch to the verdict. Raise it if steps take some
            seconds.
        max_unexplained: Maximum difference between step and sum of its parts, as a share of the
            step; above it nothing is recommended.
        instance_type: Type of the profiled hosts if `cluster` does not name it; `auto` asks the
            cloud's metadata service.
        same_cost: Hyperparameters, and options of the command, that do not change what a step
            costs: a cached profile is used again whatever they are. `_` and `-` are one. None:
            learning rates, weight decay, warm-up, epochs, seeds, names of the run.
    """

    # A day at most: waits on a thread cannot be longer than some years.
    budget_seconds: Annotated[float, msgspec.Meta(ge=5, le=86_400)] = 180.0
    max_unexplained: Fraction = 0.15
    instance_type: Name | None = None
    same_cost: Names | None = None

    @property
    def free_names(self) -> tuple[str, ...]:
        """`same_cost` with its default."""
        if self.same_cost is None:
            return SAME_COST
        return self.same_cost


class TrackingSettings(Record, frozen=True, kw_only=True):
    """Experiment tracking: MLflow and TensorBoard.

    Attributes:
        mlflow: https://HOST of a tracking server, file:FOLDER, sqlite:FILE, or the ARN of
            SageMaker's managed MLflow. Without password, which MLflow reads from its environment
            variables.
        experiment: Experiment of the runs. None: the workload's name.
        secret: Kubernetes: Secret with MLFLOW_TRACKING_TOKEN, or _USERNAME and _PASSWORD, for
            pipelines.
        timeout_seconds: Timeout of MLflow before and after a training run; the run then continues
            without it.
        tensorboard: Whether the script gets a folder for TensorBoard, in STOKER_TENSORBOARD, that
            is kept.
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
        return bool(self.mlflow) and str(self.mlflow).startswith("arn:")

    @property
    def is_local(self) -> bool:
        return bool(self.mlflow) and str(self.mlflow).startswith(("file:", "sqlite:"))


class WatchdogSettings(Record, frozen=True, kw_only=True):
    """What happens if a training run makes no step for long, while its hosts are billed.

    Attributes:
        no_progress_minutes: Minutes without a step, or a growing file of a checkpoint or model; at
            least twice as long before the first step. None: 20 usual steps, or 3 times the longest
            pause so far (checkpoint, evaluation), at least 15.
        then: After the stacks of all ranks are in the log. warn: only a line, an event and the
            webhook; stop: ends the run as failed; restart: ends it with exit code 75, which
            Kubernetes restarts like a lost host (`kubernetes.output`).
    """

    no_progress_minutes: PositiveFloat | None = None
    then: Literal["warn", "stop", "restart"] = "warn"


class NotifySettings(Record, frozen=True, kw_only=True):
    """Webhook that is called when a run ends or hangs. Its address is a secret and is in no file.

    Attributes:
        on: failure: failed runs, models below their gate, and warnings such as data hosts that did
            nothing; always: all runs.
        format: text: JSON with `text`, as Slack takes it, and the facts; teams: a card for
            Microsoft Teams.
        variable: Environment variable with the webhook's address.
        secret: Kubernetes: Secret whose key `url` is the address, for pipelines on Kubeflow.
        secret_arn: SageMaker: ARN of a Secrets Manager secret with the address, for pipelines.
        timeout_seconds: Timeout of each of three attempts; the run then ends without it.
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
    """Returns the keys that apply to what is made from a profile: elsewhere, none of its hosts."""
    if keys is None or not is_elsewhere:
        if keys:
            return {**keys}
        return None
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

    Only keys that both have are compared: a bare command names no cluster. A record without digest
    and keys is accepted.

    Args:
        where: The file or option that names the record.
        fix: What to do; empty: make the record again.

    Raises:
        UsageError: With each key that differs, and both values.
    """
    # An equal digest wins over the command's text, which hosts write with its arguments.
    keys = keys or {}
    is_same = digest in (None, workload.digest())
    # Of profile and decision only: with another learning rate it is another training run.
    is_same = is_same or (kind != "training" and _costs_the_same(keys, workload))
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
            fix=fix or f"use this workload's {kind}, or make it: stoker {_VERBS[kind]}",
        )


def branch_name(branch: str, *, most: int) -> str:
    """Returns a branch as a part of names; a digest ends it where it cannot stand as it is."""
    plain = re.sub(r"[^a-z0-9]+", "-", branch.lower()).strip("-")
    if plain == branch and len(plain) <= most:
        return plain
    digest = hashlib.sha256(branch.encode()).hexdigest()[:_BRANCH_DIGEST]
    return f"{plain[: max(most - _BRANCH_DIGEST - 1, 0)].rstrip('-')}-{digest}".strip("-")


def _costs_the_same(keys: Mapping[str, str], workload: "Workload") -> bool:
    """Whether a record's command differs only in options that leave a step's cost as it is."""
    wanted_keys = workload.profile_keys()
    names = workload.profile.free_names
    if (
        any(keys.get(key) != wanted_keys[key] for key in ("strategy", "engine"))
        or "command" not in keys
    ):
        return False
    theirs, _ = split_command(shlex.split(keys["command"]), names)
    kept, _ = split_command(workload.command, names)
    return [*map(undated_word, theirs)] == [*map(undated_word, kept)]


def _short_id(run_id: str) -> str:
    return run_id[:_ID_CHARACTERS].lower().strip("-")


def is_run_of(name: str, run_id: str) -> bool:
    """Returns whether `Workload.run_name` gives this name for a pipeline's run."""
    return bool(_short_id(run_id)) and name.endswith(f"-{_short_id(run_id)}")


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
        options: What the script says about them, as `stoker init --script` reads it: type, help,
            choices.
        constraints: Limits that plans must respect, and what ranks them.
        training: Length of the training; needed for a plan's total time and cost.
        gate: Bounds on reported metrics; all must hold.
        feed: How batches reach the trainer.
        strategy: How the processes of the dnn group start: a name, or settings with a name.
        engine: Program that makes data on the data group: a name, or settings with a name.
        profile: How a profile is measured.
        tracking: Experiment tracking besides stoker's own records.
        notify: Webhook for the end of runs.
        watchdog: What happens if a training run makes no step for long.
        skip_unchanged: Whether `stoker run` on this machine ends at once, with exit code 0, if its
            code, workload, packages and the files of its channels are those of the last run that
            passed. A pipeline then ends after its first step (on Kubeflow it needs
            kubernetes.memory).
        not_numbers: In documents that stoker wrote: hyperparameters that are NaN, Infinity or
            -Infinity, which are null there, by their path.
    """

    takes_any_float: ClassVar[tuple[str, ...]] = ("hyperparameters",)

    schema: Literal["stoker.workload/v1"] = "stoker.workload/v1"
    name: Annotated[str, msgspec.Meta(pattern="^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")]
    command: Command
    image: ImageName | None = None
    platform: PlatformName = "local"
    cluster: Cluster | None = None
    channels: dict[Name, Channel] = {}
    hyperparameters: Hyperparameters = {}
    options: dict[HyperparameterName, ScriptOption] = {}
    environment: dict[Name, str] = {}
    secrets: dict[Name, SecretArn | SecretSource] = {}
    constraints: Constraints = Constraints()
    training: TrainingSize = TrainingSize()
    gate: tuple[Gate, ...] = ()
    feed: FeedSettings = FeedSettings()
    strategy: StrategyName | StrategySettings = "auto"
    engine: EngineName | EngineSettings = "feed"
    profile: ProfileSettings = ProfileSettings()
    tracking: TrackingSettings = TrackingSettings()
    notify: NotifySettings | None = None
    watchdog: WatchdogSettings = WatchdogSettings()
    skip_unchanged: bool = False
    not_numbers: dict[str, str] | None = None

    @property
    def metric_patterns(self) -> dict[str, str]:
        """The patterns of the gates' metrics that the script only prints."""
        return {gate.metric: gate.regex for gate in self.gate if gate.regex is not None}

    @property
    def platform_info(self) -> PlatformInfo:
        return PLATFORM_INFOS[self.platform]

    @property
    def strategy_settings(self) -> StrategySettings:
        if isinstance(self.strategy, StrategySettings):
            return self.strategy
        return StrategySettings(name=self.strategy)

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

        The storage is filled in, and max_usd_per_run is also a limit of dollars per hour.
        """
        constraints = msgspec.structs.replace(
            self.constraints, storage=self._storage(), prices_file=None
        )
        if constraints.max_usd_per_run is None or self.max_run_seconds is None:
            return constraints
        most = constraints.max_usd_per_run / (self.max_run_seconds / 3600)
        return msgspec.structs.replace(
            constraints, max_usd_per_hour=min(most, constraints.max_usd_per_hour or most)
        )

    @property
    def named_region(self) -> str | None:
        """AWS region of SageMaker's jobs, by the settings or the image; None: not said."""
        if self.sagemaker and self.sagemaker.region:
            return self.sagemaker.region
        # A training job's image is in the job's region.
        registry = _REGISTRY.match(self.image or "")
        if registry:
            return registry["region"]
        return None

    def _storage(self) -> Storage:
        if self.constraints.storage is not None:
            return self.constraints.storage
        kinds: set[Storage] = {
            _STORAGE_OF_CHANNEL.get(channel.uri.partition("://")[0], "unknown")
            for channel in self.channels.values()
        }
        if self.platform_info.is_this_machine:
            kinds = {"shared"}
        # Unknown if channels are of both kinds, or none is named as the data: the script may read
        # that from a shared disk.
        is_data = kinds != {"per_host"} or bool({"train", "training"} & self.channels.keys())
        if len(kinds) == 1 and is_data:
            return kinds.pop()
        return "unknown"

    def run_name(self, run_id: str, *, branch: str = "") -> str:
        """Returns the job's name for a pipeline's run: the same on a retry, else another one.

        Args:
            run_id: Id of the pipeline's run.
            branch: Which of the run's training jobs it is; empty: its only one.
        """
        short = _short_id(run_id)
        room = _MAX_RUN_NAME - len(f"{self.name}--{short}-profile")
        if not branch:
            return f"{self.name}-{short}"
        return f"{self.name}-{branch_name(branch, most=min(room, _MAX_BRANCH))}-{short}"

    def digest(self) -> str:
        """Returns the digest of command, strategy and engine: 64 hexadecimal digits.

        Name, gate, constraints, settings and data do not change it. The cluster is compared by
        `profile_keys`.
        """
        return sha256_of(
            {
                "command": self.command,
                "strategy": self.strategy_settings.name,
                "engine": self.engine_settings.name,
            }
        )

    def profile_keys(self, *, today: TodaysGroup | None = None) -> dict[str, str]:
        """Returns `workload_keys` of the measured hosts, by default of `cluster`."""
        return workload_keys(
            command=self.command,
            strategy=self.strategy_settings.name,
            engine=self.engine_settings.name,
            today=today or (self.cluster.dnn if self.cluster else None),
        )
