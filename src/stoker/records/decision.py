"""A decision holds the ranked plans, the chosen one, and why."""

from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec

from stoker.records.base import (
    Fraction,
    Name,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Record,
)
from stoker.records.workload import Constraints, TodaysGroup

Action = Literal["keep", "tune", "scale_up", "heterogeneous", "scale_out", "offload_gpu"]
Limit = Literal["cpu", "accelerator", "latency", "network", "receive", "storage"]
Bottleneck = Literal[
    "cpu", "workers", "latency", "accelerator", "network", "storage", "none", "unexplained"
]
Role = Literal["dnn", "data"]


class Group(Record, frozen=True, kw_only=True):
    """Hosts of one type with one role.

    Attributes:
        workers_per_host: Data workers of one host; 0: it loads nothing; absent: not decided here
            (the script's num_workers on a dnn host, the host's vCPUs on a data host).
    """

    name: Name
    role: Role
    instance_type: Name
    count: PositiveInt
    processes_per_host: PositiveInt | None = None
    workers_per_host: NonNegativeInt | None = None

    @classmethod
    def of_today(cls, today: TodaysGroup) -> "Group":
        """Returns the dnn group as it trains today: the script says how many workers load."""
        return cls(
            name="dnn",
            role="dnn",
            instance_type=today.instance_type,
            count=today.count,
            processes_per_host=today.processes_per_host,
        )


def groups_in_words(groups: Iterable[Group]) -> str:
    """Returns the groups in words: `1 x local.c1 + 2 x local.c1`."""
    return " + ".join(f"{group.count} x {group.instance_type}" for group in groups)


class Predicted(Record, frozen=True, kw_only=True):
    """The prediction of a plan: its step, its limits and its cost.

    Attributes:
        second_limit_seconds: What the step would be if only the second limit held.
        accelerator_utilization: Accelerator-only time over the step.
        speedup: Today's measured step over this step.
        cost_change: This usd_per_1000_steps over today's, minus 1; negative is cheaper.
        break_even_speedup: From this speedup on the plan costs no more a step than today's
            cluster: its usd_per_hour over today's.
        own_storage_speedup: The speedup if each host has a storage of its own, where that is not
            known and makes a difference: `speedup` is that of hosts that share one, and
            `step_seconds_low` holds both.
    """

    step_seconds: PositiveFloat
    step_seconds_low: PositiveFloat
    step_seconds_high: PositiveFloat
    limit: Limit
    second_limit: Limit
    accelerator_utilization: Fraction
    usd_per_hour: NonNegativeFloat
    usd_per_1000_steps: NonNegativeFloat
    speedup: PositiveFloat
    cost_change: float
    total_hours: NonNegativeFloat | None = None
    total_usd: NonNegativeFloat | None = None
    # Not in decisions that were written before these two fields were there.
    second_limit_seconds: NonNegativeFloat | None = None
    break_even_speedup: NonNegativeFloat | None = None
    own_storage_speedup: PositiveFloat | None = None


class Plan(Record, frozen=True, kw_only=True):
    """A cluster that could run the workload.

    Attributes:
        groups: dnn first.
        remote_share: Fraction of batches made on the data group.
        predicted: Absent where the plan cannot be priced or predicted.
        reason: For an infeasible plan, which constraint or rule; for the chosen one, why.
        global_batch_size: Samples of all replicas together, where their number changes and each
            keeps its own batch; absent: today's.
    """

    action: Action
    groups: Annotated[tuple[Group, ...], msgspec.Meta(min_length=1)]
    remote_share: Fraction = 0.0
    predicted: Predicted | None = None
    feasible: bool = True
    reason: str = ""
    global_batch_size: PositiveInt | None = None


class Answer(Record, frozen=True, kw_only=True):
    """One question of the flow chart as walked."""

    question: str
    answer: Literal["yes", "no", "unknown"]
    because: str


class Advice(Record, frozen=True, kw_only=True):
    """Something worth doing that is not a plan to run."""

    id: Name
    text: str
    when: str | None = None


class Prices(Record, frozen=True, kw_only=True):
    """The origin of the prices; stale: older than 90 days."""

    date: str | None = None
    region: str | None = None
    purchase: str = "on-demand"
    source: str
    stale: bool = False


class Calibration(Record, frozen=True, kw_only=True):
    """The correction of the cost model's constants by earlier runs on this machine.

    Attributes:
        runs: Runs that a constant was corrected by; 0: too few, nothing is corrected.
        efficiency: Factor on what data hosts reach of their CPU.
        receive: Factor on the CPU time of receiving batches.
        spread: Half of the quartiles' distance over the median, of the factors found.
    """

    runs: NonNegativeInt = 0
    efficiency: PositiveFloat = 1.0
    receive: PositiveFloat = 1.0
    spread: NonNegativeFloat = 0.0


CpuSpeedSource = Literal["catalog", "cpu_model", "given", "assumed"]
AcceleratorStepSource = Literal["profile", "cpu", "given", "unknown"]


class TakenElsewhere(Record, frozen=True, kw_only=True):
    """The profile was taken on one instance type, and is taken for another one.

    Attributes:
        profiled_on: The type that was profiled.
        taken_as: The type that is today's in this decision; nothing was measured there.
        cpu_speed: Speed of a vCPU of `taken_as` over one of `profiled_on`.
        cpu_speed_source: Where it comes from: both types are in the `catalog`, or the profiled
            CPU's model is (`cpu_model`), or it was `given`; `assumed`: it is not known, and 1.
        accelerator_step_source: Whose a step without waiting is: the `profile`'s, on accelerators
            of the same model; the profile's `cpu`, scaled; the user's (`given`); or nobody's.
    """

    profiled_on: Name
    taken_as: Name
    cpu_speed: PositiveFloat
    cpu_speed_source: CpuSpeedSource
    accelerator_step_source: AcceleratorStepSource


class Decision(Record, frozen=True, kw_only=True):
    """The ranked plans, the chosen one, and why.

    Attributes:
        bottleneck: What sets today's pace. `workers`: too few loader workers; `latency`: each of
            them waits for its data, and more of them wait at the same time; `storage`: they share
            what they wait for.
        others_vcpus: vCPUs of the profiled hosts that other programs kept busy meanwhile; the
            bands are wider by that. Absent: not known.
        taken_elsewhere: How the profile was scaled to another instance type; absent: it was not.
    """

    schema: Literal["stoker.decision/v1"] = "stoker.decision/v1"
    workload_sha256: str | None = None
    bottleneck: Bottleneck
    action: Action
    plan: Plan
    plans: Annotated[tuple[Plan, ...], msgspec.Meta(min_length=1)]
    path: tuple[Answer, ...] = ()
    advice: tuple[Advice, ...] = ()
    warnings: tuple[str, ...] = ()
    prices: Prices
    objective: Literal["cost", "time"]
    constraints: Constraints
    calibration: Calibration | None = None
    others_vcpus: NonNegativeFloat | None = None
    taken_elsewhere: TakenElsewhere | None = None
