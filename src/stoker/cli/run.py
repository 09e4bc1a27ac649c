"""`stoker run` runs the four components in a row, with their records in one folder."""

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TypeVar

from stoker.catalog import catalog_of
from stoker.cli.billing import confirm
from stoker.cli.progress import following, relative, say, step_line
from stoker.cli.report import report_of_run
from stoker.cli.stopping import command_line, keep_stopped
from stoker.cli.verbs import exit_code_of, training_words
from stoker.cli.workloads import describe, latest_run_dir, new_run_dir, region_of, todays_cluster
from stoker.decide import decide
from stoker.errors import StokerError, UsageError
from stoker.evaluate import band_words, evaluate
from stoker.logs import printable
from stoker.platforms import platform_named
from stoker.profile import profile
from stoker.records import (
    Decision,
    Evaluation,
    Group,
    Profile,
    Record,
    Training,
    Workload,
    nearest,
    read_json,
    to_json,
    write_json,
    write_text,
)
from stoker.train import prepare, train

_LINES = "\n\t"
STEPS = ("profile", "decide", "train", "evaluate")

_RecordT = TypeVar("_RecordT", bound=Record)


@dataclass(slots=True, kw_only=True)
class _Chain:
    """One run of the chain; `run_dir` holds what is done."""

    workload: Workload
    source: str
    run_dir: Path
    first: int
    prices: Path | None
    quiet: bool
    assume_yes: bool
    arguments: Sequence[str]
    doing: str = STEPS[0]

    def step(
        self,
        name: str,
        kind: type[_RecordT],
        make: Callable[[], _RecordT],
        words: Callable[[_RecordT], str],
    ) -> _RecordT:
        """Makes the step's record and writes it, or reads the earlier one.

        Args:
            name: One of STEPS.
            kind: Class of the record.
            make: Does the step; `train` writes its record itself.
            words: The record in one line.
        """
        file = self.run_dir / f"{_RECORD_OF[name]}.json"
        if STEPS.index(name) < self.first:
            record = read_json(file, kind)
            say(step_line(name, f"re-used: {words(record)}", None), quiet=self.quiet)
            return record
        began, self.doing = time.monotonic(), name
        record = make()
        if name != "train":
            write_json(file, record)
        took = time.monotonic() - began
        say(step_line(name, words(record), took), quiet=self.quiet)
        return record


_RECORD_OF = {
    "profile": "profile",
    "decide": "decision",
    "train": "training",
    "evaluate": "evaluation",
}


def run_chain(
    workload: Workload,
    *,
    source: str,
    from_step: str | None,
    prices: Path | None,
    as_json: bool,
    yes: bool,
    arguments: Sequence[str],
) -> int:
    """Runs the chain and gives its exit code; the report is written even when a step failed.

    Args:
        workload: What to run.
        source: Its file, as it was named.
        from_step: The first step that is not taken from an earlier run; None: all are made.
        prices: Rows that extend the catalog.
        as_json: The evaluation on stdout in place of words.
        yes: Asks nothing.
        arguments: The command line, for whoever wants to go on with a chain that was stopped.

    Raises:
        UsageError: If `from_step` is no step, or there is no earlier run to go on with.
    """
    if from_step is not None and from_step not in STEPS:
        raise UsageError(f"--from {from_step} is no step", fix=nearest(from_step, STEPS))
    first = STEPS.index(from_step) if from_step else 0
    run_dir = latest_run_dir(workload, needs=_needs(first)) if first else _fresh(workload)
    chain = _Chain(
        workload=workload,
        source=source,
        run_dir=run_dir,
        first=first,
        prices=prices,
        quiet=as_json,
        assume_yes=yes,
        arguments=arguments,
    )
    _forget_later(run_dir, first)
    say(f"stoker run {source}  →  {relative(run_dir)}", quiet=as_json)
    try:
        code, evaluation = _steps(chain)
    except StokerError as err:
        _report(chain, failure=str(err))
        raise
    except BaseException as err:
        # Ctrl-C or SIGTERM; an error that is none of stoker's is a bug, and no report mends it.
        if not isinstance(err, Exception):
            _say_stopped(chain)
            _report(chain, failure=f"stopped in {chain.doing}")
        raise
    report = _report(chain)
    if as_json:
        print(to_json(evaluation) if evaluation else "null", end="")
    say(step_line("report", relative(report), None), quiet=as_json)
    say(f"next:      stoker run {source} --from train     trains again", quiet=as_json)
    return code


def _say_stopped(chain: _Chain) -> None:
    """Says what is kept of a chain that was stopped before or after its training."""
    if chain.doing == "train":
        # Said where its record was kept.
        return
    done = STEPS[: STEPS.index(chain.doing)]
    kept = ", ".join(relative(chain.run_dir / f"{_RECORD_OF[step]}.json") for step in done)
    again = command_line(chain.arguments, from_step=chain.doing if done else None)
    say(f"stopped in {chain.doing}\nkept:  {kept or 'nothing'}\nagain: {again}", quiet=chain.quiet)


def _steps(chain: _Chain) -> tuple[int, Evaluation | None]:
    workload, run_dir = chain.workload, chain.run_dir
    platform = platform_named(workload.platform, region=region_of(workload))
    catalog = catalog_of(workload, chain.prices)

    def ask(groups: Sequence[Group], decision: Decision | None = None) -> None:
        confirm(
            workload,
            groups,
            catalog=catalog,
            decision=decision,
            assume_yes=chain.assume_yes,
            quiet=chain.quiet,
        )

    def measured() -> Profile:
        cluster = todays_cluster(workload)
        ask([Group.of_today(cluster.dnn)])
        return profile(
            workload,
            cluster=cluster,
            platform=platform,
            run_dir=run_dir / "profile",
            name=f"{run_dir.name}-profile",
            verdict_on_interrupt=False,
        )

    profiled = chain.step(
        "profile",
        Profile,
        measured,
        profile_words,
    )
    decision = chain.step(
        "decide",
        Decision,
        lambda: decide(
            profiled,
            catalog=catalog,
            constraints=workload.constraints,
            training=workload.training,
            feed=workload.feed,
            today=date.today(),
            workload_sha256=workload.digest(),
            processes_per_host=todays_cluster(workload).dnn.processes_per_host,
        ),
        decision_words,
    )
    for text in free_advice(profiled, decision):
        say(step_line("  free", text, None), quiet=chain.quiet)

    def trained() -> Training:
        ask(decision.plan.groups, decision)
        job = prepare(
            workload=workload, groups=decision.plan.groups, run_dir=run_dir, decision=decision
        )
        with following(quiet=chain.quiet, echo=False) as follow:
            return train(
                job,
                platform=platform,
                catalog=catalog,
                decision=decision,
                total_steps=workload.training.total_steps(),
                on_line=follow.line,
                on_progress=follow.progress,
                on_stop=lambda stopped: keep_stopped(
                    stopped,
                    run_dir=run_dir,
                    out=None,
                    again=command_line(chain.arguments, from_step="train"),
                    quiet=chain.quiet,
                ),
            )

    training = chain.step("train", Training, trained, training_words)
    if training.status != "succeeded":
        say(
            f"{printable(training.failure or '', keep=_LINES)}\nlogs: {relative(run_dir / 'logs')}",
            quiet=chain.quiet,
        )
        return exit_code_of(training), None
    evaluation = chain.step(
        "evaluate",
        Evaluation,
        lambda: evaluate(workload=workload, profile=profiled, decision=decision, training=training),
        evaluation_words,
    )
    return (0 if all(gate.passed for gate in evaluation.gates) else 3), evaluation


def profile_words(record: Profile) -> str:
    """Returns the verdict of a profile in one line."""
    step = record.timed_step
    if step.wait_seconds is None:
        return f"a step takes {step.step_seconds * 1000:.1f} ms"
    share = min(1.0, step.wait_seconds / step.step_seconds)
    check = record.check
    unexplained = ""
    if check is not None and not check.explained:
        unexplained = f", in the state {check.state}" if check.state else ", unexplained"
    took = f"a step takes {step.step_seconds * 1000:.1f} ms"
    return f"{took}, {share:.0%} of it waiting for data{unexplained}"


def decision_words(record: Decision) -> str:
    """Returns the verdict of a decision in one line."""
    predicted = record.plan.predicted
    promise = f", {predicted.speedup:.2f} times as fast" if predicted else ""
    if record.action == "keep":
        return f"keep {describe(record.plan.groups)}: {record.plan.reason or 'nothing pays'}"
    return f"{record.action}: {describe(record.plan.groups)}{promise}"


def free_advice(profiled: Profile, decision: Decision) -> list[str]:
    """Returns the advice that costs nothing and is worth doing, whichever plan is run."""
    free = {fix.id for fix in profiled.fixes if fix.cost == "none"} | {"num-workers"}
    return [advice.text for advice in decision.advice if advice.id in free]


def evaluation_words(record: Evaluation) -> str:
    """Returns the verdict of an evaluation in one line."""
    gates = ", ".join(
        f"{gate.metric} {'not reported' if gate.value is None else f'{gate.value:.4g}'} "
        f"{'passed' if gate.passed else 'FAILED'}"
        for gate in record.gates
    )
    performance = record.performance
    if performance is None:
        return gates or "no gate"
    error = performance.prediction_error
    side = "over" if (error or 0.0) > 0 else "under"
    promise = "" if error is None else f", {abs(error):.1%} {side} prediction"
    promise += f", {band_words(performance)}" if performance.band else ""
    speed = f"{performance.speedup:.2f} times as fast{promise}"
    return f"{gates}; {speed}" if gates else speed


def _fresh(workload: Workload) -> Path:
    run_dir = new_run_dir(workload.name)
    write_text(run_dir / "workload.sha256", workload.digest() + "\n")
    write_json(run_dir / "workload.json", workload)
    return run_dir


def _needs(first: int) -> tuple[str, ...]:
    return tuple(f"{_RECORD_OF[step]}.json" for step in STEPS[:first])


def _forget_later(run_dir: Path, first: int) -> None:
    """Removes what the steps to come will write: an old record must not pass for a new one."""
    for step in STEPS[first:]:
        (run_dir / f"{_RECORD_OF[step]}.json").unlink(missing_ok=True)
    if first <= STEPS.index("train"):
        for folder in ("hosts", "logs"):
            shutil.rmtree(run_dir / folder, ignore_errors=True)


def _report(chain: _Chain, *, failure: str | None = None) -> Path:
    command = f"stoker run {chain.source}"
    return report_of_run(chain.run_dir, workload=chain.workload, command=command, failure=failure)
