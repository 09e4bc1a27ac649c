"""Advice and warnings of a decision, from the profile's states and fixes."""

from collections.abc import Iterator, Mapping

from stoker.decide.choose import Case
from stoker.decide.model import WAITS
from stoker.decide.price import Space
from stoker.decide.search import free_plan
from stoker.records import (
    Advice,
    Bottleneck,
    PlatformInfo,
    Prices,
    Profile,
    Storage,
    TakenElsewhere,
)
from stoker.records.decision import STALE_DAYS
from stoker.units import ESTIMATE, as_fast, ms, numbered, percentage

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
_ADVICE = {
    "throttled": "Remove or raise the container's CPU limit, then profile again: with it, "
    "hosts are judged by CPUs that they may not use.",
    "straggler": "Look at the slow rank's host and data, then profile again: more hosts do not "
    "make it faster.",
    "storage": "Read nearer, faster or less: a copy on a local disk, more memory for the page "
    "cache, a faster volume; fewer and larger files (shards), smaller or compressed samples.",
    "gil": "Data hosts cannot do what the trainer's main process does in Python: move it into "
    "the dataset or collate function first.",
    "neighbour": "Loading on the hosts that train slows their accelerators' steps, though none "
    "waits for data; batches from data hosts do not.",
    "launch": "What a step takes without loading is not the GPU's time alone: for a part of each "
    "step no kernel runs, which no host changes. Launch more at once (larger batches, CUDA graphs, "
    "fused optimizers), and ask for results (.item(), .cpu(), print) every some steps only.",
    "other-programs": "Profile again when the machine is quiet: other programs used a part of the "
    "vCPUs, which makes all figures less certain.",
}
_DATA_HOSTS: Mapping[Storage, str] = {
    "per_host": "Each data host has a separate storage.",
    "shared": "Data hosts read from the same storage, and add nothing to its rate.",
    "unknown": "Data hosts help only if each has a separate storage, which is not known "
    "(constraints.storage: per_host or shared).",
}
# Smaller doubts get no warning.
_WORTH_A_LINE = 0.1


def fix_first(profile: Profile, *, storage: Storage, bottleneck: Bottleneck) -> str:
    """Returns what to fix before anything that costs; empty: nothing."""
    step = profile.step
    named = {state.id for state in profile.states if (state.share or 0.0) >= _MIN_SHARE}
    if bottleneck == "storage":
        named.add("storage")
    if storage == "per_host":
        # The model judges plans by it.
        named.discard("storage")
    for name, words in _FIX_FIRST.items():
        if name in named:
            return words
    waits = (step.loader_wall_seconds or 0.0) > WAITS * (step.loader_cpu_seconds or 0.0)
    # Hosts of a larger cluster would wait as well; more workers cost nothing.
    is_free = any(fix.id == "num_workers" for fix in profile.fixes)
    if "workers" in named and is_free and waits:
        return "loader workers wait for reads, and more of them are free"
    return ""


def advice_of(case: Case, taken: TakenElsewhere | None) -> tuple[Advice, ...]:
    """Returns the advice, each once: free fixes first, then what needs work on the training."""
    by_id: dict[str, Advice] = {}
    for id, text, when in _advice(case, taken):
        by_id.setdefault(id, Advice(id=id, text=text, when=when or None))
    return tuple(by_id.values())


def _advice(case: Case, taken: TakenElsewhere | None) -> Iterator[tuple[str, str, str]]:
    """Yields the id of each advice, its text, and when it applies."""
    space = case.space
    profile = case.profile
    storage = space.work.storage
    before = "before any money is spent" if space.ranking.is_billed else ""
    if taken:
        yield _advice_of_taken(space, taken)
    named = [state.id for state in profile.states if state.id in _ADVICE]
    if case.is_busy:
        # The plan's reason says it.
        named = [name for name in named if name != "other-programs"]
    if case.bottleneck == "storage" and "storage" not in named:
        named.append("storage")
    if "storage" in named:
        begin = "The storage is the limit." if case.bottleneck == "storage" else "Steps wait, too."
        text = f"{begin} {_ADVICE['storage']} {_DATA_HOSTS[storage]}"
        # Where the model judges plans by it, nothing is to be fixed first.
        yield "storage", text, "" if storage == "per_host" else before
    for fix in profile.fixes:
        # The chosen plan has its number of workers already; states have their own words.
        is_answered = case.chosen.action == "tune" and fix.id == "num_workers"
        if fix.id not in named and not is_answered:
            yield fix.id, fix.text, "" if fix.cost == "none" else f"{fix.cost} work"
    for name in named:
        is_first = name in _FIX_FIRST or name == "other-programs"
        yield name, _ADVICE[name], before if is_first else ""
    is_again = case.bottleneck == "unexplained" and not case.is_busy and not profile.unmeasured
    if is_again and not taken:
        text = "Profile the training again, longer and on a quiet machine."
        yield "profile-again", text, before
    yield from _advice_on_hosts(case)
    yield from _advice_on_workers(case)


def _advice_on_hosts(case: Case) -> Iterator[tuple[str, str, str]]:
    """Yields what other hosts would do, or fewer CPU-seconds on these."""
    work = case.space.work
    chosen = case.chosen
    busy = work.accelerator_seconds / work.measured_seconds
    is_idle = bool(work.reference.accelerators) and busy < _MOST_BUSY
    machine = case.space.catalog.max_total_vcpus
    is_full = machine is not None and machine <= work.hosts * work.reference.capacity
    has_nothing = case.choice.verdict == "none" and not case.fix_first
    if is_idle and is_full and has_nothing and case.bottleneck != "launch":
        text = f"The accelerators compute for {percentage(busy)} of a step, and this machine has "
        text += "no cores left for them. What other hosts would do: "
        yield "elsewhere", f"{text}stoker decide profile.json --as TYPE.", ""
    if unfed := case.space.unfed:
        shippable = case.profile.loader and case.profile.loader.shippable
        fix = f"; {shippable.fix}" if shippable and shippable.fix else ""
        yield "unfed", f"{unfed}{fix}.", "data hosts are wanted"
    if is_idle and case.bottleneck == "cpu":
        text = "Decode and augment on the accelerators (DALI, nvJPEG, torchvision v2): "
        when = f"the samples are pictures; accelerators are busy {percentage(busy)} of a step"
        yield "offload-gpu", f"{text}docs/how-to/decode-on-the-gpu.md.", when
    if chosen.action == "scale_out":
        text = "More replicas make a larger global batch"
        if work.global_batch_size and chosen.global_batch_size:
            text += f": {chosen.global_batch_size} samples instead of {work.global_batch_size}"
        text += ". Try a learning rate larger by the same factor, with a warm-up. "
        yield "global-batch", f"{text}Step times are given for today's global batch.", ""


def _advice_on_workers(case: Case) -> Iterator[tuple[str, str, str]]:
    """Yields a number of loader workers that costs nothing."""
    work = case.space.work
    has_fix = any(fix.id == "num_workers" for fix in case.profile.fixes)
    plan = case.best_of("tune")
    if plan and plan.predicted and (not has_fix or case.chosen.action == "tune"):
        workers = plan.groups[0].workers_per_host or 0
        promise = f"{as_fast(plan.predicted.speedup)}, at no cost"
        if work.unexplained:
            # An unexplained profile supports no figure.
            promise = "it costs nothing to try; how much it gives is not known"
        text = f"Give the loaders {numbered(workers, 'worker')} per host instead of "
        yield "num-workers", f"{text}{work.num_workers}: {promise}.", ""
    if case.chosen.action == "scale_up":
        # A larger host does not help a script that asks for today's number of workers.
        workers = case.chosen.groups[0].workers_per_host or 0
        text = f"Set num_workers so that each host has {workers} loader workers in all."
        yield "num-workers", text, ""
    if work.shards and case.bottleneck in ("cpu", "workers", "latency"):
        text = f"The stream has {numbered(work.shards, 'shard')}, one for each loader worker: "
        text += "num_workers is the number of its shards too, if it divides itself by "
        text += "get_worker_info(). Set more, then profile and decide again."
        yield "shards", text, "small work on the dataset"


def _advice_of_taken(space: Space, taken: TakenElsewhere) -> tuple[str, str, str]:
    """Returns what would narrow the bands: the accelerator's step, or a profile there."""
    there = taken.taken_as
    work = space.work
    if taken.accelerator_step_source != "unknown":
        text = f"Profile the training on {there}: three minutes there replace all figures that are "
        return "profile-there", f"{text}scaled here.", "before you rent anything large"
    text = f"Loading alone takes {ms(work.measured_seconds)} per batch on {work.hosts} x {there}"
    free = free_plan(space)
    if free is not None and free.predicted is not None:
        workers = free.groups[0].workers_per_host
        text += f", and {ms(free.predicted.step_seconds)} with {workers} workers per host"
    text += ". If a step there takes less with its data at hand, the training waits: "
    text += "time one, then add --accelerator-step-seconds."
    return "accelerator-step", text, "before any money is spent"


def warnings_of(case: Case, prices: Prices) -> Iterator[str]:
    """Yields what makes the figures doubtful, what cannot be checked, and what is in no plan."""
    space = case.space
    today = space.today
    catalog = space.catalog
    is_billed = space.ranking.is_billed
    # Where other programs ran, no band is believed at all.
    for doubt in () if case.is_busy else space.work.doubts:
        if doubt.width >= _WORTH_A_LINE:
            yield f"the bands are wider: {doubt.text}"
    yield from price_warnings(prices, platform=catalog.info)
    for name in sorted(space.allowed or ()):
        if problem := space.why_unusable(catalog.get(name)):
            yield f"{name} is allowed, but it is in no plan: {problem}"
    if space.constraints.deadline_hours and space.total_steps is None:
        yield "the deadline is not checked: the number of steps is not known"
    if today.usd_per_hour is None:
        yield f"{today.type} has no price: give it with {catalog.added_by}"
    for pool in catalog.instances if catalog.has_pools else ():
        # Pools whose price, or whose lack of one, today's pool does not share.
        if pool.type != today.type and (pool.usd_per_hour is None) == is_billed:
            what = "no price" if is_billed else "a price"
            yield f"{pool.type} has {what}, unlike {today.type}: the two are not compared in money"


def price_warnings(prices: Prices, *, platform: PlatformInfo) -> Iterator[str]:
    """Yields that prices are old, or of a region that is not the hosts'."""
    refresh = "stoker catalog" if platform.is_this_machine else "python tools/refresh_prices.py"
    if prices.hosts_region:
        yield (
            f"the hosts are in {prices.hosts_region}, the prices are of {prices.region}: "
            f"{refresh} --region {prices.hosts_region} > prices.csv, and constraints.prices_file"
        )
    if prices.stale:
        yield f"the prices of {prices.date} are older than {STALE_DAYS} days: {refresh}"


def estimate_words(estimated: Mapping[str, str]) -> str:
    """Returns how prices were estimated: `~ estimated: ml.c8i.8xlarge: EC2's $1.5 x 1.20`."""
    words = [f"{name}: {how}" for name, how in sorted(estimated.items())]
    return f"{ESTIMATE} estimated: {'; '.join(words)}"
