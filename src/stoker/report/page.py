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
from stoker.report.feed_picture import draw_feed, read_feed
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
from stoker.report.verdict import collect, group_arguments, host_names, judge, transform_rows
from stoker.text import (
    NBSP,
    NOT_KNOWN,
    TimeUnit,
    count,
    digits,
    longer,
    metric,
    percent,
    signed_percent,
    size,
    time_unit,
    times,
    usd,
    whole,
)
from stoker.words import plan_name, todays_group

_FLAT_STEPS = 200
_PLANS_AT_ONCE = 10


@dataclass(frozen=True, slots=True)
class ReportPicture:
    """The same drawing in two widths, of which the style sheet shows one.

    Text in a picture shrinks with it, so one size cannot serve a desk and a telephone.
    """

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
    """Returns before and after, as far as known: a timeline, else the record's medians."""
    strips = []
    # Steps of a profile that was taken elsewhere are another machine's.
    is_here = not (decision and decision.taken_elsewhere)
    timeline = read_steps(before) if before and is_here else None
    step = profile.step if profile and is_here else None
    if timeline is None and step and step.wait_seconds is not None:
        wait = min(step.wait_seconds, step.step_seconds)
        timeline = flat_steps(
            wait_seconds=wait, compute_seconds=step.step_seconds - wait, steps=_FLAT_STEPS
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
    # Steps of no length cannot be drawn to scale.
    if timeline and typical_step(timeline.steps)[0] > 0:
        what = groups_in_words(training.groups) if training else "the chosen cluster"
        if decision:
            what = plan_name(decision.plan, today=todays_group(decision))
        recorded = None
        if training and training.measured and training.measured.step_seconds > 0:
            recorded = training.measured.step_seconds, training.measured.wait_seconds
        strips.append(Strip("After" if strips else "This run", what, timeline, recorded))
    return strips


class _Draw(Protocol):
    def __call__(self, *, width: float, name: str) -> Drawing | None: ...


def _picture(name: str, draw: _Draw) -> ReportPicture | None:
    wide = draw(width=960.0, name=f"{name}-wide")
    narrow = draw(width=360.0, name=f"{name}-narrow")
    return ReportPicture(wide.markup(), narrow.markup()) if wide and narrow else None


@dataclass(frozen=True, slots=True)
class PlanRow:
    """A row of the table of plans; `index` is its rank, from 0."""

    index: int
    plan: Plan
    name: str
    chosen: bool
    bar: Markup | None
    is_measured: bool

    @property
    def is_needed(self) -> bool:
        """Whether the row is always shown: the chosen plan and today's cluster."""
        return self.chosen or self.plan.action == "keep"


def write_report(
    path: Path,
    *,
    run_id: str,
    workload: Workload,
    profile: Profile | None,
    decision: Decision | None,
    training: Training | None,
    evaluation: Evaluation | None,
    environment: Mapping[str, str],
    before_timeline: Path | None = None,
    after_timeline: Path | None = None,
    feed_file: Path | None = None,
    log_files: Sequence[Path] = (),
    failure: str | None = None,
    is_planned: bool = False,
) -> None:
    """Writes the report of a run, also of one that ended early, without some of its records.

    Args:
        path: The HTML file, replaced atomically.
        before_timeline: CSV of the baseline's steps in the profile's as-is phase; without it the
            profile's medians are drawn.
        after_timeline: CSV of the leader's steps on the chosen plan; without it the training's
            medians are drawn.
        environment: Facts to show (versions, cores, date). `command` is the command line of the
            run.
        feed_file: CSV of the feed's rates (see launch.feed_log), if the run had a data group.
        log_files: Logs to name; those below the report's folder become links.
        failure: Why the run ended early, if no record has it.
        is_planned: Nothing was to be run after the decision.

    Raises:
        UsageError: If the file cannot be written.
    """
    figures = collect(profile=profile, decision=decision, training=training, evaluation=evaluation)
    plans = decision.plans if decision else ()
    unit = time_unit(
        [figures.baseline, figures.measured]
        + [plan.predicted.step_seconds for plan in plans if plan.predicted]
    )
    nominal = decision.prices.is_nominal if decision else workload.platform_info.is_this_machine
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
        "origin": sorted(training.lineage.facts().items()) if training else [],
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
        "rows": [row for row in rows if row.index < _PLANS_AT_ONCE or row.is_needed],
        "more_rows": [row for row in rows if row.index >= _PLANS_AT_ONCE and not row.is_needed],
        "strips": strips,
        "strip_picture": _picture("strips", partial(draw_strips, strips, unit=unit))
        if strips
        else None,
        "strip_caption": describe_windows(strips) if strips else "",
        "plans_picture": _picture("plans", partial(draw_plans, decision, unit=unit))
        if decision
        else None,
        "feed": feed,
        "feed_picture": _picture("feed", partial(draw_feed, feed)) if feed else None,
        "environment": {key: text for key, text in environment.items() if key != "command"},
        "command": environment.get("command", ""),
        "train_command": _train_command(workload, decision) if decision else "",
        "workload_command": shlex.join(workload.command),
        "logs": [(log.name, _href(log, path.parent)) for log in log_files],
        "terms": _terms(profile) if profile else [],
        "transforms": transform_rows(profile.transforms) if profile else [],
    }
    page = _filled(unit).get_template("report.html.jinja").render(context)
    # A name from a broken log may hold a surrogate, which UTF-8 cannot encode.
    write_text(path, page.encode("utf-8", "replace").decode("utf-8"))


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
        size=size,
        cpu_seconds=_cpu_seconds,
        limit=limit_name,
        longer=lambda error: longer(error, "page"),
    )
    return filled


def does_loading_wait(profile: Profile | None) -> bool | None:
    """Returns whether a single loader worker waits for its reads; None: not measured."""
    step = profile.step if profile else None
    if step is None or not step.loader_cpu_seconds or step.loader_wall_seconds is None:
        return None
    return step.loader_wall_seconds > WAITS * step.loader_cpu_seconds


def _events(training: Training) -> list[tuple[str, str, str]]:
    """Returns time, host and text of each event; time is seconds after the first, if known."""
    names = host_names(training)
    began: datetime | None = None
    rows = []
    for event in training.events:
        when = event.when
        with contextlib.suppress(ValueError):
            moment = datetime.fromisoformat(when)
            began = began or moment
            with contextlib.suppress(TypeError):
                # One of two may lack its time zone.
                when = f"{(moment - began).total_seconds():.1f} s"
        rows.append((when, names.get(event.host or "", event.host or ""), event.what))
    return rows


def _cpu_seconds(value: float | None) -> str:
    """Writes CPU- or accelerator-seconds per step."""
    return NOT_KNOWN if value is None else digits(value, 3, max_places=4) + NBSP + "s"


def _plan_rows(decision: Decision) -> list[PlanRow]:
    predicted = [plan.predicted for plan in decision.plans if plan.predicted]
    largest = max((each.step_seconds_high for each in predicted), default=0.0)
    # The chosen plan may have another reason than the same plan in the list.
    same = [(plan.action, plan.groups) for plan in decision.plans]
    chosen_key = (decision.plan.action, decision.plan.groups)
    chosen = same.index(chosen_key) if chosen_key in same else None
    today = todays_group(decision)
    rows = []
    for index, plan in enumerate(decision.plans):
        # The step of today's cluster, unless the profile was taken elsewhere.
        is_measured = plan.action == "keep" and decision.taken_elsewhere is None
        bar = None
        if plan.predicted:
            bar = draw_bar(plan.predicted, is_measured=is_measured, largest=largest)
        name = plan_name(plan, today=today)
        rows.append(PlanRow(index, plan, name, index == chosen, bar, is_measured))
    return rows


def _terms(profile: Profile) -> list[tuple[str, str, float]]:
    """Returns field, title and seconds of each known term of a step."""
    step = profile.step
    if step is None:
        return []
    named = [(name, title.strip(), term(step, name)) for name, title in TERMS]
    return [(name, title, value) for name, title, value in named if value is not None]


def _train_command(workload: Workload, decision: Decision) -> str:
    # The command, as the workload's file may not be where the report is read.
    words = ["stoker", "train", "--platform", workload.platform, *group_arguments(decision.plan)]
    return shlex.join([*words, "--", *workload.command])


def _href(log: Path, folder: Path) -> str:
    """Returns the relative address of a log; empty unless it is below the report's folder."""
    try:
        inside = log.resolve().relative_to(folder.resolve())
    except ValueError:
        # A link out of the folder would break when the folder is moved.
        return ""
    return "./" + quote(inside.as_posix())
