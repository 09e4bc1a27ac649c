"""The choice among priced plans, and the flow chart that leads to it, with its figures."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from stoker.decide.model import limit_words
from stoker.decide.price import (
    ASKED_FOR,
    SAME,
    WORTH_A_TRY,
    Ranking,
    Space,
    combined_band,
    cores,
    error_band,
    misses_deadline,
)
from stoker.decide.work import AGAIN
from stoker.records import Action, Answer, Bottleneck, Plan, Predicted, Profile
from stoker.records.decision import NOMINAL, VerdictKind
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

    def followed(self, space: Space) -> Plan:
        """Returns the plan to train on: a probable one where a try is free."""
        is_free = space.catalog.info.is_this_machine and space.purchase == NOMINAL
        if is_free and self.verdict == "probable" and self.probable:
            return self.probable
        return self.plan


def choose(space: Space, keep: Plan, others: Sequence[Plan], *, fix_first: str = "") -> Choice:
    """Returns the plan to run, with the reason, and the one that is worth a measurement.

    A change is sure only if it saves more than its own error band, or if it makes the deadline and
    today's cluster does not. One that saves less than its band is probable.

    Args:
        space: The work, and the rules.
        keep: Today's cluster.
        others: All other plans.
        fix_first: What to fix before anything that costs; empty: nothing.
    """
    ranking = space.ranking
    today = keep.predicted
    unexplained = space.work.unexplained
    # First what forbids any change, then what is sure, then what is worth a measurement.
    if today is None:
        return _kept(keep, "today's price is not known: nothing can be compared with it", "unknown")
    budget = space.constraints.max_usd_per_hour
    if ranking.is_billed and budget and (today.usd_per_hour or 0.0) > budget * SAME:
        words = f"today's cluster costs more per hour than max_usd_per_hour, {budget:g}"
        return _kept(keep, f"{words}: no plan can keep it", "none")
    if unexplained:
        then = f"; {AGAIN}"
        if unexplained.kind != "other_programs":
            what = "paid hosts" if ranking.is_billed else "change"
            then = f", so stoker recommends no {what}"
        return _kept(keep, f"{unexplained.text}{then}", "unknown")
    able = _able_plans(space, keep, others)
    # Until something else is fixed, only plans that cost no more are left.
    left = [plan for plan in able if not fix_first or ranking.is_free(plan, keep)]
    worth = _worth_running(space, keep, left)
    if worth:
        best = _best_as_is(worth, ranking)
        return Choice(plan=_because(best, _gain_and_limits(best, today, ranking)), verdict="sure")
    probable = _probable(able, today, ranking)
    if fix_first:
        when = "before money is spent" if ranking.is_billed else "first"
        return _kept(keep, f"{fix_first}: fix that {when}", "unknown" if probable else "none")
    reason = _why_keep(able, today, ranking)
    if misses_deadline(today, space.constraints):
        deadline = space.constraints.deadline_hours
        reason += f"; it misses the deadline of {deadline:g} h, as all plans that may be used do"
    verdict: VerdictKind = "probable" if probable else "none"
    return Choice(plan=_because(keep, reason), verdict=verdict, probable=probable)


def _because(plan: Plan, reason: str) -> Plan:
    return msgspec.structs.replace(plan, reason=reason)


def _kept(keep: Plan, reason: str, verdict: VerdictKind) -> Choice:
    return Choice(plan=_because(keep, reason), verdict=verdict)


def _able_plans(space: Space, keep: Plan, plans: Sequence[Plan]) -> list[Plan]:
    """Returns the feasible, predicted plans that may be chosen in place of today's cluster."""
    today = keep.predicted
    # More accelerators change the global batch, thus the training: they are chosen for time or a
    # deadline, never to save money.
    is_late = today is not None and misses_deadline(today, space.constraints)
    may_scale = is_late or space.constraints.objective == "time"
    barred = ("keep",) if may_scale else ("keep", "scale_out")
    return [p for p in plans if p.action not in barred and p.feasible and p.predicted]


def _worth_running(space: Space, keep: Plan, able: Sequence[Plan]) -> list[Plan]:
    """Returns the plans that are worth the change.

    A plan that costs more per hour than today must beat the free one by more than both bands.
    """
    ranking = space.ranking
    today = keep.predicted
    assert today is not None
    # If today's cluster is late, every feasible plan, which makes the deadline, is worth it.
    is_late = misses_deadline(today, space.constraints)
    worth = [
        plan
        for plan in able
        if plan.predicted
        and (is_late or ranking.gain(plan.predicted, today) > error_band(plan.predicted))
    ]
    # Among plans at no cost the fastest counts, also where the objective is money.
    by_time = Ranking(objective="time", is_billed=ranking.is_billed)
    at_no_cost = [plan for plan in worth if ranking.is_free(plan, keep)]
    free = min(at_no_cost, key=by_time.rank, default=None)
    if free is None:
        return worth
    return [p for p in worth if ranking.is_free(p, keep) or _beats(p, free, ranking)]


def _beats(plan: Plan, rival: Plan, ranking: Ranking) -> bool:
    """Whether a plan gains more over another one than the bands of both."""
    one = plan.predicted
    other = rival.predicted
    assert one is not None
    assert other is not None
    return ranking.gain(one, other) > combined_band(one, other)


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
    return best if _beats(best, rival, ranking) else rival


def _probable(able: Sequence[Plan], today: Predicted, ranking: Ranking) -> Plan | None:
    """Returns the best plan that is worth a try, with the reason."""
    better = [p for p in able if p.predicted and ranking.gain(p.predicted, today) > WORTH_A_TRY]
    if not better:
        return None
    best = _best_as_is(better, ranking)
    assert best.predicted is not None
    saved = percentage(ranking.gain(best.predicted, today))
    band = percentage(error_band(best.predicted))
    reason = _gain_and_limits(best, today, ranking)
    return _because(
        best, f"{reason}; {ranking.saved} saved: {saved}, within the error band of {band}"
    )


def _why_keep(able: Sequence[Plan], today: Predicted, ranking: Ranking) -> str:
    word = "costs less" if ranking.saves_money else "is faster"
    best = min(able, key=ranking.rank).predicted if able else None
    gain = ranking.gain(best, today) if best else 0.0
    # None is better, or one is, within its band: the reader is told which of the two.
    if best is None or gain <= 0:
        return f"no feasible plan {word} than today's cluster"
    return (
        f"no plan {word} by more than its own error band: the best gains {percentage(gain)}, "
        f"its band is {percentage(error_band(best))}"
    )


# A plan's figures in words.


def cluster_words(plan: Plan) -> str:
    return " + ".join(f"{group.count} {group.instance_type}" for group in plan.groups)


def limits(outcome: Predicted) -> str:
    """Returns the bottleneck and the next one: `the limit is the CPU, then ... (64 ms)`."""
    words = f"the limit is {limit_words(outcome.limit)}"
    # A second limit of microseconds is not worth a word.
    if outcome.second_limit_seconds < 1e-3 * outcome.step_seconds:
        return words
    return f"{words}, then {limit_words(outcome.second_limit)} ({ms(outcome.second_limit_seconds)})"


def gain_words(plan: Plan, today: Predicted, ranking: Ranking) -> str:
    """Returns what a plan gives over today: its speed with its cost, or with what it occupies."""
    outcome = plan.predicted
    assert outcome is not None
    text = as_fast(outcome.speedup)
    if ranking.is_billed:
        return f"{text}, {cost_change_words(outcome.cost_change, is_billed=True)}"
    if outcome.accelerator_seconds:
        busy, before = (percentage(each.accelerator_utilization) for each in (outcome, today))
        text += f", accelerators busy {busy} instead of {before}"
    if (added := cores(outcome) - cores(today)) > 1e-6:
        text += f", on {added:.3g} more core{'' if round(added, 6) == 1 else 's'}"
    return text


def step_time_words(outcome: Predicted, *, has_band: bool = False) -> str:
    """Returns the time by which plans are compared, with its error band if that is wanted."""
    words = f"{ms(outcome.counted_seconds)} per step"
    if is_whole_longer(outcome.step_seconds, outcome.counted_seconds):
        words += " over whole epochs"
    if has_band:
        words += f" ({ms(outcome.counted_low)} to {ms(outcome.counted_high)})"
    return words


def _gain_and_limits(plan: Plan, today: Predicted, ranking: Ranking) -> str:
    assert plan.predicted is not None
    return f"{gain_words(plan, today, ranking)}; {limits(plan.predicted)}"


# The flow chart of the published method.

_Reply = tuple[Literal["yes", "no", "unknown"], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A decision in the making, from which its flow chart and its advice are written.

    Attributes:
        bottleneck: Of today's step.
        keep: Today's cluster.
        chosen: The plan to run: the choice's, its probable one, or the fallback's.
        plans: All plans, the chosen one first.
        fix_first: What to fix before anything that costs.
        is_busy: Other programs made the profile too noisy for any prediction.
        taken_words: Where the profile was taken, if it was scaled to another type.
    """

    space: Space
    profile: Profile
    bottleneck: Bottleneck
    keep: Plan
    choice: Choice
    chosen: Plan
    plans: tuple[Plan, ...]
    fix_first: str
    is_busy: bool
    taken_words: str = ""

    def best_of(self, action: Action) -> Plan | None:
        """Returns the best plan of a kind that can be run."""
        plans = [plan for plan in self.plans if plan.action == action and plan.feasible]
        able = [plan for plan in plans if plan.predicted]
        return min(able, key=self.space.ranking.rank, default=None)

    def path(self) -> Iterator[Answer]:
        """Yields the questions in order, each with its answer and the figures behind it."""
        space = self.space
        today = self.keep.predicted
        yield _answer("Do the measured parts explain the step?", self._explained())
        if self.bottleneck != "unexplained":
            yield _answer("Is the CPU the limit?", self._is_cpu_the_limit())
            if self.bottleneck in ("cpu", "workers", "latency", "storage"):
                yield _answer("Is there a free fix?", self._is_there_a_free_fix())
                larger = "Is there a larger type of the same family with the same accelerators?"
                none = f"{space.today.type} has none that may be used"
                yield _answer(larger, self._is_there("scale_up", none))
            what = "be cheaper" if space.ranking.saves_money else "be faster"
            if today and misses_deadline(today, space.constraints):
                what = "make the deadline"
            yield _answer(f"Would a data group {what}?", self._is_a_data_group_better())
            if self.bottleneck in ("accelerator", "launch"):
                reply = self._is_there("scale_out", "there are no more of them here")
                yield _answer("Would more accelerators be faster?", reply)
        yield _answer("Is the best change worth more than its error band?", self._is_worth_it())

    def _explained(self) -> _Reply:
        work = self.space.work
        if self.is_busy:
            return "unknown", "other programs ran"
        if work.unexplained:
            # Only measured parts can contradict the step.
            is_no = work.unexplained.kind == "contradiction"
            return "no" if is_no else "unknown", work.unexplained.text
        because = f"they give {ms(work.step_seconds)}, measured {ms(work.measured_seconds)}"
        if self.taken_words:
            because = f"{self.taken_words} a step takes {ms(work.measured_seconds)}"
        return ("yes", because) if work.is_checked else ("unknown", f"not checked: {because}")

    def _is_cpu_the_limit(self) -> _Reply:
        work = self.space.work
        if self.bottleneck in ("latency", "storage"):
            return "no", (
                f"loading takes {work.loader_wall_seconds:.3g} worker-seconds per step, of which "
                f"{work.loader_cpu_seconds:.3g} are CPU-seconds: it waits for its data"
            )
        trainer = work.trainer_cpu_seconds
        text = f"loading takes {work.loader_cpu_seconds:.3g} CPU-seconds per step"
        if trainer:
            text += f", the trainer {trainer:.3g}"
        text += f", on {vcpus_words(work.vcpus)}: {ms(work.terms['cpu'])}"
        if self.bottleneck == "cpu":
            return "yes", text
        return "no", f"{text}: the limit is {limit_words(self.bottleneck)}"

    def _is_there_a_free_fix(self) -> _Reply:
        space = self.space
        if plan := self.best_of("tune"):
            return "yes", self._figures(plan)
        fixes = self.profile.fixes
        if free := [fix.text for fix in fixes if fix.cost == "none" and fix.saves_seconds]:
            return "yes", free[0]
        workers = space.work.num_workers
        if workers is None:
            return "unknown", "today's number of loader workers is not known"
        more = f"more loader workers than today's {workers} would not help on these hosts"
        return "no", space.unworkable or more

    def _is_there(self, action: Action, none: str) -> _Reply:
        if plan := self.best_of(action):
            return "yes", self._figures(plan)
        infeasible = next((plan.reason for plan in self.plans if plan.action == action), "")
        return "no", infeasible or none

    def _is_a_data_group_better(self) -> _Reply:
        space = self.space
        ranking = space.ranking
        best = self.best_of("heterogeneous")
        keep = self.keep.predicted
        if best is None or keep is None:
            # None can be chosen: they are infeasible, or cannot be priced.
            groups = [plan for plan in self.plans if plan.action == "heterogeneous"]
            groups.sort(key=lambda plan: not plan.reason.startswith(ASKED_FOR))
            none = "max_data_hosts is 0, or no CPU-only type with a price may be used"
            reason = groups[0].reason if groups else none
            return "no", space.unfed or reason or "plans cannot be priced"
        outcome = best.predicted
        assert outcome is not None
        rival, than, band = keep, "today's cluster", error_band(outcome)
        if (free := self.best_of("tune")) and free.predicted:
            rival, than = free.predicted, "the best free plan"
            band = combined_band(outcome, rival)
        gain = ranking.gain(outcome, rival)
        because = (
            f"{self._figures(best)}; {percentage(best.remote_share)} of the batches are made there;"
            f" against {than} it saves {percentage(gain)} of the {ranking.saved}, the error band "
            f"is {percentage(band)}"
        )
        if self.fix_first and not ranking.is_free(best, self.keep):
            return "no", f"{because}; {self.fix_first}: that comes first"
        if gain > band:
            return "yes", because
        # An uncertain gain is no "no".
        return "unknown" if gain > WORTH_A_TRY else "no", because

    def _is_worth_it(self) -> _Reply:
        probable = self.choice.probable
        if self.is_busy:
            return "unknown", "the figures are not reliable enough to compare plans"
        if self.choice.verdict == "probable" and probable:
            return "unknown", f"{cluster_words(probable)}: {probable.reason}"
        return "no" if self.chosen.action == "keep" else "yes", self.chosen.reason

    def _figures(self, plan: Plan) -> str:
        outcome = plan.predicted
        today = self.keep.predicted
        assert outcome is not None
        words = f"{cluster_words(plan)}: {step_time_words(outcome)}"
        if today is None:
            return words
        return f"{words}, {_gain_and_limits(plan, today, self.space.ranking)}"


def _answer(question: str, reply: _Reply) -> Answer:
    return Answer(question=question, answer=reply[0], because=reply[1])
