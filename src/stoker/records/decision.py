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
# Purchase option of prices that nobody is billed, as those of this machine's cores.
NOMINAL = "nominal"


class Group(Record, frozen=True, kw_only=True):
    """Counts hosts of one type with one role.

    Attributes:
        name: Name of the group, in logs and in the platform's job.
        role: dnn: its hosts train; data: they only make batches.
        instance_type: Type of its hosts, as the catalog calls it.
        count: Number of hosts.
        processes_per_host: Trainer processes of one host; absent: one per accelerator, at least
            one.
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
    """Returns the groups in words: `dnn 1 x local.c1, data 2 x local.c1`."""
    return ", ".join(f"{group.role} {group.count} x {group.instance_type}" for group in groups)


class Predicted(Record, frozen=True, kw_only=True):
    """Predicts a plan: its step, its limits and its cost.

    Attributes:
        step_seconds: Predicted step, in seconds of wall clock.
        step_seconds_low: Shortest step that the error band holds, in seconds.
        step_seconds_high: Longest step that the error band holds, in seconds.
        limit: What sets the pace of the step. cpu: CPU time of loading and training; accelerator:
            the training's own computing; latency: the time that a worker takes for a batch;
            network: the rate of the network; receive: CPU time of receiving batches; storage: its
            rate.
        second_limit: What would set the pace next; values as in `limit`.
        second_limit_seconds: What the step would be if only the second limit held, in seconds.
        accelerator_utilization: Share of the step in which the accelerators compute, 0 to 1: the
            step without loading over this step.
        usd_per_hour: Price of all hosts, in dollars per hour.
        usd_per_1000_steps: Cost of 1000 steps, in dollars.
        speedup: Today's measured step over this step: 2 is twice as fast.
        cost_change: This usd_per_1000_steps over today's, minus 1: -0.2 is 20 % cheaper. Where
            nobody is billed: of cpu_seconds.
        total_hours: Hours of the whole training; absent: its number of steps is not known.
        total_usd: Dollars of the whole training; absent: its number of steps is not known.
        break_even_speedup: From this speedup on the plan costs no more per step than today's
            cluster: its usd_per_hour over today's.
        own_storage_speedup: The speedup if each host has a storage of its own, where that is not
            known and makes a difference: `speedup` is that of hosts that share one, and
            `step_seconds_low` holds both.
        cpu_seconds: vCPUs of all hosts times this step: what the plan costs where nobody is billed.
        accelerator_seconds: Accelerators of all hosts times this step.
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
    cpu_seconds: NonNegativeFloat | None = None
    accelerator_seconds: NonNegativeFloat | None = None


class Plan(Record, frozen=True, kw_only=True):
    """A plan is a cluster that could run the workload.

    Attributes:
        action: What is done to today's cluster: nothing (keep), other settings (tune), a larger
            type (scale_up), data hosts (heterogeneous), more replicas (scale_out), or less work of
            the CPUs (offload_gpu).
        groups: Instance groups, dnn first.
        remote_share: Fraction of batches made on the data group.
        predicted: Absent where the plan cannot be priced or predicted.
        feasible: Whether it can be run within the constraints and the platform's rules.
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


def plan_in_words(plan: Plan) -> str:
    """Returns what a plan changes, and its hosts: `add 1 data host: dnn 1 x a, data 1 x b`."""
    dnn, *others = plan.groups
    hosts = sum(group.count for group in others)
    change = {
        "keep": "keep",
        "tune": "tune the loader of",
        "heterogeneous": f"add {hosts} data host{'' if hosts == 1 else 's'}:",
        "scale_out": f"train on {dnn.count} host{'' if dnn.count == 1 else 's'}:",
        "scale_up": "take a larger type:",
        "offload_gpu": "load on the accelerators:",
    }
    return f"{change[plan.action]} {groups_in_words(plan.groups)}"


class Answer(Record, frozen=True, kw_only=True):
    """The flow chart asks a question; this is its answer, with the figures that it rests on.

    Attributes:
        question: The question, in words.
        answer: Its answer; unknown where the profile does not say.
        because: The figures that the answer rests on.
    """

    question: str
    answer: Literal["yes", "no", "unknown"]
    because: str


class Advice(Record, frozen=True, kw_only=True):
    """Advice names something worth doing that is not a plan to run.

    Attributes:
        id: Name of the advice, for programs.
        text: What to do, in words.
        when: When it holds, in words; absent: always.
    """

    id: Name
    text: str
    when: str | None = None


class Prices(Record, frozen=True, kw_only=True):
    """Says where the prices come from.

    Attributes:
        date: Day of the oldest price, ISO 8601; absent: not known.
        region: AWS region of the prices; absent: none, or not known.
        purchase: How hosts are bought, such as on-demand.
        source: The list that the prices are from.
        stale: Whether they are older than 90 days.
    """

    date: str | None = None
    region: str | None = None
    purchase: str = "on-demand"
    source: str
    stale: bool = False

    @property
    def is_nominal(self) -> bool:
        """Returns whether nobody is billed: the cost of a plan is then its CPU-seconds."""
        return self.purchase == NOMINAL


class Calibration(Record, frozen=True, kw_only=True):
    """Earlier runs on this machine correct the cost model's constants.

    Attributes:
        runs: Runs that a constant was corrected by; 0: too few, nothing is corrected.
        efficiency: Factor on the share of their CPU that data hosts reach; 1 changes nothing.
        receive: Factor on the CPU time of receiving batches; 1 changes nothing.
        spread: Half of the distance between the quartiles of these factors, as a fraction of their
            median.
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
        cpu_speed_source: Where `cpu_speed` comes from. catalog: both types are in the catalog;
            cpu_model: the profiled CPU's model is; given: the user gave it; assumed: it is not
            known, and is taken as 1.
        accelerator_step_source: Where a step without waiting comes from. profile: the profile's, on
            accelerators of the same model; cpu: the profile's, scaled; given: the user gave it;
            unknown: it is not known.
    """

    profiled_on: Name
    taken_as: Name
    cpu_speed: PositiveFloat
    cpu_speed_source: CpuSpeedSource
    accelerator_step_source: AcceleratorStepSource


class Decision(Record, frozen=True, kw_only=True):
    """Holds the ranked plans, the chosen one, and why.

    Attributes:
        schema: Version of this file's form.
        workload_sha256: As in the profile.
        workload_keys: As in the profile; of one taken for other hosts without its own hosts.
        bottleneck: What sets today's pace. cpu: CPU time of loading and training; workers: too few
            loader workers; latency: each worker waits for its data, and more of them would wait at
            the same time; storage: workers share what they wait for; network: receiving batches, or
            the network's rate; accelerator: the training's own computing; none: loading costs
            nothing; unexplained: the profile does not say.
        action: Action of the chosen plan.
        plan: The chosen plan.
        plans: All plans, the best first; those that cannot be run come last.
        path: The questions that led to the choice, with their answers.
        advice: What else is worth doing.
        warnings: What makes the prediction doubtful, in words.
        prices: Where the prices are from.
        objective: What ranked the plans: the cost of a step, or its time.
        constraints: Bounds that the plans had to respect.
        calibration: Correction of the cost model by earlier runs; absent: none was asked for.
        others_vcpus: vCPUs of the profiled hosts that other programs kept busy meanwhile; the
            bands are wider by that. Absent: not known.
        taken_elsewhere: How the profile was scaled to another instance type; absent: it was not.
        is_noisy: Whether other programs disturbed the profile too much to choose: the plan is
            today's cluster, or the one that was asked for, and figures do not count.
    """

    schema: Literal["stoker.decision/v1"] = "stoker.decision/v1"
    workload_sha256: str | None = None
    workload_keys: dict[str, str] | None = None
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
    is_noisy: bool = False
