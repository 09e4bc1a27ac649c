"""The report begins with one sentence that a reader may repeat, bad news before good.

Each figure in it comes from the record that knows it best.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal
from unicodedata import category

from stoker.reasons import cause_of
from stoker.records import (
    Decision,
    Evaluation,
    GateResult,
    Group,
    Plan,
    Predicted,
    Profile,
    StepCost,
    Training,
    TransformCost,
)
from stoker.records.outcome import Outcome, OutcomeState, outcome_of
from stoker.text import (
    TimeUnit,
    count,
    digits,
    metric,
    percent,
    size,
    than_predicted,
    usd,
    wait_share,
    wait_words,
)

# Parts with less than this share are left to the record.
_MIN_SHARE = 0.005
_MOST = 14
# Of a dotted name the last word tells what it is; the record has the whole.
_SHORTER = re.compile(r"\b(?:[A-Za-z_]\w*\.)+(?=[A-Za-z_])")
# Outcomes to which later figures say nothing, as the mark of the page has them.
_BADGES: Mapping[OutcomeState, str] = {
    "failed": "training failed",
    "not fed": "not fed",
    "stopped": "stopped",
    "did no step": "did no step",
}
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
    "unexplained": "the measured parts do not explain the step",
}


@dataclass(frozen=True, slots=True)
class TransformRow:
    """Describes one part of loading; bytes are words, empty where they are not known."""

    name: str
    is_part: bool
    cpu_seconds: float
    share: float
    size: str
    samples: int


def transform_rows(transforms: Sequence[TransformCost]) -> list[TransformRow]:
    """Returns the parts that are worth a row, in the record's order."""
    shown = [each for each in transforms if each.within is None or each.share >= _MIN_SHARE]
    return [
        TransformRow(
            name=_SHORTER.sub("", each.name),
            is_part=each.within is not None,
            cpu_seconds=each.cpu_seconds,
            share=each.share,
            size=_size(each),
            samples=each.samples,
        )
        for each in shown[:_MOST]
    ]


def _size(cost: TransformCost) -> str:
    if cost.bytes_out is None:
        return ""
    made = size(cost.bytes_out)
    return made if cost.bytes_in is None else f"{size(cost.bytes_in)} → {made}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Holds step times in seconds, costs in dollars per 1000 steps; None where not known.

    Attributes:
        prediction_error: measured / predicted - 1.
        is_inside_band: Whether the measured step is one that was promised.
        speedup: Baseline step over measured step.
        predicted_speedup: Baseline step over predicted step.
        cost_change: Measured cost over the baseline's, minus 1.
        baseline_cpu_seconds: vCPUs of all hosts times the step; likewise the next ones.
        is_baseline_scaled: Whether nobody measured the baseline: the profile was taken elsewhere.
        loads_itself: Whether the baseline's trainer loads its own batches (num_workers=0): that is
            part of its wait.
    """

    baseline: float | None = None
    baseline_wait: float | None = None
    predicted: float | None = None
    predicted_low: float | None = None
    predicted_high: float | None = None
    predicted_speedup: float | None = None
    measured: float | None = None
    measured_wait: float | None = None
    measured_least_wait_share: float | None = None
    measured_rank: int = 0
    measured_steps: int | None = None
    prediction_error: float | None = None
    is_inside_band: bool | None = None
    speedup: float | None = None
    baseline_usd: float | None = None
    predicted_usd: float | None = None
    measured_usd: float | None = None
    cost_change: float | None = None
    baseline_cpu_seconds: float | None = None
    predicted_cpu_seconds: float | None = None
    measured_cpu_seconds: float | None = None
    baseline_accelerator_seconds: float | None = None
    predicted_accelerator_seconds: float | None = None
    measured_accelerator_seconds: float | None = None
    is_baseline_scaled: bool = False
    loads_itself: bool = False

    @property
    def wait_share(self) -> float | None:
        """Returns the share of a baseline step that is waiting for data."""
        return _share(self.baseline, self.baseline_wait)

    @property
    def measured_wait_share(self) -> float | None:
        """Returns the share of a measured step that is waiting for data."""
        return _share(self.measured, self.measured_wait)

    def measured_wait_words(self, of: str) -> str:
        """Returns how much of a measured step is waiting, in words that end with `of`."""
        return wait_words(
            self.measured_wait_share or 0.0,
            least=self.measured_least_wait_share,
            rank=self.measured_rank,
            of=of,
            is_page=True,
        )

    @property
    def prediction(self) -> str:
        """Says how the measured step compares: `5.9 % longer than predicted`."""
        return "" if self.prediction_error is None else _than_predicted(self.prediction_error)

    @property
    def place_in_band(self) -> str:
        """Says where the measured step is: `inside` or `outside` the band; empty: not known."""
        return {True: "inside", False: "outside", None: ""}[self.is_inside_band]


def _share(step: float | None, wait: float | None) -> float | None:
    if step is None or wait is None or step <= 0:
        return None
    return wait_share(step_seconds=step, wait_seconds=wait)


def _than_predicted(error: float) -> str:
    return than_predicted(error, is_page=True)


def collect(
    *,
    profile: Profile | None,
    decision: Decision | None,
    training: Training | None,
    evaluation: Evaluation | None,
) -> Figures:
    """Returns the evaluation's figures where there is one, else those it would be made from."""
    performance = evaluation.performance if evaluation else None
    promise = decision.plan.predicted if decision else None
    outcome = training.measured if training else None
    today = (
        next((plan for plan in decision.plans if plan.action == "keep"), None) if decision else None
    )
    baseline = performance.baseline.step_seconds if performance else None
    # The step of a profile that was taken elsewhere is another machine's: the decision has today's.
    is_scaled = bool(decision and decision.taken_elsewhere)
    here = None if is_scaled else profile
    step = here.step if here else None
    if baseline is None and step:
        baseline = step.step_seconds
    # A training on a decision, without its profile: today's step is in the decision, too.
    if baseline is None and today and today.predicted:
        baseline = today.predicted.step_seconds
    baseline_usd = performance.baseline.usd_per_1000_steps if performance else None
    if baseline_usd is None and today and today.predicted:
        baseline_usd = today.predicted.usd_per_1000_steps
    expected = performance.predicted if performance else None
    predicted = expected.step_seconds if expected else promise.step_seconds if promise else None
    predicted_usd = expected.usd_per_1000_steps if expected else None
    if predicted_usd is None and promise:
        predicted_usd = promise.usd_per_1000_steps
    measured = performance.measured.step_seconds if performance else None
    if measured is None and outcome:
        measured = outcome.step_seconds
    measured_usd = performance.measured.usd_per_1000_steps if performance else None
    if measured_usd is None and outcome:
        measured_usd = outcome.usd_per_1000_steps
    error = performance.prediction_error if performance else None
    band = performance.band if performance else None
    low = band.low_seconds if band else promise.step_seconds_low if promise else None
    high = band.high_seconds if band else promise.step_seconds_high if promise else None
    is_inside = performance.is_inside_band if performance else None
    if is_inside is None and measured is not None and low is not None and high is not None:
        # As in evaluations that were written before there were bands.
        is_inside = low <= measured <= high
    before = performance.baseline if performance else None
    after = performance.measured if performance else None
    kept = today.predicted if today else None
    if error is None and measured is not None:
        error = _change(measured, predicted)
    cost_change = performance.cost_change if performance else None
    if cost_change is None and measured_usd is not None:
        cost_change = _change(measured_usd, baseline_usd)
    return Figures(
        baseline=baseline,
        baseline_wait=step.wait_seconds if step else None,
        predicted=predicted,
        predicted_low=low,
        predicted_high=high,
        # As promised at the time, with that step of today; not over a baseline measured later.
        predicted_speedup=promise.speedup if promise else _ratio(baseline, predicted),
        measured=measured,
        measured_wait=outcome.wait_seconds if outcome else None,
        measured_least_wait_share=outcome.least_wait_share if outcome else None,
        measured_rank=outcome.rank if outcome else 0,
        measured_steps=outcome.steps if outcome else None,
        prediction_error=error,
        is_inside_band=is_inside,
        speedup=performance.speedup if performance else _ratio(baseline, measured),
        baseline_usd=baseline_usd,
        predicted_usd=predicted_usd,
        measured_usd=measured_usd,
        cost_change=cost_change,
        baseline_cpu_seconds=_cpu_seconds(before, kept),
        predicted_cpu_seconds=_cpu_seconds(expected, promise),
        measured_cpu_seconds=_cpu_seconds(after),
        baseline_accelerator_seconds=_accelerator_seconds(before, kept),
        predicted_accelerator_seconds=_accelerator_seconds(expected, promise),
        measured_accelerator_seconds=_accelerator_seconds(after),
        is_baseline_scaled=is_scaled,
        loads_itself=bool(step and step.num_workers == 0),
    )


def _cpu_seconds(*known: StepCost | Predicted | None) -> float | None:
    found = (each.cpu_seconds for each in known if each is not None)
    return next((value for value in found if value is not None), None)


def _accelerator_seconds(*known: StepCost | Predicted | None) -> float | None:
    found = (each.accelerator_seconds for each in known if each is not None)
    return next((value for value in found if value is not None), None)


def host_names(training: Training | None) -> dict[str, str]:
    """Returns names for people of the run's hosts: `data host 1`, `training host`."""
    if training is None:
        return {}
    roles = {group.name: group.role for group in training.groups}
    found: dict[str, str] = {}
    for role, title in (("dnn", "training host"), ("data", "data host")):
        names = [each.host for each in training.hosts if roles.get(each.group) == role]
        # One training host needs no number; data hosts may join later.
        is_alone = role == "dnn" and len(names) == 1
        for number, name in enumerate(names, start=1):
            found[name] = title if is_alone else f"{title} {number}"
    return found


def plan_name(plan: Plan, *, today: Group | None = None) -> str:
    """Names a plan in a few words, with its dnn hosts where they are not `today`'s."""
    dnn, *others = plan.groups
    data = [group for group in others if group.role == "data"]
    if plan.action == "keep":
        return "today's cluster"
    if plan.action == "tune":
        return "today's cluster, tuned"
    if plan.action == "scale_up":
        return f"a larger type ({dnn.instance_type})"
    if plan.action == "scale_out":
        return f"{count(dnn.count, 'dnn host')} ({dnn.instance_type})"
    if plan.action == "offload_gpu":
        return "augmentation on the accelerator"
    name = " and ".join(
        f"{count(group.count, 'data host')} ({group.instance_type})" for group in data
    )
    own = (dnn.instance_type, dnn.count)
    # Where the trainer's hosts change as well, data hosts alone would hide the larger part.
    if not name or (today and own != (today.instance_type, today.count)):
        hosts = f"{count(dnn.count, 'dnn host')} ({dnn.instance_type})"
        return f"{hosts} and {name}" if name else hosts
    return name


def todays_group(decision: Decision) -> Group | None:
    """Returns the dnn group of today's cluster."""
    return next((plan.groups[0] for plan in decision.plans if plan.action == "keep"), None)


def group_arguments(plan: Plan) -> list[str]:
    """Returns the plan as arguments of `stoker train`: `--group dnn=TYPE:HOSTS[:WORKERS]`."""
    words = []
    for group in plan.groups:
        workers = "" if group.workers_per_host is None else f":{group.workers_per_host}"
        words += ["--group", f"{group.role}={group.instance_type}:{group.count}{workers}"]
    return words


def _change(value: float, reference: float | None) -> float | None:
    ratio = _ratio(value, reference)
    return None if ratio is None else ratio - 1


def _ratio(above: float | None, below: float | None) -> float | None:
    if above is None or below is None or below <= 0:
        return None
    # 0 is no measurement, or no price: it has no ratio worth a word.
    return above / below or None


Tone = Literal["good", "mixed", "bad"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The report begins with its verdict: a headline, a sentence or two, and one large figure.

    Attributes:
        tone: Whether the news is good; the mark and the badge say the same in words.
        hero: The one figure in large letters, with which the headline begins; empty: none.
        failure: What failed, in full; empty where nothing did.
    """

    tone: Tone
    badge: str
    headline: str
    lead: str
    failure: str = ""
    hero: str = ""

    @property
    def mark(self) -> str:
        """Returns the tone as a sign, for those who do not see its colour."""
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
    gates = evaluation.gates if evaluation else ()
    outcome = outcome_of(training, gates) if training else None
    lead = [
        *_promise(figures, unit),
        *_cost(figures, nominal),
        *([f"Gate passed: {'; '.join(map(gate_text, gates))}."] if _has_passed(outcome) else []),
    ]
    if is_planned and decision:
        return _planned(decision, [*_wait(figures), *_promise(figures, unit)])
    # Whatever makes the later figures void is said before them: a broken run, a failed gate, and
    # only then whether it was faster.
    broken = _broken(profile, decision, training, outcome, evaluation, failure)
    if broken:
        badge, headline, text = broken
        return Verdict("bad", badge, headline, " ".join([*_wait(figures), *lead]), text)
    if outcome and outcome.state == "gate failed":
        failed = [f"{gate_text(gate)}." for gate in gates if not gate.passed]
        headline = " ".join(["The model missed its quality gate.", *failed])
        lead = [*_gain(figures, unit, decision), *_promise(figures, unit), *_cost(figures, nominal)]
        return Verdict("bad", outcome.state, headline, " ".join(lead))
    if training and not profile:
        return _trained_alone(figures, unit, decision, _promise(figures, unit))
    passed = ", gate passed" if _has_passed(outcome) else ""
    if decision and decision.action == "keep":
        headline = " ".join([_kept(decision), *_wait(figures)])
        return Verdict("mixed", f"kept as it is{passed}", headline, " ".join(lead))
    if figures.speedup is None:
        headline = " ".join(
            ["The training ended, but its steps were not measured.", *_wait(figures)]
        )
        return Verdict("mixed", f"not measured{passed}", headline, " ".join(lead))
    if decision and decision.is_noisy:
        headline = "The machine was busy with other programs: the figures do not count."
        lead = [*_gain(figures, unit, decision), *_wait(figures), *lead]
        return Verdict("mixed", f"machine busy{passed}", headline, " ".join(lead))
    if figures.speedup < _NO_GAIN:
        headline = " ".join(["stoker did not help.", *_gain(figures, unit, decision)])
        return Verdict("mixed", f"no gain{passed}", headline, " ".join([*_wait(figures), *lead]))
    # Faster than today, and still less than was promised: nobody should read past that.
    high, step = figures.predicted_high, figures.measured
    is_less = high is not None and step is not None and step > high
    return Verdict(
        "mixed" if is_less else "good",
        f"faster, by less than predicted{passed}" if is_less else f"faster{passed}",
        _step_words(figures, unit, decision),
        " ".join([*_wait(figures), *lead]),
        hero=_factor(figures.speedup),
    )


def _trained_alone(
    figures: Figures, unit: TimeUnit, decision: Decision | None, promise: Sequence[str]
) -> Verdict:
    """Returns the verdict on a run of `stoker train`, and what its report lacks."""
    if decision:
        lacks = "what a step took before is the decision's figure"
    else:
        lacks = "it has no profile and no decision, so that nothing is known of the step before"
    lead = " ".join([*promise, f"This run only trained: {lacks}, and no gate was checked."])
    if not figures.measured:
        return Verdict("mixed", "trained", "The training ended; no step was measured.", lead)
    headline = " ".join(_gain(figures, unit, decision))
    if not headline:
        wait = figures.measured_wait_words("of it waiting for data")
        headline = f"A step takes {unit.brief(figures.measured)}, {wait}."
    is_slow = figures.speedup is not None and figures.speedup < _NO_GAIN
    tone: Tone = "mixed" if is_slow or figures.is_inside_band is False else "good"
    return Verdict(tone, "trained", headline, lead)


def _kept(decision: Decision) -> str:
    """Returns why today's cluster is kept; it may be unknown whether stoker would help."""
    if decision.is_noisy:
        # The table of plans says it in full.
        return "Other programs kept the machine busy, so today's cluster is kept for now."
    is_known = decision.bottleneck != "unexplained"
    reason = _sentence(decision.plan.reason or _LIMITS[decision.bottleneck])
    why = "stoker does not help here" if is_known else "Kept as it is for now"
    return f"{why}: {reason}"


def _planned(decision: Decision, lead: Sequence[str]) -> Verdict:
    if decision.action == "keep":
        return Verdict("mixed", "kept as it is", _kept(decision), " ".join(lead))
    reason = _sentence(decision.plan.reason or _LIMITS[decision.bottleneck])
    name = plan_name(decision.plan, today=todays_group(decision))
    headline = f"{name[:1].upper()}{name[1:]}: {reason}"
    promise = decision.plan.predicted
    hero = f"{_factor(promise.speedup)}, predicted" if promise else ""
    return Verdict("good", "decided, not run yet", headline, " ".join(lead), hero=hero)


def _broken(
    profile: Profile | None,
    decision: Decision | None,
    training: Training | None,
    outcome: Outcome | None,
    evaluation: Evaluation | None,
    failure: str | None,
) -> tuple[str, str, str] | None:
    """Returns badge, headline and full text of a run that has nothing to be judged by."""
    # The training's own record first: that later ones are missing follows from it.
    if training and outcome and outcome.state in _BADGES:
        text = _plain(failure or training.failure or "")
        words = outcome.words[:1].upper() + outcome.words[1:]
        return _BADGES[outcome.state], _headline(words), text
    text = _plain(failure or "")
    records = (
        ("profile", profile),
        ("decide", decision),
        ("train", training),
        ("evaluate", evaluation),
    )
    missing = next((step for step, record in records if record is None), None)
    # `stoker train` makes one record alone, and nothing has failed.
    if missing and (failure or profile or not training):
        badge = f"{missing} failed" if failure else f"ended in {missing}"
        return badge, _headline(f"The run ended in {missing}{_cause(text)}"), text
    if failure:
        return "run failed", _headline(f"The run failed{_cause(text)}"), text
    return None


def _wait(figures: Figures) -> list[str]:
    share, now = figures.wait_share, figures.measured_wait_share
    if share is None:
        return []
    words = f"The trainer waited {percent(share)} of every step for data"
    if figures.loads_itself:
        words += ", which it loads itself"
    return [f"{words}; now {figures.measured_wait_words('')}." if now is not None else f"{words}."]


def _gain(figures: Figures, unit: TimeUnit, decision: Decision | None) -> list[str]:
    if figures.speedup is None:
        return []
    words = _step_words(figures, unit, decision).removesuffix(".")
    return [f"{words}: {_factor(figures.speedup)}."]


def _step_words(figures: Figures, unit: TimeUnit, decision: Decision | None) -> str:
    with_plan = _with_plan(decision.plan) if decision else "Now"
    now, before = unit.brief(figures.measured), unit.brief(figures.baseline)
    return f"{with_plan} a step takes {now} instead of {before}."


def _factor(speedup: float) -> str:
    # Slower is said as "times as long": 0.5 times as fast is hard to read.
    if speedup < 0.995:
        return f"{digits(1 / speedup, 2)} times as long"
    return f"{digits(speedup, 2)} times as fast"


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
    if not figures.prediction:
        return [text + "."]
    text += f"; the step is {figures.prediction}"
    if figures.place_in_band and figures.predicted_low and figures.predicted_high:
        low, high = unit.brief(figures.predicted_low), unit.brief(figures.predicted_high)
        text += f", {figures.place_in_band} the band of {low} to {high}"
    return [text + "."]


def _cost(figures: Figures, nominal: bool) -> list[str]:
    change, cost = figures.cost_change, ""
    if nominal:
        # Nobody is billed: the cores that are taken are the cost.
        if figures.baseline_cpu_seconds and figures.measured_cpu_seconds is not None:
            change = figures.measured_cpu_seconds / figures.baseline_cpu_seconds - 1
            cost = f"{digits(figures.measured_cpu_seconds, 3)} CPU-seconds: cores times the step"
    elif figures.measured_usd is not None:
        cost = f"{usd(figures.measured_usd)} per 1\N{NARROW NO-BREAK SPACE}000 steps"
    if change is None or not cost:
        return []
    # Less would be written as 0 %, with "more" or "less" after it.
    if abs(change) < 0.0005:
        return [f"A step costs the same as before ({cost})."]
    word = "more" if change > 0 else "less"
    return [f"A step costs {percent(change)} {word} than before ({cost})."]


def gate_text(gate: GateResult) -> str:
    """Puts a gate into words: `accuracy 0.967, at least 0.94 asked`."""
    asked = [
        *([f"at least {metric(gate.min)}"] if gate.min is not None else []),
        *([f"at most {metric(gate.max)}"] if gate.max is not None else []),
    ]
    value = "was not reported" if gate.value is None else metric(gate.value)
    return f"{gate.metric} {value}, {' and '.join(asked) or 'nothing'} asked"


def _has_passed(outcome: Outcome | None) -> bool:
    return outcome is not None and outcome.state == "passed"


def _cause(text: str) -> str:
    return f": {cause_of(text)}" if text else ""


def _headline(text: str) -> str:
    # A colour code in a script's own words is a few signs to a page.
    text = _plain(text)
    if len(text) > _HEADLINE_LETTERS:
        text = text[:_HEADLINE_LETTERS].rstrip() + "\N{HORIZONTAL ELLIPSIS}"
    return _sentence(text)


def _plain(text: str) -> str:
    """Returns the end of `text` without a terminal's colour codes and control characters."""
    lines = _COLOUR_CODE.sub("", text).splitlines()[-_FAILURE_LINES:]
    return "\n".join(
        "".join(letter for letter in line if category(letter)[0] != "C" or letter == "\t")
        for line in lines
    )


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?", "\N{HORIZONTAL ELLIPSIS}")) else f"{text}."
