"""What a plan costs, and which of two plans is better: one rule for a whole decision.

With prices a plan costs dollars, and an accelerator that waits is part of them. Without prices
nothing idle costs anything: what is scarce is what trains. A plan then costs the time of the
accelerators, or of the step where there are none, and CPU time only decides between equals.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from stoker.records import Decision, Plan, Predicted
from stoker.units import SAME_COST, cost_change_words, percentage, usd

Objective = Literal["cost", "time"]
# Plans this close to the best count as equal: then fewer machines win.
TIE = 0.03
# A smaller gain is not worth a try: two runs on the same quiet hosts differ by as much.
WORTH_A_TRY = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """How the plans of a decision are compared.

    Attributes:
        is_billed: Whether today's hosts have a price, so that plans are compared in dollars.
    """

    objective: Objective
    is_billed: bool

    def value(self, outcome: Predicted) -> float:
        """Returns what the objective counts for a step: less is better."""
        if self.objective == "time":
            return outcome.counted_seconds
        if self.is_billed:
            return _usd(outcome)
        return outcome.accelerator_seconds or outcome.counted_seconds

    def other_value(self, outcome: Predicted) -> float:
        """Returns what decides where `value` does not: time or dollars, CPU time without them."""
        if not self.is_billed:
            return outcome.cpu_seconds or 0.0
        if self.objective == "cost":
            return outcome.counted_seconds
        return _usd(outcome)

    def gain(self, outcome: Predicted, today: Predicted) -> float:
        """Returns the fraction of the objective that the plan saves."""
        return 1 - self.value(outcome) / self.value(today)

    def of_plan(self, plan: Plan) -> tuple[float, float]:
        """Returns both values of a plan; infinity without a prediction."""
        outcome = plan.predicted
        if outcome is None:
            return math.inf, math.inf
        return self.value(outcome), self.other_value(outcome)

    def rank(self, plan: Plan) -> tuple[bool, float, float, int, str]:
        """Returns a key that sorts the best plan first, one that cannot be run last."""
        value, other = self.of_plan(plan)
        # The last word, so that plans with equal figures come in one order on every machine.
        groups = (f"{g.instance_type}:{g.count}:{g.workers_per_host}" for g in plan.groups)
        is_out = not plan.feasible or plan.predicted is None
        return is_out, value, other, num_machines(plan), " ".join(groups)

    def ranked(self, plans: Sequence[Plan]) -> list[Plan]:
        """Returns the best first, infeasible ones and those without a prediction last."""
        return sorted(plans, key=self.rank)

    def best(self, plans: Sequence[Plan]) -> Plan:
        """Returns the smallest of the plans that are as good as the best.

        Where some of them have listed prices, it is one of these: an estimate may be off by more.
        """
        least = min(self.of_plan(plan)[0] for plan in plans)
        equal = [plan for plan in plans if self.of_plan(plan)[0] <= least * (1 + TIE)]
        if self.is_billed:
            listed = [plan for plan in equal if not _is_estimate(plan)]
            return min(listed or equal, key=lambda plan: (num_machines(plan), *self.rank(plan)))
        # Cores that hardly help are left idle.
        return min(
            equal, key=lambda plan: (num_machines(plan), self.of_plan(plan)[1], *self.rank(plan))
        )

    def is_free(self, plan: Plan, keep: Plan) -> bool:
        """Whether a plan costs no more per hour than today's: without prices, no more cores."""
        outcome = plan.predicted
        today = keep.predicted
        if outcome is None or today is None:
            return False
        # Prices are sums of floats: a difference of a billionth is ignored.
        return self._rate(outcome) <= self._rate(today) * (1 + 1e-9)

    def _rate(self, outcome: Predicted) -> float:
        """Returns what a cluster takes while it runs: dollars per hour, or cores."""
        if not self.is_billed:
            return cores(outcome)
        if outcome.usd_per_hour is None:
            return math.inf
        return outcome.usd_per_hour

    def cost_words(self, outcome: Predicted) -> str:
        """Returns the cost of a step: dollars, or CPU- and accelerator-seconds without a bill."""
        if self.is_billed:
            cost = usd(outcome.usd_per_1000_steps, is_estimate=outcome.is_estimate)
            return f"{cost} per 1,000 steps"
        words = []
        if outcome.cpu_seconds is not None:
            words.append(f"{outcome.cpu_seconds:.3g} CPU-seconds")
        if outcome.accelerator_seconds:
            words.append(f"{outcome.accelerator_seconds:.3g} accelerator-seconds")
        if not words:
            return "its cost is not known"
        return f"{' and '.join(words)} per step"

    def change_words(self, outcome: Predicted, other: Predicted) -> str:
        """Returns how the objective changes from another plan to this one."""
        saved = self.gain(outcome, other)
        if self.saves_money:
            return cost_change_words(-saved, is_billed=True)
        if abs(saved) < SAME_COST:
            return "a step takes as long"
        if saved < 0:
            return f"a step takes {percentage(-saved)} longer"
        return f"a step takes {percentage(saved)} less time"

    @property
    def saves_money(self) -> bool:
        """Whether the objective counts dollars."""
        return self.is_billed and self.objective == "cost"

    @property
    def saved_words(self) -> str:
        """What a plan saves."""
        if self.saves_money:
            return "money"
        return "time"

    @property
    def better_words(self) -> str:
        """What a better plan is."""
        if self.saves_money:
            return "costs less"
        return "is faster"


def ranking_of(decision: Decision) -> Ranking:
    """Returns how the plans of a decision were compared."""
    return Ranking(objective=decision.objective, is_billed=decision.prices.is_billed)


def pareto_front(plans: Sequence[Plan], *, is_billed: bool = True) -> list[Plan]:
    """Returns the feasible, predicted plans that none beats in time and cost, fastest first.

    The cost is dollars, or CPU time where nothing is billed.
    """
    ranking = Ranking(objective="time", is_billed=is_billed)
    front: list[Plan] = []
    cheapest = math.inf
    # A plan is on the front if it is cheaper than all faster plans.
    for plan in sorted(plans, key=ranking.of_plan):
        cost = ranking.of_plan(plan)[1]
        if plan.feasible and cost < cheapest:
            front.append(plan)
            cheapest = cost
    return front


def error_band(outcome: Predicted) -> float:
    return outcome.counted_high / outcome.counted_seconds - 1


def combined_band(one: Predicted, other: Predicted) -> float:
    """Returns the relative error of the ratio of two predictions."""
    # In squares, as independent errors add up (see `pricing.band`).
    return math.hypot(error_band(one), error_band(other))


def num_machines(plan: Plan) -> int:
    return sum(group.count for group in plan.groups)


def cores(outcome: Predicted) -> float:
    """Returns the vCPUs of all hosts."""
    # `cpu_seconds` are those vCPUs times the step, whether they are busy or not.
    return (outcome.cpu_seconds or 0.0) / outcome.counted_seconds


def _is_estimate(plan: Plan) -> bool:
    return plan.predicted is not None and plan.predicted.is_estimate


def _usd(outcome: Predicted) -> float:
    # A plan without a price is last.
    if outcome.usd_per_1000_steps is None:
        return math.inf
    return outcome.usd_per_1000_steps
