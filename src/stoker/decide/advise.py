"""Advice and warnings of a decision, from the profile's states and fixes."""

from collections.abc import Iterable, Iterator, Mapping

from stoker.catalog import Catalog, Instance, is_burst_type
from stoker.decide.choose import FlowChart, best_of, cluster
from stoker.decide.gpu_decoding import MOST_BUSY, advice_on_decoding, device_loading
from stoker.decide.pricing import PlanRules, why_unusable
from stoker.decide.ranking import error_band
from stoker.record_words import estimates_in_words
from stoker.records import Advice, Bottleneck, Fix, Plan, PlatformInfo, Prices, Profile, Storage
from stoker.records.notices import STALE_DAYS
from stoker.step_model import WAITS
from stoker.units import as_fast, capital, ms, numbered, percentage, times, usd

IN_STEP_FIX = (
    "change it between epochs, or set num_workers in the script if batches may be some steps older "
    "than the loop"
)
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
    "memory": "Free memory first (the profile names what takes it): no loader worker more has room "
    "on a host that trains, and a process may be killed. Batches that data hosts make need none.",
    "other-programs": "Profile again when the machine is quiet: other programs used a part of the "
    "vCPUs, which makes all figures less certain.",
}
_DATA_HOSTS: Mapping[Storage, str] = {
    "per_host": "Each data host has a separate storage.",
    "shared": "Data hosts read from the same storage, and add nothing to its rate.",
    "unknown": "Data hosts help only if each has a separate storage, which is not known "
    "(constraints.storage: per_host or shared)",
}
# Names of states in profiles of early versions.
_FORMERLY = {"network": "storage", "latency": "workers"}
BETWEEN_UNSEEN = (
    "what lies between epochs (validation, checkpoints) was not seen: it is in no figure, "
    "and takes as long with any data hosts"
)
# Smaller doubts get no warning.
_WORTH_A_LINE = 0.1
# Of the chosen plan's time: more is worth a change of the script.
_WORTH_A_START = 0.05


def fix_first(profile: Profile, *, storage: Storage, bottleneck: Bottleneck) -> str:
    """Returns what to fix before anything that costs; empty: nothing."""
    step = profile.timed_step
    named = {
        _FORMERLY.get(state.id, state.id)
        for state in profile.states
        if (state.share or 0.0) >= _MIN_SHARE
    }
    # If the storage's rate is known, the model judges plans by it.
    if storage == "per_host" or step.storage_bytes_per_second is not None:
        named.discard("storage")
    if storage != "per_host" and bottleneck == "storage":
        named.add("storage")
    for name, words in _FIX_FIRST.items():
        if name in named:
            return words
    wall = step.loader_wall_seconds or 0.0
    cpu = step.loader_cpu_seconds or 0.0
    # Hosts of a larger cluster would wait as well; more workers cost nothing.
    is_free = any(fix.id == "num_workers" for fix in profile.fixes)
    if "workers" in named and is_free and wall > WAITS * cpu:
        return "loader workers wait for reads, and more of them are free"
    return ""


def before_money(*, is_billed: bool) -> str | None:
    if is_billed:
        return "before any money is spent"
    return None


def _advice_of_states(chart: FlowChart, profile: Profile) -> Iterator[Advice]:
    """Yields advice for each state that no plan resolves."""
    before = before_money(is_billed=chart.ranking.is_billed)
    named = dict.fromkeys(_FORMERLY.get(state.id, state.id) for state in profile.states)
    if chart.is_busy:
        # The plan's reason says it.
        named.pop("other-programs", None)
    is_awaited = "storage" in named
    yield from _advice_on_storage(chart, is_awaited=is_awaited, before=before)
    for name in named:
        if name in _ADVICE and name != "storage":
            is_first = name in _FIX_FIRST or name == "other-programs"
            text = _words_of_state(name, profile)
            yield Advice(id=name, text=text, when=before if is_first else None)


def _advice_on_storage(
    chart: FlowChart, *, is_awaited: bool, before: str | None
) -> Iterator[Advice]:
    """Yields what to do about a storage that is the limit, is waited for, or comes next.

    Args:
        chart: Inputs of the flow chart, with the chosen plan.
        is_awaited: Whether the profile saw steps wait for it.
        before: Before what it is to be done, as words; None: nothing is billed.
    """
    rival = best_of(chart, "heterogeneous")
    gain = ""
    if rival and rival.predicted and rival.predicted.own_storage_speedup:
        gain = (
            f": {cluster(rival)} would be {as_fast(rival.predicted.speedup)} without, and "
            f"{times(rival.predicted.own_storage_speedup)} times with one"
        )
    if chart.bottleneck == "storage":
        text = "The storage is the limit. "
    elif is_awaited:
        text = "Steps wait for the storage, too. "
    elif gain:
        text = "The storage is the next limit. "
    else:
        return
    text += f"{_ADVICE['storage']} {_DATA_HOSTS[chart.work.storage]}{gain}"
    if chart.work.storage == "per_host":
        # The model judges plans by it: nothing is to be fixed first.
        before = None
    yield Advice(id="storage", text=f"{text.removesuffix('.')}.", when=before)


def _words_of_state(name: str, profile: Profile) -> str:
    fix = next((fix for fix in profile.fixes if fix.id == name == "throttled"), None)
    if fix is None:
        return _ADVICE[name]
    # The profile knows what limits the host it was taken on: a pod has keys for it.
    how = capital(fix.text)
    return f"{how}. Then profile again: with it, hosts are judged by CPUs that they may not use."


def unfed_advice(unfed: str, profile: Profile) -> Advice:
    """Returns what to do so that data hosts can make the batches of the profiled loader."""
    text = unfed
    shippable = profile.loader and profile.loader.shippable
    if shippable and shippable.fix and shippable.why in unfed:
        text += f"; {shippable.fix}"
    return Advice(id="unfed", text=f"{text}.", when="data hosts are wanted")


def advice_of(chart: FlowChart, profile: Profile, *, is_taken: bool = False) -> tuple[Advice, ...]:
    """Returns the advice: free fixes first, then what needs work on the training."""
    of_states = list(_advice_of_states(chart, profile))
    fixes = _advice_of_fixes(chart, profile, of_states)
    named = {advice.id for advice in fixes}
    advice = [
        *(one for one in of_states if one.id == "storage"),
        *fixes,
        *(one for one in of_states if one.id != "storage"),
        *_advice_on_profiling(chart, profile, is_taken=is_taken),
        *_advice_on_hosts(chart, profile),
    ]
    if "num_workers" not in named:
        advice += _advice_on_free_workers(chart)
    more_shards = _advice_on_more_shards(chart)
    if more_shards is not None:
        # It names the workers as well, which find nothing to do without their shards.
        advice = [more_shards, *(one for one in advice if one.id != "num_workers")]
    advice += _advice_on_accelerators(chart, profile)
    # That fix says the same of today's cluster.
    if "smaller_batches" not in named:
        advice += _advice_on_starts(chart)
    advice += _advice_on_more_accelerators(chart)
    advice += _advice_on_chosen(chart)
    return tuple(advice)


def _advice_of_fixes(chart: FlowChart, profile: Profile, of_states: list[Advice]) -> list[Advice]:
    """Returns the profile's fixes, but for those that other advice answers."""
    answered = {advice.id for advice in of_states}
    if chart.chosen.action == "tune":
        # It already has the number of workers.
        answered.add("num_workers")
    return [
        Advice(id=fix.id, text=fix.text, when=_work_words(fix))
        for fix in profile.fixes
        if fix.id not in answered
    ]


def _work_words(fix: Fix) -> str | None:
    if fix.cost == "none":
        return None
    return f"{fix.cost} work"


def _advice_on_hosts(chart: FlowChart, profile: Profile) -> Iterator[Advice]:
    """Yields what to do where this machine is full, or data hosts cannot help the loader."""
    if _is_full(chart):
        busy = percentage(chart.work.accelerator_seconds / chart.work.step_seconds)
        text = f"The accelerators compute for {busy} of a step, and this machine has no cores left "
        text += "for them. What other hosts would do: stoker decide profile.json --as TYPE."
        yield Advice(id="elsewhere", text=text)
    if chart.in_step:
        text = f"{chart.unfed}. {capital(IN_STEP_FIX)}; then profile again."
        yield Advice(id="unfed", text=text, when="data hosts or workers are wanted")
    elif chart.unfed:
        yield unfed_advice(chart.unfed, profile)


def _advice_on_free_workers(chart: FlowChart) -> Iterator[Advice]:
    tuned = best_of(chart, "tune")
    if tuned is None or tuned.predicted is None:
        return
    workers = tuned.groups[0].workers_per_host or 0
    promise = f"{as_fast(tuned.predicted.speedup)}, at no cost"
    if chart.work.unexplained:
        # An unexplained profile supports no figure.
        promise = "it costs nothing to try; how much it gives is not known"
    text = f"Give the loaders {numbered(workers, 'worker')} per host instead of "
    yield Advice(id="num-workers", text=f"{text}{chart.work.num_workers}: {promise}.")


def _advice_on_more_shards(chart: FlowChart) -> Advice | None:
    """Returns what a plan needs that a stream has too few shards for."""
    tunes = (plan for plan in chart.plans if plan.action == "tune" and not plan.feasible)
    plan = next(tunes, None)
    if plan is None or plan.predicted is None:
        return None
    promise = f": {ms(plan.predicted.counted_seconds)} per step, at no cost"
    if chart.work.unexplained:
        promise = "; it costs nothing to try"
    return Advice(id="num-workers", text=f"{capital(plan.reason)}{promise}.")


def _advice_on_more_accelerators(chart: FlowChart) -> Iterator[Advice]:
    wider = best_of(chart, "scale_out")
    is_kept = chart.chosen.action == "keep"
    if wider is None or not is_kept or chart.work.unexplained or chart.fix_first:
        return
    if gain := _gain_of_more(wider, chart):
        text = f"{cluster(wider)} would train on the same samples {gain}"
        yield Advice(
            id="more-accelerators",
            text=f"{text}, with another global batch.",
            when="the training works with a larger batch",
        )


def _advice_on_chosen(chart: FlowChart) -> Iterator[Advice]:
    """Yields what the script has to change with the chosen plan."""
    chosen = chart.chosen
    if chosen.action == "scale_out":
        batch = chart.work.global_batch_size
        larger = chosen.global_batch_size
        text = "More replicas make a larger global batch, replicas x the batch of each"
        if batch and larger:
            text += f": {larger} samples instead of {batch}, {times(larger / batch)} times as many"
        text += ". Try a learning rate larger by the same factor, with a warm-up. "
        text += "Step times are given for today's global batch."
        yield Advice(id="global-batch", text=text)
    # A larger host does not help a script that asks for today's number of workers.
    if chosen.action == "scale_up":
        workers = chosen.groups[0].workers_per_host or 0
        text = f"Set num_workers so that each host has {workers} loader workers in all."
        yield Advice(id="num-workers", text=text)


def _gain_of_more(wider: Plan, chart: FlowChart) -> str:
    """Returns what more accelerators gain: dollars, or time where nothing is billed."""
    outcome = wider.predicted
    if outcome is None:
        return ""
    if chart.ranking.is_billed:
        if outcome.cost_change >= 0:
            return ""
        return f"{percentage(-outcome.cost_change)} cheaper"
    if outcome.speedup <= 1 + error_band(outcome):
        return ""
    return as_fast(outcome.speedup)


def _is_full(chart: FlowChart) -> bool:
    """Whether accelerators wait on a machine whose cores are all used."""
    today = chart.keep.predicted
    return (
        chart.is_machine_full
        and chart.choice.verdict == "none"
        and today is not None
        and chart.bottleneck != "launch"
        and bool(today.accelerator_seconds)
        and today.accelerator_utilization < MOST_BUSY
    )


def _advice_on_accelerators(chart: FlowChart, profile: Profile) -> Iterator[Advice]:
    """Yields advice to load on the accelerators, if the CPU is the limit and they have time."""
    work = chart.work
    if chart.bottleneck != "cpu":
        return
    loading = device_loading(profile, work)
    if loading is not None:
        yield advice_on_decoding(loading, work=work, decoding=profile.gpu_decoding)
        return
    utilization = work.accelerator_seconds / work.step_seconds
    has_room = work.reference.accelerators > 0 and utilization < MOST_BUSY
    # Of a profile without transforms nothing is known that could go there, or could not.
    is_unseen = not profile.transforms and profile.gpu_decoding is None
    if has_room and is_unseen:
        busy = percentage(utilization)
        when = f"these operations exist there; they are busy {busy} of a step"
        text = "Decode and augment on the accelerators (DALI, nvJPEG, torchvision v2)."
        yield Advice(id="offload-gpu", text=text, when=when)


def _advice_on_starts(chart: FlowChart) -> Iterator[Advice]:
    """Yields what an epoch's first batch costs the chosen plan, as long as one worker makes it."""
    times = chart.work.epochs
    outcome = chart.chosen.predicted
    if times is None or times.start is None or not times.steps or outcome is None:
        return
    splits = chart.work.splits
    if splits and any(group.role == "data" for group in chart.chosen.groups):
        return
    # Each epoch's start, spread over its steps, as a share of a step of the chosen plan.
    share = times.start.seconds / times.steps / outcome.counted_seconds
    if share < _WORTH_A_START:
        return
    where = ", with any data hosts,"
    besides = ""
    if splits:
        where = ","
        besides = " All workers of a data host make it together."
    yield Advice(
        id="epoch-start",
        text=f"An epoch of {times.steps:.0f} steps begins with {times.start.seconds:.2g} s of "
        f"waiting{where} as one worker makes its first batch: {percentage(share)} of the time."
        f"{besides} Half the batch, and gradients of two accumulated, halve that.",
        when="small work",
    )


def _advice_on_profiling(chart: FlowChart, profile: Profile, *, is_taken: bool) -> Iterator[Advice]:
    before = before_money(is_billed=chart.ranking.is_billed)
    if profile.unmeasured:
        text = (
            "Train on the cluster in question, stoker train --group ..., and compare the run with "
            "this profile: stoker evaluate."
        )
        yield Advice(id="compare", text=text, when="a plan for it cannot be predicted")
    elif is_taken or chart.is_busy:
        # `elsewhere`, or the plan's reason, says what to profile.
        return
    elif chart.bottleneck == "unexplained":
        text = "Profile the training again, longer and on a quiet machine."
        yield Advice(id="profile-again", text=text, when=before)
    elif profile.check is None and profile.timed_step.wait_seconds is None:
        guessed = "guessed from how busy the hosts were" if profile.observed else "taken as given"
        text = f"Profile the training: here loading and computing are {guessed}, and the bands are "
        yield Advice(id="profile", text=f"{text}wide.", when=before)


def warnings_of(
    chart: FlowChart, profile: Profile, rules: PlanRules, prices: Prices, *, is_taken: bool = False
) -> tuple[str, ...]:
    """Returns what makes the figures doubtful.

    Args:
        chart: Inputs of the flow chart, with the chosen plan.
        profile: What it was chosen by.
        rules: What plans were checked against.
        prices: Those of the plans.
        is_taken: The profile was scaled to another type.
    """
    warnings = []
    # Where other programs ran, no band is believed at all.
    if not chart.is_busy:
        wide = [doubt for doubt in chart.work.doubts if doubt.width >= _WORTH_A_LINE]
        warnings += [f"the bands are wider: {doubt.text}" for doubt in wide]
    # The catalog need not have the profiled type if the profile was scaled to another one.
    if not is_taken:
        warnings += _unlike_the_catalog(profile, rules.catalog)
    shards = chart.work.shards
    if shards and not chart.unfed:
        source = "feed.shards" if chart.work.are_shards_set else "num_workers"
        warnings.append(
            f"the stream has {numbered(shards, 'shard')} ({source} of all ranks): "
            "no more workers than that can be busy"
        )
    epochs = chart.work.epochs
    if epochs is not None and epochs.steps and epochs.between is None:
        warnings.append(BETWEEN_UNSEEN)
    warnings += warnings_of_prices(prices, platform=rules.catalog.info)
    warnings += _warnings_of_rules(rules)
    return tuple(warnings)


def _unlike_the_catalog(profile: Profile, catalog: Catalog) -> Iterator[str]:
    """Yields in what the profiled host differs from its type in the catalog."""
    host = profile.host
    listed = catalog.get(host.instance_type)
    figures = [("vCPUs", host.capacity, listed.vcpus)]
    # Types of this machine are of cores alone.
    if not catalog.info.is_this_machine:
        figures.append(("accelerators", host.accelerators, listed.accelerators))
    for name, measured, usual in figures:
        if listed.is_known and measured is not None and measured != usual:
            what = name.removesuffix("s") if measured == 1 else name
            yield (
                f"the profiled host has {measured:g} {what}, the catalog's {listed.type} {usual}: "
                "the profile is used for today's type"
            )


def _warnings_of_rules(rules: PlanRules) -> Iterator[str]:
    """Yields what cannot be checked, or is in no plan."""
    for name in sorted(rules.allowed or ()):
        if problem := why_unusable(rules.catalog.get(name), rules):
            yield f"{name} is allowed, but it is in no plan: {problem}"
    if rules.constraints.deadline_hours and rules.total_steps is None:
        yield "the deadline is not checked: the number of steps is not known"
    if rules.today.usd_per_hour is None:
        what = "has no price" if rules.today.is_known else "is not in the catalog"
        yield f"{rules.today.type} {what}: give its price with {rules.catalog.added_by}"
    yield from _unpriced_pools(rules)


def _unpriced_pools(rules: PlanRules) -> list[str]:
    """Returns warnings of pools whose price, or whose lack of one, today's pool does not share."""
    if not rules.catalog.has_pools:
        return []
    others = [pool for pool in rules.catalog.instances if pool.type != rules.today.type]
    if rules.ranking.is_billed:
        return [
            f"{pool.type} has no price, so it is in no plan: plans are compared in dollars"
            for pool in others
            if pool.usd_per_hour is None
        ]
    return [
        f"{pool.type} costs {usd(pool.usd_per_hour)} per host and hour, which is not compared: "
        f"{rules.today.type} has no price"
        for pool in others
        if pool.usd_per_hour is not None
    ]


def warnings_of_prices(prices: Prices, *, platform: PlatformInfo) -> list[str]:
    """Returns that prices are old, of no date, or of a region that is not the hosts'."""
    refresh = "stoker catalog" if platform.is_this_machine else "python tools/refresh_prices.py"
    warnings = []
    if prices.hosts_region:
        warnings.append(
            f"the hosts are in {prices.hosts_region}, the prices are of {prices.region}: "
            f"{refresh} --region {prices.hosts_region} > prices.csv, and constraints.prices_file"
        )
    if prices.stale:
        warnings.append(f"the prices of {prices.date} are older than {STALE_DAYS} days: {refresh}")
    elif prices.date is None and prices.is_billed:
        warnings.append("the date of the prices is not known")
    return warnings


def warnings_of_types(rules: PlanRules, used: Iterable[Instance]) -> Iterator[str]:
    """Yields what is to be known of the chosen plan's types, and of today's: prices, bursts."""
    types = {instance.type: instance for instance in used}
    guessed = {name: instance.estimate for name, instance in types.items() if instance.estimate}
    if guessed and rules.ranking.is_billed:
        yield (
            f"dollars are by an estimated price: {estimates_in_words(guessed)} "
            f"({rules.catalog.added_by} replaces it)"
        )
    today = rules.today
    if today.barred and is_burst_type(today.type):
        yield (
            f"today's {today.barred}: a profile of some minutes may be faster than the training, "
            "and what other types gain is underestimated"
        )
