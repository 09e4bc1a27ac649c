"""A profile of one instance type, taken for another.

Loading there is `cpu_speed` times as fast, the speed of a vCPU there over one here; waiting takes
as long. The accelerator's step is the user's number, else the profile's on the same accelerators,
else not known: then nothing is recommended. Each of these adds a doubt, so no band is narrower than
on the profiled host. The same type at a speed of 1 changes only the band.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import msgspec

from stoker.catalog import Catalog, Instance, local_instance
from stoker.decide.model import Doubt, Unexplained, Work, estimate
from stoker.decide.work import reserved_vcpus
from stoker.errors import UsageError
from stoker.records import Profile, TakenElsewhere
from stoker.records.decision import AcceleratorStepSource, CpuSpeedSource
from stoker.units import as_fast

# Caches, memory, libraries and their threads differ, too.
_ELSEWHERE = 0.15
# Relative error of a speed. In the catalog, types of one CPU model differ by up to 11% from their
# median, all types by up to 36% from their mean (13,237 to 24,413 CoreMark per vCPU).
_SPEED_WIDTHS: dict[CpuSpeedSource, float] = {
    "catalog": 0.0,
    "cpu_model": 0.15,
    "assumed": 0.4,
}
_STORAGE_WIDTH = 0.2
_TRAINER_WIDTH = 0.23
# States and fixes of the profiled host, not of the training.
_OF_THE_HOST = frozenset({"throttled", "straggler", "storage", "other-programs", "num_workers"})
_SPEED_WORDS: dict[CpuSpeedSource, str] = {
    "catalog": "by the catalog",
    "cpu_model": "by its CPU model",
    "assumed": "which is assumed, as its CPU model is not in the catalog",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeAs:
    """Target type of a scaled profile, with figures that the user knows.

    Attributes:
        accelerator_step_seconds: A step there that never waits for data; None: as profiled.
    """

    instance_type: str
    accelerator_step_seconds: float | None = None


def profiled_type(profile: Profile, catalog: Catalog) -> Instance:
    """Returns the profiled type, even if the platform does not have it.

    Raises UsageError if neither the catalog nor the profile has its number of vCPUs.
    """
    host = profile.host
    if local := local_instance(host.instance_type):
        return local
    try:
        return catalog.get(host.instance_type)
    except UsageError:
        if host.vcpus is None:
            raise
        return Instance(type=host.instance_type, family=host.instance_type, vcpus=host.vcpus)


def of_the_training(profile: Profile) -> Profile:
    """Returns the profile without states and fixes of the profiled host."""
    return msgspec.structs.replace(
        profile,
        states=tuple(state for state in profile.states if state.id not in _OF_THE_HOST),
        fixes=tuple(fix for fix in profile.fixes if fix.id not in _OF_THE_HOST),
    )


def taken_as(
    work: Work,
    profile: Profile,
    target: Instance,
    *,
    processes: int,
    given: TakeAs,
    speeds: Catalog,
) -> tuple[Work, TakenElsewhere]:
    """Returns the work on hosts of type `target`, and how it was scaled.

    Args:
        work: Of the profiled hosts.
        profile: What it was measured by.
        target: The type.
        processes: Trainer processes of one host there.
        given: What the user knows.
        speeds: A catalog with the speeds of CPUs.
    """
    source = work.reference
    is_same = target.type == source.type
    had = profile.host.accelerators
    had_accelerators = source.accelerators > 0 if had is None else had > 0
    speed, speed_source = _cpu_speed(profile, source, target, speeds)
    taken = TakenElsewhere(
        profiled_on=source.type,
        taken_as=target.type,
        accelerator_step_source=_step_source(source, target, given, had_accelerators),
        cpu_speed=speed,
        cpu_speed_source=speed_source,
    )
    doubts = [*work.doubts, *_doubts(work, taken)]
    # What was tried, and the programs that ran beside it, are those of the profiled hosts alone.
    rates = work.parts.rates if is_same else {}
    others = work.parts.others_vcpus if is_same else 0.0
    parts = replace(work.parts, rates=rates, others_vcpus=others, wait_seconds=None)
    known = work.corrected
    reserved = work.reserved_vcpus
    unexplained = work.unexplained
    if taken.accelerator_step_source in ("given", "unknown"):
        # The correction was for another accelerator's step.
        known = tuple(limit for limit in known if limit != "accelerator")
        seconds = given.accelerator_step_seconds or 0.0
        # In seconds of the profiled CPUs, where the training computes on CPUs.
        seconds *= 1.0 if target.accelerators else speed
        parts = replace(parts, accelerator_seconds=seconds)
    if target.accelerators and not had_accelerators:
        # The trainer's CPU time was the training itself.
        parts = replace(parts, trainer_cpu_seconds=0.0, turns_cpu_seconds=0.0)
        reserved = reserved_vcpus(target)
        text = "the trainer's own CPU use with an accelerator was not measured"
        doubts.append(Doubt(width=_TRAINER_WIDTH, text=text))
    if taken.accelerator_step_source == "unknown" and not unexplained:
        text = f"not measured: a step on {target.type} that never waits for data"
        unexplained = Unexplained(kind="not_measured", text=text)
    there = replace(
        work,
        parts=parts,
        reference=target,
        cpu_speed=speed,
        processes=processes,
        shards=-(-work.shards * processes // work.processes),
        receive_cpu_seconds=work.receive_cpu_seconds / speed,
        reserved_vcpus=reserved,
        corrected=known,
        doubts=tuple(doubts),
        unexplained=unexplained,
    )
    if work.epochs and work.epochs.start and (here := work.worker_seconds(source)):
        start = work.epochs.start.scaled(there.worker_seconds(target) / here)
        there = replace(there, epochs=msgspec.structs.replace(work.epochs, start=start))
    step = estimate(there, there.todays).step_seconds
    bare = replace(there, correction=1.0, corrected=())
    there = replace(
        there,
        parts=replace(parts, measured_seconds=step),
        step_seconds=step,
        parts_seconds=estimate(bare, bare.todays).step_seconds,
    )
    return there, taken


def taken_words(taken: TakenElsewhere) -> str:
    """Returns how a profile was scaled to another type."""
    return (
        f"Profile taken elsewhere: on {taken.profiled_on}. Today's type is {taken.taken_as}, where "
        f"nothing was measured: a vCPU there counts {as_fast(taken.cpu_speed)} as one of "
        f"{taken.profiled_on}, {_SPEED_WORDS[taken.cpu_speed_source]}."
    )


def _doubts(work: Work, taken: TakenElsewhere) -> Iterator[Doubt]:
    """Yields what is taken to be there as it is here, or by a speed that is not measured."""
    here, there = taken.profiled_on, taken.taken_as
    yield Doubt(width=_ELSEWHERE, text=f"profile taken elsewhere: on {here}, not on {there}")
    if width := _SPEED_WIDTHS[taken.cpu_speed_source]:
        text = f"a vCPU of {there} is taken to be {as_fast(taken.cpu_speed)} as one of {here}, "
        yield Doubt(width=width, text=f"{text}{_SPEED_WORDS[taken.cpu_speed_source]}")
    if here != there and work.parts.shared_seconds:
        text = "what loader workers share is taken to be as in the profile"
        yield Doubt(width=_STORAGE_WIDTH, text=text)


def _cpu_speed(
    profile: Profile, source: Instance, target: Instance, catalog: Catalog
) -> tuple[float, CpuSpeedSource]:
    # A local type has speed 1 on any machine.
    is_local = local_instance(source.type) is not None
    if source.type == target.type or (is_local and local_instance(target.type)):
        return 1.0, "catalog"
    there = target.coremark_per_vcpu
    here = source.coremark_per_vcpu
    name: CpuSpeedSource = "catalog"
    if is_local or here is None:
        here = catalog.coremark_of_cpu(profile.host.cpu_model)
        name = "cpu_model"
    if there is None or here is None:
        return 1.0, "assumed"
    return there / here, name


def _step_source(
    source: Instance, target: Instance, given: TakeAs, had_accelerators: bool
) -> AcceleratorStepSource:
    if given.accelerator_step_seconds is not None:
        return "given"
    if not target.accelerators and not had_accelerators:
        return "cpu"
    is_same = (target.accelerator_model, target.accelerators) == (
        source.accelerator_model,
        source.accelerators,
    )
    return "profile" if is_same or source.type == target.type else "unknown"
