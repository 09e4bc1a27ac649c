"""The report's verdict: one sentence that a reader may repeat, bad news before good."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal
from unicodedata import category

from stoker.failure_reasons import cause_of
from stoker.record_words import (
    added_hosts_words,
    followed_words,
    free_words,
    gate_words,
    kept_words,
    plan_name,
    plan_reason,
    prediction_words,
    probable_words,
    todays_group,
    trial_words,
    whole_step_of,
)
from stoker.records import (
    Band,
    Decision,
    Evaluation,
    GateResult,
    Group,
    Measured,
    Performance,
    Plan,
    Predicted,
    Profile,
    Training,
    TransformCost,
)
from stoker.records.outcome import Outcome, OutcomeState, outcome_of
from stoker.records.training import BUSY
from stoker.units import (
    TimeUnit,
    capital,
    count,
    digits,
    is_whole_longer,
    percent,
    usd,
    wait_share,
    wait_words,
)

# Parts with less than this share are left to the record.
_MIN_SHARE = 0.005
_MOST = 14
# Only the last word of a dotted name is shown; the record has the whole.
_SHORTER = re.compile(r"\b(?:[A-Za-z_]\w*\.)+(?=[A-Za-z_])")
# Badges of outcomes that make the figures meaningless.
_BADGES: Mapping[OutcomeState, str] = {
    "failed": "training failed",
    "not fed": "not fed",
    "stopped": "stopped",
    "did no step": "did no step",
    "unknown": "unknown",
}
# A gain within the noise of two runs of a minute is not a gain.
_NO_GAIN = 1.05
# Only the end of a long traceback is shown, and the beginning of its last line.
_FAILURE_LINES = 200
_HEADLINE_LETTERS = 240
_COLOUR_CODE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


@dataclass(frozen=True, slots=True)
class TransformRow:
    """One part of loading, in few words."""

    name: str
    is_part: bool
    cpu_seconds: float
    share: float
    samples: int


def transform_rows(transforms: Sequence[TransformCost]) -> list[TransformRow]:
    shown = [part for part in transforms if part.within is None or part.share >= _MIN_SHARE]
    return [
        TransformRow(
            name=_SHORTER.sub("", part.name),
            is_part=part.within is not None,
            cpu_seconds=part.cpu_seconds,
            share=part.share,
            samples=part.samples,
        )
        for part in shown[:_MOST]
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Step times in seconds and costs in dollars per 1000 steps, where they are known.

    The times are of whole epochs where that is known of all of them (`is_whole`).

    Attributes:
        baseline_step: The baseline's step within epochs; likewise `predicted_step` and
            `measured_step`.
        baseline_cpu_seconds: vCPUs of all hosts times the step; likewise for the other steps.
        outcome: What the training measured.
        prediction_error: measured / predicted - 1.
        speedup: Baseline step over measured step.
        cost_change: Measured cost over the baseline's, minus 1.
        baseline_busy: Share of the baseline's step in which the accelerators compute, by the
            profile; likewise for the other steps.
        hosts_added: Hosts of the plan, or of the run, for batches alone: `3 x local.c4`.
        is_estimate: The dollars of the plan, and of the run, come from an estimated price.
        is_baseline_estimate: Today's do.
        is_baseline_scaled: The profile was taken elsewhere, and the baseline was not measured.
        loads_itself: The baseline's trainer loads its own batches, as part of its wait.
    """

    baseline: float | None = None
    baseline_wait: float | None = None
    baseline_usd: float | None = None
    baseline_cpu_seconds: float | None = None
    baseline_accelerator_seconds: float | None = None
    predicted: float | None = None
    band: Band | None = None
    predicted_usd: float | None = None
    predicted_cpu_seconds: float | None = None
    predicted_accelerator_seconds: float | None = None
    predicted_speedup: float | None = None
    measured: float | None = None
    outcome: Measured | None = None
    measured_usd: float | None = None
    measured_cpu_seconds: float | None = None
    measured_accelerator_seconds: float | None = None
    prediction_error: float | None = None
    is_inside_band: bool | None = None
    speedup: float | None = None
    cost_change: float | None = None
    baseline_busy: float | None = None
    predicted_busy: float | None = None
    measured_busy: float | None = None
    hosts_added: str = ""
    is_estimate: bool = False
    is_baseline_estimate: bool = False
    is_baseline_scaled: bool = False
    loads_itself: bool = False
    baseline_step: float | None = None
    predicted_step: float | None = None
    measured_step: float | None = None
    is_whole: bool = False
    baseline_whole_wait: float | None = None
    measured_whole_wait: float | None = None

    @property
    def whole_wait_share(self) -> float | None:
        """Share of the baseline's whole epochs that waits for data."""
        return _share(self.baseline, self.baseline_whole_wait) if self.is_longer else None

    @property
    def measured_whole_wait_share(self) -> float | None:
        """Share of the run's whole epochs that waits for data."""
        return _share(self.measured, self.measured_whole_wait) if self.is_longer else None

    @property
    def wait_share(self) -> float | None:
        return _share(self.baseline_step, self.baseline_wait)

    @property
    def measured_wait_share(self) -> float | None:
        return _share(self.measured_step, self.outcome.wait_seconds if self.outcome else None)

    @property
    def is_longer(self) -> bool:
        """Whether whole epochs are so much slower than their steps that it is worth a word."""
        pairs = (
            (self.baseline_step, self.baseline),
            (self.predicted_step, self.predicted),
            (self.measured_step, self.measured),
        )
        return any(is_whole_longer(step, whole) for step, whole in pairs if step and whole)

    def measured_wait_words(self, of: str) -> str:
        return wait_words(
            self.measured_wait_share or 0.0,
            least=self.outcome.least_wait_share if self.outcome else None,
            rank=self.outcome.rank if self.outcome else 0,
            of=of,
            style="page",
        )


def _share(step: float | None, wait: float | None) -> float | None:
    return wait_share(step_seconds=step, wait_seconds=wait) if step and wait is not None else None


# Of the baseline, of the prediction and of the run: the records that may know a figure of it.
_Sources = tuple[tuple[object, ...], tuple[object, ...], tuple[object, ...]]


def collect(
    *,
    profile: Profile | None,
    decision: Decision | None,
    training: Training | None,
    evaluation: Evaluation | None,
) -> Figures:
    """Returns the evaluation's figures, or figures from the records that it would be made from."""
    performance = evaluation.performance if evaluation else None
    promise = _promised(decision, is_run=training is not None) if decision else None
    outcome = training.measured if training else None
    keep = (
        next((plan for plan in decision.plans if plan.action == "keep"), None) if decision else None
    )
    today = keep.predicted if keep else None
    # The step of a profile that was taken elsewhere is another machine's: the decision has today's.
    is_scaled = bool(decision and decision.taken_elsewhere)
    here = None if is_scaled else profile
    step = here.step if here else None
    # In each row the record that knows best comes first.
    rows: _Sources = (
        (performance and performance.baseline, step, today),
        (performance and performance.predicted, promise),
        (performance and performance.measured, outcome),
    )
    figures = Figures(
        outcome=outcome,
        hosts_added=added_hosts_words(_groups_run(decision, training)),
        is_estimate=bool(training and training.is_estimate),
        is_baseline_scaled=is_scaled,
        loads_itself=bool(step and step.num_workers == 0),
        baseline_wait=step.wait_seconds if step else None,
        baseline_whole_wait=_whole_wait(here, outcome),
        measured_whole_wait=outcome.whole_wait_seconds if outcome else None,
        baseline_busy=today.accelerator_utilization if today else None,
        predicted_busy=promise.accelerator_utilization if promise else None,
    )
    figures = _with_steps(figures, rows, _whole_steps(rows, performance, here))
    figures = _with_gain(figures, performance, promise)
    return _with_costs(figures, rows, performance)


def _groups_run(decision: Decision | None, training: Training | None) -> Sequence[Group]:
    if training:
        return training.groups
    if decision and decision.probable and decision.kind == "probable":
        return decision.probable.groups
    return decision.plan.groups if decision else ()


def _whole_steps(
    rows: _Sources, performance: Performance | None, profile: Profile | None
) -> list[float | None]:
    """Returns the steps over whole epochs: of the baseline, as predicted, as measured."""
    if performance is not None:
        # It knows whether all three can be compared.
        return [_first("whole_step_seconds", row[:1]) for row in rows]
    steps = [_first("whole_step_seconds", row) for row in rows]
    if steps[0] is None and profile:
        steps[0] = whole_step_of(profile)
    return steps


def _with_steps(figures: Figures, rows: _Sources, wholes: Sequence[float | None]) -> Figures:
    """Returns the figures with the steps: over whole epochs where all have them."""
    steps = [_first("step_seconds", row) for row in rows]
    pairs = zip(steps, wholes, strict=True)
    is_whole = all(whole is not None for step, whole in pairs if step is not None)
    before, planned, now = wholes if is_whole else steps
    baseline_step, predicted_step, measured_step = steps
    return replace(
        figures,
        is_whole=is_whole,
        baseline=before,
        predicted=planned,
        measured=now,
        baseline_step=baseline_step,
        predicted_step=predicted_step,
        measured_step=measured_step,
    )


def _with_gain(
    figures: Figures, performance: Performance | None, promise: Predicted | None
) -> Figures:
    """Returns the figures with what was promised, whether it came true, and the speedup."""
    before, planned, now = figures.baseline, figures.predicted, figures.measured
    band, is_inside, error = None, None, None
    if performance:
        band, is_inside = performance.band, performance.is_inside_band
        error = performance.prediction_error
    if band is None and promise:
        low, high = promise.step_seconds_low, promise.step_seconds_high
        if figures.is_whole:
            low, high = promise.counted_low, promise.counted_high
        band = Band(low_seconds=low, high_seconds=high)
    if is_inside is None and now is not None and band:
        is_inside = band.holds(now)
    # As promised at the time, with that step of today; not over a baseline measured later. But with
    # pauses that were seen only in the run, if they count in what is compared.
    speedup = promise.speedup if promise else _ratio(before, planned)
    has_new_pauses = promise and figures.is_whole and planned != promise.whole_step_seconds
    if performance and has_new_pauses:
        speedup = _ratio(before, planned)
    return replace(
        figures,
        band=band,
        is_inside_band=is_inside,
        predicted_speedup=speedup,
        prediction_error=_change(now, planned) if error is None else error,
        speedup=performance.speedup if performance else _ratio(before, now),
        measured_busy=_busy(promise, figures.measured_step),
    )


def _with_costs(figures: Figures, rows: _Sources, performance: Performance | None) -> Figures:
    usd_before, usd_planned, usd_now = (_first("usd_per_1000_steps", row) for row in rows)
    cpu_before, cpu_planned, cpu_now = (_first("cpu_seconds", row) for row in rows)
    computing = [_first("accelerator_seconds", row) for row in rows]
    is_estimate = [_is_estimate(row) for row in rows]
    change = performance.cost_change if performance else None
    return replace(
        figures,
        baseline_usd=usd_before,
        predicted_usd=usd_planned,
        measured_usd=usd_now,
        cost_change=_change(usd_now, usd_before) if change is None else change,
        is_estimate=figures.is_estimate or any(is_estimate[1:]),
        is_baseline_estimate=is_estimate[0],
        baseline_cpu_seconds=cpu_before,
        predicted_cpu_seconds=cpu_planned,
        measured_cpu_seconds=cpu_now,
        baseline_accelerator_seconds=computing[0],
        predicted_accelerator_seconds=computing[1],
        measured_accelerator_seconds=computing[2],
    )


def _promised(decision: Decision, *, is_run: bool) -> Predicted | None:
    """Returns the prediction of what was run; of what is probable, where nothing was."""
    is_open = decision.kind == "probable" and decision.probable is not None and not is_run
    plan = decision.probable if is_open and decision.probable else decision.plan
    return plan.predicted


def _busy(promise: Predicted | None, measured: float | None) -> float | None:
    """Returns the share of a measured step in which the accelerators compute, as predicted."""
    if promise is None or not measured:
        return None
    return min(1.0, promise.accelerator_utilization * promise.step_seconds / measured)


def _whole_wait(profile: Profile | None, outcome: Measured | None) -> float | None:
    """Returns the profile's wait over whole epochs, with a start if the run's epochs had one."""
    if profile is None or profile.step is None or profile.epochs is None:
        return None
    times, wait = profile.epochs, profile.step.wait_seconds
    if outcome and outcome.epochs:
        times = times.as_in(outcome.epochs)
    return None if wait is None else times.whole_wait_seconds(wait)


def _first(name: str, records: Sequence[object]) -> float | None:
    values = (getattr(record, name, None) for record in records)
    return next((value for value in values if isinstance(value, float | int)), None)


def _is_estimate(row: Sequence[object]) -> bool:
    """Whether the dollars of a row come from an estimated price."""
    return any(getattr(record, "is_estimate", False) for record in row)


def host_names(training: Training | None) -> dict[str, str]:
    """Returns readable names of the run's hosts: `data host 1`, `training host`."""
    if training is None:
        return {}
    roles = {group.name: group.role for group in training.groups}
    shown: dict[str, str] = {}
    for role, title in (("dnn", "training host"), ("data", "data host")):
        names = [host.host for host in training.hosts if roles.get(host.group) == role]
        # One training host needs no number; data hosts may join later.
        is_alone = role == "dnn" and len(names) == 1
        for number, name in enumerate(names, start=1):
            shown[name] = title if is_alone else f"{title} {number}"
    return shown


def group_arguments(decision: Decision | None) -> list[str]:
    """Returns the plan as arguments of `stoker train`: `--group dnn=TYPE:HOSTS[:WORKERS]`."""
    words = []
    for group in decision.plan.groups if decision else ():
        workers = "" if group.workers_per_host is None else f":{group.workers_per_host}"
        words += ["--group", f"{group.role}={group.instance_type}:{group.count}{workers}"]
    return words


def _change(value: float | None, reference: float | None) -> float | None:
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
    """What the report begins with; `hero`: a figure in large letters before the headline."""

    tone: Tone
    badge: str
    headline: str
    lead: str
    failure: str = ""
    hero: str = ""

    @property
    def mark(self) -> str:
        """The tone as a sign, for readers who do not see its colour."""
        return {"good": "\N{CHECK MARK}", "mixed": "!", "bad": "\N{BALLOT X}"}[self.tone]


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedRun:
    """What a verdict rests on: figures, and the records of the run, whole or not.

    Attributes:
        nominal: Hosts have no price.
        failure: Why the run ended early, if no record has it.
        is_planned: Nothing was to be run after the decision.
    """

    figures: Figures
    unit: TimeUnit
    nominal: bool
    profile: Profile | None
    decision: Decision | None
    training: Training | None
    evaluation: Evaluation | None
    failure: str | None
    is_planned: bool = False

    @property
    def gates(self) -> Sequence[GateResult]:
        return self.evaluation.gates if self.evaluation else ()

    @property
    def outcome(self) -> Outcome | None:
        return outcome_of(self.training, self.gates) if self.training else None

    @property
    def is_passed(self) -> bool:
        return bool(self.outcome and self.outcome.state == "passed")

    @property
    def is_kept(self) -> bool:
        return bool(self.decision and self.decision.action == "keep")

    @property
    def is_idle(self) -> bool:
        """Whether its data hosts made nothing."""
        return self.training is not None and self.training.is_helped is False

    @property
    def idle(self) -> list[str]:
        """What a group that made nothing cost."""
        groups = self.training.useless_groups if self.training else ()
        return [_headline(capital(group.made_words)) for group in groups]

    @property
    def busy(self) -> str:
        return self.training.busy if self.training else ""

    @property
    def disturbed(self) -> list[str]:
        return [f"{capital(BUSY)} ({self.busy})."] if self.busy else []

    @property
    def wait(self) -> list[str]:
        return [*_within(self.figures, self.unit), *_wait(self.figures)]

    @property
    def gain(self) -> list[str]:
        """What it gained; of an idle group, no gain by it."""
        if self.is_idle:
            return _unhelped_gain(self.figures, self.unit)
        return _gain(self.figures, self.unit, self.decision)

    @property
    def promise(self) -> list[str]:
        return _promise(self.figures, self.unit)

    @property
    def rest(self) -> list[str]:
        """What stands at the end of each verdict: the promise, the cost, a passed gate."""
        sentences = [*self.promise, *_cost(self.figures, self.nominal)]
        if self.decision and self.decision.kind == "probable":
            sentences.append(probable_words(self.decision, has_run=self.training is not None))
        if self.is_passed:
            gates = "; ".join(gate_words(gate, "page") for gate in self.gates)
            sentences.append(f"Gate passed: {gates}.")
        return sentences

    def verdict(self, tone: Tone, badge: str, headline: str, *sentences: str) -> Verdict:
        """Returns a verdict whose badge says that the gate was passed, too."""
        passed = ", gate passed" if self.is_passed else ""
        return Verdict(tone, f"{badge}{passed}", headline, " ".join(sentences))


def judge(run: JudgedRun) -> Verdict:
    """Returns the verdict on a run, whole or not."""
    if run.is_planned and run.decision:
        return _planned(run.decision, [*run.wait, *run.promise])
    # What makes the figures meaningless comes first: a broken run, then a failed gate.
    return (
        _broken(run)
        or _gate_failed(run)
        or _idle_group(run)
        or _busy_machine(run)
        or _without_gain(run)
        or _faster(run)
    )


def _gate_failed(run: JudgedRun) -> Verdict | None:
    if run.outcome is None or run.outcome.state != "gate failed":
        return None
    failed = [f"{gate_words(gate, 'page')}." for gate in run.gates if not gate.passed]
    headline = " ".join(["The model missed its quality gate.", *failed])
    lead = [*run.disturbed, *run.gain, *run.idle, *run.rest]
    return Verdict("bad", run.outcome.state, headline, " ".join(lead))


def _idle_group(run: JudgedRun) -> Verdict | None:
    if not (run.is_idle and run.idle):
        return None
    headline = f"{' '.join(run.idle).removesuffix('.')}: data hosts did not help."
    lead = [*run.disturbed, *run.gain, *run.wait, *run.rest]
    return run.verdict("mixed", "data group idle", headline, *lead)


def _busy_machine(run: JudgedRun) -> Verdict | None:
    is_judged = run.figures.speedup is not None and not run.is_kept
    if not run.busy or (run.profile and not is_judged):
        return None
    lead = [f"{capital(run.busy)}.", *run.gain, *run.wait, *run.idle, *run.rest]
    return run.verdict("mixed", "machine busy", f"{capital(BUSY)}.", *lead)


def _without_gain(run: JudgedRun) -> Verdict | None:
    """Returns the verdict on a run that changed nothing, or of which no gain is known."""
    rest = [*run.idle, *run.rest]
    if run.training and not run.profile:
        return _trained_alone(run.figures, run.unit, run.decision, run.promise)
    if run.decision and run.is_kept:
        headline = " ".join([kept_words(run.decision, "page"), *run.wait])
        return run.verdict("mixed", "kept as it is", headline, *run.disturbed, *rest)
    if run.figures.speedup is None:
        headline = " ".join(["The training ended, but its steps were not measured.", *run.wait])
        return run.verdict("mixed", "not measured", headline, *rest)
    if run.decision and run.decision.is_noisy:
        lead = [*run.gain, *run.wait, *rest]
        return run.verdict("mixed", "machine busy", f"{capital(BUSY)}.", *lead)
    if run.figures.speedup < _NO_GAIN:
        headline = " ".join(["stoker did not help.", *run.gain])
        return run.verdict("mixed", "no gain", headline, *run.wait, *rest)
    return None


def _faster(run: JudgedRun) -> Verdict:
    figures = run.figures
    band, step = figures.band, figures.measured
    is_less = band is not None and step is not None and step > band.high_seconds
    headline = _step_words(figures, run.unit, run.decision)
    lead = [*run.wait, *run.idle, *run.rest]
    verdict = run.verdict("good", "faster", headline, *lead)
    if is_less:
        verdict = run.verdict("mixed", "faster, by less than predicted", headline, *lead)
    return replace(verdict, hero=_factor(figures.speedup or 0.0))


def _trained_alone(
    figures: Figures, unit: TimeUnit, decision: Decision | None, promise: Sequence[str]
) -> Verdict:
    """Returns the verdict on a run of `stoker train`, which has no other records."""
    lacks = "it has no profile and no decision, so that nothing is known of the step before"
    if decision:
        lacks = "what a step took before is the decision's figure"
    lead = " ".join([*promise, f"This run only trained: {lacks}, and no gate was checked."])
    if not figures.measured:
        return Verdict("mixed", "trained", "The training ended; no step was measured.", lead)
    headline = " ".join(_gain(figures, unit, decision))
    if not headline:
        wait = figures.measured_wait_words("of it waiting for data")
        step = unit.brief(figures.measured_step)
        headline = f"A step takes {step}, {wait}."
        if figures.is_longer:
            whole = unit.brief(figures.measured)
            headline = f"A step takes {whole} over whole epochs; {step} within them, {wait}."
    is_slow = figures.speedup is not None and figures.speedup < _NO_GAIN
    tone: Tone = "mixed" if is_slow or figures.is_inside_band is False else "good"
    return Verdict(tone, "trained", headline, lead)


def _planned(decision: Decision, lead: Sequence[str]) -> Verdict:
    if decision.kind == "probable" and decision.probable:
        return _probable(decision, decision.probable, lead)
    if decision.action == "keep":
        return Verdict("mixed", "kept as it is", kept_words(decision, "page"), " ".join(lead))
    reason = _sentence(plan_reason(decision))
    name = plan_name(decision.plan, today=todays_group(decision))
    headline = f"{capital(name)}: {reason}"
    promise = decision.plan.predicted
    hero = f"{_factor(promise.speedup)}, predicted" if promise else ""
    lead = [free_words(decision), *lead, probable_words(decision)]
    text = " ".join(filter(None, lead))
    return Verdict("good", "decided, not run yet", headline, text, hero=hero)


def _probable(decision: Decision, plan: Plan, lead: Sequence[str]) -> Verdict:
    name = plan_name(plan, today=todays_group(decision))
    headline = f"Probably worth it: {name}: {_sentence(plan.reason)}"
    how = trial_words(decision.trial) if decision.trial else ""
    hero = f"{_factor(plan.predicted.speedup)}, probably" if plan.predicted else ""
    words = [how, followed_words(decision), *lead]
    text = " ".join(filter(None, words))
    return Verdict("mixed", "probable: make sure", headline, text, hero=hero)


def _broken(run: JudgedRun) -> Verdict | None:
    """Returns the verdict on a run that ended early, with the full text of its failure."""
    ending = _ending(run)
    if ending is None:
        return None
    badge, headline, text = ending
    lead = [*run.disturbed, *run.wait, *run.idle, *run.rest]
    return Verdict("bad", badge, _headline(headline), " ".join(lead), text)


def _ending(run: JudgedRun) -> tuple[str, str, str] | None:
    """Returns badge, headline and full text of an early end; None: there was none."""
    training, outcome, failure = run.training, run.outcome, run.failure
    # The training's record first: later ones are missing because of it.
    if training and outcome and outcome.state in _BADGES:
        words = capital(outcome.words)
        return _BADGES[outcome.state], words, _plain(failure or training.failure or "")
    text = _plain(failure or "")
    cause = f": {cause_of(text)}" if text else ""
    records = {
        "profile": run.profile,
        "decide": run.decision,
        "train": training,
        "evaluate": run.evaluation,
    }
    missing = next((step for step, record in records.items() if record is None), None)
    # `stoker train` alone makes one record, and nothing has failed.
    if missing and (failure or run.profile or not training):
        badge = f"{missing} failed" if failure else f"ended in {missing}"
        return badge, f"The run ended in {missing}{cause}", text
    return ("run failed", f"The run failed{cause}", text) if failure else None


def _wait(figures: Figures) -> list[str]:
    share, now = figures.wait_share, figures.measured_wait_share
    if share is None:
        return []
    whole, whole_now = figures.whole_wait_share, figures.measured_whole_wait_share
    words = f"The trainer waited {percent(share)} of every step for data"
    if whole is not None:
        words = f"The trainer waited {percent(whole)} of the time for data"
        words += f" ({percent(share)} of every step within epochs)"
    if figures.loads_itself:
        words += ", which it loads itself"
    if now is None:
        return [f"{words}."]
    words_now = figures.measured_wait_words("")
    if whole is not None and whole_now is not None:
        words_now = f"{percent(whole_now)} ({words_now})"
    return [f"{words}; now {words_now}."]


def _within(figures: Figures, unit: TimeUnit) -> list[str]:
    """Returns the step within epochs, where the headline is of whole ones."""
    before, now = figures.baseline_step, figures.measured_step
    if not figures.is_longer or before is None:
        return []
    if now is None:
        return [f"Within epochs a step takes {unit.brief(before)}."]
    return [f"Within epochs a step takes {unit.brief(now)} instead of {unit.brief(before)}."]


def _gain(figures: Figures, unit: TimeUnit, decision: Decision | None) -> list[str]:
    if figures.speedup is None:
        return []
    words = _step_words(figures, unit, decision).removesuffix(".")
    return [f"{words}: {_factor(figures.speedup)}."]


def _unhelped_gain(figures: Figures, unit: TimeUnit) -> list[str]:
    """Returns the change of a run whose data hosts made nothing, which is no effect of theirs."""
    if figures.speedup is None:
        return []
    words = _step_words(figures, unit, None).removesuffix(".")
    return [f"{words}, for another reason than its data hosts."]


def _step_words(figures: Figures, unit: TimeUnit, decision: Decision | None) -> str:
    with_plan = _with_plan(decision.plan) if decision else "Now"
    now, before = unit.brief(figures.measured), unit.brief(figures.baseline)
    whole = " over whole epochs" if figures.is_longer else ""
    return f"{with_plan} a step takes {now} instead of {before}{whole}."


def _factor(speedup: float) -> str:
    # "0.5 times as fast" is hard to read.
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
    if figures.prediction_error is None:
        return [text + "."]
    prediction = prediction_words(
        figures.prediction_error, band=figures.band, is_inside=figures.is_inside_band, unit=unit
    )
    what = "whole epochs are" if figures.is_longer else "the step is"
    return [f"{text}; {what} {prediction}."]


def _cost(figures: Figures, nominal: bool) -> list[str]:
    change, cost = figures.cost_change, ""
    if nominal and figures.baseline_accelerator_seconds:
        return _busy_words(figures)
    if nominal:
        if figures.baseline_cpu_seconds and figures.measured_cpu_seconds is not None:
            change = figures.measured_cpu_seconds / figures.baseline_cpu_seconds - 1
            cost = f"{digits(figures.measured_cpu_seconds, 3)} CPU-seconds: cores times the step"
    elif figures.measured_usd is not None:
        dollars = usd(figures.measured_usd, is_estimate=figures.is_estimate)
        cost = f"{dollars} per 1\N{NARROW NO-BREAK SPACE}000 steps"
    if change is None or not cost:
        return []
    if abs(change) < 0.0005:
        return [f"A step costs the same as before ({cost})."]
    word = "more" if change > 0 else "less"
    return [f"A step costs {percent(change)} {word} than before ({cost})."]


def _busy_words(figures: Figures) -> list[str]:
    """Returns how busy the accelerators are, and with which hosts beside them."""
    added = f"Hosts added: {figures.hosts_added}." if figures.hosts_added else "No host was added."
    busy = figures.predicted_busy if figures.measured_busy is None else figures.measured_busy
    if busy is None or figures.baseline_busy is None:
        return [added]
    before = percent(figures.baseline_busy)
    return [f"The accelerators compute for {percent(busy)} of a step; before: {before}.", added]


def _headline(text: str) -> str:
    text = _plain(text)
    if len(text) > _HEADLINE_LETTERS:
        text = text[:_HEADLINE_LETTERS].rstrip() + "\N{HORIZONTAL ELLIPSIS}"
    return _sentence(text)


def _plain(text: str) -> str:
    """Returns the end of `text` without a terminal's colour codes and control characters."""
    lines = _COLOUR_CODE.sub("", text).splitlines()[-_FAILURE_LINES:]
    return "\n".join(map(_printable, lines))


def _printable(line: str) -> str:
    return "".join(letter for letter in line if category(letter)[0] != "C" or letter == "\t")


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?", "\N{HORIZONTAL ELLIPSIS}")) else f"{text}."
