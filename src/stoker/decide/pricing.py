"""Cost, error band and feasibility of candidates.

Prices are the catalog's, on demand or of a training plan. A spot job is priced as on demand, for
nobody knows its discount ahead.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import msgspec

from stoker.catalog import Catalog, Instance, local_instance, unknown_instance
from stoker.decide.candidates import Candidate
from stoker.decide.epochs import Bounds, of_whole_epochs, planned_epochs
from stoker.decide.model import ClusterShape, Estimate, StepWork
from stoker.decide.preferences import refuse_preferences
from stoker.decide.ranking import Ranking
from stoker.errors import UsageError
from stoker.records import Constraints, EpochTimes, Plan, Predicted, Profile, Workload
from stoker.records.decision import NOMINAL, START_UP_SECONDS, UNPRICED, Limit
from stoker.units import apart, as_fast, numbered

# Reason of a feasible plan that the user named, and the beginning of an infeasible one's reason.
ASKED_FOR = "asked for"
# More than any training run has; each number of hosts makes a plan for each type.
_MOST_DATA_HOSTS = 256
# With a complete profile: the model's mean error on the published runs is 6%, see
# tests/unit/test_decide_published.py.
_BAND = 0.10
# Turns of loading and training on the same cores, as a share of both: less is noise; none to all of
# it may stay with the trainer when loading moves away.
_WORTH_TURNS = 0.05
_MOST_OF_TURNS = 0.25
_UNMEASURED_TURNS = 0.4
_MOST_OF_TRIAL = 0.3
# A wider band if the next limit is within 15%: two limits at once are slower than either.
_NEAR = 0.85
# Up to a quarter was seen (docs/method.md, "What it cannot see").
_NEAR_BAND = 0.23
# Hosts of another type may have a volume of another rate.
_OTHER_STORAGE = 0.2
# A separate storage per host is mentioned only if it makes a step shorter than this share.
_OWN_STORAGE = 0.97
# The widest band; other programs that cause a wider one forbid a verdict (step_model.py).
_WIDEST = 0.6
# Error for each doubling of workers beyond the number that was tried.
_EACH_DOUBLING = 0.1
_MOST_OF_DOUBLINGS = 0.3


def break_even_words(promise: Predicted, keep: Predicted) -> str:
    """Returns the break-even speed-up, and when the more expensive start is paid back."""
    usd = promise.usd_per_hour
    usd_today = keep.usd_per_hour
    if not usd_today or usd is None:
        return "break-even: a price is not known"
    ratio = usd / usd_today
    if ratio <= 1:
        return "break-even: it costs no more per hour than today's cluster"
    cost = promise.usd_per_1000_steps or 0.0
    cost_today = keep.usd_per_1000_steps or 0.0
    # Dollars a step.
    saved = (cost_today - cost) / 1000
    if saved <= 0:
        return f"break-even: {as_fast(ratio)}; this plan buys time, not money"
    # Both clusters take about as long to start: only the price difference is lost.
    steps = (usd - usd_today) * START_UP_SECONDS / 3600 / saved
    return (
        f"break-even: {as_fast(ratio)}; the more expensive start is paid back after "
        f"{numbered(round(steps), 'step')}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRules:
    """What a plan is checked and ranked by: the workload's constraints, and prices.

    Attributes:
        allowed: Types that hosts may have. None: all.
    """

    constraints: Constraints
    catalog: Catalog
    today: Instance
    allowed: frozenset[str] | None
    total_steps: int | None

    @property
    def ranking(self) -> Ranking:
        return Ranking(
            objective=self.constraints.objective,
            is_billed=self.purchase not in (NOMINAL, UNPRICED),
        )

    @property
    def purchase(self) -> str:
        """Purchase option of the plans' prices: none where today's pool of nodes has no price."""
        if self.today.usd_per_hour is None and self.catalog.info.has_node_pools:
            return UNPRICED
        return self.catalog.purchase


def usd_per_hour(shape: ClusterShape) -> float | None:
    """Returns the price of all hosts; None where one is not known."""
    total = 0.0
    for hosts in (shape.dnn, *shape.data):
        if hosts.instance.usd_per_hour is None:
            return None
        total += hosts.count * hosts.instance.usd_per_hour
    return total


def capacity(shape: ClusterShape) -> float:
    return sum(hosts.count * hosts.instance.capacity for hosts in (shape.dnn, *shape.data))


def band(work: StepWork, shape: ClusterShape, made: Estimate) -> float:
    """Returns the relative error: the doubts of `work.measure` and of the shape, as squares."""
    widths = [_BAND, *(doubt.width for doubt in work.doubts), *_widths_of(work, shape)]
    widths.append(_width_of_trial(work, shape, made))
    if made.second_seconds >= _NEAR * made.step_seconds:
        widths.append(_NEAR_BAND)
    is_of_data = any(hosts.instance.type != work.reference.type for hosts in shape.data)
    if work.has_own_storage and made.limit == "storage" and is_of_data:
        widths.append(_OTHER_STORAGE)
    # As squares: the doubts do not depend on each other.
    return min(math.hypot(*widths), _WIDEST)


def predicted(
    work: StepWork, candidate: Candidate, *, today: ClusterShape, rules: PlanRules
) -> Predicted | None:
    """Returns time and cost of a candidate; None where there is no estimate, or a price lacks."""
    estimated, price, today_usd = (
        candidate.estimate,
        usd_per_hour(candidate.shape),
        usd_per_hour(today),
    )
    is_billed = rules.ranking.is_billed
    if estimated is None or (is_billed and None in (price, today_usd)):
        return None
    width = band(work, candidate.shape, estimated)
    step = estimated.step_seconds
    low = step * (1 - width)
    with_storage = candidate.own_storage
    own_speedup = None
    if with_storage is not None and with_storage.step_seconds < _OWN_STORAGE * step:
        own_work = replace(work, storage="per_host")
        low = min(
            low, with_storage.step_seconds * (1 - band(own_work, candidate.shape, with_storage))
        )
        own_speedup = work.step_seconds / with_storage.step_seconds
    times = planned_epochs(work, candidate.shape)
    todays = of_whole_epochs(Bounds.exactly(work.step_seconds), planned_epochs(work, today))
    outcome = _priced(
        estimated,
        work=work,
        shape=candidate.shape,
        step=Bounds(step, low, step * (1 + width)),
        times=times,
        today=(todays.seconds, today_usd),
        price=price,
        total_steps=rules.total_steps,
    )
    change = outcome.cost_change
    if not is_billed:
        # Without a bill CPU-seconds are compared.
        used = outcome.counted_seconds * capacity(candidate.shape)
        change = used / (todays.seconds * capacity(today)) - 1
    return msgspec.structs.replace(outcome, cost_change=change, own_storage_speedup=own_speedup)


def measured(
    profile: Profile, work: StepWork, kept: Candidate, rules: PlanRules
) -> Predicted | None:
    """Returns today's cluster with its measured step; None where its price lacks."""
    estimated = kept.estimate
    today_usd = usd_per_hour(kept.shape)
    if estimated is None or (rules.ranking.is_billed and today_usd is None):
        return None
    step = profile.timed_step.step_seconds
    spread = (profile.spread or {}).get("step_seconds")
    low = high = step
    if spread:
        low = spread.low
        high = spread.high
    if profile.check is not None:
        # A repeated run on the same hosts differs, too, and the machine changed in the profile.
        width = min(math.hypot(_BAND, work.machine_width), _WIDEST)
        low = min(low, step * (1 - width))
        high = max(high, step * (1 + width))
    times = planned_epochs(work, kept.shape)
    todays = of_whole_epochs(Bounds.exactly(step), times)
    return _priced(
        estimated,
        work=work,
        shape=kept.shape,
        # A spread may begin at 0; the field is a PositiveFloat.
        step=Bounds(step, min(low, step) or step, max(high, step)),
        times=times,
        today=(todays.seconds, today_usd),
        price=today_usd,
        total_steps=rules.total_steps,
    )


def _priced(
    made: Estimate,
    *,
    work: StepWork,
    shape: ClusterShape,
    step: Bounds,
    times: EpochTimes | None,
    today: tuple[float, float | None],
    price: float | None,
    total_steps: int | None,
) -> Predicted:
    """Returns the figures of a plan: seconds, and dollars where the price is known.

    Args:
        made: The model's estimate.
        work: Today's step, by which accelerators idle between kernels or do not.
        shape: The plan's cluster.
        step: Its step, in seconds, with the error band.
        times: Its epochs; None: not known.
        today: Seconds of today's step, by whole epochs if known, and dollars per hour.
        price: Dollars per hour of the plan's hosts; None: not known.
        total_steps: Of the whole training; None: not known.
    """
    # Time and money are counted by whole epochs, where they are known.
    whole = of_whole_epochs(step, times)
    seconds = whole.seconds
    kernel_seconds = made.accelerator_seconds * (1 - work.launch_share)
    outcome = Predicted(
        step_seconds=step.seconds,
        step_seconds_low=step.low,
        step_seconds_high=step.high,
        limit=_of_launches(made.limit, work),
        second_limit=_of_launches(made.second_limit, work),
        accelerator_utilization=min(1.0, kernel_seconds / step.seconds),
        speedup=today[0] / seconds,
        cost_change=0.0,
        second_limit_seconds=made.second_seconds,
        cpu_seconds=seconds * capacity(shape),
        accelerator_seconds=seconds * shape.dnn.count * shape.dnn.instance.accelerators,
    )
    if times:
        outcome = msgspec.structs.replace(
            outcome,
            whole_step_seconds=whole.seconds,
            whole_step_seconds_low=whole.low,
            whole_step_seconds_high=whole.high,
        )
    if total_steps is not None:
        hours = total_steps * seconds / 3600
        outcome = msgspec.structs.replace(outcome, total_hours=hours)
    if price is None:
        return outcome
    priced = msgspec.structs.replace(outcome, usd_per_hour=price, is_estimate=_is_estimate(shape))
    return _with_dollars(priced, price=price, today=today, total_steps=total_steps)


def _of_launches(limit: Limit, work: StepWork) -> Limit:
    """Returns the limit, without the name of an accelerator that idles between its kernels."""
    if limit == "accelerator" and work.launch_share:
        return "launch"
    return limit


def _with_dollars(
    outcome: Predicted,
    *,
    price: float,
    today: tuple[float, float | None],
    total_steps: int | None,
) -> Predicted:
    """Returns the figures with what they cost; the arguments are as in `_priced`."""
    cost = outcome.counted_seconds * price * 1000 / 3600
    outcome = msgspec.structs.replace(outcome, usd_per_1000_steps=cost)
    if total_steps is not None:
        outcome = msgspec.structs.replace(outcome, total_usd=total_steps * cost / 1000)
    if not today[1]:
        # Without a price of today's hosts, or at none, there is nothing to compare with.
        return outcome
    return msgspec.structs.replace(
        outcome,
        cost_change=cost / (today[0] * today[1] * 1000 / 3600) - 1,
        break_even_speedup=price / today[1],
    )


def _is_estimate(shape: ClusterShape) -> bool:
    return any(hosts.instance.estimate for hosts in (shape.dnn, *shape.data))


def problem_of(candidate: Candidate, outcome: Predicted | None, rules: PlanRules) -> str:
    """Returns why the candidate may not be run; empty: it may."""
    if candidate.problem:
        return candidate.problem
    for hosts in (candidate.shape.dnn, *candidate.shape.data):
        if problem := why_unusable(hosts.instance, rules):
            return problem
    if outcome is None:
        return f"today's {rules.today.type} has no price: plans cannot be compared in money"
    groups = len(candidate.groups)
    most = rules.catalog.info.max_groups
    if most is not None and groups > most:
        return f"a SageMaker training job has at most {most} instance groups, not {groups}"
    vcpus = sum(h.count * h.instance.vcpus for h in (candidate.shape.dnn, *candidate.shape.data))
    most = rules.catalog.max_total_vcpus
    if most is not None and vcpus > most:
        return f"needs {vcpus} cores, this machine has {most}"
    # Nominal prices are no dollars: no limit in dollars counts them.
    is_free = rules.purchase == NOMINAL
    if not is_free and (problem := _too_expensive(outcome, rules.constraints)):
        return problem
    deadline = rules.constraints.deadline_hours
    if deadline is not None and outcome.total_hours is not None and outcome.total_hours > deadline:
        hours, limit = apart(outcome.total_hours, deadline)
        return f"{hours} hours miss the deadline of {limit}"
    return ""


def _too_expensive(outcome: Predicted, constraints: Constraints) -> str:
    budget = constraints.max_usd_per_hour
    per_hour = outcome.usd_per_hour
    if (budget is not None or constraints.max_usd is not None) and per_hour is None:
        return "its price is not known, so that no limit in dollars can be kept"
    if budget is not None and per_hour is not None and per_hour > budget * (1 + 1e-9):
        cost, limit = apart(per_hour, budget)
        return f"${cost} per hour is above the budget of ${limit}"
    most_usd = constraints.max_usd
    run_usd = outcome.run_usd
    if most_usd is not None and run_usd is not None and run_usd > most_usd * (1 + 1e-9):
        cost, limit = apart(run_usd, most_usd)
        return f"${cost} for the run is above max_usd, ${limit}"
    return ""


def why_unusable(instance: Instance, rules: PlanRules) -> str:
    """Returns why no plan may use the type; empty: it may be used."""
    # Today's type runs the training already.
    if instance.type == rules.today.type:
        return ""
    if rules.allowed is not None and instance.type not in rules.allowed:
        return f"{instance.type} is not among the allowed instance types"
    if rules.catalog.info.needs_training_enum and not instance.in_training_enum:
        return f"a SageMaker training job cannot use {instance.type}"
    if instance.usd_per_hour is None and rules.ranking.is_billed:
        return f"{instance.type} has no price"
    # SageMaker runs one image on all hosts of a job; on Kubernetes data hosts may have their own.
    if rules.catalog.info.needs_training_enum and instance.architecture != rules.today.architecture:
        return (
            f"{instance.type} runs {instance.architecture} images, today's {rules.today.type} "
            f"{rules.today.architecture}: a job has one image"
        )
    return instance.barred


def plan_of(
    candidate: Candidate, outcome: Predicted | None, problem: str, *, global_batch_size: int | None
) -> Plan:
    """Returns the candidate as a record; global_batch_size: today's."""
    estimated = candidate.estimate
    replicas = candidate.shape.replicas
    wider = None
    if global_batch_size is not None and replicas != 1 and not candidate.problem:
        wider = max(1, round(replicas * global_batch_size))
    reason = problem
    if candidate.asked_for and problem:
        reason = f"{ASKED_FOR}, but {problem}"
    elif candidate.asked_for:
        reason = ASKED_FOR
    return Plan(
        action=candidate.action,
        groups=candidate.groups,
        remote_share=estimated.remote_share if estimated else 0.0,
        predicted=outcome,
        feasible=not problem,
        reason=reason,
        global_batch_size=wider,
        num_workers=candidate.num_workers,
    )


def refuse_endless_search(constraints: Constraints) -> None:
    """Raises UsageError if `max_data_hosts` is larger than any training run needs."""
    if constraints.max_data_hosts > _MOST_DATA_HOSTS:
        raise UsageError(
            f"max_data_hosts {constraints.max_data_hosts} is too large: {_MOST_DATA_HOSTS} at most",
            where="key constraints.max_data_hosts",
            fix="the default is 8; a larger cluster is priced with --group",
        )


def refuse_foreign_prices(constraints: Constraints, catalog: Catalog) -> None:
    """Raises UsageError if the prices are of a region that the constraints do not allow."""
    regions = constraints.regions
    if regions is not None and catalog.region is not None and catalog.region not in regions:
        raise UsageError(
            f"the prices are for region {catalog.region}, but only "
            f"{', '.join(regions) or 'no region'} is allowed",
            where="key constraints.regions",
            fix="--prices FILE with prices of an allowed region, or allow this one",
        )


def with_profiled(profile: Profile, catalog: Catalog) -> Catalog:
    """Returns the catalog with the measured hosts' types, where it has facts about others only.

    A job ran on them, so that the types exist, and its profile was paid. Of hosts that nothing was
    measured on, and of a workstation's, the catalog has to know the type: else UsageError is
    raised.
    """
    measured = {data.instance_type: data.workers_per_host or 1 for data in profile.data}
    measured[profile.host.instance_type] = profile.host.vcpus or 0
    for name, vcpus in measured.items():
        try:
            catalog.get(name)
        except UsageError:
            if not vcpus or catalog.info.is_this_machine or local_instance(name):
                raise
            instance = unknown_instance(name, platform=catalog.platform, vcpus=vcpus)
            catalog = catalog.with_type(instance)
    return catalog


def refuse_undecidable(workload: Workload, catalog: Catalog) -> None:
    """Raises UsageError for what `decide` would refuse after a profile, or a training run after it.

    These are types that nobody knows, today's or allowed ones, prices of a region that is not
    allowed, an endless search, and a limit in dollars where today's price is not known.
    """
    constraints = workload.known_constraints
    refuse_foreign_prices(constraints, catalog)
    refuse_endless_search(constraints)
    allowed_types(constraints, catalog)
    refuse_preferences(workload, catalog)
    if workload.cluster is None:
        return
    name = workload.cluster.dnn.instance_type
    try:
        today = catalog.get(name)
    except UsageError as err:
        # Of EC2's types there is no list here: nodes of another type may exist.
        if not catalog.info.needs_training_enum:
            return
        where = f"workload {workload.name}, key cluster.dnn.instance_type"
        raise UsageError(err.what, where=where, fix=err.fix) from None
    limits = {"max_usd": constraints.max_usd, "max_usd_per_run": constraints.max_usd_per_run}
    limited = next((f"{key}: {usd:g}" for key, usd in limits.items() if usd is not None), None)
    if limited and today.usd_per_hour is None:
        raise UsageError(
            f"the price of {today.type} is not known, so this limit cannot be checked",
            where=f"workload {workload.name}, key constraints.{limited}",
            fix=f"give its price: {catalog.added_by}; or leave the limit out",
        )


def allowed_types(constraints: Constraints, catalog: Catalog) -> frozenset[str] | None:
    """Returns the allowed types by the catalog's names; None: all. Raises UsageError for others."""
    if constraints.allowed_instance_types is None:
        return None
    names = set()
    for index, name in enumerate(constraints.allowed_instance_types):
        try:
            names.add(catalog.get(name).type)
        except UsageError as err:
            where = f"key constraints.allowed_instance_types[{index}]"
            raise UsageError(err.what, where=where, fix=err.fix) from None
    return frozenset(names)


def _width_of_trial(work: StepWork, shape: ClusterShape, made: Estimate) -> float:
    """Returns by how much the loader alone was slower with this number of workers, if tried.

    Training does not make it faster: either was measured at a bad moment.
    """
    dnn = shape.dnn
    is_today = dnn.instance.type == work.reference.type and dnn.count == work.hosts
    if shape.data or not is_today:
        return 0.0
    rate = work.rates.get(dnn.all_workers)
    if rate is None:
        return 0.0
    return min(max(0.0, 1 / (rate * made.step_seconds) - 1), _MOST_OF_TRIAL)


def _widths_of(work: StepWork, shape: ClusterShape) -> Iterator[float]:
    """Yields the relative errors that come with a cluster's shape."""
    all_hosts = (shape.dnn, *shape.data)
    if any(
        hosts.instance.type != work.reference.type
        and None in (hosts.instance.coremark_per_vcpu, work.reference.coremark_per_vcpu)
        for hosts in all_hosts
    ):
        # Without CPU speeds the number of vCPUs alone is up to 84% wrong (docs/method.md).
        yield 0.2
    if shape.data:
        # Earlier runs on this machine may disagree.
        yield work.calibration_spread
    if shape.data and not work.batch_bytes:
        yield 0.05
    workers = sum(hosts.all_workers for hosts in all_hosts)
    if work.shared.most and work.waits and workers > work.shared.most:
        yield min(_EACH_DOUBLING * math.log2(workers / work.shared.most), _MOST_OF_DOUBLINGS)
    if work.num_workers == 0 and shape.dnn.workers and work.loader_cpu_seconds > 0:
        # Beside no worker yet: a trainer on one core with its worker used 1.1 to 1.4 times its CPU.
        share = work.trainer_cpu_seconds / (work.trainer_cpu_seconds + work.loader_cpu_seconds)
        yield min(_UNMEASURED_TURNS * share, _MOST_OF_TURNS)
    if shape.replicas != 1:
        # How the accelerators scale was not measured.
        yield 0.1
    apart = work.loader_cpu_seconds + work.trainer_cpu_seconds
    if shape.data and apart > 0 and abs(work.turns_cpu_seconds) > _WORTH_TURNS * apart:
        yield min(abs(work.turns_cpu_seconds) / apart / 2, _MOST_OF_TURNS)
