"""A decision where no step was timed: what a load suggests, what is not known, and what to do."""

from datetime import date

from stoker.catalog import Catalog, Instance
from stoker.decide.advise import warnings_of_prices
from stoker.records import (
    Advice,
    Answer,
    Constraints,
    Decision,
    Group,
    Observed,
    Plan,
    Profile,
)

_NOTHING = "no step was timed, so nothing can be promised of another cluster"
_CPU = "Is the CPU the limit?"
# Smaller ones have little network, and a core of theirs is not for loading.
_MIN_VCPUS = 8


def decide_observed(
    profile: Profile,
    *,
    catalog: Catalog,
    constraints: Constraints,
    is_asked: bool,
    today: date,
    workload_sha256: str | None = None,
    processes_per_host: int | None = None,
) -> Decision:
    """Keeps today's cluster, and says why nothing else can be said; pure.

    Args:
        profile: One with `observed` only.
        catalog: Types and prices of the platform.
        constraints: What a plan may be.
        is_asked: Whether clusters were named that cannot be predicted now.
        today: The date that prices are old against.
        workload_sha256: Of the workload; absent: the profile's.
        processes_per_host: Trainer processes of a dnn host; absent: one an accelerator.

    Raises:
        UsageError: If today's type is not in the catalog.
    """
    observed = profile.observed
    assert observed is not None
    now = catalog.get(profile.host.instance_type)
    dnn = Group(
        name="dnn",
        role="dnn",
        instance_type=now.type,
        count=profile.host.count,
        processes_per_host=processes_per_host or max(1, now.accelerators),
    )
    keep = Plan(action="keep", groups=(dnn,), reason=_NOTHING)
    best = _best_data_type(catalog, constraints) if observed.suspect == "cpu" else None
    prices = catalog.prices([now, *([best] if best else [])], today=today)
    warnings = list(warnings_of_prices(prices, platform=catalog.platform))
    if is_asked:
        warnings.append(f"what the named groups would do is not known: {_NOTHING}")
    if now.usd_per_hour is None:
        warnings.append(f"{now.type} has no price: give one with --prices FILE")
    return Decision(
        workload_sha256=workload_sha256 or profile.workload_sha256,
        bottleneck="unexplained",
        action="keep",
        plan=keep,
        plans=(keep,),
        path=_path(observed),
        advice=_advice(profile, observed, now, best),
        warnings=tuple(warnings),
        prices=prices,
        objective=constraints.objective,
        constraints=constraints,
    )


def _path(observed: Observed) -> tuple[Answer, ...]:
    seen = f"CPU {_percent(observed.cpu_utilization)}, GPU {_percent(observed.gpu_utilization)}"
    meaning = {
        "cpu": f"probably: {seen}, as means over the job; waiting is seen in a profile only",
        "accelerator": f"probably not: {seen}; but GPUs that wait for each other count as busy",
        "neither": f"probably not: {seen}; steps wait for something else, or for one thread",
        "unknown": f"{seen}: that does not tell",
    }[observed.suspect]
    return (
        Answer(
            question="Do the measured parts explain the step?",
            answer="unknown",
            because="no step was timed: only how busy the hosts were is known",
        ),
        Answer(question=_CPU, answer="unknown", because=meaning),
        Answer(
            question="Is the best change worth more than its error band?",
            answer="unknown",
            because=_NOTHING,
        ),
    )


def _advice(
    profile: Profile, observed: Observed, now: Instance, best: Instance | None
) -> tuple[Advice, ...]:
    advice = [
        Advice(
            id="profile",
            text=_again(profile),
            when="before any money is spent",
        )
    ]
    if observed.suspect == "cpu":
        advice.append(
            Advice(
                id="cpu-bound",
                text="A data group or a larger type of the family may pay; lighter transforms "
                "cost nothing.",
                when="the profile says that loading is the limit",
            )
        )
        if best and best.usd_per_hour and now.usd_per_hour:
            ratio = 1 + best.usd_per_hour / (now.usd_per_hour * profile.host.count)
            advice.append(
                Advice(
                    id="break-even",
                    text=f"One {best.type} beside today's hosts ({best.usd_per_hour:.3f} $/hour) "
                    f"would pay for itself from {ratio:.2f}x on; whether it gets there is not "
                    "known.",
                )
            )
    elif observed.suspect == "neither":
        advice.append(
            Advice(
                id="idle-cpus",
                text="More loader workers, prefetching and faster storage come before any host: "
                "the CPUs that are there are not used up.",
            )
        )
    elif observed.suspect == "accelerator":
        advice.append(
            Advice(
                id="accelerator",
                text="A data group would probably do nothing: look at the model first (mixed "
                "precision, compilation, batch size).",
            )
        )
    return tuple(advice)


def _again(profile: Profile) -> str:
    """How to get a profile with steps."""
    notes = profile.what.get("notes")
    if profile.what.get("source") != "process tree" or not isinstance(notes, list) or not notes:
        return (
            "Profile the training, three minutes on today's cluster: stoker profile. A step's "
            "time alone can be had from its log: --logs FILE."
        )
    return f"Profile the training so that its steps are seen. Last time: {notes[0]}."


def _best_data_type(catalog: Catalog, constraints: Constraints) -> Instance | None:
    """The CPU-only type with the most CPU for its price, of those a plan may have."""
    allowed = constraints.allowed_instance_types
    names = None if allowed is None else {catalog.get(name).type for name in allowed}
    able = [
        (instance.coremark_per_vcpu * instance.vcpus / instance.usd_per_hour, instance.type)
        for instance in catalog.instances
        if instance.accelerators == 0
        and instance.usd_per_hour
        and instance.coremark_per_vcpu
        and instance.vcpus >= _MIN_VCPUS
        and (names is None or instance.type in names)
        and (catalog.platform != "sagemaker" or instance.in_training_enum)
    ]
    if not able or constraints.max_data_hosts == 0:
        return None
    return catalog.get(max(able)[1])


def _percent(value: float | None) -> str:
    return "not known" if value is None else f"{value:.0%}"


__all__ = ["decide_observed"]
