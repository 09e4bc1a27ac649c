"""The decision: which cluster to use for a profiled training."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from itertools import chain

import msgspec

from stoker.catalog import Catalog, Instance
from stoker.decide.advise import (
    IN_STEP_FIX,
    advice_of,
    fix_first,
    warnings_of,
    warnings_of_types,
)
from stoker.decide.candidates import Candidate, SearchSpace, keep, named
from stoker.decide.choose import FlowChart, Recommendation, choose, decision_path
from stoker.decide.gpu_decoding import offload_plan
from stoker.decide.model import Hosts, StepWork, parts_on
from stoker.decide.observed import decide_observed, how_to_profile
from stoker.decide.pricing import (
    PlanRules,
    allowed_types,
    measured,
    plan_of,
    refuse_endless_search,
    refuse_foreign_prices,
    with_profiled,
)
from stoker.decide.scaled_profile import (
    TakeAs,
    advice_of_taken,
    of_the_training,
    profiled_type,
    taken_as,
)
from stoker.decide.search import (
    advice_on_shards,
    candidates_of,
    hosts_of,
    plan_on,
    plans_of_last_run,
)
from stoker.decide.step_work import data_hosts_of, measure, today_of, with_own_storage
from stoker.decide.trial import trial_of
from stoker.errors import UsageError
from stoker.record_words import unfed_words, unreached_words
from stoker.records import (
    Advice,
    Bottleneck,
    Calibration,
    Constraints,
    Decision,
    FeedSettings,
    Group,
    Plan,
    Prices,
    Profile,
    TakenElsewhere,
    TrainingSize,
    Trial,
    Workload,
)
from stoker.records.base import sha256_of
from stoker.records.decision import NOMINAL, VerdictKind
from stoker.records.workload import own_keys
from stoker.step_model import bottleneck_of, too_busy


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionInputs:
    """What a decision is made from.

    Attributes:
        training: How long the training is, for its deadline.
        feed: `local_workers` may fix the workers of a dnn host with a data group.
        extra_clusters: Clusters to price in addition to those that are searched.
        fallback: Cluster to use if other programs make the profile too noisy; empty: today's.
        last: Cluster of the last run's plan, which is priced beside those that are searched.
        today: The date for the age of prices.
        processes_per_host: Trainer processes of a dnn host; absent: one per accelerator.
        take_as: Target type to scale the profile to; absent: it was taken on today's hosts.
        subject: The training as words of stoker's commands, for one that measures a plan; empty:
            the profile's command.
    """

    profile: Profile
    catalog: Catalog
    constraints: Constraints
    today: date
    training: TrainingSize = field(default_factory=TrainingSize)
    feed: FeedSettings = field(default_factory=FeedSettings)
    extra_clusters: Sequence[tuple[Group, ...]] = ()
    fallback: tuple[Group, ...] = ()
    last: tuple[Group, ...] = ()
    processes_per_host: int | None = None
    calibration: Calibration | None = None
    take_as: TakeAs | None = None
    subject: Sequence[str] = ()

    def processes_on(self, host: Instance) -> int:
        """Returns the number of trainer processes of a dnn host."""
        return self.processes_per_host or max(1, host.accelerators)


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """What all plans of a decision are made from, and the rules that they are checked against.

    Attributes:
        profile: Of the training: if it was scaled, without what belongs to the profiled hosts.
        is_busy: Other programs made the profile too noisy for any prediction.
        fills_machine: Today's hosts have all cores of the machine that all plans run on.
        taken: How the profile was scaled to today's hosts; None: it was taken there.
    """

    inputs: DecisionInputs
    profile: Profile
    space: SearchSpace
    rules: PlanRules
    is_busy: bool
    fills_machine: bool
    taken: TakenElsewhere | None = None

    @property
    def unpredictable(self) -> str:
        """Why nothing can be predicted: the accelerators' step is not known. Empty: it is."""
        unexplained = self.space.work.unexplained
        if self.taken is None or unexplained is None:
            return ""
        if self.taken.accelerator_step_source != "unknown":
            return ""
        return unexplained.text

    @property
    def named_clusters(self) -> tuple[tuple[Group, ...], ...]:
        """Clusters that the user named."""
        if not self.inputs.fallback:
            return tuple(self.inputs.extra_clusters)
        return (*self.inputs.extra_clusters, self.inputs.fallback)

    def plan_on(self, candidate: Candidate) -> Plan:
        """Returns the candidate's plan: predicted, priced and checked."""
        return plan_on(self.space, candidate, self.rules)


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """Today's cluster, with which all others are compared."""

    candidate: Candidate
    plan: Plan
    bottleneck: Bottleneck


@dataclass(frozen=True, slots=True, kw_only=True)
class Pick:
    """The plan to run, and all plans in their order.

    Attributes:
        choice: What is recommended.
        chosen: The plan to run: the recommended one, its probable one, or the fallback's.
        plans: All plans, the chosen one first.
        fix_first: What to fix before anything that costs; empty: nothing.
        is_noisy: Other programs leave the verdict open.
    """

    choice: Recommendation
    chosen: Plan
    plans: tuple[Plan, ...]
    fix_first: str
    is_noisy: bool

    @property
    def verdict(self) -> VerdictKind:
        if self.is_noisy:
            return "unknown"
        return self.choice.verdict


def decide(inputs: DecisionInputs) -> Decision:
    """Ranks the clusters that could run the workload and picks one. Pure: no I/O, no clock.

    Raises:
        UsageError: If a type is not in the catalog, a number is out of range, more data hosts are
            allowed than are searched, the prices are of a region that the constraints do not
            allow, or the profile cannot be scaled to another type.
    """
    refuse_foreign_prices(inputs.constraints, inputs.catalog)
    refuse_endless_search(inputs.constraints)
    if not inputs.take_as:
        inputs = replace(inputs, catalog=with_profiled(inputs.profile, inputs.catalog))
    if inputs.profile.step is None:
        return _decide_untimed(inputs)
    basis = prepare(inputs)
    today_plan = baseline(basis)
    others = search(basis, today_plan)
    return explain(basis, today_plan, pick(basis, today_plan, others))


def _decide_untimed(inputs: DecisionInputs) -> Decision:
    if inputs.take_as is not None:
        raise UsageError(
            "no step was timed: there is nothing to scale to another type",
            where=f"--as {inputs.take_as.instance_type}",
            fix=how_to_profile(inputs.profile).removesuffix("."),
        )
    return decide_observed(
        inputs.profile,
        catalog=inputs.catalog,
        constraints=inputs.constraints,
        is_asked=bool(inputs.extra_clusters),
        today=inputs.today,
        feed=inputs.feed,
        processes_per_host=inputs.processes_per_host,
    )


def prepare(inputs: DecisionInputs) -> Basis:
    """Returns the profile as work on today's hosts, or scaled to the type of `take_as`."""
    profile = inputs.profile
    catalog = inputs.catalog
    if inputs.take_as:
        # The catalog is of the platform that the profile is scaled for.
        listed = profiled_type(profile, catalog)
    else:
        listed = catalog.get(profile.host.instance_type)
    host = today_of(profile, listed)
    vcpus = host.capacity * profile.host.count
    machine_vcpus = catalog.max_total_vcpus
    basis = _basis(
        inputs,
        host,
        _measured_work(inputs, host),
        is_busy=bool(too_busy(profile, vcpus=vcpus, machine_vcpus=machine_vcpus)),
        fills_machine=machine_vcpus is not None and machine_vcpus <= vcpus,
    )
    if inputs.take_as is None:
        return basis
    return _scaled(basis, inputs.take_as, listed)


def _measured_work(inputs: DecisionInputs, host: Instance) -> StepWork:
    """Returns the work of a step as it was measured on `host`."""
    profile = inputs.profile
    catalog = inputs.catalog
    data: tuple[Hosts, ...] = ()
    if inputs.take_as is None:
        # `taken_as` refuses to scale a profile with data hosts; their types need not be known.
        data = data_hosts_of(profile, catalog)
    work = measure(
        profile,
        today=host,
        processes=inputs.processes_on(host),
        calibration=inputs.calibration or Calibration(),
        storage=inputs.constraints.storage or "unknown",
        machine_vcpus=catalog.max_total_vcpus,
        shards_of_rank=inputs.feed.shards,
        data=data,
    )
    # One call for a whole batch cannot be divided among workers.
    is_one_by_one = profile.loader is not None and profile.loader.splits is True
    return replace(work, splits=is_one_by_one and inputs.feed.splits)


def _basis(
    inputs: DecisionInputs, host: Instance, work: StepWork, *, is_busy: bool, fills_machine: bool
) -> Basis:
    profile = inputs.profile
    space = SearchSpace(
        work=work,
        own_storage=with_own_storage(work),
        catalog=inputs.catalog,
        today=host,
        processes=inputs.processes_on(host),
        feed=inputs.feed,
        unfed=unfed_words(profile.loader, inputs.feed),
        unworkable=_unworkable(profile),
        most_workers=_most_workers(profile, host),
    )
    rules = PlanRules(
        constraints=inputs.constraints,
        catalog=inputs.catalog,
        today=host,
        allowed=allowed_types(inputs.constraints, inputs.catalog),
        total_steps=inputs.training.total_steps(),
    )
    return Basis(
        inputs=inputs,
        profile=profile,
        space=space,
        rules=rules,
        is_busy=is_busy,
        fills_machine=fills_machine,
    )


def _scaled(basis: Basis, take_as: TakeAs, listed: Instance) -> Basis:
    """Returns the basis on hosts of another type; `listed`: the profiled type."""
    inputs = basis.inputs
    space = basis.space
    target = inputs.catalog.get(take_as.instance_type)
    # The profile knows more than the catalog of the profiled type.
    host = space.today if target.type == space.today.type else target
    processes = inputs.processes_on(host)
    work, taken = taken_as(
        space.work,
        profile=inputs.profile,
        target=host,
        processes=processes,
        given=take_as,
        catalog=inputs.catalog,
    )
    profile = of_the_training(inputs.profile)
    if host.accelerator_model != listed.accelerator_model:
        # Another accelerator decodes at another rate.
        profile = msgspec.structs.replace(profile, gpu_decoding=None)
    own_storage = with_own_storage(work)
    return replace(
        basis,
        profile=profile,
        space=replace(space, work=work, own_storage=own_storage, today=host, processes=processes),
        rules=replace(basis.rules, today=host),
        taken=taken,
    )


def baseline(basis: Basis) -> Baseline:
    """Returns today's cluster: as it was measured, or as predicted if the profile was scaled."""
    profile = basis.profile
    work = basis.space.work
    candidate = keep(basis.space)
    if basis.taken:
        plan = basis.plan_on(candidate)
        reason = f"today's cluster, by a profile of {basis.taken.profiled_on}: not measured"
    else:
        outcome = measured(profile, work, candidate, basis.rules)
        plan = plan_of(candidate, outcome, "", global_batch_size=None)
        reason = "today's cluster, as it was measured"
        if profile.spread is None and profile.check is None:
            # A step given by options (--step-seconds) has neither.
            reason = "today's cluster, as its step was given"
    return Baseline(
        candidate=candidate,
        # It runs today, whatever the constraints allow.
        plan=msgspec.structs.replace(plan, feasible=True, reason=reason),
        bottleneck=_bottleneck(work, candidate),
    )


def _bottleneck(work: StepWork, today: Candidate) -> Bottleneck:
    if today.estimate is None or work.unexplained:
        return "unexplained"
    bottleneck = parts_on(work, today.shape).bottleneck
    if work.data:
        # The data hosts load, even where the script has no workers.
        bottleneck = bottleneck_of(today.estimate.limit, waits=work.waits, workers=None)
    if work.launch_share and bottleneck in ("accelerator", "none"):
        return "launch"
    return bottleneck


def search(basis: Basis, today: Baseline) -> list[Plan]:
    """Returns the plans of all other clusters: named ones, those of the search, the last run's."""
    # Without the accelerator's step nothing can be predicted.
    if basis.unpredictable:
        return []
    space = basis.space
    rules = basis.rules
    named_candidates = [named(space, groups) for groups in basis.named_clusters]
    # Named clusters first: their twins among the searched ones are dropped.
    plans = [
        basis.plan_on(candidate)
        for candidate in named_candidates
        # Today's cluster has its plan already.
        if candidate.groups != today.candidate.groups
    ]
    # With other programs running no prediction holds: only named clusters are shown, marked.
    if not basis.is_busy:
        plans += _searched(basis, today)
        if basis.inputs.last:
            priced = (today.plan, *plans)
            plans += plans_of_last_run(space, basis.inputs.last, rules, known=priced)
    if today.bottleneck == "cpu":
        offload = offload_plan(basis.profile, space.work, today.candidate, rules=rules)
        if offload:
            plans.append(offload)
    return plans


def _searched(basis: Basis, today: Baseline) -> Iterator[Plan]:
    for candidate in candidates_of(basis.space, basis.rules, today.plan):
        # Today's cluster with its data hosts was measured and needs no prediction.
        if not basis.space.work.data or hosts_of(candidate) != hosts_of(today.candidate):
            yield basis.plan_on(candidate)


def pick(basis: Basis, today: Baseline, others: Sequence[Plan]) -> Pick:
    """Returns the plan to run among today's and the others, and all of them in their order."""
    ranking = basis.rules.ranking
    first = _what_to_fix_first(basis, today, others)
    choice = choose(
        today.plan,
        others,
        basis.rules.constraints,
        ranking=ranking,
        unexplained=basis.space.work.unexplained,
        fix_first=first,
    )
    chosen = _followed(choice, basis.rules)
    is_noisy = basis.is_busy
    # A fallback stands in for a verdict that noise prevented, never for a plan that is sure.
    if chosen.action == "keep" and (fallback := _plan_of_fallback(basis, chosen)):
        chosen = fallback
        is_noisy = is_noisy or chosen.action != "keep"
    # A named cluster may be one of the searched ones, or the fallback's: it is listed once.
    rest: list[Plan] = []
    for plan in (today.plan, *others):
        if not any(_is_same(plan, other) for other in (chosen, *rest)):
            rest.append(plan)
    return Pick(
        choice=choice,
        chosen=chosen,
        plans=(chosen, *ranking.ranked(rest)),
        fix_first=first,
        is_noisy=is_noisy,
    )


def _what_to_fix_first(basis: Basis, today: Baseline, others: Sequence[Plan]) -> str:
    storage = basis.space.work.storage
    first = fix_first(basis.profile, storage=storage, bottleneck=today.bottleneck)
    # A plan to tune is infeasible where the script would need more shards for its workers.
    more_shards = (
        plan.reason
        for plan in others
        if plan.action == "tune" and not plan.feasible and plan.predicted
    )
    return first or next(more_shards, "")


def _followed(choice: Recommendation, rules: PlanRules) -> Plan:
    """Returns the plan to train on: a probable one only where it was allowed, or a try is free."""
    follow = rules.constraints.follow
    if follow is None:
        is_free = rules.catalog.info.is_this_machine and rules.catalog.purchase == NOMINAL
        follow = "probable" if is_free else "sure"
    if choice.verdict == "probable" and follow == "probable" and choice.probable:
        return choice.probable
    return choice.plan


def _plan_of_fallback(basis: Basis, chosen: Plan) -> Plan | None:
    """Returns the fallback's plan; None where the profile is quiet, or it is no other plan."""
    fallback = basis.inputs.fallback
    if not fallback or not (basis.is_busy or basis.space.work.machine_width):
        return None
    plan = basis.plan_on(named(basis.space, fallback))
    if not plan.feasible or not plan.predicted or _is_same(plan, chosen):
        return None
    return msgspec.structs.replace(plan, reason=f"the plan of --group, as {chosen.reason}")


def explain(basis: Basis, today: Baseline, picked: Pick) -> Decision:
    """Returns the decision: the picked plan with its path, advice, warnings and prices."""
    inputs = basis.inputs
    profile = basis.profile
    steps = _walk_of(basis, today, picked)
    is_elsewhere = basis.taken is not None
    used_types = _types_of((today.plan, picked.chosen), inputs.catalog)
    prices = _prices_of(basis, picked.plans, used_types)
    return Decision(
        profile_sha256=sha256_of(inputs.profile),
        workload_sha256=profile.workload_sha256,
        workload_keys=own_keys(profile.workload_keys, is_elsewhere=is_elsewhere),
        bottleneck=today.bottleneck,
        action=picked.chosen.action,
        plan=picked.chosen,
        verdict=picked.verdict,
        probable=picked.choice.probable,
        trial=_trial_of(basis, picked.choice.probable),
        plans=picked.plans,
        path=decision_path(steps),
        advice=tuple(_advice(basis, steps, picked.plans)),
        warnings=(
            *warnings_of(steps, profile, basis.rules, prices, is_taken=is_elsewhere),
            *warnings_of_types(basis.rules, used_types),
            *_warnings_of_inputs(basis, used_types),
        ),
        prices=prices,
        objective=inputs.constraints.objective,
        constraints=inputs.constraints,
        calibration=inputs.calibration,
        others_vcpus=profile.observed.others_vcpus if profile.observed else None,
        taken_elsewhere=basis.taken,
        is_noisy=picked.is_noisy,
    )


def _advice(basis: Basis, steps: FlowChart, plans: Sequence[Plan]) -> Iterator[Advice]:
    if basis.taken:
        yield from advice_of_taken(basis.space, basis.taken)
    yield from advice_of(steps, basis.profile, is_taken=basis.taken is not None)
    if not (basis.is_busy or basis.unpredictable):
        yield from advice_on_shards(basis.space, basis.rules, plans)


def _walk_of(basis: Basis, today: Baseline, picked: Pick) -> FlowChart:
    free_fixes = [fix for fix in basis.profile.fixes if fix.cost == "none" and fix.saves_seconds]
    return FlowChart(
        work=basis.space.work,
        bottleneck=today.bottleneck,
        keep=today.plan,
        choice=picked.choice,
        chosen=picked.chosen,
        plans=picked.plans,
        constraints=basis.rules.constraints,
        ranking=basis.rules.ranking,
        free_fixes=tuple(fix.text for fix in free_fixes),
        fix_first=picked.fix_first,
        unfed=basis.space.unfed,
        in_step=(basis.profile.loader and basis.profile.loader.in_step) or "",
        unworkable=basis.space.unworkable,
        is_machine_full=basis.fills_machine and not picked.fix_first,
        taken=basis.taken,
    )


def _unworkable(profile: Profile) -> str:
    """Returns why no loader worker can make the batches; empty: workers can, or not known."""
    loader = profile.loader
    if loader is None:
        return ""
    if loader.in_step:
        return f"workers make no batch ahead: {loader.in_step}"
    if loader.fails_in_workers:
        return f"the loader fails in a worker: {loader.fails_in_workers}"
    return ""


def _most_workers(profile: Profile, host: Instance) -> int | None:
    """Returns how many loader workers a host has memory for; None: not known."""
    memory = profile.memory
    if memory is None or host.type != profile.host.instance_type:
        return None
    if any(state.id == "memory" for state in profile.states):
        return memory.workers
    return memory.most_workers


def _types_of(plans: Sequence[Plan], catalog: Catalog) -> list[Instance]:
    return [catalog.get(group.instance_type) for group in _groups_of(plans)]


def _groups_of(plans: Sequence[Plan]) -> list[Group]:
    return [*chain.from_iterable(plan.groups for plan in plans)]


def _prices_of(basis: Basis, plans: Sequence[Plan], used_types: Sequence[Instance]) -> Prices:
    catalog = basis.inputs.catalog
    return msgspec.structs.replace(
        catalog.prices(used_types, today=basis.inputs.today),
        purchase=basis.rules.purchase,
        estimated=catalog.estimates(_groups_of(plans)) or None,
    )


def _trial_of(basis: Basis, probable: Plan | None) -> Trial | None:
    if probable is None:
        return None
    return trial_of(
        probable,
        profile=basis.profile,
        catalog=basis.inputs.catalog,
        subject=basis.inputs.subject,
        is_elsewhere=basis.taken is not None,
    )


def _warnings_of_inputs(basis: Basis, used_types: Sequence[Instance]) -> Iterator[str]:
    """Yields what the named clusters would need to be predicted, and prices of a later date."""
    if basis.unpredictable and basis.named_clusters:
        yield f"what the named groups would do is not known: {basis.unpredictable}"
    dates = {(host.type, host.priced_on) for host in used_types if host.priced_on}
    for name, priced_on in sorted(dates):
        if priced_on > basis.inputs.today:
            yield f"the price of {name} is dated {priced_on}, in the future: its age is not known"


def _is_same(one: Plan, other: Plan) -> bool:
    return one.action == other.action and one.groups == other.groups


def refuse_unfed(profile: Profile, workload: Workload) -> None:
    """Raises UsageError if the training needs the feed, which cannot reach its loader."""
    loader = profile.loader
    feed = workload.feed
    words = unreached_words(loader, feed)
    is_fed = feed.replace_dataloader is not False and workload.engine_settings.name == "feed"
    if loader is None or not words or not is_fed:
        return
    fix = "give the training a loader of torch's or stoker's"
    if loader.in_step:
        fix = IN_STEP_FIX
    if loader.reach == "left":
        fix = "read stoker's class, or train with --replace-dataloader true"
    raise UsageError(
        words,
        where=f"workload {workload.name}, the loader that was profiled",
        fix=f"{fix}; or set feed.replace_dataloader: false, to train without data hosts",
    )
