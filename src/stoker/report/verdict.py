"""The report's verdict: one sentence that a reader may repeat, bad news before good.

`judge` returns it; its `headline` is the heading of the page.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal
from unicodedata import category

from msgspec.structs import replace as replace_fields

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
    EpochTimes,
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
    as_fast,
    capital,
    count,
    digits,
    is_whole_longer,
    percent,
    times,
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


def transform_rows(transforms: Sequence[TransformCost]) -> list[TransformCost]:
    """Returns the first rows, with short names, without parts that hardly count."""
    shown = [part for part in transforms if part.within is None or part.share >= _MIN_SHARE]
    return [replace_fields(part, name=_SHORTER.sub("", part.name)) for part in shown[:_MOST]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """One of the compared steps: today's, the predicted one or the measured one. None: not known.

    Attributes:
        within: Seconds of a step within epochs.
        whole: Seconds of whole epochs over their steps, where that is known of all compared steps.
        wait: Of `within`, the seconds that wait for data.
        whole_wait: Of `whole`, likewise; where whole epochs are worth a word.
        usd: Dollars of 1,000 steps.
        is_estimate: The dollars come from an estimated price.
        cpu_seconds: vCPUs of all hosts times the step.
        accelerator_seconds: Accelerators of all hosts times the step.
        busy: Share of the step in which the accelerators compute, by the profile.
        loads_itself: The trainer loads its own batches, as part of its wait.
        steps: Steps that were measured; 0: none were.
        least_wait_share: Of the rank that waits least, if there are several.
        rank: The rank that waits longest.
    """

    within: float | None = None
    whole: float | None = None
    wait: float | None = None
    whole_wait: float | None = None
    usd: float | None = None
    is_estimate: bool = False
    cpu_seconds: float | None = None
    accelerator_seconds: float | None = None
    busy: float | None = None
    loads_itself: bool = False
    steps: int = 0
    least_wait_share: float | None = None
    rank: int = 0

    @property
    def seconds(self) -> float | None:
        """The time that is compared: over whole epochs where it can be."""
        if self.whole is None:
            return self.within
        return self.whole

    @property
    def is_longer(self) -> bool:
        """Whether whole epochs are so much slower than their steps that it is worth a word."""
        if not self.within or not self.whole:
            return False
        return is_whole_longer(self.within, self.whole)

    @property
    def wait_share(self) -> float | None:
        return _share(self.within, self.wait)

    @property
    def whole_wait_share(self) -> float | None:
        return _share(self.whole, self.whole_wait)

    def wait_words(self, of: str) -> str:
        """Returns the share that waits for data, with the ranks if they differ."""
        return wait_words(
            self.wait_share or 0.0,
            least=self.least_wait_share,
            rank=self.rank,
            of=of,
            style="page",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What the report compares: the step before, as predicted and as measured. None: not known.

    Attributes:
        is_whole: Whole epochs are compared, as they are known of all steps; else steps are.
        band: Error band of the predicted step (made in `decide.pricing.band`).
        predicted_speedup: As promised when it was decided.
        prediction_error: measured / predicted - 1.
        speedup: Baseline step over measured step.
        cost_change: Measured cost over the baseline's, minus 1.
        hosts_added: Hosts of the plan, or of the run, for batches alone: `3 x local.c4`.
        is_estimate: The dollars of the plan, and of the run, come from an estimated price.
        is_baseline_scaled: The profile was taken elsewhere, and the baseline was not measured.
    """

    baseline: StepFigures
    predicted: StepFigures
    measured: StepFigures
    is_whole: bool
    band: Band | None = None
    is_inside_band: bool | None = None
    predicted_speedup: float | None = None
    prediction_error: float | None = None
    speedup: float | None = None
    cost_change: float | None = None
    hosts_added: str = ""
    is_estimate: bool = False
    is_baseline_scaled: bool = False

    @property
    def is_longer(self) -> bool:
        """Whether any of the compared steps is so much longer over whole epochs."""
        return any(step.is_longer for step in (self.baseline, self.predicted, self.measured))


def _share(step: float | None, wait: float | None) -> float | None:
    if not step or wait is None:
        return None
    return wait_share(step_seconds=step, wait_seconds=wait)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sources:
    """The records that figures come from. None: the run has no such record.

    Attributes:
        profile: Only if it was taken on today's hosts: else its step is another machine's, and
            the decision has today's.
        today: Today's cluster, as the decision has it.
        promise: What the decision predicts of the hosts that were run, or are to be run.
        outcome: What the training measured.
        performance: The three steps as the evaluation compared them, which knows best.
    """

    profile: Profile | None = None
    today: Predicted | None = None
    promise: Predicted | None = None
    outcome: Measured | None = None
    performance: Performance | None = None


def collect(
    *,
    profile: Profile | None,
    decision: Decision | None,
    training: Training | None,
    evaluation: Evaluation | None,
) -> Figures:
    """Returns the evaluation's figures, or figures from the records that it would be made from."""
    sources = _Sources(profile=profile)
    if decision:
        sources = _with_decision(sources, decision, is_run=training is not None)
    if training:
        sources = replace(sources, outcome=training.measured)
    if evaluation:
        sources = replace(sources, performance=evaluation.performance)
    figures = _with_gain(_compared(_steps(sources)), sources)
    return replace(
        figures,
        hosts_added=added_hosts_words(_groups_run(decision, training)),
        is_estimate=figures.is_estimate or bool(training and training.is_estimate),
        is_baseline_scaled=bool(decision and decision.taken_elsewhere),
    )


def _with_decision(sources: _Sources, decision: Decision, *, is_run: bool) -> _Sources:
    promised = _promised(decision, is_run=is_run)
    sources = replace(sources, promise=promised.predicted)
    if decision.today:
        sources = replace(sources, today=decision.today.predicted)
    if decision.taken_elsewhere:
        sources = replace(sources, profile=None)
    return sources


def _groups_run(decision: Decision | None, training: Training | None) -> Sequence[Group]:
    if training:
        return training.groups
    if decision is None:
        return ()
    return _promised(decision, is_run=False).groups


def _promised(decision: Decision, *, is_run: bool) -> Plan:
    """Returns the plan that was run; where nothing was, the probable one if there is one."""
    if decision.kind == "probable" and decision.probable and not is_run:
        return decision.probable
    return decision.plan


def _steps(sources: _Sources) -> list[StepFigures]:
    """Returns the baseline, the prediction and the run, each with what is known of it alone."""
    profile = sources.profile
    outcome = sources.outcome
    promise = sources.promise
    baseline, predicted, measured = _step_costs(sources)
    if sources.today:
        baseline = replace(baseline, busy=sources.today.accelerator_utilization)
    if profile and profile.step:
        wait = profile.step.wait_seconds
        baseline = replace(
            baseline,
            wait=wait,
            whole_wait=_whole_wait(profile.epochs, wait, outcome),
            loads_itself=profile.step.num_workers == 0,
        )
    if promise:
        busy = promise.accelerator_utilization
        predicted = replace(predicted, busy=busy)
        if measured.within:
            # The accelerators have as much to do in a step that takes longer.
            busy = min(1.0, busy * promise.step_seconds / measured.within)
            measured = replace(measured, busy=busy)
    if outcome:
        measured = replace(
            measured,
            wait=outcome.wait_seconds,
            whole_wait=outcome.whole_wait_seconds,
            steps=outcome.steps,
            least_wait_share=outcome.least_wait_share,
            rank=outcome.rank,
        )
    return [baseline, predicted, measured]


def _step_costs(sources: _Sources) -> list[StepFigures]:
    """Returns time and cost of the three steps, each figure from the record that knows it best."""
    profile = sources.profile
    performance = sources.performance
    rows: list[list[object]] = [[sources.today], [sources.promise], [sources.outcome]]
    if profile:
        rows[0].insert(0, profile.step)
    if performance is None:
        steps = [_step_cost(row) for row in rows]
        if steps[0].whole is None and profile:
            steps[0] = replace(steps[0], whole=whole_step_of(profile))
        return steps
    compared = (performance.baseline, performance.predicted, performance.measured)
    return [
        # It knows whether all three can be compared by whole epochs.
        replace(_step_cost([step, *row]), whole=_first("whole_step_seconds", [step]))
        for step, row in zip(compared, rows, strict=True)
    ]


def _step_cost(records: Sequence[object]) -> StepFigures:
    """Returns time and cost of a step, each from the first of its records that knows it."""
    return StepFigures(
        within=_first("step_seconds", records),
        whole=_first("whole_step_seconds", records),
        usd=_first("usd_per_1000_steps", records),
        cpu_seconds=_first("cpu_seconds", records),
        accelerator_seconds=_first("accelerator_seconds", records),
        is_estimate=any(getattr(record, "is_estimate", False) for record in records),
    )


def _first(name: str, records: Sequence[object]) -> float | None:
    values = (getattr(record, name, None) for record in records)
    return next((value for value in values if isinstance(value, float | int)), None)


def _compared(steps: Sequence[StepFigures]) -> Figures:
    """Returns the figures of three steps: over whole epochs where these are known of all."""
    is_whole = all(step.whole is not None for step in steps if step.within is not None)
    if not is_whole:
        steps = [replace(step, whole=None) for step in steps]
    if not any(step.is_longer for step in steps):
        steps = [replace(step, whole_wait=None) for step in steps]
    baseline, predicted, measured = steps
    return Figures(
        baseline=baseline,
        predicted=predicted,
        measured=measured,
        is_whole=is_whole,
        is_estimate=predicted.is_estimate or measured.is_estimate,
    )


def _with_gain(figures: Figures, sources: _Sources) -> Figures:
    """Returns the figures with what was promised, whether it came true, the speedup and the cost.

    Of an evaluation, these are its own; what it does not know is computed from the steps.
    """
    promise = sources.promise
    performance = sources.performance
    before = figures.baseline.seconds
    planned = figures.predicted.seconds
    now = figures.measured.seconds
    speedup = _ratio(before, planned)
    if promise:
        figures = replace(figures, band=_band_of(promise, is_whole=figures.is_whole))
        # As promised at the time, with that step of today; not over a baseline measured later. But
        # with pauses that were seen only in the run, if they count in what is compared.
        has_new_pauses = figures.is_whole and planned != promise.whole_step_seconds
        if performance is None or not has_new_pauses:
            speedup = promise.speedup
    figures = replace(
        figures,
        predicted_speedup=speedup,
        prediction_error=_change(now, planned),
        speedup=_ratio(before, now),
        cost_change=_change(figures.measured.usd, figures.baseline.usd),
    )
    if performance:
        figures = _as_evaluated(figures, performance)
    if figures.band and figures.is_inside_band is None and now is not None:
        figures = replace(figures, is_inside_band=figures.band.holds(now))
    return figures


def _band_of(promise: Predicted, *, is_whole: bool) -> Band:
    low = promise.step_seconds_low
    high = promise.step_seconds_high
    if is_whole:
        low = promise.counted_low
        high = promise.counted_high
    return Band(low_seconds=low, high_seconds=high)


def _as_evaluated(figures: Figures, performance: Performance) -> Figures:
    error = performance.prediction_error
    change = performance.cost_change
    if error is not None:
        figures = replace(figures, prediction_error=error)
    if change is not None:
        figures = replace(figures, cost_change=change)
    return replace(
        figures,
        band=performance.band or figures.band,
        is_inside_band=performance.is_inside_band,
        speedup=performance.speedup,
    )


def _whole_wait(
    times: EpochTimes | None, wait: float | None, outcome: Measured | None
) -> float | None:
    """Returns the profile's wait over whole epochs, with a start if the run's epochs had one."""
    if times is None or wait is None:
        return None
    if outcome and outcome.epochs:
        times = times.as_in(outcome.epochs)
    return times.whole_wait_seconds(wait)


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


def _change(value: float | None, reference: float | None) -> float | None:
    ratio = _ratio(value, reference)
    if ratio is None:
        return None
    return ratio - 1


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
        if self.evaluation is None:
            return ()
        return self.evaluation.gates

    @property
    def outcome(self) -> Outcome | None:
        if self.training is None:
            return None
        return outcome_of(self.training, self.gates)

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
        if self.training is None:
            return []
        return [_headline(capital(group.made_words)) for group in self.training.useless_groups]

    @property
    def busy(self) -> str:
        if self.training is None:
            return ""
        return self.training.busy

    @property
    def disturbed(self) -> list[str]:
        if not self.busy:
            return []
        return [f"{capital(BUSY)} ({self.busy})."]

    @property
    def wait(self) -> list[str]:
        return [*_within(self.figures, self.unit), *_wait(self.figures)]

    @property
    def gain(self) -> list[str]:
        """What it gained; of an idle group, no gain by it."""
        if self.is_idle and self.figures.speedup is not None:
            words = _step_words(self.figures, self.unit, None).removesuffix(".")
            return [f"{words}, for another reason than its data hosts."]
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

    @property
    def trouble(self) -> list[str]:
        """What does not change the verdict, and is worth a look further down."""
        if self.training is None:
            return []
        sentences = []
        if number := self.training.bad_samples:
            many = capital(count(number, "bad sample"))
            sentences.append(f"{many}: see Bad samples.")
        if any(host.is_short for host in self.training.memory):
            sentences.append("Memory was short: see Memory.")
        return sentences

    def verdict(self, tone: Tone, badge: str, headline: str, *sentences: str) -> Verdict:
        """Returns a verdict whose badge says that the gate was passed, too."""
        if self.is_passed:
            badge += ", gate passed"
        return Verdict(tone, badge, headline, " ".join(sentences))


def judge(run: JudgedRun) -> Verdict:
    """Returns the verdict on a run, whole or not, with what else its reader has to know."""
    verdict = _judged(run)
    lead = " ".join([verdict.lead, *run.trouble]).lstrip()
    return replace(verdict, lead=lead)


def _judged(run: JudgedRun) -> Verdict:
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
        kept = kept_words(run.decision, "page")
        if run.disturbed:
            # Figures that do not count stand behind the sentence that says so.
            lead = [*run.disturbed, *run.wait, *rest]
            return run.verdict("mixed", "kept as it is", kept, *lead)
        return run.verdict("mixed", "kept as it is", " ".join([kept, *run.wait]), *rest)
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
    band = figures.band
    step = figures.measured.seconds
    headline = _step_words(figures, run.unit, run.decision)
    tone: Tone = "good"
    badge = "faster"
    if band and step and step > band.high_seconds:
        tone = "mixed"
        badge = "faster, by less than predicted"
    verdict = run.verdict(tone, badge, headline, *run.wait, *run.idle, *run.rest)
    return replace(verdict, hero=_factor(figures.speedup or 0.0))


def _trained_alone(
    figures: Figures, unit: TimeUnit, decision: Decision | None, promise: Sequence[str]
) -> Verdict:
    """Returns the verdict on a run of `stoker train`, which has no other records."""
    lacks = "it has no profile and no decision, so that nothing is known of the step before"
    if decision:
        lacks = "what a step took before is the decision's figure"
    lead = " ".join([*promise, f"This run only trained: {lacks}, and no gate was checked."])
    measured = figures.measured
    if not measured.seconds:
        return Verdict("mixed", "trained", "The training ended; no step was measured.", lead)
    headline = " ".join(_gain(figures, unit, decision))
    if not headline:
        wait = measured.wait_words("of it waiting for data")
        step = unit.brief(measured.within)
        headline = f"A step takes {step}, {wait}."
        if figures.is_longer:
            whole = unit.brief(measured.seconds)
            headline = f"A step takes {whole} over whole epochs; {step} within them, {wait}."
    is_slow = figures.speedup is not None and figures.speedup < _NO_GAIN
    tone: Tone = "good"
    if is_slow or figures.is_inside_band is False:
        tone = "mixed"
    return Verdict(tone, "trained", headline, lead)


def _planned(decision: Decision, lead: Sequence[str]) -> Verdict:
    if decision.kind == "probable" and decision.probable:
        return _probable(decision, decision.probable, lead)
    if decision.action == "keep":
        return Verdict("mixed", "kept as it is", kept_words(decision, "page"), " ".join(lead))
    reason = _sentence(plan_reason(decision))
    name = plan_name(decision.plan, today=todays_group(decision))
    headline = f"{capital(name)}: {reason}"
    lead = [free_words(decision), *lead, probable_words(decision)]
    text = " ".join(filter(None, lead))
    verdict = Verdict("good", "decided, not run yet", headline, text)
    return _with_hero(verdict, decision.plan, "predicted")


def _probable(decision: Decision, plan: Plan, lead: Sequence[str]) -> Verdict:
    name = plan_name(plan, today=todays_group(decision))
    headline = f"Probably worth it: {name}: {_sentence(plan.reason)}"
    words = [followed_words(decision), *lead]
    if decision.trial:
        words.insert(0, trial_words(decision.trial))
    text = " ".join(filter(None, words))
    return _with_hero(Verdict("mixed", "probable: make sure", headline, text), plan, "probably")


def _with_hero(verdict: Verdict, plan: Plan, how_sure: str) -> Verdict:
    if plan.predicted is None:
        return verdict
    return replace(verdict, hero=f"{_factor(plan.predicted.speedup)}, {how_sure}")


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
    training = run.training
    outcome = run.outcome
    failure = run.failure
    # The training's record first: later ones are missing because of it.
    if training and outcome and outcome.state in _BADGES:
        words = capital(outcome.words)
        return _BADGES[outcome.state], words, _plain(failure or training.failure or "")
    text = _plain(failure or "")
    cause = ""
    if text:
        cause = f": {cause_of(text)}"
    records = {
        "profile": run.profile,
        "decide": run.decision,
        "train": training,
        "evaluate": run.evaluation,
    }
    missing = next((step for step, record in records.items() if record is None), None)
    # `stoker train` alone makes one record, and nothing has failed.
    if missing and (failure or run.profile or not training):
        badge = f"ended in {missing}"
        if failure:
            badge = f"{missing} failed"
        return badge, f"The run ended in {missing}{cause}", text
    if failure:
        return "run failed", f"The run failed{cause}", text
    return None


def _wait(figures: Figures) -> list[str]:
    share = figures.baseline.wait_share
    now = figures.measured.wait_share
    if share is None:
        return []
    whole = figures.baseline.whole_wait_share
    whole_now = figures.measured.whole_wait_share
    words = f"The trainer waited {percent(share)} of every step for data"
    if whole is not None:
        words = f"The trainer waited {percent(whole)} of the time for data"
        words += f" over whole epochs ({percent(share)} within them)"
    if figures.baseline.loads_itself:
        words += ", which it loads itself"
    if now is None:
        return [f"{words}."]
    words_now = figures.measured.wait_words("")
    if whole is not None and whole_now is not None:
        words_now = f"{percent(whole_now)} ({words_now} within them)"
    return [f"{words}; now {words_now}."]


def _within(figures: Figures, unit: TimeUnit) -> list[str]:
    """Returns the step within epochs, where the headline is of whole ones."""
    before = figures.baseline.within
    now = figures.measured.within
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


def _step_words(figures: Figures, unit: TimeUnit, decision: Decision | None) -> str:
    with_plan = "Now"
    if decision:
        with_plan = _with_plan(decision.plan)
    now = unit.brief(figures.measured.seconds)
    before = unit.brief(figures.baseline.seconds)
    whole = " over whole epochs" if figures.is_longer else ""
    return f"{with_plan} a step takes {now} instead of {before}{whole}."


def _factor(speedup: float) -> str:
    # "0.5 times as fast" is hard to read.
    if speedup < 0.995:
        return f"{times(1 / speedup)} times as long"
    return as_fast(speedup)


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
    if figures.predicted.seconds is None:
        return []
    text = f"Predicted: {unit.brief(figures.predicted.seconds)}"
    if figures.predicted_speedup is not None:
        text += f", {as_fast(figures.predicted_speedup)}"
    if figures.prediction_error is None:
        return [text + "."]
    prediction = prediction_words(
        figures.prediction_error, band=figures.band, is_inside=figures.is_inside_band, unit=unit
    )
    what = "whole epochs are" if figures.is_longer else "the step is"
    return [f"{text}; {what} {prediction}."]


def _cost(figures: Figures, nominal: bool) -> list[str]:
    before = figures.baseline
    now = figures.measured
    if nominal and before.accelerator_seconds:
        return _busy_words(figures)
    change = figures.cost_change
    cost = ""
    if nominal:
        if before.cpu_seconds and now.cpu_seconds is not None:
            change = now.cpu_seconds / before.cpu_seconds - 1
            cost = f"{digits(now.cpu_seconds, 3)} CPU-seconds: cores times the step"
    elif now.usd is not None:
        dollars = usd(now.usd, is_estimate=figures.is_estimate)
        cost = f"{dollars} per 1,000 steps"
    if change is None or not cost:
        return []
    # It would be written as 0.0%.
    if abs(change) < 0.0005:
        return [f"A step costs the same as before ({cost})."]
    word = "more" if change > 0 else "less"
    return [f"A step costs {percent(change)} {word} than before ({cost})."]


def _busy_words(figures: Figures) -> list[str]:
    """Returns how busy the accelerators are, and with which hosts beside them."""
    added = "No host was added."
    if figures.hosts_added:
        added = f"Hosts added: {figures.hosts_added}."
    before = figures.baseline.busy
    busy = figures.measured.busy
    if busy is None:
        busy = figures.predicted.busy
    if busy is None or before is None:
        return [added]
    words = f"The accelerators compute for {percent(busy)} of a step; before: {percent(before)}."
    return [words, added]


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
    if text.endswith((".", "!", "?", "\N{HORIZONTAL ELLIPSIS}")):
        return text
    return f"{text}."
