"""The decision on a profile that has only `observed`: no step was timed."""

from collections.abc import Iterator
from datetime import date

import msgspec

from stoker.catalog import Catalog, Instance
from stoker.decide.advise import (
    before_money,
    unfed_advice,
    warnings_of_prices,
)
from stoker.decide.pricing import (
    PlanRules,
    allowed_types,
)
from stoker.record_words import unfed_words
from stoker.records import (
    Advice,
    Answer,
    Constraints,
    Decision,
    FeedSettings,
    Group,
    Observed,
    Plan,
    Prices,
    Profile,
    TodaysGroup,
)
from stoker.records.base import sha256_of
from stoker.units import percentage, times, usd

_NOTHING = "no step was timed, so nothing can be predicted for another cluster"
# Smaller ones have little network, and one of their cores is not for loading.
_MIN_VCPUS = 8


def decide_observed(
    profile: Profile,
    *,
    catalog: Catalog,
    constraints: Constraints,
    is_asked: bool,
    today: date,
    feed: FeedSettings,
    processes_per_host: int | None,
) -> Decision:
    """Decides on a profile that has only `observed`: today's cluster is kept. Pure.

    Raises UsageError if today's type is not in the catalog. is_asked: clusters were named, too.
    """
    assert profile.observed is not None
    now = catalog.get(profile.host.instance_type)
    dnn = TodaysGroup(
        instance_type=now.type,
        count=profile.host.count,
        processes_per_host=processes_per_host or max(1, now.accelerators),
    )
    keep = Plan(action="keep", groups=(Group.of_today(dnn),), reason=_NOTHING)
    unfed = unfed_words(profile.loader, feed)
    suspect = profile.observed.suspect
    # No plan is checked against them: only how prices are compared is asked.
    rules = PlanRules(
        constraints=constraints, catalog=catalog, today=now, allowed=None, total_steps=None
    )
    priced = [now]
    best = None
    if suspect == "cpu" and not unfed:
        best = _best_data_type(catalog, constraints)
    if best:
        priced.append(best)
    prices = catalog.prices(priced, today=today)
    prices = msgspec.structs.replace(prices, purchase=rules.purchase)
    again = Advice(
        id="profile",
        text=how_to_profile(profile),
        when=before_money(is_billed=prices.is_billed),
    )
    return Decision(
        profile_sha256=sha256_of(profile),
        workload_sha256=profile.workload_sha256,
        workload_keys=profile.workload_keys,
        bottleneck="unexplained",
        action="keep",
        plan=keep,
        verdict="unknown",
        plans=(keep,),
        path=_path(profile.observed),
        advice=(again, *_advice_on_observed(profile, now, best, suspect=suspect, unfed=unfed)),
        warnings=tuple(_warnings(now, prices, catalog, is_asked=is_asked)),
        prices=prices,
        objective=constraints.objective,
        constraints=constraints,
    )


def _path(observed: Observed) -> tuple[Answer, ...]:
    """Returns the flow chart's questions, of which means over a job answer none."""
    cpu = observed.cpu_utilization
    gpu = observed.gpu_utilization
    seen = f"CPU {_load_words(cpu)}, GPU {_load_words(gpu)}"
    meaning = {
        "cpu": f"probably: {seen}, as means over the job; only a profile shows waiting",
        "accelerator": f"probably not: {seen}; but GPUs that wait for each other count as busy",
        "neither": f"probably not: {seen}; steps wait for something else, or for one thread",
        "unknown": f"{seen}: not enough evidence",
    }[observed.suspect]
    because = {
        "Do the measured parts explain the step?": "no step was timed: only how busy the hosts "
        "were is known",
        "Is the CPU the limit?": meaning,
        "Is the best change worth more than its error band?": _NOTHING,
    }
    return tuple(
        Answer(question=question, answer="unknown", because=reason)
        for question, reason in because.items()
    )


def _load_words(utilization: float | None) -> str:
    if utilization is None:
        return "not known"
    return percentage(utilization)


def _warnings(now: Instance, prices: Prices, catalog: Catalog, *, is_asked: bool) -> Iterator[str]:
    yield from warnings_of_prices(prices, platform=catalog.info)
    if is_asked:
        yield f"what the named groups would do is not known: {_NOTHING}"
    if now.usd_per_hour is None:
        yield f"{now.type} has no price: give one with --prices FILE"


def _advice_on_observed(
    profile: Profile, now: Instance, best: Instance | None, *, suspect: str, unfed: str
) -> Iterator[Advice]:
    if unfed:
        yield unfed_advice(unfed, profile)
    elif suspect == "cpu":
        text = "A data group or a larger type of the family may pay; lighter transforms cost "
        when = "the profile says that loading is the limit"
        yield Advice(id="cpu-bound", text=f"{text}nothing.", when=when)
        if best and best.usd_per_hour and now.usd_per_hour:
            # Price per hour of today's hosts with this one, over that of today's: a step that is
            # faster by as much costs the same.
            price = usd(best.usd_per_hour, is_estimate=bool(best.estimate))
            ratio = 1 + best.usd_per_hour / (now.usd_per_hour * profile.host.count)
            text = (
                f"One {best.type} added to today's hosts ({price} per hour) would "
                f"pay for itself from {times(ratio)}x on; whether it gets there is not known."
            )
            yield Advice(id="break-even", text=text)
    elif suspect == "neither":
        text = "More loader workers, prefetching and faster storage come before any host: today's "
        yield Advice(id="idle-cpus", text=f"{text}CPUs are not busy.")
    elif suspect == "accelerator":
        text = "A data group would probably change nothing: look at the model first (mixed "
        yield Advice(id="accelerator", text=f"{text}precision, compilation, batch size).")


def how_to_profile(profile: Profile) -> str:
    notes = profile.what.get("notes")
    if profile.what.get("source") != "process tree" or not isinstance(notes, list) or not notes:
        return "Profile the training, three minutes on today's cluster: stoker profile."
    return f"Profile the training so that its steps are seen. Last time: {notes[0]}."


def _best_data_type(catalog: Catalog, constraints: Constraints) -> Instance | None:
    """Returns the allowed CPU-only type with the most CPU for its price."""
    names = allowed_types(constraints, catalog)
    # The user allows none.
    if not constraints.max_data_hosts:
        return None
    able = [
        # CoreMark per dollar; of equal ones the name decides, so that a decision can be repeated.
        (instance.coremark_per_vcpu * instance.vcpus / instance.usd_per_hour, instance.type)
        for instance in catalog.instances
        if instance.accelerators == 0
        and instance.usd_per_hour
        and not instance.barred
        and instance.coremark_per_vcpu
        and instance.vcpus >= _MIN_VCPUS
        and (names is None or instance.type in names)
        and (instance.in_training_enum or not catalog.info.needs_training_enum)
    ]
    if not able:
        return None
    return catalog.get(max(able)[1])
