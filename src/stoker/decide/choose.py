"""The choice among priced plans, explained by the flow chart of the published method."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from stoker.decide.model import Hosts, Unexplained, Work, free_vcpus
from stoker.decide.pricing import ASKED_FOR
from stoker.records import (
    Action,
    Answer,
    Bottleneck,
    Constraints,
    Decision,
    Limit,
    Plan,
    Predicted,
    TakenElsewhere,
)
from stoker.records.parts import AGAIN, limit_words
from stoker.text import SAME_COST, apart, cost_change_words, ms, percentage, usd, vcpus_words

# Plans this close to the best count as equal: then fewer machines win.
TIE = 0.03
LIMIT_NAMES: Mapping[Limit, str] = {
    "cpu": "CPU",
    "accelerator": "accelerator",
    "latency": "loader's own time",
    "network": "network",
    "receive": "receiving",
    "storage": "storage",
}


def objective_value(outcome: Predicted, objective: str) -> float:
    return outcome.usd_per_1000_steps if objective == "cost" else outcome.step_seconds


def error_band(outcome: Predicted) -> float:
    return outcome.step_seconds_high / outcome.step_seconds - 1


def gain(outcome: Predicted, keep: Predicted, objective: str) -> float:
    """Returns the fraction of money or time that the plan saves."""
    return 1 - objective_value(outcome, objective) / objective_value(keep, objective)


def ranked(plans: Sequence[Plan], objective: str) -> list[Plan]:
    """Returns the best first, infeasible ones and those without a prediction last."""
    return sorted(plans, key=lambda plan: _rank(plan, objective))


def choose(
    keep: Plan,
    others: Sequence[Plan],
    constraints: Constraints,
    *,
    unexplained: Unexplained | None,
    fix_first: str = "",
    is_billed: bool = True,
) -> Plan:
    """Returns the plan to run, with the reason.

    A change is chosen only if it saves more than its own error band, or if it makes the deadline
    and today's cluster does not. Unless `is_billed`, reasons name no dollars.
    """

    def kept(reason: str) -> Plan:
        return msgspec.structs.replace(keep, reason=reason)

    today, objective = keep.predicted, constraints.objective
    if today is None:
        return kept("today's price is not known: nothing can be compared with it")
    budget = constraints.max_usd_per_hour
    # Prices are sums of floats: a difference of a billionth is ignored, here and below.
    if budget is not None and today.usd_per_hour > budget * (1 + 1e-9):
        cost, limit = apart(today.usd_per_hour, budget)
        over = f"today's cluster costs ${cost} per hour, above the budget of ${limit}"
        return kept(f"{over}: no plan can keep it")
    if unexplained:
        what = "paid hosts" if is_billed else "change"
        then = f", so stoker recommends no {what}"
        then = f"; {AGAIN}" if unexplained.kind == "other_programs" else then
        return kept(unexplained.text + then)
    is_late = misses_deadline(today, constraints)
    # Until something else is fixed, only plans that cost no more are left.
    left = [plan for plan in others if not fix_first or is_free(plan, keep)]
    able = _able(left, today, constraints)
    worth, free = _worth_running(able, keep, constraints)
    if worth:
        best = best_plan(worth, objective)
        text = _praise(best, today, is_late=is_late, is_billed=is_billed)
        if free and free.predicted and best.predicted and not is_free(best, keep):
            more = percentage(gain(best.predicted, free.predicted, objective))
            bands = percentage(combined_band(best.predicted, free.predicted))
            text += f"; {more} beyond what is free, where both bands together are {bands}"
        return msgspec.structs.replace(best, reason=text)
    if fix_first:
        return kept(f"{fix_first}: fix that {'before money is spent' if is_billed else 'first'}")
    late = _why_late(others, constraints) if is_late else ""
    return kept(_why_keep(able, today, objective, is_billed=is_billed) + late)


def is_free(plan: Plan, keep: Plan) -> bool:
    outcome, today = plan.predicted, keep.predicted
    return (
        outcome is not None
        and today is not None
        and outcome.usd_per_hour <= today.usd_per_hour * (1 + 1e-9)
    )


def misses_deadline(today: Predicted, constraints: Constraints) -> bool:
    deadline, hours = constraints.deadline_hours, today.total_hours
    return deadline is not None and hours is not None and hours > deadline


def _able(plans: Sequence[Plan], today: Predicted, constraints: Constraints) -> list[Plan]:
    """Returns the feasible, predicted plans that may be chosen in place of today's cluster."""
    may_scale = constraints.objective == "time" or misses_deadline(today, constraints)
    return [
        plan
        for plan in plans
        if plan.action != "keep"
        and plan.feasible
        and plan.predicted is not None
        # More accelerators change the global batch, thus the training: they are chosen for time
        # or a deadline, never to save money.
        and (plan.action != "scale_out" or may_scale)
    ]


def _worth_running(
    able: Sequence[Plan], keep: Plan, constraints: Constraints
) -> tuple[list[Plan], Plan | None]:
    """Returns the plans that are worth the change, and the fastest free one among them.

    A plan that costs more per hour than today must beat the free one by more than both bands.
    """
    today, objective = keep.predicted, constraints.objective
    assert today is not None
    # If today's cluster is late, every feasible plan, which makes the deadline, is worth it.
    is_late = misses_deadline(today, constraints)
    worth = [
        (plan, plan.predicted)
        for plan in able
        if plan.predicted
        and (is_late or gain(plan.predicted, today, objective) > error_band(plan.predicted))
    ]
    at_no_cost = [(plan, outcome) for plan, outcome in worth if is_free(plan, keep)]
    free, rival = min(at_no_cost, key=lambda one: _rank(one[0], "time"), default=(None, None))
    return [
        plan
        for plan, outcome in worth
        if rival is None
        or is_free(plan, keep)
        or gain(outcome, rival, objective) > combined_band(outcome, rival)
    ], free


def combined_band(one: Predicted, other: Predicted) -> float:
    """Returns the relative error of the ratio of two predictions."""
    # In squares, as independent errors add up (see `pricing.band`).
    return math.hypot(error_band(one), error_band(other))


def best_plan(plans: Sequence[Plan], objective: str) -> Plan:
    """Returns the smallest of the plans that are as good as the best."""
    least = min(plan_value(plan, objective) for plan in plans)
    equal = [plan for plan in plans if plan_value(plan, objective) <= least * (1 + TIE)]
    return min(equal, key=lambda plan: (_machines(plan), *_rank(plan, objective)))


def _rank(plan: Plan, objective: str) -> tuple[bool, float, float, int, str]:
    return (
        not (plan.feasible and plan.predicted is not None),
        plan_value(plan, objective),
        plan_value(plan, "time" if objective == "cost" else "cost"),
        _machines(plan),
        " ".join(f"{g.instance_type}:{g.count}:{g.workers_per_host}" for g in plan.groups),
    )


def plan_value(plan: Plan, objective: str) -> float:
    return objective_value(plan.predicted, objective) if plan.predicted else math.inf


def _machines(plan: Plan) -> int:
    return sum(group.count for group in plan.groups)


def _praise(plan: Plan, today: Predicted, *, is_late: bool, is_billed: bool) -> str:
    outcome = plan.predicted
    assert outcome is not None
    change = cost_change_words(outcome.cost_change, is_billed=is_billed)
    comma = "," if abs(outcome.cost_change) < SAME_COST else " and"
    text = f"{outcome.speedup:.2f}x as fast{comma} {change}"
    if is_late and outcome.total_hours is not None and today.total_hours is not None:
        text += (
            f"; {outcome.total_hours:.2f} h, today's {today.total_hours:.2f} h miss the deadline"
        )
    return f"{text}; bottleneck: {limits(outcome)}{own_storage_words(outcome)}"


def _why_keep(able: Sequence[Plan], today: Predicted, objective: str, *, is_billed: bool) -> str:
    word = "is faster"
    if objective == "cost":
        word = "costs less" if is_billed else "needs fewer CPU-seconds"
    better = [p for p in able if p.predicted and gain(p.predicted, today, objective) > 0]
    if not better:
        return f"no feasible plan {word} than today's cluster"
    best = ranked(better, objective)[0].predicted
    assert best is not None
    return (
        f"no plan {word} by more than its own error band: the best gains "
        f"{percentage(gain(best, today, objective))}, its band is {percentage(error_band(best))}"
    )


def _why_late(others: Sequence[Plan], constraints: Constraints) -> str:
    deadline, budget = constraints.deadline_hours or 0.0, constraints.max_usd_per_hour
    text = f"; it misses the deadline of {deadline:g} h, as all plans do"
    known = [plan.predicted for plan in others if plan.predicted]
    in_time = [p for p in known if p.total_hours is not None and p.total_hours <= deadline]
    if budget is None or not in_time:
        return text
    cost, limit = apart(min(p.usd_per_hour for p in in_time), budget)
    return (
        f"{text} within the budget of ${limit} per hour: the two contradict each other, the "
        f"cheapest plan in time needs ${cost} per hour"
    )


def pareto_front(plans: Sequence[Plan]) -> list[Plan]:
    """Returns the feasible, predicted plans that none beats in time and money, fastest first."""
    front: list[Plan] = []
    cheapest = math.inf
    # A plan is on the front if it is cheaper than all faster plans.
    for plan in sorted(
        plans, key=lambda plan: (plan_value(plan, "time"), plan_value(plan, "cost"))
    ):
        if plan.feasible and plan_value(plan, "cost") < cheapest:
            front.append(plan)
            cheapest = plan_value(plan, "cost")
    return front


def cluster(plan: Plan) -> str:
    return " + ".join(f"{group.count} {group.instance_type}" for group in plan.groups)


def limits(outcome: Predicted) -> str:
    """Returns the bottleneck and the next one: `CPU; next: accelerator (64 ms)`."""
    next_seconds = outcome.second_limit_seconds
    # A second limit of microseconds is not worth a word.
    if next_seconds < 1e-3 * outcome.step_seconds:
        return f"{LIMIT_NAMES[outcome.limit]}, and no other is near"
    second = LIMIT_NAMES[outcome.second_limit]
    return f"{LIMIT_NAMES[outcome.limit]}; next: {second} ({ms(next_seconds)})"


def own_storage_words(outcome: Predicted) -> str:
    """Returns the plan's speed-up with a separate storage per host; empty: known or irrelevant."""
    if outcome.own_storage_speedup is None:
        return ""
    return f"; {outcome.own_storage_speedup:.2f}x if each host has separate storage"


def pays(outcome: Predicted) -> str:
    """Returns from which speed-up a step is cheaper than today, and whether the plan reaches it."""
    ratio = outcome.break_even_speedup
    if ratio is None:
        return "today's hosts cost nothing"
    if ratio <= 1:
        return "it costs no more per hour than today's hosts"
    if outcome.speedup >= ratio:
        return f"a step is cheaper than today from {ratio:.2f}x on: it is {outcome.speedup:.2f}x"
    return f"it buys time, not money: a step is cheaper than today from {ratio:.2f}x on"


def cost_words(outcome: Predicted, *, is_billed: bool) -> str:
    """Returns the cost of a step: dollars, or CPU- and accelerator-seconds without a bill."""
    if is_billed:
        return f"{usd(outcome.usd_per_1000_steps)} per 1000 steps"
    words = [] if outcome.cpu_seconds is None else [f"{outcome.cpu_seconds:.3g} CPU-seconds"]
    if outcome.accelerator_seconds:
        words.append(f"{outcome.accelerator_seconds:.3g} accelerator-seconds")
    return f"{' and '.join(words)} per step" if words else "its cost is not known"


def local_core_words(decision: Decision) -> str:
    """Returns what the chosen data hosts' cores would do on the training host; empty: unknown.

    Shown with the speed-up of a local plan with data hosts, as the same cores without a data group
    may do as much.
    """
    chosen = decision.plan
    is_here = decision.prices.is_nominal
    if not is_here or chosen.action != "heterogeneous" or chosen.predicted is None:
        return ""
    # CPU-seconds of a step over the step.
    cores = (chosen.predicted.cpu_seconds or 0.0) / chosen.predicted.step_seconds
    for plan in decision.plans:
        outcome = plan.predicted
        if plan.action != "scale_up" or outcome is None or not outcome.cpu_seconds:
            continue
        if abs(outcome.cpu_seconds / outcome.step_seconds - cores) < 1e-6:
            low, high = ms(outcome.step_seconds_low), ms(outcome.step_seconds_high)
            return (
                f"the same cores in the training host itself, {cluster(plan)}: predicted "
                f"{ms(outcome.step_seconds)} per step ({low} to {high}), {outcome.speedup:.2f} "
                "times as fast; where both were run, both were about as fast (docs/method.md)"
            )
    return ""


_Reply = Literal["yes", "no", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """Inputs of the decision flow chart.

    Attributes:
        free_fixes: Texts of the profile's fixes that cost nothing.
        fix_first: What to fix before anything that costs.
        unfed: Why data hosts cannot make the batches.
        taken: How the profile was scaled to today's hosts; None: it was taken there.
    """

    work: Work
    bottleneck: Bottleneck
    keep: Plan
    chosen: Plan
    plans: tuple[Plan, ...]
    constraints: Constraints
    free_fixes: tuple[str, ...] = ()
    fix_first: str = ""
    unfed: str = ""
    is_billed: bool = True
    taken: TakenElsewhere | None = None

    @property
    def is_busy(self) -> bool:
        reason = self.work.unexplained
        return reason is not None and reason.kind == "other_programs"


def walk(found: Walk) -> tuple[Answer, ...]:
    """Returns the questions in order, each with its answer and the figures behind it."""
    answers = [_is_explained(found)]
    if found.bottleneck != "unexplained":
        answers.append(_is_cpu_the_limit(found))
        if found.bottleneck in ("cpu", "workers", "latency", "storage"):
            larger = "Is there a larger type of the same family with the same accelerators?"
            answers.append(_is_there(found, "tune", "Is there a free fix?"))
            answers.append(_is_there(found, "scale_up", larger))
        answers.append(_is_a_data_group_better(found))
        if found.bottleneck == "accelerator":
            wider = "Would more accelerators be faster or cheaper?"
            answers.append(_is_there(found, "scale_out", wider))
    answers.append(_is_change_worth_it(found))
    return tuple(answers)


def best_of(found: Walk, action: Action) -> Plan | None:
    plans = [p for p in found.plans if p.action == action and p.feasible and p.predicted]
    return min(plans, key=lambda plan: _rank(plan, found.constraints.objective), default=None)


def _is_explained(found: Walk) -> Answer:
    work = found.work
    because = f"they give {ms(work.parts_seconds)}, measured {ms(work.step_seconds)}"
    reply: _Reply = "yes"
    if work.unexplained:
        # Only measured parts can contradict the step.
        reply = "no" if work.unexplained.kind == "contradiction" else "unknown"
        because = f"{because}, while other programs ran" if found.is_busy else work.unexplained.text
    else:
        if found.taken:
            because = (
                f"on {found.taken.profiled_on}; scaled to {found.taken.taken_as} a step takes "
                f"{ms(work.step_seconds)}"
            )
        elif work.num_workers == 0 and "latency" in work.corrected:
            because += "; the trainer loads in it, and plans are predicted from workers alone"
        if not work.is_checked:
            reply, because = "unknown", f"not checked: {because}"
    return Answer(question="Do the measured parts explain the step?", answer=reply, because=because)


def _is_cpu_the_limit(found: Walk) -> Answer:
    work, question = found.work, "Is the CPU the limit?"
    if found.bottleneck in ("latency", "storage"):
        text = (
            f"loading takes {work.loader_wall_seconds:.3g} worker-seconds per step, of which "
            f"{work.loader_cpu_seconds:.3g} are CPU-seconds: it waits for its data"
        )
        if found.bottleneck == "storage":
            text += ", which all workers share"
        return Answer(question=question, answer="no", because=text)
    text = f"loading takes {work.loader_cpu_seconds:.3g} CPU-seconds per step"
    if work.trainer_cpu_seconds:
        text += f", the trainer {work.trainer_cpu_seconds:.3g}"
    if work.turns_cpu_seconds > 0.05 * (work.loader_cpu_seconds + work.trainer_cpu_seconds):
        text += f", their turns on the same cores {work.turns_cpu_seconds:.3g}"
    text += f", on {vcpus_words(work.hosts * work.reference.capacity)}"
    if work.reserved_vcpus:
        text += f" ({work.hosts * work.reserved_vcpus:g} of them reserved for the trainer)"
    today = Hosts(instance=work.reference, count=work.hosts)
    used = work.loader_cpu_seconds + work.trainer_cpu_seconds + work.turns_cpu_seconds
    text += f": {ms(used / free_vcpus(work, today))}"
    if work.accelerator_seconds:
        step = ms(work.step_seconds)
        text += f"; without loading a step takes {ms(work.accelerator_seconds)} of {step}"
    if found.bottleneck == "cpu":
        return Answer(question=question, answer="yes", because=text)
    text += f": the limit is {limit_words(found.bottleneck)}"
    return Answer(question=question, answer="no", because=text)


def _is_there(found: Walk, action: Action, question: str) -> Answer:
    plan = best_of(found, action)
    if plan is None:
        infeasible = next((p for p in found.plans if p.action == action), None)
        because = infeasible.reason if infeasible else _why_none(found, action)
        reply: _Reply = "no"
        if action == "tune" and infeasible and infeasible.predicted:
            # More shards of a stream: free, but the script must set them.
            reply = "yes"
            outcome = infeasible.predicted
            because = f"{ms(outcome.step_seconds)} per step ({outcome.speedup:.2f}x): {because}"
        elif action == "tune" and found.free_fixes:
            reply, because = "yes", found.free_fixes[0]
        elif action == "tune" and found.work.num_workers is None:
            reply = "unknown"
        return Answer(question=question, answer=reply, because=because)
    because = _figures(plan, is_billed=found.is_billed)
    rival = best_of(found, "heterogeneous")
    if action == "scale_up" and rival and rival.predicted and plan.predicted:
        other = cost_words(rival.predicted, is_billed=found.is_billed)
        this = cost_words(plan.predicted, is_billed=found.is_billed)
        less = "cheaper than that" if found.is_billed else "fewer CPU-seconds"
        if plan_value(rival, "cost") >= plan_value(plan, "cost"):
            less = f"not {less}"
        because += f"; a data group is {less}: {cluster(rival)}, {other} against {this}"
    return Answer(question=question, answer="yes", because=because)


def _why_none(found: Walk, action: Action) -> str:
    work = found.work
    if action == "tune" and work.num_workers is None:
        return "today's number of loader workers is not known"
    if action == "tune":
        return f"more than today's {work.num_workers} loader workers would not help on these hosts"
    if action == "scale_up":
        return f"{work.reference.type} has none that may be used"
    return "the hosts have no accelerators"


def _is_a_data_group_better(found: Walk) -> Answer:
    keep = found.keep.predicted
    what = "be cheaper" if found.is_billed else "take fewer CPU-seconds"
    if found.constraints.objective == "time":
        what = "be faster"
    is_late = keep is not None and misses_deadline(keep, found.constraints)
    question = f"Would a data group {'make the deadline' if is_late else what}?"
    plan = best_of(found, "heterogeneous")
    if plan is None or keep is None:
        groups = [one for one in found.plans if one.action == "heterogeneous"]
        # The same reason as in the table of plans.
        asked = [one for one in groups if one.reason.startswith(ASKED_FOR)]
        infeasible = next(iter([*asked, *groups]), None)
        because = "no CPU-only type with a price may be used"
        if infeasible is not None:
            because = infeasible.reason or "plans cannot be priced"
        elif found.constraints.max_data_hosts == 0:
            because = "max_data_hosts is 0"
        return Answer(question=question, answer="no", because=found.unfed or because)
    able = _able(found.plans, keep, found.constraints)
    worth, free = _worth_running(able, found.keep, found.constraints)
    groups = [one for one in worth if one.action == "heterogeneous"]
    # The plan that pays need not be the best one: its band may be narrower.
    plan = best_plan(groups, found.constraints.objective) if groups else plan
    outcome = plan.predicted
    costs_more = not is_free(plan, found.keep)
    assert outcome is not None
    figures = _figures(plan, is_billed=found.is_billed)
    because = f"{figures}; {percentage(plan.remote_share)} of the batches are made there"
    if free is not None and free.predicted is not None and costs_more:
        rival = free.predicted
        because += (
            f"; against the best free plan ({ms(rival.step_seconds)}): "
            f"{_change(outcome, rival, found)}, both bands together are "
            f"{percentage(combined_band(outcome, rival))}"
        )
    elif is_late:
        because += "; it makes the deadline, which today's cluster misses"
    elif not groups:
        band = percentage(error_band(outcome))
        because += f"; {_change(outcome, keep, found)}, its error band is {band}"
    is_refused = bool(found.fix_first) and costs_more
    if groups and is_refused:
        because += f"; {found.fix_first}: that comes first"
    reply: _Reply = "yes" if groups and not is_refused else "no"
    return Answer(question=question, answer=reply, because=because)


def _change(outcome: Predicted, other: Predicted, found: Walk) -> str:
    saved = gain(outcome, other, found.constraints.objective)
    if found.constraints.objective == "cost":
        return cost_change_words(-saved, is_billed=found.is_billed)
    return f"a step takes {percentage(abs(saved))} {'longer' if saved < 0 else 'less time'}"


def _is_change_worth_it(found: Walk) -> Answer:
    outcome, keep = found.chosen.predicted, found.keep.predicted
    reply: _Reply = "no" if found.chosen.action == "keep" else "yes"
    because = found.chosen.reason
    if found.is_busy:
        reply = "unknown"
        because = "the figures are not reliable enough to compare plans"
    elif reply == "yes" and outcome is not None and keep is not None:
        saved = gain(outcome, keep, found.constraints.objective)
        what = "time"
        if found.constraints.objective == "cost":
            what = "money" if found.is_billed else "CPU-seconds"
        because = (
            f"{cluster(found.chosen)} saves {percentage(saved)} of the {what}, "
            f"its error band is {percentage(error_band(outcome))}"
        )
    question = "Is the best change worth more than its error band?"
    return Answer(question=question, answer=reply, because=because)


def _figures(plan: Plan, *, is_billed: bool) -> str:
    outcome = plan.predicted
    assert outcome is not None
    change = percentage(outcome.cost_change, signed=True)
    is_same = abs(outcome.cost_change) < SAME_COST
    if is_billed:
        change = "a step costs the same" if is_same else f"{change} $ per step"
        cost, end = f"{usd(outcome.usd_per_hour)} per hour, {change}", pays(outcome)
    else:
        change = "as today" if is_same else change
        cost, end = f"{cost_words(outcome, is_billed=False)} ({change})", ""
    return (
        f"{cluster(plan)}: {ms(outcome.step_seconds)} per step ({outcome.speedup:.2f}x), {cost}, "
        f"bottleneck: {limits(outcome)}{own_storage_words(outcome)}{end and f'; {end}'}"
    )
