"""A profile from the results of all ranks: sums, maxima and the self-check. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import msgspec

from stoker.decide.work import parts_of
from stoker.errors import UsageError
from stoker.profile.fixes import find_fixes
from stoker.profile.rank_results import RankResult
from stoker.profile.states import capacity, find_states, others_vcpus
from stoker.records import (
    Check,
    EpochPause,
    EpochTimes,
    LoaderRate,
    Observed,
    Profile,
    ProfiledHost,
    ProfileSettings,
    Spread,
    StepTerms,
    TodaysGroup,
)
from stoker.records.base import Value
from stoker.records.profile import GpuLoads, busy_share


def combine(
    ranks: Sequence[RankResult],
    *,
    group: TodaysGroup,
    settings: ProfileSettings,
    what: Mapping[str, Value],
    gpus: GpuLoads = (),
) -> Profile:
    """Returns the profile of a *global* step from the results of all ranks.

    Where ranks meet in all-reduce, the slowest one sets the pace: maxima over ranks for times, sums
    for CPU. Medians for times, as single steps (a checkpoint) must not move them; means for CPU, as
    a rare, expensive sample is work, too.

    Args:
        ranks: A result of each, with steps as is.
        group: Today's hosts.
        settings: They name the type, and what part of a step may stay unexplained.
        what: Facts of the run, which the profile keeps as they are.
        gpus: Load of the GPUs during the job.

    Raises:
        UsageError: If some are missing.
    """
    # All ranks of one run say the same.
    if len(ranks) < ranks[0].world_size:
        present = ", ".join(str(rank.rank) for rank in ranks)
        raise UsageError(
            f"only ranks {present} of {ranks[0].world_size} left results",
            fix="read the log of the missing ranks, and profile again",
        )
    first = ranks[0]
    # All others wait for the rank whose steps wait longest: as in a run's record.
    waiting = max(ranks, key=lambda rank: rank.wait_share)
    slowest = max(ranks, key=lambda rank: rank.compute_seconds)
    vcpus = capacity(ranks)
    batches = [rank.batch for rank in ranks if rank.batch]
    walls = [wall for rank in ranks if (wall := _loader_wall(rank)) is not None]
    # More than all vCPUs give in a step is of helper processes that left them.
    longest = max(rank.taken.step_seconds.mean for rank in ranks)
    used = min(sum(rank.used_cpu_seconds for rank in ranks), vcpus * longest)
    timed = {"step_seconds": waiting.taken.step_seconds, "wait_seconds": waiting.taken.wait_seconds}
    if slowest.stocked:
        timed["accelerator_step_seconds"] = slowest.stocked.compute_seconds
    step = StepTerms(
        **{name: part.median for name, part in timed.items()},
        transfer_seconds=slowest.transfer_seconds,
        neighbour_seconds=slowest.neighbour_seconds,
        loader_cpu_seconds=sum(map(_loader_cpu, ranks)),
        loader_wall_seconds=sum(walls) if len(walls) == len(ranks) else None,
        trainer_cpu_seconds=sum(map(_trainer_cpu, ranks)),
        used_cpu_seconds=used,
        # A host's workers, all its ranks together: plans count by hosts.
        num_workers=sum(rank.num_workers for rank in ranks if rank.host == first.host),
        global_batch_size=sum(batch.samples for batch in batches),
        batch_bytes=float(sum(batch.num_bytes for batch in batches)),
    )
    loader = first.loader
    if loader and loader.shards:
        # Each rank reads as many.
        loader = msgspec.structs.replace(loader, shards=loader.shards * len(ranks))
    notes = chain.from_iterable(rank.notes for rank in ranks)
    profile = Profile(
        host=host_of(first, group=group, settings=settings),
        step=step,
        observed=Observed(
            cpu_utilization=min(1.0, used / (longest * vcpus)),
            gpu_utilization=busy_share(gpus),
            gpus=gpus,
            others_vcpus=others_vcpus(ranks),
        ),
        spread={
            name: Spread(low=part.low, high=part.high, samples=part.samples)
            for name, part in timed.items()
        },
        loader_rates=tuple(_loader_rates(ranks)),
        # Ranks load alike: the first one took its loading apart.
        transforms=first.transforms,
        loader=loader,
        epochs=_epochs_of(waiting),
        what={**what, "ranks": len(ranks), "notes": [*dict.fromkeys(notes)]},
    )
    parts = parts_of(profile)
    states = find_states(ranks, parts=parts, step=step, gpus=gpus)
    check = None
    if parts:
        error = parts.step_seconds / step.step_seconds - 1
        check = Check(
            predicted_step_seconds=parts.step_seconds,
            error=error,
            explained=abs(error) <= settings.max_unexplained,
        )
    fixes = find_fixes(ranks, parts=parts, step=step, states=states)
    return msgspec.structs.replace(profile, check=check, states=states, fixes=fixes)


def host_of(rank: RankResult, *, group: TodaysGroup, settings: ProfileSettings) -> ProfiledHost:
    """Returns the hosts under the best known type: the user's, then the host's, then `group`'s.

    Args:
        rank: A result of a rank of these hosts.
        group: Today's hosts.
        settings: With the type that the user gave.
    """
    given = settings.instance_type
    inventory = rank.inventory
    name = group.instance_type
    # A local type is a guess: what the host reports is better.
    if given == "auto" or (given is None and name.startswith("local.")):
        name = inventory.instance_type or name
    elif given:
        name = given
    return ProfiledHost(
        instance_type=name,
        count=group.count,
        # Whole ones, as a type has them; under a quota the fraction counts.
        vcpus=max(1, int(rank.vcpus)),
        quota_vcpus=None if rank.vcpus == round(rank.vcpus) else rank.vcpus,
        accelerators=inventory.accelerators,
        accelerator_model=inventory.accelerator_model,
    )


# CPU time and time of one rank's part of a step.


def _trainer_cpu(rank: RankResult) -> float:
    if rank.stocked is not None:
        return rank.stocked.trainer_cpu_seconds
    # As it was, less what it took to load by itself.
    loaded = 0.0 if rank.num_workers else rank.taken.wait_seconds.mean
    return max(0.0, rank.taken.trainer_cpu_seconds - loaded)


def _loader_cpu(rank: RankResult) -> float:
    # The first one keeps every vCPU busy: hyper-threads and caches are shared as in real work.
    if rank.drains:
        return rank.drains[0].cpu_seconds
    # Not tried alone: its workers' CPU while the model trained, or what the trainer used more.
    if rank.num_workers:
        return rank.children_cpu_seconds
    return rank.taken.trainer_cpu_seconds - _trainer_cpu(rank)


def _loader_wall(rank: RankResult) -> float | None:
    """Returns a worker's time for a batch: its CPU time, and the waiting of a lone worker.

    A lone worker and all of them were timed some seconds apart, between which a shared machine
    becomes faster or slower: of the two CPU times the smaller one counts.
    """
    if alone := rank.lone_worker:
        return min(alone.cpu_seconds, _loader_cpu(rank)) + alone.idle_seconds
    # Without workers, all that next() does is loading.
    return None if rank.num_workers else rank.taken.wait_seconds.median


def _loader_rates(ranks: Sequence[RankResult]) -> Iterator[LoaderRate]:
    """Yields global batches per second of the loader alone, for worker counts all ranks tried."""
    on_host = sum(rank.host == ranks[0].host for rank in ranks)
    tried = [*chain.from_iterable(rank.tried for rank in ranks)]
    for workers in [drain.workers for drain in ranks[0].tried]:
        drains = [drain for drain in tried if drain.workers == workers]
        if len(drains) == len(ranks):
            yield LoaderRate(
                workers=workers * on_host,
                steps_per_second=min(drain.batches_per_second for drain in drains),
                wait_seconds=sum(drain.idle_seconds for drain in drains),
            )


def _epochs_of(rank: RankResult) -> EpochTimes | None:
    """Returns the epochs of a rank that was profiled; None: nothing is known of them.

    Where no second epoch began in the steps as they are, its start is the time in which one worker
    makes a batch, as all workers begin at once. What lies between epochs stays unknown then.
    """
    times = rank.epoch_times
    if times is None:
        return None
    start = times.start
    alone = rank.lone_worker
    if start is None and (alone or not rank.num_workers):
        seconds = alone.wall_seconds if alone and rank.num_workers else 0.0
        seconds = max(0.0, seconds - rank.wait_seconds)
        start = EpochPause(seconds=seconds, low_seconds=seconds, high_seconds=seconds, count=0)
    # The script's warm-up is in the mean of its steps.
    return msgspec.structs.replace(times, start=start, inside_seconds=None)
