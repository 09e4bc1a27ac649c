"""A profile of one instance type, taken for another.

Loading there is `cpu_speed` times as fast, the speed of a vCPU there over one here; waiting takes
as long. The accelerator's step is the user's number, else the profile's on the same accelerators,
else not known: then nothing is recommended. Each of these adds a doubt, so no band is narrower than
on the profiled host. The same type at a speed of 1 changes only the band.
"""

from dataclasses import dataclass, replace

from stoker.catalog import Catalog, Instance, local_instance
from stoker.decide.model import Unexplained, Work, estimate
from stoker.decide.work import reserved_vcpus
from stoker.records import Profile, TakenElsewhere
from stoker.records.decision import AcceleratorStepSource, CpuSpeedSource
from stoker.units import as_fast

# Caches, memory, libraries and their threads differ, too.
_ELSEWHERE = 0.15
# Relative error of a speed that is not known: in the catalog types differ by up to 36% from their
# mean (13,237 to 24,413 CoreMark per vCPU).
_ASSUMED_WIDTH = 0.4
_STORAGE_WIDTH = 0.2
_TRAINER_WIDTH = 0.23


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeAs:
    """Target type of a scaled profile, with figures that the user knows.

    Attributes:
        accelerator_step_seconds: A step there that never waits for data; None: as profiled.
    """

    instance_type: str
    accelerator_step_seconds: float | None = None


def profiled_type(profile: Profile, catalog: Catalog) -> Instance:
    """Returns the profiled type, even if the platform does not have it."""
    name = profile.host.instance_type
    known = local_instance(name) or catalog.find(name)
    return known or Instance(type=name, vcpus=profile.host.vcpus or 1)


def taken_as(
    work: Work,
    target: Instance,
    *,
    processes: int,
    given: TakeAs,
) -> tuple[Work, TakenElsewhere]:
    """Returns the work on hosts of type `target`, and how it was scaled.

    Args:
        work: Of the profiled hosts.
        target: The type.
        processes: Trainer processes of one host there.
        given: What the user knows.
    """
    source = work.reference
    speed, speed_source = _cpu_speed(source, target)
    step_source = _step_source(source, target, given)
    taken = TakenElsewhere(
        profiled_on=source.type,
        taken_as=target.type,
        accelerator_step_source=step_source,
        cpu_speed=speed,
        cpu_speed_source=speed_source,
    )
    doubts = {f"profile taken elsewhere: on {source.type}, not on {target.type}": _ELSEWHERE}
    if speed_source == "assumed":
        text = f"a vCPU of {target.type} is assumed to be as fast as one of {source.type}"
        doubts[text] = _ASSUMED_WIDTH
    if work.shared_seconds:
        doubts["what loader workers share is taken to be as in the profile"] = _STORAGE_WIDTH
    trainer, turns = work.trainer_cpu_seconds / speed, work.turns_cpu_seconds / speed
    reserved = work.reserved_vcpus
    if target.accelerators and not source.accelerators:
        # The trainer's CPU time was the training itself.
        doubts["the trainer's own CPU use with an accelerator was not measured"] = _TRAINER_WIDTH
        trainer, turns = 0.0, 0.0
        reserved = reserved_vcpus(target)
    unexplained = work.unexplained
    if step_source == "unknown" and not unexplained:
        text = f"not measured: a step on {target.type} that never waits for data"
        unexplained = Unexplained(kind="not_measured", text=text)
    factors = dict(work.factors)
    accelerator = work.accelerator_seconds
    if step_source == "cpu":
        accelerator /= speed
    elif step_source != "profile":
        # The correction was for another accelerator's step.
        factors.pop("accelerator", None)
        accelerator = given.accelerator_step_seconds or 0.0
    there = replace(
        work,
        reference=target,
        processes=processes,
        wait_seconds=None,
        accelerator_seconds=accelerator,
        neighbour_seconds=work.neighbour_seconds * source.capacity / target.capacity / speed,
        loader_cpu_seconds=work.loader_cpu_seconds / speed,
        # Waiting takes as long as here.
        loader_wall_seconds=(work.parallel_seconds - work.waiting_seconds) / speed
        + work.waiting_seconds,
        trainer_cpu_seconds=trainer,
        turns_cpu_seconds=turns,
        # What was tried, and the programs that ran beside it, are those of the profiled hosts.
        rates={},
        others_vcpus=0.0,
        reserved_vcpus=reserved,
        factors=factors,
        doubts={**work.doubts, **doubts},
        unexplained=unexplained,
    )
    return replace(there, measured_seconds=estimate(there, there.todays).step_seconds), taken


def taken_words(taken: TakenElsewhere) -> str:
    """Returns how a profile was scaled to another type."""
    return (
        f"Profile taken elsewhere: on {taken.profiled_on}. Today's type is {taken.taken_as}, where "
        f"nothing was measured: vCPUs count {as_fast(taken.cpu_speed)} as on {taken.profiled_on}."
    )


def _cpu_speed(source: Instance, target: Instance) -> tuple[float, CpuSpeedSource]:
    there = target.coremark_per_vcpu
    here = source.coremark_per_vcpu
    # A local type has the speed of its machine, which no other type is compared with.
    if there and here and (source.family == "local") == (target.family == "local"):
        return there / here, "catalog"
    return 1.0, "assumed"


def _step_source(source: Instance, target: Instance, given: TakeAs) -> AcceleratorStepSource:
    if given.accelerator_step_seconds is not None:
        return "given"
    if not target.accelerators and not source.accelerators:
        return "cpu"
    is_same = (target.accelerator_model, target.accelerators) == (
        source.accelerator_model,
        source.accelerators,
    )
    return "profile" if is_same or source.type == target.type else "unknown"
