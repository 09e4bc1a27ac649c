"""The decision: which cluster to use for a profiled training."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from datetime import date

import msgspec

from stoker.catalog import Catalog, Instance
from stoker.decide.advise import (
    IN_STEP_FIX,
    advice_of,
    before_money,
    fix_first,
    unfed_advice,
    warnings_of,
    warnings_of_prices,
    warnings_of_types,
)
from stoker.decide.candidates import (
    Candidate,
    Site,
    heterogeneous,
    keep,
    more_shards_words,
    named,
    scale_out,
    scale_up,
    tune,
    with_any_shards,
)
from stoker.decide.choose import (
    Recommendation,
    Walk,
    choose,
    cluster,
    misses_deadline,
    walk,
)
from stoker.decide.elsewhere import (
    TakeAs,
    advice_of_taken,
    of_the_training,
    profiled_type,
    taken_as,
)
from stoker.decide.gpu_decoding import offload_plan
from stoker.decide.model import ClusterShape, Hosts, parts_on
from stoker.decide.pricing import (
    Rules,
    allowed_types,
    measured,
    plan_of,
    predicted,
    problem_of,
    refuse_endless_search,
    refuse_foreign_prices,
    why_unusable,
    with_profiled,
)
from stoker.decide.trial import trial_of
from stoker.decide.work import data_hosts_of, measure, today_of, with_own_storage
from stoker.errors import UsageError
from stoker.records import (
    Advice,
    Answer,
    Bottleneck,
    Calibration,
    Constraints,
    Decision,
    FeedSettings,
    Group,
    Plan,
    Profile,
    TodaysGroup,
    TrainingSize,
    Workload,
)
from stoker.records.base import sha256_of
from stoker.records.decision import NOMINAL
from stoker.records.parts import bottleneck_of, too_busy
from stoker.records.workload import own_keys
from stoker.text import ms, percentage, usd
from stoker.words import unfed_words, unreached_words

_NOTHING = "no step was timed, so nothing can be predicted for another cluster"
# Smaller ones have little network, and one of their cores is not for loading.
_MIN_VCPUS = 8
# More shards are advised where a step would take less than this share of the best plan's.
_MORE_SHARDS_HELP = 0.9
# Data types whose plans are listed: the best by the objective, and by the other one. Each has a
# plan for each number of hosts (8 by default): more types would hide the useful rows.
_BEST_TYPES = 3
_BEST_BY_OTHER = 2


def decide_observed(
    profile: Profile,
    *,
    catalog: Catalog,
    constraints: Constraints,
    is_asked: bool,
    today: date,
    feed: FeedSettings,
    processes_per_host: int | None,
) -> Decision:
    """Decides on a profile that has only `observed`: today's cluster is kept. Pure.

    Raises UsageError if today's type is not in the catalog. is_asked: clusters were named, too.
    """
    observed = profile.observed
    assert observed is not None
    now = catalog.get(profile.host.instance_type)
    processes = processes_per_host or max(1, now.accelerators)
    count = profile.host.count
    dnn = TodaysGroup(instance_type=now.type, count=count, processes_per_host=processes)
    keep = Plan(action="keep", groups=(Group.of_today(dnn),), reason=_NOTHING)
    unfed = unfed_words(profile.loader, feed)
    suspect = observed.suspect
    best = _best_data_type(catalog, constraints) if suspect == "cpu" and not unfed else None
    prices = catalog.prices([now, *([best] if best else [])], today=today)
    rules = Rules(
        constraints=constraints, catalog=catalog, today=now, allowed=None, total_steps=None
    )
    prices = msgspec.structs.replace(prices, purchase=rules.purchase)
    warnings = list(warnings_of_prices(prices, platform=catalog.info))
    if is_asked:
        warnings.append(f"what the named groups would do is not known: {_NOTHING}")
    if now.usd_per_hour is None:
        warnings.append(f"{now.type} has no price: give one with --prices FILE")
    cpu, gpu = (
        "not known" if value is None else percentage(value)
        for value in (observed.cpu_utilization, observed.gpu_utilization)
    )
    seen = f"CPU {cpu}, GPU {gpu}"
    meaning = {
        "cpu": f"probably: {seen}, as means over the job; only a profile shows waiting",
        "accelerator": f"probably not: {seen}; but GPUs that wait for each other count as busy",
        "neither": f"probably not: {seen}; steps wait for something else, or for one thread",
        "unknown": f"{seen}: not enough evidence",
    }[suspect]
    because = {
        "Do the measured parts explain the step?": "no step was timed: only how busy the hosts "
        "were is known",
        "Is the CPU the limit?": meaning,
        "Is the best change worth more than its error band?": _NOTHING,
    }
    when = before_money(is_billed=prices.is_billed)
    return Decision(
        profile_sha256=sha256_of(profile),
        workload_sha256=profile.workload_sha256,
        workload_keys=profile.workload_keys,
        bottleneck="unexplained",
        action="keep",
        plan=keep,
        verdict="unknown",
        plans=(keep,),
        path=tuple(Answer(question=q, answer="unknown", because=b) for q, b in because.items()),
        advice=(
            Advice(id="profile", text=_again(profile), when=when),
            *_advice_on_observed(profile, now, best, suspect=suspect, unfed=unfed),
        ),
        warnings=tuple(warnings),
        prices=prices,
        objective=constraints.objective,
        constraints=constraints,
    )


def _advice_on_observed(
    profile: Profile, now: Instance, best: Instance | None, *, suspect: str, unfed: str
) -> Iterator[Advice]:
    if unfed:
        yield unfed_advice(unfed, profile)
    elif suspect == "cpu":
        text = "A data group or a larger type of the family may pay; lighter transforms cost "
        when = "the profile says that loading is the limit"
        yield Advice(id="cpu-bound", text=f"{text}nothing.", when=when)
        if best and best.usd_per_hour and now.usd_per_hour:
            price = usd(best.usd_per_hour, is_estimate=bool(best.estimate))
            ratio = 1 + best.usd_per_hour / (now.usd_per_hour * profile.host.count)
            text = (
                f"One {best.type} added to today's hosts ({price} per hour) would "
                f"pay for itself from {ratio:.2f}x on; whether it gets there is not known."
            )
            yield Advice(id="break-even", text=text)
    elif suspect == "neither":
        text = "More loader workers, prefetching and faster storage come before any host: today's "
        yield Advice(id="idle-cpus", text=f"{text}CPUs are not busy.")
    elif suspect == "accelerator":
        text = "A data group would probably change nothing: look at the model first (mixed "
        yield Advice(id="accelerator", text=f"{text}precision, compilation, batch size).")


def _again(profile: Profile) -> str:
    notes = profile.what.get("notes")
    if profile.what.get("source") != "process tree" or not isinstance(notes, list) or not notes:
        return "Profile the training, three minutes on today's cluster: stoker profile."
    return f"Profile the training so that its steps are seen. Last time: {notes[0]}."


def _best_data_type(catalog: Catalog, constraints: Constraints) -> Instance | None:
    """Returns the allowed CPU-only type with the most CPU for its price."""
    names = allowed_types(constraints, catalog)
    able = [
        (instance.coremark_per_vcpu * instance.vcpus / instance.usd_per_hour, instance.type)
        for instance in catalog.instances
        if instance.accelerators == 0
        and instance.usd_per_hour
        and not instance.barred
        and instance.coremark_per_vcpu
        and instance.vcpus >= _MIN_VCPUS
        and (names is None or instance.type in names)
        and (instance.in_training_enum or not catalog.info.needs_training_enum)
    ]
    return catalog.get(max(able)[1]) if able and constraints.max_data_hosts else None


def decide(
    profile: Profile,
    *,
    catalog: Catalog,
    constraints: Constraints,
    training: TrainingSize = TrainingSize(),  # noqa: B008 - frozen
    feed: FeedSettings = FeedSettings(),  # noqa: B008 - frozen
    extra_clusters: Sequence[tuple[Group, ...]] = (),
    fallback: tuple[Group, ...] = (),
    last: tuple[Group, ...] = (),
    today: date,
    processes_per_host: int | None = None,
    calibration: Calibration | None = None,
    take_as: TakeAs | None = None,
    subject: Sequence[str] = (),
) -> Decision:
    """Ranks the clusters that could run the workload and picks one. Pure: no I/O, no clock.

    Args:
        feed: `local_workers` may fix the workers of a dnn host with a data group.
        extra_clusters: Clusters to price in addition to those that are searched.
        fallback: Cluster to use if other programs make the profile too noisy; empty: today's.
        last: Cluster of the last run's plan, which is priced beside those that are searched.
        today: The date for the age of prices.
        processes_per_host: Trainer processes of a dnn host; absent: one per accelerator.
        take_as: Target type to scale the profile to; absent: it was taken on today's hosts.
        subject: The training as words of stoker's commands, for one that measures a plan; empty:
            the profile's command.

    Raises:
        UsageError: If a type is not in the catalog, a number is out of range, more data hosts are
            allowed than are searched, the prices are of a region that the constraints do not
            allow, or the profile cannot be scaled to another type.
    """
    refuse_foreign_prices(constraints, catalog)
    refuse_endless_search(constraints)
    catalog = catalog if take_as else with_profiled(profile, catalog)
    if profile.step is None:
        if take_as is not None:
            what = "no step was timed: there is nothing to scale to another type"
            fix = _again(profile).removesuffix(".")
            raise UsageError(what, where=f"--as {take_as.instance_type}", fix=fix)
        return decide_observed(
            profile,
            catalog=catalog,
            constraints=constraints,
            is_asked=bool(extra_clusters),
            today=today,
            feed=feed,
            processes_per_host=processes_per_host,
        )
    profile_sha256 = sha256_of(profile)
    listed = profiled_type(profile, catalog) if take_as else catalog.get(profile.host.instance_type)
    now = today_of(profile, listed)
    processes = processes_per_host or max(1, now.accelerators)
    vcpus = now.capacity * profile.host.count
    most_vcpus = catalog.max_total_vcpus
    busy = too_busy(profile, vcpus=vcpus, machine_vcpus=most_vcpus)
    work = measure(
        profile,
        today=now,
        processes=processes,
        calibration=calibration or Calibration(),
        storage=constraints.storage or "unknown",
        machine_vcpus=most_vcpus,
        shards_of_rank=feed.shards,
        data=() if take_as and profile.data else data_hosts_of(profile, catalog),
    )
    taken = None
    if take_as is not None:
        target = catalog.get(take_as.instance_type)
        # The profile knows more than the catalog of the profiled type.
        now = now if target.type == now.type else target
        processes = processes_per_host or max(1, now.accelerators)
        work, taken = taken_as(
            work, profile=profile, target=now, processes=processes, given=take_as, catalog=catalog
        )
        profile = of_the_training(profile)
        if now.accelerator_model != listed.accelerator_model:
            # Another accelerator decodes at another rate.
            profile = msgspec.structs.replace(profile, gpu_decoding=None)
    site = Site(
        work=work,
        own_storage=with_own_storage(work),
        catalog=catalog,
        today=now,
        processes=processes,
        feed=feed,
        unfed=unfed_words(profile.loader, feed),
        in_step=(profile.loader.in_step if profile.loader else None) or "",
    )
    rules = Rules(
        constraints=constraints,
        catalog=catalog,
        today=now,
        allowed=allowed_types(constraints, catalog),
        total_steps=training.total_steps(),
    )
    ranking = rules.ranking
    kept = keep(site)
    bottleneck: Bottleneck = "unexplained"
    if kept.estimate and not work.unexplained:
        bottleneck = parts_on(work, kept.shape).bottleneck
        if work.data:
            limit = kept.estimate.limit
            # The data hosts load, even where the script has no workers.
            bottleneck = bottleneck_of(limit, waits=work.waits, workers=None)
    if taken:
        keep_plan = _plan(site, kept, rules)
        reason = f"today's cluster, by a profile of {taken.profiled_on}: not measured"
    else:
        outcome = measured(profile, work, kept, rules)
        keep_plan = plan_of(kept, outcome, "", global_batch_size=None)
        # A step given by options (--step-seconds) has neither.
        is_given = profile.spread is None and profile.check is None
        reason = f"today's cluster, as {'its step was given' if is_given else 'it was measured'}"
    keep_plan = msgspec.structs.replace(keep_plan, feasible=True, reason=reason)
    step_is_known = taken is None or taken.accelerator_step_source != "unknown"
    nothing_holds = "" if step_is_known or not work.unexplained else work.unexplained.text
    asked = [*extra_clusters, *([fallback] if fallback else [])]
    # Named clusters first: their twins among the searched ones are dropped.
    others = [
        _plan(site, candidate, rules)
        # Without the accelerator's step nothing can be predicted.
        for groups in (() if nothing_holds else asked)
        for candidate in [named(site, groups)]
        if candidate.groups != kept.groups
    ]
    others += [
        _plan(site, candidate, rules)
        # With other programs running no prediction holds: only named clusters are shown, marked.
        for candidate in (() if busy or nothing_holds else _candidates(site, rules, keep_plan))
        # Today's cluster with its data hosts was measured and needs no prediction.
        if not (work.data and _hosts_of(candidate) == _hosts_of(kept))
    ]
    if last and not (busy or nothing_holds):
        others += _of_last_run(site, last, rules, known=(keep_plan, *others))
    if bottleneck == "cpu" and (offload := offload_plan(profile, work, kept, rules=rules)):
        others.append(offload)
    unknown = f"what the named groups would do is not known: {nothing_holds}"
    more_shards = next(
        (plan for plan in others if plan.action == "tune" and not plan.feasible and plan.predicted),
        None,
    )
    first = fix_first(profile, storage=work.storage, bottleneck=bottleneck)
    if more_shards:
        first = first or more_shards.reason
    choice = choose(
        keep_plan,
        others,
        constraints,
        ranking=ranking,
        unexplained=work.unexplained,
        fix_first=first,
    )
    chosen = _followed(choice, constraints, catalog)
    is_noisy = bool(busy)
    if fallback and chosen.action == "keep" and (busy or work.machine_width):
        plan = _plan(site, named(site, fallback), rules)
        if plan.feasible and plan.predicted and not _is_same(plan, chosen):
            reason = f"the plan of --group, as {chosen.reason}"
            chosen = msgspec.structs.replace(plan, reason=reason)
            is_noisy = is_noisy or chosen.action != "keep"
    rest: list[Plan] = []
    for plan in (keep_plan, *others):
        if not any(_is_same(plan, other) for other in (chosen, *rest)):
            rest.append(plan)
    plans = (chosen, *ranking.ranked(rest))
    found = Walk(
        work=work,
        bottleneck=bottleneck,
        keep=keep_plan,
        choice=choice,
        chosen=chosen,
        plans=plans,
        constraints=constraints,
        ranking=ranking,
        free_fixes=tuple(
            fix.text for fix in profile.fixes if fix.cost == "none" and fix.saves_seconds
        ),
        fix_first=first,
        unfed=site.unfed,
        in_step=site.in_step,
        is_machine_full=most_vcpus is not None and most_vcpus <= vcpus and not first,
        taken=taken,
    )
    used = [catalog.get(g.instance_type) for plan in (keep_plan, chosen) for g in plan.groups]
    every = [group for plan in plans for group in plan.groups]
    prices = msgspec.structs.replace(
        catalog.prices(used, today=today),
        purchase=rules.purchase,
        estimated=catalog.estimates(every) or None,
    )
    probable = choice.probable
    return Decision(
        profile_sha256=profile_sha256,
        workload_sha256=profile.workload_sha256,
        workload_keys=own_keys(profile.workload_keys, is_elsewhere=take_as is not None),
        bottleneck=found.bottleneck,
        action=chosen.action,
        plan=chosen,
        verdict="unknown" if is_noisy else choice.verdict,
        probable=probable,
        trial=trial_of(
            probable,
            profile=profile,
            catalog=catalog,
            subject=subject,
            is_elsewhere=taken is not None,
        )
        if probable
        else None,
        plans=plans,
        path=walk(found),
        advice=(
            *(advice_of_taken(site, taken) if taken else ()),
            *advice_of(found, profile, is_taken=taken is not None),
            *([] if busy or nothing_holds else _advice_on_shards(site, rules, plans)),
        ),
        warnings=(
            *warnings_of(found, profile, rules, prices, is_taken=taken is not None),
            *warnings_of_types(rules, used),
            *([unknown] if nothing_holds and asked else []),
            *(
                f"the price of {name} is dated {priced_on}, in the future: its age is not known"
                for name, priced_on in sorted({(i.type, i.priced_on) for i in used if i.priced_on})
                if priced_on > today
            ),
        ),
        prices=prices,
        objective=constraints.objective,
        constraints=constraints,
        calibration=calibration,
        others_vcpus=profile.observed.others_vcpus if profile.observed else None,
        taken_elsewhere=taken,
        is_noisy=is_noisy,
    )


def _followed(choice: Recommendation, constraints: Constraints, catalog: Catalog) -> Plan:
    """Returns the plan to train on: a probable one only where it was allowed, or a try is free."""
    follow = constraints.follow
    if follow is None:
        is_free = catalog.info.is_this_machine and catalog.purchase == NOMINAL
        follow = "probable" if is_free else "sure"
    is_tried = choice.verdict == "probable" and follow == "probable"
    return choice.probable if is_tried and choice.probable else choice.plan


def _of_last_run(
    site: Site, groups: tuple[Group, ...], rules: Rules, *, known: Sequence[Plan]
) -> list[Plan]:
    """Returns the plan of the last run's cluster, unless it is known or has a type that is not."""
    hosts = _hosts(groups)
    if any(_hosts(plan.groups) == hosts for plan in known):
        return []
    with contextlib.suppress(UsageError):
        candidate = dataclasses.replace(named(site, groups), asked_for=False)
        if all(not why_unusable(site.get(group.instance_type), rules) for group in groups):
            return [_plan(site, candidate, rules)]
    return []


def _candidates(site: Site, rules: Rules, keep_plan: Plan) -> Iterator[Candidate]:
    yield from tune(site)
    for candidate in scale_up(site):
        # On this machine even if not allowed, as an infeasible plan: the cores of data hosts are
        # compared with the same cores in one host.
        instance = candidate.shape.dnn.instance
        if site.catalog.info.is_this_machine or not why_unusable(instance, rules):
            yield candidate
    yield from _best_heterogeneous(site, rules)
    outcome = keep_plan.predicted
    # More accelerators change the global batch, thus the training: searched only if needed.
    if outcome is not None and (
        outcome.limit == "accelerator" or misses_deadline(outcome, rules.constraints)
    ):
        for candidate in scale_out(site):
            if not why_unusable(candidate.shape.dnn.instance, rules):
                yield candidate


def _best_heterogeneous(site: Site, rules: Rules) -> Iterator[Candidate]:
    if site.unfed:
        return
    by_type: dict[str, list[Candidate]] = {}
    plans: dict[str, list[Plan]] = {}
    for instance in _data_types(site, rules):
        made = list(heterogeneous(site, instance, most=rules.constraints.max_data_hosts))
        if made:
            by_type[instance.type] = made
            plans[instance.type] = [_plan(site, candidate, rules) for candidate in made]

    def best(name: str) -> tuple[bool, float, float]:
        return min(value_of(plan) for plan in plans[name])

    def value_of(plan: Plan) -> tuple[bool, float, float]:
        value, cpu = rules.ranking.of_plan(plan)
        # Without prices many types are as fast: those that take less CPU time are listed.
        return not plan.feasible, value, 0.0 if rules.ranking.is_billed else cpu

    def best_by_other(name: str) -> tuple[bool, float]:
        return min((not plan.feasible, rules.ranking.of_plan(plan)[1]) for plan in plans[name])

    names = sorted(plans, key=best)[:_BEST_TYPES]
    names += sorted(plans, key=best_by_other)[:_BEST_BY_OTHER]
    for name in dict.fromkeys(names):
        yield from by_type[name]


def _advice_on_shards(site: Site, rules: Rules, plans: Sequence[Plan]) -> list[Advice]:
    """Returns advice on more shards of a stream, where data hosts would then help more."""
    work = site.work
    if not work.shards or site.unfed:
        return []
    freed = with_any_shards(site)
    plans_of = (_plan(freed, candidate, rules) for candidate in _best_heterogeneous(freed, rules))
    able = [plan for plan in plans_of if plan.feasible and plan.predicted]
    if not able:
        return []
    best = rules.ranking.best(able)
    seconds = best.predicted.counted_seconds if best.predicted else math.inf
    known = [each.predicted.counted_seconds for each in plans if each.feasible and each.predicted]
    if seconds > _MORE_SHARDS_HELP * min(known, default=work.step_seconds):
        return []
    how, when = more_shards_words(site, best.groups), "the stream can be divided so far"
    if work.divides is False:
        how = "let the stream divide itself by get_worker_info(), which it does not ask today"
        when = "small work on the dataset"
    text = f"With more shards {cluster(best)} would take {ms(seconds)} per step: {how}. Then "
    return [Advice(id="shards", text=f"{text}profile and decide again.", when=when)]


def _data_types(site: Site, rules: Rules) -> list[Instance]:
    listed = {i.type: i for i in site.catalog.instances}
    for name in rules.allowed or ():
        listed.setdefault(name, site.catalog.get(name))
    # The catalog may know today's type without listing it: local types, and types of nodes.
    if site.today.accelerators == 0:
        listed.setdefault(site.today.type, site.today)
    return [
        site.get(instance.type)
        for _, instance in sorted(listed.items())
        if instance.accelerators == 0
        and (instance.usd_per_hour is not None or not rules.ranking.is_billed)
        and not why_unusable(instance, rules)
    ]


def _plan(site: Site, candidate: Candidate, rules: Rules) -> Plan:
    work = site.work
    today = ClusterShape(dnn=Hosts(instance=rules.today, count=work.hosts), data=work.data)
    outcome = predicted(work, candidate, today=today, rules=rules)
    problem = problem_of(candidate, outcome, rules)
    return plan_of(candidate, outcome, problem, global_batch_size=work.global_batch_size)


def _hosts_of(candidate: Candidate) -> list[tuple[str, str, int]]:
    return _hosts(candidate.groups)


def _hosts(groups: Sequence[Group]) -> list[tuple[str, str, int]]:
    return sorted((group.role, group.instance_type, group.count) for group in groups)


def _is_same(one: Plan, other: Plan) -> bool:
    return one.action == other.action and one.groups == other.groups


def refuse_unfed(profile: Profile, workload: Workload) -> None:
    """Raises UsageError if the training needs the feed, which cannot reach its loader."""
    loader, feed = profile.loader, workload.feed
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
