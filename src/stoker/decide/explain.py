"""The text of a decision, for terminal and page: the verdict first, then why, then the plans."""

from collections.abc import Iterator

from stoker.decide.advice import estimate_words
from stoker.decide.choose import (
    cluster_words,
    step_time_words,
)
from stoker.decide.elsewhere import taken_words
from stoker.decide.model import limit_words
from stoker.decide.price import ASKED_FOR, Ranking, cores, error_band
from stoker.records import Decision, Plan, Predicted, Prices, plan_in_words
from stoker.units import (
    ESTIMATE,
    as_fast,
    capital,
    digits,
    is_whole_longer,
    ms,
    numbered,
    percentage,
    table_lines,
    times,
    wrapped,
)

_MOST_ROWS = 12
# A free plan is named if a step takes less than this share of today's.
_HELPS = 0.95
_MARKS = "* chosen, ? asked for, ~ probable."
_MEANINGS = {
    "$/1000": "$/1000: dollars for 1,000 steps of today's global batch.",
    "busy": "busy: share of a step in which accelerators compute.",
    "cores": "cores: of all hosts.",
    "CPU-s": "CPU-s: cores, times the step.",
}


def explain(decision: Decision) -> str:
    """Returns the decision as text of at most 88 columns."""
    lines = wrapped(headline(decision))
    if decision.measured:
        lines += wrapped(f"By the {decision.measured}.")
    if decision.taken_elsewhere:
        lines += ["", *wrapped(taken_words(decision.taken_elsewhere))]
    lines.append("")
    for text in _promises(decision):
        lines += wrapped(text)
    lines += ["", *_table(decision)]
    path = [f"{each.question} {each.answer}: {each.because}" for each in decision.path]
    advice = advice_words(decision)
    titles = ("How it was decided", "Worth doing", "Warnings")
    for title, texts in zip(titles, (path, advice, decision.warnings), strict=True):
        if texts:
            lines += ["", title]
        for text in texts:
            lines += wrapped(text, indent="  ")
    return "\n".join(lines)


def advice_words(decision: Decision) -> list[str]:
    """Returns each advice, with when it applies."""
    return [f"{each.text} ({each.when})" if each.when else each.text for each in decision.advice]


# The verdict.


def headline(decision: Decision) -> str:
    """Returns what is recommended, and why."""
    plan = decision.plan
    if decision.verdict == "probable":
        return _probable_words(decision)
    reason = capital(plan.reason)
    if plan.action == "keep" and decision.verdict != "none":
        return f"Keep today's cluster for now. {reason}."
    if plan.action == "keep":
        begin = "stoker does not help here"
        if any(advice.id == "elsewhere" for advice in decision.advice):
            begin = "This machine has nothing left for it"
        elif decision.bottleneck in ("accelerator", "launch"):
            begin += f", as the limit is {limit_words(decision.bottleneck)}, not the data"
        return f"{begin}: keep today's cluster. {reason}."
    words = plan_in_words(plan)
    text = f"{capital(words)}."
    if first := free_words(decision):
        # A script need not change for data hosts.
        then = "Or, with the script as it is" if plan.action == "heterogeneous" else "Then"
        text = f"{first} {then}: {words}."
    text += f" {reason}."
    if decision.is_noisy or plan.predicted is None:
        return text
    text += f" Prediction error: ±{percentage(error_band(plan.predicted))}."
    return text


def decision_words(decision: Decision) -> str:
    """Returns a decision in one line."""
    plan = decision.plan
    if decision.verdict == "probable" and decision.probable:
        what = "tried" if plan.action != "keep" else "not tried"
        return f"probably {_plan_and_speed(decision.probable)}, within the error band; {what}"
    if plan.action == "keep" or decision.is_noisy:
        return f"{plan_in_words(plan)}: {plan.reason}"
    return _plan_and_speed(plan)


def _plan_and_speed(plan: Plan) -> str:
    gain = f", {as_fast(plan.predicted.speedup)}" if plan.predicted else ""
    return f"{plan_in_words(plan)}{gain}"


def _probable_words(decision: Decision) -> str:
    """Returns the plan that probably gains, how to make sure, and whether it is followed."""
    plan = decision.probable
    assert plan is not None
    text = f"Probably worth it: {plan_in_words(plan)}. {capital(plan.reason)}."
    if decision.trial:
        text += f" To make sure: {decision.trial}"
    if decision.action == "keep":
        return f"{text} Until then today's cluster is kept."
    return f"{text} A try costs nothing here, so it is followed."


def free_words(decision: Decision) -> str:
    """Returns the free plan that comes before the chosen one; empty: there is none.

    On this machine these are more loader workers, and more of its cores for the training host.
    """
    chosen = decision.plan.action
    today = decision.today.predicted if decision.today else None
    if decision.prices.is_billed or chosen not in ("heterogeneous", "scale_up") or today is None:
        return ""
    # A larger training host is the same machine, with cores that data hosts would take.
    is_larger = decision.prices.is_nominal and chosen == "heterogeneous"
    actions = ("tune", "scale_up") if is_larger else ("tune",)
    free = [each for each in decision.plans if each.action in actions and each.feasible]
    plan = min(free, key=Ranking(objective="time", is_billed=False).rank, default=None)
    outcome = plan.predicted if plan else None
    if plan is None or outcome is None or outcome.counted_seconds > _HELPS * today.counted_seconds:
        return ""
    dnn = plan.groups[0]
    text = f"First, at no cost: {numbered(dnn.workers_per_host or 0, 'loader worker')} per host"
    if plan.action == "scale_up":
        text += f" on {dnn.instance_type}, whose cores are idle"
    text += f", {ms(outcome.counted_seconds)} per step, {as_fast(outcome.speedup)}"
    if outcome.accelerator_seconds:
        text += f", accelerators busy {percentage(outcome.accelerator_utilization)}"
    return f"{text}."


def _promises(decision: Decision) -> Iterator[str]:
    """Yields today's step and limit, and what the plans give in their place."""
    today = decision.today.predicted if decision.today else None
    if today is None:
        return
    limit = ""
    if decision.bottleneck != "unexplained":
        limit = f"; the limit is {limit_words(decision.bottleneck)}"
    yield f"Today: {step_time_words(today)}, {_cost_words(today, decision)}{limit}"
    is_kept = decision.action == "keep"
    plan = decision.probable if is_kept else decision.plan
    if plan is None or plan.predicted is None:
        return
    step = step_time_words(plan.predicted, has_band=True)
    begin = "Probably" if is_kept else "With the plan"
    yield f"{begin}: {step}, {_cost_words(plan.predicted, decision)}"
    if decision.prices.is_billed:
        yield f"Break-even: {break_even_words(plan.predicted)}"


def _cost_words(outcome: Predicted, decision: Decision) -> str:
    """Returns what a step costs: dollars, or what it occupies."""
    if decision.prices.is_billed:
        mark = ESTIMATE if outcome.is_estimate else ""
        return f"{mark}${digits(outcome.usd_per_1000_steps or 0.0, 3)} per 1,000 steps"
    if outcome.accelerator_seconds:
        return f"accelerators busy {percentage(outcome.accelerator_utilization)}"
    return f"{digits(outcome.cpu_seconds or 0.0, 3)} CPU-seconds per step"


def break_even_words(outcome: Predicted) -> str:
    """Returns from which speed-up a step is cheaper than today, and whether the plan reaches it."""
    ratio = outcome.break_even_speedup
    if ratio is None or ratio <= 1:
        return "it costs no more per hour than today's hosts"
    words = f"a step is cheaper than today from {times(ratio)}x on"
    if outcome.speedup >= ratio:
        return f"{words}: it is {times(outcome.speedup)}x"
    return f"it buys time, not money: {words}"


# The table.


def plan_name(plan: Plan, today: Plan | None) -> str:
    """Returns the cluster in short: what it changes of today's hosts."""
    words = cluster_words(plan)
    if plan.action == "keep":
        words = f"today: {words}"
    elif plan.num_workers is not None:
        words = f"today + num_workers={plan.num_workers}"
    elif plan.action == "tune":
        words = f"today, {numbered(plan.groups[0].workers_per_host or 0, 'worker')} per host"
    elif today and words.startswith(f"{cluster_words(today)} + "):
        words = f"today{words.removeprefix(cluster_words(today))}"
    # A row has no room for SageMaker's `ml.`.
    return words.replace(" ml.", " ")


def shown_plans(decision: Decision) -> list[tuple[str, Plan]]:
    """Returns the plans that a reader looks for first, each with its mark, best first.

    These are the chosen one, what was asked for, the probable one, each action's best, and the next
    ones.
    """
    able = [(_mark(plan, decision), plan) for plan in decision.plans if plan.feasible]
    # Plans come ranked, so that the first one of an action is its best.
    first = {plan.action: plan for _, plan in reversed(able)}
    needed = [each for each in able if each[0] or each[1] is first[each[1].action]]
    more = [each for each in able if each not in needed][: max(0, _MOST_ROWS - len(needed))]
    return [each for each in able if each in [*needed, *more] and each[1].predicted]


def _mark(plan: Plan, decision: Decision) -> str:
    if (plan.action, plan.groups) == (decision.plan.action, decision.plan.groups):
        return "*"
    if plan.reason.startswith(ASKED_FOR):
        return "?"
    return "~" if decision.probable and plan.groups == decision.probable.groups else ""


def plan_columns(decision: Decision) -> tuple[str, str]:
    """Returns the heads of the two columns by which plans are compared, beside their time."""
    if decision.prices.is_billed:
        return "$/h", "$/1000"
    outcomes = [plan.predicted for plan in decision.plans if plan.predicted]
    has_accelerators = any(outcome.accelerator_seconds for outcome in outcomes)
    return ("busy", "cores") if has_accelerators else ("cores", "CPU-s")


def plan_cells(outcome: Predicted, heads: tuple[str, str]) -> list[str]:
    """Returns the cells of `plan_columns`."""
    mark = ESTIMATE if outcome.is_estimate else ""
    cells = {
        "$/h": f"{mark}{digits(outcome.usd_per_hour or 0.0, 4)}",
        "$/1000": f"{mark}{digits(outcome.usd_per_1000_steps or 0.0, 4)}",
        "cores": f"{cores(outcome):.3g}",
        "CPU-s": digits(outcome.cpu_seconds or 0.0, 3),
        "busy": percentage(outcome.accelerator_utilization),
    }
    return [cells[head] for head in heads]


def table_notes(decision: Decision) -> list[str]:
    """Returns what the columns and marks of the table mean, and where its prices come from."""
    notes = [_MARKS]
    if decision.bottleneck == "unexplained":
        notes.append("Rough guide only: the profile is not reliable enough for these figures.")
    heads = plan_columns(decision)
    notes += [meaning for head, meaning in _MEANINGS.items() if head in heads]
    outcomes = [plan.predicted for plan in decision.plans if plan.predicted]
    if any(is_whole_longer(each.step_seconds, each.counted_seconds) for each in outcomes):
        notes.append("step: over whole epochs, with their starts and what lies between them.")
    return [*notes, _prices_words(decision.prices)]


def _prices_words(prices: Prices) -> str:
    """Returns where prices come from."""
    if prices.is_nominal:
        return "Idle cores of this machine are free, so plans are compared by time."
    if not prices.is_billed:
        return "Today's hosts have no price, so plans are compared by time."
    stale = ", STALE" if prices.stale else ""
    where = prices.region or "unknown region"
    text = f"Prices of {prices.date or 'unknown date'}{stale}, {where}, {prices.purchase}: "
    text += f"{prices.source}."
    if prices.estimated:
        text += f" {estimate_words(prices.estimated)}."
    return text


def _table(decision: Decision) -> Iterator[str]:
    shown = shown_plans(decision)
    heads = plan_columns(decision)
    cells = []
    for mark, plan in shown:
        outcome = plan.predicted
        assert outcome is not None
        name = plan_name(plan, decision.today)
        speed = (ms(outcome.counted_seconds), f"{times(outcome.speedup)}x")
        costs = plan_cells(outcome, heads)
        cells.append((f"{mark or ' '}{plan.action}", name, *speed, *costs, outcome.limit))
    if cells:
        yield from table_lines(("action", "cluster", "step", "speed", *heads, "limit"), cells)
    infeasible = [plan for plan in decision.plans if not plan.feasible]
    hidden = len(decision.plans) - len(shown)
    if cells and hidden:
        out = f", {len(infeasible)} of them ruled out" if infeasible else ""
        yield f"({numbered(hidden, 'more plan')}{out}: see decision.json)"
    for plan in infeasible:
        if plan.reason.startswith(ASKED_FOR):
            yield from wrapped(f"? {cluster_words(plan)}: {plan.reason}")
    yield from wrapped(" ".join(table_notes(decision)))
