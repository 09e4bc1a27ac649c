"""The flow chart of the published method is walked, with the figures at each turn."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from stoker.decide.choose import best_free, buys, combined_band, error_band, gain, ranked
from stoker.decide.model import Estimate, Hosts, Work, free_vcpus
from stoker.decide.words import cluster, limit_words, limits, pays
from stoker.records import Action, Answer, Bottleneck, Constraints, Plan
from stoker.text import ms

_Reply = Literal["yes", "no", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """The figures and plans that the flow chart is walked with.

    Attributes:
        estimate: Today's cluster, as the model sees it.
        free_fixes: What the profile found to cost nothing, in words.
    """

    work: Work
    estimate: Estimate
    bottleneck: Bottleneck
    keep: Plan
    chosen: Plan
    plans: tuple[Plan, ...]
    constraints: Constraints
    free_fixes: tuple[str, ...] = ()


def walk(found: Walk) -> tuple[Answer, ...]:
    """Returns the questions in their order, each with its answer and the figures behind it."""
    answers = [_is_explained(found)]
    if found.bottleneck != "unexplained":
        answers.append(_is_cpu_the_limit(found))
        if found.bottleneck in ("cpu", "workers", "latency", "storage"):
            answers.append(_is_there(found, "tune", "Is there a free fix?"))
            answers.append(
                _is_there(
                    found,
                    "scale_up",
                    "Is there a larger type of the same family with the same accelerators?",
                )
            )
        answers.append(_does_a_data_group_pay(found))
        if found.bottleneck == "accelerator":
            answers.append(
                _is_there(found, "scale_out", "Would more accelerators be faster or cheaper?")
            )
    answers.append(_is_change_worth_it(found))
    return tuple(answers)


def best_of(found: Walk, actions: Sequence[Action]) -> Plan | None:
    """Returns the best feasible plan of these actions that has a prediction."""
    plans = [p for p in found.plans if p.action in actions and p.feasible and p.predicted]
    return ranked(plans, found.constraints.objective)[0] if plans else None


def _is_explained(found: Walk) -> Answer:
    work = found.work
    question = "Do the measured parts explain the step?"
    if work.unexplained:
        known = not work.unexplained.startswith(("only the time", "not measured", "other programs"))
        if work.unexplained.startswith("other programs"):
            because = f"they give {ms(work.parts_seconds)}; {work.unexplained}"
            return Answer(question=question, answer="unknown", because=because)
        reply: _Reply = "no" if known else "unknown"
        return Answer(question=question, answer=reply, because=work.unexplained)
    because = f"they give {ms(work.parts_seconds)}, measured {ms(work.step_seconds)}"
    if work.is_checked:
        return Answer(question=question, answer="yes", because=because)
    return Answer(question=question, answer="unknown", because=f"not checked: {because}")


def _is_cpu_the_limit(found: Walk) -> Answer:
    work = found.work
    accelerator = work.accelerator_seconds
    if found.bottleneck in ("latency", "storage"):
        text = (
            f"loading takes {work.loader_wall_seconds:.3g} worker-seconds per step, of which "
            f"{work.loader_cpu_seconds:.3g} are CPU-seconds: it waits for its data"
        )
        if found.bottleneck == "storage":
            text += ", which all workers share"
        return Answer(question="Is the CPU the limit?", answer="no", because=text)
    text = f"loading takes {work.loader_cpu_seconds:.3g} CPU-seconds per step"
    if work.trainer_cpu_seconds:
        text += f", the trainer {work.trainer_cpu_seconds:.3g}"
    text += f", on {work.hosts * work.reference.capacity:g} vCPUs"
    if work.reserved_vcpus:
        text += f" ({work.hosts * work.reserved_vcpus:g} of them reserved for the trainer)"
    today = Hosts(instance=work.reference, count=work.hosts)
    cpu = (work.loader_cpu_seconds + work.trainer_cpu_seconds) / free_vcpus(work, today)
    text += f": {ms(cpu)}"
    if accelerator:
        text += f"; without loading a step takes {ms(accelerator)} of {ms(work.step_seconds)}"
    if found.bottleneck == "cpu":
        return Answer(question="Is the CPU the limit?", answer="yes", because=text)
    return Answer(
        question="Is the CPU the limit?",
        answer="no",
        because=f"{text}: the limit is {limit_words(found.bottleneck)}",
    )


def _is_there(found: Walk, action: Action, question: str) -> Answer:
    plan = best_of(found, (action,))
    if plan is None:
        infeasible = next((p for p in found.plans if p.action == action), None)
        because = infeasible.reason if infeasible else _why_none(found, action)
        reply: _Reply = "no"
        if action == "tune" and found.free_fixes:
            reply, because = "yes", found.free_fixes[0]
        elif action == "tune" and found.work.num_workers is None:
            reply = "unknown"
        return Answer(question=question, answer=reply, because=because)
    because = _figures(plan)
    rival = best_of(found, ("heterogeneous",))
    if action == "scale_up" and rival and rival.predicted and plan.predicted:
        usd, usd_here = rival.predicted.usd_per_1000_steps, plan.predicted.usd_per_1000_steps
        because += (
            f"; a data group is {'cheaper' if usd < usd_here else 'not cheaper'} than that: "
            f"{cluster(rival)}, {usd:.3g} $ against {usd_here:.3g} $ per 1000 steps"
        )
    return Answer(question=question, answer="yes", because=because)


def _why_none(found: Walk, action: Action) -> str:
    work = found.work
    if action == "tune":
        if work.num_workers is None:
            return "today's number of loader workers is not known"
        return f"more than today's {work.num_workers} loader workers would not help on these hosts"
    if action == "scale_up":
        return f"{work.reference.type} has none that may be used"
    return "the hosts have no accelerators"


def _does_a_data_group_pay(found: Walk) -> Answer:
    question = "Does a data group pay?"
    plan = best_of(found, ("heterogeneous",))
    if plan is None or plan.predicted is None or found.keep.predicted is None:
        infeasible = next((p for p in found.plans if p.action == "heterogeneous"), None)
        if infeasible is not None:
            because = infeasible.reason or "plans cannot be priced"
        elif found.constraints.max_data_hosts == 0:
            because = "max_data_hosts is 0"
        else:
            because = "no CPU-only type with a price may be used"
        return Answer(question=question, answer="no", because=because)
    objective = found.constraints.objective
    pays_off = gain(plan.predicted, found.keep.predicted, objective) > error_band(plan.predicted)
    because = f"{_figures(plan)}; {plan.remote_share:.0%} of the batches are made there"
    free = best_free([one for one in found.plans if one.action != "keep"], found.keep)
    if free is not None and free.predicted is not None:
        rival = free.predicted
        pays_off = pays_off and buys(plan, free, objective)
        because += (
            f"; beyond the best free plan ({ms(rival.step_seconds)}) it saves "
            f"{gain(plan.predicted, rival, objective):.0%}, both bands together are "
            f"{combined_band(plan.predicted, rival):.0%}"
        )
    reply: _Reply = "yes" if pays_off else "no"
    return Answer(question=question, answer=reply, because=because)


def _is_change_worth_it(found: Walk) -> Answer:
    changed = found.chosen.action != "keep"
    outcome, keep = found.chosen.predicted, found.keep.predicted
    because = found.chosen.reason
    if changed and outcome is not None and keep is not None:
        saved = gain(outcome, keep, found.constraints.objective)
        what = "money" if found.constraints.objective == "cost" else "time"
        because = (
            f"{cluster(found.chosen)} saves {saved:.0%} of the {what}, "
            f"its error band is {error_band(outcome):.0%}"
        )
    return Answer(
        question="Is the best change worth more than its error band?",
        answer="yes" if changed else "no",
        because=because,
    )


def _figures(plan: Plan) -> str:
    outcome = plan.predicted
    assert outcome is not None
    return (
        f"{cluster(plan)}: {ms(outcome.step_seconds)} per step ({outcome.speedup:.2f}x), "
        f"{outcome.usd_per_hour:.2f} $/hour, {outcome.cost_change:+.0%} $ per step, limit "
        f"{limits(outcome)}; {pays(outcome)}"
    )
