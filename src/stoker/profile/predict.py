"""The cost model for today's hosts: what a step should take, if its parts are right."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of a global step on the hosts that train today; all ranks together.

    Attributes:
        accelerator_seconds: Of the trainer with data at hand.
        receive_seconds: Of the trainer's own thread to take a batch, not overlapped.
        loader_cpu_seconds: Of loading.
        loader_wall_seconds: Worker-seconds of loading, uncontended; one worker's.
        trainer_cpu_seconds: Of the trainer processes.
        vcpus: Of all hosts that train; less what others kept busy.
        workers: Loader workers of all hosts; 0: the trainer loads by itself, one after the other.
    """

    accelerator_seconds: float
    receive_seconds: float
    loader_cpu_seconds: float
    loader_wall_seconds: float
    trainer_cpu_seconds: float
    vcpus: float
    workers: int


def step_seconds(parts: Parts, *, ranks: int = 1) -> float:
    """The step that the parts give: the slowest of the things that overlap."""
    trainer = parts.accelerator_seconds + parts.receive_seconds
    cpu = (parts.loader_cpu_seconds + parts.trainer_cpu_seconds) / parts.vcpus
    if parts.workers == 0:
        return max(parts.accelerator_seconds + parts.loader_wall_seconds / ranks, cpu)
    return max(trainer, cpu, parts.loader_wall_seconds / parts.workers)


def limit(parts: Parts, *, ranks: int = 1) -> str:
    """What binds the step: accelerator, cpu, workers, or serial (no workers at all)."""
    cpu = (parts.loader_cpu_seconds + parts.trainer_cpu_seconds) / parts.vcpus
    step = step_seconds(parts, ranks=ranks)
    if step <= cpu:
        return "cpu"
    if parts.workers == 0:
        return "serial"
    if step <= parts.accelerator_seconds + parts.receive_seconds:
        return "accelerator"
    return "workers"
