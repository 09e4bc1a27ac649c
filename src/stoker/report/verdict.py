"""The report's verdict: one sentence that a reader may repeat, bad news before good.

`judge` returns it; its `headline` is the heading of the page. What decision, evaluation and
training say of themselves are their own words.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from unicodedata import category

from stoker.decide.explain import headline
from stoker.evaluate import gate_words, performance_of, performance_words
from stoker.failure_reasons import cause_of
from stoker.record_words import measured_words, memory_cause
from stoker.records import (
    Decision,
    Evaluation,
    Measured,
    Performance,
    Plan,
    Profile,
    Training,
    Workload,
)
from stoker.records.outcome import Outcome, OutcomeState, outcome_of
from stoker.units import (
    as_fast,
    capital,
    cost_change_words,
    count,
    ms,
    numbered,
    percent,
    percentage,
    times,
)

# Badges of outcomes that make the figures meaningless.
_BADGES: Mapping[OutcomeState, str] = {
    "failed": "training failed",
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
Tone = Literal["good", "mixed", "bad"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedRun:
    """A run to report, whole or ended early: then some of its records are missing.

    Attributes:
        environment: Facts to show. `command` is the command line of the run.
        before_timeline: CSV of the baseline's steps in the profile's as-is phase; without it the
            profile's medians are drawn; likewise for `after_timeline`.
        before_intervals: Rows of the profiled run (see figures.intervals), if there are any.
        intervals: Rows of the run, likewise.
        bad_samples_file: List of samples that were skipped or replaced, if there is one.
        failure: Why the run ended early, if no record has it.
    """

    run_id: str
    workload: Workload
    profile: Profile | None
    decision: Decision | None
    training: Training | None
    evaluation: Evaluation | None
    environment: Mapping[str, str]
    before_timeline: Path | None = None
    after_timeline: Path | None = None
    before_intervals: Path | None = None
    intervals: Path | None = None
    bad_samples_file: Path | None = None
    failure: str | None = None

    @property
    def profiled(self) -> Profile | None:
        """The profile, if it was taken on today's hosts: else its steps are another machine's."""
        return None if self.decision and self.decision.taken_elsewhere else self.profile

    @property
    def measured(self) -> Measured | None:
        """The steps of the training run, if they were measured."""
        return self.training.measured if self.training else None

    @property
    def performance(self) -> Performance | None:
        """The measured step against today's and the predicted one; None: it is not known."""
        if self.evaluation and self.evaluation.performance:
            return self.evaluation.performance
        if self.decision and self.training:
            return performance_of(self.profile, self.decision, self.training)
        return None

    @property
    def outcome(self) -> Outcome | None:
        if self.training is None:
            return None
        return outcome_of(self.training, self.evaluation.gates if self.evaluation else ())

    @property
    def plan(self) -> Plan | None:
        """The plan that was run; where nothing was, the probable one if there is one."""
        decision = self.decision
        if decision and decision.verdict == "probable" and not self.training:
            return decision.probable
        return decision.plan if decision else None

    @property
    def before_seconds(self) -> float | None:
        """Today's step; None: it is not known."""
        if self.performance:
            return self.performance.baseline.counted_seconds
        today = self.decision.today if self.decision else None
        return today.predicted.counted_seconds if today and today.predicted else None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the report begins with; `hero`: a figure in large letters before the headline."""

    tone: Tone
    badge: str
    headline: str
    lead: str = ""
    failure: str = ""
    hero: str = ""

    @property
    def mark(self) -> str:
        """The tone as a sign, for readers who do not see its colour."""
        return {"good": "\N{CHECK MARK}", "mixed": "!", "bad": "\N{BALLOT X}"}[self.tone]


def judge(run: ReportedRun) -> Verdict:
    """Returns the verdict on a run, whole or not, with what else its reader has to know."""
    lead = _lead(run)
    if ending := _ending(run):
        badge, words, text = ending
        return Verdict("bad", badge, _short(words), lead, text)
    tone, badge, words, hero = _of_a_whole_run(run)
    if run.outcome and run.outcome.state == "passed":
        badge += ", gate passed"
    # What the headline says is not said again.
    gain = gain_words(run)
    return Verdict(tone, badge, words, lead.removeprefix(gain if gain in words else ""), hero=hero)


def _of_a_whole_run(run: ReportedRun) -> tuple[Tone, str, str, str]:
    """Returns tone, badge, headline and hero of a training that ended well."""
    training = run.training
    assert training is not None
    performance = run.performance
    gain = gain_words(run)
    if run.evaluation and run.outcome and run.outcome.state == "gate failed":
        failed = "; ".join(gate_words(gate) for gate in run.evaluation.gates if not gate.passed)
        return "bad", "gate failed", f"The model missed its quality gate: {failed}.", ""
    if training.is_helped is False and training.useless_groups:
        made = capital(training.useless_groups[0].made_words)
        return "mixed", "data group idle", f"{made}: data hosts did not help.", ""
    if performance is None:
        if not run.measured or not run.measured.step_seconds:
            return "mixed", "not measured", "The training ended; no step was measured.", ""
        return "good", "trained", f"A step takes {measured_words(run.measured)}.", ""
    if performance.busy:
        return "mixed", "machine busy", f"{capital(performance_words(performance)[0])}.", ""
    if performance.action == "keep" and run.decision:
        return "mixed", "kept as it is", headline(run.decision), ""
    if performance.speedup < _NO_GAIN:
        return "mixed", "no gain", f"stoker did not help. {gain}", ""
    hero = as_fast(performance.speedup)
    if performance.is_inside_band is False and (performance.prediction_error or 0.0) > 0:
        return "mixed", "faster, by less than predicted", gain, hero
    return "good", "faster", gain, hero


def _ending(run: ReportedRun) -> tuple[str, str, str] | None:
    """Returns badge, headline and full text of an early end; None: there was none."""
    training = run.training
    outcome = run.outcome
    # The training's record first: later ones are missing because of it.
    if training and outcome and outcome.state in _BADGES:
        text = _plain(run.failure or training.failure or "")
        return _BADGES[outcome.state], capital(outcome.words), text
    text = _plain(run.failure or "")
    cause = f": {cause_of(text)}" if text else ""
    records = {
        "profile": run.profile,
        "decide": run.decision,
        "train": training,
        "evaluate": run.evaluation,
    }
    missing = next((step for step, record in records.items() if record is None), "")
    # `stoker train` alone makes one record, and nothing has failed.
    is_alone = training and not (run.profile and run.decision)
    if run.failure or (missing and not is_alone):
        where = f" ended in {missing}" if missing else " failed"
        return f"{missing or 'run'} failed", f"The run{where}{cause}", text
    return None


def gain_words(run: ReportedRun) -> str:
    """Returns a step before and after, with the plan; empty: not both are known."""
    performance = run.performance
    if performance is None:
        return ""
    now = performance.measured
    groups = run.training.groups if run.training else ()
    data = sum(group.count for group in groups if group.role == "data")
    begin = f"With {count(data, 'data host')}" if data else "On the chosen hosts"
    whole = " over whole epochs" if now.whole_step_seconds is not None else ""
    factor = as_fast(performance.speedup)
    if performance.speedup < 0.995:
        # "0.5 times as fast" is hard to read.
        factor = f"{times(1 / performance.speedup)} times as long"
    return (
        f"{begin} a step takes {ms(now.counted_seconds)} instead of "
        f"{ms(performance.baseline.counted_seconds)}{whole}: {factor}."
    )


def _lead(run: ReportedRun) -> str:
    """Returns the sentences below the headline: gain, wait, prediction, cost, gates, troubles."""
    performance = run.performance
    training = run.training
    sentences = [gain_words(run), _wait_words(run)]
    if performance:
        sentences += [f"{capital(words)}." for words in performance_words(performance)[1:]]
        if performance.cost_change is not None:
            is_billed = performance.measured.usd_per_1000_steps is not None
            words = cost_change_words(performance.cost_change, is_billed=is_billed)
            sentences.append(f"{capital(words)}.")
    elif training and not run.decision:
        sentences.append(
            "This run only trained: it has no profile and no decision, so that nothing is known of "
            "the step before, and no gate was checked."
        )
    if training and training.bad_samples:
        sentences.append(f"{capital(numbered(training.bad_samples, 'bad sample'))}: see below.")
    if training and (memory := memory_cause(training)):
        sentences.append(f"Memory was short: {memory}.")
    return " ".join(filter(None, sentences))


def _wait_words(run: ReportedRun) -> str:
    """Returns how much of a step waited for data before, and does now."""
    before = run.profiled.step.wait_share if run.profiled else None
    now = run.measured
    if before is None:
        return f"A step takes {measured_words(now)}." if now else ""
    then = f"; now {percentage(now.wait_share)}" if now and now.step_seconds else ""
    return f"The trainer waited {percentage(before)} of every step for data{then}."


def key_figures(run: ReportedRun) -> list[tuple[str, str, str]]:
    """Returns up to four figures: name, value, and what stands below it."""
    performance = run.performance
    measured = run.measured
    before = f"before: {ms(run.before_seconds)}" if run.before_seconds else ""
    waited = run.profiled.step.wait_share if run.profiled else None
    outcome = run.plan.predicted if run.plan else None
    rows: list[tuple[str, str, str]] = []
    if measured and measured.step_seconds:
        now = performance.measured.counted_seconds if performance else measured.counted_seconds
        note = "" if waited is None else f"before: {percent(waited)}"
        rows.append(("A step takes", ms(now), before))
        rows.append(("Of it waiting for data", percent(measured.wait_share), note))
    elif outcome:
        band = f"{ms(outcome.counted_low)} to {ms(outcome.counted_high)}"
        rows.append(("A step takes", ms(outcome.counted_seconds), f"predicted, {band}; {before}"))
        rows.append(("Predicted speed-up", f"{times(outcome.speedup)}x", "nothing was run yet"))
    if performance and performance.prediction_error is not None and not performance.busy:
        words = performance_words(performance)[1]
        rows.append(("Speed-up", f"{times(performance.speedup)}x", words))
    if run.evaluation and run.evaluation.gates:
        passed = "passed" if all(gate.passed for gate in run.evaluation.gates) else "failed"
        gates = "; ".join(map(gate_words, run.evaluation.gates))
        rows.append(("Quality gate", passed, gates))
    return rows


def _short(text: str) -> str:
    text = _plain(text)
    if len(text) > _HEADLINE_LETTERS:
        return text[:_HEADLINE_LETTERS].rstrip() + "\N{HORIZONTAL ELLIPSIS}"
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _plain(text: str) -> str:
    """Returns the end of `text` without a terminal's colour codes and control characters."""
    lines = _COLOUR_CODE.sub("", text).splitlines()[-_FAILURE_LINES:]
    return "\n".join(
        "".join(each for each in line if category(each)[0] != "C" or each == "\t") for line in lines
    )
