"""The report of a run: one HTML file that opens offline, without a script, in light and dark."""

import contextlib
import functools
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

import jinja2
from markupsafe import Markup

from stoker.decide import local_core_words
from stoker.decide.advise import BETWEEN_UNSEEN
from stoker.decide.choose import LIMIT_NAMES
from stoker.decide.ranking import cores
from stoker.feed.timeline import typical_step
from stoker.profile.explain import TERMS, term
from stoker.record_words import (
    balance_words,
    estimate_words,
    group_arguments,
    plan_name,
    todays_group,
)
from stoker.records import (
    Decision,
    Evaluation,
    GpuLoad,
    Limit,
    Measured,
    Plan,
    Predicted,
    Profile,
    StepTerms,
    Training,
    Workload,
    groups_in_words,
    write_text,
)
from stoker.records.outcome import outcome_of
from stoker.report.bad_sample_rows import bad_sample_story
from stoker.report.epochs import epoch_columns, epoch_table, is_first_batch_shared
from stoker.report.feed_picture import FeedStory, draw_feed, read_feed
from stoker.report.gpu_picture import GpuStrip, draw_gpus, gpu_rows, read_gpu_strip
from stoker.report.memory_rows import memory_story
from stoker.report.plans import draw_plans
from stoker.report.step_times import (
    Strip,
    describe_windows,
    draw_bar,
    draw_strips,
    flat_steps,
    read_steps,
)
from stoker.report.svg import Drawing
from stoker.report.verdict import (
    Figures,
    JudgedRun,
    collect,
    host_names,
    judge,
    transform_rows,
)
from stoker.step_model import WAITS, limit_words
from stoker.units import (
    NBSP,
    NOT_KNOWN,
    TimeUnit,
    capital,
    count,
    digits,
    longer,
    metric,
    numbered,
    percent,
    signed_percent,
    size,
    time_unit,
    times,
    usd,
    whole,
)

_PLANS_AT_ONCE = 10
_WIDTHS = {"wide": 960.0, "narrow": 360.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedRun:
    """A run to report, whole or ended early: then some of its records are missing.

    Attributes:
        environment: Facts to show. `command` is the command line of the run.
        before_timeline: CSV of the baseline's steps in the profile's as-is phase; without it the
            profile's medians are drawn; likewise for `after_timeline`.
        feed_file: CSV of rates (see figures.feed_intervals), if the run had a data group.
        before_gpus: CSV of the GPUs' load in the profile (see figures.gpu_log), if there is one.
        after_gpus: CSV of the GPUs' load during the run, likewise.
        bad_samples_file: List of samples that were skipped or replaced, if there is one.
        log_files: Logs to name; those below the report's folder become links.
        failure: Why the run ended early, if no record has it.
        is_planned: Nothing was to be run after the decision.
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
    feed_file: Path | None = None
    before_gpus: Path | None = None
    after_gpus: Path | None = None
    bad_samples_file: Path | None = None
    log_files: Sequence[Path] = ()
    failure: str | None = None
    is_planned: bool = False

    @property
    def is_profiled_here(self) -> bool:
        """Whether the profile was taken on today's hosts: else its steps are another machine's."""
        return not (self.decision and self.decision.taken_elsewhere)

    @property
    def profiled(self) -> StepTerms | None:
        """The profiled step, if one was timed."""
        if self.profile is None:
            return None
        return self.profile.step

    @property
    def measured(self) -> Measured | None:
        """The steps of the training run, if they were measured."""
        if self.training is None:
            return None
        return self.training.measured

    @property
    def host_names(self) -> dict[str, str]:
        """Short names of the training's hosts."""
        return host_names(self.training)


def collect_strips(run: ReportedRun) -> list[Strip]:
    """Returns before and after, if known: a timeline, else the record's medians."""
    decision = run.decision
    training = run.training
    before: Strip | None = None
    if run.is_profiled_here:
        before = _strip("Before", "today's cluster", run.before_timeline, run.profiled)
    cluster = "the chosen cluster"
    if decision:
        cluster = plan_name(decision.plan, today=todays_group(decision))
    elif training:
        cluster = groups_in_words(training.groups)
    name = "After" if before else "This run"
    after = _strip(name, cluster, run.after_timeline, run.measured)
    return [strip for strip in (before, after) if strip]


def _strip(
    name: str, cluster: str, file: Path | None, step: StepTerms | Measured | None
) -> Strip | None:
    """Returns a run's strip: of its timeline, else of its record's medians; None: of neither."""
    timeline = recorded = None
    if step and step.wait_seconds is not None and step.step_seconds > 0:
        recorded = step.step_seconds, step.wait_seconds
    if file:
        timeline = read_steps(file)
    if timeline is None and recorded:
        timeline = flat_steps(*recorded)
    # Steps of no length cannot be drawn to scale.
    if timeline is None or typical_step(timeline.steps)[0] <= 0:
        return None
    return Strip(name, cluster, timeline, recorded)


def collect_gpu_strips(run: ReportedRun) -> list[GpuStrip]:
    """Returns the GPUs' load before and after, if it was kept."""
    profile = run.profile
    training = run.training
    earlier: Sequence[GpuLoad] = ()
    if profile and profile.observed and run.is_profiled_here:
        earlier = profile.observed.gpus
    now: Sequence[GpuLoad] = ()
    if training:
        now = training.gpus
    first = read_gpu_strip("Before", run.before_gpus, earlier)
    name = "After" if first else "This run"
    second = read_gpu_strip(name, run.after_gpus, now)
    return [strip for strip in (first, second) if strip is not None]


class _Draw(Protocol):
    def __call__(self, *, width: float, name: str) -> Drawing | None: ...


def _picture(name: str, draw: _Draw) -> dict[str, Markup]:
    """Returns the drawing in two widths, of which the style sheet shows one; empty: none.

    Text in a picture shrinks with it, so one size cannot serve a desk and a telephone.
    """
    drawings = {key: draw(width=width, name=f"{name}-{key}") for key, width in _WIDTHS.items()}
    return {key: drawing.markup() for key, drawing in drawings.items() if drawing}


@dataclass(frozen=True, slots=True)
class PlanRow:
    """A row of the table of plans; `index` is its rank, from 0."""

    index: int
    plan: Plan
    name: str
    chosen: bool
    is_probable: bool
    bar: Markup | None
    is_measured: bool

    @property
    def is_needed(self) -> bool:
        """Whether the row is always shown: the chosen plan and today's cluster."""
        return self.chosen or self.is_probable or self.plan.action == "keep"


def write_report(path: Path, run: ReportedRun) -> None:
    """Writes the report of a run.

    Raises:
        UsageError: If the file cannot be written.
    """
    figures = collect(
        profile=run.profile,
        decision=run.decision,
        training=run.training,
        evaluation=run.evaluation,
    )
    steps = [figures.baseline.seconds, figures.measured.seconds]
    if run.decision:
        promises = [plan.predicted for plan in run.decision.plans if plan.predicted]
        steps += [promise.counted_seconds for promise in promises]
    unit = time_unit(steps)
    columns = epoch_columns(
        profile=run.profile,
        measured=run.measured,
        is_profiled_here=run.is_profiled_here,
        is_first_shared=is_first_batch_shared(
            run.workload.feed, profile=run.profile, training=run.training
        ),
    )
    fixes = run.profile.fixes if run.profile else ()
    context = {
        **_records(run),
        **_judgement(run, figures, unit),
        "memory": memory_story(run.training, profile=run.profile, names=run.host_names),
        **_pictures(run, unit),
        **_commands(run),
        "epochs": epoch_table(columns, unit=unit, fixes=fixes),
        "bad_samples": bad_sample_story(run.training, file=run.bad_samples_file),
        "bad_samples_href": _beside(run.bad_samples_file, path.parent),
        "logs": [(log.name, _href(log, path.parent)) for log in run.log_files],
    }
    # The template reads what is of a record only where there is that record.
    if run.profile:
        context |= _of_profile(run.profile)
    if run.decision:
        context |= _of_decision(run.decision)
    if run.training:
        context |= _of_training(run.training)
    page = _filled(unit).get_template("report.html.jinja").render(context)
    # A name from a broken log may hold a surrogate, which UTF-8 cannot encode.
    write_text(path, page.encode("utf-8", "replace").decode("utf-8"))


def _records(run: ReportedRun) -> dict[str, object]:
    """Returns the run's records and facts, as they are."""
    decision = run.decision
    training = run.training
    evaluation = run.evaluation
    return {
        "run_id": run.run_id,
        "workload": run.workload,
        "profile": run.profile,
        "decision": decision,
        "taken": decision and decision.taken_elsewhere,
        "training": training,
        "evaluation": evaluation,
        "outcome": training and evaluation and outcome_of(training, evaluation.gates),
        "warnings": _warnings(run),
        "environment": {key: text for key, text in run.environment.items() if key != "command"},
    }


def _warnings(run: ReportedRun) -> list[str]:
    """Returns the warnings of evaluation and decision, less what the run itself has answered."""
    warnings: list[str] = []
    for record in (run.evaluation, run.decision):
        if record:
            warnings += record.warnings
    times = run.measured.epochs if run.measured else None
    if times and times.between:
        return [warning for warning in warnings if warning != BETWEEN_UNSEEN]
    return warnings


def _of_profile(profile: Profile) -> dict[str, object]:
    """Returns the tables of a step's terms and of the cost of transforms."""
    step = profile.step
    return {
        "terms": [
            (name, title.strip(), value)
            for name, title in TERMS
            if step and (value := term(step, name)) is not None
        ],
        "transforms": transform_rows(profile.transforms),
    }


def _of_decision(decision: Decision) -> dict[str, object]:
    """Returns the words of a decision, and its table of plans in two parts."""
    rows = _plan_rows(decision)
    return {
        "local_core": local_core_words(decision),
        "estimates": estimate_words(decision.prices.estimated),
        "today_limit": limit_words(decision.bottleneck),
        "rows": [row for row in rows if row.index < _PLANS_AT_ONCE or row.is_needed],
        "more_rows": [row for row in rows if row.index >= _PLANS_AT_ONCE and not row.is_needed],
    }


def _of_training(training: Training) -> dict[str, object]:
    """Returns the tables of a training run: its events, its GPUs, and what it was made from."""
    names = host_names(training)
    return {
        "host_names": names,
        "events": _events(training, names),
        "origin": sorted(training.lineage.facts().items()),
        "gpu_rows": gpu_rows(training.gpus, names=names),
        "balance": capital(balance_words(training)),
    }


def _judgement(run: ReportedRun, figures: Figures, unit: TimeUnit) -> dict[str, object]:
    """Returns the figures, and the verdict on them."""
    nominal = run.workload.platform_info.is_this_machine
    if run.decision:
        nominal = not run.decision.prices.is_billed
    judged = JudgedRun(
        figures=figures,
        unit=unit,
        nominal=nominal,
        profile=run.profile,
        decision=run.decision,
        training=run.training,
        evaluation=run.evaluation,
        failure=run.failure,
        is_planned=run.is_planned,
    )
    seconds = figures.baseline.accelerator_seconds or figures.predicted.accelerator_seconds
    return {
        "figures": figures,
        "unit": unit,
        "nominal": nominal,
        "has_accelerators": bool(seconds),
        "step_note": _step_note(figures, unit, has_run=_has_run(run)),
        "wait_note": _wait_note(figures),
        "verdict": judge(judged),
    }


def _has_run(run: ReportedRun) -> bool:
    return bool(run.training or run.evaluation)


def _step_note(figures: Figures, unit: TimeUnit, *, has_run: bool) -> str:
    """Returns what stands below the time of a step: what it was before, and within epochs.

    Args:
        figures: The steps.
        unit: The page's unit of time.
        has_run: Whether the time is measured; else it is predicted.
    """
    before = figures.baseline
    now = figures.measured
    parts = []
    if not has_run:
        now = figures.predicted
        parts.append("predicted")
    if before.seconds is not None:
        parts.append(f"before: {unit.show(before.seconds)}")
    if figures.is_longer:
        within = f"within epochs {unit.show(now.within)}"
        if now.within and now.seconds and now.within > now.seconds:
            # Of a run whose steps became shorter, or longer: the other time is a mean.
            within = f"the median within epochs {unit.show(now.within)}"
        if before.within is not None:
            within += f", before: {unit.show(before.within)}"
        parts.append(within)
    return "; ".join(parts)


def _wait_note(figures: Figures) -> str:
    """Returns what stands below a run's share of waiting: within epochs, of ranks, and before."""
    before = figures.baseline
    now = figures.measured
    is_of_whole = now.whole_wait_share is not None
    parts = []
    if is_of_whole:
        parts.append(f"within epochs {percent(now.wait_share)}")
    if now.least_wait_share is not None:
        parts.append(now.wait_words("over the ranks"))
    if before.wait_share is not None:
        earlier = f"before: {percent(before.wait_share)}"
        if is_of_whole and before.whole_wait_share is not None:
            earlier = f"before: {percent(before.whole_wait_share)}"
            earlier += f", within epochs {percent(before.wait_share)}"
        if before.loads_itself:
            earlier += ", in which the trainer loads its own batches"
        parts.append(earlier)
    return "; ".join(parts)


def _pictures(run: ReportedRun, unit: TimeUnit) -> dict[str, object]:
    strips = collect_strips(run)
    gpu_strips = collect_gpu_strips(run)
    feed = _feed_story(run)
    decision = run.decision
    return {
        "strips": strips,
        "strip_picture": strips and _picture("strips", partial(draw_strips, strips, unit=unit)),
        "strip_caption": describe_windows(strips),
        "plans_picture": decision and _picture("plans", partial(draw_plans, decision, unit=unit)),
        "gpu_picture": gpu_strips and _picture("gpus", partial(draw_gpus, gpu_strips)),
        "gpu_strips": gpu_strips,
        "feed": feed,
        "feed_picture": feed and _picture("feed", partial(draw_feed, feed)),
    }


def _feed_story(run: ReportedRun) -> FeedStory | None:
    if run.feed_file is None:
        return None
    share: float | None = None
    if run.measured:
        share = run.measured.wait_share
    return read_feed(
        run.feed_file,
        names=run.host_names,
        does_loading_wait=does_loading_wait(run.profile),
        wait_share=share,
    )


def _commands(run: ReportedRun) -> dict[str, object]:
    workload = run.workload
    decision = run.decision
    train: list[str] = []
    if decision:
        # The command, as the workload's file may not be where the report is read.
        train = ["stoker", "train", "--platform", workload.platform]
        train += [*group_arguments(decision.plan.groups), "--", *workload.command]
    return {
        "command": run.environment.get("command", ""),
        "train_command": shlex.join(train),
        "workload_command": shlex.join(workload.command),
    }


# Cached: compiling the template takes longer than rendering it.
@functools.cache
def _filled(unit: TimeUnit) -> jinja2.Environment:
    filled = jinja2.Environment(
        loader=jinja2.PackageLoader("stoker.report"),
        autoescape=True,
        # A wrong name in a template is an error in a test, not a blank in a user's report.
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filled.filters.update(
        time=unit.show,
        bare=unit.bare,
        usd=usd,
        percent=percent,
        signed=signed_percent,
        times=times,
        metric=metric,
        whole=whole,
        count=count,
        numbered=numbered,
        size=size,
        cpu_seconds=_cpu_seconds,
        cores=lambda outcome: f"{cores(outcome):.3g}",
        limit=_limit_name,
        longer=lambda error: longer(error, "page"),
    )
    return filled


def _limit_name(promise: Predicted, limit: Limit) -> str:
    # Where no host has an accelerator, the step's own computing is what would come next.
    if limit == "accelerator" and promise.accelerator_seconds == 0:
        return "computing"
    return LIMIT_NAMES[limit]


def does_loading_wait(profile: Profile | None) -> bool | None:
    """Returns whether a single loader worker waits for its reads; None: not measured."""
    if profile is None or profile.step is None:
        return None
    step = profile.step
    if not step.loader_cpu_seconds or step.loader_wall_seconds is None:
        return None
    return step.loader_wall_seconds > WAITS * step.loader_cpu_seconds


def _events(training: Training, names: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Returns time, host and text of each event; time is seconds after the first, if known."""
    began: datetime | None = None
    rows = []
    for event in training.events:
        when = event.when
        # TypeError: one of two lacks its time zone.
        with contextlib.suppress(ValueError, TypeError):
            moment = datetime.fromisoformat(when)
            began = began or moment
            when = f"{(moment - began).total_seconds():.1f} s"
        rows.append((when, names.get(event.host or "", event.host or ""), event.what))
    return rows


def _cpu_seconds(value: float | None) -> str:
    if value is None:
        return NOT_KNOWN
    return f"{digits(value, 3, max_places=4)}{NBSP}s"


def _plan_rows(decision: Decision) -> list[PlanRow]:
    predicted = [plan.predicted for plan in decision.plans if plan.predicted]
    largest = max((outcome.counted_high for outcome in predicted), default=0.0)
    # The chosen plan may have another reason than the same plan in the list.
    key = (decision.plan.action, decision.plan.groups)
    same = (i for i, plan in enumerate(decision.plans) if (plan.action, plan.groups) == key)
    chosen = next(same, None)
    today = todays_group(decision)
    rows = []
    for index, plan in enumerate(decision.plans):
        # The step of today's cluster, unless the profile was taken elsewhere.
        is_measured = plan.action == "keep" and decision.taken_elsewhere is None
        bar = None
        if plan.predicted:
            bar = draw_bar(plan.predicted, is_measured=is_measured, largest=largest)
        name = plan_name(plan, today=today)
        is_probable = decision.probable is not None and plan.groups == decision.probable.groups
        rows.append(PlanRow(index, plan, name, index == chosen, is_probable, bar, is_measured))
    return rows


def _beside(file: Path | None, folder: Path) -> str:
    return "" if file is None else _href(file, folder)


def _href(log: Path, folder: Path) -> str:
    """Returns the relative address of a log; empty unless it is below the report's folder."""
    try:
        inside = log.resolve().relative_to(folder.resolve())
    except ValueError:
        # A link out of the folder would break when the folder is moved.
        return ""
    return "./" + quote(inside.as_posix())
