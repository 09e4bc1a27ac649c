"""The decision: ranked plans, the chosen one, and why."""

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

Action = Literal["keep", "tune", "scale_up", "heterogeneous", "scale_out"]
Limit = Literal["cpu", "accelerator", "launch", "latency", "network", "receive", "storage"]
Bottleneck = Literal[
    "cpu",
    "workers",
    "latency",
    "accelerator",
    "launch",
    "network",
    "storage",
    "none",
    "unexplained",
]
Role = Literal["dnn", "data"]
# What a decision recommends: a change whose gain exceeds its error band; one that probably gains;
# none, as nothing gains; or none yet, as the figures do not tell.
VerdictKind = Literal["sure", "probable", "none", "unknown"]
# Older prices count as stale.
STALE_DAYS = 90
# Purchase option of prices that are not billed, for example for this machine's cores.
NOMINAL = "nominal"
# Where today's hosts have no price: the node pools of a cluster of one's own.
UNPRICED = "unpriced"
# Time from start, when billing begins, to the first step: an estimate for image and data.
START_UP_SECONDS = 300.0


class Group(Record, frozen=True, kw_only=True):
    """Hosts of one type and role.

    Attributes:
        name: Name in logs and in the platform's job.
        role: dnn: trains; data: only makes batches.
        instance_type: Type in the catalog.
        count: Number of hosts.
        processes_per_host: Trainer processes per host. None: one per accelerator, at least one.
        workers_per_host: Data workers per host. None: the script's num_workers on a dnn host, one
            per vCPU on a data host.
    """

    name: Name
    role: Role
    instance_type: Name
    count: PositiveInt
    processes_per_host: PositiveInt | None = None
    workers_per_host: NonNegativeInt | None = None

    @classmethod
    def of_today(cls, today: TodaysGroup) -> "Group":
        """Returns today's dnn group; the script sets its number of workers."""
        return cls(
            name="dnn",
            role="dnn",
            instance_type=today.instance_type,
            count=today.count,
            processes_per_host=today.processes_per_host,
        )


def groups_in_words(groups: Iterable[Group]) -> str:
    """Returns the groups as text: `dnn 1 x local.c1, data 2 x local.c1`."""
    return ", ".join(f"{group.role} {group.count} x {group.instance_type}" for group in groups)


class Predicted(Record, frozen=True, kw_only=True):
    """Predicted step of a plan, with its limits and cost.

    Speed-up and cost are of whole epochs where `whole_step_seconds` is known, else of the step.

    Attributes:
        step_seconds: Step, in seconds of wall clock.
        step_seconds_low: Lower bound of the step's error band, in seconds.
        step_seconds_high: Upper bound, in seconds.
        whole_step_seconds: Seconds of whole epochs over their steps, with each epoch's start and
            what lies between epochs. None: not known.
        whole_step_seconds_low: Lower bound of its error band, in seconds.
        whole_step_seconds_high: Upper bound, in seconds.
        limit: Bottleneck: CPU, accelerator, the script's own thread (launch), a worker's time for a
            batch (latency), network, receiving batches, or storage.
        second_limit: The next bottleneck.
        second_limit_seconds: The step if only the second limit applied, in seconds.
        accelerator_utilization: Share of the step in which accelerators compute, 0 to 1, by the
            driver's count where it shows that they idle between kernels.
        usd_per_hour: Price of all hosts, in dollars per hour. None: a price is not known.
        usd_per_1000_steps: Cost of 1,000 steps, in dollars. None: a price is not known.
        speedup: Today's measured time over this one: 2 is twice as fast.
        cost_change: Cost of a step over today's, minus 1. Where nothing is billed: of cpu_seconds.
        total_hours: Hours of the whole training. None: its number of steps is not known.
        total_usd: Dollars of the whole training.
        break_even_speedup: Speedup at which a step costs as much as today.
        cpu_seconds: vCPUs of all hosts times this step.
    """

    step_seconds: PositiveFloat
    step_seconds_low: PositiveFloat
    step_seconds_high: PositiveFloat
    limit: Limit
    second_limit: Limit
    second_limit_seconds: NonNegativeFloat
    accelerator_utilization: Fraction
    usd_per_hour: NonNegativeFloat | None = None
    usd_per_1000_steps: NonNegativeFloat | None = None
    speedup: PositiveFloat
    cost_change: float
    total_hours: NonNegativeFloat | None = None
    total_usd: NonNegativeFloat | None = None
    break_even_speedup: NonNegativeFloat | None = None
    cpu_seconds: NonNegativeFloat | None = None
    whole_step_seconds: PositiveFloat | None = None
    whole_step_seconds_low: PositiveFloat | None = None
    whole_step_seconds_high: PositiveFloat | None = None

    @property
    def counted_seconds(self) -> float:
        """Seconds of a step that time and money are counted by: of whole epochs, if known."""
        return self.whole_step_seconds or self.step_seconds

    @property
    def counted_low(self) -> float:
        """Lower bound of `counted_seconds`."""
        return self.whole_step_seconds_low or self.step_seconds_low

    @property
    def counted_high(self) -> float:
        """Upper bound of `counted_seconds`."""
        return self.whole_step_seconds_high or self.step_seconds_high

    @property
    def run_usd(self) -> float | None:
        """Dollars of the whole training and its start; None: its number of steps is not known."""
        if self.total_usd is None or self.usd_per_hour is None:
            return None
        return self.total_usd + self.usd_per_hour * START_UP_SECONDS / 3600


class Plan(Record, frozen=True, kw_only=True):
    """A cluster that could run the workload.

    Attributes:
        action: Change to today's cluster: none, other settings, a larger type, data hosts
            (heterogeneous), more replicas, or less work for CPUs.
        groups: Instance groups, dnn first.
        remote_share: Share of batches made on the data group, 0 to 1.
        predicted: None if the plan cannot be priced or predicted.
        feasible: Whether constraints and the platform's rules allow it.
        reason: The violated constraint or rule; for the chosen plan, why it was chosen.
        global_batch_size: Samples of a step if the number of replicas changes. None: today's.
        num_workers: Loader workers of each rank, as a script sets them. None: no plan to tune.
    """

    action: Action
    groups: Annotated[tuple[Group, ...], msgspec.Meta(min_length=1)]
    remote_share: Fraction = 0.0
    predicted: Predicted | None = None
    feasible: bool = True
    reason: str = ""
    global_batch_size: PositiveInt | None = None
    num_workers: PositiveInt | None = None


def plan_in_words(plan: Plan) -> str:
    """Returns a plan's change and hosts as text: `add 1 data host: dnn 1 x a, data 1 x b`."""
    dnn, *others = plan.groups
    hosts = sum(group.count for group in others)
    change = {
        "keep": "keep",
        "tune": "tune the loader of",
        "heterogeneous": f"add {hosts} data host{'' if hosts == 1 else 's'}:",
        "scale_out": f"train on {dnn.count} host{'' if dnn.count == 1 else 's'}:",
        "scale_up": "take a larger type:",
    }
    return f"{change[plan.action]} {groups_in_words(plan.groups)}"


class Answer(Record, frozen=True, kw_only=True):
    """A question of the decision flow chart, with its answer.

    Attributes:
        question: Text of the question.
        answer: unknown if the profile does not say.
        because: Figures behind the answer.
    """

    question: str
    answer: Literal["yes", "no", "unknown"]
    because: str


class Advice(Record, frozen=True, kw_only=True):
    """Something worth doing besides running a plan.

    Attributes:
        id: Name for programs.
        text: What to do.
        when: Condition under which it applies. None: always.
    """

    id: Name
    text: str
    when: str | None = None


class Prices(Record, frozen=True, kw_only=True):
    """Source of the prices.

    Attributes:
        date: Day of the oldest price, ISO 8601.
        region: AWS region of the prices.
        purchase: Purchase option, such as on-demand; nominal: not billed; unpriced: today's hosts
            have no price, so that plans are not compared in money.
        source: The price list.
        stale: Whether the prices are older than 90 days.
        hosts_region: AWS region of the hosts, if the prices are of another one.
        estimated: How a price was estimated, by type, where the payer's own is not known. None: no
            price was.
    """

    date: str | None = None
    region: str | None = None
    purchase: str = "on-demand"
    source: str
    stale: bool = False
    hosts_region: str | None = None
    estimated: dict[str, str] | None = None

    @property
    def is_nominal(self) -> bool:
        return self.purchase == NOMINAL

    @property
    def is_billed(self) -> bool:
        """Whether plans are compared in dollars."""
        return self.purchase not in (NOMINAL, UNPRICED)


CpuSpeedSource = Literal["catalog", "assumed"]
AcceleratorStepSource = Literal["profile", "cpu", "given", "unknown"]


class TakenElsewhere(Record, frozen=True, kw_only=True):
    """How a profile was scaled from one instance type to another.

    Attributes:
        profiled_on: The type that was profiled.
        taken_as: The type that the decision assumes for today; nothing was measured on it.
        cpu_speed: Speed of a vCPU of `taken_as` over one of `profiled_on`.
        cpu_speed_source: catalog: of both types; assumed: 1, as one is not known.
        accelerator_step_source: Source of a step without waiting: same accelerator model, scaled by
            CPU speed, given by the user, or none.
    """

    profiled_on: Name
    taken_as: Name
    cpu_speed: PositiveFloat
    cpu_speed_source: CpuSpeedSource
    accelerator_step_source: AcceleratorStepSource


class Decision(Record, frozen=True, kw_only=True):
    """Ranked plans, the chosen one, and why.

    Attributes:
        schema: Version of the file format.
        profile_sha256: Digest of the profile.
        workload_keys: As in the profile; without its hosts if it was scaled to another type.
        bottleneck: What limits today's step. workers: too few; latency: each worker waits for its
            reads; storage: they share what they wait for; launch: the accelerator idles though no
            batch is waited for; none: loading costs nothing; unexplained: not known.
        action: Action of the chosen plan.
        plan: The chosen plan, on whose hosts `stoker train` trains.
        verdict: What is recommended. sure: `plan`, whose gain exceeds its error band; probable:
            `probable`, which is also `plan` on this machine, where a try is free; none: nothing
            gains; unknown: the figures do not tell.
        probable: A plan that probably gains more than today's cluster, by less than its error band.
            None: there is none.
        trial: Shell command that measures `probable`.
        plans: All plans, best first; infeasible ones last.
        path: Questions that led to the choice, with answers.
        advice: What else is worth doing.
        warnings: What makes the prediction uncertain.
        prices: Source of the prices.
        objective: What ranked the plans: cost or time of a step.
        constraints: Limits that the plans had to respect.
        taken_elsewhere: How the profile was scaled to another instance type.
        is_noisy: Whether other programs disturbed the profile too much to choose a plan.
        measured: Age of the profile. Empty: not known.
        loader_workers: Workers that the profiled loader gets, by the line that makes it, as it has
            none and its batches may be made ahead: as if the script had written the number.
    """

    schema: Literal["stoker.decision/v1"] = "stoker.decision/v1"
    profile_sha256: str | None = None
    workload_keys: dict[str, str] | None = None
    bottleneck: Bottleneck
    action: Action
    plan: Plan
    verdict: VerdictKind
    probable: Plan | None = None
    trial: str | None = None
    plans: Annotated[tuple[Plan, ...], msgspec.Meta(min_length=1)]
    path: tuple[Answer, ...] = ()
    advice: tuple[Advice, ...] = ()
    warnings: tuple[str, ...] = ()
    prices: Prices
    objective: Literal["cost", "time"]
    constraints: Constraints
    taken_elsewhere: TakenElsewhere | None = None
    is_noisy: bool = False
    measured: str = ""
    loader_workers: dict[str, PositiveInt] = {}

    @property
    def today(self) -> Plan | None:
        """The plan that keeps today's hosts; None: none of its plans does."""
        return next((plan for plan in self.plans if plan.action == "keep"), None)


def predicted_of(groups: Iterable[Group], decision: Decision | None) -> Predicted | None:
    """Returns the prediction for these groups; None without one: they may be of no plan."""
    named = tuple(groups)
    plans = (decision.plan, *decision.plans) if decision else ()
    return next((plan.predicted for plan in plans if plan.groups == named), None)
