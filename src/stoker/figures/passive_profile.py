"""Measured steps of a run, and the profile of a run that was not profiled.

Batches come in bursts, so a median of single steps would miss the wait that ends a burst: medians
are over means of blocks. The profile has no accelerator-only step and no self-check, so its bands
are wider. With a data group, the step is the whole cluster's, and loading is in CPU-seconds of the
dnn hosts' type.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from statistics import fmean, median, quantiles

import msgspec

from stoker.catalog import Catalog
from stoker.errors import UsageError
from stoker.feed import timeline
from stoker.feed.epoch_times import epoch_times, whole_run, whole_step
from stoker.feed.resource_usage import LoaderUsage, RankUsage, usage_of
from stoker.feed.timeline import (
    MeasuredStep,
    block_means,
    steady,
    steps_in,
    typical_step,
    typical_wait_share,
    waits_longest,
)
from stoker.feed.training_steps import shares_of
from stoker.feed.wire.protocol import Progress
from stoker.figures.feed_intervals import ProgressByRank
from stoker.logs import now_utc
from stoker.records import (
    Group,
    LoaderCounts,
    Measured,
    Observed,
    Profile,
    ProfiledHost,
    ProfiledLoader,
    Spread,
    StepTerms,
    Training,
)
from stoker.records.gpu import GpuLoads, during_steps, step_busy_share
from stoker.records.profile import ProfiledData
from stoker.units import known_mean, wait_share

StepsByRank = Mapping[int, Sequence[MeasuredStep]]

FILE = "passive-profile.json"
# Unknown if batches come from no DataLoader: `Profile.unmeasured`.
UNMEASURED = ("accelerator", "loader")
# Fewer steps are no basis for a decision.
MIN_STEPS = 10


def measure(
    ranks: StepsByRank,
    progress: ProgressByRank,
    *,
    replica_of: Callable[[int], int] = int,
) -> Measured | None:
    """Measures the steps of the rank that waits longest; None without a timeline.

    For a rank on another host, the wait share is the reported one, and the step time comes from
    the leader's ranks. Ranks of one replica share their samples.
    """
    if not ranks:
        return None
    shares = wait_shares(ranks, progress)
    slowest = waits_longest(shares)
    shown = waits_longest({rank: shares[rank] for rank in ranks})
    # Of another host's rank only sums over steps are known.
    is_shown = slowest == shown
    steps = ranks[shown]
    # Without first and last steps of epochs, which wait for workers and validate.
    kept = steady(steps)
    whole = whole_step(steps)
    # Spreads come from means of blocks: single steps scatter with the network and the scheduler.
    blocks = {"step_seconds": block_means(kept, lambda step: step.seconds)}
    step_seconds, wait_seconds = typical_step(steps)
    if is_shown:
        blocks["wait_seconds"] = block_means(kept, lambda step: step.wait_seconds)
        blocks["compute_seconds"] = block_means(kept, lambda step: step.compute_seconds)
        compute_seconds = median(blocks["compute_seconds"])
    else:
        wait_seconds = shares[slowest] * step_seconds
        compute_seconds = step_seconds - wait_seconds
    return Measured(
        step_seconds=step_seconds,
        wait_seconds=wait_seconds,
        compute_seconds=compute_seconds,
        samples_per_second=_samples_per_second(ranks, progress, replica_of=replica_of),
        steps=steps_in(steps),
        spread={name: spread_of(values) for name, values in blocks.items()},
        rank=slowest,
        least_wait_share=min(shares.values()) if len(shares) > 1 else None,
        timeline_file=timeline.FILE.format(rank=shown),
        whole_step_seconds=whole.seconds if whole else None,
        whole_wait_seconds=whole.wait_seconds if whole and is_shown else None,
        epochs=epoch_times(steps),
    )


def _samples_per_second(
    ranks: StepsByRank,
    progress: ProgressByRank,
    *,
    replica_of: Callable[[int], int],
) -> float:
    """Returns the sum over replicas, whose ranks share their samples."""
    rates = {replica_of(rank): _rate(steps) for rank, steps in ranks.items()}
    for rank, report in progress.items():
        replica = replica_of(rank)
        # Timelines of other hosts are on their disks: only reports are here.
        rates.setdefault(replica, 0.0)
        seconds = report.wait_seconds + report.compute_seconds + report.between_seconds
        if rank not in ranks and seconds:
            rates[replica] = max(rates[replica], report.samples / seconds)
    return sum(rates.values())


def loader_counts(
    rows: Sequence[MeasuredStep], training: Sequence[MeasuredStep], usage: RankUsage | None
) -> LoaderCounts:
    """Returns which loaders' steps a rank's figures are of.

    Args:
        rows: All rows of its timeline.
        training: Those that the figures are of.
    """
    shares = shares_of(rows)
    measured = {step.loader for step in training}
    return LoaderCounts(
        measured=len(measured),
        all=len(shares.steps),
        share=shares.share_of(measured),
        made_here=usage.made_here if usage else 0,
    )


def wait_shares(ranks: StepsByRank, progress: ProgressByRank) -> dict[int, float]:
    shares = {rank: typical_wait_share(steps) for rank, steps in ranks.items()}
    for rank, report in progress.items():
        seconds = report.steady_wait_seconds + report.steady_compute_seconds
        if rank not in shares and seconds > 0:
            shares[rank] = wait_share(step_seconds=seconds, wait_seconds=report.steady_wait_seconds)
    return shares


def _rate(steps: Sequence[MeasuredStep]) -> float:
    """Returns the samples per second of whole epochs; of all steps where there are few."""
    run = whole_run(steps)
    whole = whole_step(steps)
    if run and whole and whole.seconds:
        return run.samples / run.steps / whole.seconds
    seconds = sum(step.seconds for step in steps)
    if not seconds:
        return 0.0
    return sum(step.samples for step in steps) / seconds


def spread_of(values: Sequence[float]) -> Spread:
    if len(values) < 2:
        return Spread(low=values[0], high=values[0], samples=1)
    low, _, high = quantiles(values, n=4, method="inclusive")
    return Spread(low=low, high=high, samples=len(values))


def passive_profile(
    record: Training,
    *,
    timelines: StepsByRank,
    usages: Sequence[RankUsage],
    progress: ProgressByRank,
    host_types: Mapping[str, str],
    vcpus: int,
    catalog: Catalog,
) -> Profile | None:
    """Returns the profile of a run that ended, or None if there is too little data.

    Args:
        record: The run's.
        timelines: The training's steps of the leader's ranks.
        usages: All loaders of these.
        progress: Last reports of all ranks.
        host_types: Instance types of data hosts, by name.
        vcpus: Of the leader.
        catalog: For the speeds of the hosts' types.
    """
    measured = record.measured
    if measured is None or measured.steps < MIN_STEPS or not measured.step_seconds:
        return None
    usage = _training_usage(usages, timelines)
    dnn, *data = record.groups
    world = dnn.count * (dnn.processes_per_host or 1)
    costs = (
        _batch_cpu_seconds(report, dnn, host_types=host_types, catalog=catalog)
        for report in progress.values()
    )
    # A global step takes one batch of each rank.
    fed = [world * seconds for seconds in costs if seconds is not None]
    terms, loading_spread = _loading(usage, fed_cpu_seconds=fed, dnn=dnn)
    step = msgspec.structs.replace(
        _step(measured, usage, world=world, samples=_samples(timelines, world)), **terms
    )
    spread = {**measured.spread, **loading_spread}
    # No spread without a known term.
    values = msgspec.structs.asdict(step)
    return Profile(
        workload_sha256=record.workload_sha256,
        host=ProfiledHost(instance_type=dnn.instance_type, count=dnn.count, vcpus=vcpus),
        data=tuple(_data_hosts(group) for group in data),
        step=step,
        observed=_observed(usage, vcpus, gpus=record.gpus),
        loader=_loader(usage, world),
        epochs=measured.epochs,
        unmeasured=UNMEASURED if is_elsewhere(usages, timelines) else (),
        spread={name: part for name, part in spread.items() if values.get(name) is not None},
        what={
            "run": record.job.name,
            "when": now_utc(),
            "status": record.status,
            "passive": True,
            "ranks": world,
            "steps": measured.steps,
        },
    )


def _step(
    measured: Measured, usage: Sequence[LoaderUsage], *, world: int, samples: int | None
) -> StepTerms:
    batch_bytes = known_mean(
        loader.batch_bytes / loader.sized_batches for loader in usage if loader.sized_batches
    )
    # A global step takes one batch of each rank.
    if batch_bytes is not None:
        batch_bytes *= world
    return StepTerms(
        step_seconds=measured.step_seconds,
        wait_seconds=min(measured.wait_seconds, measured.step_seconds),
        global_batch_size=samples,
        batch_bytes=batch_bytes,
        read_bytes=_read_bytes(usage, world),
    )


def _data_hosts(group: Group) -> ProfiledData:
    return ProfiledData(
        instance_type=group.instance_type,
        count=group.count,
        workers_per_host=group.workers_per_host,
    )


def _loader(usage: Sequence[LoaderUsage], world: int) -> ProfiledLoader | None:
    first = next((loader for loader in usage if loader.class_name), None)
    if first is None:
        return None
    return ProfiledLoader(
        class_name=first.class_name,
        reach=first.reach,
        iterable=first.shards > 0,
        shards=first.shards * world or None,
    )


def _loading(
    usage: Sequence[LoaderUsage], *, fed_cpu_seconds: list[float], dnn: Group
) -> tuple[dict[str, float | None], dict[str, Spread]]:
    """Returns the known costs of loading, which arises in the feed, in children, or in the trainer.

    Args:
        usage: Of the leader's ranks.
        fed_cpu_seconds: CPU-seconds of a global step's batches from the feed, rank by rank.
        dnn: The training hosts.
    """
    if any(loader.is_elsewhere for loader in usage):
        # The trainer's threads or unknown hosts may make batches.
        return {}, {}
    processes = dnn.processes_per_host or 1
    world = dnn.count * processes
    # CPU-seconds of a global step: a batch of each rank (docs/method.md, "What is measured").
    terms: dict[str, float | None] = {"num_workers": dnn.workers_per_host}
    samples: dict[str, list[float]] = {}
    if fed_cpu_seconds:
        fed_terms, samples = _fed(usage, world)
        terms |= fed_terms | {"loader_cpu_seconds": fmean(fed_cpu_seconds)}
        samples |= {"loader_cpu_seconds": fed_cpu_seconds}
    elif usage and all(loader.num_workers == 0 for loader in usage):
        terms, samples = _loaded_by_trainer(usage, world)
    elif usage:
        terms, samples = _loaded_by_children(usage, world)
        terms["num_workers"] = round(fmean(loader.num_workers for loader in usage) * processes)
    return terms, {name: spread_of(values) for name, values in samples.items() if values}


_LoadingCosts = tuple[dict[str, float | None], dict[str, list[float]]]


def _fed(usage: Sequence[LoaderUsage], world: int) -> _LoadingCosts:
    """Returns what the trainer takes of its CPU, and receiving batches, each with its samples."""
    if not usage:
        return {}, {}
    # The trainer's process also receives: what that takes is a separate term.
    receive = _mean_in_spans(usage, lambda loader: loader.feed_cpu_seconds)
    trainer = max(0.0, _trainer_seconds(usage) - (receive or 0.0)) * world
    return {"receive_cpu_seconds": receive, "trainer_cpu_seconds": trainer}, {
        "receive_cpu_seconds": [feed for _, _, feed in _spans(usage)],
        "trainer_cpu_seconds": _trainer_samples(usage, world),
    }


def _loaded_by_trainer(usage: Sequence[LoaderUsage], world: int) -> _LoadingCosts:
    """Returns the costs where the trainer loads, while it requests a batch."""
    loads = [loader.next_cpu_seconds / loader.steps for loader in usage]
    return {
        "num_workers": 0,
        "loader_cpu_seconds": fmean(loads) * world,
        "trainer_cpu_seconds": max(0.0, _trainer_seconds(usage) - fmean(loads)) * world,
    }, {"loader_cpu_seconds": [seconds * world for seconds in loads]}


def _loaded_by_children(usage: Sequence[LoaderUsage], world: int) -> _LoadingCosts:
    load = _mean_in_spans(usage, lambda loader: loader.children_cpu_seconds)
    return {
        "loader_cpu_seconds": None if load is None else load * world,
        "trainer_cpu_seconds": _trainer_seconds(usage) * world,
    }, {
        "loader_cpu_seconds": [children * world for _, children, _ in _spans(usage)],
        "trainer_cpu_seconds": _trainer_samples(usage, world),
    }


def _trainer_samples(usage: Sequence[LoaderUsage], world: int) -> list[float]:
    return [max(0.0, world * (trainer - feed)) for trainer, _, feed in _spans(usage)]


def _mean_in_spans(
    usage: Sequence[LoaderUsage], seconds_of: Callable[[LoaderUsage], float]
) -> float | None:
    """Returns the mean seconds a step of the loaders that have spans."""
    return known_mean(
        seconds_of(loader) / loader.span_steps for loader in usage if loader.span_steps
    )


def _trainer_seconds(usage: Sequence[LoaderUsage]) -> float:
    """Returns the CPU-seconds of a rank's process in a step."""
    return fmean(loader.trainer_cpu_seconds / loader.steps for loader in usage)


def _spans(usage: Sequence[LoaderUsage]) -> list[tuple[float, float, float]]:
    """Returns CPU-seconds a step over short times: of the process, its children, its feed."""
    return [*chain.from_iterable(loader.spans for loader in usage)]


def _batch_cpu_seconds(
    report: Progress, dnn: Group, *, host_types: Mapping[str, str], catalog: Catalog
) -> float | None:
    if report.feed is None:
        return None
    here = dnn.instance_type
    batches = 0
    seconds = 0.0
    for host in report.feed.hosts:
        kind = here if host.is_local else host_types.get(host.host, here)
        batches += host.batches
        # Converted to seconds of the dnn hosts' type: a faster CPU's are worth more.
        seconds += host.cpu_seconds * _speed(catalog, kind, over=here)
    if not batches:
        return None
    return seconds / batches


def _speed(catalog: Catalog, instance_type: str, *, over: str) -> float:
    if instance_type == over:
        return 1.0
    try:
        one = catalog.get(instance_type).coremark_per_vcpu
        other = catalog.get(over).coremark_per_vcpu
    except UsageError:
        return 1.0
    if not one or not other:
        return 1.0
    return one / other


def is_elsewhere(usages: Sequence[RankUsage], timelines: StepsByRank) -> bool:
    """Returns whether something else than a DataLoader made the batches of the training."""
    return any(loader.is_elsewhere for loader in _training_usage(usages, timelines))


def _training_usage(usages: Sequence[RankUsage], timelines: StepsByRank) -> list[LoaderUsage]:
    """Returns, of each rank with steps, the usage of the loaders whose steps are its training."""
    of_ranks = [_usage_of_rank(usage, timelines.get(usage.rank, ())) for usage in usages]
    return [usage for usage in of_ranks if usage.steps]


def _usage_of_rank(usage: RankUsage, steps: Sequence[MeasuredStep]) -> LoaderUsage:
    numbers = {step.loader for step in steps} & usage.loaders.keys()
    # Costs of other loaders, such as validation's, are not a step's.
    if numbers:
        return usage_of(usage.loaders[number] for number in numbers)
    return max(usage.loaders.values(), key=lambda loader: loader.steps, default=LoaderUsage())


def _samples(timelines: StepsByRank, world: int) -> int | None:
    sizes = Counter[int]()
    for steps in timelines.values():
        sizes.update(step.samples for step in steps if step.weight)
    del sizes[0]
    if not sizes:
        return None
    return sizes.most_common(1)[0][0] * world


def _read_bytes(usage: Sequence[LoaderUsage], world: int) -> float | None:
    read_bytes = known_mean(
        loader.read_bytes / loader.span_steps
        for loader in usage
        if loader.read_bytes is not None and loader.span_steps
    )
    if not read_bytes:
        return None
    return read_bytes * world


def _observed(usage: Sequence[LoaderUsage], vcpus: int, *, gpus: GpuLoads) -> Observed | None:
    cpu = _cpu_utilization(usage, vcpus)
    gpu = step_busy_share(gpus)
    if cpu is None and gpu is None:
        return None
    loads = during_steps(gpus)
    return Observed(cpu_utilization=cpu, gpu_utilization=gpu, gpus=loads, hosts=1)


def _cpu_utilization(usage: Sequence[LoaderUsage], vcpus: int) -> float | None:
    if not usage or any(not loader.wall_seconds for loader in usage):
        return None
    busy = 0.0
    for loader in usage:
        busy += loader.trainer_cpu_seconds / loader.wall_seconds
        if loader.span_steps:
            children = loader.children_cpu_seconds / loader.span_steps
            busy += children * loader.steps / loader.wall_seconds
    return min(1.0, busy / vcpus)
