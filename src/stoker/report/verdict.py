"""The report's verdict: one sentence that a reader may repeat, bad news before good.

`judge` returns it; its `headline` is the heading of the page. What decision, evaluation and
training say of themselves are their own words.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stoker.decide.explain import headline
from stoker.evaluate import performance_of, performance_words
from stoker.failure_reasons import cause_of
from stoker.logs import printable
from stoker.record_words import measured_words
from stoker.records import (
    Decision,
    Evaluation,
    Measured,
    Performance,
    Profile,
    Training,
    Workload,
)
from stoker.records.outcome import gate_words, outcome_of
from stoker.units import (
    as_fast,
    capital,
    cost_change_words,
    ms,
    numbered,
    percent,
    times,
)

# A gain within the noise of two runs of a minute is not a gain.
_NO_GAIN = 1.05
_HEADLINE_LETTERS = 240
_COLOUR_CODE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
Tone = Literal["good", "mixed", "bad"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedRun:
    """A run to report, whole or ended early: then some of its records are missing.

    Attributes:
        environment: Facts to show. `command` is the command line of the run.
        before_timeline: CSV of the baseline's steps in the profile's as-is phase.
        after_timeline: CSV of this run's steps.
        intervals: Rows of the run (see figures.intervals), if there are any.
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
    intervals: Path | None = None
    failure: str | None = None

    @property
    def profiled(self) -> Profile | None:
        """The profile, if it was taken on today's hosts: else its steps are another machine's."""
        return None if self.decision and self.decision.taken_elsewhere else self.profile

    @property
    def measured(self) -> Measured | None:
        """The steps of the training run, if they were measured."""
        measured = self.training.measured if self.training else None
        return measured if measured and measured.step_seconds else None

    @property
    def performance(self) -> Performance | None:
        """The measured step against today's and the predicted one; None: it is not known."""
        if self.evaluation and self.evaluation.performance:
            return self.evaluation.performance
        if self.decision and self.training:
            return performance_of(self.profile, self.decision, self.training)
        return None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the report begins with: a badge, a sentence, what else matters, and a failure's text."""

    tone: Tone
    badge: str
    headline: str
    lead: str = ""
    failure: str = ""


def judge(run: ReportedRun) -> Verdict:
    """Returns the verdict on a run, whole or not, with what no figure on the page says."""
    failure = run.failure or (run.training and run.training.failure) or ""
    failure = printable(_COLOUR_CODE.sub("", failure), keep="\n\t")
    tone, badge, words = _ending(run, failure) or _of_a_whole_run(run)
    if len(words) > _HEADLINE_LETTERS:
        words = words[:_HEADLINE_LETTERS] + "\N{HORIZONTAL ELLIPSIS}"
    sentences = []
    performance = run.performance
    gain = gain_words(run)
    if gain not in words:
        sentences.append(gain)
    if performance and performance.cost_change is not None:
        is_billed = performance.measured.usd_per_1000_steps is not None
        change = cost_change_words(performance.cost_change, is_billed=is_billed)
        sentences.append(f"{capital(change)}.")
    return Verdict(tone, badge, words.rstrip(".") + ".", " ".join(sentences), failure)


def _ending(run: ReportedRun, failure: str) -> tuple[Tone, str, str] | None:
    """Returns badge and headline of an early end; None: there was none."""
    training = run.training
    # The training's record first: later ones are missing because of it.
    if training:
        outcome = outcome_of(training)
        if not outcome.is_good:
            end = "did no step" if training.status == "succeeded" else training.status
            return "bad", f"training {end}", capital(outcome.words)
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
        where = f"ended in {missing}" if missing else "failed"
        cause = f": {cause_of(failure)}" if failure else ""
        return "bad", f"{missing or 'run'} failed", f"The run {where}{cause}"
    return None


def _of_a_whole_run(run: ReportedRun) -> tuple[Tone, str, str]:
    """Returns tone, badge and headline of a training that ended well."""
    assert run.training is not None
    performance = run.performance
    gates = run.evaluation.gates if run.evaluation else ()
    if failed := [gate_words(gate) for gate in gates if not gate.passed]:
        return "bad", "gate failed", f"The model missed its quality gate: {'; '.join(failed)}."
    if run.training.useless_groups:
        made = capital(run.training.useless_groups[0].made_words)
        return "mixed", "data group idle", f"{made}: data hosts did not help."
    passed = ", gate passed" if gates else ""
    if performance is None:
        if run.measured is None:
            return "mixed", f"not measured{passed}", "The training ended; no step was measured."
        return "good", f"trained{passed}", f"A step takes {measured_words(run.measured)}."
    if performance.busy:
        words = f"{capital(performance_words(performance)[0])}."
        return "mixed", f"machine busy{passed}", words
    if performance.action == "keep" and run.decision:
        return "mixed", f"kept as it is{passed}", headline(run.decision)
    gain = gain_words(run)
    if performance.speedup < _NO_GAIN:
        return "mixed", f"no gain{passed}", f"stoker did not help. {gain}"
    if performance.is_inside_band is False and (performance.prediction_error or 0.0) > 0:
        return "mixed", f"faster, by less than predicted{passed}", gain
    return "good", f"faster{passed}", gain


def gain_words(run: ReportedRun) -> str:
    """Returns a step before and after, with the plan; empty: not both are known."""
    performance = run.performance
    if performance is None:
        return ""
    now = performance.measured
    groups = run.training.groups if run.training else ()
    data = sum(group.count for group in groups if group.role == "data")
    begin = f"With {numbered(data, 'data host')}" if data else "On the chosen hosts"
    whole = " over whole epochs" if now.whole_step_seconds is not None else ""
    factor = as_fast(performance.speedup)
    if performance.speedup < 0.995:
        # "0.5 times as fast" is hard to read.
        factor = f"{times(1 / performance.speedup)} times as long"
    return (
        f"{begin} a step takes {ms(now.counted_seconds)} instead of "
        f"{ms(performance.baseline.counted_seconds)}{whole}: {factor}."
    )


def key_figures(run: ReportedRun) -> list[tuple[str, str, str]]:
    """Returns up to four figures: name, value, and what stands below it."""
    performance = run.performance
    rows: list[tuple[str, str, str]] = []
    if run.measured:
        seconds = run.measured.counted_seconds
        before = ""
        if performance:
            seconds = performance.measured.counted_seconds
            before = f"before: {ms(performance.baseline.counted_seconds)}"
        rows.append(("A step takes", ms(seconds), before))
        waited = run.profiled.step.wait_share if run.profiled else None
        before = "" if waited is None else f"before: {percent(waited)}"
        rows.append(("Of it waiting for data", percent(run.measured.wait_share), before))
    if performance and performance.prediction_error is not None and not performance.busy:
        words = performance_words(performance)[1]
        rows.append(("Speed-up", f"{times(performance.speedup)}x", words))
    if run.evaluation and run.evaluation.gates:
        passed = "passed" if all(gate.passed for gate in run.evaluation.gates) else "failed"
        gates = "; ".join(map(gate_words, run.evaluation.gates))
        rows.append(("Quality gate", passed, gates))
    return rows
