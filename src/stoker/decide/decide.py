"""The decision: which cluster to use for a profiled training."""

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import date

import msgspec

from stoker.catalog import Catalog, Instance
from stoker.decide.advice import advice_of, fix_first, warnings_of
from stoker.decide.choose import choose, path
from stoker.decide.elsewhere import TakeAs, profiled_type, taken_as
from stoker.decide.price import Space, check_constraints, make_plan, with_profiled
from stoker.decide.search import named, searched
from stoker.decide.work import measure, today_of
from stoker.record_words import group_arguments, unfed_words
from stoker.records import (
    Constraints,
    Decision,
    FeedSettings,
    Group,
    Plan,
    Profile,
    TrainingSize,
)
from stoker.records.base import sha256_of
from stoker.records.decision import NOMINAL
from stoker.records.workload import own_keys


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionInputs:
    """What a decision is made from.

    Attributes:
        training: How long the training is, for its deadline.
        feed: `local_workers` may fix the workers of a dnn host with a data group.
        extra_clusters: Clusters to price in addition to those that are searched.
        fallback: Cluster to use if other programs make the profile too noisy; empty: today's.
        today: The date for the age of prices.
        processes_per_host: Trainer processes of a dnn host; absent: as profiled, at most one per
            accelerator.
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
    processes_per_host: int | None = None
    take_as: TakeAs | None = None
    subject: Sequence[str] = ()

    def processes_on(self, host: Instance) -> int:
        """Returns the number of trainer processes of a dnn host."""
        if self.processes_per_host:
            return self.processes_per_host
        # The launcher starts one for each accelerator that it sees, a script perhaps more.
        most = max(1, host.accelerators)
        ranks = self.profile.ranks
        if ranks is None or self.take_as is not None:
            return most
        # It may have seen fewer than the machine has (CUDA_VISIBLE_DEVICES).
        return min(most, max(1, ranks // self.profile.host.count))


def decide(inputs: DecisionInputs) -> Decision:
    """Ranks the clusters that could run the workload and picks one. Pure: no I/O, no clock.

    Raises:
        UsageError: If a type is not in the catalog, a number is out of range, more data hosts are
            allowed than are searched, the prices are of a region that the constraints do not
            allow, or the profile cannot be scaled to another type.
    """
    if not inputs.take_as:
        inputs = replace(inputs, catalog=with_profiled(inputs.profile, inputs.catalog))
    space = _space(inputs)
    work = space.work
    keep = make_plan(space, "keep", work.todays)
    others = [*_others(inputs, space, keep)]
    choice = choose(space, keep, others)
    chosen = choice.plan
    if choice.verdict == "probable" and choice.probable and space.purchase == NOMINAL:
        # A try is free on this machine.
        chosen = choice.probable
    is_noisy = work.is_too_noisy
    # A fallback stands in for a verdict that noise prevented, never for a plan that is sure.
    if inputs.fallback and chosen.action == "keep" and (work.unexplained or work.others_width):
        plan = named(space, inputs.fallback)
        if plan.feasible and plan.action != "keep":
            is_noisy = True
            reason = f"the plan of --group, as {chosen.reason}"
            chosen = msgspec.structs.replace(plan, reason=reason)
    # A named cluster may be one of the searched ones, or the fallback's: it is listed once.
    rest = {(plan.action, plan.groups): plan for plan in (*reversed(others), keep)}
    rest.pop((chosen.action, chosen.groups), None)
    plans = (chosen, *sorted(rest.values(), key=space.rank))
    groups = [group for plan in plans for group in plan.groups]
    prices = inputs.catalog.prices(groups, today=inputs.today)
    prices = msgspec.structs.replace(prices, purchase=space.purchase)
    profile = space.profile
    decision = Decision(
        profile_sha256=sha256_of(inputs.profile),
        workload_keys=own_keys(profile.workload_keys, is_elsewhere=space.taken is not None),
        bottleneck=space.bottleneck,
        action=chosen.action,
        plan=chosen,
        verdict="unknown" if is_noisy else choice.verdict,
        probable=choice.probable,
        trial=_trial(inputs, choice.probable) if choice.probable else None,
        plans=plans,
        prices=prices,
        objective=inputs.constraints.objective,
        constraints=inputs.constraints,
        taken_elsewhere=space.taken,
        is_noisy=is_noisy,
        loader_workers=_loader_workers(profile, chosen),
    )
    return msgspec.structs.replace(
        decision,
        path=tuple(path(space, decision)),
        advice=advice_of(space, decision),
        warnings=tuple(warnings_of(space, prices)),
    )


def _space(inputs: DecisionInputs) -> Space:
    """Returns what plans are made from."""
    profile = inputs.profile
    catalog = inputs.catalog
    constraints = inputs.constraints
    loader = profile.loader
    given = inputs.take_as
    allowed = check_constraints(constraints, catalog)
    # The catalog is of the platform that the profile is scaled for.
    listed = profiled_type(profile, catalog) if given else catalog.get(profile.host.instance_type)
    host = today_of(profile, listed)
    work = measure(
        profile,
        today=host,
        processes=inputs.processes_on(host),
        storage=constraints.storage or "unknown",
    )
    taken = None
    if given:
        target = catalog.get(given.instance_type)
        # The profile knows more than the catalog of the profiled type.
        target = host if target.type == host.type else target
        processes = inputs.processes_on(target)
        work, taken = taken_as(work, target, processes=processes, given=given)
        # States and fixes are those of the profiled host.
        profile = msgspec.structs.replace(profile, states=(), fixes=())
    bottleneck = work.bottleneck
    if work.unexplained:
        bottleneck = "unexplained"
    elif work.launch_share and bottleneck in ("accelerator", "none"):
        bottleneck = "launch"
    # A loader without workers: what data hosts cannot make, workers cannot make either.
    unworkable = loader.unsendable if loader and work.num_workers == 0 else ""
    return Space(
        profile=profile,
        work=work,
        catalog=catalog,
        constraints=constraints,
        feed=inputs.feed,
        allowed=allowed,
        total_steps=inputs.training.total_steps(),
        bottleneck=bottleneck,
        fix_first=fix_first(profile, storage=work.storage, bottleneck=bottleneck),
        unfed=unfed_words(loader, inputs.feed),
        unworkable=unworkable,
        taken=taken,
    )


def _others(inputs: DecisionInputs, space: Space, keep: Plan) -> Iterator[Plan]:
    """Yields the plans of all other clusters: named ones, and those of the search."""
    # Without the accelerator's step nothing can be predicted.
    if space.taken and space.taken.accelerator_step_source == "unknown":
        return
    # Named clusters first: their twins among the searched ones are dropped.
    for groups in filter(None, (*inputs.extra_clusters, inputs.fallback)):
        plan = named(space, groups)
        if plan.groups != keep.groups:
            yield plan
    # With other programs running no prediction holds: only named clusters are shown, marked.
    if not space.work.is_too_noisy:
        yield from searched(space, keep)


def _loader_workers(profile: Profile, plan: Plan) -> dict[str, int]:
    """Returns the workers that a plan gives a loader without any, by its line; empty: none."""
    line = profile.loader and profile.loader.made_ahead_at
    workers = sum(group.count * (group.workers_per_host or 0) for group in plan.groups)
    if not line or not workers:
        return {}
    ranks = sum(g.count * (g.processes_per_host or 1) for g in plan.groups if g.role == "dnn")
    return {line: math.ceil(workers / ranks)}


def _trial(inputs: DecisionInputs, probable: Plan) -> str:
    """Returns the command that trains on the plan's hosts, and so measures it."""
    words = inputs.subject or ("--", *(inputs.profile.command or ()))
    return shlex.join(["stoker", "train", *group_arguments(probable.groups), *words])
