"""Which pictures a report can show with what is known of its run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from stoker.records import Decision, Profile, Training
from stoker.report.feed_picture import FeedStory, draw_feed
from stoker.report.figures import Figures, plan_name, todays_group
from stoker.report.intervals import Interval, draw_intervals
from stoker.report.plans_picture import draw_plans
from stoker.report.quantities import TimeUnit
from stoker.report.series import draw_series
from stoker.report.strips import Strip, draw_strips
from stoker.report.timeline import flat_timeline, read_timeline

# Two drawings of each picture: text in a picture shrinks with it, so one size cannot serve a
# desk and a telephone. The style sheet shows one of them.
WIDE, NARROW = 960.0, 360.0
_FLAT_STEPS = 200


@dataclass(frozen=True, slots=True)
class Picture:
    """The same drawing for wide and for narrow pages."""

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
    """Before and after, as far as they are known: a timeline, else the medians of the record."""
    strips = []
    timeline = read_timeline(before) if before else None
    step = profile.step if profile else None
    # How much of a step is waiting is not made up.
    if timeline is None and step and step.wait_seconds is not None:
        wait = min(step.wait_seconds, step.step_seconds)
        timeline = flat_timeline(
            wait_seconds=wait,
            compute_seconds=step.step_seconds - wait,
            steps=_FLAT_STEPS,
        )
    if timeline:
        strips.append(Strip("Before", "today's cluster", timeline.median()[0], timeline))
    timeline = read_timeline(after) if after else None
    if timeline is None and training and training.measured:
        timeline = flat_timeline(
            wait_seconds=training.measured.wait_seconds,
            compute_seconds=training.measured.compute_seconds,
            steps=_FLAT_STEPS,
        )
    if timeline and timeline.median()[0] > 0:
        what = "the chosen cluster"
        if decision:
            what = plan_name(decision.plan, today=todays_group(decision))
        strips.append(Strip("After", what, timeline.median()[0], timeline))
    return strips


def picture_of_strips(strips: Sequence[Strip], unit: TimeUnit) -> Picture | None:
    """Some consecutive steps of each run; None where none is known."""
    if not strips:
        return None
    return Picture(
        draw_strips(strips, unit=unit, width=WIDE, name="strips-wide"),
        draw_strips(strips, unit=unit, width=NARROW, name="strips-narrow"),
    )


def picture_of_series(strips: Sequence[Strip], unit: TimeUnit) -> Picture | None:
    """All steps of each run that kept a timeline; None where none did."""
    kept = [strip for strip in strips if strip.timeline.measured]
    if not kept:
        return None
    return Picture(
        draw_series(kept, unit=unit, width=WIDE, name="series-wide"),
        draw_series(kept, unit=unit, width=NARROW, name="series-narrow"),
    )


def picture_of_plans(decision: Decision | None, unit: TimeUnit) -> Picture | None:
    """The plans by time and money, and by data hosts; None where there is one plan only."""
    if decision is None:
        return None
    wide = draw_plans(decision, unit=unit, width=WIDE, name="plans-wide")
    narrow = draw_plans(decision, unit=unit, width=NARROW, name="plans-narrow")
    return Picture(wide, narrow) if wide and narrow else None


def picture_of_intervals(figures: Figures, unit: TimeUnit) -> Picture | None:
    """Baseline, prediction and measurement; None where there is nothing to compare."""
    rows = _intervals(figures)
    if len(rows) < 2:
        return None
    return Picture(
        draw_intervals(rows, unit=unit, width=WIDE, name="intervals-wide"),
        draw_intervals(rows, unit=unit, width=NARROW, name="intervals-narrow"),
    )


def picture_of_feed(story: FeedStory | None) -> Picture | None:
    """Wait, batches ready and each host's work over the run; None without a feed."""
    if story is None:
        return None
    return Picture(
        draw_feed(story, width=WIDE, name="feed-wide"),
        draw_feed(story, width=NARROW, name="feed-narrow"),
    )


def _intervals(figures: Figures) -> list[Interval]:
    rows = []
    if figures.baseline is not None:
        spread = figures.baseline_spread
        low, high = (spread.low, spread.high) if spread else (figures.baseline,) * 2
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
