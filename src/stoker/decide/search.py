"""The search space: which clusters are priced, and the plan of each."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

from stoker.catalog import Instance
from stoker.decide.candidates import (
    Candidate,
    SearchSpace,
    heterogeneous,
    more_shards_words,
    named,
    scale_out,
    scale_up,
    tune,
    with_any_shards,
)
from stoker.decide.choose import cluster, misses_deadline
from stoker.decide.model import ClusterShape, Hosts
from stoker.decide.pricing import PlanRules, plan_of, predicted, problem_of, why_unusable
from stoker.errors import UsageError
from stoker.records import Advice, Group, Plan
from stoker.units import ms

# More shards are advised where a step would take less than this share of the best plan's.
_MORE_SHARDS_HELP = 0.9
# Data types whose plans are listed: the best by the objective, and by the other one. Each has a
# plan for each number of hosts (8 by default): more types would hide the useful rows.
_BEST_TYPES = 3
_BEST_BY_OTHER = 2


def candidates_of(space: SearchSpace, rules: PlanRules, today_plan: Plan) -> Iterator[Candidate]:
    yield from tune(space)
    for candidate in scale_up(space):
        # On this machine even if not allowed, as an infeasible plan: the cores of data hosts are
        # compared with the same cores in one host.
        instance = candidate.shape.dnn.instance
        if space.catalog.info.is_this_machine or not why_unusable(instance, rules):
            yield candidate
    yield from _best_heterogeneous(space, rules)
    outcome = today_plan.predicted
    # More accelerators change the global batch, thus the training: searched only if needed.
    if outcome is not None and (
        outcome.limit in ("accelerator", "launch") or misses_deadline(outcome, rules.constraints)
    ):
        for candidate in scale_out(space):
            if not why_unusable(candidate.shape.dnn.instance, rules):
                yield candidate


def plans_of_last_run(
    space: SearchSpace, groups: tuple[Group, ...], rules: PlanRules, *, known: Sequence[Plan]
) -> list[Plan]:
    """Returns the plan of the last run's cluster, unless it is known or has a type that is not."""
    hosts = _hosts(groups)
    if any(_hosts(plan.groups) == hosts for plan in known):
        return []
    with contextlib.suppress(UsageError):
        # Nobody asked for it now: limits of the search apply to it.
        candidate = dataclasses.replace(named(space, groups), asked_for=False)
        if all(not why_unusable(space.get(group.instance_type), rules) for group in groups):
            return [plan_on(space, candidate, rules)]
    return []


def _best_heterogeneous(space: SearchSpace, rules: PlanRules) -> Iterator[Candidate]:
    if space.unfed:
        return
    by_type: dict[str, list[Candidate]] = {}
    plans: dict[str, list[Plan]] = {}
    for instance in _data_types(space, rules):
        candidates = list(heterogeneous(space, instance, most=rules.constraints.max_data_hosts))
        if candidates:
            by_type[instance.type] = candidates
            plans[instance.type] = [plan_on(space, candidate, rules) for candidate in candidates]

    # Tuples are compared from the left, and False comes first: feasible plans before all others.
    def best(name: str) -> tuple[bool, float, float]:
        return min(value_of(plan) for plan in plans[name])

    def value_of(plan: Plan) -> tuple[bool, float, float]:
        value, cpu = rules.ranking.of_plan(plan)
        if rules.ranking.is_billed:
            return not plan.feasible, value, 0.0
        # Without prices many types are as fast: those that take less CPU time are listed.
        return not plan.feasible, value, cpu

    def best_by_other(name: str) -> tuple[bool, float]:
        return min((not plan.feasible, rules.ranking.of_plan(plan)[1]) for plan in plans[name])

    names = sorted(plans, key=best)[:_BEST_TYPES]
    # And the best by what counts second: by time where dollars decide, by dollars where time does.
    names += sorted(plans, key=best_by_other)[:_BEST_BY_OTHER]
    # A type that is best by both comes once.
    for name in dict.fromkeys(names):
        yield from by_type[name]


def _data_types(space: SearchSpace, rules: PlanRules) -> list[Instance]:
    listed = {i.type: i for i in space.catalog.instances}
    for name in rules.allowed or ():
        listed.setdefault(name, space.catalog.get(name))
    # The catalog may know today's type without listing it: local types, and types of nodes.
    if space.today.accelerators == 0:
        listed.setdefault(space.today.type, space.today)
    return [
        space.get(instance.type)
        for _, instance in sorted(listed.items())
        if instance.accelerators == 0
        and (instance.usd_per_hour is not None or not rules.ranking.is_billed)
        and not why_unusable(instance, rules)
    ]


def advice_on_shards(space: SearchSpace, rules: PlanRules, plans: Sequence[Plan]) -> list[Advice]:
    """Returns advice on more shards of a stream, where data hosts would then help more."""
    work = space.work
    if not work.shards or space.unfed:
        return []
    # Work as it would be if the stream had as many shards as any plan can use.
    freed = with_any_shards(space)
    plans_of = (plan_on(freed, candidate, rules) for candidate in _best_heterogeneous(freed, rules))
    able = [plan for plan in plans_of if plan.feasible and plan.predicted]
    if not able:
        return []
    best = rules.ranking.best(able)
    assert best.predicted is not None
    seconds = best.predicted.counted_seconds
    seconds_today = [
        plan.predicted.counted_seconds for plan in plans if plan.feasible and plan.predicted
    ]
    if seconds > _MORE_SHARDS_HELP * min(seconds_today, default=work.step_seconds):
        return []
    how = more_shards_words(space, best.groups)
    when = "the stream can be divided so far"
    if work.divides is False:
        how = "let the stream divide itself by get_worker_info(), which it does not ask today"
        when = "small work on the dataset"
    text = f"With more shards {cluster(best)} would take {ms(seconds)} per step: {how}. Then "
    return [Advice(id="shards", text=f"{text}profile and decide again.", when=when)]


def plan_on(space: SearchSpace, candidate: Candidate, rules: PlanRules) -> Plan:
    work = space.work
    today = ClusterShape(dnn=Hosts(instance=rules.today, count=work.hosts), data=work.data)
    outcome = predicted(work, candidate, today=today, rules=rules)
    problem = problem_of(candidate, outcome, rules)
    return plan_of(candidate, outcome, problem, global_batch_size=work.global_batch_size)


def hosts_of(candidate: Candidate) -> list[tuple[str, str, int]]:
    return _hosts(candidate.groups)


def _hosts(groups: Sequence[Group]) -> list[tuple[str, str, int]]:
    return sorted((group.role, group.instance_type, group.count) for group in groups)
