"""Trainings on the double of an accelerator, timed as a profile times its steps."""

from collections.abc import Callable, Mapping

from stoker.profile.steps import AS_IS_ENOUGH, AsIsSteps, StepClock, lack_of
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
    clock: StepClock | None = None,
    budget_seconds: float = 180.0,
    most: int = 10_000,
    epoch_batches: int = 10**9,
    between: Callable[[DeviceDouble], None] = lambda device: None,
    slow_batches: Mapping[int, float] | None = None,
) -> AsIsSteps:
    """Trains until the phase as is may end, as `phases.ProfileSession` does.

    `between`: what the script does between two epochs of so many batches.
    """
    device = device or DeviceDouble()
    clock = clock or StepClock(find=lambda: device, now=device.now)

    def epoch() -> LoaderDouble:
        return LoaderDouble(
            device,
            batch_seconds=batch_seconds,
            workers=workers,
            batches=epoch_batches,
            slow=slow_batches,
        )

    loader = epoch()
    steps = AsIsSteps(
        workers=workers,
        children_cpu=lambda: 0.0,
        machine_cpu=lambda: 0.0,
        clock=clock,
        prefetched=2 * workers,
        epoch_batches=epoch_batches,
        warm_up_seconds=0.08 * budget_seconds,
        longest_seconds=0.25 * budget_seconds,
    )
    for number in range(most):
        if loader.is_read_out:
            steps.epoch_ended()
            between(device)
            loader = epoch()
        ready = loader.ready if workers else None
        asked = clock.mark()
        next(loader)
        steps.got(asked=asked, got=clock.mark(), cpu=device.seconds, receive=0.0, ready=ready)
        since = steps.counting_since
        counted = 0.0 if since is None else device.seconds - since
        is_enough = AS_IS_ENOUGH.holds(
            steps=steps.count,
            elapsed_seconds=counted,
            budget_seconds=budget_seconds,
            least=steps.least,
        )
        is_late = counted >= AS_IS_ENOUGH.most * budget_seconds
        if is_enough and (steps.is_supplied or is_late):
            break
        if lack_of(steps, budget_seconds=budget_seconds):
            break
        steps.gave(mark=clock.mark(), cpu=device.seconds)
        step(device, number)
    steps.epoch_ended()
    steps.settle()
    return steps


def compiled(step: Step, slow: dict[int, float]) -> Step:
    """Returns a step before which the host compiles, in the steps named, for so many seconds."""

    def compiling(device: DeviceDouble, number: int) -> None:
        device.work(slow.get(number, 0.0))
        step(device, number)

    return compiling
