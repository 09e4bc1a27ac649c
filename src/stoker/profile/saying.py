"""What a profiled process says while it is measured: one line a phase, which the verb follows."""

from stoker.logs import Log
from stoker.profile.first_words import SoFar
from stoker.profile.raw import AcceleratorOnly, AsIs


def say_so_far(log: Log, known: SoFar, *, rank: int) -> None:
    """Early: how much of the time goes on waiting."""
    log.event(
        "profile_so_far",
        rank=rank,
        steps=known.steps,
        step_seconds=known.step_seconds,
        wait_share=known.wait_share,
    )


def say_as_is(log: Log, found: AsIs, *, rank: int) -> None:
    """The steps as they are."""
    log.event(
        "profile_as_is",
        rank=rank,
        steps=found.step_seconds.samples,
        step_seconds=found.step_seconds.median,
        wait_share=found.wait_seconds.median / found.step_seconds.median,
    )


def say_accelerator(log: Log, found: AcceleratorOnly, *, rank: int) -> None:
    """The steps on cached batches."""
    log.event(
        "profile_accelerator",
        rank=rank,
        steps=found.step_seconds.samples,
        step_seconds=found.step_seconds.median,
        trainer_cpu_seconds=found.trainer_cpu_seconds.median,
    )


def say_cut_off(log: Log, *, rank: int, replayed_steps: int) -> None:
    """The process ends while its batches come from the cache: why it does may lie in that."""
    log.event(
        "profile_cut_off",
        rank=rank,
        replayed_steps=replayed_steps,
        note="the profile was replaying cached batches",
    )
