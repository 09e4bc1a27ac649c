"""Cost and prediction of a job, printed before it starts, and the question whether to start it.

Prices come from `catalog`; what a run has cost so far is counted in `launch/spending.py`.
"""

from collections.abc import Sequence
from datetime import date

import msgspec

from stoker.catalog import Catalog, catalog_of
from stoker.decide.advise import warnings_of_prices
from stoker.decide.choose import own_storage_words, step_time_words
from stoker.decide.pricing import break_even_words
from stoker.environment import named_instance_type
from stoker.errors import DeclinedError, UsageError
from stoker.record_words import estimates_in_words
from stoker.records import (
    Decision,
    Group,
    PlatformName,
    Predicted,
    Workload,
    bare_type,
    groups_in_words,
)
from stoker.records.decision import START_UP_SECONDS, predicted_of
from stoker.records.platforms import platform_of_type
from stoker.terminal import ask, say
from stoker.units import apart, as_fast, duration, usd

_PRICES_FIX = "give prices: constraints.prices_file, or --prices FILE"


def confirm(
    workload: Workload,
    groups: Sequence[Group],
    *,
    catalog: Catalog,
    decision: Decision | None,
    assume_yes: bool,
    quiet: bool,
    is_profile: bool = False,
) -> None:
    """Prints what the job will cost and asks; does not ask where there is no terminal.

    Raises UsageError if a training run could or should cost more than the workload allows, and
    DeclinedError if the answer is no.

    Args:
        workload: With its limits on what a run may cost.
        groups: The hosts that are asked about.
        catalog: Prices.
        decision: The decision whose plan they are, with its prediction; None: they were named.
        assume_yes: Whether nothing is asked.
        quiet: Whether nothing is printed, nor asked.
        is_profile: Whether only a profile is paid for, to which no limit of a training run applies.
    """
    if workload.platform_info.is_this_machine:
        return
    if not is_profile:
        _check_run(workload, catalog.usd_per_hour(groups))
        _check_prediction(workload, groups, catalog=catalog, decision=decision)
    for line in bill(workload, groups, catalog=catalog, decision=decision):
        say(line, quiet=quiet)
    for line in price_words(groups, catalog=catalog, decision=decision):
        say(line, quiet=quiet)
    if not is_profile and (words := limit_words(workload, groups, decision=decision)):
        say(words, quiet=quiet)
    _ask(assume_yes=assume_yes or quiet)


def say_unused_types(workload: Workload, groups: Sequence[Group], *, quiet: bool) -> None:
    """Prints a note where the local platform does not start the instance type that is named.

    A job of one host may name any type: on a machine of that type its record then names what it
    ran on. Elsewhere the user may expect that type. For more hosts the platform refuses it.
    """
    if not workload.platform_info.is_this_machine or sum(group.count for group in groups) != 1:
        return
    here = named_instance_type()
    for group in groups:
        name = bare_type(group.instance_type)
        # STOKER_INSTANCE_TYPE says that this machine is of that type.
        if name.startswith("local.") or (here and name == bare_type(here)):
            continue
        other = platform_of_type(group.instance_type)
        say(
            f"note: {group.instance_type} is not started: the platform is {workload.platform}, so "
            "it all runs on this machine, and the records have that name; to start one: --platform "
            f"{other}",
            quiet=quiet,
        )


def confirm_run(workload: Workload, *, assume_yes: bool, quiet: bool) -> None:
    """Asks before a pipeline's run, which decides on its cluster later; raises DeclinedError."""
    catalog = catalog_of(workload)
    today = _todays_groups(workload)
    price = catalog.usd_per_hour(today)
    if today:
        line = bill(workload, today, catalog=catalog, decision=None)[0]
        say(f"profile on {line}", quiet=quiet)
        for words in price_words(today, catalog=catalog, decision=None):
            say(words, quiet=quiet)
    limit = _limit_of_run(workload, price, is_estimate=bool(catalog.estimates(today)))
    say(f"then the training, on the cluster that the run decides on; {limit}", quiet=quiet)
    _ask(assume_yes=assume_yes or quiet)


def _limit_of_run(workload: Workload, price: float | None, *, is_estimate: bool) -> str:
    """Returns what a run may cost; `price`: of today's hosts, in dollars an hour."""
    most = workload.known_constraints.max_usd_per_hour
    of_run = workload.constraints.max_usd
    limit = "without a limit per hour: set constraints.max_usd_per_hour"
    if most and price is None:
        limit = f"today's price is not known, so that {usd(most)} per hour is no limit"
    elif most and price is not None and price > most * (1 + 1e-9):
        limit = f"other clusters at most {usd(most)} per hour, and today's costs more"
    elif most:
        limit = f"at most {usd(most)} per hour{_at_most(workload, most)}"
    if of_run and price is None:
        # Compiling, starting and the training refuse it; a bare command may come here all the same.
        return f"{limit}; max_usd cannot be kept without a price: the training would be refused"
    if of_run:
        key = "max_usd"
        if is_estimate:
            key = "max_usd, counted by an estimated price"
        return f"{limit}; the run is ended at {usd(of_run)} ({key})"
    words = limit_words(workload, (), decision=None)
    if words:
        return f"{limit}; {words}"
    return limit


def price_words(
    groups: Sequence[Group], *, catalog: Catalog, decision: Decision | None
) -> list[str]:
    """Returns what is to be known of the hosts' prices: estimates, another region, their age.

    Args:
        groups: The hosts to pay.
        catalog: Prices, with their region and date.
        decision: What it has said already is left out.
    """
    used = [catalog.get(group.instance_type) for group in groups if _is_known(group, catalog)]
    priced = [instance for instance in used if instance.usd_per_hour is not None]
    if not priced:
        return []
    prices = catalog.prices(priced, today=date.today())
    words = warnings_of_prices(prices, platform=catalog.info)
    if prices.estimated:
        words.append(f"~ is by an estimated price: {estimates_in_words(prices.estimated)}")
    if decision:
        # It has said these.
        words = [text for text in words if text not in decision.warnings]
    return [f"note: {text}" for text in words]


def say_prices(workload: Workload, *, platform: PlatformName, quiet: bool) -> None:
    """Prints what is to be known of the prices that a pipeline will count by."""
    placed = msgspec.structs.replace(workload, platform=platform)
    today = _todays_groups(placed)
    for words in price_words(today, catalog=catalog_of(placed), decision=None):
        say(words, quiet=quiet)


def _todays_groups(workload: Workload) -> list[Group]:
    """Returns today's hosts; none where the workload names no cluster."""
    if workload.cluster is None:
        return []
    return [Group.of_today(workload.cluster.dnn)]


def _is_known(group: Group, catalog: Catalog) -> bool:
    try:
        catalog.get(group.instance_type)
    except UsageError:
        return False
    return True


def _at_most(workload: Workload, usd_per_hour: float, *, is_estimate: bool = False) -> str:
    seconds = workload.max_run_seconds
    # Only where the platform ends it after a time.
    if seconds is None:
        return ""
    most = usd(usd_per_hour * seconds / 3600, is_estimate=is_estimate)
    return f", at most {most} for this run (max_run_seconds {duration(seconds)})"


def limit_words(workload: Workload, groups: Sequence[Group], *, decision: Decision | None) -> str:
    """Returns at how many dollars a run is ended, or what to set where nothing ends it."""
    limit = workload.constraints.max_usd
    if not limit and workload.max_run_seconds:
        return ""
    if not limit:
        key = f"{workload.platform}.max_run_seconds"
        return f"the run has no limit: set {key} or constraints.max_usd"
    promise = predicted_of(groups, decision)
    if promise is None:
        prediction = "not predicted: without a decision"
    elif promise.run_usd is None:
        prediction = "not predicted: the number of steps is not known (key training)"
    else:
        prediction = f"{usd(promise.run_usd, is_estimate=promise.is_estimate)} predicted"
    return (
        f"the run, with its start: {prediction}; retries are counted as they come; it is ended at "
        f"{usd(limit)} (max_usd)"
    )


def _check_run(workload: Workload, usd_per_hour: float | None) -> None:
    limit = workload.constraints.max_usd_per_run
    seconds = workload.max_run_seconds
    if limit is None:
        return
    where = f"constraints.max_usd_per_run: {limit:g}"
    if seconds is None:
        raise UsageError(
            "the run has no time limit, so its maximum cost is unknown",
            where=where,
            fix=f"set {workload.platform}.max_run_seconds",
        )
    if usd_per_hour is None:
        raise UsageError("a price is unknown", where=where, fix=_PRICES_FIX)
    most = usd_per_hour * seconds / 3600
    # A decision's plan may cost exactly the limit.
    if most > limit * (1 + 1e-9):
        cost, allowed = apart(most, limit)
        raise UsageError(
            f"the run can cost ${cost}, above ${allowed}: {usd(usd_per_hour)} per hour for "
            f"{duration(seconds)}",
            where=where,
            fix=f"lower {workload.platform}.max_run_seconds, use fewer or smaller hosts, or raise "
            "the limit",
        )


def _check_prediction(
    workload: Workload, groups: Sequence[Group], *, catalog: Catalog, decision: Decision | None
) -> None:
    limit = workload.constraints.max_usd
    if limit is None:
        return
    where = f"constraints.max_usd: {limit:g}"
    if catalog.usd_per_hour(groups) is None:
        raise UsageError("a price is unknown", where=where, fix=_PRICES_FIX)
    promise = predicted_of(groups, decision)
    if promise is None or promise.run_usd is None:
        return
    if promise.run_usd > limit * (1 + 1e-9):
        cost, allowed = apart(promise.run_usd, limit)
        raise UsageError(
            f"the run is predicted to cost ${cost}, above ${allowed}",
            where=where,
            fix="train fewer steps, take a cheaper plan, or raise the limit: --max-usd",
        )


def _ask(*, assume_yes: bool) -> None:
    refused = DeclinedError("cancelled", fix="use --yes to start without this question")
    ask("start it", assume_yes=assume_yes, refused=refused)


def bill(
    workload: Workload, groups: Sequence[Group], *, catalog: Catalog, decision: Decision | None
) -> list[str]:
    """Returns the lines on the job's cost per hour and to start, its prediction, and break-even.

    Args:
        workload: Where it runs, and for how long at most.
        groups: The hosts to pay.
        catalog: Prices.
        decision: The decision whose plan they are; None: without a prediction.
    """
    price = catalog.usd_per_hour(groups)
    is_estimate = bool(catalog.estimates(groups))
    costs = "price unknown"
    start_up = []
    if price is not None:
        per_hour = usd(price, is_estimate=is_estimate)
        most = _at_most(workload, price, is_estimate=is_estimate)
        costs = f"{per_hour} per hour in total{most}"
        start_usd = usd(price * START_UP_SECONDS / 3600, is_estimate=is_estimate)
        start_up.append(
            f"start-up: all hosts for about {START_UP_SECONDS / 60:.0f} min before the first step, "
            f"{start_usd} (an estimate)"
        )
    line = f"{workload.platform}: {groups_in_words(groups)}, {costs}"
    promise = predicted_of(groups, decision)
    if decision is None or promise is None:
        return [line, *start_up]
    if decision.plan.action == "keep":
        return [line, _promise(promise), *start_up]
    lines = [line, _promise(promise)]
    if decision.kind == "probable":
        lines.append("a gain is probable, not sure: it is within the error band")
    lines += start_up
    keep = next((plan.predicted for plan in decision.plans if plan.action == "keep"), None)
    if keep:
        lines.append(break_even_words(promise, keep))
    return lines


def _promise(promise: Predicted) -> str:
    total = ""
    if promise.total_hours is not None and promise.total_usd is not None:
        dollars = usd(promise.total_usd, is_estimate=promise.is_estimate)
        total = f"; the whole training {promise.total_hours:.2f} h, {dollars}"
    return (
        f"predicted: {step_time_words(promise, has_band=True)}, "
        f"{as_fast(promise.speedup)}{own_storage_words(promise)}{total}"
    )
