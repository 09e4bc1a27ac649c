"""The choice among priced plans, and the flow chart that leads to it, with its figures."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from stoker.decide.model import limit_words
from stoker.decide.price import (
    WORTH_A_TRY,
    Space,
    combined_band,
    cores,
)
from stoker.decide.work import AGAIN
from stoker.records import Action, Answer, Decision, Plan, Predicted
from stoker.records.decision import VerdictKind
from stoker.units import as_fast, cost_change_words, is_whole_longer, ms, percentage, vcpus_words


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What is recommended.

    Attributes:
        plan: The plan to run, with the reason; today's cluster unless `verdict` is sure.
        probable: The plan that probably gains, by less than its error band.
    """

    plan: Plan
    verdict: VerdictKind
    probable: Plan | None = None


def choose(space: Space, keep: Plan, others: Sequence[Plan]) -> Choice:
    """Returns the plan to run, with the reason, and the one that is worth a measurement.

    A change is sure only if it saves more than its own error band, or if it makes the deadline and
    today's cluster does not. One that saves less than its band is probable.

    Args:
        space: The work, and the rules.
        keep: Today's cluster.
        others: All other plans.
    """
    today = keep.predicted
    # First what forbids any change, then what is sure, then what is worth a measurement.
    if today is None:
        return _kept(keep, "today's price is not known: nothing can be compared with it", "unknown")
    if unexplained := space.work.unexplained:
        then = AGAIN if space.work.is_too_noisy else "so stoker recommends no other hosts"
        return _kept(keep, f"{unexplained.text}; {then}", "unknown")
    # More accelerators change the global batch, thus the training: they are chosen for time or a
    # deadline, never to save money.
    is_late = space.misses_deadline(today)
    may_scale = is_late or space.constraints.objective == "time"
    barred = ("keep",) if may_scale else ("keep", "scale_out")
    able = [plan for plan in others if plan.feasible and plan.action not in barred]
    # Until something else is fixed, only plans that cost no more are left. If today's cluster is
    # late, every feasible plan, which makes the deadline, is worth it.
    worth = [
        plan
        for plan in able
        if (is_late or space.gain(plan, keep) > combined_band(plan))
        and (not space.fix_first or space.is_free(plan, keep))
    ]
    # What costs more per hour than today has to beat the best free plan.
    if at_no_cost := [plan for plan in worth if space.is_free(plan, keep)]:
        free = min(at_no_cost, key=space.rank)
        worth = [plan for plan in worth if plan in at_no_cost or space.beats(plan, free)]
    if worth:
        best = _best(space, worth)
        return Choice(plan=_because(best, _gain_and_limits(space, best)), verdict="sure")
    probable = None
    if better := [plan for plan in able if space.gain(plan, keep) > WORTH_A_TRY]:
        best = _best(space, better)
        gain = f"{percentage(space.gain(best, keep))} of the {space.saved}"
        within = f"it saves {gain}, within the error band of {percentage(combined_band(best))}"
        probable = _because(best, f"{_gain_and_limits(space, best)}; {within}")
    verdict: VerdictKind = "probable" if probable else "none"
    if space.fix_first:
        when = "before money is spent" if space.is_billed else "first"
        reason = f"{space.fix_first}: fix that {when}"
        return _kept(keep, reason, "unknown" if probable else "none")
    word = "costs less" if space.saved == "money" else "is faster"
    reason = f"no feasible plan {word} than today's cluster by more than its error band"
    if is_late:
        late = f"misses the deadline of {space.constraints.deadline_hours:g} h"
        reason += f"; it {late}, as all plans that may be used do"
    return Choice(plan=_because(keep, reason), verdict=verdict, probable=probable)


def _because(plan: Plan, reason: str) -> Plan:
    return msgspec.structs.replace(plan, reason=reason)


def _kept(keep: Plan, reason: str, verdict: VerdictKind) -> Choice:
    return Choice(plan=_because(keep, reason), verdict=verdict)


def _best(space: Space, plans: Sequence[Plan]) -> Plan:
    """Returns the best plan; without prices, one for the unchanged script if it is about as good.

    A larger host helps only a script that asks for more loader workers; data hosts help it as it
    is.
    """
    best = space.best(plans)
    groups = [plan for plan in plans if plan.action == "heterogeneous"]
    if space.is_billed or best.action != "scale_up" or not groups:
        return best
    rival = space.best(groups)
    return best if space.beats(best, rival) else rival


# A plan's figures in words.


def cluster_words(plan: Plan) -> str:
    return " + ".join(f"{group.count} {group.instance_type}" for group in plan.groups)


def step_time_words(outcome: Predicted, *, has_band: bool = False) -> str:
    """Returns the time by which plans are compared, with its error band if that is wanted."""
    words = f"{ms(outcome.counted_seconds)} per step"
    if is_whole_longer(outcome.step_seconds, outcome.counted_seconds):
        words += " over whole epochs"
    if has_band:
        words += f" ({ms(outcome.counted_low)} to {ms(outcome.counted_high)})"
    return words


def _gain_and_limits(space: Space, plan: Plan) -> str:
    """Returns what a plan gives over today, and its limits: `... ; the limit is the CPU, then`."""
    outcome = plan.predicted
    assert outcome is not None
    text = as_fast(outcome.speedup)
    if space.is_billed:
        text += f", {cost_change_words(outcome.cost_change, is_billed=True)}"
    elif space.today.accelerators:
        text += f", accelerators busy {percentage(outcome.accelerator_utilization)}"
    elif (added := cores(outcome) - space.work.vcpus) > 1e-6:
        text += f", on {added:.3g} more core{'' if round(added, 6) == 1 else 's'}"
    text += f"; the limit is {limit_words(outcome.limit)}"
    # A second limit of microseconds is not worth a word.
    second = outcome.second_limit_seconds
    if second >= 1e-3 * outcome.step_seconds:
        text += f", then {limit_words(outcome.second_limit)} ({ms(second)})"
    return text


# The flow chart of the published method.

_Reply = tuple[Literal["yes", "no", "unknown"], str]


def path(space: Space, decision: Decision) -> Iterator[Answer]:
    """Yields the questions in order, each with its answer and the figures behind it."""
    for question, (answer, because) in _replies(space, decision):
        yield Answer(question=question, answer=answer, because=because)


def _replies(space: Space, decision: Decision) -> Iterator[tuple[str, _Reply]]:
    today = decision.today and decision.today.predicted
    limit = space.bottleneck
    yield "Do the measured parts explain the step?", _explained(space)
    if limit != "unexplained":
        yield "Is the CPU the limit?", _is_cpu_the_limit(space)
        if limit in ("cpu", "workers", "latency", "storage"):
            yield "Is there a free fix?", _free_fix(space, decision)
            larger = "Is there a larger type of the same family with the same accelerators?"
            none = f"{space.today.type} has none that may be used"
            yield larger, _best_reply(space, decision, "scale_up", none)
        what = "be cheaper" if space.saved == "money" else "be faster"
        if today and space.misses_deadline(today):
            what = "make the deadline"
        yield f"Would a data group {what}?", _data_group(space, decision)
        if limit in ("accelerator", "launch"):
            reply = _best_reply(space, decision, "scale_out", "there are no more of them here")
            yield "Would more accelerators be faster?", reply
    reply = ("no" if decision.action == "keep" else "yes", decision.plan.reason)
    if space.work.is_too_noisy:
        reply = ("unknown", "the figures are not reliable enough to compare plans")
    elif decision.verdict == "probable" and decision.probable:
        because = f"{cluster_words(decision.probable)}: {decision.probable.reason}"
        reply = ("unknown", because)
    yield "Is the best change worth more than its error band?", reply


def best_of(space: Space, decision: Decision, action: Action) -> Plan | None:
    """Returns the best plan of a kind that can be run."""
    plans = [plan for plan in decision.plans if plan.action == action and plan.feasible]
    return min(plans, key=space.rank, default=None)


def _explained(space: Space) -> _Reply:
    work = space.work
    if work.is_too_noisy:
        return "unknown", "other programs ran"
    if work.unexplained:
        # Only measured parts can contradict the step.
        is_no = work.unexplained.kind == "contradiction"
        return "no" if is_no else "unknown", work.unexplained.text
    how = "scaled" if space.taken else "measured"
    because = f"they give {ms(work.step_seconds)}, {how} {ms(work.measured_seconds)}"
    return ("yes", because) if space.profile.check else ("unknown", f"not checked: {because}")


def _is_cpu_the_limit(space: Space) -> _Reply:
    work = space.work
    cpu, wall = work.loader_cpu_seconds, work.loader_wall_seconds
    text = (
        f"loading takes {cpu:.3g} CPU-seconds and {wall:.3g} worker-seconds per step, the trainer "
        f"{work.trainer_cpu_seconds:.3g} CPU-seconds, on "
        f"{vcpus_words(work.vcpus)}: the limit is {limit_words(space.bottleneck)}"
    )
    return "yes" if space.bottleneck == "cpu" else "no", text


def _free_fix(space: Space, decision: Decision) -> _Reply:
    if plan := best_of(space, decision, "tune"):
        return "yes", _figures(space, plan)
    for fix in space.profile.fixes:
        if fix.cost == "none" and fix.saves_seconds:
            return "yes", fix.text
    workers = space.work.num_workers
    if workers is None:
        return "unknown", "today's number of loader workers is not known"
    more = f"more loader workers than today's {workers} would not help on these hosts"
    return "no", space.unworkable or more


def _best_reply(space: Space, decision: Decision, action: Action, none: str) -> _Reply:
    if plan := best_of(space, decision, action):
        return "yes", _figures(space, plan)
    infeasible = next((plan.reason for plan in decision.plans if plan.action == action), "")
    return "no", infeasible or none


def _data_group(space: Space, decision: Decision) -> _Reply:
    best = best_of(space, decision, "heterogeneous")
    free = best_of(space, decision, "tune")
    rival = free or decision.today
    if best is None or rival is None:
        none = space.unfed or "max_data_hosts is 0, or no CPU-only type with a price may be used"
        return _best_reply(space, decision, "heterogeneous", none)
    gain = space.gain(best, rival)
    band = combined_band(best, free) if free else combined_band(best)
    because = (
        f"{_figures(space, best)}; over {'the free plan' if free else 'today'} it saves "
        f"{percentage(gain)} of the {space.saved}, the error band is {percentage(band)}"
    )
    if space.fix_first and not (decision.today and space.is_free(best, decision.today)):
        return "no", f"{because}; {space.fix_first}: that comes first"
    if gain > band:
        return "yes", because
    # An uncertain gain is no "no".
    return "unknown" if gain > WORTH_A_TRY else "no", because


def _figures(space: Space, plan: Plan) -> str:
    assert plan.predicted is not None
    words = f"{cluster_words(plan)}: {step_time_words(plan.predicted)}"
    return f"{words}, {_gain_and_limits(space, plan)}"
