"""The text of a decision: the verdict first, then why, then the plans."""

import math
from collections.abc import Iterator, Sequence
from itertools import chain

from stoker.decide.calibrate import LEAST_RUNS
from stoker.decide.choose import cluster, limits, pays, step_time_words
from stoker.decide.pricing import ASKED_FOR
from stoker.decide.ranking import Ranking, cores, error_band, pareto_front, ranking_of
from stoker.record_words import (
    added_hosts_words,
    busy_scope,
    estimate_words,
    free_words,
    kept_words,
    probable_words,
)
from stoker.records import (
    Advice,
    Decision,
    Group,
    Plan,
    Predicted,
    Prices,
    TakenElsewhere,
    plan_in_words,
)
from stoker.step_model import limit_words
from stoker.units import (
    ESTIMATE,
    as_fast,
    capital,
    is_whole_longer,
    ms,
    numbered,
    percentage,
    times,
    wrapped,
)

_MOST_ROWS = 12
_MOST_OF_FRONT = 6
_CLUSTER_WIDTH = 32
# Heads of the two columns of what a plan costs.
_MONEY = ("$/h", "$/1000")


def explain(decision: Decision) -> str:
    """Returns the decision as text of at most 80 columns, except for long names of clusters."""
    lines = wrapped(_verdict(decision))
    if decision.measured:
        lines += wrapped(f"By the {decision.measured}.")
    if decision.taken_elsewhere is not None:
        lines += ["", *wrapped(_taken(decision.taken_elsewhere))]
    lines += ["", *_limits(decision), "", *_table(decision), "", "How it was decided"]
    for answer in decision.path:
        lines += wrapped(f"{answer.question} {answer.answer}: {answer.because}", indent="  ")
    for title, texts in (
        ("Worth doing", [_advice(advice) for advice in decision.advice]),
        ("Warnings", list(decision.warnings)),
    ):
        if texts:
            lines += ["", title]
            for text in texts:
                lines += wrapped(text, indent="  ")
    return "\n".join(lines)


def _advice(advice: Advice) -> str:
    if not advice.when:
        return advice.text
    return f"{advice.text} ({advice.when})"


def _verdict(decision: Decision) -> str:
    plan = decision.plan
    outcome = decision.plan.predicted
    if decision.kind == "probable":
        return probable_words(decision)
    if plan.action == "keep":
        return kept_words(decision)
    words = plan_in_words(plan)
    text = f"{capital(words)}. "
    if first := free_words(decision):
        # A script need not change for data hosts.
        then = "Or, with the script as it is" if plan.action == "heterogeneous" else "Then"
        text = f"{first} {then}: {words}. "
    if plan.reason:
        text += f"{capital(plan.reason)}."
    if decision.is_noisy:
        return text
    if outcome is not None:
        text += f" Prediction error: ±{percentage(error_band(outcome))}"
        if outcome.own_storage_speedup:
            text += ", where the storage is shared"
        if decision.taken_elsewhere:
            text += ": profile taken elsewhere"
        text += "."
    if more := probable_words(decision):
        text += f" {more}"
    return text


def _taken(taken: TakenElsewhere) -> str:
    here = taken.profiled_on
    there = taken.taken_as
    speed = {
        "catalog": "by the catalog",
        "cpu_model": "by its CPU model",
        "given": "as given",
        "assumed": "which is assumed: set it with --cpu-speed",
    }[taken.cpu_speed_source]
    step = {
        "profile": "the accelerator's step is the profile's",
        "cpu": "the training computes on CPUs, and is scaled with them",
        "given": "the accelerator's step is as given",
        "unknown": "the accelerator's step is not known: set it with --accelerator-step-seconds",
    }[taken.accelerator_step_source]
    return (
        f"Profile taken elsewhere: on {here}. Today's type is {there}, where nothing was "
        f"measured: a vCPU there counts {as_fast(taken.cpu_speed)} as one of {here}, "
        f"{speed}; {step}. All bands are wider for that."
    )


def _limits(decision: Decision) -> list[str]:
    keep = decision.today
    today = "Today"
    if decision.bottleneck != "unexplained":
        today += f" the bottleneck is {limit_words(decision.bottleneck)}"
    lines = []
    if keep is not None and keep.predicted:
        lines.append(f"{today}: {_step_and_cost(keep.predicted, decision)}")
    elif decision.bottleneck != "unexplained":
        lines.append(today)
    if decision.plan.action != "keep":
        lines += _promises("With the plan", decision.plan, decision)
    if decision.probable is not None and decision.probable.groups != decision.plan.groups:
        lines += _promises("Probably", decision.probable, decision)
    calibration = decision.calibration
    if calibration is not None and not calibration.runs:
        lines.append(f"Not calibrated: fewer than {LEAST_RUNS} earlier runs fit this one")
    elif calibration is not None:
        given = times(calibration.efficiency)
        received = times(calibration.receive)
        lines.append(
            f"Calibrated on {calibration.runs} runs: data hosts give {given} times what the model "
            f"assumes, receiving takes {received} times as long"
        )
    return [*chain.from_iterable(map(wrapped, lines))]


def _promises(begin: str, plan: Plan, decision: Decision) -> list[str]:
    outcome = plan.predicted
    if outcome is None:
        return []
    cost = _step_and_cost(outcome, decision, has_band=True)
    lines = [f"{begin}: {cost}; bottleneck: {limits(outcome)}"]
    busy = f"{percentage(outcome.accelerator_utilization)} of a step{busy_scope(outcome)}"
    if decision.prices.is_billed:
        lines.append(f"Break-even: {pays(outcome)}; accelerators are busy {busy}")
    elif not outcome.accelerator_seconds:
        lines.append(f"The training computes for {busy}")
    added = added_hosts_words(plan.groups)
    if added and not decision.prices.is_billed:
        lines.append(f"Hosts added: {added}, for batches alone")
    return lines


def _step_and_cost(outcome: Predicted, decision: Decision, *, has_band: bool = False) -> str:
    """Returns a step and what it costs: dollars, or how busy the accelerators are."""
    step = step_time_words(outcome, has_band=has_band)
    if not decision.prices.is_billed and outcome.accelerator_seconds:
        busy = percentage(outcome.accelerator_utilization)
        return f"{step}, accelerators busy {busy}{busy_scope(outcome)}"
    return f"{step}, {ranking_of(decision).cost_words(outcome)}"


def _table(decision: Decision) -> list[str]:
    shown = [plan for plan in decision.plans if plan.feasible and plan.predicted]
    if not shown:
        return wrapped(_prices(decision.prices))
    is_billed = decision.prices.is_billed
    front = pareto_front(shown, is_billed=is_billed)
    # Not among those to choose from: what a change of the script would give.
    rewrites = [plan for plan in decision.plans if plan.action == "offload_gpu" and plan.predicted]
    rows = [*_few(shown, decision, front), *rewrites]
    heads = _heads(rows, is_billed=is_billed)
    lines = _rows(rows, decision, front, heads=heads)
    # Rewrites are infeasible as the script is, and are shown all the same.
    hidden = len(shown) + len(rewrites) - len(rows)
    forbidden = sum(not plan.feasible for plan in decision.plans) - len(rewrites)
    counts = ((hidden, "more"), (forbidden, "ruled out"))
    more = [f"{count} {what}" for count, what in counts if count]
    if more:
        lines.append(f"(plans not shown: {', '.join(more)}; see decision.json)")
    for plan in decision.plans:
        if not plan.feasible and plan.reason.startswith(ASKED_FOR):
            lines += wrapped(f"? {cluster(plan)}: {plan.reason}")
    lines += _footnotes(decision, rows, heads=heads)
    lines.append(_marks(decision, shown))
    return [*lines, *wrapped(f"* chosen. {_prices(decision.prices)}")]


def _rows(
    rows: Sequence[Plan], decision: Decision, front: Sequence[Plan], *, heads: tuple[str, str]
) -> list[str]:
    today = next((plan.groups for plan in decision.plans if plan.action == "keep"), ())
    names = [_named(plan, today)[:_CLUSTER_WIDTH] for plan in rows]
    wide = max(map(len, [*names, "cluster"]))
    lines = [
        f"{'action':<14} {'cluster':<{wide}} {'step':>7} {'speed':>6} {heads[0]:>6} "
        f"{heads[1]:>6} limit",
    ]
    for plan, name in zip(rows, names, strict=True):
        mark = _mark(plan, decision, is_chosen=plan is rows[0], is_front=plan in front)
        lines.append(_row(plan, f"{name:<{wide}}", mark=mark, heads=heads, decision=decision))
    return lines


def _heads(rows: Sequence[Plan], *, is_billed: bool) -> tuple[str, str]:
    """Returns the heads of the two columns by which plans are compared, beside their time."""
    if is_billed:
        return _MONEY
    outcomes = [plan.predicted for plan in rows if plan.predicted]
    if any(outcome.accelerator_seconds for outcome in outcomes):
        return "busy", "cores"
    return "cores", "CPU-s"


def _marks(decision: Decision, shown: Sequence[Plan]) -> str:
    """Returns what the marks of the rows mean, but for the chosen one's."""
    better = "faster and takes less CPU time"
    if decision.prices.is_billed:
        better = "faster and cheaper"
    text = f". no other plan is both {better} (the Pareto front)."
    if any(plan.reason == ASKED_FOR for plan in shown):
        text += " ? asked for."
    if decision.probable:
        text += " ~ probable."
    return text


def _mark(plan: Plan, decision: Decision, *, is_chosen: bool, is_front: bool) -> str:
    if plan.action == "offload_gpu":
        return "+"
    if is_chosen:
        return "*"
    if plan.reason == ASKED_FOR:
        return "?"
    if decision.probable and plan.groups == decision.probable.groups:
        return "~"
    if is_front:
        return "."
    return " "


def _footnotes(
    decision: Decision, rows: Sequence[Plan], *, heads: tuple[str, str]
) -> Iterator[str]:
    """Yields what the rows, their marks and the columns mean."""
    if any(plan.action == "offload_gpu" for plan in rows):
        yield "+ needs another loading code, see below: stoker does not choose it."
    if decision.bottleneck == "unexplained":
        yield "Rough guide only: the profile is not reliable enough for these figures."
    if any(plan.predicted and plan.predicted.own_storage_speedup for plan in rows):
        yield "limit?: shorter if each host has separate storage: not known."
    has_whole = any(_has_whole(plan.predicted) for plan in rows)
    within = " within epochs" if has_whole else ""
    yield {
        "$/h": "$/1000: dollars for 1,000 steps of today's global batch.",
        "busy": f"busy: share of a step{within} in which accelerators compute; cores: all hosts.",
        "cores": "CPU-s: cores of all hosts, times the step.",
    }[heads[0]]
    if has_whole:
        yield "step: over whole epochs, with their starts and what lies between them."


def _has_whole(outcome: Predicted | None) -> bool:
    return outcome is not None and is_whole_longer(outcome.step_seconds, outcome.counted_seconds)


def _few(plans: Sequence[Plan], decision: Decision, front: Sequence[Plan]) -> list[Plan]:
    """Returns the first rows, including today's, each action's best plan and the front."""
    chosen = decision.plan
    probable = decision.probable
    is_billed = decision.prices.is_billed
    # In a decision from a file the chosen plan is two equal objects.
    first: list[Plan] = [p for p in plans if p is chosen or p == chosen][:1]
    if probable is not None:
        first += [p for p in plans if p.groups == probable.groups and p not in first][:1]
    # Plans come ranked, so that the first one of an action is its best.
    seen: set[str] = set()
    for plan in plans:
        if (plan.action not in seen or plan.reason == ASKED_FOR) and plan not in first:
            first.append(plan)
        seen.add(plan.action)
    # A long front is sampled from end to end.
    every = max(1, math.ceil(len(front) / _MOST_OF_FRONT))
    first += [plan for plan in (*front[:-1:every], *front[-1:]) if plan not in first]
    for plan in plans:
        is_new = plan not in first and not _is_more_of_it(plan, first, is_billed=is_billed)
        if len(first) < _MOST_ROWS and is_new:
            first.append(plan)
    return sorted(first, key=plans.index)


def _is_more_of_it(plan: Plan, shown: Sequence[Plan], *, is_billed: bool) -> bool:
    """Whether a shown plan of the same types is as fast and costs no more."""
    outcome = plan.predicted
    if outcome is None:
        return False
    ranking = Ranking(objective="time", is_billed=is_billed)
    # Sums of floats: a difference of a billionth is none.
    most_seconds = outcome.counted_seconds * (1 + 1e-9)
    most_cost = ranking.other_value(outcome)
    same = [other.predicted for other in shown if _types(other) == _types(plan)]
    return any(
        other.counted_seconds <= most_seconds and ranking.other_value(other) <= most_cost
        for other in same
        if other is not None
    )


def _types(plan: Plan) -> list[str]:
    return [group.instance_type for group in plan.groups]


def _row(plan: Plan, name: str, *, mark: str, heads: tuple[str, str], decision: Decision) -> str:
    outcome = plan.predicted
    assert outcome is not None
    costs = _costs(outcome, heads)
    limit: str = outcome.limit
    if plan.action == "keep" and decision.bottleneck == "workers":
        # By the name that the verdict has.
        limit = decision.bottleneck
    if outcome.own_storage_speedup:
        limit += "?"
    return (
        f"{mark}{plan.action:<13} {name} {_short(outcome.counted_seconds):>7} "
        f"{times(outcome.speedup):>5}x {costs[0]:>6} {costs[1]:>6} {limit}"
    )


def _named(plan: Plan, today: Sequence[Group]) -> str:
    """Returns the cluster in short: what it adds to today's hosts, if it has all of them."""
    words = cluster(plan)
    added = plan.groups[len(today) :]
    keeps_todays_hosts = bool(today) and _hosts(plan.groups)[: len(today)] == _hosts(today)
    if plan.action == "keep":
        words = f"today: {words}"
    elif plan.action == "tune" and _hosts(plan.groups) == _hosts(today):
        workers = plan.groups[0].workers_per_host or 0
        words = f"today, {numbered(workers, 'worker')} per host"
        if plan.num_workers is not None:
            words = f"today + num_workers={plan.num_workers}"
    elif plan.action == "offload_gpu":
        words = "today, decoding on its GPUs"
    elif added and keeps_todays_hosts:
        more = [f"{group.count} {group.instance_type}" for group in added]
        words = " + ".join(["today", *more])
    # 80 columns have no room for SageMaker's `ml.`.
    return words.replace(" ml.", " ")


def _hosts(groups: Sequence[Group]) -> list[tuple[str, int]]:
    return [(group.instance_type, group.count) for group in groups]


def _prices(prices: Prices) -> str:
    if prices.is_nominal:
        return "Idle cores of this machine are free, so plans are compared by time."
    if not prices.is_billed:
        return "Today's hosts have no price, so plans are compared by time."
    stale = ", STALE" if prices.stale else ""
    where = prices.region or "unknown region"
    when = prices.date or "unknown date"
    text = f"Prices of {when}{stale}, {where}, {prices.purchase}: {prices.source}."
    if words := estimate_words(prices.estimated):
        text += f" {words}"
    return text


def _short(seconds: float) -> str:
    if 1e-4 <= seconds < 1e4:
        return ms(seconds).replace(" ", "")
    # Figures that do not fit into seven columns become a power of ten.
    return f"{seconds:.0e}s"


def _costs(outcome: Predicted, heads: tuple[str, str]) -> list[str]:
    if outcome.cpu_seconds is None and heads != _MONEY:
        return ["?", "?"]
    mark = ESTIMATE if outcome.is_estimate else ""
    cells = {
        "$/h": mark + _money(outcome.usd_per_hour or 0.0),
        "$/1000": mark + _money(outcome.usd_per_1000_steps or 0.0),
        "cores": f"{cores(outcome):.3g}",
        "CPU-s": _money(outcome.cpu_seconds or 0.0),
        "busy": percentage(outcome.accelerator_utilization),
    }
    return [cells[head] for head in heads]


def _money(value: float) -> str:
    if value == 0 or 0.001 <= value < 10:
        return f"{value:.3f}"
    if 1e-4 <= value < 0.001:
        return f"{value:.4f}"
    if 10 <= value < 1e4:
        return f"{value:.1f}"
    return f"{value:.0e}"
