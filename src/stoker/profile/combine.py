"""One profile from the results of all ranks: sums, maxima and the self-check. Pure."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import msgspec

from stoker.errors import UsageError
from stoker.feed.timeline import waits_longest
from stoker.profile.device_clock import HOST
from stoker.profile.fixes import find_fixes
from stoker.profile.rank_results import AsIs, Cost, Drain, Inventory, Quartiles, RankResult
from stoker.profile.replayed_states import neighbour_seconds, slowest_of, transfer_seconds
from stoker.profile.states import (
    Signs,
    find_states,
    others_of,
    signs_of,
    with_one_step,
    without_stops,
)
from stoker.profile.step_watch import speed_spread
from stoker.profile.whole_epochs import epochs_of
from stoker.records import (
    Check,
    GpuLoad,
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
    TransformCost,
    bare_type,
)
from stoker.records.base import Value
from stoker.records.gpu import during_steps, step_busy_share
from stoker.step_model import Parts, parts_of

_MAX_ROWS = 20
LONGER = (
    "profile a command that trains longer: more epochs, or more data; or lower "
    "profile.budget_seconds (--budget)"
)
# Clocks are read at slightly different times: only more than this was more than the pod asks for.
_MORE_THAN_ASKED = 1.05


def storage_rate_of(ranks: Sequence[RankResult]) -> Quartiles | None:
    """Returns the slowest host's storage rate in bytes/s, all ranks reading; None: not known."""
    hosts = defaultdict[str, list[Quartiles]](list)
    for rank in ranks:
        # A rank that did not wait for storage has no rate: then the storage is no limit.
        if rank.reads is None or rank.reads.bytes_per_second is None:
            return None
        hosts[rank.host].append(rank.reads.bytes_per_second)
    found = [_added(own) for own in hosts.values()]
    # All ranks wait for the host whose batches come last.
    return min(found, key=lambda own: own.mean, default=None)


def transforms_of(ranks: Sequence[RankResult]) -> tuple[TransformCost, ...]:
    """Returns the parts of loading: getitem and its parts, most expensive first, then collate."""
    costs = next((rank.costs for rank in ranks if rank.costs), ())
    whole = sum(cost.cpu_seconds for cost in costs if cost.within is None)
    if not whole:
        return ()
    rows: list[Cost] = []
    for head in (cost for cost in costs if cost.within is None):
        inside = [cost for cost in costs if cost.within == head.name]
        rows += [head, *sorted(inside, key=lambda cost: -cost.cpu_seconds)]
    return tuple(
        TransformCost(**msgspec.structs.asdict(cost), share=min(1.0, cost.cpu_seconds / whole))
        for cost in rows[:_MAX_ROWS]
    )


def loader_of(ranks: Sequence[RankResult]) -> ProfiledLoader | None:
    facts = [rank.loader for rank in ranks if rank.loader is not None]
    if not facts or not facts[0].class_name:
        return None
    first = facts[0]
    asked = {own.divides for own in facts}
    return ProfiledLoader(
        class_name=first.class_name,
        reach=first.reach,
        iterable=first.iterable,
        shards=sum(max(1, own.num_workers) for own in facts) if first.iterable else None,
        divides=True if True in asked else False if asked == {False} else None,
        made_here=first.made_here or None,
        in_step=first.in_step or None,
        shippable=first.shippable,
    )


def host_of(
    rank: RankResult, *, group: TodaysGroup, settings: ProfileSettings, is_named: bool
) -> ProfiledHost:
    """Returns the hosts under their best known name; `is_named`: the workload has `group`'s."""
    found = rank.inventory or Inventory()
    given = settings.instance_type
    name = group.instance_type
    # The user's word goes before the host's, the host's before a guess.
    if given and given != "auto":
        name = given
    elif found.instance_type and (given == "auto" or not is_named):
        name = found.instance_type
    return ProfiledHost(
        instance_type=name,
        count=group.count,
        vcpus=max(1, int(rank.vcpus)),
        quota_vcpus=None if rank.vcpus == round(rank.vcpus) else rank.vcpus,
        accelerators=found.accelerators,
        accelerator_model=found.accelerator_model,
        cpu_model=found.cpu_model,
    )


def note_of_host(rank: RankResult, host: ProfiledHost) -> str | None:
    found = rank.inventory or Inventory()
    seen = found.instance_type
    if not seen or bare_type(seen) == bare_type(host.instance_type):
        return None
    return (
        f"this host is a {seen} ({found.source}), profiled as {host.instance_type}: "
        f"--instance-type {seen} prices it as what it is"
    )


def _added_if_known(parts: Sequence[Quartiles | None]) -> Quartiles | None:
    known = [part for part in parts if part is not None]
    return _added(known) if len(known) == len(parts) else None


def _added(parts: Sequence[Quartiles]) -> Quartiles:
    return Quartiles(
        mean=sum(part.mean for part in parts),
        median=sum(part.median for part in parts),
        low=sum(part.low for part in parts),
        high=sum(part.high for part in parts),
        samples=min(part.samples for part in parts),
    )


def _step_with(
    state: str, signs: Sequence[Signs], parts: Parts, *, measured_seconds: float
) -> float | None:
    """Returns the step of the parts where all wait for one rank, or the main process loads."""
    if state == "workers" and parts.workers == 0:
        # As the main process was seen to load, with more threads of torch than a worker has.
        waits = max(own.wait_share for own in signs)
        return parts.accelerator_seconds + waits * measured_seconds
    if state == "straggler":
        return max(parts.step_seconds, *(own.own_seconds for own in signs))
    return None


def combine(
    ranks: Sequence[RankResult],
    *,
    group: TodaysGroup,
    settings: ProfileSettings,
    workload_sha256: str | None,
    what: Mapping[str, Value],
    is_named: bool = True,
    workload_keys: Mapping[str, str] | None = None,
    gpus: tuple[GpuLoad, ...] = (),
) -> Profile:
    """Returns the profile of a *global* step from the results of all ranks.

    Where not `is_named`, the type of `group` is a guess, and what the host reports is better.

    Raises:
        UsageError: If there are no ranks, some are missing, or one lacks a part.
    """
    timed = with_one_step(_with_what_they_had(_complete(ranks)))
    whole = [_Whole(rank) for rank in without_stops(timed)]
    ranks = [own.rank for own in whole]
    first = ranks[0]
    cpu = _added([_loader_cpu(own) for own in whole])
    wall = _added_if_known([_loader_wall(own) for own in whole])
    handover = max(
        (own for own in map(_handover, whole) if own), key=lambda own: own.median, default=None
    )
    receives = [own.rank.receive for own in whole if own.rank.receive is not None]
    # The rank whose steps wait longest, for which all others wait: as in a run's record.
    waiting = whole[
        waits_longest({place: signs_of(own.rank).wait_share for place, own in enumerate(whole)})
    ]
    slowest = _Whole(slowest_of(ranks))
    trainer = [own.accelerator.trainer_cpu_seconds for own in whole]
    on_host = [own for own in whole if own.rank.host == first.host]
    read_bytes = _added_if_known([rank.reads.batch_bytes if rank.reads else None for rank in ranks])
    rate = storage_rate_of(ranks)
    sizes = _added_if_known([own.batch.sizes for own in whole])
    used = sum(own.as_is.trainer_cpu_seconds + own.as_is.children_cpu_seconds for own in whole)
    # Where ranks meet in all-reduce, the slowest one sets the pace: maxima over ranks for times,
    # sums for CPU. Medians for times, as single steps (a checkpoint) must not move them; means for
    # CPU, as a rare, expensive sample is work, too.
    step = StepTerms(
        step_seconds=waiting.as_is.step_seconds.median,
        wait_seconds=waiting.as_is.wait_seconds.median,
        accelerator_step_seconds=slowest.accelerator.step_seconds.median,
        transfer_seconds=transfer_seconds(slowest.rank),
        neighbour_seconds=neighbour_seconds(slowest.rank),
        loader_cpu_seconds=cpu.mean,
        receive_seconds=max((own.thread_seconds.median for own in receives), default=None),
        # Today's loader is torch's own: it takes what the trainer's thread spent in next().
        local_receive_seconds=max(
            own.as_is.receive_seconds if own.num_workers else 0.0 for own in whole
        ),
        hidden_load_seconds=_hidden_load_seconds(waiting),
        handover_seconds=handover.median if handover else None,
        receive_cpu_seconds=max((own.cpu_seconds.mean for own in receives), default=None),
        loader_wall_seconds=_worker_seconds(whole, wall=wall, cpu_seconds=cpu.mean),
        trainer_cpu_seconds=sum(own.mean for own in trainer),
        used_cpu_seconds=used,
        num_workers=sum(own.num_workers for own in on_host),
        global_batch_size=sum(own.batch.samples for own in whole),
        batch_bytes=sizes.mean if sizes else float(sum(own.batch.num_bytes for own in whole)),
        read_bytes=read_bytes.mean if read_bytes else None,
        storage_bytes_per_second=rate.mean if rate else None,
    )
    spread = {
        "step_seconds": _spread(waiting.as_is.step_seconds),
        "wait_seconds": _spread(waiting.as_is.wait_seconds),
        "accelerator_step_seconds": _spread(slowest.accelerator.step_seconds),
        "trainer_cpu_seconds": _spread(_added(trainer)),
        "loader_cpu_seconds": _spread(cpu),
        "loader_wall_seconds": _spread(wall),
        "batch_bytes": _spread(sizes),
        "read_bytes": _spread(read_bytes),
        "storage_bytes_per_second": _spread(rate),
        "handover_seconds": _spread(handover),
    }
    if receives:
        most = max(receives, key=lambda own: own.cpu_seconds.median)
        spread["receive_seconds"] = _spread(most.thread_seconds)
        spread["receive_cpu_seconds"] = _spread(most.cpu_seconds)
    hosts = {own.rank.host: own.rank.vcpus for own in whole}
    spreads = [speed_spread(rank.evidence.core_looks) for rank in ranks if rank.evidence]
    host = host_of(first, group=group, settings=settings, is_named=is_named)
    notes = [note for rank in ranks for note in rank.notes]
    note = note_of_host(first, host)
    known = Profile(
        workload_sha256=workload_sha256,
        workload_keys={**workload_keys} if workload_keys else None,
        host=host,
        step=step,
        observed=Observed(
            # CPU-seconds are a sum over the steps: their mean belongs to it, not their median.
            cpu_utilization=min(
                1.0, used / (whole[0].as_is.step_seconds.mean * sum(hosts.values()))
            ),
            gpu_utilization=step_busy_share(gpus),
            gpus=during_steps(gpus),
            hosts=len(hosts),
            others_vcpus=others_of([signs_of(rank) for rank in ranks]),
            # Where there are several hosts, it may be one of theirs.
            elsewhere_vcpus=_elsewhere_vcpus(ranks) if len(hosts) == 1 else None,
            cpu_speed_spread=max((own for own in spreads if own is not None), default=None),
        ),
        spread={name: own for name, own in spread.items() if own is not None},
        loader_rates=_loader_rates(ranks),
        transforms=transforms_of(ranks),
        gpu_decoding=next((rank.gpu_decoding for rank in ranks if rank.gpu_decoding), None),
        loader=loader_of(ranks),
        epochs=epochs_of(waiting.rank, batch_in_one_worker=_loader_wall(waiting)),
        what={
            **what,
            "versions": {**first.versions},
            "ranks": len(whole),
            "notes": [*dict.fromkeys(notes), *([note] if note else ())],
            **({} if first.seed is None else {"seed": first.seed}),
            **({} if waiting.as_is.clock == HOST else {"clock": waiting.as_is.clock}),
            **({"dataset": first.loader.dataset} if first.loader else {}),
        },
    )
    parts = parts_of(known)
    states = find_states(ranks, parts=parts)
    return msgspec.structs.replace(
        known,
        check=_check(parts, whole, states, settings=settings) if parts else None,
        states=states,
        fixes=find_fixes(ranks, parts=parts, step=step, states=states),
    )


def _elsewhere_vcpus(ranks: Sequence[RankResult]) -> float | None:
    """Returns the vCPUs beyond those of the only host that other programs kept busy."""
    busy = [rank.evidence.elsewhere_vcpus for rank in ranks if rank.evidence]
    if not busy:
        return None
    # The script's own helpers are no other program.
    helpers = sum(_vcpus_of_hosts(ranks, lambda own: own.outside_cpu_seconds).values())
    return max(0.0, max(busy) - helpers)


class _Whole:
    """A rank's result in which the parts that a profile needs are known to be there."""

    def __init__(self, rank: RankResult) -> None:
        assert rank.as_is is not None
        assert rank.accelerator is not None
        assert rank.batch is not None
        self.rank = rank
        self.as_is = rank.as_is
        self.accelerator = rank.accelerator
        self.batch = rank.batch
        self.num_workers = rank.loader.num_workers if rank.loader else 0
        # Workers that make every vCPU of this rank busy.
        self.share = max(1, round(rank.vcpus) // rank.ranks_on_host)


def _complete(ranks: Sequence[RankResult]) -> Sequence[RankResult]:
    if not ranks:
        raise UsageError(
            "the command never iterated a DataLoader of torch in its main process",
            fix="profile a script that trains with a DataLoader of torch or stoker",
        )
    for rank in ranks:
        if rank.missing or rank.as_is is None or rank.accelerator is None or rank.batch is None:
            raise UsageError(
                f"not enough was measured: {rank.missing or 'the process was cut off'}",
                where=f"rank {rank.rank}, host {rank.host}",
                fix=LONGER,
            )
    world = ranks[0].world_size
    if len({rank.rank for rank in ranks}) != world:
        found = ", ".join(str(rank.rank) for rank in ranks)
        raise UsageError(
            f"only ranks {found} of {world} left results",
            fix="read the log of the missing ranks, and profile again",
        )
    return ranks


def _with_what_they_had(ranks: Sequence[RankResult]) -> Sequence[RankResult]:
    """Returns ranks with the CPU time and the vCPUs that their hosts had, and notes on both.

    A pod without a limit may use the idle CPUs of its node: the measured step had them. Beyond a
    quota or an affinity mask only a process that left it uses CPUs: the training's CPU time, but
    not on vCPUs of its host.
    """
    inside = _vcpus_of_hosts(ranks, lambda own: own.trainer_cpu_seconds + own.children_cpu_seconds)
    outside = _vcpus_of_hosts(ranks, lambda own: own.outside_cpu_seconds)
    return [
        _with_idle_vcpus(rank, used=inside[rank.host])
        if rank.cpu_limit == "pod"
        else _without_strays(rank, inside=inside[rank.host], outside=outside[rank.host])
        for rank in ranks
    ]


def _vcpus_of_hosts(
    ranks: Sequence[RankResult], cpu_seconds: Callable[[AsIs], float]
) -> Mapping[str, float]:
    used = defaultdict[str, float](float)
    for rank in ranks:
        if rank.as_is is not None:
            used[rank.host] += cpu_seconds(rank.as_is) / rank.as_is.step_seconds.mean
    return used


def _with_idle_vcpus(rank: RankResult, *, used: float) -> RankResult:
    if used <= _MORE_THAN_ASKED * rank.vcpus:
        return rank
    return msgspec.structs.replace(
        rank,
        vcpus=round(used, 2),
        notes=(
            *rank.notes,
            f"the training used {used:.1f} vCPUs of host {rank.host}, and its pod asks for "
            f"{rank.vcpus:.3g}: it is slower where the node has no idle ones. Ask for more "
            "(kubernetes.pools or kubernetes.dnn, key cpu)",
        ),
    )


def _without_strays(rank: RankResult, *, inside: float, outside: float) -> RankResult:
    """Returns the rank without CPU time that its host's vCPUs cannot have given.

    Args:
        inside: vCPUs that the host's ranks used, those outside of the host apart.
        outside: vCPUs beyond the host's that processes of its ranks are known to have used.
    """
    if rank.as_is is None or inside + outside <= _MORE_THAN_ASKED * rank.vcpus:
        return rank
    as_is = rank.as_is
    # Where no process is known to have left, one did that has ended since.
    children = as_is.children_cpu_seconds
    beyond = max(0.0, inside - rank.vcpus) * as_is.step_seconds.mean / rank.ranks_on_host
    unseen = min(children, beyond)
    limit = "its CPU quota" if rank.cpu_limit == "quota" else "its CPU affinity"
    return msgspec.structs.replace(
        rank,
        as_is=msgspec.structs.replace(
            as_is,
            children_cpu_seconds=children - unseen,
            outside_cpu_seconds=as_is.outside_cpu_seconds + unseen,
        ),
        notes=(
            *rank.notes,
            f"the training used {inside + outside:.1f} vCPUs, of which host {rank.host} has "
            f"{rank.vcpus:.3g} by {limit}: helper processes of the script left it (a compiler's, "
            "or some that set their own). What they used elsewhere is in no figure of a step",
        ),
    )


def _loader_cpu(own: _Whole) -> Quartiles:
    # Else with most workers: hyper-threads and caches are shared as in real work.
    drain = _drain_with(own.rank.drains, workers=own.share)
    if drain:
        return drain.cpu_seconds
    # Not tried alone: its workers' CPU while the model trained, or what the trainer used more.
    as_is = own.as_is
    seconds = (
        as_is.children_cpu_seconds
        if own.num_workers
        else max(0.0, as_is.trainer_cpu_seconds - own.accelerator.trainer_cpu_seconds.mean)
    )
    samples = as_is.step_seconds.samples
    return Quartiles(mean=seconds, median=seconds, low=seconds, high=seconds, samples=samples)


def _handover(own: _Whole) -> Quartiles | None:
    """Returns the hand-over time at the script's number of workers, else with every vCPU busy."""
    # The device computes meanwhile: this time is hidden.
    if own.rank.uses_cuda or own.as_is.clock != HOST:
        return None
    drains = [drain for drain in own.rank.drains if drain.handover_seconds is not None]
    drain = _drain_with(drains, workers=own.num_workers or own.share)
    return drain.handover_seconds if drain else None


def _drain_with(drains: Sequence[Drain], *, workers: int) -> Drain | None:
    return max(drains, key=lambda own: (own.workers == workers, own.workers), default=None)


def _loader_wall(own: _Whole) -> Quartiles | None:
    alone = [drain.wall_seconds for drain in own.rank.drains if drain.workers == 1]
    if alone:
        return alone[0]
    # Without workers, all that next() does is loading.
    if own.num_workers:
        return None
    wait = own.as_is.wait_seconds
    seconds = own.as_is.host_wait_seconds
    if seconds is None:
        return wait
    # A device may have noticed a part of it only.
    return msgspec.structs.replace(wait, mean=seconds, median=seconds, low=seconds, high=seconds)


def _worker_seconds(
    whole: Sequence[_Whole], *, wall: Quartiles | None, cpu_seconds: float
) -> float | None:
    """Returns worker-seconds of a global step's loading: at most its CPU time and its waiting.

    A lone worker and all of them were timed some seconds apart, between which a shared machine
    becomes faster or slower. Only the waiting that the lone worker was seen to do is waiting, and
    all of it is: a line or a disk gives in bursts, which a median leaves out.

    Args:
        whole: All ranks.
        wall: Of a lone worker of each rank, added; None: not measured.
        cpu_seconds: CPU-seconds of the same loading with all vCPUs busy.
    """
    if wall is None:
        return None
    alone = [drain for own in whole for drain in own.rank.drains if drain.workers == 1]
    if len(alone) < len(whole):
        return wall.median
    waited = sum(drain.idle_seconds for drain in alone)
    return min(max(wall.median, waited), cpu_seconds + waited)


def _hidden_load_seconds(own: _Whole) -> float | None:
    if own.num_workers or own.as_is.host_wait_seconds is None:
        return None
    return own.as_is.hidden_seconds


def _spread(part: Quartiles | None) -> Spread | None:
    return Spread(low=part.low, high=part.high, samples=part.samples) if part else None


def _loader_rates(ranks: Sequence[RankResult]) -> tuple[LoaderRate, ...]:
    """Returns global batches per second of the loader alone, for worker counts all ranks tried."""
    tried: dict[int, list[Drain]] = {}
    for rank in ranks:
        for drain in rank.drains:
            if drain.batches_per_second > 0:
                tried.setdefault(drain.workers, []).append(drain)
    return tuple(
        LoaderRate(
            workers=workers * ranks[0].ranks_on_host,
            steps_per_second=min(drain.batches_per_second for drain in drains),
            wait_seconds=sum(drain.idle_seconds for drain in drains),
        )
        for workers, drains in sorted(tried.items())
        if len(drains) == len(ranks)
    )


def _check(
    parts: Parts,
    whole: Sequence[_Whole],
    states: Sequence[ProfileState],
    *,
    settings: ProfileSettings,
) -> Check:
    predicted = parts.step_seconds
    measured = whole[0].as_is.step_seconds.median
    error = predicted / measured - 1
    tolerance = settings.max_unexplained
    is_explained = abs(error) <= tolerance
    signs = [signs_of(own.rank) for own in whole]
    explaining = (
        state.id
        for state in states
        if (step := _step_with(state.id, signs, parts, measured_seconds=measured)) is not None
        and abs(step / measured - 1) <= tolerance
    )
    return Check(
        predicted_step_seconds=predicted,
        error=error,
        explained=is_explained,
        state=None if is_explained else next(explaining, None),
    )
