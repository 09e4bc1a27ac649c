"""What a run tells beside its result: drift, idle hosts, old figures, a model that waits.

Made in one place from the records, so that terminal, webhook, summary, report and metrics agree.
"""

from collections.abc import Iterator, Sequence
from datetime import date
from typing import get_args

from stoker.records.decision import Decision, groups_in_words
from stoker.records.profile import Profile
from stoker.records.profile_origin import MAX_PROFILE_DAYS
from stoker.records.training import (
    GroupSpending,
    Notice,
    NoticeKind,
    Performance,
    Training,
)
from stoker.units import ms, percentage, usd

KINDS: tuple[NoticeKind, ...] = get_args(NoticeKind)
# Older prices count as stale.
STALE_DAYS = 90
# As StokerDataGroupIdle of configs/kubernetes/alerts.yaml.
IDLE_SHARE = 0.8
# Of a step: one that waits longer would wait longer still with fewer data hosts.
_MAX_WAIT_SHARE = 0.2


def notices_of(
    *,
    profile: Profile,
    decision: Decision,
    training: Training,
    performance: Performance | None,
    today: date | None = None,
    waits_in: str = "",
) -> tuple[Notice, ...]:
    """Returns what a run tells, in the order of `KINDS`. Pure.

    Args:
        today: Day on which the profile's age counts. None: its age is not told.
        waits_in: Group of the registry in which the model waits for approval; empty: it does not.
    """
    texts: dict[NoticeKind, list[str]] = {
        "prediction_outside": _outside(performance),
        "data_group_idle": [*_idle(training)],
        "decision_changed": _changed(decision),
        "prices_stale": _stale(decision),
        "profile_old": _old(profile, today),
        "approval_pending": _waiting(waits_in),
    }
    return tuple(Notice(kind=kind, text=text) for kind in KINDS for text in texts[kind])


def notice_figures(notices: Sequence[Notice]) -> dict[str, float]:
    """Returns 1 or 0 for each kind, by the metric's name: an alarm needs the zeros to end."""
    kinds = {notice.kind for notice in notices}
    return {f"told_{kind}": float(kind in kinds) for kind in KINDS}


def _outside(performance: Performance | None) -> list[str]:
    # Other programs that kept the machine busy are reported instead: the figures do not count.
    if performance is None or performance.band is None or performance.busy:
        return []
    if performance.is_inside_band is not False:
        return []
    band = performance.band
    seconds = performance.measured.counted_seconds
    return [
        f"a step took {ms(seconds)}, outside the predicted band of {ms(band.low_seconds)} to "
        f"{ms(band.high_seconds)}"
    ]


def _idle(training: Training) -> Iterator[str]:
    measured = training.measured
    has_waited = measured is not None and measured.wait_share > _MAX_WAIT_SHARE
    for group in training.spending:
        if group.is_of_no_use:
            yield group.made_words
        elif _is_idle(group):
            yield _idle_words(group, has_waited=has_waited)


def _is_idle(group: GroupSpending) -> bool:
    # Only data groups have their batches counted.
    is_data = group.batches is not None
    return is_data and group.idle_share is not None and group.idle_share > IDLE_SHARE


def _idle_words(group: GroupSpending, *, has_waited: bool) -> str:
    """Returns what is said of an idle data group.

    Args:
        group: Its spending.
        has_waited: Whether steps waited for data all the same.
    """
    name = "data group" if group.group == "data" else f"data group {group.group}"
    words = f"the {name} was idle {percentage(group.idle_share or 0.0)} of its time"
    if group.idle_usd is not None and group.usd is not None:
        words += f", {usd(group.idle_usd)} of {usd(group.usd)}"
    if has_waited:
        return (
            f"{words}, though steps waited for data: its start was most of the run, or it was late"
        )
    return f"{words}: fewer data hosts would do"


def _changed(decision: Decision) -> list[str]:
    last = decision.previous
    if last is None or not last.is_changed:
        return []
    return [
        f"the decision changed: {groups_in_words(decision.plan.groups)}; in run {last.words} "
        f"{groups_in_words(last.groups)}"
    ]


def _stale(decision: Decision) -> list[str]:
    prices = decision.prices
    if not prices.stale or not prices.is_billed:
        return []
    return [f"the prices of {prices.date} are older than {STALE_DAYS} days"]


def _old(profile: Profile, today: date | None) -> list[str]:
    measured_on = day_of(profile)
    if today is None or measured_on is None:
        return []
    days = (today - measured_on).days
    if days <= MAX_PROFILE_DAYS:
        return []
    # As the decision that used it says.
    words = f"the profile is {days} days old, more than {MAX_PROFILE_DAYS}"
    return [f"{words}: measure again, stoker profile"]


def day_of(profile: Profile) -> date | None:
    """Returns the day on which a profile was measured; None: it is not known."""
    # An early version wrote the time alone.
    when = profile.origin.measured_at if profile.origin else profile.what.get("when")
    if not isinstance(when, str):
        return None
    try:
        return date.fromisoformat(when[:10])
    except ValueError:
        return None


def _waiting(group: str) -> list[str]:
    if group:
        return [f"the model waits for approval in the group {group}"]
    return []
