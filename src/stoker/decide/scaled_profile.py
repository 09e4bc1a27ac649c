"""A profile of one instance type, scaled to another.

CPU-seconds are divided by `cpu_speed`, the speed of a vCPU there over one here; waiting takes as
long. The accelerator's step is the user's number, else the profile's on the same accelerators, else
not known: then nothing is recommended. Each of these adds a doubt, so no band is narrower than on
the profiled host. The same type at a speed of 1 changes only the band.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import msgspec

from stoker.catalog import Catalog, Instance, local_instance
from stoker.decide.candidates import SearchSpace, tune
from stoker.decide.epochs import epochs_elsewhere
from stoker.decide.model import ClusterShape, Doubt, Hosts, StepWork, Unexplained, estimate
from stoker.errors import UsageError
from stoker.records import Advice, Profile, TakenElsewhere
from stoker.records.decision import AcceleratorStepSource, CpuSpeedSource
from stoker.units import as_fast, ms

# Caches, memory, libraries and their threads differ, too.
_ELSEWHERE = 0.15
# Relative error of a speed. In the catalog, types of one CPU model differ by up to 11% from their
# median, all types by up to 36% from their mean (13,237 to 24,413 CoreMark per vCPU).
_SPEED_WIDTHS: dict[CpuSpeedSource, float] = {
    "catalog": 0.0,
    "given": 0.1,
    "cpu_model": 0.15,
    "assumed": 0.4,
}
# As in `pricing` and in `work`.
_STORAGE_WIDTH = 0.2
_TRAINER_WIDTH = 0.23
# States and fixes of the profiled host, not of the training.
_OF_THE_HOST = frozenset(
    {"throttled", "straggler", "storage", "network", "other-programs", "num_workers", "memory"}
)
_SPEED_WORDS: dict[CpuSpeedSource, str] = {
    "catalog": "",
    "given": ", as given",
    "cpu_model": ", by its CPU model",
    "assumed": ": its CPU model is not in the catalog (--cpu-speed)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeAs:
    """Target type of a scaled profile, with figures that the user knows.

    Attributes:
        cpu_speed: Speed of a vCPU there over the profiled host's; None: by the catalog.
        accelerator_step_seconds: A step there that never waits for data; None: as profiled.
    """

    instance_type: str
    cpu_speed: float | None = None
    accelerator_step_seconds: float | None = None


def profiled_type(profile: Profile, catalog: Catalog) -> Instance:
    """Returns the profiled type, even if the platform does not have it.

    Raises UsageError if neither the catalog nor the profile has its number of vCPUs.
    """
    host = profile.host
    local = local_instance(host.instance_type)
    if local is not None:
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
    work: StepWork,
    *,
    profile: Profile,
    target: Instance,
    processes: int,
    given: TakeAs,
    catalog: Catalog,
) -> tuple[StepWork, TakenElsewhere]:
    """Returns the corrected work, scaled to hosts of type `target`, and how it was scaled.

    Raises UsageError if the profiled run had data hosts. `processes`: of one target host.
    """
    if profile.data:
        raise UsageError(
            "a profile with data hosts cannot be scaled to another type",
            where="--as",
            fix="profile the training without a data group",
        )
    source = work.reference
    speed, speed_source = _cpu_speed(profile, source, target, given=given, catalog=catalog)
    step_source = _accelerator_source(work, profile, target, given)
    doubts = list(_doubts(work, target, speed=speed, speed_source=speed_source))
    scaled = _scaled(work, target, speed=speed, ranks=work.hosts * processes)
    scaled = replace(scaled, epochs=epochs_elsewhere(work, scaled))
    if step_source in ("given", "unknown"):
        scaled = _with_step(scaled, given.accelerator_step_seconds or 0.0)
    if target.accelerators and not _has_accelerators(profile, source):
        scaled = _with_accelerators(scaled, target)
        text = "the trainer's own CPU use with an accelerator was not measured"
        doubts.append(Doubt(width=_TRAINER_WIDTH, text=text))
    unexplained = work.unexplained
    if step_source == "unknown" and not unexplained:
        unexplained = _unknown_step(target)
    shape = ClusterShape(
        dnn=Hosts(instance=target, count=work.hosts, workers=work.num_workers), processes=processes
    )
    parts = replace(scaled, correction=1.0, corrected=())
    scaled = replace(
        scaled,
        step_seconds=estimate(scaled, shape).step_seconds,
        parts_seconds=estimate(parts, shape).step_seconds,
        doubts=(*work.doubts, *doubts),
        unexplained=unexplained,
    )
    return scaled, TakenElsewhere(
        profiled_on=source.type,
        taken_as=target.type,
        cpu_speed=speed,
        cpu_speed_source=speed_source,
        accelerator_step_source=step_source,
    )


def _doubts(
    work: StepWork, target: Instance, *, speed: float, speed_source: CpuSpeedSource
) -> Iterator[Doubt]:
    """Yields what is taken to be there as it is here, or by a speed that is not measured."""
    source = work.reference
    text = f"profile taken elsewhere: on {source.type}, not on {target.type}"
    yield Doubt(width=_ELSEWHERE, text=text)
    if width := _SPEED_WIDTHS[speed_source]:
        text = f"a vCPU of {target.type} is taken to be {as_fast(speed)} as one of "
        yield Doubt(width=width, text=f"{text}{source.type}{_SPEED_WORDS[speed_source]}")
    if source.type != target.type and (work.read_seconds or work.shared.seconds):
        text = "its storage, and what loader workers share, are taken to be as in the profile"
        yield Doubt(width=_STORAGE_WIDTH, text=text)


def _with_step(work: StepWork, seconds: float) -> StepWork:
    # The correction was for another accelerator's step.
    corrected = tuple(limit for limit in work.corrected if limit != "accelerator")
    return replace(work, accelerator_seconds=seconds, corrected=corrected)


def _with_accelerators(work: StepWork, target: Instance) -> StepWork:
    # The trainer's CPU time was the training itself.
    return replace(
        work,
        trainer_cpu_seconds=0.0,
        turns_cpu_seconds=0.0,
        reserved_vcpus=min(target.accelerators + 1, target.capacity / 2),
        handover_seconds=0.0,
    )


def _unknown_step(target: Instance) -> Unexplained:
    where = target.type
    if target.accelerators:
        where += f"'s {target.accelerator_model or 'accelerator'}"
    text = f"not measured: a step on {where} that never waits for data"
    return Unexplained(kind="not_measured", text=text)


def advice_of_taken(space: SearchSpace, taken: TakenElsewhere) -> Iterator[Advice]:
    """Yields what would narrow the bands: the accelerator's step, a profile there."""
    there = taken.taken_as
    if taken.accelerator_step_source == "unknown":
        work = space.work
        loading = f"Loading alone takes {ms(work.step_seconds)} per batch on {work.hosts} x {there}"
        tuned = next(tune(space), None)
        if tuned is not None and tuned.estimate is not None:
            workers = tuned.shape.dnn.workers
            loading += f", and {ms(tuned.estimate.step_seconds)} with {workers} workers per host"
        waits = "the accelerators wait" if work.reference.accelerators else "the trainer waits"
        text = (
            f"{loading}. If a step there takes less with its data at hand, {waits}: "
            "time one, then add --accelerator-step-seconds."
        )
        yield Advice(id="accelerator-step", text=text, when="before any money is spent")
        return
    text = f"Profile the training on {there}: three minutes there replace all figures that are "
    when = "before you rent anything large"
    yield Advice(id="profile-there", text=f"{text}scaled here.", when=when)


def _cpu_speed(
    profile: Profile, source: Instance, target: Instance, *, given: TakeAs, catalog: Catalog
) -> tuple[float, CpuSpeedSource]:
    if given.cpu_speed is not None:
        return given.cpu_speed, "given"
    if source.type == target.type:
        return 1.0, "catalog"
    there = target.coremark_per_vcpu
    here = source.coremark_per_vcpu
    # A local type has speed 1 on any machine.
    is_local = local_instance(source.type) is not None
    if is_local and local_instance(target.type):
        return 1.0, "catalog"
    name: CpuSpeedSource = "catalog"
    if is_local or here is None:
        here = catalog.coremark_of_cpu(profile.host.cpu_model)
        name = "cpu_model"
    if there is None or here is None:
        return 1.0, "assumed"
    return there / here, name


def _accelerator_source(
    work: StepWork, profile: Profile, target: Instance, given: TakeAs
) -> AcceleratorStepSource:
    if given.accelerator_step_seconds is not None:
        return "given"
    source = work.reference
    if target.accelerators == 0 and not _has_accelerators(profile, source):
        return "cpu"
    if source.type == target.type:
        return "profile"
    # The driver's `NVIDIA A10G` and `Tesla T4` are the catalog's `A10G` and `T4`; an `L40S` is not
    # an `L4`.
    model = target.accelerator_model
    words = _words(f"{profile.host.accelerator_model or ''} {source.accelerator_model or ''}")
    is_same_model = model is not None and _words(model) <= words
    if is_same_model and source.accelerators == target.accelerators:
        return "profile"
    return "unknown"


def _words(model: str) -> set[str]:
    return set(re.findall("[^\\W_]+", model.upper()))


def _has_accelerators(profile: Profile, source: Instance) -> bool:
    if profile.host.accelerators is None:
        return source.accelerators > 0
    return profile.host.accelerators > 0


def _scaled(work: StepWork, target: Instance, *, speed: float, ranks: int) -> StepWork:
    """Returns the work in CPU-seconds of the other type; waiting takes as long."""
    waiting = max(0.0, work.parallel_seconds - work.loader_cpu_seconds)
    running = work.parallel_seconds - waiting
    shared = work.loader_wall_seconds - work.parallel_seconds
    local = work.local_receive_seconds
    if local is not None:
        local /= speed
    # A step of accelerators does not depend on the CPU; of another model `_with_step` has it.
    accelerator_speed = 1.0
    if not work.reference.accelerators:
        # Without accelerators the step is CPU work.
        accelerator_speed = speed
    rates: Mapping[int, float] = {}
    others_vcpus = 0.0
    if target.type == work.reference.type:
        # What was tried, and the programs that ran beside it, are those of these hosts alone.
        rates = work.rates
        others_vcpus = work.others_vcpus
    return replace(
        work,
        reference=target,
        rates=rates,
        # The step there is modelled, and what it waits for.
        wait_seconds=None,
        ranks=ranks,
        shards=-(-work.shards * ranks // work.ranks),
        accelerator_seconds=work.accelerator_seconds / accelerator_speed,
        # Kernels are launched by a CPU: a faster one is late by less.
        neighbour=replace(work.neighbour, seconds=work.neighbour.seconds / speed),
        receive_seconds=work.receive_seconds / speed,
        local_receive_seconds=local,
        handover_seconds=work.handover_seconds / speed,
        loader_cpu_seconds=work.loader_cpu_seconds / speed,
        loader_wall_seconds=running / speed + waiting + shared,
        trainer_cpu_seconds=work.trainer_cpu_seconds / speed,
        turns_cpu_seconds=work.turns_cpu_seconds / speed,
        receive_cpu_seconds=work.receive_cpu_seconds / speed,
        others_vcpus=others_vcpus,
    )
