"""What a cluster takes: its plan with time, cost, error band and feasibility; which plan is better.

Prices are the catalog's, on demand. With prices a plan costs dollars, and an accelerator that waits
is part of them. Without prices nothing idle costs anything: time counts, and CPU time only decides
between equals.

Time is of whole epochs where they are known: their steps, the wait for each first batch, which one
worker makes, and what lies between (validation and checkpoints take as long with any data hosts).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from stoker.catalog import Catalog, Instance, local_instance
from stoker.decide.model import Cluster, Estimate, Work, estimate
from stoker.errors import UsageError
from stoker.records import (
    Action,
    Bottleneck,
    Constraints,
    EpochPause,
    EpochTimes,
    FeedSettings,
    Group,
    Plan,
    Predicted,
    Profile,
    TakenElsewhere,
    Workload,
)
from stoker.records.decision import NOMINAL, UNPRICED, Limit

# Reason of a feasible plan that the user named, and the beginning of an infeasible one's reason.
ASKED_FOR = "asked for"
# With a complete profile: the model's mean error on the published runs is 6%, see
# tests/keel/test_decide_published.py.
_BAND = 0.10
# Turns of loading and training on the same cores, as a share of both: less is noise; none to all of
# it may stay with the trainer when loading moves away. Beside workers for the first time: a trainer
# on a core with its worker used 1.1 to 1.4 times its CPU.
_WORTH_TURNS = 0.05
_MOST_OF_TURNS = 0.25
_FIRST_WORKERS = 0.15
# A wider band if the next limit is within 15%: two limits at once are slower than either. Up to a
# quarter was seen (docs/method.md, "What it cannot see").
_NEAR = 0.85
_NEAR_BAND = 0.23
# The widest band; other programs that cause a wider one forbid a verdict (records/profile).
_WIDEST = 0.6
# Error for each doubling of workers beyond the number that was tried.
_EACH_DOUBLING = 0.1
_MOST_OF_DOUBLINGS = 0.3
# Which host makes an epoch's first batch is not known, nor what else its cores do then.
_START_WIDTH = 0.25
# Plans this close to the best count as equal: then fewer machines win.
_TIE = 0.03
# A smaller gain is not worth a try: two runs on the same quiet hosts differ by as much.
WORTH_A_TRY = 0.05
# Prices are sums of floats: a difference of a billionth is ignored.
SAME = 1 + 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What plans are made from, the rules that they are checked against, and which one is better.

    Attributes:
        profile: Of the training, without states of a host on which it does not train.
        allowed: Types that hosts may have. None: all.
        total_steps: Of the whole training; None: not known.
        bottleneck: Of today's step.
        fix_first: What to fix before anything that costs; empty: nothing.
        unfed: Why data hosts cannot make the batches.
        unworkable: Why workers cannot make them either, as a sentence.
        taken: How the profile was scaled to today's type; None: it was taken there.
    """

    profile: Profile
    work: Work
    catalog: Catalog
    constraints: Constraints
    feed: FeedSettings
    allowed: frozenset[str] | None
    total_steps: int | None
    bottleneck: Bottleneck
    fix_first: str
    unfed: str
    unworkable: str
    taken: TakenElsewhere | None

    @property
    def today(self) -> Instance:
        """Today's type, with the measured vCPUs and accelerators."""
        return self.work.reference

    @property
    def purchase(self) -> str:
        """Purchase option of the plans' prices: none where today's pool of nodes has no price."""
        if self.today.usd_per_hour is None and self.catalog.info.has_node_pools:
            return UNPRICED
        return self.catalog.purchase

    @property
    def is_billed(self) -> bool:
        """Whether today's hosts have a price, so that plans are compared in dollars."""
        return self.purchase not in (NOMINAL, UNPRICED)

    @property
    def saved(self) -> str:
        """What a plan saves, as a word."""
        return "money" if self.is_billed and self.constraints.objective == "cost" else "time"

    def get(self, instance_type: str) -> Instance:
        """Returns a type; today's with what was measured, and all of this machine with its GPUs."""
        instance = self.catalog.get(instance_type)
        if instance.type == self.today.type:
            return self.today
        if not self.catalog.info.is_this_machine:
            return instance
        model = self.today.accelerator_model
        return replace(instance, accelerators=self.today.accelerators, accelerator_model=model)

    def why_unusable(self, instance: Instance) -> str:
        """Returns why no plan may use the type; empty: it may be used."""
        name = instance.type
        # Today's type runs the training already.
        if name == self.today.type:
            return ""
        is_job = self.catalog.info.needs_training_enum
        if self.allowed is not None and name not in self.allowed:
            return f"{name} is not among the allowed instance types"
        if is_job and not instance.in_training_enum:
            return f"a SageMaker training job cannot use {name}"
        if instance.usd_per_hour is None and self.is_billed:
            return f"{name} has no price"
        # SageMaker runs one image on all hosts of a job; on Kubernetes data hosts may have theirs.
        if is_job and instance.architecture != self.today.architecture:
            return f"{name} needs an image for {instance.architecture}, and a job has one image"
        if instance.is_burst:
            return f"{name} is a burst type: it has its full speed for a limited time"
        return instance.barred

    def misses_deadline(self, outcome: Predicted) -> bool:
        deadline = self.constraints.deadline_hours
        return deadline is not None and (outcome.total_hours or 0.0) > deadline

    def values(self, plan: Plan) -> tuple[float, float]:
        """Returns what the objective counts for a step, less being better; and what comes next.

        Next is time where dollars count, dollars where time does; without prices CPU time.
        """
        outcome = plan.predicted
        if outcome is None:
            return math.inf, math.inf
        seconds = outcome.counted_seconds
        if not self.is_billed:
            return seconds, outcome.cpu_seconds or 0.0
        dollars = outcome.usd_per_1000_steps or math.inf
        return (dollars, seconds) if self.saved == "money" else (seconds, dollars)

    def gain(self, plan: Plan, rival: Plan) -> float:
        """Returns the fraction of the objective that the plan saves over another one."""
        return 1 - self.values(plan)[0] / self.values(rival)[0]

    def beats(self, plan: Plan, rival: Plan) -> bool:
        """Whether a plan gains more over another one than the bands of both."""
        return self.gain(plan, rival) > combined_band(plan, rival)

    def rank(self, plan: Plan) -> tuple[bool, float, float, int, str]:
        """Returns a key that sorts the best plan first, one that cannot be run last."""
        # The last word, so that plans with equal figures come in one order on every machine.
        groups = repr(plan.groups)
        return not plan.feasible, *self.values(plan), _num_machines(plan), groups

    def best(self, plans: Sequence[Plan]) -> Plan:
        """Returns the smallest of the plans that are as good as the best."""
        least = min(self.values(plan)[0] for plan in plans)
        equal = [plan for plan in plans if self.values(plan)[0] <= least * (1 + _TIE)]
        # Without prices cores that hardly help are left idle.
        second = 0 if self.is_billed else 1
        return min(
            equal,
            key=lambda plan: (_num_machines(plan), self.values(plan)[second], *self.rank(plan)),
        )

    def is_free(self, plan: Plan, keep: Plan) -> bool:
        """Whether a plan costs no more per hour than today's: without prices, no more cores."""
        return self._per_hour(plan) <= self._per_hour(keep) * SAME

    def _per_hour(self, plan: Plan) -> float:
        outcome = plan.predicted
        if outcome is None:
            return math.inf
        return outcome.usd_per_hour or math.inf if self.is_billed else cores(outcome)


def error_band(outcome: Predicted) -> float:
    return outcome.counted_high / outcome.counted_seconds - 1


def combined_band(*plans: Plan) -> float:
    """Returns the relative error of predictions, or of their ratio: they err independently."""
    return math.hypot(*(error_band(plan.predicted) for plan in plans if plan.predicted))


def cores(outcome: Predicted) -> float:
    """Returns the vCPUs of all hosts."""
    # `cpu_seconds` are those vCPUs times the step, whether they are busy or not.
    return (outcome.cpu_seconds or 0.0) / outcome.counted_seconds


def _num_machines(plan: Plan) -> int:
    return sum(group.count for group in plan.groups)


# Plans.


def make_plan(
    space: Space,
    action: Action,
    cluster: Cluster,
    *,
    problem: str = "",
    asked_for: bool = False,
) -> Plan:
    """Returns a cluster's plan: predicted, priced, and checked against the constraints.

    Today's cluster has the step that was measured there, and runs whatever the constraints allow.

    Args:
        space: Work, prices and constraints.
        action: The change to today's cluster.
        cluster: The hosts.
        problem: Why the cluster cannot be run or predicted.
        asked_for: The user named it.
    """
    work = space.work
    made = estimate(work, cluster)
    # Added as squares, as they do not depend on each other.
    width = math.hypot(*_widths(work, cluster, made))
    is_measured = action == "keep" and not space.taken
    if is_measured:
        made = replace(made, step_seconds=work.measured_seconds)
        # A repeated run on the same hosts differs, too, and so does the machine.
        width = math.hypot(_BAND, work.others_width) if space.profile.check else 0.0
    outcome = None if problem else _predicted(space, cluster, made, min(width, _WIDEST))
    reason = ""
    if asked_for:
        reason = ASKED_FOR
    elif action == "keep":
        reason = "today's cluster, as it was measured" if is_measured else "today's cluster"
    if not problem and action != "keep":
        problem = _problem_of(space, cluster, outcome)
    batch = space.profile.step.global_batch_size
    if batch is not None:
        batch = None if cluster.replicas == 1 else max(1, round(cluster.replicas * batch))
    # What a script sets is of one rank, and a host may have several.
    num_workers = math.ceil(cluster.dnn.all_workers / work.ranks) if action == "tune" else 0
    return Plan(
        action=action,
        groups=_groups(cluster),
        remote_share=made.remote_share if outcome else 0.0,
        predicted=outcome,
        feasible=not problem,
        reason=", but ".join(filter(None, (reason, problem))),
        global_batch_size=batch if outcome else None,
        num_workers=num_workers or None,
    )


def _groups(cluster: Cluster) -> tuple[Group, ...]:
    dnn = Group(
        name="dnn",
        role="dnn",
        instance_type=cluster.dnn.instance.type,
        count=cluster.dnn.count,
        processes_per_host=cluster.processes,
        workers_per_host=cluster.dnn.workers,
    )
    if cluster.data is None:
        return (dnn,)
    data = Group(
        name="data",
        role="data",
        instance_type=cluster.data.instance.type,
        count=cluster.data.count,
        workers_per_host=cluster.data.workers,
    )
    return dnn, data


def _predicted(space: Space, cluster: Cluster, made: Estimate, width: float) -> Predicted | None:
    """Returns time and cost of a cluster; None where plans are billed and a price lacks.

    Args:
        space: Work and prices.
        cluster: The hosts.
        made: The model's estimate.
        width: The relative error.
    """
    work = space.work
    step = seconds = made.step_seconds
    seconds_today = work.measured_seconds
    low, high = step * (1 - width), step * (1 + width)
    figures: dict[str, float | None] = {}
    # Time and money are counted by whole epochs, where they are known.
    times = space.profile.epochs
    if times and (times.steps or times.inside_seconds):
        epochs = _planned_epochs(work, cluster, times)
        seconds = epochs.whole_step_seconds(step)
        seconds_today = times.whole_step_seconds(seconds_today)
        figures = {
            "whole_step_seconds": seconds,
            "whole_step_seconds_low": epochs.whole_step_seconds(low, pause="low_seconds"),
            "whole_step_seconds_high": epochs.whole_step_seconds(high, pause="high_seconds"),
        }
    speedup = seconds_today / seconds
    cpu_seconds = seconds * _capacity(cluster)
    # Without a bill CPU-seconds are compared.
    ratio = cpu_seconds / (seconds_today * _capacity(work.todays))
    hours = None if space.total_steps is None else space.total_steps * seconds / 3600
    if space.is_billed:
        price = space.catalog.usd_per_hour(_groups(cluster))
        price_today = space.catalog.usd_per_hour(_groups(work.todays))
        if not price or not price_today:
            return None
        ratio = price / price_today / speedup
        figures["usd_per_hour"] = price
        figures["usd_per_1000_steps"] = seconds * price * 1000 / 3600
        figures["total_usd"] = None if hours is None else hours * price
        figures["break_even_speedup"] = price / price_today
    kernel_seconds = made.accelerator_seconds * (1 - work.launch_share)
    return Predicted(
        step_seconds=step,
        step_seconds_low=low,
        step_seconds_high=high,
        limit=_limit(made.limit, work),
        second_limit=_limit(made.second_limit, work),
        second_limit_seconds=made.second_seconds,
        accelerator_utilization=min(1.0, kernel_seconds / step),
        speedup=speedup,
        cost_change=ratio - 1,
        cpu_seconds=cpu_seconds,
        total_hours=hours,
        **figures,
    )


def _limit(limit: Limit, work: Work) -> Limit:
    # An accelerator that idles between its kernels is not the limit.
    return "launch" if limit == "accelerator" and work.launch_share else limit


def _capacity(cluster: Cluster) -> float:
    return sum(hosts.count * hosts.instance.capacity for hosts in cluster.hosts)


def _planned_epochs(work: Work, cluster: Cluster, times: EpochTimes) -> EpochTimes:
    """Returns the epochs of a cluster: a worker there makes the first batch."""
    makers = [hosts.instance for hosts in cluster.hosts if hosts.workers != 0]
    here = _batch_seconds(work, work.reference)
    first = max((_batch_seconds(work, instance) for instance in makers), default=here)
    start = times.start
    if work.num_workers == 0 and makers:
        # No worker made a batch: the first one is the trainer's no more.
        start = EpochPause(seconds=first, low_seconds=first, high_seconds=first, count=0)
    elif start is None or not here or (first == here and not cluster.data):
        return times
    else:
        start = start.scaled(first / here)
    start = msgspec.structs.replace(
        start,
        low_seconds=min(start.low_seconds, start.seconds * (1 - _START_WIDTH)),
        high_seconds=max(start.high_seconds, start.seconds * (1 + _START_WIDTH)),
    )
    return msgspec.structs.replace(times, start=start)


def _batch_seconds(work: Work, instance: Instance) -> float:
    """Returns the seconds in which one worker makes one rank's batch."""
    return (work.worker_seconds(instance) + work.shared_seconds) / work.ranks


def _widths(work: Work, cluster: Cluster, made: Estimate) -> Iterator[float]:
    """Yields the relative errors of a prediction, by the doubts of the work and of the cluster."""
    yield _BAND
    yield from work.doubts.values()
    if made.second_seconds >= _NEAR * made.step_seconds:
        yield _NEAR_BAND
    types = {hosts.instance.type: hosts.instance for hosts in (*cluster.hosts, work.todays.dnn)}
    if len(types) > 1 and any(each.coremark_per_vcpu is None for each in types.values()):
        # Without CPU speeds the number of vCPUs alone is up to 84% wrong (docs/method.md).
        yield 0.2
    if cluster.data and not work.batch_bytes:
        yield 0.05
    if cluster.replicas != 1:
        # How the accelerators scale was not measured.
        yield 0.1
    workers = sum(hosts.all_workers for hosts in cluster.hosts)
    most = max(work.rates, default=workers)
    if work.waits and workers > most:
        yield min(_EACH_DOUBLING * math.log2(workers / most), _MOST_OF_DOUBLINGS)
    if work.num_workers == 0 and cluster.dnn.workers:
        yield _FIRST_WORKERS
    both = work.loader_cpu_seconds + work.trainer_cpu_seconds
    turns = abs(work.turns_cpu_seconds)
    if cluster.data and both > 0 and turns > _WORTH_TURNS * both:
        yield min(turns / both / 2, _MOST_OF_TURNS)


def _problem_of(space: Space, cluster: Cluster, outcome: Predicted | None) -> str:
    """Returns why a cluster may not be run; empty: it may."""
    problems = (space.why_unusable(hosts.instance) for hosts in cluster.hosts)
    if problem := next(filter(None, problems), ""):
        return problem
    if outcome is None:
        return f"today's {space.today.type} has no price: plans cannot be compared in money"
    vcpus = sum(hosts.count * hosts.instance.vcpus for hosts in cluster.hosts)
    most = space.catalog.max_total_vcpus
    if most is not None and vcpus > most:
        return f"needs {vcpus} cores, this machine has {most}"
    constraints = space.constraints
    limits = [("hours", outcome.total_hours, "deadline_hours", constraints.deadline_hours)]
    # Nominal prices are no dollars: no limit in dollars counts them.
    if space.purchase != NOMINAL:
        per_hour = constraints.max_usd_per_hour
        if outcome.usd_per_hour is None and (per_hour or constraints.max_usd) is not None:
            return "its price is not known, so that no limit in dollars can be kept"
        limits.append(("$ per hour", outcome.usd_per_hour, "max_usd_per_hour", per_hour))
        limits.append(("$ for the run", outcome.run_usd, "max_usd", constraints.max_usd))
    for unit, value, name, limit in limits:
        if value is not None and limit is not None and value > limit * SAME:
            return f"{value:,.2f} {unit} is above {name}, {limit:,.2f}"
    return ""


# What is refused before anything is priced.


def check_constraints(constraints: Constraints, catalog: Catalog) -> frozenset[str] | None:
    """Returns the allowed types by the catalog's names; None: all.

    Raises:
        UsageError: For a type that is not in the catalog, or prices of a region that is not
            allowed.
    """
    regions = constraints.regions
    if regions is not None and catalog.region is not None and catalog.region not in regions:
        raise UsageError(
            f"the prices are for region {catalog.region}, but only "
            f"{', '.join(regions) or 'no region'} is allowed",
            where="key constraints.regions",
            fix="--prices FILE with prices of an allowed region, or allow this one",
        )
    if constraints.allowed_instance_types is None:
        return None
    where = "key constraints.allowed_instance_types"
    names = constraints.allowed_instance_types
    return frozenset(catalog.get(name, where=where).type for name in names)


def with_profiled(profile: Profile, catalog: Catalog) -> Catalog:
    """Returns the catalog with the measured hosts' type, where it has facts about others only.

    A job ran on them, so that the type exists. A workstation's, and one that was typed, the catalog
    has to know: else UsageError is raised.
    """
    name = profile.host.instance_type
    vcpus = profile.host.vcpus
    is_here = catalog.info.is_this_machine or local_instance(name)
    if catalog.find(name) or is_here or not vcpus:
        catalog.get(name)
        return catalog
    barred = f"nothing is known of {name}: no price, no size"
    instance = Instance(type=name, family=name, vcpus=vcpus, barred=barred)
    return replace(catalog, instances=(*catalog.instances, instance))


def refuse_undecidable(workload: Workload, catalog: Catalog) -> None:
    """Raises UsageError for what `decide` would refuse after a profile.

    These are types that nobody knows, today's or allowed ones, and prices of a region that is not
    allowed.
    """
    check_constraints(workload.known_constraints, catalog)
    # Of EC2's types there is no list here: nodes of another type may exist.
    if workload.cluster and catalog.info.needs_training_enum:
        where = f"workload {workload.name}, key cluster.dnn.instance_type"
        catalog.get(workload.cluster.dnn.instance_type, where=where)
