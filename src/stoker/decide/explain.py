"""The text of a decision, for terminal and page: the verdict first, then why, then the plans."""

from collections.abc import Iterator, Sequence

from stoker.decide.choose import cluster_words
from stoker.decide.elsewhere import taken_words
from stoker.decide.model import limit_words
from stoker.decide.price import ASKED_FOR, cores, error_band
from stoker.records import Decision, Plan, Predicted, Prices, plan_in_words
from stoker.units import (
    ESTIMATE,
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
_MARKS = "* chosen, ? asked for, ~ probable."


def explain(decision: Decision) -> str:
    """Returns the decision as text of at most 88 columns."""
    head = headline(decision)
    lines = wrapped(head)
    outcome = decision.plan.predicted
    if outcome and decision.prices.is_billed and decision.action != "keep":
        lines += wrapped(f"Break-even: {break_even_words(outcome)}.")
    lines += ["", *_table(decision)]
    sections = {
        "How it was decided": [
            f"{each.question} {each.answer}: {each.because}" for each in decision.path
        ],
        "Worth doing": [text for text in advice_words(decision) if text not in head],
        "Warnings": decision.warnings,
    }
    for title, texts in sections.items():
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
    reason = capital(plan.reason)
    advised = {advice.id: advice.text for advice in decision.advice}
    if decision.verdict == "probable" and decision.probable:
        gain = f"{plan_in_words(decision.probable)}. {capital(decision.probable.reason)}"
        then = "A try costs nothing here, so it is followed"
        if decision.action == "keep":
            then = "Until then today's cluster is kept"
        return f"Probably worth it: {gain}. To make sure: {decision.trial} {then}."
    if plan.action == "keep" and decision.verdict != "none":
        return f"Keep today's cluster for now. {reason}."
    if plan.action == "keep":
        begin = "stoker does not help here"
        if "elsewhere" in advised:
            begin = "This machine has nothing left for it"
        elif decision.bottleneck in ("accelerator", "launch"):
            begin += f", as the limit is {limit_words(decision.bottleneck)}, not the data"
        return f"{begin}: keep today's cluster. {reason}."
    text = f"{capital(plan_in_words(plan))}."
    free = advised.get("num-workers")
    if free and plan.action == "heterogeneous" and not decision.prices.is_billed:
        # A script need not change for data hosts.
        text = f"{free} Or, with the script as it is: {plan_in_words(plan)}."
    text += f" {reason}."
    if decision.is_noisy or plan.predicted is None:
        return text
    return f"{text} Prediction error: ±{percentage(error_band(plan.predicted))}."


def decision_words(decision: Decision) -> str:
    """Returns a decision in one line."""
    is_probable = decision.verdict == "probable"
    plan = decision.probable if is_probable and decision.probable else decision.plan
    return f"{'probably ' * is_probable}{plan_in_words(plan)}: {plan.reason}"


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
    elif plan.action == "tune":
        words = f"today + num_workers={plan.num_workers or 0}"
    elif today and words.startswith(f"{cluster_words(today)} + "):
        words = f"today{words.removeprefix(cluster_words(today))}"
    # A row has no room for SageMaker's `ml.`.
    return words.replace(" ml.", " ")


def shown_plans(decision: Decision) -> list[tuple[str, Plan]]:
    """Returns the plans that a reader looks for first, each with its mark, best first.

    These are the chosen one, what was asked for, the probable one, today's, the one with more
    workers, and the next ones.
    """
    able = [plan for plan in decision.plans if plan.feasible and plan.predicted]
    shown = []
    for place, plan in enumerate(able):
        mark = "?" if plan.reason.startswith(ASKED_FOR) else ""
        if decision.probable and plan.groups == decision.probable.groups:
            mark = "~"
        if plan == decision.plan:
            mark = "*"
        if mark or place < _MOST_ROWS or plan.action in ("keep", "tune"):
            shown.append((mark, plan))
    return shown


def plan_heads(decision: Decision) -> tuple[str, ...]:
    """Returns the heads of `plan_cells`."""
    costs = ("$/h", "$/1000") if decision.prices.is_billed else ("busy", "cores")
    return ("step", "speed", *costs, "limit")


def plan_cells(plan: Plan, heads: Sequence[str]) -> list[str]:
    """Returns a plan's figures: its time, what plans are compared by beside it, and its limit."""
    outcome = plan.predicted
    if outcome is None:
        return ["not known", *([""] * (len(heads) - 1))]
    costs = [percentage(outcome.accelerator_utilization), f"{cores(outcome):.3g}"]
    if "$/h" in heads:
        dollars = (outcome.usd_per_hour or 0.0, outcome.usd_per_1000_steps or 0.0)
        costs = [digits(each, 4) for each in dollars]
    return [ms(outcome.counted_seconds), f"{times(outcome.speedup)}x", *costs, outcome.limit]


def table_notes(decision: Decision) -> list[str]:
    """Returns what the columns and marks of the table mean, and where its prices come from."""
    notes = [_MARKS]
    if decision.bottleneck == "unexplained":
        notes.append("Rough guide only: the profile is not reliable enough for these figures.")
    notes.append(
        "$/1000: dollars for 1,000 steps of today's global batch."
        if decision.prices.is_billed
        else "busy: share of a step in which the model computes. cores: of all hosts."
    )
    outcomes = [plan.predicted for plan in decision.plans if plan.predicted]
    if any(is_whole_longer(each.step_seconds, each.counted_seconds) for each in outcomes):
        notes.append("step: over whole epochs, with their starts and what lies between them.")
    notes.append(_prices_words(decision.prices))
    if decision.measured:
        notes.append(f"By the {decision.measured}.")
    if decision.taken_elsewhere:
        notes.append(taken_words(decision.taken_elsewhere))
    return notes


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
        words = [f"{name}: {how}" for name, how in sorted(prices.estimated.items())]
        text += f" {ESTIMATE} estimated: {'; '.join(words)}."
    return text


def _table(decision: Decision) -> Iterator[str]:
    shown = shown_plans(decision)
    heads = plan_heads(decision)
    rows = [
        (f"{mark or ' '}{plan.action}", plan_name(plan, decision.today), *plan_cells(plan, heads))
        for mark, plan in shown
    ]
    if rows:
        yield from table_lines(("action", "cluster", *heads), rows)
    infeasible = [plan for plan in decision.plans if not plan.feasible]
    if hidden := len(decision.plans) - len(shown):
        more = numbered(hidden, "more plan")
        yield f"({more}, {len(infeasible)} of them ruled out: see decision.json)"
    for plan in infeasible:
        if plan.reason.startswith(ASKED_FOR):
            yield from wrapped(f"? {cluster_words(plan)}: {plan.reason}")
    yield from wrapped(" ".join(table_notes(decision)))
