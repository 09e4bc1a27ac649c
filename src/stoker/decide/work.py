"""The work of a step, from a profile: measured figures, and assumptions where one is missing.

Today's step is measured, so the model is corrected by it once. The factor applies only to the terms
that bind today (CPU and workers, the accelerator, or the storage): more CPU never makes an
accelerator faster than measured. The measured CPU-seconds of loading are never changed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from stoker.catalog import Instance
from stoker.decide.model import LOADING, Doubt, Unexplained, Work, estimate, free_vcpus, parts_on
from stoker.decide.parts import known_parts, others_vcpus_of
from stoker.errors import UsageError
from stoker.records import Limit, Profile, Storage
from stoker.records.profile import OTHERS, error_width, is_beyond_telling
from stoker.units import ms, percentage, vcpus_words

# As a share of the step: with a shorter wait the trainer does not count as starved.
_WAITS = 0.1
# CPU-seconds a byte of the feed's receive side: benchmarks/feed.py measures 0.38 to 0.65 e-9.
_RECEIVE_CPU_PER_BYTE = 0.5e-9
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


def measure(
    profile: Profile,
    *,
    today: Instance,
    processes: int,
    storage: Storage = "unknown",
    machine_vcpus: float | None = None,
) -> Work:
    """Returns the work of a step, corrected so that today's cluster gives today's step.

    Args:
        profile: The parts of the step.
        today: Type of its hosts.
        processes: Trainer processes that are launched on a host.
        storage: Whether each host has a separate storage.
        machine_vcpus: Size of the machine, if all plans run on one.

    Raises:
        UsageError: If a number of the profile is out of range.
    """
    _refuse_absurd(profile, today)
    step = profile.step
    hosts = profile.host.count
    # A script may start more ranks than are launched, as torchrun does.
    ranks = profile.ranks or hosts * processes
    batch_bytes = step.batch_bytes or 0.0
    work = Work(
        parts=known_parts(profile, vcpus=today.capacity, ranks=ranks),
        reference=today,
        processes=processes,
        num_workers=step.num_workers,
        step_seconds=step.step_seconds,
        batch_bytes=batch_bytes,
        receive_cpu_seconds=_RECEIVE_CPU_PER_BYTE * batch_bytes,
        storage=storage,
        shards=(profile.loader and profile.loader.shards) or 0,
        launch_share=_launch_share(profile),
        global_batch_size=step.global_batch_size,
        epochs=profile.epochs,
        others_width=error_width(others_vcpus_of(profile), vcpus=today.capacity * hosts),
        is_checked=profile.check is not None,
    )
    work = corrected(_with_loading(_with_trainer(work, profile), profile))
    return replace(
        work,
        doubts=(*work.doubts, *_doubts(profile, work)),
        unexplained=_unexplained(profile, work, machine_vcpus),
    )


def corrected(work: Work) -> Work:
    """Returns the work, corrected so that the model gives today's step for today's cluster."""
    bare = replace(work, correction=1.0, corrected=())
    modelled = estimate(bare, bare.todays)
    # Limited to a factor of five below: beyond that the parts are wrong (see `_unexplained`).
    ratio = bare.step_seconds / modelled.step_seconds
    binding = _CORRECTED.get(modelled.limit, ())
    if modelled.limit == "latency" and (ratio < 1 or bare.num_workers == 0):
        # What a step used of the CPU was measured: less of it is no reason for another figure.
        binding = ("latency",)
    # Other terms that are not below the measured step: uncorrected, one of them would become the
    # limit.
    at_least = bare.step_seconds * (1 - 1e-9)
    terms = parts_on(bare, bare.todays).terms
    binding += tuple(
        name for name, seconds in terms.items() if seconds >= at_least and name not in binding
    )
    return replace(
        bare,
        parts_seconds=modelled.step_seconds,
        correction=min(max(ratio, 0.2), 5.0),
        corrected=binding,
    )


def _launch_share(profile: Profile) -> float:
    """Returns the share of a step without loading in which no kernel runs; 0: not known."""
    step = profile.step
    for state in profile.states:
        if state.id == "launch" and state.share and step.accelerator_step_seconds:
            return min(1.0, state.share * step.step_seconds / step.accelerator_step_seconds)
    return 0.0


def _with_trainer(work: Work, profile: Profile) -> Work:
    """Returns the work with CPU-seconds of the trainers, or vCPUs reserved in place of them."""
    step = profile.step
    today = work.reference
    if step.trainer_cpu_seconds is not None:
        return work
    if step.trainer_vcpus is not None:
        return replace(work, reserved_vcpus=step.trainer_vcpus)
    work = _doubted(work, 0.23, "the trainer's own CPU use was not measured")
    if today.accelerators:
        return replace(work, reserved_vcpus=reserved_vcpus(today))
    # Without accelerators the step is CPU work, of at least one thread per rank.
    seconds = (step.accelerator_step_seconds or 0.0) * work.parts.ranks
    return replace(work, parts=replace(work.parts, trainer_cpu_seconds=seconds))


def reserved_vcpus(host: Instance) -> float:
    """Returns the vCPUs that are left to trainers: one per accelerator, and one for the rest."""
    return min(host.accelerators + 1, host.capacity / 2)


def _doubted(work: Work, width: float, text: str) -> Work:
    return replace(work, doubts=(*work.doubts, Doubt(width=width, text=text)))


def _with_loading(work: Work, profile: Profile) -> Work:
    """Returns the work with what a profile lacks: the accelerator's step, and loading."""
    step = profile.step
    accelerator = step.accelerator_step_seconds
    wait = step.wait_seconds
    if accelerator is None:
        accelerator = max(0.0, step.step_seconds - (wait or 0.0))
        # On CPUs it also has what loading beside it takes of them.
        width = 0.15 if work.reference.accelerators else 0.3
        work = _doubted(work, width, "the accelerator-only step is the step less its wait")
    wall = step.loader_wall_seconds
    cpu = step.loader_cpu_seconds
    if cpu is None:
        work = _doubted(work, 0.15, "loading is taken to use all the CPU of today's hosts")
        cpu = _free_cpu_seconds(work, step.step_seconds - accelerator if wait is None else wait)
    parts = replace(
        work.parts,
        accelerator_seconds=accelerator,
        loader_cpu_seconds=cpu,
        loader_wall_seconds=cpu if wall is None else wall,
    )
    return replace(work, parts=parts)


def _free_cpu_seconds(work: Work, wait: float) -> float:
    """Returns the CPU-seconds that loading has at most, or half of them where it keeps up."""
    seconds = work.step_seconds
    free = seconds * free_vcpus(work, work.todays.dnn) - work.parts.trainer_cpu_seconds
    free = max(0.0, free)
    # Loading keeps up with half of what is free, or with an unknown smaller part.
    if wait < _WAITS * seconds:
        return free / 2
    # Starved: loading takes all the CPU it can get, at most one vCPU per worker. Without workers
    # loading and training take turns in one thread per rank.
    if work.num_workers == 0:
        return min(free, wait * work.parts.ranks)
    if work.num_workers is not None:
        return min(free, seconds * work.hosts * work.num_workers)
    return free


def _doubts(profile: Profile, work: Work) -> Iterator[Doubt]:
    """Yields why the model's figures of today's step may be wrong, each with how far."""
    miss = abs(work.step_seconds / work.parts_seconds - 1)
    # Loading by a worker was measured, and no plan loads as the main process does.
    if miss > 0.05 and not _is_loaded_by_trainer(profile, work):
        yield Doubt(width=min(miss, 0.5), text=_miss_words(work))
    if profile.check is None:
        yield Doubt(width=0.1, text="the profile was not checked against its own parts")
    if work.others_width:
        others = f"{others_vcpus_of(profile):.1f} of the {vcpus_words(work.parts.vcpus)}"
        yield Doubt(width=work.others_width, text=f"{OTHERS} {others} while it was profiled")


def too_busy(profile: Profile, *, vcpus: float, machine_vcpus: float | None = None) -> str:
    """Returns why other programs make the profile too noisy; empty if they do not.

    Args:
        profile: With what other programs used.
        vcpus: vCPUs of all hosts.
        machine_vcpus: vCPUs of the machine that all plans must share; None: hosts have their own.
    """
    begin = f"the measurement is not reliable: {OTHERS}"
    others = others_vcpus_of(profile)
    if is_beyond_telling(others, vcpus=vcpus):
        return f"{begin} {others:.1f} of the {vcpus_words(vcpus)}"
    elsewhere = (profile.observed and profile.observed.elsewhere_vcpus) or 0.0
    rest = (machine_vcpus or 0.0) - vcpus
    if rest > 0 and is_beyond_telling(elsewhere, vcpus=rest):
        return f"{begin} {elsewhere:.1f} of this machine's other {vcpus_words(rest)}"
    return ""


def _is_loaded_by_trainer(profile: Profile, work: Work) -> bool:
    """Whether the trainer loads, and its loading alone differs from what the parts give."""
    if work.num_workers != 0 or "latency" not in work.corrected:
        return False
    return profile.check is None or profile.check.state in (None, "workers")


def _unexplained(profile: Profile, work: Work, machine_vcpus: float | None) -> Unexplained | None:
    """Returns why the parts support no prediction; None: they do."""
    step = profile.step
    check = profile.check
    if busy := too_busy(profile, vcpus=work.parts.vcpus, machine_vcpus=machine_vcpus):
        return Unexplained(kind="other_programs", text=busy)
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
    evidence = (
        step.loader_cpu_seconds,
        step.accelerator_step_seconds,
        step.wait_seconds,
        step.loader_wall_seconds,
    )
    if all(value is None for value in evidence):
        text = "only the time of a step is known, not what it waits for"
        return Unexplained(kind="not_measured", text=text)
    if not work.parts_seconds / _FAR <= step.step_seconds <= work.parts_seconds * _FAR:
        return Unexplained(kind="contradiction", text=_miss_words(work))
    return None


def _miss_words(work: Work) -> str:
    return f"the parts give {ms(work.parts_seconds)} per step, measured {ms(work.step_seconds)}"


def _refuse_absurd(profile: Profile, today: Instance) -> None:
    step = profile.step
    bounds = [
        ("step.step_seconds", step.step_seconds, _SHORTEST_STEP, _LONGEST_STEP),
        ("host.count", profile.host.count, 1, 1e6),
        ("host.vcpus", today.vcpus, 1, 1e6),
        ("host.quota_vcpus", today.capacity, 1e-2, 1e6),
    ]
    bounds += [(f"step.{name}", getattr(step, name), 0, _MOST) for name in step.__struct_fields__]
    for name, value, low, high in bounds:
        if value is not None and not low <= value <= high:
            raise UsageError(
                f"{value:g} is out of range: it must be between {low:g} and {high:g}",
                where=f"profile, key {name}",
                fix="check the unit: seconds and bytes",
            )
