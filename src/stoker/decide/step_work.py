"""The work of a step, from a profile: measured figures, and assumptions where one is missing.

Today's step is measured, so the model is corrected by it once. The factor applies only to the terms
that bind today (CPU and workers, the accelerator, or the storage): more CPU never makes an
accelerator faster than measured. The measured CPU-seconds of loading are never changed.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

from stoker.catalog import Catalog, Instance
from stoker.decide.model import (
    LOADING,
    ClusterShape,
    Doubt,
    Hosts,
    StepWork,
    Unexplained,
    estimate,
    free_vcpus,
    parts_on,
)
from stoker.errors import UsageError
from stoker.records import Calibration, Limit, Profile, StepTerms, Storage
from stoker.records.other_programs import OTHERS
from stoker.step_model import (
    others_vcpus_of,
    others_width,
    rates_of,
    read_seconds,
    shared_of,
    speed_width,
    speed_words,
    too_busy,
    turns_cpu_seconds,
    with_neighbour,
)
from stoker.units import ms, percentage, vcpus_words

_NumberT = TypeVar("_NumberT", int, float)

# As a share of the step: with a shorter wait the trainer does not count as starved.
_WAITS = 0.1
# CPU-seconds a byte of the feed's receive side where it was not measured: encrypted, flat out.
_RECEIVE_CPU_PER_BYTE = 0.7e-9
# Unchecked parts are rejected beyond this factor from the measured step.
_FAR = 1.5
# What is corrected where a limit binds today.
_CORRECTED: Mapping[Limit, tuple[Limit, ...]] = {
    "cpu": LOADING,
    "latency": LOADING,
    "accelerator": ("accelerator",),
    "storage": ("storage",),
}
# Far wider than any training run (1e7 s are 116 days): only a wrong unit is refused.
_LONGEST_STEP = 1e7
_SHORTEST_STEP = 1e-7
_MOST = 1e15


def today_of(profile: Profile, listed: Instance) -> Instance:
    """Returns today's type with the profile's vCPUs and accelerators in place of the catalog's."""
    host = profile.host
    return replace(
        listed,
        # A container or an affinity mask may leave only a part of the host.
        vcpus=_or(host.vcpus, listed.vcpus),
        quota_vcpus=host.quota_vcpus,
        accelerators=_or(host.accelerators, listed.accelerators),
    )


def data_hosts_of(profile: Profile, catalog: Catalog) -> tuple[Hosts, ...]:
    return tuple(
        Hosts(
            instance=catalog.get(data.instance_type),
            count=data.count,
            workers=data.workers_per_host,
        )
        for data in profile.data
    )


def measure(
    profile: Profile,
    *,
    today: Instance,
    processes: int,
    calibration: Calibration = Calibration(),  # noqa: B008 - frozen
    data: tuple[Hosts, ...] = (),
    storage: Storage = "unknown",
    machine_vcpus: float | None = None,
    shards_of_rank: int | None = None,
) -> StepWork:
    """Returns the work of a step, corrected so that today's cluster gives today's step.

    Args:
        machine_vcpus: Size of the machine, if all plans run on one.
        shards_of_rank: Shards into which the feed divides a stream; None: as profiled.

    Raises:
        UsageError: If a number of the profile is out of range.
    """
    _refuse_absurd(profile, today)
    raw = _with_inferred(_bare(profile, today=today, processes=processes), profile)
    raw = _with_shards(raw, profile, shards_of_rank=None)
    raw = _with_neighbour(raw, seconds=profile.timed_step.neighbour_seconds or 0.0)
    work = corrected(
        replace(
            raw,
            data=data,
            storage=storage,
            # Before the correction: with data hosts in the profiled run these were measured, too.
            receive_cpu_seconds=raw.receive_cpu_seconds * calibration.receive,
            efficiency=calibration.efficiency,
            calibration_spread=calibration.spread,
        )
    )
    return replace(
        # After the correction: today's step was measured with the script's own shards.
        _with_shards(work, profile, shards_of_rank=shards_of_rank),
        doubts=(*work.doubts, *_doubts(profile, work, vcpus=today.capacity * work.hosts)),
        machine_width=math.hypot(
            others_width(profile, vcpus=today.capacity * work.hosts), speed_width(profile)
        ),
        unexplained=_too_busy(profile, work, machine_vcpus=machine_vcpus)
        or _unexplained(profile, work),
        is_checked=profile.check is not None,
    )


def _doubts(profile: Profile, work: StepWork, *, vcpus: float) -> Iterator[Doubt]:
    """Yields why the model's figures of today's step may be wrong, each with how far."""
    miss = abs(work.step_seconds / work.parts_seconds - 1)
    # Loading by a worker was measured, and no plan loads as the main process does.
    if miss > 0.05 and not _is_loaded_by_trainer(profile, work):
        yield Doubt(width=min(miss, 0.5), text=_miss_words(work))
    if profile.check is None:
        yield Doubt(width=0.1, text="the profile was not checked against its own parts")
    if width := others_width(profile, vcpus=vcpus):
        others = f"{work.others_vcpus:.1f} of the {vcpus_words(vcpus)}"
        yield Doubt(width=width, text=f"{OTHERS} {others} while it was profiled")
    if width := speed_width(profile):
        yield Doubt(width=width, text=speed_words(profile))


def _too_busy(
    profile: Profile, work: StepWork, *, machine_vcpus: float | None
) -> Unexplained | None:
    vcpus = work.reference.capacity * work.hosts
    busy = too_busy(profile, vcpus=vcpus, machine_vcpus=machine_vcpus)
    if not busy:
        return None
    return Unexplained(kind="other_programs", text=busy)


def corrected(work: StepWork) -> StepWork:
    """Returns the work, corrected so that the model gives today's step for today's cluster."""
    parts = replace(work, correction=1.0, corrected=())
    todays = _todays(parts)
    modelled = estimate(parts, todays)
    # Limited to a factor of five below: beyond that the parts are wrong (see `_unexplained`).
    ratio = parts.step_seconds / modelled.step_seconds
    binding = _CORRECTED.get(modelled.limit, ())
    if modelled.limit == "latency" and (ratio < 1 or parts.num_workers == 0):
        # What a step used of the CPU was measured: less of it is no reason for another figure.
        binding = ("latency",)
    if not parts.data:
        # Other terms that are not below the measured step: uncorrected, one of them would become
        # the limit.
        binding += tuple(
            name
            for name, seconds in parts_on(parts, todays).terms.items()
            if seconds >= parts.step_seconds * (1 - 1e-9) and name not in binding
        )
    return replace(
        parts,
        parts_seconds=modelled.step_seconds,
        correction=min(max(ratio, 0.2), 5.0),
        corrected=binding,
    )


def _with_neighbour(work: StepWork, *, seconds: float) -> StepWork:
    todays = parts_on(work, _todays(work))
    return replace(work, neighbour=with_neighbour(todays, seconds=seconds).neighbour)


def _with_shards(work: StepWork, profile: Profile, *, shards_of_rank: int | None) -> StepWork:
    loader = profile.loader
    if loader is None or loader.shards is None:
        return work
    shards = loader.shards
    if shards_of_rank:
        shards = shards_of_rank * round(work.ranks * work.ranks_per_process)
    return replace(
        work,
        shards=shards,
        divides=loader.divides,
        are_shards_set=shards_of_rank is not None,
    )


def with_own_storage(work: StepWork) -> StepWork | None:
    """Returns the work with a separate storage per host; None if that is known or irrelevant."""
    if work.storage != "unknown" or not (work.read_seconds or work.shared.seconds):
        return None
    return corrected(replace(work, storage="per_host"))


def _bare(profile: Profile, *, today: Instance, processes: int) -> StepWork:
    step = profile.timed_step
    hosts = profile.host.count
    ranks = hosts * processes
    started = profile.what.get("ranks")
    if isinstance(started, int) and started > 0:
        # A script may start more ranks, as torchrun does.
        ranks = started
    batch_bytes = step.batch_bytes or 0.0
    others = others_vcpus_of(profile)
    doubts: list[Doubt] = []
    if step.receive_cpu_seconds is not None:
        receive_cpu = step.receive_cpu_seconds * ranks
    else:
        receive_cpu = _RECEIVE_CPU_PER_BYTE * batch_bytes
        doubts.append(Doubt(width=0.05, text="the cost of receiving batches was not measured"))
    if step.trainer_cpu_seconds is None and step.trainer_vcpus is None:
        doubts.append(Doubt(width=0.23, text="the trainer's own CPU use was not measured"))
    trainer, reserved = _trainer_cost(step, today, ranks=ranks)
    return StepWork(
        reference=today,
        hosts=hosts,
        ranks=hosts * processes,
        ranks_per_process=ranks / (hosts * processes),
        num_workers=step.num_workers,
        step_seconds=step.step_seconds,
        accelerator_seconds=0.0,
        receive_seconds=step.receive_seconds or 0.0,
        loader_cpu_seconds=0.0,
        loader_wall_seconds=0.0,
        trainer_cpu_seconds=trainer,
        turns_cpu_seconds=turns_cpu_seconds(step, ranks=ranks),
        reserved_vcpus=reserved,
        receive_cpu_seconds=receive_cpu,
        batch_bytes=batch_bytes,
        read_seconds=read_seconds(profile),
        shared=shared_of(profile, vcpus=today.capacity * hosts - others),
        rates=rates_of(profile),
        wait_seconds=step.wait_seconds,
        others_vcpus=others,
        local_receive_seconds=step.local_receive_seconds,
        handover_seconds=step.handover_seconds or 0.0,
        doubts=tuple(doubts),
        global_batch_size=step.global_batch_size,
        epochs=profile.epochs,
        launch_share=_launch_share(profile),
    )


def _launch_share(profile: Profile) -> float:
    """Returns the share of a step without loading in which no kernel runs; 0: not known."""
    step = profile.timed_step
    for state in profile.states:
        if state.id == "launch" and state.share and step.accelerator_step_seconds:
            return min(1.0, state.share * step.step_seconds / step.accelerator_step_seconds)
    return 0.0


def _trainer_cost(step: StepTerms, today: Instance, *, ranks: int) -> tuple[float, float]:
    """Returns CPU-seconds of the trainers in a step, and vCPUs of a host reserved in place of them.

    Args:
        step: As profiled.
        today: Today's type, with what was measured of it.
        ranks: Trainer processes of all hosts.
    """
    if step.trainer_cpu_seconds is not None:
        return step.trainer_cpu_seconds, 0.0
    if step.trainer_vcpus is not None:
        return 0.0, step.trainer_vcpus
    if today.accelerators:
        # One vCPU per accelerator to launch kernels, and one for the rest.
        return 0.0, min(today.accelerators + 1, today.capacity / 2)
    # Without accelerators the step is CPU work, of at least one thread per rank.
    return (step.accelerator_step_seconds or 0.0) * ranks, 0.0


def _with_inferred(work: StepWork, profile: Profile) -> StepWork:
    step = profile.timed_step
    observed = profile.observed
    doubts = [*work.doubts]
    accelerator = step.accelerator_step_seconds
    # Best evidence first: measured with cached batches, step less wait, utilization.
    if accelerator is None and step.wait_seconds is not None:
        accelerator = max(0.0, step.step_seconds - step.wait_seconds - work.receive_seconds)
        text = "the accelerator-only step is the step less its wait"
        doubts.append(Doubt(width=0.15, text=text))
    elif accelerator is None and observed and observed.gpu_utilization is not None:
        accelerator = observed.gpu_utilization * step.step_seconds
        text = "the accelerator-only step is taken from its utilization"
        doubts.append(Doubt(width=0.15, text=text))
    cpu, wall = _loading(work, profile, accelerator, doubts)
    work = replace(work, loader_cpu_seconds=cpu or 0.0, loader_wall_seconds=wall or 0.0)
    if accelerator is None:
        # If loading alone gives today's step, the accelerator may take any time below it, and 0
        # makes it no limit. Else the step is the accelerator's.
        accelerator = 0.0
        bare = estimate(work, _todays(work))
        # Within 15%, as the self-check of a profile (records/workload.py, max_unexplained).
        is_loading = cpu is not None and bare.step_seconds >= 0.85 * work.step_seconds
        if work.reference.accelerators or not is_loading:
            doubts.append(Doubt(width=0.2, text="the accelerator-only step was not measured"))
        if not is_loading:
            accelerator = max(0.0, work.step_seconds - work.receive_seconds)
    return replace(work, accelerator_seconds=accelerator, doubts=tuple(doubts))


def _loading(
    work: StepWork, profile: Profile, accelerator: float | None, doubts: list[Doubt]
) -> tuple[float | None, float | None]:
    """Returns CPU-seconds and worker-seconds of loading; None: no evidence."""
    step = profile.timed_step
    observed = profile.observed
    wall = step.loader_wall_seconds
    if step.loader_cpu_seconds is not None:
        return step.loader_cpu_seconds, _or(wall, step.loader_cpu_seconds)
    is_starved = _is_starved(work, accelerator)
    if observed and observed.cpu_utilization is not None:
        doubts.append(Doubt(width=0.15, text="loading is taken from the hosts' CPU utilization"))
        cpu = _cpu_by_utilization(work, observed.cpu_utilization)
        if wall is None and is_starved and observed.cpu_utilization < 0.7:
            # The workers were busy all the time without computing: they waited.
            workers = _or(work.num_workers, work.reference.vcpus)
            wall = work.step_seconds * work.hosts * workers
        return cpu, _or(wall, cpu)
    if is_starved is None:
        return wall, wall
    doubts.append(Doubt(width=0.15, text="loading is taken to use all the CPU of today's hosts"))
    cpu = _cpu_of_free_vcpus(work, accelerator, is_starved=is_starved)
    return cpu, _or(wall, cpu)


def _is_starved(work: StepWork, accelerator: float | None) -> bool | None:
    """Whether the trainer waits for data; None: not known."""
    seconds = work.step_seconds
    if work.wait_seconds is not None:
        return work.wait_seconds >= _WAITS * seconds
    if accelerator is None:
        return None
    return accelerator + work.receive_seconds <= (1 - _WAITS) * seconds


def _cpu_by_utilization(work: StepWork, utilization: float) -> float:
    seconds = work.step_seconds
    hosts = work.hosts
    trainer = work.trainer_cpu_seconds + work.reserved_vcpus * hosts * seconds
    return max(0.0, utilization * work.reference.capacity * hosts * seconds - trainer)


def _cpu_of_free_vcpus(work: StepWork, accelerator: float | None, *, is_starved: bool) -> float:
    """Returns the CPU-seconds that loading has at most, or half of them where it keeps up."""
    seconds = work.step_seconds
    free = max(0.0, seconds * free_vcpus(work, _todays(work).dnn) - work.trainer_cpu_seconds)
    # Loading keeps up with half of what is free, or with an unknown smaller part.
    if not is_starved:
        return free / 2
    # Starved: loading takes all the CPU it can get, at most one vCPU per worker.
    if work.num_workers == 0:
        # Loading and training take turns in one thread per rank.
        alone = seconds - (accelerator or 0.0) - work.receive_seconds
        return min(free, max(0.0, alone) * work.ranks * work.ranks_per_process)
    if work.num_workers is not None:
        return min(free, seconds * work.hosts * work.num_workers)
    return free


def _is_loaded_by_trainer(profile: Profile, work: StepWork) -> bool:
    """Whether the trainer loads, and its loading alone differs from what the parts give."""
    if work.num_workers != 0 or "latency" not in work.corrected:
        return False
    return profile.check is None or profile.check.state in (None, "workers")


def _unexplained(profile: Profile, work: StepWork) -> Unexplained | None:
    """Returns why the parts support no prediction; None: they do."""
    step = profile.timed_step
    check = profile.check
    if profile.unmeasured:
        parts = " and ".join(profile.unmeasured)
        text = f"not measured, as no DataLoader of torch makes the batches: {parts} alone"
        return Unexplained(kind="not_measured", text=text)
    if check is not None:
        # The profile's own verdict: it knows what else kept the CPUs busy.
        if check.explained or (check.state == "workers" and _is_loaded_by_trainer(profile, work)):
            return None
        text = f"the parts of the profile miss the measured step by {percentage(abs(check.error))}"
        if check.state:
            text += f", which its state explains: {check.state}"
        return Unexplained(kind="contradiction", text=text)
    seconds = (step.loader_cpu_seconds, step.accelerator_step_seconds, step.wait_seconds)
    evidence = (*seconds, step.loader_wall_seconds, profile.observed)
    if all(value is None for value in evidence):
        text = "only the time of a step is known, not what it waits for"
        return Unexplained(kind="only_step", text=text)
    # The trainer's own need may be a guess: this is the step with none.
    at_least = work.parts_seconds
    if step.trainer_cpu_seconds is None:
        free = corrected(replace(work, reserved_vcpus=0.0, trainer_cpu_seconds=0.0))
        at_least = min(at_least, free.parts_seconds)
    if not at_least / _FAR <= step.step_seconds <= work.parts_seconds * _FAR:
        return Unexplained(kind="contradiction", text=_miss_words(work))
    return None


def _miss_words(work: StepWork) -> str:
    parts = ms(work.parts_seconds)
    step = ms(work.step_seconds)
    return f"the parts give {parts} per step, and {step} were measured"


def _refuse_absurd(profile: Profile, today: Instance) -> None:
    step = profile.timed_step
    bounds = [
        ("step.step_seconds", step.step_seconds, _SHORTEST_STEP, _LONGEST_STEP),
        ("host.count", profile.host.count, 1, 1e6),
        ("host.vcpus", today.vcpus, 1, 1e6),
        ("host.quota_vcpus", today.capacity, 1e-2, 1e6),
        ("host.accelerators", today.accelerators, 0, 1e6),
    ]
    for name in step.__struct_fields__:
        value = getattr(step, name)
        if value is not None:
            # The model divides by the rate.
            least = 1 if name == "storage_bytes_per_second" else 0
            bounds.append((f"step.{name}", value, least, _MOST))
    for name, value, low, high in bounds:
        if not low <= value <= high:
            raise UsageError(
                f"{value:g} is out of range: it must be between {low:g} and {high:g}",
                where=f"profile, key {name}",
                fix="check the unit: seconds and bytes",
            )


def _todays(work: StepWork) -> ClusterShape:
    dnn = Hosts(instance=work.reference, count=work.hosts, workers=work.num_workers)
    return ClusterShape(dnn=dnn, data=work.data, processes=work.ranks // work.hosts)


def _or(value: _NumberT | None, other: _NumberT) -> _NumberT:
    if value is None:
        return other
    return value
