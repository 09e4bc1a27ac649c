"""Trainings on the double of an accelerator, timed as a profile times its steps."""

from collections.abc import Callable

from stoker.profile.rank_results import StepTimes
from stoker.profile.steps import LONGEST_WARM_UP, StepClock, TimedSteps, WarmUp, is_enough
from support.device_double import DeviceDouble, LoaderDouble

Step = Callable[[DeviceDouble, int], None]


def host_ahead(step_seconds: float, *, host_seconds: float, kernels: int = 100) -> Step:
    """Returns a step whose kernels take so long on the device, launched without any waiting."""

    def step(device: DeviceDouble, _number: int) -> None:
        device.launch_step(step_seconds, kernels=kernels, host_seconds=host_seconds)

    return step


def train(
    step: Step,
    *,
    batch_seconds: float,
    workers: int,
    device: DeviceDouble | None = None,
    budget_seconds: float = 180.0,
) -> StepTimes:
    """Trains until the phase as is may end, as `session.Session` does."""
    device = device or DeviceDouble()
    clock = StepClock(find=lambda: device, now=device.now)
    loader = LoaderDouble(device, batch_seconds=batch_seconds, workers=workers)
    longest = LONGEST_WARM_UP * budget_seconds
    steps = TimedSteps(warm_up=WarmUp(prefetched=2 * workers, longest_seconds=longest), clock=clock)
    for number in range(10_000):
        asked = clock.mark()
        next(loader)
        steps.got([(asked, clock.mark())], cpu=device.seconds)
        since = steps.counting_since
        counted = 0.0 if since is None else device.seconds - since
        if is_enough(steps.count, elapsed_seconds=counted, budget_seconds=budget_seconds):
            break
        steps.gave(mark=clock.mark(), cpu=device.seconds)
        step(device, number)
    steps.epoch_ended()
    steps.settle()
    return steps.result(workers=workers)


def compiled(step: Step, slow: dict[int, float]) -> Step:
    """Returns a step before which the host compiles, in the steps named, for so many seconds."""

    def compiling(device: DeviceDouble, number: int) -> None:
        device.work(slow.get(number, 0.0))
        step(device, number)

    return compiling
