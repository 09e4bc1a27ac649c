"""Measured steps of a run, and the profile of a run that was not profiled.

Batches come in bursts, so a median of single steps would miss the wait that ends a burst: medians
are over means of blocks. The profile has no accelerator-only step and no self-check, so its bands
are wider. With a data group, the step is the whole cluster's, and loading is in CPU-seconds of the
dnn hosts' type.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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
from stoker.logs import now_utc
from stoker.records import (
    GpuLoad,
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
from stoker.records.gpu import during_steps, step_busy_share
from stoker.records.profile import ProfiledData
from stoker.units import wait_share

FILE = "passive-profile.json"
# Unknown if batches come from no DataLoader: `Profile.unmeasured`.
UNMEASURED = ("accelerator", "loader")
# Fewer steps are no basis for a decision.
MIN_STEPS = 10


def measure(
    ranks: Mapping[int, Sequence[MeasuredStep]],
    progress: Mapping[int, Progress],
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
    kept = steady(ranks[shown])
    rates = {replica_of(rank): _rate(steps) for rank, steps in ranks.items()}
    for rank, report in progress.items():
        # Timelines of other hosts are on their disks: only reports are here.
        rates.setdefault(replica_of(rank), 0.0)
        seconds = report.wait_seconds + report.compute_seconds + report.between_seconds
        if rank not in ranks and seconds:
            rates[replica_of(rank)] = max(rates[replica_of(rank)], report.samples / seconds)
    whole = whole_step(ranks[shown])
    fields = {"step_seconds": block_means(kept, lambda step: step.seconds)}
    step_seconds, wait_seconds = typical_step(ranks[shown])
    if slowest == shown:
        fields["wait_seconds"] = block_means(kept, lambda step: step.wait_seconds)
        fields["compute_seconds"] = block_means(kept, lambda step: step.compute_seconds)
        compute_seconds = median(fields["compute_seconds"])
    else:
        wait_seconds = shares[slowest] * step_seconds
        compute_seconds = step_seconds - wait_seconds
    return Measured(
        step_seconds=step_seconds,
        wait_seconds=wait_seconds,
        compute_seconds=compute_seconds,
        samples_per_second=sum(rates.values()),
        steps=steps_in(ranks[shown]),
        spread={name: spread_of(values) for name, values in fields.items()},
        rank=slowest,
        least_wait_share=min(shares.values()) if len(shares) > 1 else None,
        timeline_file=timeline.FILE.format(rank=shown),
        whole_step_seconds=whole.seconds if whole else None,
        # Of another host's rank only sums over steps are known.
        whole_wait_seconds=whole.wait_seconds if whole and slowest == shown else None,
        epochs=epoch_times(ranks[shown]),
    )


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


def wait_shares(
    ranks: Mapping[int, Sequence[MeasuredStep]], progress: Mapping[int, Progress]
) -> dict[int, float]:
    shares = {rank: typical_wait_share(steps) for rank, steps in ranks.items()}
    for rank, report in progress.items():
        seconds = report.steady_wait_seconds + report.steady_compute_seconds
        if rank not in shares and seconds > 0:
            shares[rank] = wait_share(step_seconds=seconds, wait_seconds=report.steady_wait_seconds)
    return shares


def _rate(steps: Sequence[MeasuredStep]) -> float:
    """Returns the samples per second of whole epochs; of all steps where there are few."""
    run, whole = whole_run(steps), whole_step(steps)
    if run and whole and whole.seconds:
        return run.samples / run.steps / whole.seconds
    seconds = sum(step.seconds for step in steps)
    return sum(step.samples for step in steps) / seconds if seconds else 0.0


def spread_of(values: Sequence[float]) -> Spread:
    if len(values) < 2:
        return Spread(low=values[0], high=values[0], samples=1)
    low, _, high = quantiles(values, n=4, method="inclusive")
    return Spread(low=low, high=high, samples=len(values))


def passive_profile(
    record: Training,
    *,
    timelines: Mapping[int, Sequence[MeasuredStep]],
    usages: Sequence[RankUsage],
    progress: Mapping[int, Progress],
    host_types: Mapping[str, str],
    vcpus: int,
    catalog: Catalog,
) -> Profile | None:
    """Returns the profile of a run that ended, or None if there is too little data.

    `timelines` are the training's steps of the leader's ranks, `usages` all loaders of these.
    """
    measured = record.measured
    if measured is None or measured.steps < MIN_STEPS or not measured.step_seconds:
        return None
    usage = [own for each in usages if (own := _of_training(each, timelines)) is not None]
    dnn, *data = record.groups
    world = dnn.count * (dnn.processes_per_host or 1)
    sizes = [own.batch_bytes / own.sized_batches for own in usage if own.sized_batches]
    costs = (
        _batch_cpu_seconds(report, dnn, host_types=host_types, catalog=catalog)
        for report in progress.values()
    )
    # A global step takes one batch of each rank.
    made = [world * seconds for seconds in costs if seconds is not None]
    terms, spread = _loading(usage, made=made, dnn=dnn)
    step = StepTerms(
        step_seconds=measured.step_seconds,
        wait_seconds=min(measured.wait_seconds, measured.step_seconds),
        global_batch_size=_samples(timelines, world),
        batch_bytes=fmean(sizes) * world if sizes else None,
        read_bytes=_read_bytes(usage, world),
    )
    step = msgspec.structs.replace(step, **terms)
    spread = {**measured.spread, **spread}
    loader = None
    for own in [own for own in usage if own.class_name][:1]:
        loader = ProfiledLoader(
            class_name=own.class_name,
            reach=own.reach,
            iterable=own.shards > 0,
            shards=own.shards * world or None,
        )
    # No spread without a known term.
    known = {name for name, value in msgspec.structs.asdict(step).items() if value is not None}
    return Profile(
        workload_sha256=record.workload_sha256,
        host=ProfiledHost(instance_type=dnn.instance_type, count=dnn.count, vcpus=vcpus),
        data=tuple(
            ProfiledData(
                instance_type=group.instance_type,
                count=group.count,
                workers_per_host=group.workers_per_host,
            )
            for group in data
        ),
        step=step,
        observed=_observed(usage, vcpus, gpus=record.gpus),
        loader=loader,
        epochs=measured.epochs,
        unmeasured=UNMEASURED if is_elsewhere(usages, timelines) else (),
        spread={name: each for name, each in spread.items() if name in known},
        what={
            "run": record.job.name,
            "when": now_utc(),
            "status": record.status,
            "passive": True,
            "ranks": world,
            "steps": measured.steps,
        },
    )


def _loading(
    usage: Sequence[LoaderUsage], *, made: list[float], dnn: Group
) -> tuple[dict[str, float | None], dict[str, Spread]]:
    """Returns the known costs of loading, which arises in the feed, in children, or in the trainer.

    `made` are CPU-seconds of a global step's batches from the feed, rank by rank.
    """
    if any(own.is_elsewhere for own in usage):
        # The trainer's threads or unknown hosts may make batches.
        return {}, {}
    processes = dnn.processes_per_host or 1
    world = dnn.count * processes
    terms: dict[str, float | None] = {"num_workers": dnn.workers_per_host}
    trainer = fmean(own.trainer_cpu_seconds / own.steps for own in usage) if usage else None
    spans = [span for own in usage for span in own.spans]
    samples = {"trainer_cpu_seconds": [max(0.0, world * (own - feed)) for own, _, feed in spans]}
    counted = [own for own in usage if own.span_steps]
    if made:
        samples["loader_cpu_seconds"] = made
        terms["loader_cpu_seconds"] = fmean(made)
        receive = 0.0
        if counted:
            receive = fmean(own.feed_cpu_seconds / own.span_steps for own in counted)
            terms["receive_cpu_seconds"] = receive
            samples["receive_cpu_seconds"] = [feed for _, _, feed in spans]
        if trainer is not None:
            terms["trainer_cpu_seconds"] = max(0.0, trainer - receive) * world
    elif trainer is not None and all(own.num_workers == 0 for own in usage):
        # Loaded by the trainer, while it requests a batch.
        loads = [own.next_cpu_seconds / own.steps for own in usage]
        samples = {"loader_cpu_seconds": [each * world for each in loads]}
        terms["loader_cpu_seconds"] = fmean(loads) * world
        terms["trainer_cpu_seconds"] = max(0.0, trainer - fmean(loads)) * world
        terms["num_workers"] = 0
    elif trainer is not None:
        samples["loader_cpu_seconds"] = [children * world for _, children, _ in spans]
        if counted:
            loads = [own.children_cpu_seconds / own.span_steps for own in counted]
            terms["loader_cpu_seconds"] = fmean(loads) * world
        terms["trainer_cpu_seconds"] = trainer * world
        workers = fmean(own.num_workers for own in usage)
        terms["num_workers"] = round(workers * processes)
    return terms, {name: spread_of(values) for name, values in samples.items() if values}


def _batch_cpu_seconds(
    report: Progress, dnn: Group, *, host_types: Mapping[str, str], catalog: Catalog
) -> float | None:
    here = dnn.instance_type
    batches, seconds = 0, 0.0
    for host in report.feed.hosts if report.feed else ():
        kind = here if host.is_local else host_types.get(host.host, here)
        batches += host.batches
        # Converted to seconds of the dnn hosts' type: a faster CPU's are worth more.
        seconds += host.cpu_seconds * _speed(catalog, kind, over=here)
    return seconds / batches if batches else None


def _speed(catalog: Catalog, instance_type: str, *, over: str) -> float:
    if instance_type == over:
        return 1.0
    try:
        one = catalog.get(instance_type).coremark_per_vcpu
        other = catalog.get(over).coremark_per_vcpu
    except UsageError:
        return 1.0
    return one / other if one and other else 1.0


def is_elsewhere(
    usages: Sequence[RankUsage], timelines: Mapping[int, Sequence[MeasuredStep]]
) -> bool:
    """Returns whether something else than a DataLoader made the batches of the training."""
    known = (_of_training(usage, timelines) for usage in usages)
    return any(own.is_elsewhere for own in known if own)


def _of_training(
    usage: RankUsage, timelines: Mapping[int, Sequence[MeasuredStep]]
) -> LoaderUsage | None:
    """Returns the usage of the loaders whose steps are the rank's training; None: no step."""
    numbers = {step.loader for step in timelines.get(usage.rank, ())} & usage.loaders.keys()
    if numbers:
        whole = usage_of(usage.loaders[number] for number in numbers)
    else:
        whole = max(usage.loaders.values(), key=lambda own: own.steps, default=LoaderUsage())
    return whole if whole.steps else None


def _samples(timelines: Mapping[int, Sequence[MeasuredStep]], world: int) -> int | None:
    single = (step for steps in timelines.values() for step in steps if step.weight)
    sizes = Counter(step.samples for step in single)
    del sizes[0]
    return sizes.most_common(1)[0][0] * world if sizes else None


def _read_bytes(usage: Sequence[LoaderUsage], world: int) -> float | None:
    known = [
        own.read_bytes / own.span_steps
        for own in usage
        if own.read_bytes is not None and own.span_steps
    ]
    return fmean(known) * world or None if known else None


def _observed(
    usage: Sequence[LoaderUsage], vcpus: int, *, gpus: tuple[GpuLoad, ...]
) -> Observed | None:
    cpu = _cpu_utilization(usage, vcpus)
    gpu = step_busy_share(gpus)
    if cpu is None and gpu is None:
        return None
    loads = during_steps(gpus)
    return Observed(cpu_utilization=cpu, gpu_utilization=gpu, gpus=loads, hosts=1)


def _cpu_utilization(usage: Sequence[LoaderUsage], vcpus: int) -> float | None:
    if not usage or any(not own.wall_seconds for own in usage):
        return None
    busy = 0.0
    for own in usage:
        busy += own.trainer_cpu_seconds / own.wall_seconds
        if own.span_steps:
            busy += own.children_cpu_seconds / own.span_steps * own.steps / own.wall_seconds
    return min(1.0, busy / vcpus)
