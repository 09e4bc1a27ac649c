"""The choice among priced plans, explained by the flow chart of the published method.

`choose` returns it. A larger instance and data hosts are compared in `_best_as_is`, by what
`ranking.Ranking` says is best.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from stoker.decide.model import Hosts, StepWork, Unexplained, free_vcpus
from stoker.decide.pricing import ASKED_FOR
from stoker.decide.ranking import (
    WORTH_A_TRY,
    Ranking,
    combined_band,
    cores,
    error_band,
)
from stoker.record_words import busy_scope
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
    VerdictKind,
)
from stoker.records.workload import Followed
from stoker.step_model import AGAIN, LEAST_GAIN, limit_words
from stoker.units import (
    SAME_COST,
    apart,
    as_fast,
    cost_change_words,
    is_whole_longer,
    ms,
    numbered,
    percentage,
    times,
    usd,
    vcpus_words,
)

LIMIT_NAMES: Mapping[Limit, str] = {
    "cpu": "CPU",
    "accelerator": "accelerator",
    "launch": "script's own thread",
    "latency": "loader's own time",
    "network": "network",
    "receive": "receiving",
    "storage": "storage",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """What is recommended.

    Attributes:
        plan: The plan to run, with the reason; today's cluster unless `verdict` is sure.
        probable: The plan that probably gains more than `plan`, by less than its error band.
    """

    plan: Plan
    verdict: VerdictKind
    probable: Plan | None = None


def choose(
    keep: Plan,
    others: Sequence[Plan],
    constraints: Constraints,
    *,
    ranking: Ranking,
    unexplained: Unexplained | None,
    fix_first: str = "",
) -> Recommendation:
    """Returns the plan to run, with the reason, and the one that is worth a measurement.

    A change is sure only if it saves more than its own error band, or if it makes the deadline and
    today's cluster does not. One that saves less than its band is probable.

    Args:
        unexplained: Why the profile supports no recommendation.
        fix_first: What to fix before anything that costs; empty: nothing.
    """
    today = keep.predicted
    # First what forbids any change, then what is sure, then what is worth a measurement.
    if today is None:
        words = "today's price is not known: nothing can be compared with it"
        return _kept(keep, words, "unknown")
    if ranking.is_billed and (words := _over_budget(today, constraints)):
        return _kept(keep, words, "none")
    if unexplained:
        return _kept(keep, _unexplained_words(unexplained, ranking), "unknown")
    is_late = misses_deadline(today, constraints)
    able = _able(others, today, constraints)
    # Until something else is fixed, only plans that cost no more are left.
    left = [plan for plan in able if not fix_first or ranking.is_free(plan, keep)]
    worth, free = _worth_running(left, keep, constraints, ranking)
    if worth:
        best = _best_as_is(worth, ranking)
        praise = _praise(best, today, ranking, is_late=is_late)
        reason = f"{praise}{_beyond(best, free, keep, ranking)}"
        return Recommendation(
            plan=msgspec.structs.replace(best, reason=reason),
            verdict="sure",
            probable=_further(left, best, today, ranking),
        )
    probable = _probable(able, keep, today, ranking)
    if fix_first:
        when = "before money is spent" if ranking.is_billed else "first"
        verdict: VerdictKind = "none" if probable is None else "unknown"
        return _kept(keep, f"{fix_first}: fix that {when}", verdict)
    reason = _why_keep(able, today, ranking)
    if is_late:
        reason += _why_late(others, constraints)
    verdict = "none" if probable is None else "probable"
    return replace(_kept(keep, reason, verdict), probable=probable)


def _kept(keep: Plan, reason: str, verdict: VerdictKind) -> Recommendation:
    return Recommendation(plan=msgspec.structs.replace(keep, reason=reason), verdict=verdict)


def _unexplained_words(unexplained: Unexplained, ranking: Ranking) -> str:
    if unexplained.kind == "other_programs":
        return f"{unexplained.text}; {AGAIN}"
    what = "paid hosts" if ranking.is_billed else "change"
    return f"{unexplained.text}, so stoker recommends no {what}"


def _further(left: Sequence[Plan], best: Plan, today: Predicted, ranking: Ranking) -> Plan | None:
    """Returns the plan that probably gains more than the best sure one."""
    # Without prices these come first, at no cost (`words.free_first`).
    is_free = not ranking.is_billed and best.action == "heterogeneous"
    more = [plan for plan in left if not is_free or plan.action not in ("tune", "scale_up")]
    return _probable(more, best, today, ranking)


def followed(decision: Decision, follow: Followed | None) -> Decision:
    """Returns the decision as a workload follows it: with the probable plan, or without.

    Args:
        follow: What the workload says now. None: as it was decided.
    """
    probable = decision.probable
    if follow is None or probable is None or decision.kind != "probable":
        return decision
    plan = probable
    if follow != "probable":
        plan = decision.today or decision.plan
    return msgspec.structs.replace(decision, plan=plan, action=plan.action)


def misses_deadline(today: Predicted, constraints: Constraints) -> bool:
    deadline = constraints.deadline_hours
    hours = today.total_hours
    return deadline is not None and hours is not None and hours > deadline


def _over_budget(today: Predicted, constraints: Constraints) -> str:
    budget = constraints.max_usd_per_hour
    if budget is None or today.usd_per_hour is None:
        return ""
    # Prices are sums of floats: a difference of a billionth is ignored, here and below.
    if today.usd_per_hour <= budget * (1 + 1e-9):
        return ""
    cost, limit = apart(today.usd_per_hour, budget)
    over = f"today's cluster costs ${cost} per hour, above the budget of ${limit}"
    return f"{over}: no plan can keep it"


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
    able: Sequence[Plan], keep: Plan, constraints: Constraints, ranking: Ranking
) -> tuple[list[Plan], Plan | None]:
    """Returns the plans that are worth the change, and the fastest free one among them.

    A plan that costs more per hour than today must beat the free one by more than both bands.
    """
    today = keep.predicted
    assert today is not None
    # If today's cluster is late, every feasible plan, which makes the deadline, is worth it.
    is_late = misses_deadline(today, constraints)
    worth = [
        (plan, plan.predicted)
        for plan in able
        if plan.predicted
        and (is_late or ranking.gain(plan.predicted, today) > error_band(plan.predicted))
    ]
    at_no_cost = [plan for plan, _ in worth if ranking.is_free(plan, keep)]
    # Among plans at no cost the fastest counts, also where the objective is money.
    by_time = Ranking(objective="time", is_billed=ranking.is_billed)
    free = min(at_no_cost, key=by_time.rank, default=None)
    if free is None or free.predicted is None:
        return [plan for plan, _ in worth], None
    rival = free.predicted
    worth_more = [
        plan
        for plan, outcome in worth
        if ranking.is_free(plan, keep)
        or ranking.gain(outcome, rival) > combined_band(outcome, rival)
    ]
    return worth_more, free


def _best_as_is(worth: Sequence[Plan], ranking: Ranking) -> Plan:
    """Returns the best plan; without prices, one for the unchanged script if it is about as good.

    A larger host helps only a script that asks for more loader workers; data hosts help it as it
    is.
    """
    best = ranking.best(worth)
    groups = [plan for plan in worth if plan.action == "heterogeneous"]
    if ranking.is_billed or best.action != "scale_up" or not groups:
        return best
    rival = ranking.best(groups)
    one = best.predicted
    other = rival.predicted
    assert one is not None
    assert other is not None
    if ranking.gain(one, other) > combined_band(one, other):
        return best
    return rival


def _probable(able: Sequence[Plan], than: Plan, today: Predicted, ranking: Ranking) -> Plan | None:
    """Returns the best plan that is worth a try, with the reason; `than`: what it must beat."""
    other = than.predicted
    assert other is not None
    better = [
        plan
        for plan in able
        if plan.predicted and ranking.gain(plan.predicted, other) > WORTH_A_TRY
    ]
    if not better:
        return None
    best = _best_as_is(better, ranking)
    assert best.predicted is not None
    saved = percentage(ranking.gain(best.predicted, other))
    band = percentage(error_band(best.predicted))
    reason = _praise(best, today, ranking, is_late=False)
    reason += f"; {ranking.saved_words} saved: {saved}, within the error band of {band}"
    return msgspec.structs.replace(best, reason=reason)


def _praise(plan: Plan, today: Predicted, ranking: Ranking, *, is_late: bool) -> str:
    outcome = plan.predicted
    assert outcome is not None
    text = as_fast(outcome.speedup)
    if ranking.is_billed:
        comma = "," if abs(outcome.cost_change) < SAME_COST else " and"
        text += f"{comma} {cost_change_words(outcome.cost_change, is_billed=True)}"
    else:
        text += _busy_words(outcome, today) + added_words(plan, outcome, today)
    if is_late and outcome.total_hours is not None and today.total_hours is not None:
        text += (
            f"; {outcome.total_hours:.2f} h, today's {today.total_hours:.2f} h miss the deadline"
        )
    return f"{text}; bottleneck: {limits(outcome)}{own_storage_words(outcome)}"


def _busy_words(outcome: Predicted, today: Predicted) -> str:
    if not outcome.accelerator_seconds:
        return ""
    busy = percentage(outcome.accelerator_utilization)
    before = percentage(today.accelerator_utilization)
    return f", accelerators busy {busy} instead of {before}{busy_scope(outcome)}"


def added_words(plan: Plan, outcome: Predicted, today: Predicted) -> str:
    """Returns what a plan without a price takes: more cores, and loader workers of the script."""
    added = cores(outcome) - cores(today)
    text = ""
    if added > 1e-6:
        text = f", on {added:.3g} more core{'' if round(added, 6) == 1 else 's'}"
    workers = plan.groups[0].workers_per_host
    if plan.action in ("tune", "scale_up") and workers:
        text += f", with {numbered(workers, 'loader worker')} per host"
    return text


def _beyond(best: Plan, free: Plan | None, keep: Plan, ranking: Ranking) -> str:
    """Returns what comes first, at no cost, and what the plan gains beyond it; empty: nothing."""
    if free is None or free.predicted is None or best.predicted is None:
        return ""
    if ranking.is_free(best, keep):
        return ""
    more = percentage(ranking.gain(best.predicted, free.predicted))
    bands = percentage(combined_band(best.predicted, free.predicted))
    return f"; {more} beyond what is free, where both bands together are {bands}"


def _why_keep(able: Sequence[Plan], today: Predicted, ranking: Ranking) -> str:
    word = ranking.better_words
    better = [p for p in able if p.predicted and ranking.gain(p.predicted, today) > 0]
    # None is better, or one is, within its band: the reader is told which of the two.
    if not better:
        return f"no feasible plan {word} than today's cluster"
    best = ranking.ranked(better)[0].predicted
    assert best is not None
    return (
        f"no plan {word} by more than its own error band: the best gains "
        f"{percentage(ranking.gain(best, today))}, its band is {percentage(error_band(best))}"
    )


def _why_late(others: Sequence[Plan], constraints: Constraints) -> str:
    deadline = constraints.deadline_hours or 0.0
    budget = constraints.max_usd_per_hour
    text = f"; it misses the deadline of {deadline:g} h, as all plans do"
    # Also of plans that the budget rules out.
    in_time = [
        plan.predicted.usd_per_hour
        for plan in others
        if plan.predicted
        and plan.predicted.total_hours is not None
        and plan.predicted.total_hours <= deadline
    ]
    prices = [price for price in in_time if price is not None]
    if budget is None or not prices:
        return text
    cost, limit = apart(min(prices), budget)
    return (
        f"{text} within the budget of ${limit} per hour: the two contradict each other, the "
        f"cheapest plan in time needs ${cost} per hour"
    )


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
    return f"; {times(outcome.own_storage_speedup)}x if each host has separate storage"


def step_time_words(outcome: Predicted, *, has_band: bool = False) -> str:
    """Returns the time by which plans are compared: of whole epochs, with the step beside it."""
    counted = outcome.counted_seconds
    step = outcome.step_seconds
    band = ""
    if has_band:
        band = f" ({ms(outcome.counted_low)} to {ms(outcome.counted_high)})"
    if not is_whole_longer(step, counted):
        return f"{ms(counted)} per step{band}"
    return f"{ms(counted)} per step over whole epochs{band}, {ms(step)} within them"


def pays(outcome: Predicted) -> str:
    """Returns from which speed-up a step is cheaper than today, and whether the plan reaches it."""
    ratio = outcome.break_even_speedup
    if ratio is None:
        return "today's hosts cost nothing"
    if ratio <= 1:
        return "it costs no more per hour than today's hosts"
    if outcome.speedup >= ratio:
        return (
            f"a step is cheaper than today from {times(ratio)}x on: it is {times(outcome.speedup)}x"
        )
    return f"it buys time, not money: a step is cheaper than today from {times(ratio)}x on"


def local_core_words(decision: Decision) -> str:
    """Returns what the chosen data hosts' cores would do on the training host; empty: unknown.

    Shown with the speed-up of a local plan with data hosts, as the same cores without a data group
    may do as much.
    """
    chosen = decision.plan
    is_here = decision.prices.is_nominal
    if not is_here or chosen.action != "heterogeneous" or chosen.predicted is None:
        return ""
    for plan in decision.plans:
        outcome = plan.predicted
        if plan.action != "scale_up" or outcome is None or not outcome.cpu_seconds:
            continue
        # As many cores as the plan's hosts have together.
        if abs(cores(outcome) - cores(chosen.predicted)) < 1e-6:
            low = ms(outcome.counted_low)
            high = ms(outcome.counted_high)
            return (
                f"the same cores in the training host itself, {cluster(plan)}: predicted "
                f"{ms(outcome.counted_seconds)} per step ({low} to {high}), "
                f"{as_fast(outcome.speedup)}; where both were run, both were about as fast "
                "(docs/method.md)"
            )
    return ""


_Reply = Literal["yes", "no", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowChart:
    """What the questions of the decision path are answered from.

    Attributes:
        chosen: The plan that is run: the choice's, or its probable plan.
        free_fixes: Texts of the profile's fixes that cost nothing.
        fix_first: What to fix before anything that costs.
        unfed: Why data hosts cannot make the batches.
        in_step: Why they have to be made in step with the loop.
        unworkable: Why workers cannot make them either, as a sentence.
        is_machine_full: Today's hosts have all cores of the machine that all plans run on.
        taken: How the profile was scaled to today's hosts; None: it was taken there.
    """

    work: StepWork
    bottleneck: Bottleneck
    keep: Plan
    choice: Recommendation
    chosen: Plan
    plans: tuple[Plan, ...]
    constraints: Constraints
    ranking: Ranking
    free_fixes: tuple[str, ...] = ()
    fix_first: str = ""
    unfed: str = ""
    in_step: str = ""
    unworkable: str = ""
    is_machine_full: bool = False
    taken: TakenElsewhere | None = None

    @property
    def is_busy(self) -> bool:
        reason = self.work.unexplained
        return reason is not None and reason.kind == "other_programs"


def decision_path(chart: FlowChart) -> tuple[Answer, ...]:
    """Returns the questions in order, each with its answer and the figures behind it."""
    answers = [_is_explained(chart)]
    if chart.bottleneck != "unexplained":
        answers.append(_is_cpu_the_limit(chart))
        if chart.bottleneck in ("cpu", "workers", "latency", "storage"):
            larger = "Is there a larger type of the same family with the same accelerators?"
            answers.append(_is_there(chart, "tune", "Is there a free fix?"))
            answers.append(_is_there(chart, "scale_up", larger))
            answers += _can_accelerators_decode(chart)
        answers.append(_is_a_data_group_better(chart))
        if chart.bottleneck in ("accelerator", "launch"):
            wider = "Would more accelerators be faster?"
            if chart.ranking.is_billed:
                wider = "Would more accelerators be faster or cheaper?"
            answers.append(_is_there(chart, "scale_out", wider))
    answers.append(_is_change_worth_it(chart))
    return tuple(answers)


def best_of(chart: FlowChart, action: Action) -> Plan | None:
    plans = [p for p in chart.plans if p.action == action and p.feasible and p.predicted]
    return min(plans, key=chart.ranking.rank, default=None)


def _is_explained(chart: FlowChart) -> Answer:
    reply, because = _explained(chart)
    return Answer(question="Do the measured parts explain the step?", answer=reply, because=because)


def _explained(chart: FlowChart) -> tuple[_Reply, str]:
    work = chart.work
    because = f"they give {ms(work.parts_seconds)}, measured {ms(work.step_seconds)}"
    if chart.is_busy:
        return "unknown", f"{because}, while other programs ran"
    if work.unexplained and work.unexplained.kind == "contradiction":
        return "no", work.unexplained.text
    if work.unexplained:
        # Only measured parts can contradict the step.
        return "unknown", work.unexplained.text
    if chart.taken:
        because = (
            f"on {chart.taken.profiled_on}; scaled to {chart.taken.taken_as} a step takes "
            f"{ms(work.step_seconds)}"
        )
    elif work.num_workers == 0 and "latency" in work.corrected:
        because += "; the trainer loads in it, and plans are predicted from workers alone"
    if not work.is_checked:
        return "unknown", f"not checked: {because}"
    return "yes", because


def _is_cpu_the_limit(chart: FlowChart) -> Answer:
    work = chart.work
    question = "Is the CPU the limit?"
    if chart.bottleneck in ("latency", "storage"):
        text = (
            f"loading takes {work.loader_wall_seconds:.3g} worker-seconds per step, of which "
            f"{work.loader_cpu_seconds:.3g} are CPU-seconds: it waits for its data"
        )
        if chart.bottleneck == "storage":
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
    # CPU-seconds of a step, over the vCPUs that are left for them.
    today = Hosts(instance=work.reference, count=work.hosts)
    used = work.loader_cpu_seconds + work.trainer_cpu_seconds + work.turns_cpu_seconds
    text += f": {ms(used / free_vcpus(work, today))}"
    if work.accelerator_seconds:
        step = ms(work.step_seconds)
        text += f"; without loading a step takes {ms(work.accelerator_seconds)} of {step}"
    if work.neighbour.seconds >= LEAST_GAIN * work.step_seconds:
        text += f"; busy workers on the same cores make it {ms(work.neighbour.seconds)} longer"
    if chart.bottleneck == "cpu":
        return Answer(question=question, answer="yes", because=text)
    text += f": the limit is {limit_words(chart.bottleneck)}"
    return Answer(question=question, answer="no", because=text)


def _is_there(chart: FlowChart, action: Action, question: str) -> Answer:
    plan = best_of(chart, action)
    if plan is None:
        reply, because = _without_plan(chart, action)
        return Answer(question=question, answer=reply, because=because)
    because = _figures(plan, chart)
    rival = best_of(chart, "heterogeneous")
    if action == "scale_up" and rival:
        because += _against_data_hosts(plan, rival, chart)
    return Answer(question=question, answer="yes", because=because)


def _without_plan(chart: FlowChart, action: Action) -> tuple[_Reply, str]:
    """Returns the answer where no plan of that kind can be run as it is."""
    infeasible = next((plan for plan in chart.plans if plan.action == action), None)
    because = _why_none(chart, action)
    if infeasible:
        because = infeasible.reason
    if action != "tune":
        return "no", because
    if infeasible and infeasible.predicted:
        # More shards of a stream: free, but the script must set them.
        outcome = infeasible.predicted
        figures = f"{ms(outcome.counted_seconds)} per step ({times(outcome.speedup)}x)"
        return "yes", f"{figures}: {because}"
    if chart.free_fixes:
        return "yes", chart.free_fixes[0]
    if chart.work.num_workers is None:
        return "unknown", because
    return "no", because


def _can_accelerators_decode(chart: FlowChart) -> Iterator[Answer]:
    """Yields an answer where decoding on the accelerators has a predicted step."""
    for plan in chart.plans:
        if plan.action == "offload_gpu" and plan.predicted:
            outcome = plan.predicted
            because = (
                f"{ms(outcome.counted_seconds)} per step ({times(outcome.speedup)}x), once the "
            )
            because += "script decodes there: see decode-on-gpu"
            yield Answer(question="Can the accelerators decode?", answer="yes", because=because)


def _against_data_hosts(plan: Plan, rival: Plan, chart: FlowChart) -> str:
    this = plan.predicted
    other = rival.predicted
    assert this is not None
    assert other is not None
    cost = Ranking(objective="cost", is_billed=chart.ranking.is_billed)
    less = "cheaper than that"
    words = cost.cost_words
    if not chart.ranking.is_billed:
        less = "faster than that"
        words = step_time_words
    if cost.value(other) >= cost.value(this):
        less = f"not {less}"
    return f"; a data group is {less}: {cluster(rival)}, {words(other)} against {words(this)}"


def _why_none(chart: FlowChart, action: Action) -> str:
    work = chart.work
    if action == "tune" and work.num_workers is None:
        return "today's number of loader workers is not known"
    if action == "tune" and work.data:
        return "today's data hosts load, with as many workers as the plan gives them"
    if action == "tune" and chart.unworkable:
        return chart.unworkable
    if action == "tune":
        return f"more than today's {work.num_workers} loader workers would not help on these hosts"
    if action == "scale_up":
        return f"{work.reference.type} has none that may be used"
    if not work.reference.accelerators:
        return "the hosts have no accelerators"
    return "there are no more of them here"


def _is_a_data_group_better(chart: FlowChart) -> Answer:
    keep = chart.keep.predicted
    what = "be cheaper" if chart.ranking.saved_words == "money" else "be faster"
    if keep is not None and misses_deadline(keep, chart.constraints):
        what = "make the deadline"
    best = best_of(chart, "heterogeneous")
    if best is None or keep is None:
        reply: _Reply = "no"
        because = chart.unfed or _why_no_group(chart)
    else:
        reply, because = _gain_of_a_group(chart, best, keep)
    return Answer(question=f"Would a data group {what}?", answer=reply, because=because)


def _why_no_group(chart: FlowChart) -> str:
    # None can be chosen: they are infeasible, or cannot be priced.
    groups = [plan for plan in chart.plans if plan.action == "heterogeneous"]
    # The same reason as in the table of plans.
    asked_for = [plan for plan in groups if plan.reason.startswith(ASKED_FOR)]
    infeasible = next(iter([*asked_for, *groups]), None)
    if infeasible is not None:
        return infeasible.reason or "plans cannot be priced"
    if chart.constraints.max_data_hosts == 0:
        return "max_data_hosts is 0"
    return "no CPU-only type with a price may be used"


def _gain_of_a_group(chart: FlowChart, best: Plan, keep: Predicted) -> tuple[_Reply, str]:
    ranking = chart.ranking
    able = _able(chart.plans, keep, chart.constraints)
    worth, free = _worth_running(able, chart.keep, chart.constraints, ranking)
    groups = [plan for plan in worth if plan.action == "heterogeneous"]
    plan = best
    if groups:
        # The plan that pays need not be the best one: its band may be narrower.
        plan = ranking.best(groups)
    outcome = plan.predicted
    assert outcome is not None
    costs_more = not ranking.is_free(plan, chart.keep)
    rival = None
    if free is not None and costs_more:
        rival = free.predicted
    because = f"{_figures(plan, chart)}; {percentage(plan.remote_share)} of the batches are made "
    because += "there"
    if rival is not None:
        because += (
            f"; against the best free plan ({ms(rival.counted_seconds)}): "
            f"{ranking.change_words(outcome, rival)}, both bands together are "
            f"{percentage(combined_band(outcome, rival))}"
        )
    elif misses_deadline(keep, chart.constraints):
        because += "; it makes the deadline, which today's cluster misses"
    elif not groups:
        band = percentage(error_band(outcome))
        because += f"; {ranking.change_words(outcome, keep)}, its error band is {band}"
    if groups and chart.fix_first and costs_more:
        return "no", f"{because}; {chart.fix_first}: that comes first"
    if groups:
        return "yes", because
    if not chart.fix_first and ranking.gain(outcome, keep) > WORTH_A_TRY:
        # An uncertain gain is no "no".
        return "unknown", because
    return "no", because


def _is_change_worth_it(chart: FlowChart) -> Answer:
    question = "Is the best change worth more than its error band?"
    reply, because = _worth_it(chart)
    return Answer(question=question, answer=reply, because=because)


def _worth_it(chart: FlowChart) -> tuple[_Reply, str]:
    chosen = chart.chosen
    probable = chart.choice.probable
    if chart.is_busy:
        return "unknown", "the figures are not reliable enough to compare plans"
    if chart.choice.verdict == "probable" and probable:
        return "unknown", f"{cluster(probable)}: {probable.reason}"
    if chosen.action == "keep":
        return "no", chosen.reason
    outcome = chosen.predicted
    keep = chart.keep.predicted
    if outcome is None or keep is None:
        return "yes", chosen.reason
    saved = percentage(chart.ranking.gain(outcome, keep))
    return "yes", (
        f"{cluster(chosen)} saves {saved} of the {chart.ranking.saved_words}, "
        f"its error band is {percentage(error_band(outcome))}"
    )


def _figures(plan: Plan, chart: FlowChart) -> str:
    outcome = plan.predicted
    assert outcome is not None
    speed = f"{cluster(plan)}: {ms(outcome.counted_seconds)} per step ({times(outcome.speedup)}x)"
    limit = f"bottleneck: {limits(outcome)}{own_storage_words(outcome)}"
    if not chart.ranking.is_billed:
        today = chart.keep.predicted
        assert today is not None
        more = f"{_busy_words(outcome, today)}{added_words(plan, outcome, today)}"
        return f"{speed}{more}, {limit}"
    change = f"{percentage(outcome.cost_change, signed=True)} $ per step"
    if abs(outcome.cost_change) < SAME_COST:
        change = "a step costs the same"
    price = usd(outcome.usd_per_hour, is_estimate=outcome.is_estimate)
    return f"{speed}, {price} per hour, {change}, {limit}; {pays(outcome)}"
