"""The work of a step, from a profile: measured figures, and assumptions where one is missing.

Today's step is measured, so the model is corrected by it once. The factor applies only to the terms
that bind today (CPU and workers, the accelerator, or the storage): more CPU never makes an
accelerator faster than measured. The measured CPU-seconds of loading are never changed.
"""

from collections.abc import Mapping
from dataclasses import replace

from stoker.catalog import Instance
from stoker.decide.model import LOADING, WAITS, Unexplained, Work, estimate
from stoker.records import Limit, Profile, Storage
from stoker.records.profile import OTHERS, error_width, is_beyond_telling
from stoker.units import ms, percentage, vcpus_words

# As a share of the step: with a shorter wait the trainer does not count as starved.
_STARVES = 0.1
# Unchecked parts are rejected beyond this factor from the measured step.
_FAR = 1.5
# Repeated measurements of one loader differ by less; more if it computes, as it shares vCPUs and
# caches.
_NOISE_WAITING = 1.1
_NOISE_COMPUTING = 1.3
# What is corrected where a limit binds today.
_CORRECTED: Mapping[Limit, tuple[Limit, ...]] = {
    "cpu": LOADING,
    "latency": LOADING,
    "accelerator": ("accelerator",),
    "storage": ("storage",),
}
AGAIN = "profile again on a quiet machine"


def today_of(profile: Profile, listed: Instance) -> Instance:
    """Returns today's type with the profile's vCPUs and accelerators in place of the catalog's."""
    host = profile.host
    return replace(
        listed,
        # A container or an affinity mask may leave only a part of the host.
        vcpus=host.vcpus or listed.vcpus,
        quota_vcpus=host.quota_vcpus,
        accelerators=listed.accelerators if host.accelerators is None else host.accelerators,
    )


def parts_of(profile: Profile) -> Work | None:
    """Returns the work of a profile's step, uncorrected; None if a part was not measured."""
    step = profile.step
    host = profile.host
    measured = (
        host.vcpus,
        step.accelerator_step_seconds,
        step.loader_cpu_seconds,
        step.loader_wall_seconds,
        step.trainer_cpu_seconds,
        step.num_workers,
    )
    if None in measured:
        return None
    today = today_of(profile, Instance(type=host.instance_type, vcpus=host.vcpus or 1))
    return _uncorrected(profile, today=today, processes=1)


def measure(
    profile: Profile,
    *,
    today: Instance,
    processes: int,
    storage: Storage = "unknown",
) -> Work:
    """Returns the work of a step, corrected so that today's cluster gives today's step.

    Args:
        profile: The parts of the step.
        today: Type of its hosts.
        processes: Trainer processes that are launched on a host.
        storage: Whether each host has a separate storage.
    """
    work = _uncorrected(profile, today=today, processes=processes, storage=storage)
    modelled = estimate(work, work.todays)
    # Limited to a factor of five below: beyond that the parts are wrong (see `_unexplained`).
    ratio = min(max(work.measured_seconds / modelled.step_seconds, 0.2), 5.0)
    binding = _CORRECTED.get(modelled.limit, ())
    if modelled.limit == "latency" and work.num_workers == 0:
        # No plan loads as the main process does, with more threads than a worker has.
        binding = ()
    elif modelled.limit == "latency" and ratio < 1:
        # What a step used of the CPU was measured: less of it is no reason for another figure.
        binding = ("latency",)
    # Other terms that are not below the measured step: uncorrected, one of them would become the
    # limit.
    least = work.measured_seconds * (1 - 1e-9)
    binding += tuple(name for name, seconds in work.terms.items() if seconds >= least)
    work = replace(work, factors=dict.fromkeys(binding, ratio))
    return replace(
        work,
        doubts={**work.doubts, **_doubts(profile, work)},
        unexplained=_unexplained(profile, work),
    )


def _uncorrected(
    profile: Profile, *, today: Instance, processes: int, storage: Storage = "unknown"
) -> Work:
    """Returns the work as the parts give it, with what a profile lacks."""
    step = profile.step
    hosts = profile.host.count
    # A script may start more ranks than are launched, as torchrun does.
    ranks = profile.ranks or hosts * processes
    vcpus = today.capacity * hosts
    wait = step.wait_seconds
    doubts: dict[str, float] = {}
    accelerator = step.accelerator_step_seconds
    if accelerator is None:
        accelerator = max(0.0, step.step_seconds - (wait or 0.0))
        # On CPUs it also has what loading beside it takes of them.
        width = 0.15 if today.accelerators else 0.3
        doubts["the accelerator-only step is the step less its wait"] = width
    trainer = step.trainer_cpu_seconds
    reserved = 0.0
    if trainer is None:
        doubts["the trainer's own CPU use was not measured"] = 0.23
        # Without accelerators the step is CPU work, of at least one thread per rank.
        trainer = 0.0 if today.accelerators else (step.accelerator_step_seconds or 0.0) * ranks
        reserved = reserved_vcpus(today) if today.accelerators else 0.0
    work = Work(
        reference=today,
        hosts=hosts,
        processes=processes,
        ranks=ranks,
        num_workers=step.num_workers,
        measured_seconds=step.step_seconds,
        wait_seconds=wait,
        accelerator_seconds=accelerator,
        neighbour_seconds=step.neighbour_seconds or 0.0,
        trainer_cpu_seconds=trainer,
        rates={rate.workers * hosts: rate.steps_per_second for rate in profile.loader_rates},
        others_vcpus=others_vcpus_of(profile),
        reserved_vcpus=reserved,
        batch_bytes=step.batch_bytes or 0.0,
        storage=storage,
        shards=(profile.loader and profile.loader.shards) or 0,
        launch_share=_launch_share(profile),
        others_width=error_width(others_vcpus_of(profile), vcpus=vcpus),
    )
    cpu = step.loader_cpu_seconds
    turns = 0.0
    if cpu is None:
        doubts["loading is taken to use all the CPU of today's hosts"] = 0.15
        cpu = _free_cpu_seconds(work, step.step_seconds - accelerator if wait is None else wait)
    elif None not in (step.used_cpu_seconds, step.trainer_cpu_seconds) and step.num_workers != 0:
        # Without workers one thread loads and trains in turn. What it uses beyond are threads of
        # torch that look for work on every core while it loads.
        turns = (step.used_cpu_seconds or 0.0) - cpu - trainer
    wall = cpu if step.loader_wall_seconds is None else step.loader_wall_seconds
    return replace(
        work,
        loader_cpu_seconds=cpu,
        loader_wall_seconds=wall,
        turns_cpu_seconds=turns,
        shared_seconds=_shared_seconds(profile, work, wall=wall),
        doubts=doubts,
    )


def reserved_vcpus(host: Instance) -> float:
    """Returns the vCPUs that are left to trainers: one per accelerator, and one for the rest."""
    return min(host.accelerators + 1, host.capacity / 2)


def _shared_seconds(profile: Profile, work: Work, *, wall: float) -> float:
    """Returns the time for what workers share, by the rates of the fewest and the most.

    With throughput 1 / t(m) for the fewest workers m and 1 / t(n) for the most it is
    (n t(n) - m t(m)) / (n - m); 0 if more workers loaded as much more as the CPU allows, and at
    most the extra wait that each further worker caused.
    """
    cpu = profile.step.loader_cpu_seconds
    rates = work.rates
    if cpu is None or len(rates) < 2:
        return 0.0
    # The ends: between them the difference is smaller, but the noise is not.
    fewest, most = min(rates), max(rates)
    wall = wall or cpu
    alone, together = 1 / rates[fewest], 1 / rates[most]
    # More workers divide the time, up to all of the CPU.
    vcpus = max(min(most, work.vcpus - work.others_vcpus), 1e-9)
    expected = max(fewest * alone / most, cpu / vcpus)
    noise = _NOISE_WAITING if wall > WAITS * cpu else _NOISE_COMPUTING
    if together <= noise * expected:
        return 0.0
    waits = {rate.workers * work.hosts: rate.wait_seconds for rate in profile.loader_rates}
    few, many = waits[fewest], waits[most]
    if few is None or many is None:
        return 0.0
    more = most - fewest
    # At most a single worker's time for a batch, which includes its wait, and the longer wait of a
    # batch for each further worker.
    bounds = (1 / max(rates.values()), wall / fewest, (many - few) / more)
    return max(0.0, min((most * together - fewest * alone) / more, *bounds))


def others_vcpus_of(profile: Profile) -> float:
    """Returns the vCPUs of all hosts that other programs used; 0 if not known."""
    return (profile.observed and profile.observed.others_vcpus) or 0.0


def _launch_share(profile: Profile) -> float:
    """Returns the share of a step without loading in which no kernel runs; 0: not known."""
    step = profile.step
    for state in profile.states:
        if state.id == "launch" and state.share and step.accelerator_step_seconds:
            return min(1.0, state.share * step.step_seconds / step.accelerator_step_seconds)
    return 0.0


def _free_cpu_seconds(work: Work, wait: float) -> float:
    """Returns the CPU-seconds that loading has at most, or half of them where it keeps up."""
    seconds = work.measured_seconds
    free = max(0.0, seconds * work.free_vcpus(work.todays.dnn) - work.trainer_cpu_seconds)
    # Loading keeps up with half of what is free, or with an unknown smaller part.
    if wait < _STARVES * seconds:
        return free / 2
    # Starved: loading takes all the CPU it can get, at most one vCPU per worker. Without workers
    # loading and training take turns in one thread per rank.
    if work.num_workers == 0:
        return min(free, wait * work.ranks)
    return free if work.num_workers is None else min(free, seconds * work.workers)


# How far a profile can be trusted.


def _doubts(profile: Profile, work: Work) -> dict[str, float]:
    """Returns why the model's figures of today's step may be wrong, each with how far."""
    doubts = {}
    miss = abs(work.measured_seconds / work.step_seconds - 1)
    if miss > 0.05:
        doubts[_miss_words(work)] = min(miss, 0.5)
    if profile.check is None:
        doubts["the profile was not checked against its own parts"] = 0.1
    if work.others_width:
        others = f"{work.others_vcpus:.1f} of the {vcpus_words(work.vcpus)}"
        doubts[f"{OTHERS} {others} while it was profiled"] = work.others_width
    return doubts


def too_busy(profile: Profile, *, vcpus: float) -> str:
    """Returns why other programs make a profile of so many vCPUs too noisy; empty: they do not."""
    others = others_vcpus_of(profile)
    if is_beyond_telling(others, vcpus=vcpus):
        return f"the measurement is not reliable: {OTHERS} {others:.1f} of the {vcpus_words(vcpus)}"
    return ""


def _unexplained(profile: Profile, work: Work) -> Unexplained | None:
    """Returns why the parts support no prediction; None: they do."""
    step = profile.step
    check = profile.check
    if busy := too_busy(profile, vcpus=work.vcpus):
        return Unexplained(kind="other_programs", text=busy)
    if profile.unmeasured:
        parts = " and ".join(profile.unmeasured)
        text = f"not measured, as no DataLoader of torch makes the batches: {parts} alone"
        return Unexplained(kind="not_measured", text=text)
    if check is not None:
        # The profile's own verdict: it knows what else kept the CPUs busy.
        if check.explained:
            return None
        text = f"the parts of the profile miss the measured step by {percentage(abs(check.error))}"
        if any(state.id == "straggler" for state in profile.states):
            text += ": all ranks wait for one that is slow"
        return Unexplained(kind="contradiction", text=text)
    evidence = (
        step.loader_cpu_seconds,
        step.accelerator_step_seconds,
        step.wait_seconds,
        step.loader_wall_seconds,
    )
    if all(value is None for value in evidence):
        text = "only the time of a step is known, not what it waits for"
        return Unexplained(kind="not_measured", text=text)
    if not work.step_seconds / _FAR <= work.measured_seconds <= work.step_seconds * _FAR:
        return Unexplained(kind="contradiction", text=_miss_words(work))
    return None


def _miss_words(work: Work) -> str:
    return f"the parts give {ms(work.step_seconds)} per step, measured {ms(work.measured_seconds)}"
