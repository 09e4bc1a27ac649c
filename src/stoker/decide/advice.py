"""Advice and warnings of a decision, from the profile's states and fixes."""

from collections.abc import Iterator, Mapping

from stoker.decide.choose import best_of
from stoker.decide.model import WAITS
from stoker.decide.price import Space
from stoker.records import (
    Advice,
    Bottleneck,
    Decision,
    Plan,
    Prices,
    Profile,
    Storage,
)
from stoker.records.decision import STALE_DAYS
from stoker.units import as_fast, ms, numbered, percentage

# An accelerator that computes for more of a step has no time for decoding.
_MOST_BUSY = 0.7
# A state with a smaller share of a step leaves enough for a plan to gain.
_MIN_SHARE = 0.15
# Reasons for which more hosts would not help.
_FIX_FIRST = {
    "throttled": "the container's CPU quota stops the training",
    "straggler": "one rank keeps all others waiting",
    "storage": "the storage is the limit: all loaders share a storage or network that gives no "
    "more, however many workers there are",
}
_STORAGE = (
    "Read nearer, faster or less: a copy on a local disk, more memory for the page cache, a faster "
    "volume; fewer and larger files (shards), smaller or compressed samples."
)
_DATA_HOSTS: Mapping[Storage, str] = {
    "per_host": "Each data host has a separate storage.",
    "shared": "Data hosts read from the same storage, and add nothing to its rate.",
    "unknown": "Data hosts help only if each has a separate storage, which is not known "
    "(constraints.storage: per_host or shared).",
}
_REFRESH = "python tools/refresh_prices.py"
# Smaller doubts get no warning.
_WORTH_A_LINE = 0.1


def fix_first(profile: Profile, *, storage: Storage, bottleneck: Bottleneck) -> str:
    """Returns what to fix before anything that costs; empty: nothing."""
    named = {state.id for state in profile.states if (state.share or 0.0) >= _MIN_SHARE}
    if bottleneck == "storage":
        named.add("storage")
    if storage == "per_host":
        # The model judges plans by it.
        named.discard("storage")
    for name, words in _FIX_FIRST.items():
        if name in named:
            return words
    step = profile.step
    waits = (step.loader_wall_seconds or 0.0) > WAITS * (step.loader_cpu_seconds or 0.0)
    # Hosts of a larger cluster would wait as well; more workers cost nothing.
    if waits and "workers" in named and any(fix.id == "num_workers" for fix in profile.fixes):
        return "loader workers wait for reads, and more of them are free"
    return ""


def advice_of(space: Space, decision: Decision) -> tuple[Advice, ...]:
    """Returns the advice, each once: free fixes first, then what needs work on the training."""
    by_id: dict[str, Advice] = {}
    for id, text, when in _advice(space, decision):
        by_id.setdefault(id, Advice(id=id, text=text, when=when or None))
    return tuple(by_id.values())


def _advice(space: Space, decision: Decision) -> Iterator[tuple[str, str, str]]:
    """Yields the id of each advice, its text, and when it applies."""
    profile = space.profile
    work = space.work
    limit = space.bottleneck
    before = "before any money is spent" if space.is_billed else ""
    taken = space.taken
    if taken and taken.accelerator_step_source == "unknown":
        text = f"Loading alone takes {ms(work.measured_seconds)} per batch on {work.hosts} x "
        text += f"{taken.taken_as}. If a step there takes less with its data at hand, the training "
        text += "waits: time one, then add --accelerator-step-seconds."
        yield "accelerator-step", text, "before any money is spent"
    if limit == "storage" or any(state.id == "storage" for state in profile.states):
        # Where the model judges plans by it, nothing is to be fixed first.
        when = "" if work.storage == "per_host" else before
        yield "storage", f"{_STORAGE} {_DATA_HOSTS[work.storage]}", when
    free = free_of(space, decision)
    for fix in profile.fixes:
        # The plan that costs nothing has its number of workers already.
        if free is None or fix.id != "num_workers":
            when = "" if fix.cost == "none" else f"{fix.cost} work"
            yield fix.id, fix.text, before if fix.id in _FIX_FIRST else when
    if limit == "unexplained" and not (work.is_too_noisy or profile.unmeasured or taken):
        text = "Profile the training again, longer and on a quiet machine."
        yield "profile-again", text, before
    yield from _advice_on_hosts(space, decision)
    yield from _advice_on_workers(space, decision, free)


def _advice_on_hosts(space: Space, decision: Decision) -> Iterator[tuple[str, str, str]]:
    """Yields what other hosts would do, or fewer CPU-seconds on these."""
    work = space.work
    limit = space.bottleneck
    busy = work.accelerator_seconds / work.measured_seconds
    is_idle = bool(work.reference.accelerators) and busy < _MOST_BUSY
    machine = space.catalog.max_total_vcpus
    is_full = machine is not None and machine <= work.vcpus
    if is_idle and is_full and decision.verdict == "none" and limit != "launch":
        text = f"The accelerators compute for {percentage(busy)} of a step, and this machine has "
        text += "no cores left for them. What other hosts would do: "
        yield "elsewhere", f"{text}stoker decide profile.json --as TYPE.", ""
    if space.unfed:
        fix = space.profile.loader.unsendable_fix if space.profile.loader else ""
        text = "; ".join(filter(None, (space.unfed, fix)))
        yield "unfed", f"{text}.", "data hosts are wanted"
    if is_idle and limit == "cpu":
        text = "Decode and augment on the accelerators (DALI, nvJPEG, torchvision v2): "
        when = f"the samples are pictures; accelerators are busy {percentage(busy)} of a step"
        yield "offload-gpu", f"{text}docs/how-to/decode-on-the-gpu.md.", when
    if decision.action == "scale_out":
        text = "More replicas make a larger global batch"
        if decision.plan.global_batch_size:
            text += f": {decision.plan.global_batch_size} samples instead of "
            text += str(space.profile.step.global_batch_size)
        text += ". Try a learning rate larger by the same factor, with a warm-up. "
        yield "global-batch", f"{text}Step times are given for today's global batch.", ""


def _advice_on_workers(
    space: Space, decision: Decision, free: Plan | None
) -> Iterator[tuple[str, str, str]]:
    """Yields a number of loader workers; `free` is the plan of one that costs nothing."""
    work = space.work
    # A larger host does not help a script that asks for today's number of workers.
    plan = decision.plan if decision.action == "scale_up" else free
    if plan and plan.predicted:
        dnn = plan.groups[0]
        text = f"Give the loaders {numbered(dnn.workers_per_host or 0, 'worker')} per host"
        if plan.action == "scale_up":
            text += f" on {dnn.instance_type}"
        if work.num_workers is not None:
            text += f" instead of {work.num_workers}"
        if plan is free and not work.unexplained:
            # An unexplained profile supports no figure.
            text += f": {as_fast(plan.predicted.speedup)}, at no cost"
        yield "num-workers", f"{text}.", ""
    if work.shards and space.bottleneck in ("cpu", "workers", "latency"):
        text = f"The stream has {numbered(work.shards, 'shard')}, one for each loader worker: "
        text += "num_workers is the number of its shards too, if it divides itself by "
        text += "get_worker_info(). Set more, then profile and decide again."
        yield "shards", text, "small work on the dataset"


def free_of(space: Space, decision: Decision) -> Plan | None:
    """Returns the plan that costs nothing: more loader workers, here on more of its cores."""
    plans = [best_of(space, decision, "tune")]
    if decision.prices.is_nominal and decision.action == "heterogeneous":
        # A larger training host is the same machine, with cores that data hosts would take.
        plans.append(best_of(space, decision, "scale_up"))
    return min(filter(None, plans), key=space.rank, default=None)


def warnings_of(space: Space, prices: Prices) -> Iterator[str]:
    """Yields what makes the figures doubtful, what cannot be checked, and what is in no plan."""
    today = space.today
    catalog = space.catalog
    # Where other programs ran, no band is believed at all.
    for text, width in space.work.doubts.items():
        if width >= _WORTH_A_LINE and not space.work.is_too_noisy:
            yield f"the bands are wider: {text}"
    if prices.hosts_region:
        yield (
            f"the hosts are in {prices.hosts_region}, the prices are of {prices.region}: "
            f"{_REFRESH} --region {prices.hosts_region} > prices.csv, and constraints.prices_file"
        )
    if prices.stale:
        yield f"the prices of {prices.date} are older than {STALE_DAYS} days: {_REFRESH}"
    for name in sorted(space.allowed or ()):
        if problem := space.why_unusable(catalog.get(name)):
            yield f"{name} is allowed, but it is in no plan: {problem}"
    if space.constraints.deadline_hours and space.total_steps is None:
        yield "the deadline is not checked: the number of steps is not known"
    if today.usd_per_hour is None:
        yield f"{today.type} has no price: give it with {catalog.added_by}"
