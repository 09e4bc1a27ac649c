"""Records of a run: `training.json` (what it did) and its evaluation.

training.json is written only here, by two processes: the leader's launcher, inside the job, and the
process that submitted the job, which adds to the leader's record how the platform saw the job end.
Others return facts; `training_record` says why each field has its value.
"""

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

import msgspec

from stoker.failure_reasons import cause_of, said_in, without_events
from stoker.records.base import (
    AnyFloat,
    Document,
    Fraction,
    Name,
    Names,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Record,
    sha256_of,
    write_json,
)
from stoker.records.decision import Action, Group
from stoker.records.epochs import EpochTimes
from stoker.records.gpu import GpuLoads
from stoker.records.hyperparameters import Hyperparameters, record_of, shown, values_of
from stoker.records.other_programs import OTHERS, is_beyond_telling
from stoker.records.profile import NEAR_LIMIT, Spread
from stoker.records.workload import Gate
from stoker.units import numbered, usd, vcpus_words, wait_share, whole

# Of a run's folder, for its report.
FILES_BESIDE = ("feed.csv", "gpu.csv", "bad_samples.csv")

# Of a host's memory: the kernel moves less than that out also where nothing is short.
_MUCH_SWAPPED = 0.02
# First event of the leader's record.
STARTED = "training started"
# Fields to which the leader's record contributes.
_OF_LEADER = (
    "status",
    "exit_code",
    "failure",
    "hosts",
    "strategy",
    "engine",
    "hyperparameters",
    "measured",
    "others",
    "memory",
    "gpus",
    "metrics",
    "steps",
    "is_unfed",
    "bad_samples",
    "balance",
    "data_group_release_seconds",
    "events",
)
# How the command of a run ended.
EndState = Literal["succeeded", "failed", "stopped"]
# Start of the event of a run whose times mean nothing for other runs.
NOT_COMPARABLE = "not comparable"
# What is said of times that other programs disturbed.
BUSY = "the machine was busy with other programs: the figures do not count"
# Of a run whose data hosts gave it nothing, though it may have succeeded.
UNHELPED = "no batch came from its data hosts"
# A group that made a smaller share of the batches makes no run 1.05 times as fast.
LEAST_HELP = 0.05


class Host(Record, frozen=True, kw_only=True):
    """A host of the run.

    Attributes:
        host: Name of the host.
        group: Name of its group.
        rank: Rank of its first trainer process. None on data hosts.
    """

    host: Name
    group: Name
    rank: NonNegativeInt | None = None


class Budget(Record, frozen=True, kw_only=True):
    """What a run may cost, and the prices by which its leader counts.

    Attributes:
        usd_per_hour: Price of one host, in dollars per hour, by group; without those that are not
            known or not billed.
        max_usd: Limit of the run (constraints.max_usd).
        predicted_usd: Dollars that the decision predicted.
        estimated: Groups whose price is an estimate.
    """

    usd_per_hour: dict[Name, NonNegativeFloat] = {}
    max_usd: PositiveFloat | None = None
    predicted_usd: NonNegativeFloat | None = None
    estimated: Names = ()

    def total_usd_per_hour(self, groups: Sequence[Group]) -> float | None:
        """Returns the price of all hosts; None if one is not known."""
        if not groups or any(group.name not in self.usd_per_hour for group in groups):
            return None
        return sum(self.usd_per_hour[group.name] * group.count for group in groups)


class GroupSpending(Record, frozen=True, kw_only=True):
    """Dollars of a group's hosts.

    Attributes:
        group: Name of the group.
        usd: Dollars. None: its price is not known, or not billed.
        idle_share: Share of its time without work, 0 to 1: a dnn host waits for data, a data host's
            workers have no batch to make. None: not measured.
        idle_usd: Dollars of that time.
        batches: Batches of the training that a data group made. None: not counted, or a dnn group.
        all_batches: Batches that the training took, wherever they were made. None: not counted.
    """

    group: Name
    usd: NonNegativeFloat | None = None
    idle_share: Fraction | None = None
    idle_usd: NonNegativeFloat | None = None
    batches: NonNegativeInt | None = None
    all_batches: NonNegativeInt | None = None

    @property
    def is_of_no_use(self) -> bool:
        """Whether it made so few of the batches that it cannot have helped."""
        if self.batches is None or not self.all_batches:
            return False
        return self.batches < LEAST_HELP * self.all_batches

    @property
    def made_words(self) -> str:
        """What it made and cost: `the data group made 0 of 1,240 batches, $3.10`."""
        name = "data group"
        if self.group != "data":
            name += f" {self.group}"
        all_batches = numbered(self.all_batches or 0, "batch", "batches")
        words = f"the {name} made {whole(self.batches or 0)} of {all_batches}"
        if self.usd is None:
            return words
        return f"{words}, {usd(self.usd)}"


class OtherPrograms(Record, frozen=True, kw_only=True):
    """What other programs used of a host's vCPUs, in the busiest quarter of its time.

    Attributes:
        host: Name of the host.
        vcpus: vCPUs that the host's processes may use.
        others_vcpus: Of these, vCPUs that other programs kept busy.
    """

    host: Name
    vcpus: PositiveFloat
    others_vcpus: NonNegativeFloat

    @property
    def share_words(self) -> str:
        """`0.8 of the 1 vCPU of algo-1`."""
        used = min(self.others_vcpus, self.vcpus)
        return f"{used:.1f} of the {vcpus_words(self.vcpus)} of {self.host}"


class HostMemory(Record, frozen=True, kw_only=True):
    """Memory of a host of the run.

    Attributes:
        host: Name of the host.
        limit_bytes: The limit that it came nearest to: a control group's, or the machine's memory.
        peak_bytes: Highest use of it, without files that the kernel can drop; looked at once a
            second.
        limited_by: Whose limit it is.
        ours_bytes: What the run's processes held of it when memory was short. None: it was not.
        swapped_bytes: Most that was swapped out of the run's processes.
        least_share: The least share of `feed.max_bytes` that could wait; below 1, fewer batches
            waited so that no process was killed.
        kills: Processes of the host that the kernel killed for memory.
    """

    host: Name
    limit_bytes: PositiveInt
    peak_bytes: NonNegativeInt
    limited_by: Literal["cgroup", "machine"]
    ours_bytes: NonNegativeInt | None = None
    swapped_bytes: NonNegativeInt = 0
    least_share: Fraction = 1.0
    kills: NonNegativeInt = 0

    @property
    def share(self) -> float:
        """Share of the limit that was in use at most."""
        return self.peak_bytes / self.limit_bytes

    @property
    def is_short(self) -> bool:
        """Whether memory was short, or what waits was lowered for it."""
        is_felt = self.kills or self.is_swapping or self.least_share < 1
        return bool(is_felt) or self.share >= NEAR_LIMIT

    @property
    def is_swapping(self) -> bool:
        """Whether more was swapped out than the pages of idle processes, which cost nothing."""
        return self.swapped_bytes >= _MUCH_SWAPPED * self.limit_bytes

    @property
    def others_bytes(self) -> int:
        """What others than the run held, with files in /dev/shm; 0: it is not known."""
        if self.ours_bytes is None:
            return 0
        return max(0, self.peak_bytes - self.ours_bytes)


class BalancedLoader(Record, frozen=True, kw_only=True):
    """How the samples of a loader were dealt to the ranks by cost (`feed.balance`).

    Attributes:
        loader: The script's line that made it.
        steps: Steps whose samples were dealt; 0: none.
        drawn_excess: How much more than the mean of all ranks the rank with the most had in these
            steps, by the bytes of its samples, as they were drawn; 0.1 is a tenth.
        dealt_excess: The same, as they were dealt.
        too_long_steps: Steps in which one sample alone was more than that mean.
        why_not: Why the samples were not dealt, or not in an epoch; empty: they were.
    """

    loader: str
    steps: NonNegativeInt = 0
    drawn_excess: NonNegativeFloat = 0.0
    dealt_excess: NonNegativeFloat = 0.0
    too_long_steps: NonNegativeInt = 0
    why_not: str = ""


class InputVersion(Record, frozen=True, kw_only=True):
    """Data that a run read.

    Attributes:
        address: Where it is: in S3, a folder, or a claim (pvc://).
        version: Digest of a listing when the run began. S3: names and entity tags; a folder: names,
            sizes and times. None: not known.
        claim_uid: UID of the claim that it is in.
    """

    address: str
    version: str | None = None
    claim_uid: str | None = None

    @property
    def words(self) -> str:
        """All that is known, as text."""
        uid = self.claim_uid and f"claim {self.claim_uid}"
        return " ".join(word for word in (self.address, self.version, uid) if word)

    def joined(self, later: "InputVersion") -> "InputVersion":
        return InputVersion(
            address=later.address,
            version=later.version or self.version,
            claim_uid=later.claim_uid or self.claim_uid,
        )


class Lineage(Record, frozen=True, kw_only=True):
    """What a run was made of. None, or empty: not known.

    Attributes:
        job_id: The platform's own id of the job: ARN, or UID.
        image: Address of the image.
        image_digest: Digest of the image that ran.
        git: Commit of the folder in which the command was typed.
        git_dirty: Whether tracked files there differed from it.
        code: Digest of the packed code, or address and version of its archive.
        inputs: Data of each channel.
        workload_sha256: Digest of the whole workload.
        profile_sha256: Digest of profile.json.
        decision_sha256: Digest of decision.json.
        seeds: Hyperparameters with `seed` in their name.
        python: Version of the leader's Python.
        packages: Versions of its distributions.
    """

    job_id: str | None = None
    image: str | None = None
    image_digest: str | None = None
    git: str | None = None
    git_dirty: bool = False
    code: str | None = None
    inputs: dict[Name, InputVersion] = {}
    workload_sha256: str | None = None
    profile_sha256: str | None = None
    decision_sha256: str | None = None
    seeds: Hyperparameters = {}
    python: str | None = None
    packages: dict[str, str] = {}

    def joined(self, *others: "Lineage") -> "Lineage":
        """Returns all that is known; a later one counts before an earlier one."""
        fields = _fields(self)
        inputs = dict(self.inputs)
        for other in others:
            for name, value in _fields(other).items():
                if isinstance(value, dict):
                    value = {**fields[name], **value}  # type: ignore[dict-item]
                fields[name] = value or fields[name]
            for name, version in other.inputs.items():
                inputs[name] = inputs.get(name, version).joined(version)
        return msgspec.structs.replace(self, **{**fields, "inputs": inputs})

    def facts(self) -> dict[str, str]:
        """Returns the known facts by name, as texts; of the packages their digest and number."""
        facts = {
            name: str(value).lower() if value is True else str(value)
            for name, value in _fields(self).items()
            if value and not isinstance(value, dict)
        }
        for name, version in self.inputs.items():
            facts[f"input_{name}"] = version.words
        seeds = values_of(self.seeds)
        facts |= {f"seed_{name}": shown(value) for name, value in seeds.items()}
        if self.packages:
            digest = sha256_of(dict(sorted(self.packages.items())))[:16]
            facts["packages"] = f"sha256:{digest} of {len(self.packages)}"
        return facts

    def _all_facts(self) -> dict[str, str]:
        versions = {f"package {name}": version for name, version in self.packages.items()}
        return {**self.facts(), **versions}

    def differences(self, other: "Lineage") -> list[tuple[str, str, str]]:
        """Returns name, value here and value there of all that differs; packages one by one."""
        here = self._all_facts()
        there = other._all_facts()
        # Each run has another job.
        names = sorted((here.keys() | there.keys()) - {"job_id", "packages"})
        return [
            (name, here.get(name, ""), there.get(name, ""))
            for name in names
            if here.get(name) != there.get(name)
        ]


def _fields(record: Lineage) -> dict[str, object]:
    return {name: getattr(record, name) for name in record.__struct_fields__}


class LoaderCounts(Record, frozen=True, kw_only=True):
    """Loaders of a training run: those whose steps are measured, and all.

    A line of the script that makes a loader again over the same dataset makes one loader.

    Attributes:
        measured: Whose steps the figures are of: the one that gave most batches, or all.
        all: That gave batches.
        share: Share of all batches that the measured ones gave.
        made_here: Made where the script runs, as each lives too short for a data host.
    """

    measured: NonNegativeInt
    all: NonNegativeInt
    share: NonNegativeFloat
    made_here: NonNegativeInt = 0


class Measured(Record, frozen=True, kw_only=True):
    """Measured steps, without the first ones of epochs, of the loader that dominates, or of all.

    Times are of the rank that waits longest. They are medians over means of blocks of 20 steps: a
    median of single steps would miss the wait that ends a burst of batches. A spread's samples are
    blocks.

    Attributes:
        step_seconds: Step, in seconds of wall clock.
        wait_seconds: Wait for the batch, in seconds per step.
        compute_seconds: Step without its wait, in seconds.
        whole_step_seconds: Seconds of whole epochs over their steps: from the third step of the run
            to its last, with the starts of epochs and what lies between them. None: not known.
        whole_wait_seconds: Of `whole_step_seconds`, those that wait for data. None: not known.
        epochs: What `whole_step_seconds` has beyond `step_seconds`. None: not known.
        samples_per_second: Samples of all ranks over the time of whole epochs.
        steps: Steps that were measured.
        usd_per_1000_steps: Cost of 1,000 steps, in dollars. None: a price is not known, or not
            billed.
        spread: Spread of the fields above, by name.
        rank: The rank that waits longest.
        least_wait_share: Share of a step that the rank with the shortest wait waits.
        timeline_file: CSV of the steps of that rank, else of the leader's rank that waits longest.
        loaders: Which loaders' steps these are. None: not known.
    """

    step_seconds: NonNegativeFloat
    wait_seconds: NonNegativeFloat
    compute_seconds: NonNegativeFloat
    samples_per_second: NonNegativeFloat
    steps: NonNegativeInt
    usd_per_1000_steps: NonNegativeFloat | None = None
    spread: dict[str, Spread] = {}
    rank: NonNegativeInt = 0
    least_wait_share: NonNegativeFloat | None = None
    timeline_file: str | None = None
    whole_step_seconds: NonNegativeFloat | None = None
    whole_wait_seconds: NonNegativeFloat | None = None
    epochs: EpochTimes | None = None
    loaders: LoaderCounts | None = None

    @property
    def counted_seconds(self) -> float:
        """Seconds of a step that time and money are counted by: of whole epochs, if known."""
        return self.whole_step_seconds or self.step_seconds

    @property
    def wait_share(self) -> float:
        """Share of a step that waits for data."""
        return wait_share(step_seconds=self.step_seconds, wait_seconds=self.wait_seconds)


class Job(Record, frozen=True, kw_only=True):
    """The run in its platform's terms.

    Attributes:
        platform: Name of the platform.
        name: Name of the job there.
        url: Page of the job in the platform's console.
    """

    platform: Name
    name: Name
    url: str | None = None


class Event(Record, frozen=True, kw_only=True):
    """Something that happened in the run.

    Attributes:
        when: Time in UTC, ISO 8601.
        what: Text of the event.
        host: Host that it happened to.
    """

    when: str
    what: str
    host: str | None = None


class Training(Record, frozen=True, kw_only=True):
    """Where a run ran, how it ended, and what was measured.

    Attributes:
        schema: Version of the file format.
        workload_sha256: Digest of command, strategy and engine. None: the run had no workload.
        workload_keys: These keys with their values.
        status: succeeded: exit code 0; failed: another one, or a host was lost; stopped: by a
            signal.
        exit_code: Exit code of the training command.
        decision_id: First digits of the digest of its decision.
        groups: Instance groups as requested.
        hosts: Hosts that took part.
        strategy: How the trainer processes were started.
        engine: What made data on the data group.
        hyperparameters: Values that the command got.
        measured: Measured steps. None: no step was timed.
        others: What other programs used of the hosts during that time. Empty: it was not measured.
        memory: Memory of each host. Empty: it was not looked at.
        gpus: Load of each GPU of the dnn hosts. Empty: there is none, or it was not read.
        metrics: Last reported value of each metric.
        model_uri: Location of the saved model.
        model_copy_uri: Where a pipeline's later step registers the model, if that is a copy: of a
            job that was retried, and so has another name.
        job: The run in its platform's terms.
        data_group_release_seconds: Seconds from the end of the training to the last data host's
            end.
        events: What happened, in order of time.
        failure: What failed, as its source reported it (a traceback, a lost host).
        mlflow_run_id: Run of MLflow.
        steps: Batches of `measured.loaders`, else the optimizer's steps. None: not counted.
        lineage: What the run was made of.
        predicted_usd: Dollars that the decision predicted for the whole run, with its start.
        spent_usd: Dollars of the run: the catalog's prices times the time that the platform reports
            of its hosts, else the time of the leader. None: a price is not known, or not billed.
        is_estimate: Whether the dollars come from an estimated price.
        spending: Dollars of each group, and of its idle time.
        is_unfed: Whether data hosts were planned, and no batch came from them, as none could. The
            run has failed for it, unless `feed.unshippable: local` wants it made on the trainer's
            host.
        bad_samples: Samples that were skipped or replaced, by `feed.on_error`; listed in
            `bad_samples.csv` beside the record.
        balance: Loaders that `feed.balance` was asked for.
        unfetched: Address of the leader's outputs if they could not be read: what was measured is
            not known. `stoker evaluate` reads them again.
        not_numbers: Metrics and hyperparameters that are NaN, Infinity or -Infinity, and null
            here because JSON lacks them, by their path, such as metrics.loss.
    """

    takes_any_float: ClassVar[tuple[str, ...]] = ("hyperparameters", "metrics", "lineage")

    schema: Literal["stoker.training/v1"] = "stoker.training/v1"
    workload_sha256: str | None = None
    workload_keys: dict[str, str] | None = None
    status: EndState
    exit_code: int | None = None
    decision_id: str | None = None
    groups: tuple[Group, ...]
    hosts: tuple[Host, ...] = ()
    strategy: str = "auto"
    engine: str = "feed"
    hyperparameters: Hyperparameters = {}
    measured: Measured | None = None
    others: tuple[OtherPrograms, ...] = ()
    memory: tuple[HostMemory, ...] = ()
    gpus: GpuLoads = ()
    metrics: dict[str, AnyFloat] = {}
    model_uri: str | None = None
    model_copy_uri: str | None = None
    job: Job
    data_group_release_seconds: NonNegativeFloat | None = None
    events: tuple[Event, ...] = ()
    failure: str | None = None
    mlflow_run_id: str | None = None
    steps: NonNegativeInt | None = None
    lineage: Lineage = Lineage()
    predicted_usd: NonNegativeFloat | None = None
    spent_usd: NonNegativeFloat | None = None
    is_estimate: bool = False
    spending: tuple[GroupSpending, ...] = ()
    is_unfed: bool = False
    bad_samples: NonNegativeInt = 0
    balance: tuple[BalancedLoader, ...] = ()
    unfetched: str | None = None
    not_numbers: dict[str, str] | None = None

    @property
    def is_unknown(self) -> bool:
        """Whether the run succeeded, and its metrics could not be read."""
        return self.status == "succeeded" and self.unfetched is not None

    @property
    def num_steps(self) -> int | None:
        """Steps that were counted; None: not known."""
        if self.steps is None and self.measured:
            return self.measured.steps
        return self.steps

    @property
    def busy(self) -> str:
        """Which programs make the run's times meaningless, by the profile's rule; empty: none."""
        if any(event.what.startswith(NOT_COMPARABLE) for event in self.events):
            # The run's own hosts share cores, which is said.
            return ""
        busy = [
            programs.share_words
            for programs in self.others
            if is_beyond_telling(programs.others_vcpus, vcpus=programs.vcpus)
        ]
        return f"{OTHERS} {', '.join(busy)}" if busy else ""

    @property
    def useless_groups(self) -> tuple[GroupSpending, ...]:
        """Data groups that made next to no batch."""
        return tuple(group for group in self.spending if group.is_of_no_use)

    @property
    def is_helped(self) -> bool | None:
        """Whether data hosts can have changed its step; None: it had none, or it is not known."""
        if self.is_unfed:
            return False
        counted = [group for group in self.spending if group.batches is not None]
        if not counted:
            return None
        return len(self.useless_groups) < len(counted)

    @property
    def dollars(self) -> dict[str, float]:
        """Predicted, spent and idle dollars of the run by name, if known."""
        dollars: dict[str, float] = {}
        if self.predicted_usd is not None:
            dollars["predicted_usd"] = self.predicted_usd
        if self.spent_usd is not None:
            dollars["spent_usd"] = self.spent_usd
        idle = [group.idle_usd for group in self.spending if group.idle_usd is not None]
        if idle:
            dollars["idle_usd"] = sum(idle)
        return dollars

    @property
    def cause(self) -> str:
        """The line of the failure that names its cause, fit for a terminal."""
        if self.status == "stopped" and not self.failure:
            return "it was ended before it was done"
        return cause_of(self.failure or "")

    def is_of_same_training(self, other: "Training") -> bool:
        """Returns whether both record one training run; following it again changes other events."""
        began = [event.when for event in self.events if event.what == STARTED]
        others = [event.when for event in other.events if event.what == STARTED]
        same_job = (self.job.platform, self.job.name) == (other.job.platform, other.job.name)
        return self == other or (same_job and began == others and bool(began))


class GateResult(Gate, frozen=True, kw_only=True):
    """Result of a gate.

    Attributes:
        metric: Name of the metric.
        value: Reported value. None: not reported, and the gate fails; so does one that is NaN or
            infinite.
        min: Minimum, the stricter of the gate's own and the one relative to the champion.
        max: Maximum, in the same way.
        min_champion: The gate's minimum relative to the champion.
        max_champion: The gate's maximum relative to the champion.
        champion: The champion's value, if the gate needs it and the champion reported it.
        passed: Whether the gate passed.
    """

    value: AnyFloat | None = None
    champion: float | None = None
    passed: bool

    @property
    def is_inside(self) -> bool:
        """Whether the value is within min and max; the gate may need a champion's value, too."""
        return (
            self.value is not None
            and math.isfinite(self.value)
            and (self.min is None or self.value >= self.min)
            and (self.max is None or self.value <= self.max)
        )


class StepCost(Record, frozen=True, kw_only=True):
    """Time and cost of a step.

    Attributes:
        step_seconds: Step, in seconds of wall clock.
        whole_step_seconds: Seconds of whole epochs over their steps. None: not known of all that
            are compared; then the step is.
        usd_per_1000_steps: Cost of 1,000 steps, in dollars. None: a price is not known, or not
            billed.
        cpu_seconds: vCPUs of all hosts times the step.
        accelerator_seconds: Accelerators of all hosts times the step.
        gpu_utilization: Busy share of the GPUs in use, 0 to 1.
        is_estimate: Whether the dollars come from an estimated price.
    """

    step_seconds: NonNegativeFloat
    whole_step_seconds: NonNegativeFloat | None = None
    usd_per_1000_steps: NonNegativeFloat | None = None
    cpu_seconds: NonNegativeFloat | None = None
    accelerator_seconds: NonNegativeFloat | None = None
    gpu_utilization: Fraction | None = None
    is_estimate: bool = False

    @property
    def counted_seconds(self) -> float:
        """Seconds of a step that are compared: of whole epochs, if known of all."""
        return self.whole_step_seconds or self.step_seconds


class Band(Record, frozen=True, kw_only=True):
    """Error band of the predicted step: of whole epochs, if they are compared.

    Attributes:
        low_seconds: Shortest step, in seconds.
        high_seconds: Longest step, in seconds.
    """

    low_seconds: NonNegativeFloat
    high_seconds: NonNegativeFloat

    def holds(self, step_seconds: float) -> bool:
        return self.low_seconds <= step_seconds <= self.high_seconds


class Performance(Record, frozen=True, kw_only=True):
    """Measured step against the profiled and the predicted one.

    They are compared by whole epochs, where all three are known; a pause that the profile did not
    see then is as in the run.

    Attributes:
        action: What the run's hosts change about the profiled ones. None: they are of no plan.
        baseline: The profiled step.
        predicted: The step that the decision predicted. None: the run had no decision.
        measured: The step of the run.
        prediction_error: Measured over predicted step, minus 1: 0.1 is 10% longer than predicted.
        band: Error band of the predicted step.
        is_inside_band: Whether the measured step is in the band.
        speedup: Baseline over measured step: 2 is twice as fast.
        cost_change: Measured cost over the baseline's, minus 1: -0.2 is 20% cheaper.
        busy: Why these figures do not count: other programs used the hosts. Empty: they did not.
        is_helped: False: the data hosts made next to no batch, so that these figures are no effect
            of theirs. None: there were none, or it is not known.
    """

    action: Action | None = None
    baseline: StepCost
    predicted: StepCost | None = None
    measured: StepCost
    prediction_error: float | None = None
    band: Band | None = None
    is_inside_band: bool | None = None
    speedup: PositiveFloat
    cost_change: float | None = None
    busy: str = ""
    is_helped: bool | None = None


NoticeKind = Literal[
    "prediction_outside",
    "data_group_idle",
    "decision_changed",
    "prices_stale",
    "profile_old",
    "approval_pending",
]


class Notice(Record, frozen=True, kw_only=True):
    """Something a person should know about a run that may have passed.

    Attributes:
        kind: What it is about; a metric of this name is 1 in such a run.
        text: The words that terminal, webhook, summary and report have in common.
    """

    kind: NoticeKind
    text: str


class Evaluation(Record, frozen=True, kw_only=True):
    """Whether a training run passed its gates, and whether its prediction held.

    Attributes:
        schema: Version of the file format.
        workload_sha256: Digest of command, strategy and engine. None: the run had no workload.
        passed: Whether the training succeeded, did a step, and passed all gates.
        reason: Why it did not pass; empty if it did.
        gates: Result of each gate.
        warnings: What went wrong though the run may have passed, such as hosts that did nothing.
        notices: The warnings with their kinds; empty in a record of an early version.
        performance: Measured step against the profiled and the predicted one. None: one is missing.
        metrics: Reported metrics; a later model is compared with these.
        model_uri: Location of the model.
        not_numbers: Metrics and values of gates that are NaN, Infinity or -Infinity, and null here
            because JSON lacks them, by their path, such as gates[0].value.
    """

    takes_any_float: ClassVar[tuple[str, ...]] = ("metrics", "gates")

    schema: Literal["stoker.evaluation/v1"] = "stoker.evaluation/v1"
    workload_sha256: str | None = None
    passed: bool
    reason: str = ""
    metrics: dict[str, AnyFloat] = {}
    model_uri: str | None = None
    gates: tuple[GateResult, ...] = ()
    warnings: tuple[str, ...] = ()
    notices: tuple[Notice, ...] = ()
    performance: Performance | None = None
    not_numbers: dict[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFacts:
    """Facts that one process knows of a run that ended.

    Attributes:
        leader: Record of the leader's launcher; None in that launcher, or if there is none.
        is_interrupted: Whether the user stopped the run here, so that nothing counts as failed.
        last_words: Last lines of the dnn group's log.
        events: Only those that are not in the leader's record.
        budget: Without prices where nothing is billed.
        host_seconds: Time of all hosts of each group that the platform reports.
        spending: As the leader counted it.
    """

    job: Job
    status: EndState
    groups: tuple[Group, ...]
    leader: Training | None = None
    is_interrupted: bool = False
    exit_code: int | None = None
    failure: str | None = None
    last_words: tuple[str, ...] = ()
    hosts: tuple[Host, ...] = ()
    strategy: str = "auto"
    engine: str = "feed"
    hyperparameters: Document = field(default_factory=dict)
    measured: Measured | None = None
    others: tuple[OtherPrograms, ...] = ()
    memory: tuple[HostMemory, ...] = ()
    gpus: GpuLoads = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    release_seconds: float | None = None
    lineage: Lineage = field(default_factory=Lineage)
    budget: Budget = field(default_factory=Budget)
    host_seconds: Mapping[str, float] = field(default_factory=dict)
    spending: tuple[GroupSpending, ...] = ()
    timeline_file: str | None = None
    workload_sha256: str | None = None
    workload_keys: dict[str, str] | None = None
    decision_id: str | None = None
    model_uri: str | None = None
    model_copy_uri: str | None = None
    mlflow_run_id: str | None = None
    steps: int | None = None
    is_unfed: bool = False
    bad_samples: int = 0
    balance: tuple[BalancedLoader, ...] = ()
    unfetched: str | None = None


def training_record(facts: TrainingFacts) -> Training:
    leader = facts.leader
    # Only the leader's launcher sees these; without its record, what was requested has to do.
    inside = leader or facts
    given = facts.hyperparameters
    lineage = facts.lineage
    # The platform's: it sees what the leader cannot record, such as the leader's death.
    status = facts.status
    exit_code = facts.exit_code
    release = facts.release_seconds
    if leader:
        given = values_of(leader.hyperparameters)
        lineage = leader.lineage.joined(lineage)
        # The leader knows the training command's own code, a platform often only the host's.
        if leader.exit_code is not None:
            exit_code = leader.exit_code
        # Hosts announce to the leader that they leave, before the platform sees them end.
        if release is None:
            release = leader.data_group_release_seconds
        # Hosts of a run that is unfed or ended by a rule end with 0, so that no platform restarts
        # them.
        if status == "succeeded" and (leader.status, leader.exit_code) == ("failed", 0):
            status = "failed"
    if facts.is_interrupted:
        status = "stopped"
    spending = _spending(facts)
    return Training(
        workload_sha256=facts.workload_sha256,
        workload_keys=facts.workload_keys,
        groups=facts.groups,
        decision_id=facts.decision_id,
        status=status,
        exit_code=exit_code,
        failure=_failure(facts),
        hosts=inside.hosts,
        strategy=inside.strategy,
        engine=inside.engine,
        hyperparameters=record_of(given),
        measured=_measured(inside.measured, facts),
        others=inside.others,
        memory=inside.memory,
        gpus=inside.gpus,
        metrics=dict(inside.metrics),
        steps=inside.steps,
        is_unfed=inside.is_unfed,
        bad_samples=inside.bad_samples,
        balance=inside.balance,
        unfetched=facts.unfetched,
        model_uri=facts.model_uri,
        model_copy_uri=facts.model_copy_uri,
        mlflow_run_id=facts.mlflow_run_id,
        lineage=lineage,
        predicted_usd=facts.budget.predicted_usd,
        spent_usd=_spent(spending, facts.groups),
        is_estimate=bool(facts.budget.estimated),
        spending=spending,
        job=facts.job,
        data_group_release_seconds=release,
        events=_events(facts),
    )


def _spent(spending: Sequence[GroupSpending], groups: Sequence[Group]) -> float | None:
    """Returns the run's dollars; None unless those of each group are known."""
    dollars = [group.usd for group in spending if group.usd is not None]
    if not dollars or len(dollars) != len(groups):
        return None
    return sum(dollars)


def _events(facts: TrainingFacts) -> tuple[Event, ...]:
    """Returns what the leader and the platform saw, in order of time."""
    seen = list(facts.events)
    if facts.leader:
        seen = [*facts.leader.events, *seen]
    # ISO 8601 in UTC sorts as text.
    return tuple(sorted(seen, key=lambda event: event.when))


def with_leader(training: Training, leader: Training | None) -> Training:
    """Returns the record of a run whose outputs (`unfetched`) were read since, if any were left."""
    if leader is None:
        return msgspec.structs.replace(training, unfetched=None)
    facts = TrainingFacts(
        job=training.job,
        status=training.status,
        groups=training.groups,
        leader=leader,
        exit_code=training.exit_code,
        failure=training.failure,
        events=training.events,
        release_seconds=training.data_group_release_seconds,
    )
    of_leader = training_record(facts)
    return msgspec.structs.replace(
        training, **{name: getattr(of_leader, name) for name in _OF_LEADER}, unfetched=None
    )


def write_training(facts: TrainingFacts, *, file: Path) -> Training:
    """Writes the record and returns it. Raises UsageError if it cannot be written."""
    record = training_record(facts)
    write_json(file, record)
    return record


def copied_to(
    file: Path, record: Training, *, run_dir: Path, model_uri: str | None = None
) -> Training:
    """Returns the record for a file outside its run's folder, and copies what belongs to it there.

    That is the timeline, and what a report reads (`FILES_BESIDE`), as `training-feed.csv` beside
    `training.json`: a folder that stoker did not make may have another feed.csv.

    Args:
        file: The record's.
        record: Of the run.
        run_dir: The run's folder.
        model_uri: Where its model is kept, if that is another place.
    """
    if record.measured and record.measured.timeline_file:
        name = _next_to(run_dir / record.measured.timeline_file, file)
        record = msgspec.structs.replace(
            record, measured=msgspec.structs.replace(record.measured, timeline_file=name)
        )
    for name in FILES_BESIDE:
        if (run_dir / name).is_file():
            _next_to(run_dir / name, file)
    return msgspec.structs.replace(record, model_uri=model_uri or record.model_uri)


def file_beside(record_file: Path, name: str) -> Path | None:
    """Returns a run's file of that name, in its folder or where its record was copied to."""
    copied = record_file.with_name(f"{record_file.stem}-{name}")
    files = (copied, record_file.with_name(name))
    return next((file for file in files if file.is_file()), None)


def _failure(facts: TrainingFacts) -> str | None:
    """Returns the leader's failure if there is one: it is nearer to the cause."""
    if facts.is_interrupted:
        return None
    failure = (facts.leader and facts.leader.failure) or facts.failure
    if facts.status == "failed" and facts.last_words and not (facts.leader and facts.leader.hosts):
        # The launcher failed early: only its log says why.
        last_error = said_in(facts.last_words)
        if failure and last_error not in failure:
            failure = f"{failure}: {last_error}"
        return "\n".join([failure or last_error, *without_events(facts.last_words)]).strip()
    return failure


def _spending(facts: TrainingFacts) -> tuple[GroupSpending, ...]:
    """Returns the dollars of each group, by the platform's times where it reports them."""
    reported = (facts.leader or facts).spending
    counted = {spending.group: spending for spending in reported}
    if len(facts.groups) == 1 == len(reported):
        # SageMaker has another name for the only group of a job.
        only = facts.groups[0].name
        counted = {only: msgspec.structs.replace(reported[0], group=only)}
    prices = facts.budget.usd_per_hour
    priced = []
    for group in facts.groups:
        spending = counted.get(group.name, GroupSpending(group=group.name))
        seconds = facts.host_seconds.get(group.name)
        price = prices.get(group.name)
        usd = spending.usd
        if seconds is not None and price is not None:
            usd = seconds * price / 3600
        share = spending.idle_share
        idle_usd = None if usd is None or share is None else usd * share
        priced.append(msgspec.structs.replace(spending, usd=usd, idle_usd=idle_usd))
    return tuple(spending for spending in priced if _is_counted(spending))


def _is_counted(group: GroupSpending) -> bool:
    return any(value is not None for value in (group.usd, group.idle_share, group.batches))


def _measured(measured: Measured | None, facts: TrainingFacts) -> Measured | None:
    """Returns the leader's figures with their cost and the place of the timeline."""
    # The leader's launcher knows neither prices nor where its timeline will be kept.
    if measured is None or facts.leader is None:
        return measured
    usd = None
    price = facts.budget.total_usd_per_hour(facts.groups)
    if price is not None and measured.steps:
        usd = measured.counted_seconds * price / 3600 * 1000
    return msgspec.structs.replace(
        measured, usd_per_1000_steps=usd, timeline_file=facts.timeline_file
    )


def _next_to(kept: Path, record_file: Path) -> str:
    """Returns a file's path relative to its record, copying it if needed."""
    if record_file.parent.resolve() == kept.parent.resolve():
        return kept.name
    copied = record_file.with_name(f"{record_file.stem}-{kept.name}")
    record_file.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(kept, copied)
    return copied.name
