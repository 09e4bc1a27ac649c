"""A profile from the results of all ranks: sums, maxima and the self-check. Pure."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain

import msgspec

from stoker.decide.model import Work
from stoker.decide.work import parts_of
from stoker.errors import UsageError
from stoker.feed.timeline import waits_longest
from stoker.profile.fixes import find_fixes
from stoker.profile.rank_results import HOST, Drain, Quartiles, RankResult
from stoker.profile.states import MIN_THROTTLED, find_states, others_by_host
from stoker.records import (
    Check,
    EpochPause,
    EpochTimes,
    LoaderRate,
    Observed,
    Profile,
    ProfiledHost,
    ProfiledLoader,
    ProfileSettings,
    ProfileState,
    Spread,
    StepTerms,
    TodaysGroup,
)
from stoker.records.base import Value
from stoker.records.profile import MAX_OTHERS, GpuLoads, busy_share, during_steps

# Clocks are read at slightly different times: only more than this was more than the pod asks for.
_MORE_THAN_ASKED = 1.05


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
    ranks = _corrected(ranks)
    # All others wait for the rank whose steps wait longest: as in a run's record.
    waiting = ranks[waits_longest({place: rank.wait_share for place, rank in enumerate(ranks)})]
    slowest = max(ranks, key=lambda rank: rank.compute_seconds)
    vcpus = {rank.host: rank.vcpus for rank in ranks}
    steps = [rank.taken for rank in ranks]
    batches = [rank.batch for rank in ranks if rank.batch]
    loader_cpu = _added([_loader_cpu(rank) for rank in ranks])
    trainer_cpu = _added([_trainer_cpu(rank) for rank in ranks])
    walls = [wall for rank in ranks if (wall := _loader_wall(rank))]
    loader_wall = _added(walls) if len(walls) == len(ranks) else None
    # More than all vCPUs give in a step is of helper processes that left them.
    used = sum(step.trainer_cpu_seconds + step.children_cpu_seconds for step in steps)
    used = min(used, sum(vcpus.values()) * max(step.step_seconds.mean for step in steps))
    accelerator = slowest.accelerator.step_seconds if slowest.accelerator else None
    step = StepTerms(
        step_seconds=waiting.step_seconds,
        wait_seconds=waiting.wait_seconds,
        accelerator_step_seconds=accelerator.median if accelerator else None,
        transfer_seconds=slowest.transfer_seconds,
        neighbour_seconds=slowest.neighbour_seconds,
        loader_cpu_seconds=loader_cpu.mean,
        hidden_load_seconds=(
            waiting.taken.hidden_seconds
            if not waiting.num_workers and waiting.taken.clock != HOST
            else None
        ),
        loader_wall_seconds=_worker_seconds(ranks, wall=loader_wall, cpu=loader_cpu),
        trainer_cpu_seconds=trainer_cpu.mean,
        used_cpu_seconds=used,
        # A host's workers, all its ranks together: plans count by hosts.
        num_workers=sum(rank.num_workers for rank in ranks if rank.host == ranks[0].host),
        global_batch_size=sum(batch.samples for batch in batches),
        batch_bytes=float(sum(batch.num_bytes for batch in batches)),
    )
    spread = {
        "step_seconds": waiting.taken.step_seconds,
        "wait_seconds": waiting.taken.wait_seconds,
        "accelerator_step_seconds": accelerator,
        "trainer_cpu_seconds": trainer_cpu,
        "loader_cpu_seconds": loader_cpu,
        "loader_wall_seconds": loader_wall,
    }
    gpus = during_steps(gpus)
    notes = chain.from_iterable(rank.notes for rank in ranks)
    profile = Profile(
        host=host_of(ranks[0], group=group, settings=settings),
        step=step,
        observed=Observed(
            cpu_utilization=min(1.0, used / (steps[0].step_seconds.mean * sum(vcpus.values()))),
            gpu_utilization=busy_share(gpus),
            gpus=gpus,
            hosts=len(vcpus),
            others_vcpus=sum(others_by_host(ranks).values()),
            elsewhere_vcpus=_elsewhere(ranks) if len(vcpus) == 1 else None,
        ),
        spread={
            name: Spread(low=part.low, high=part.high, samples=part.samples)
            for name, part in spread.items()
            if part is not None
        },
        loader_rates=_loader_rates(ranks),
        # Ranks load alike: one of them took its loading apart.
        transforms=next((rank.transforms for rank in ranks if rank.transforms), ()),
        loader=_loader_of(ranks),
        epochs=_epochs_of(waiting),
        what={**what, "ranks": len(ranks), "notes": [*dict.fromkeys(notes)]},
    )
    parts = parts_of(profile)
    states = find_states(ranks, parts=parts, step=step, gpus=gpus)
    check = None
    if parts:
        check = _check(parts, step, states, tolerance=settings.max_unexplained)
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
    name = group.instance_type
    # A local type is a guess: what the host reports is better.
    is_guess = given == "auto" or name.startswith("local.")
    if given and given != "auto":
        name = given
    elif rank.inventory.instance_type and is_guess:
        name = rank.inventory.instance_type
    return ProfiledHost(
        instance_type=name,
        count=group.count,
        # Whole ones, as a type has them; under a quota the fraction counts.
        vcpus=max(1, int(rank.vcpus)),
        quota_vcpus=None if rank.vcpus == round(rank.vcpus) else rank.vcpus,
        accelerators=rank.inventory.accelerators,
        accelerator_model=rank.inventory.accelerator_model,
        cpu_model=rank.inventory.cpu_model,
    )


def _corrected(ranks: Sequence[RankResult]) -> Sequence[RankResult]:
    """Returns ranks whose figures can be compared with each other."""
    is_stopped = max(rank.evidence.stopped_share for rank in ranks) >= MIN_THROTTLED
    others = sum(others_by_host(ranks).values())
    has_others = others > MAX_OTHERS * sum({rank.host: rank.vcpus for rank in ranks}.values())
    used = defaultdict[str, float](float)
    for rank in ranks:
        used[rank.host] += rank.used_vcpus
    corrected = []
    for rank in ranks:
        drains = rank.drains
        as_is = rank.taken
        vcpus = rank.vcpus
        if is_stopped:
            # The loader alone was stopped by the quota, too, which is no waiting for data.
            drains = tuple(map(_unstopped, drains))
        if has_others:
            # These come and go: their CPU time is a mean, to be compared with a mean only.
            step = msgspec.structs.replace(as_is.step_seconds, median=as_is.step_seconds.mean)
            wait = msgspec.structs.replace(as_is.wait_seconds, median=as_is.wait_seconds.mean)
            as_is = msgspec.structs.replace(as_is, step_seconds=step, wait_seconds=wait)
        if rank.is_only_requested and used[rank.host] > _MORE_THAN_ASKED * vcpus:
            # A pod without a limit may use the idle CPUs of its node: the step had them.
            vcpus = round(used[rank.host], 2)
        corrected.append(msgspec.structs.replace(rank, drains=drains, as_is=as_is, vcpus=vcpus))
    return corrected


def _unstopped(drain: Drain) -> Drain:
    wall = min(drain.wall_seconds, drain.cpu_seconds, key=lambda part: part.mean)
    return msgspec.structs.replace(drain, wall_seconds=wall)


# The parts of one rank's step, and their sums.


def _added(parts: Sequence[Quartiles]) -> Quartiles:
    return Quartiles(
        mean=sum(part.mean for part in parts),
        median=sum(part.median for part in parts),
        low=sum(part.low for part in parts),
        high=sum(part.high for part in parts),
        samples=min(part.samples for part in parts),
    )


def _even(seconds: float, *, like: Quartiles) -> Quartiles:
    return Quartiles(mean=seconds, median=seconds, low=seconds, high=seconds, samples=like.samples)


def _trainer_cpu(rank: RankResult) -> Quartiles:
    if rank.accelerator is not None:
        return rank.accelerator.trainer_cpu_seconds
    # As it was, less what it took to load by itself.
    loaded = 0.0 if rank.num_workers else rank.taken.wait_seconds.mean
    seconds = max(0.0, rank.taken.trainer_cpu_seconds - loaded)
    return _even(seconds, like=rank.taken.step_seconds)


def _loader_cpu(rank: RankResult) -> Quartiles:
    # With every vCPU busy: hyper-threads and caches are shared as in real work.
    busy = max(1, round(rank.vcpus) // rank.ranks_on_host)
    if rank.drains:
        most = max(rank.drains, key=lambda drain: (drain.workers == busy, drain.workers))
        return most.cpu_seconds
    # Not tried alone: its workers' CPU while the model trained, or what the trainer used more.
    seconds = rank.taken.children_cpu_seconds
    if not rank.num_workers:
        seconds = max(0.0, rank.taken.trainer_cpu_seconds - _trainer_cpu(rank).mean)
    return _even(seconds, like=rank.taken.step_seconds)


def _loader_wall(rank: RankResult) -> Quartiles | None:
    # Without workers, all that next() does is loading, of which a device may notice a part only.
    wait = rank.taken.wait_seconds
    if rank.batch_in_one_worker or rank.num_workers or not rank.taken.hidden_seconds:
        return rank.batch_in_one_worker or (None if rank.num_workers else wait)
    return _even(wait.median + rank.taken.hidden_seconds, like=wait)


def _worker_seconds(
    ranks: Sequence[RankResult], *, wall: Quartiles | None, cpu: Quartiles
) -> float | None:
    """Returns worker-seconds of a global step's loading: at most its CPU time and its waiting.

    A lone worker and all of them were timed some seconds apart, between which a shared machine
    becomes faster or slower. Only the waiting that the lone worker was seen to do is waiting, and
    all of it is: a line or a disk gives in bursts, which a median leaves out.
    """
    if wall is None:
        return None
    drains = chain.from_iterable(rank.drains for rank in ranks)
    alone = [drain for drain in drains if drain.workers == 1]
    if len(alone) < len(ranks):
        return wall.median
    waited = sum(drain.idle_seconds for drain in alone)
    return min(max(wall.median, waited), cpu.mean + waited)


def _elsewhere(ranks: Sequence[RankResult]) -> float:
    """Returns busy vCPUs outside the only host; of several hosts it may be one of theirs."""
    seen = (rank.evidence for rank in ranks)
    return max(evidence.elsewhere_seconds / max(evidence.seconds, 1e-9) for evidence in seen)


def _loader_rates(ranks: Sequence[RankResult]) -> tuple[LoaderRate, ...]:
    """Returns global batches per second of the loader alone, for worker counts all ranks tried."""
    tried = defaultdict[int, list[Drain]](list)
    for drain in chain.from_iterable(rank.tried for rank in ranks):
        tried[drain.workers].append(drain)
    return tuple(
        LoaderRate(
            workers=workers * ranks[0].ranks_on_host,
            steps_per_second=min(drain.batches_per_second for drain in drains),
            wait_seconds=sum(drain.idle_seconds for drain in drains),
        )
        for workers, drains in sorted(tried.items())
        if len(drains) == len(ranks)
    )


def _loader_of(ranks: Sequence[RankResult]) -> ProfiledLoader | None:
    loader = ranks[0].loader
    if loader is None or not loader.iterable:
        return loader
    shards = sum(rank.loader.shards or 1 for rank in ranks if rank.loader)
    return msgspec.structs.replace(loader, shards=shards)


def _epochs_of(rank: RankResult) -> EpochTimes | None:
    """Returns the epochs of a rank that was profiled; None: nothing is known of them.

    Where no second epoch began in the steps as they are, its start is the time in which one worker
    makes a batch, as all workers begin at once. What lies between epochs stays unknown then.
    """
    times = rank.epoch_times
    if times is None:
        return None
    start = times.start
    wait = rank.wait_seconds
    batch = rank.batch_in_one_worker
    if rank.num_workers == 0:
        batch = _even(0.0, like=rank.taken.wait_seconds)
    if start is None and batch is not None:
        start = EpochPause(
            seconds=max(0.0, batch.median - wait),
            low_seconds=max(0.0, batch.low - wait),
            high_seconds=max(0.0, batch.high - wait),
            count=0,
        )
    # The script's warm-up is in the mean of its steps.
    return msgspec.structs.replace(times, start=start, inside_seconds=None)


def _check(
    parts: Work, step: StepTerms, states: Sequence[ProfileState], *, tolerance: float
) -> Check:
    """Returns whether the parts add up to the step; if not, the state that has the rest."""
    predicted = parts.step_seconds
    error = predicted / step.step_seconds - 1
    named = {state.id for state in states}
    state = None
    if abs(error) > tolerance and "straggler" in named:
        state = "straggler"
    elif abs(error) > tolerance and "workers" in named and parts.workers == 0:
        # The main process loads as it was seen to, with more threads of torch than a worker.
        seen = parts.accelerator_seconds + (step.wait_seconds or 0.0)
        state = "workers" if abs(seen / step.step_seconds - 1) <= tolerance else None
    return Check(
        predicted_step_seconds=predicted,
        error=error,
        explained=abs(error) <= tolerance,
        state=state,
    )
