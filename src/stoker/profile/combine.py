"""Profiles from what was measured. Pure.

`combine` makes one of the results of all ranks: sums, maxima and the self-check. `observed_profile`
makes one of a job that has run, from its load.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import msgspec

from stoker.errors import UsageError
from stoker.feed.device_events import bare_uuid
from stoker.feed.timeline import waits_longest
from stoker.platforms.sagemaker.load import group_loads
from stoker.platforms.sagemaker.observed_job import ObservedJob
from stoker.profile.memory.findings import memory_findings, memory_of
from stoker.profile.rank_results import (
    HOST,
    AsIs,
    Cost,
    Drain,
    Inventory,
    Quartiles,
    RankResult,
    Receive,
    epochs_of,
)
from stoker.profile.states import (
    Signs,
    find_fixes,
    find_states,
    launch,
    neighbour_seconds,
    others_of,
    signs_of,
    slowest_of,
    strange_load_words,
    transfer_seconds,
    with_one_step,
    without_stops,
)
from stoker.profile.steps import speed_spread
from stoker.records import (
    Check,
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
from stoker.records.gpu import GpuLoads, during_steps, step_busy_share
from stoker.step_model import Parts, parts_of

_MAX_ROWS = 20
LONGER = (
    "profile a command that trains longer: more epochs, or more data; or lower "
    "profile.budget_seconds (--budget)"
)
# Clocks are read at slightly different times: only more than this was more than the pod asks for.
_MORE_THAN_ASKED = 1.05
# Below it a training run's start weighs much in its means.
_FEW_MINUTES = 10.0


def storage_rate_of(ranks: Sequence[RankResult]) -> Quartiles | None:
    """Returns the slowest host's storage rate in bytes/s, all ranks reading; None: not known."""
    hosts = defaultdict[str, list[Quartiles]](list)
    for rank in ranks:
        # A rank that did not wait for storage has no rate: then the storage is no limit.
        if rank.reads is None or rank.reads.bytes_per_second is None:
            return None
        hosts[rank.host].append(rank.reads.bytes_per_second)
    rates = [_added(rates_of_ranks) for rates_of_ranks in hosts.values()]
    # All ranks wait for the host whose batches come last.
    return min(rates, key=lambda rate: rate.mean, default=None)


def transforms_of(ranks: Sequence[RankResult]) -> tuple[TransformCost, ...]:
    """Returns the parts of loading: getitem and its parts, most expensive first, then collate."""
    # Ranks load alike: one of them took its loading apart.
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
    answers = {loader.divides for loader in facts}
    shards = None
    if first.iterable:
        # A stream without workers is one shard.
        shards = sum(max(1, loader.num_workers) for loader in facts)
    return ProfiledLoader(
        class_name=first.class_name,
        reach=first.reach,
        iterable=first.iterable,
        shards=shards,
        divides=_divides(answers),
        made_here=first.made_here or None,
        in_step=first.in_step or None,
        fails_in_workers=first.fails_in_workers or None,
        shippable=first.shippable,
        splits=first.splits,
    )


def _divides(answers: set[bool | None]) -> bool | None:
    """Returns whether a stream divides itself: on any rank; None: not known on all."""
    if True in answers:
        return True
    if answers == {False}:
        return False
    return None


def host_of(
    rank: RankResult, *, group: TodaysGroup, settings: ProfileSettings, is_named: bool
) -> ProfiledHost:
    """Returns the hosts under the best known type: the user's, then the host's, then `group`'s.

    Args:
        rank: A result of a rank of these hosts.
        group: Today's hosts.
        settings: With the type that the user gave.
        is_named: Whether the workload names the type of `group`.
    """
    inventory = rank.inventory or Inventory()
    given = settings.instance_type
    name = group.instance_type
    # The user's word goes before the host's, the host's before a guess.
    if given and given != "auto":
        name = given
    elif inventory.instance_type and (given == "auto" or not is_named):
        name = inventory.instance_type
    return ProfiledHost(
        instance_type=name,
        count=group.count,
        # Whole ones, as a type has them; under a quota the fraction counts.
        vcpus=max(1, int(rank.vcpus)),
        quota_vcpus=None if rank.vcpus == round(rank.vcpus) else rank.vcpus,
        accelerators=inventory.accelerators,
        accelerator_model=inventory.accelerator_model,
        cpu_model=inventory.cpu_model,
    )


def note_of_host(rank: RankResult, host: ProfiledHost) -> str | None:
    inventory = rank.inventory or Inventory()
    seen = inventory.instance_type
    if not seen or bare_type(seen) == bare_type(host.instance_type):
        return None
    return (
        f"this host is a {seen} ({inventory.source}), profiled as {host.instance_type}: "
        f"--instance-type {seen} prices it as what it is"
    )


def _added_if_known(parts: Sequence[Quartiles | None]) -> Quartiles | None:
    measured = [part for part in parts if part is not None]
    if len(measured) < len(parts):
        return None
    return _added(measured)


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
        waits = max(rank.wait_share for rank in signs)
        return parts.accelerator_seconds + waits * measured_seconds
    if state == "straggler":
        return max(parts.step_seconds, *(rank.own_seconds for rank in signs))
    return None


class _MeasuredRank:
    """A rank's result in which the parts that a profile needs are known to be there."""

    def __init__(self, rank: RankResult) -> None:
        assert rank.as_is is not None
        assert rank.accelerator is not None
        assert rank.batch is not None
        self.result = rank
        self.as_is = rank.as_is
        self.accelerator = rank.accelerator
        self.batch = rank.batch
        self.num_workers = rank.num_workers
        # Workers that make every vCPU of this rank busy.
        self.num_busy_workers = max(1, round(rank.vcpus) // rank.ranks_on_host)


@dataclass(frozen=True, slots=True, kw_only=True)
class _GlobalStep:
    """A step of all ranks together: their figures added, or those of the rank that counts.

    Where ranks meet in all-reduce, the slowest one sets the pace: maxima over ranks for times, sums
    for CPU. Medians for times, as single steps (a checkpoint) must not move them; means for CPU, as
    a rare, expensive sample is work, too.

    Attributes:
        waiting: The rank whose steps wait longest, for which all others wait: as in a run's record.
        slowest: The rank whose steps on cached batches take longest.
        loader_wall: Seconds of a lone worker of each rank, added; None: not measured.
        handover: Hand-over of the slowest rank; None: it is hidden, or not measured.
        used_cpu_seconds: CPU time of the steps as they are.
    """

    measured_ranks: tuple[_MeasuredRank, ...]
    waiting: _MeasuredRank
    slowest: _MeasuredRank
    loader_cpu: Quartiles
    loader_wall: Quartiles | None
    trainer_cpu: Quartiles
    handover: Quartiles | None
    receives: tuple[Receive, ...]
    batch_sizes: Quartiles | None
    read_bytes: Quartiles | None
    storage_rate: Quartiles | None
    used_cpu_seconds: float

    @property
    def batch_bytes(self) -> float:
        """Bytes of a global batch: the mean of several, or of the one that was looked at."""
        if self.batch_sizes is None:
            return float(sum(rank.batch.num_bytes for rank in self.measured_ranks))
        return self.batch_sizes.mean

    @property
    def results(self) -> list[RankResult]:
        """Results of all ranks, in their order."""
        return [rank.result for rank in self.measured_ranks]

    @property
    def signs(self) -> list[Signs]:
        """Signs of all ranks, in their order."""
        return [signs_of(rank) for rank in self.results]


def combine(
    ranks: Sequence[RankResult],
    *,
    group: TodaysGroup,
    settings: ProfileSettings,
    workload_sha256: str | None,
    what: Mapping[str, Value],
    is_named: bool = True,
    workload_keys: Mapping[str, str] | None = None,
    gpus: GpuLoads = (),
) -> Profile:
    """Returns the profile of a *global* step from the results of all ranks.

    Args:
        ranks: A result of each.
        group: Today's hosts.
        settings: They name the type, and what part of a step may stay unexplained.
        workload_sha256: Of the workload file; None: there is none.
        what: Facts of the run, which the profile keeps as they are.
        is_named: Whether the workload names the type of `group`; if not, that is a guess, and what
            the host reports is better.
        workload_keys: Keys of the workload that make a profile another one, with their values.
        gpus: Load of the GPUs during the job.

    Raises:
        UsageError: If there are no ranks, some are missing, or one lacks a part.
    """
    gpus = _trained_on(gpus, ranks)
    timed = with_one_step(_with_what_they_had(_complete(ranks)))
    total = _global_step(without_stops(timed))
    results = total.results
    host = host_of(results[0], group=group, settings=settings, is_named=is_named)
    profile = Profile(
        workload_sha256=workload_sha256,
        workload_keys={**workload_keys} if workload_keys else None,
        host=host,
        step=_terms_of(total),
        observed=_observed(total, gpus),
        spread=_spreads_of(total),
        loader_rates=_loader_rates(results),
        transforms=transforms_of(results),
        gpu_decoding=next((rank.gpu_decoding for rank in results if rank.gpu_decoding), None),
        loader=loader_of(results),
        epochs=epochs_of(total.waiting.result, batch_in_one_worker=_loader_wall(total.waiting)),
        memory=memory_of(results),
        what={**what, **_facts_of(total, host_note=note_of_host(results[0], host), gpus=gpus)},
    )
    return _checked(profile, total, settings=settings)


def _trained_on(gpus: GpuLoads, ranks: Sequence[RankResult]) -> GpuLoads:
    """Returns the loads of the GPUs that the ranks trained on; of all where that is not known.

    A script may choose one of eight itself, and other people's programs use the others.
    """
    if not all(rank.gpu_uuids for rank in ranks):
        return gpus
    used = set(chain.from_iterable(rank.gpu_uuids for rank in ranks))
    return tuple(gpu for gpu in gpus if bare_uuid(gpu.uuid) in used) or gpus


def _global_step(ranks: Sequence[RankResult]) -> _GlobalStep:
    measured_ranks = tuple(_MeasuredRank(rank) for rank in ranks)
    wait_shares = {place: signs_of(rank).wait_share for place, rank in enumerate(ranks)}
    # Those that a device does not hide.
    handovers = [seconds for seconds in map(_handover, measured_ranks) if seconds]
    batch_bytes = [rank.reads.batch_bytes if rank.reads else None for rank in ranks]
    return _GlobalStep(
        measured_ranks=measured_ranks,
        waiting=measured_ranks[waits_longest(wait_shares)],
        slowest=_MeasuredRank(slowest_of(ranks)),
        loader_cpu=_added([_loader_cpu(rank) for rank in measured_ranks]),
        loader_wall=_added_if_known([_loader_wall(rank) for rank in measured_ranks]),
        trainer_cpu=_added([rank.accelerator.trainer_cpu_seconds for rank in measured_ranks]),
        handover=max(handovers, key=lambda seconds: seconds.median, default=None),
        receives=tuple(rank.receive for rank in ranks if rank.receive is not None),
        batch_sizes=_added_if_known([rank.batch.sizes for rank in measured_ranks]),
        read_bytes=_added_if_known(batch_bytes),
        storage_rate=storage_rate_of(ranks),
        used_cpu_seconds=sum(
            rank.as_is.trainer_cpu_seconds + rank.as_is.children_cpu_seconds
            for rank in measured_ranks
        ),
    )


def _terms_of(total: _GlobalStep) -> StepTerms:
    measured_ranks = total.measured_ranks
    waiting = total.waiting
    slowest = total.slowest
    cpu_seconds = total.loader_cpu.mean
    receives = total.receives
    # Today's loader is torch's own: it takes what the trainer's thread spent in next().
    local_receives = [rank.as_is.receive_seconds for rank in measured_ranks if rank.num_workers]
    # A host's workers, all its ranks together: plans count by hosts.
    on_first_host = [
        rank for rank in measured_ranks if rank.result.host == measured_ranks[0].result.host
    ]
    return StepTerms(
        step_seconds=waiting.as_is.step_seconds.median,
        wait_seconds=waiting.as_is.wait_seconds.median,
        accelerator_step_seconds=slowest.result.replayed_seconds,
        transfer_seconds=transfer_seconds(slowest.result),
        neighbour_seconds=neighbour_seconds(slowest.result),
        loader_cpu_seconds=cpu_seconds,
        receive_seconds=max((receive.thread_seconds.median for receive in receives), default=None),
        local_receive_seconds=max(local_receives, default=0.0),
        hidden_load_seconds=_hidden_load_seconds(waiting),
        handover_seconds=total.handover.median if total.handover else None,
        receive_cpu_seconds=max((receive.cpu_seconds.mean for receive in receives), default=None),
        loader_wall_seconds=_worker_seconds(
            measured_ranks, wall=total.loader_wall, cpu_seconds=cpu_seconds
        ),
        trainer_cpu_seconds=total.trainer_cpu.mean,
        used_cpu_seconds=total.used_cpu_seconds,
        num_workers=sum(rank.num_workers for rank in on_first_host),
        global_batch_size=sum(rank.batch.samples for rank in measured_ranks),
        batch_bytes=total.batch_bytes,
        read_bytes=_mean_of(total.read_bytes),
        storage_bytes_per_second=_mean_of(total.storage_rate),
    )


def _mean_of(part: Quartiles | None) -> float | None:
    if part is None:
        return None
    return part.mean


def _spreads_of(total: _GlobalStep) -> dict[str, Spread]:
    parts = {
        "step_seconds": total.waiting.as_is.step_seconds,
        "wait_seconds": total.waiting.as_is.wait_seconds,
        "accelerator_step_seconds": total.slowest.accelerator.step_seconds,
        "trainer_cpu_seconds": total.trainer_cpu,
        "loader_cpu_seconds": total.loader_cpu,
        "loader_wall_seconds": total.loader_wall,
        "batch_bytes": total.batch_sizes,
        "read_bytes": total.read_bytes,
        "storage_bytes_per_second": total.storage_rate,
        "handover_seconds": total.handover,
    }
    if total.receives:
        # The rank whose feed costs most CPU: the others wait for it.
        dearest = max(total.receives, key=lambda receive: receive.cpu_seconds.median)
        parts["receive_seconds"] = dearest.thread_seconds
        parts["receive_cpu_seconds"] = dearest.cpu_seconds
    return {
        name: Spread(low=part.low, high=part.high, samples=part.samples)
        for name, part in parts.items()
        if part is not None
    }


def _observed(total: _GlobalStep, gpus: GpuLoads) -> Observed:
    ranks = total.results
    vcpus_of_hosts = {rank.host: rank.vcpus for rank in ranks}
    # CPU-seconds are a sum over the steps: their mean belongs to it, not their median.
    had_seconds = total.measured_ranks[0].as_is.step_seconds.mean * sum(vcpus_of_hosts.values())
    speed_spreads = [speed_spread(rank.evidence.core_looks) for rank in ranks if rank.evidence]
    return Observed(
        cpu_utilization=min(1.0, total.used_cpu_seconds / had_seconds),
        gpu_utilization=step_busy_share(gpus),
        gpus=during_steps(gpus),
        hosts=len(vcpus_of_hosts),
        others_vcpus=others_of(total.signs),
        elsewhere_vcpus=_elsewhere_vcpus(ranks),
        cpu_speed_spread=max((share for share in speed_spreads if share is not None), default=None),
    )


def _facts_of(total: _GlobalStep, *, host_note: str | None, gpus: GpuLoads) -> dict[str, Value]:
    """Returns what else is known of the training.

    Args:
        total: A step of all ranks.
        host_note: A note on their hosts; None: there is none.
        gpus: Load of the GPUs during the job.
    """
    first = total.results[0]
    notes: list[str] = []
    for rank in total.results:
        notes += rank.notes
    if host_note:
        notes.append(host_note)
    if strange := strange_load_words(_terms_of(total), gpus):
        notes.append(strange)
    facts: dict[str, Value] = {
        "versions": {**first.versions},
        "ranks": len(total.measured_ranks),
        "notes": [*dict.fromkeys(notes)],
    }
    if first.seed is not None:
        facts["seed"] = first.seed
    if total.waiting.as_is.clock != HOST:
        facts["clock"] = total.waiting.as_is.clock
    if first.loader:
        facts["dataset"] = first.loader.dataset
    return facts


def _checked(profile: Profile, total: _GlobalStep, *, settings: ProfileSettings) -> Profile:
    """Returns the profile with its states, its fixes, and whether its parts explain the step."""
    parts = parts_of(profile)
    step = profile.timed_step
    short, memory_fixes = memory_findings(profile.memory, total.results, read_bytes=step.read_bytes)
    states = find_states(total.results, parts=parts)
    loads: GpuLoads = ()
    if profile.observed:
        loads = profile.observed.gpus
    launching = launch(step, loads, parts=parts)
    named = {state.id for state in states}
    # Python code in the main thread is a cause of its own.
    if launching is not None and "gil" not in named:
        # A GPU that idles does not set the pace.
        states = (launching, *(state for state in states if state.id != "accelerator"))
    if short is not None:
        # First: a process that is killed ends all else.
        states = (short, *states)
    fixes = find_fixes(total.results, parts=parts, step=step, states=states)
    fixes = (*fixes, *memory_fixes)
    check = None
    if parts:
        check = _check(parts, total, states, settings=settings)
    return msgspec.structs.replace(profile, check=check, states=states, fixes=fixes)


def _elsewhere_vcpus(ranks: Sequence[RankResult]) -> float | None:
    """Returns the vCPUs beyond those of the only host that other programs kept busy.

    None: not known, or there are several hosts, so that the program may be one of theirs.
    """
    busy = [rank.evidence.elsewhere_vcpus for rank in ranks if rank.evidence]
    if not busy or len({rank.host for rank in ranks}) > 1:
        return None
    # The script's own helpers are no other program.
    helpers = sum(_vcpus_of_hosts(ranks, lambda as_is: as_is.outside_cpu_seconds).values())
    return max(0.0, max(busy) - helpers)


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
    # All ranks of one run say the same.
    world = ranks[0].world_size
    if len({rank.rank for rank in ranks}) != world:
        present = ", ".join(str(rank.rank) for rank in ranks)
        raise UsageError(
            f"only ranks {present} of {world} left results",
            fix="read the log of the missing ranks, and profile again",
        )
    return ranks


def _with_what_they_had(ranks: Sequence[RankResult]) -> Sequence[RankResult]:
    """Returns ranks with the CPU time and the vCPUs that their hosts had, and notes on both.

    A pod without a limit may use the idle CPUs of its node: the measured step had them. Beyond a
    quota or an affinity mask only a process that left it uses CPUs: the training's CPU time, but
    not on vCPUs of its host.
    """
    inside = _vcpus_of_hosts(
        ranks, lambda as_is: as_is.trainer_cpu_seconds + as_is.children_cpu_seconds
    )
    outside = _vcpus_of_hosts(ranks, lambda as_is: as_is.outside_cpu_seconds)
    corrected = []
    for rank in ranks:
        used = inside[rank.host]
        if rank.cpu_limit == "pod":
            corrected.append(_with_idle_vcpus(rank, used=used))
        else:
            corrected.append(_without_strays(rank, inside=used, outside=outside[rank.host]))
    return corrected


def _vcpus_of_hosts(
    ranks: Sequence[RankResult], cpu_seconds: Callable[[AsIs], float]
) -> Mapping[str, float]:
    used = defaultdict[str, float](float)
    for rank in ranks:
        if rank.as_is is not None:
            # CPU-seconds a step over seconds a step are vCPUs.
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
    # No more than its children used at all.
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


def _loader_cpu(rank: _MeasuredRank) -> Quartiles:
    # With every vCPU busy: hyper-threads and caches are shared as in real work.
    drain = _drain_with(rank.result.drains, workers=rank.num_busy_workers)
    if drain:
        return drain.cpu_seconds
    # Not tried alone: its workers' CPU while the model trained, or what the trainer used more.
    as_is = rank.as_is
    seconds = as_is.children_cpu_seconds
    if not rank.num_workers:
        # Without workers the trainer's CPU is both: what cached batches leave is loading.
        trainer_alone = rank.accelerator.trainer_cpu_seconds.mean
        seconds = max(0.0, as_is.trainer_cpu_seconds - trainer_alone)
    samples = as_is.step_seconds.samples
    return Quartiles(mean=seconds, median=seconds, low=seconds, high=seconds, samples=samples)


def _handover(rank: _MeasuredRank) -> Quartiles | None:
    """Returns the hand-over time at the script's number of workers, else with every vCPU busy."""
    # The device computes at the same time: this time is hidden.
    if rank.result.uses_cuda or rank.as_is.clock != HOST:
        return None
    drains = [drain for drain in rank.result.drains if drain.handover_seconds is not None]
    drain = _drain_with(drains, workers=rank.num_workers or rank.num_busy_workers)
    if drain is None:
        return None
    return drain.handover_seconds


def _drain_with(drains: Sequence[Drain], *, workers: int) -> Drain | None:
    """Returns the trial with that many workers, else the one with most; None: there is none."""
    return max(drains, key=lambda drain: (drain.workers == workers, drain.workers), default=None)


def _loader_wall(rank: _MeasuredRank) -> Quartiles | None:
    alone = [drain.wall_seconds for drain in rank.result.drains if drain.workers == 1]
    if alone:
        return alone[0]
    # Without workers, all that next() does is loading.
    if rank.num_workers:
        return None
    wait = rank.as_is.wait_seconds
    seconds = rank.as_is.host_wait_seconds
    if seconds is None:
        return wait
    # A device may have noticed a part of it only.
    return msgspec.structs.replace(wait, mean=seconds, median=seconds, low=seconds, high=seconds)


def _worker_seconds(
    whole: Sequence[_MeasuredRank], *, wall: Quartiles | None, cpu_seconds: float
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
    drains = chain.from_iterable(rank.result.drains for rank in whole)
    alone = [drain for drain in drains if drain.workers == 1]
    if len(alone) < len(whole):
        return wall.median
    waited = sum(drain.idle_seconds for drain in alone)
    return min(max(wall.median, waited), cpu_seconds + waited)


def _hidden_load_seconds(rank: _MeasuredRank) -> float | None:
    if rank.num_workers or rank.as_is.host_wait_seconds is None:
        return None
    return rank.as_is.hidden_seconds


def _loader_rates(ranks: Sequence[RankResult]) -> tuple[LoaderRate, ...]:
    """Returns global batches per second of the loader alone, for worker counts all ranks tried."""
    tried = defaultdict[int, list[Drain]](list)
    for rank in ranks:
        for drain in rank.drains:
            if drain.batches_per_second > 0:
                tried[drain.workers].append(drain)
    return tuple(
        _loader_rate(drains, workers=workers * ranks[0].ranks_on_host)
        for workers, drains in sorted(tried.items())
        if len(drains) == len(ranks)
    )


def _loader_rate(drains: Sequence[Drain], *, workers: int) -> LoaderRate:
    return LoaderRate(
        workers=workers,
        steps_per_second=min(drain.batches_per_second for drain in drains),
        wait_seconds=sum(drain.idle_seconds for drain in drains),
    )


def _check(
    parts: Parts,
    total: _GlobalStep,
    states: Sequence[ProfileState],
    *,
    settings: ProfileSettings,
) -> Check:
    predicted = parts.step_seconds
    measured = total.measured_ranks[0].as_is.step_seconds.median
    error = predicted / measured - 1
    tolerance = settings.max_unexplained
    is_explained = abs(error) <= tolerance
    state = None
    if not is_explained:
        state = _explaining_state(parts, total, states, tolerance=tolerance)
    return Check(
        predicted_step_seconds=predicted,
        error=error,
        explained=is_explained,
        state=state,
    )


def _explaining_state(
    parts: Parts,
    total: _GlobalStep,
    states: Sequence[ProfileState],
    *,
    tolerance: float,
) -> str | None:
    """Returns the state that has the time that no part knows; None: there is none.

    With that time, the step of the state must be the measured one.
    """
    measured = total.measured_ranks[0].as_is.step_seconds.median
    for state in states:
        step_seconds = _step_with(state.id, total.signs, parts, measured_seconds=measured)
        if step_seconds is not None and abs(step_seconds / measured - 1) <= tolerance:
            return state.id
    return None


def observed_profile(job: ObservedJob, *, sizes: Mapping[str, tuple[int, int]]) -> Profile:
    """Returns the profile of a job whose load was read; `sizes` are types' vCPUs and GPUs. Pure."""
    kind = job.instance_type
    vcpus, accelerators = sizes[kind]
    (mean,) = group_loads(job.loads, types={load.group: kind for load in job.loads})
    return Profile(
        host=ProfiledHost(
            instance_type=kind, count=len(job.loads), vcpus=vcpus, accelerators=accelerators
        ),
        observed=Observed(
            cpu_utilization=mean.cpu,
            gpu_utilization=mean.gpu,
            hosts=sum(load.cpu is not None for load in job.loads) or None,
        ),
        what={
            "source": "cloudwatch",
            "training_job": job.name,
            "when": job.began_at,
            "minutes": round(job.minutes, 1),
            "point_seconds": job.point_seconds,
            "is_running": job.is_running,
            "host_cpu": {load.host: _rounded(load.cpu) for load in job.loads},
            "host_gpu": {load.host: _rounded(load.gpu) for load in job.loads},
            "notes": [*_notes_on(job)],
        },
    )


def _notes_on(job: ObservedJob) -> Iterator[str]:
    """Yields why a job's means may say little."""
    if job.is_running:
        yield "the job is still running: these are the means until now"
    if job.minutes < _FEW_MINUTES:
        yield f"over {job.minutes:.0f} minutes only: the start-up is a large part of these means"
    # CloudWatch keeps points of a minute for 15 days, then means of longer times.
    if job.point_seconds > 60:
        yield f"a point is the mean of {job.point_seconds // 60} minutes: the job is long or old"
    unseen = [load.host for load in job.loads if load.cpu is None]
    if unseen:
        yield f"CloudWatch has no figures of {', '.join(unseen)}"


def _rounded(value: float | None) -> float | None:
    if value is None:
        return None
    return round(value, 4)
