"""The decision: which cluster to use for a profiled training."""

from collections.abc import Sequence
from datetime import date

import msgspec

from stoker.catalog import Catalog
from stoker.decide.advise import (
    IN_STEP_FIX,
    advice_of,
    fix_first,
    warnings_of,
    warnings_of_types,
)
from stoker.decide.candidates import (
    Site,
    keep,
    named,
)
from stoker.decide.choose import (
    Recommendation,
    Walk,
    choose,
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
from stoker.decide.model import parts_on
from stoker.decide.observed import decide_observed, how_to_profile
from stoker.decide.pricing import (
    Rules,
    allowed_types,
    measured,
    plan_of,
    refuse_endless_search,
    refuse_foreign_prices,
    with_profiled,
)
from stoker.decide.search import (
    advice_on_shards,
    candidates_of,
    hosts_of,
    plan_on,
    plans_of_last_run,
)
from stoker.decide.trial import trial_of
from stoker.decide.work import data_hosts_of, measure, today_of, with_own_storage
from stoker.errors import UsageError
from stoker.records import (
    Bottleneck,
    Calibration,
    Constraints,
    Decision,
    FeedSettings,
    Group,
    Plan,
    Profile,
    TrainingSize,
    Workload,
)
from stoker.records.base import sha256_of
from stoker.records.decision import NOMINAL
from stoker.records.parts import bottleneck_of, too_busy
from stoker.records.workload import own_keys
from stoker.words import unfed_words, unreached_words


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
            fix = how_to_profile(profile).removesuffix(".")
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
        keep_plan = plan_on(site, kept, rules)
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
        plan_on(site, candidate, rules)
        # Without the accelerator's step nothing can be predicted.
        for groups in (() if nothing_holds else asked)
        for candidate in [named(site, groups)]
        if candidate.groups != kept.groups
    ]
    others += [
        plan_on(site, candidate, rules)
        # With other programs running no prediction holds: only named clusters are shown, marked.
        for candidate in (() if busy or nothing_holds else candidates_of(site, rules, keep_plan))
        # Today's cluster with its data hosts was measured and needs no prediction.
        if not (work.data and hosts_of(candidate) == hosts_of(kept))
    ]
    if last and not (busy or nothing_holds):
        others += plans_of_last_run(site, last, rules, known=(keep_plan, *others))
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
        plan = plan_on(site, named(site, fallback), rules)
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
            *([] if busy or nothing_holds else advice_on_shards(site, rules, plans)),
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
