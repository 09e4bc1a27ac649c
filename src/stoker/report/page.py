"""The report is one HTML file that opens offline, without a script, in light and dark.

One more chart is a module with its drawing, a `picture_of_...` here, and its place in the template.
"""

import contextlib
import functools
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from urllib.parse import quote

import jinja2
from markupsafe import Markup

from stoker.decide import local_core_words
from stoker.decide.choose import limit_name
from stoker.feed.timeline import typical_step
from stoker.profile.explain import TERMS, term
from stoker.records import (
    Decision,
    Evaluation,
    Plan,
    Profile,
    Training,
    Workload,
    groups_in_words,
    write_text,
)
from stoker.records.outcome import outcome_of
from stoker.records.parts import WAITS, limit_words
from stoker.report.feed_picture import FeedStory, draw_feed, read_feed
from stoker.report.plans import draw_plans, has_front, spots_of
from stoker.report.step_times import (
    Interval,
    Strip,
    describe_windows,
    draw_bar,
    draw_intervals,
    draw_series,
    draw_strips,
    flat_steps,
    read_steps,
)
from stoker.report.verdict import (
    Figures,
    collect,
    group_arguments,
    host_names,
    judge,
    plan_name,
    todays_group,
    transform_rows,
)
from stoker.text import (
    NBSP,
    NOT_KNOWN,
    TimeUnit,
    count,
    digits,
    metric,
    percent,
    signed_percent,
    size,
    time_unit,
    times,
    usd,
    whole,
)

# Two drawings of each picture: text in a picture shrinks with it, so one size cannot serve a
# desk and a telephone. The style sheet shows one of them.
WIDE, NARROW = 960.0, 360.0
_FLAT_STEPS = 200
_PLANS_AT_ONCE = 10


def templates() -> jinja2.Environment:
    """Returns the templates of the report; a page adds its own filters."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader("stoker.report"),
        autoescape=True,
        # A wrong name in a template is an error in a test, not a blank in a user's report.
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


@dataclass(frozen=True, slots=True)
class ReportPicture:
    """Holds the same drawing for wide and for narrow pages."""

    wide: Markup
    narrow: Markup


def collect_strips(
    *,
    profile: Profile | None,
    decision: Decision | None,
    training: Training | None,
    before: Path | None,
    after: Path | None,
) -> list[Strip]:
    """Returns before and after, where known: a timeline, else the medians of the record."""
    strips = []
    # The steps of a profile that was taken elsewhere are another machine's.
    is_here = not (decision and decision.taken_elsewhere)
    timeline = read_steps(before) if before and is_here else None
    step = profile.step if profile and is_here else None
    # How much of a step is waiting is not made up.
    if timeline is None and step and step.wait_seconds is not None:
        wait = min(step.wait_seconds, step.step_seconds)
        timeline = flat_steps(
            wait_seconds=wait,
            compute_seconds=step.step_seconds - wait,
            steps=_FLAT_STEPS,
        )
    if timeline:
        recorded = None
        if step and step.wait_seconds is not None:
            recorded = step.step_seconds, step.wait_seconds
        strips.append(Strip("Before", "today's cluster", timeline, recorded))
    timeline = read_steps(after) if after else None
    if timeline is None and training and training.measured:
        timeline = flat_steps(
            wait_seconds=training.measured.wait_seconds,
            compute_seconds=training.measured.compute_seconds,
            steps=_FLAT_STEPS,
        )
    # A timeline of steps of no length has no scale to be drawn on.
    if timeline and typical_step(timeline.steps)[0] > 0:
        what = groups_in_words(training.groups) if training else "the chosen cluster"
        if decision:
            what = plan_name(decision.plan, today=todays_group(decision))
        recorded = None
        if training and training.measured and training.measured.step_seconds > 0:
            recorded = training.measured.step_seconds, training.measured.wait_seconds
        strips.append(Strip("After" if strips else "This run", what, timeline, recorded))
    return strips


def picture_of_strips(strips: Sequence[Strip], unit: TimeUnit) -> ReportPicture | None:
    """Draws some consecutive steps of each run; None where none is known."""
    if not strips:
        return None
    return ReportPicture(
        draw_strips(strips, unit=unit, width=WIDE, name="strips-wide"),
        draw_strips(strips, unit=unit, width=NARROW, name="strips-narrow"),
    )


def picture_of_series(strips: Sequence[Strip], unit: TimeUnit) -> ReportPicture | None:
    """Draws all steps of each run that kept a timeline; None where none did."""
    # Steps made of medians are all alike: over the run they would say nothing.
    kept = [strip for strip in strips if strip.timeline.measured]
    if not kept:
        return None
    return ReportPicture(
        draw_series(kept, unit=unit, width=WIDE, name="series-wide"),
        draw_series(kept, unit=unit, width=NARROW, name="series-narrow"),
    )


def picture_of_plans(decision: Decision | None, unit: TimeUnit) -> ReportPicture | None:
    """Draws plans by time and money, and by data hosts; None where there is one plan only."""
    if decision is None:
        return None
    wide = draw_plans(decision, unit=unit, width=WIDE, name="plans-wide")
    narrow = draw_plans(decision, unit=unit, width=NARROW, name="plans-narrow")
    return ReportPicture(wide, narrow) if wide and narrow else None


def picture_of_intervals(figures: Figures, unit: TimeUnit) -> ReportPicture | None:
    """Draws baseline, prediction and measurement; None where there is nothing to compare."""
    rows = _intervals(figures)
    # A single bar is compared with nothing.
    if len(rows) < 2:
        return None
    return ReportPicture(
        draw_intervals(rows, unit=unit, width=WIDE, name="intervals-wide"),
        draw_intervals(rows, unit=unit, width=NARROW, name="intervals-narrow"),
    )


def picture_of_feed(story: FeedStory | None) -> ReportPicture | None:
    """Draws wait, batches ready and each host's work over the run; None without a feed."""
    if story is None:
        return None
    return ReportPicture(
        draw_feed(story, width=WIDE, name="feed-wide"),
        draw_feed(story, width=NARROW, name="feed-narrow"),
    )


def _intervals(figures: Figures) -> list[Interval]:
    rows = []
    if figures.baseline is not None:
        spread = figures.baseline_spread
        low, high = (spread.low, spread.high) if spread else (figures.baseline,) * 2
        if figures.is_baseline_scaled:
            rows.append(Interval("Baseline, scaled", "predicted", figures.baseline, low, high))
        else:
            rows.append(Interval("Baseline, measured", "measured", figures.baseline, low, high))
    if figures.predicted is not None:
        low = figures.predicted if figures.predicted_low is None else figures.predicted_low
        high = figures.predicted if figures.predicted_high is None else figures.predicted_high
        rows.append(Interval("Plan, predicted", "predicted", figures.predicted, low, high))
    if figures.measured is not None:
        spread = figures.measured_spread
        low, high = (spread.low, spread.high) if spread else (figures.measured,) * 2
        rows.append(Interval("Plan, measured", "measured", figures.measured, low, high))
    return rows


@dataclass(frozen=True, slots=True)
class PlanRow:
    """The table shows a plan in each row, with its rank, from 0, and its bar."""

    index: int
    plan: Plan
    name: str
    chosen: bool
    bar: Markup | None
    is_measured: bool

    @property
    def is_needed(self) -> bool:
        """Returns whether the table says little without it: what was chosen, and what is today."""
        return self.chosen or self.plan.action == "keep"


@dataclass(frozen=True, slots=True)
class LogLink:
    """The report links to a log of the run; href is empty where it is not below the report."""

    name: str
    href: str


def write_report(
    path: Path,
    *,
    run_id: str,
    workload: Workload,
    profile: Profile | None,
    decision: Decision | None,
    training: Training | None,
    evaluation: Evaluation | None,
    before_timeline: Path | None,
    after_timeline: Path | None,
    environment: Mapping[str, str],
    feed_file: Path | None = None,
    log_files: Sequence[Path] = (),
    failure: str | None = None,
    is_planned: bool = False,
) -> None:
    """Writes the report of a run, whole or not; records that are missing are said to be so.

    Args:
        path: The HTML file, replaced in one go.
        run_id: Id of the run.
        workload: What was asked for.
        profile: Absent where the run ended before it; so are the next three.
        decision: Plans and the choice.
        training: What was run, and measured.
        evaluation: Gates, and promise against measurement.
        before_timeline: CSV of the baseline's steps as the profile saw them, as-is phase only;
            without it the profile's medians are drawn.
        after_timeline: CSV of the leader's steps on the chosen plan; without it the training's
            medians are drawn.
        environment: Facts to show as they are (versions, cores, date). The key `command` holds
            the command line that made the run.
        feed_file: CSV of the feed's rates that the leader wrote (see launch.telemetry); absent
            where the run had no data group.
        log_files: Logs to name; those below the report's folder become links.
        failure: Why the run ended early, where no record says it.
        is_planned: Nothing was to be run after the decision: it is no broken run.

    Raises:
        UsageError: If the file cannot be written.
    """
    figures = collect(profile=profile, decision=decision, training=training, evaluation=evaluation)
    plans = decision.plans if decision else ()
    # One unit for the whole page, so that figures can be compared by eye.
    unit = time_unit(
        [figures.baseline, figures.measured]
        + [plan.predicted.step_seconds for plan in plans if plan.predicted]
    )
    nominal = _is_nominal(workload, decision)
    rows = _plan_rows(decision) if decision else []
    strips = collect_strips(
        profile=profile,
        decision=decision,
        training=training,
        before=before_timeline,
        after=after_timeline,
    )
    names = host_names(training)
    feed = None
    if feed_file:
        feed = read_feed(
            feed_file,
            names=names,
            does_loading_wait=does_loading_wait(profile),
            wait_share=training.measured.wait_share if training and training.measured else None,
        )
    context: dict[str, object] = {
        "run_id": run_id,
        "workload": workload,
        "profile": profile,
        "decision": decision,
        "taken": decision.taken_elsewhere if decision else None,
        "training": training,
        "evaluation": evaluation,
        "outcome": outcome_of(training, evaluation.gates) if training and evaluation else None,
        "figures": figures,
        "unit": unit,
        "nominal": nominal,
        "has_accelerators": bool(
            figures.baseline_accelerator_seconds or figures.predicted_accelerator_seconds
        ),
        "local_core": local_core_words(decision) if decision else "",
        "host_names": names,
        "events": _events(training) if training else [],
        "origin": sorted(training.what.items()) if training else [],
        "today_limit": limit_words(decision.bottleneck) if decision else "",
        "verdict": judge(
            figures=figures,
            unit=unit,
            nominal=nominal,
            profile=profile,
            decision=decision,
            training=training,
            evaluation=evaluation,
            failure=failure,
            is_planned=is_planned,
        ),
        # The rest is folded away in the page, which has no script to ask for it.
        "rows": [row for row in rows if row.index < _PLANS_AT_ONCE or row.is_needed],
        "more_rows": [row for row in rows if row.index >= _PLANS_AT_ONCE and not row.is_needed],
        "strips": strips,
        "strip_picture": picture_of_strips(strips, unit),
        "strip_caption": describe_windows(strips) if strips else "",
        "series_picture": picture_of_series(strips, unit),
        "plans_picture": picture_of_plans(decision, unit),
        "plans_front": decision is not None and has_front(decision, spots_of(decision)),
        "feed": feed,
        "feed_picture": picture_of_feed(feed),
        "interval_picture": picture_of_intervals(figures, unit),
        "environment": {key: text for key, text in environment.items() if key != "command"},
        "command": environment.get("command", ""),
        "train_command": _train_command(workload, decision) if decision else "",
        "workload_command": shlex.join(workload.command),
        "logs": [_log_link(log, path.parent) for log in log_files],
        "terms": _terms(profile) if profile else [],
        "transforms": transform_rows(profile.transforms) if profile else [],
    }
    page = _filled(unit).get_template("report.html.jinja").render(context)
    # A name from a broken log may hold half a character, which no file can.
    write_text(path, page.encode("utf-8", "replace").decode("utf-8"))


# Jinja translates a template into Python when it is first asked for: that takes longer than a page.
@functools.cache
def _filled(unit: TimeUnit) -> jinja2.Environment:
    filled = templates()
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
        size=size,
        cpu_seconds=_cpu_seconds,
        limit=limit_name,
    )
    return filled


def does_loading_wait(profile: Profile | None) -> bool | None:
    """Returns whether a loader worker alone waits for what it reads; None: not measured."""
    step = profile.step if profile else None
    if step is None or not step.loader_cpu_seconds or step.loader_wall_seconds is None:
        return None
    return step.loader_wall_seconds > WAITS * step.loader_cpu_seconds


def _events(training: Training) -> list[tuple[str, str, str]]:
    """Returns when, host and what of each event; when is seconds after the first, if times say."""
    names = host_names(training)
    began: datetime | None = None
    rows = []
    for event in training.events:
        when = event.when
        with contextlib.suppress(ValueError):
            moment = datetime.fromisoformat(when)
            began = began or moment
            with contextlib.suppress(TypeError):
                # One of two may lack its zone.
                when = f"{(moment - began).total_seconds():.1f} s"
        rows.append((when, names.get(event.host or "", event.host or ""), event.what))
    return rows


def _is_nominal(workload: Workload, decision: Decision | None) -> bool:
    if decision is None:
        return workload.platform_info.is_this_machine
    return decision.prices.is_nominal


def _cpu_seconds(value: float | None) -> str:
    """Writes CPU- or accelerator-seconds per step."""
    return NOT_KNOWN if value is None else digits(value, 3, max_places=4) + NBSP + "s"


def _is_measured(plan: Plan, decision: Decision) -> bool:
    """Returns whether the plan's step was measured: today's, unless the profile is another's."""
    return plan.action == "keep" and decision.taken_elsewhere is None


def _plan_rows(decision: Decision) -> list[PlanRow]:
    predicted = [plan.predicted for plan in decision.plans if plan.predicted]
    largest = max((each.step_seconds_high for each in predicted), default=0.0)
    # The chosen plan may carry a reason that its row in the list does not.
    same = [(plan.action, plan.groups) for plan in decision.plans]
    chosen_key = (decision.plan.action, decision.plan.groups)
    chosen = same.index(chosen_key) if chosen_key in same else None
    today = todays_group(decision)
    rows = []
    for index, plan in enumerate(decision.plans):
        bar = None
        if plan.predicted:
            interval = Interval(
                "",
                "measured" if _is_measured(plan, decision) else "predicted",
                plan.predicted.step_seconds,
                plan.predicted.step_seconds_low,
                plan.predicted.step_seconds_high,
            )
            bar = draw_bar(interval, largest=largest)
        name = plan_name(plan, today=today)
        is_chosen = index == chosen
        rows.append(PlanRow(index, plan, name, is_chosen, bar, _is_measured(plan, decision)))
    return rows


def _terms(profile: Profile) -> list[tuple[str, str, float]]:
    """Returns each known term of a global step: the field's name, what it is, seconds."""
    step = profile.step
    if step is None:
        return []
    named = [(name, title.strip(), term(step, name)) for name, title in TERMS]
    return [(name, title, value) for name, title, value in named if value is not None]


def _train_command(workload: Workload, decision: Decision) -> str:
    # The command, not the workload file: a report may be read where that file is not.
    words = ["stoker", "train", "--platform", workload.platform, *group_arguments(decision.plan)]
    return shlex.join([*words, "--", *workload.command])


def _log_link(log: Path, folder: Path) -> LogLink:
    try:
        inside = log.resolve().relative_to(folder.resolve())
    except ValueError:
        # A link out of the folder breaks as soon as the folder is moved or sent.
        return LogLink(log.name, "")
    return LogLink(str(inside), "./" + quote(inside.as_posix()))
