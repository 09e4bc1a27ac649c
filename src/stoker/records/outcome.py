"""Whether a run passed, and what it tells beside: the same words in all places that show it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date

from stoker.errors import EXIT_TERMINATED, FeedError, GateError, WorkloadError
from stoker.records.decision import STALE_DAYS, Decision
from stoker.records.profile import Profile
from stoker.records.training import GateResult, GroupSpending, Performance, Training
from stoker.units import figure, ms, numbered, percentage, usd

# As StokerDataGroupIdle of configs/kubernetes/alerts.yaml.
IDLE_SHARE = 0.8
# Of a step: one that waits longer does not need fewer data hosts.
_MAX_WAIT_SHARE = 0.2
# In the first line of a rank's failure, or in the last line of its traceback.
_ERROR_OF_THE_FEED = re.compile(
    r"^(rank \d+ on \S+: |stoker\.errors\.)(Feed|FeedLost|Shipping|Protocol)Error: ", re.MULTILINE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a run.

    Attributes:
        words: The result in one line, with the reason if the run did not pass.
        exit_code: Exit code of a command that judges the run.
    """

    words: str
    exit_code: int

    @property
    def is_good(self) -> bool:
        return self.exit_code == 0

    @property
    def reason(self) -> str:
        if self.is_good:
            return ""
        return self.words


def outcome_of(training: Training, gates: Sequence[GateResult] = ()) -> Outcome:
    """Judges a run by how its training ended, then by its gates. Pure."""
    code = training_exit_code(training)
    # With code 0 the training failed for another reason, such as a lost host.
    with_code = f" (exit code {training.exit_code})" if training.exit_code else ""
    if training.status == "stopped":
        words = f"the training was stopped{with_code}"
        if training.num_steps:
            words += f" after {numbered(training.num_steps, 'step')}"
        if training.failure:
            words += f": {training.cause}"
        return Outcome(words=words, exit_code=code)
    if training.status == "failed":
        words = f"the training failed{with_code}: {training.cause}"
        return Outcome(words=words, exit_code=code)
    if training.num_steps == 0:
        words = "the training did no step (was its checkpoint already at the last epoch?)"
        return Outcome(words=words, exit_code=GateError.exit_code)
    return outcome_of_gates(gates)


def outcome_of_gates(gates: Sequence[GateResult]) -> Outcome:
    failed = [gate_words(gate) + _how_to_report(gate) for gate in gates if not gate.passed]
    if failed:
        words = f"gate failed: {'; '.join(failed)}"
        return Outcome(words=words, exit_code=GateError.exit_code)
    if not gates:
        return Outcome(words="no gate: the training succeeded", exit_code=0)
    held = f"passed: {len(gates)} of {len(gates)} gates held"
    return Outcome(words=held, exit_code=0)


def training_exit_code(training: Training) -> int:
    """Returns 0, 5 if the feed failed, 6 if the workload did, 143: stopped."""
    # Both: a script may exit with 5 for another reason, or print this text and continue.
    is_named = _ERROR_OF_THE_FEED.search(training.failure or "")
    if training.status == "failed" and training.exit_code == FeedError.exit_code and is_named:
        return FeedError.exit_code
    codes = {"succeeded": 0, "failed": WorkloadError.exit_code, "stopped": EXIT_TERMINATED}
    return codes[training.status]


def gate_words(gate: GateResult) -> str:
    """Returns a metric with the bounds that it has to keep."""
    value = "not reported" if gate.value is None else figure(gate.value)
    bounds = {"at least": gate.min, "at most": gate.max, "the model in use has": gate.champion}
    notes = [f"{words} {figure(bound)}" for words, bound in bounds.items() if bound is not None]
    if gate.needs_champion and gate.champion is None and gate.is_inside:
        notes.append("no model is in use yet" if gate.passed else "the model in use has none")
    return f"{gate.metric} {value} ({', '.join(notes)})" if notes else f"{gate.metric} {value}"


def _how_to_report(gate: GateResult) -> str:
    if gate.value is not None:
        return ""
    if gate.regex is not None:
        return f": no number in the log by the pattern {gate.regex}"
    # Keyword arguments, of which not every metric's name can be one: `top-1`.
    return (
        f": stoker.log_metrics(**{{'{gate.metric}': value}}) in the script, or the JSON file "
        "$STOKER_METRICS, or regex in the gate for a line that it prints"
    )


def warnings_of(
    *,
    profile: Profile,
    decision: Decision,
    training: Training,
    performance: Performance | None,
    today: date | None = None,
) -> tuple[str, ...]:
    """Returns what a person should know about a run that may have passed. Pure.

    Args:
        today: Day on which the profile's age counts. None: its age is not told.
    """
    texts = []
    # Other programs that kept the machine busy are reported instead: the figures do not count.
    if performance and performance.band and not (performance.busy or performance.is_inside_band):
        band = performance.band
        texts.append(
            f"a step took {ms(performance.measured.counted_seconds)}, outside the predicted band "
            f"of {ms(band.low_seconds)} to {ms(band.high_seconds)}"
        )
    texts += filter(None, (_idle_words(group, training) for group in training.spending))
    prices = decision.prices
    if prices.stale and prices.is_billed:
        texts.append(f"the prices of {prices.date} are older than {STALE_DAYS} days")
    if today and (age := profile.too_old(today)):
        texts.append(age)
    return tuple(texts)


def _idle_words(group: GroupSpending, training: Training) -> str:
    if group.is_of_no_use:
        return group.made_words
    has_waited = training.measured and training.measured.wait_share > _MAX_WAIT_SHARE
    share = group.idle_share or 0.0
    # Only data groups have their batches counted.
    if group.batches is None or share <= IDLE_SHARE or has_waited:
        return ""
    spent = f", {usd(group.idle_usd)} of {usd(group.usd)}" if group.idle_usd else ""
    words = f"the data group was idle {percentage(share)} of its time{spent}"
    return f"{words}: fewer data hosts would do"
