"""The memory of a decision: the last run's plan stays until another one is clearly better.

Two profiles of the same hosts differ by noise, and a schedule decides on a new one each time. Both
plans are compared by today's figures, at today's prices; of the last run only its plan counts. Its
plan is replaced where another saves more than both error bands together: added, and not in squares,
as one profile may err in one direction and the next in the other. Ranked by time, it is replaced by
one that is as fast, too, if its dollars are fewer by as much.
"""

from dataclasses import dataclass
from typing import Literal

import msgspec

from stoker.decide.choose import followed, misses_deadline
from stoker.decide.ranking import TIE, WORTH_A_TRY, Ranking, error_band, ranking_of
from stoker.records import (
    Answer,
    Decision,
    Plan,
    Predicted,
    PreviousDecision,
    Training,
    plan_in_words,
)
from stoker.units import percentage

# A plan at half the cost replaces any other, however wide the bands are.
MOST_MARGIN = 0.4
# No noise makes a plan this many times as fast: its own error band is enough then, as without
# memory. In money, hosts that make a step twice as fast may save a quarter.
_CLEARLY_FASTER = 2.0
_QUESTION = "Is it the plan of the last run?"


@dataclass(frozen=True, slots=True, kw_only=True)
class LastRun:
    """The last run of the workload that succeeded.

    Attributes:
        run: Its name.
        decision: What it was decided to train on.
        training: How it trained.
    """

    run: str
    decision: Decision
    training: Training

    @property
    def date(self) -> str | None:
        """Day on which it began, as `2026-11-26`; None: not known."""
        if not self.training.events:
            return None
        return self.training.events[0].when[:10]


def remembered(decision: Decision, last: LastRun) -> Decision:
    """Returns the decision, with the last run's plan where no other is better by the margin. Pure.

    The last plan is forgotten if today's figures do not tell, if its data hosts were of no use, if
    plans are ranked by another objective or other prices, or if today's constraints do not allow
    it. Its code, image and figures do not count: its step is predicted from today's profile.
    """
    # With `constraints.follow: probable` it was trained on the probable plan.
    plan = followed(last.decision, decision.constraints.follow).plan
    previous = PreviousDecision(
        run=last.run,
        date=last.date,
        action=plan.action,
        groups=plan.groups,
        is_changed=_key(plan) != _key(decision.plan),
    )
    if not previous.is_changed:
        return _with(decision, previous, f"as in {previous.words}", answer="yes")
    # The same cluster by today's figures: `decide` prices it beside those that it searches.
    today = next((listed for listed in decision.plans if _key(listed) == _key(plan)), None)
    why = _why_forgotten(decision, last) or _why_impossible(today, decision)
    rival = decision.plan.predicted
    if why or today is None or today.predicted is None or rival is None:
        forgotten = msgspec.structs.replace(previous, forgotten=why or "it has no prediction today")
        text = f"{previous.words} had {plan_in_words(plan)}; {forgotten.forgotten}"
        return _with(decision, forgotten, text, answer="no")
    ranking = ranking_of(decision)
    compared = msgspec.structs.replace(
        previous,
        gain=ranking.gain(rival, today.predicted),
        margin=margin(rival, over=today.predicted),
    )
    why_replaced = _why_replaced(compared, rival, today.predicted, ranking)
    if why_replaced:
        text = f"{previous.words} had {plan_in_words(plan)}: {why_replaced}"
        return _with(decision, compared, text, answer="no")
    return _held(decision, today, compared, ranking)


def _why_replaced(
    compared: PreviousDecision, rival: Predicted, last: Predicted, ranking: Ranking
) -> str:
    """Returns why today's best plan replaces the last one; empty: it does not."""
    gain = compared.gain or 0.0
    needed = compared.margin or 0.0
    if gain > needed:
        saved = f"{percentage(gain)} {ranking.saved_words} saved"
        return f"{saved}, more than the {percentage(needed)} needed"
    is_by_time = ranking.objective == "time" and ranking.is_billed
    # Ranked by time, plans of one step time differ in money alone.
    most = ranking.other_value(last) * (1 - needed)
    if is_by_time and gain >= -TIE and ranking.other_value(rival) < most:
        return f"it costs more than {percentage(needed)} too much, and saves no time"
    return ""


def margin(plan: Predicted, *, over: Predicted) -> float:
    """Returns the share of the objective that a plan has to save to replace another one."""
    least = max(error_band(plan), WORTH_A_TRY)
    if over.counted_seconds < _CLEARLY_FASTER * plan.counted_seconds:
        least += error_band(over)
    return min(least, MOST_MARGIN)


def _held(
    decision: Decision, today: Plan, compared: PreviousDecision, ranking: Ranking
) -> Decision:
    """Returns the decision with the last run's plan, as it is predicted today."""
    best = decision.plan
    gain = compared.gain or 0.0
    needed = percentage(compared.margin or 0.0)
    saved = ranking.saved_words
    reason = f"as in {compared.words}: "
    if gain > 0:
        reason += f"{plan_in_words(best)} would save {percentage(gain)} {saved}, and replaces it "
        reason += f"from {needed} on"
    else:
        reason += f"it saves {percentage(-gain)} {saved} over today's figures for "
        reason += f"{plan_in_words(best)}, which replaces it where that saves {needed}"
    plan = msgspec.structs.replace(today, reason=reason)
    others = [listed for listed in decision.plans if _key(listed) != _key(today)]
    held = msgspec.structs.replace(
        decision,
        action=plan.action,
        plan=plan,
        plans=(plan, *others),
        verdict="sure",
        probable=None,
        trial=None,
    )
    if plan.action == "keep":
        # Today's best plan gains something, by less than the margin: it is worth a measurement.
        trial = None
        if decision.probable == best:
            trial = decision.trial
        held = msgspec.structs.replace(held, verdict="unknown", probable=best, trial=trial)
    previous = msgspec.structs.replace(compared, is_held=True, is_changed=False)
    return _with(held, previous, reason, answer="yes")


def _why_forgotten(decision: Decision, last: LastRun) -> str:
    before = last.decision.prices
    now = decision.prices
    if decision.kind == "unknown":
        return "today's figures support no change"
    if last.training.is_helped is False:
        return "its data hosts gave it nothing"
    if last.decision.objective != decision.objective:
        return f"it was ranked by {last.decision.objective}"
    # By other prices another plan is the cheapest: what was saved cannot be compared.
    lists = [(prices.source, prices.region, prices.purchase) for prices in (before, now)]
    if lists[0] != lists[1]:
        return f"it was decided by other prices: {before.source}, {before.purchase}"
    return ""


def _why_impossible(plan: Plan | None, decision: Decision) -> str:
    if plan is None:
        return "it is not among today's plans"
    if not plan.feasible:
        return f"today it is ruled out: {plan.reason}"
    if plan.predicted and misses_deadline(plan.predicted, decision.constraints):
        return "today it misses the deadline"
    return ""


def _with(
    decision: Decision,
    previous: PreviousDecision,
    text: str,
    *,
    answer: Literal["yes", "no"],
) -> Decision:
    path = (*decision.path, Answer(question=_QUESTION, answer=answer, because=text))
    return msgspec.structs.replace(decision, previous=previous, path=path)


def _key(plan: Plan) -> tuple[object, ...]:
    """Returns what makes two plans the same: the change, the hosts, and workers to tune."""
    hosts = tuple((group.role, group.instance_type, group.count) for group in plan.groups)
    # They are the change of `tune` only; in other plans they follow from the hosts.
    workers = None
    if plan.action == "tune":
        workers = plan.groups[0].workers_per_host
    return plan.action, hosts, workers, plan.num_workers
