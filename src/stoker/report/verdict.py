"""The report begins with one sentence that a reader may repeat, bad news before good."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal
from unicodedata import category

from stoker.records import Decision, Evaluation, GateResult, Plan, Profile, Training
from stoker.report.figures import Figures, plan_name, todays_group
from stoker.text import TimeUnit, count, digits, metric, percent, usd

# A gain within the noise of two runs of a minute is not a gain.
_NO_GAIN = 1.05

# What is shown of a failure: the end of a long traceback, and no more of its last line than fits.
_FAILURE_LINES = 200
_HEADLINE_LETTERS = 240
_COLOUR_CODE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")

_LIMITS = {
    "cpu": "the CPUs that load the data are the limit",
    "workers": "too few loader workers are the limit",
    "latency": "what each loader worker waits for is the limit",
    "accelerator": "the accelerator is the limit, not the data",
    "network": "the network is the limit",
    "storage": "the storage is the limit",
    "none": "nothing waits long enough to be worth a change",
    "unexplained": "the measured parts do not explain the step, so no spending is advised",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The head of the report.

    Attributes:
        tone: Whether the news is good; the mark and the badge say the same in words.
        failure: What failed, in full; empty where nothing did.
    """

    tone: Literal["good", "mixed", "bad"]
    badge: str
    headline: str
    lead: str
    failure: str = ""

    @property
    def mark(self) -> str:
        """The tone as a sign, for those who do not see its colour."""
        return {"good": "\N{CHECK MARK}", "mixed": "!", "bad": "\N{BALLOT X}"}[self.tone]


def judge(
    *,
    figures: Figures,
    unit: TimeUnit,
    nominal: bool,
    profile: Profile | None,
    decision: Decision | None,
    training: Training | None,
    evaluation: Evaluation | None,
    failure: str | None,
    is_planned: bool = False,
) -> Verdict:
    """Returns the verdict on a run, whole or not; is_planned: nothing was to be run afterwards."""
    lead = [
        *_promise(figures, unit),
        *_cost(figures, nominal),
        *_passed(evaluation),
    ]
    if is_planned and decision:
        return _planned(decision, [*_wait(figures), *_promise(figures, unit)])
    broken = _broken(profile, decision, training, evaluation, failure)
    if broken:
        badge, headline, text = broken
        return Verdict("bad", badge, headline, " ".join([*_wait(figures), *lead]), text)
    if evaluation and not evaluation.passed:
        failed = _gates(gate for gate in evaluation.gates if not gate.passed)
        headline = " ".join(["The model is not as good as asked.", *failed])
        lead = [*_gain(figures, unit, decision), *_promise(figures, unit), *_cost(figures, nominal)]
        return Verdict("bad", "gate failed", headline, " ".join(lead))
    passed = ", gate passed" if evaluation and evaluation.gates else ""
    if decision and decision.action == "keep":
        reason = decision.plan.reason or _LIMITS[decision.bottleneck]
        headline = " ".join([f"stoker does not help here: {_sentence(reason)}", *_wait(figures)])
        return Verdict("mixed", f"kept as it is{passed}", headline, " ".join(lead))
    if figures.speedup is None:
        headline = " ".join(
            ["The training ended, but its steps were not measured.", *_wait(figures)]
        )
        return Verdict("mixed", f"not measured{passed}", headline, " ".join(lead))
    if figures.speedup < _NO_GAIN:
        headline = " ".join(["stoker did not help.", *_gain(figures, unit, decision)])
        return Verdict("mixed", f"no gain{passed}", headline, " ".join([*_wait(figures), *lead]))
    headline = " ".join([*_wait(figures), *_gain(figures, unit, decision)])
    return Verdict("good", f"faster{passed}", headline, " ".join(lead))


def _planned(decision: Decision, lead: Sequence[str]) -> Verdict:
    reason = _sentence(decision.plan.reason or _LIMITS[decision.bottleneck])
    if decision.action == "keep":
        return Verdict(
            "mixed", "kept as it is", f"stoker does not help here: {reason}", " ".join(lead)
        )
    name = plan_name(decision.plan, today=todays_group(decision))
    headline = f"{name[:1].upper()}{name[1:]}: {reason}"
    return Verdict("good", "decided, not run yet", headline, " ".join(lead))


def _broken(
    profile: Profile | None,
    decision: Decision | None,
    training: Training | None,
    evaluation: Evaluation | None,
    failure: str | None,
) -> tuple[str, str, str] | None:
    """Returns badge, headline and full text of a run that did not come to its end."""
    if training and training.status != "succeeded":
        text = _plain(failure or training.failure or "")
        code = "" if training.exit_code is None else f" (exit code {training.exit_code})"
        if training.status == "stopped":
            return "stopped", f"The training was stopped before its end{code}.", text
        return "training failed", f"The training failed{code}{_telling(text)}", text
    text = _plain(failure or "")
    records = (
        ("profile", profile),
        ("decide", decision),
        ("train", training),
        ("evaluate", evaluation),
    )
    missing = next((step for step, record in records if record is None), None)
    if missing:
        badge = f"{missing} failed" if failure else f"ended in {missing}"
        return badge, f"The run ended in {missing}{_telling(text)}", text
    if failure:
        return "run failed", f"The run failed{_telling(text)}", text
    return None


def _wait(figures: Figures) -> list[str]:
    share = figures.wait_share
    if share is None:
        return []
    return [f"The trainer waited {percent(share)} of every step for data."]


def _gain(figures: Figures, unit: TimeUnit, decision: Decision | None) -> list[str]:
    if figures.speedup is None:
        return []
    with_plan = _with_plan(decision.plan) if decision else "Now"
    now, before = unit.brief(figures.measured), unit.brief(figures.baseline)
    if figures.speedup < 0.995:
        factor = f"{digits(1 / figures.speedup, 2)} times as long"
    else:
        factor = f"{digits(figures.speedup, 2)} times as fast"
    return [f"{with_plan} a step takes {now} instead of {before}: {factor}."]


def _with_plan(plan: Plan) -> str:
    hosts = sum(group.count for group in plan.groups if group.role == "data")
    if plan.action == "heterogeneous" and hosts:
        return f"With {count(hosts, 'data host')}"
    dnn = plan.groups[0]
    return {
        "keep": "On today's cluster",
        "tune": "With the free fixes",
        "scale_up": f"On {dnn.instance_type}",
        "scale_out": f"On {count(dnn.count, 'host')} of {dnn.instance_type}",
    }.get(plan.action, "With the chosen plan")


def _promise(figures: Figures, unit: TimeUnit) -> list[str]:
    if figures.predicted is None:
        return []
    text = f"Predicted: {unit.brief(figures.predicted)}"
    if figures.predicted_speedup is not None:
        text += f", {digits(figures.predicted_speedup, 2)} times as fast"
    if figures.prediction_error is not None:
        side = "above" if figures.prediction_error >= 0 else "below"
        text += f" (measured is {percent(figures.prediction_error)} {side}"
        if figures.is_inside_band is not None and figures.predicted_low and figures.predicted_high:
            low, high = unit.brief(figures.predicted_low), unit.brief(figures.predicted_high)
            where = "inside" if figures.is_inside_band else "outside"
            text += f", {where} the promised band of {low} to {high}"
        text += ")"
    return [text + "."]


def _cost(figures: Figures, nominal: bool) -> list[str]:
    if figures.cost_change is None or figures.measured_usd is None:
        return []
    change = percent(figures.cost_change)
    word = "more" if figures.cost_change > 0 else "less"
    prices = ", at nominal prices" if nominal else ""
    cost = f"{usd(figures.measured_usd)} per 1\N{NARROW NO-BREAK SPACE}000 steps"
    if abs(figures.cost_change) < 0.0005:
        return [f"A step costs the same as before ({cost}{prices})."]
    return [f"A step costs {change} {word} than before ({cost}{prices})."]


def gate_text(gate: GateResult) -> str:
    """Puts a gate into words: `accuracy 0.967, at least 0.94 asked`."""
    asked = [
        *([f"at least {metric(gate.min)}"] if gate.min is not None else []),
        *([f"at most {metric(gate.max)}"] if gate.max is not None else []),
    ]
    value = "was not reported" if gate.value is None else metric(gate.value)
    return f"{gate.metric} {value}, {' and '.join(asked) or 'nothing'} asked"


def _passed(evaluation: Evaluation | None) -> list[str]:
    if evaluation is None or not evaluation.gates:
        return []
    words = "; ".join(gate_text(gate) for gate in evaluation.gates)
    return [_sentence(f"Gate {'passed' if evaluation.passed else 'failed'}: {words}")]


def _gates(gates: Iterable[GateResult]) -> list[str]:
    return [_sentence(gate_text(gate)) for gate in gates]


def _telling(text: str) -> str:
    """Returns the line that names the failure: stoker's own `error:`, or a traceback's end."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix("error:").strip() for line in lines if line.startswith("error:")]
    others = [line for line in lines if not line.startswith(("where:", "try:"))]
    line = (errors[:1] or others[-1:] or [""])[0]
    if len(line) > _HEADLINE_LETTERS:
        line = line[:_HEADLINE_LETTERS].rstrip() + "\N{HORIZONTAL ELLIPSIS}"
    return f": {_sentence(line)}" if line else "."


def _plain(text: str) -> str:
    """Returns the end of `text` without a terminal's colour codes and control characters."""
    lines = _COLOUR_CODE.sub("", text).splitlines()[-_FAILURE_LINES:]
    return "\n".join(
        "".join(letter for letter in line if category(letter)[0] != "C" or letter == "\t")
        for line in lines
    )


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?", "\N{HORIZONTAL ELLIPSIS}")) else f"{text}."
