"""The text of a profile: a verdict, a table of terms, and what to do at no cost."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from stoker.record_words import epoch_words, gpu_noun, gpu_words, loader_words, whole_step_of
from stoker.records import GpuDecoding, Profile, StepTerms, TransformCost
from stoker.records.gpu import used_gpus
from stoker.step_model import (
    AGAIN,
    LEAST_GAIN,
    limit_words,
    lost_share,
    parts_of,
    speed_words,
    too_busy,
)
from stoker.units import (
    capital,
    is_whole_longer,
    ms,
    numbered,
    percentage,
    size,
    vcpus_words,
    wait_share,
    wrapped,
)

_ROWS = 8
_NAME = 44
# Parts with a smaller share are only in the record.
_MIN_SHARE = 0.01
TERMS = (
    ("step_seconds", "a step, as is"),
    ("wait_seconds", "  of it waiting for data"),
    ("accelerator_step_seconds", "a step with cached batches"),
    ("transfer_seconds", "  of it waiting for copies"),
    ("neighbour_seconds", "  more beside busy workers"),
    ("loader_cpu_seconds", "CPU time to load a batch"),
    ("loader_wall_seconds", "worker time to load it"),
    ("trainer_cpu_seconds", "CPU time of the trainer"),
    ("used_cpu_seconds", "CPU time of both in a step, as is"),
    ("handover_seconds", "taking a batch from a worker"),
    ("receive_seconds", "feed: trainer's own thread"),
    ("receive_cpu_seconds", "feed: CPU time, other threads"),
)
# All are in the record.
_MAX_STATES = 3
_OF_STATES = {
    "straggler": "all ranks wait for one that is slow",
    "workers": "the limit is loading in the trainer itself (num_workers=0), which does not take as "
    "long as in a worker",
}
# All are in the record.
_GPUS_SHOWN = 8
_SUSPECTS = {
    "cpu": "the CPUs are busy and the GPUs are not: probably CPU-bound",
    "accelerator": "the GPUs are busy: probably the accelerator sets the pace",
    "neither": "neither CPUs nor GPUs are busy: steps probably wait for storage or a service, "
    "for too few loader workers, or for one thread",
    "unknown": "that does not show the limit",
}


def transform_table(transforms: Sequence[TransformCost]) -> list[str]:
    """Returns at most eleven lines of 63 columns."""
    lines = [f"{'loading a sample, one worker':<{_NAME}}{'CPU ms':>9}{'share':>8}"]
    shown = [part for part in transforms if part.within is None or part.share >= _MIN_SHARE]
    for part in shown[:_ROWS]:
        name = part.name
        if part.within is not None:
            name = f"  {name}"
        if len(name) > _NAME - 1:
            name = f"  ..{name[-(_NAME - 5) :]}"
        lines.append(f"{name:<{_NAME}}{part.cpu_seconds * 1e3:>9.3f}{part.share:>8.0%}")
    left = len(shown) - _ROWS
    if left > 0:
        lines.append(f"  and {left} more in the profile")
    return lines


def explain(profile: Profile) -> str:
    if profile.step is None:
        text = explain_observed(profile)
        if not profile.loader:
            return text
        return "\n".join([text, *wrapped(loader_words(profile.loader))])
    busy = _too_busy(profile)
    states = profile.states[:_MAX_STATES]
    if busy:
        # Other programs are in the verdict.
        states = tuple(state for state in states if state.id != "other-programs")
    findings = [_verdict(profile), *_epochs(profile)]
    findings += [f"found: {state.text}" for state in states]
    if profile.loader:
        findings.append(loader_words(profile.loader))
    lines = [*_wrapped(findings), "", *_table(profile)]
    if storage := _storage(profile):
        lines += wrapped(storage)
    lines += _measurements(profile)
    notes = [*_notes_in(profile), speed_words(profile)]
    lines += _wrapped([f"note: {note}" for note in notes if note])
    return "\n".join([*lines, *_fixes(profile, is_busy=bool(busy))])


def _wrapped(texts: Iterable[str]) -> list[str]:
    return [*chain.from_iterable(map(wrapped, texts))]


def _measurements(profile: Profile) -> list[str]:
    """Returns what was measured beside the step, and whether its parts explain the step."""
    lines: list[str] = []
    if profile.transforms:
        lines += ["", *transform_table(profile.transforms)]
    if profile.gpu_decoding:
        lines += wrapped(_decoding(profile.gpu_decoding))
    if profile.observed:
        lines += ["", *observed_words(profile)]
    if profile.check:
        lines += ["", *wrapped(_check(profile))]
    return lines


def _notes_in(profile: Profile) -> list[object]:
    notes = profile.what.get("notes")
    return list(notes) if isinstance(notes, list) else []


def _fixes(profile: Profile, *, is_busy: bool) -> list[str]:
    if not profile.fixes:
        return []
    lines = ["", "free, or nearly free:"]
    for fix in profile.fixes:
        text = f"- {fix.text}"
        # While other programs run, a fix stays right, but its figure would be noise.
        if fix.saves_seconds and not is_busy:
            text += f" (saves {ms(fix.saves_seconds)} per step)"
        lines += wrapped(text)
    return lines


def _decoding(found: GpuDecoding) -> str:
    augmented = ""
    if found.augmented_per_second:
        augmented = f", {found.augmented_per_second:,.0f} with crop, flip and normalise"
    return (
        f"{found.device} decodes {found.pictures_per_second:,.0f} JPEGs like these a second"
        f"{augmented}, with nothing else on it ({found.library}, {found.pictures} of the "
        "dataset's files)."
    )


def _verdict(profile: Profile) -> str:
    step = profile.timed_step
    if step.wait_seconds is None:
        return f"A step takes {ms(step.step_seconds)}; what it waits for was not measured."
    share = step.wait_share or 0.0
    waiting = f"{percentage(share)} of a step is waiting for data"
    # Steps that wait for nothing may still be slowed by their own loading.
    lost = _lost(step)
    if lost > share:
        waiting += _lost_words(profile)
        share = lost
    busy = _too_busy(profile)
    if busy:
        return f"{waiting}. {capital(busy)}; {AGAIN}."
    if profile.check and profile.check.state:
        state = profile.check.state
        return f"{waiting}: {_OF_STATES.get(state, f'it is in the state {state}')}."
    if profile.check and not profile.check.explained:
        return f"{waiting}, but the parts do not add up to it: unexplained."
    if profile.unmeasured:
        return f"{waiting}; what making it costs on the same CPUs is not known."
    return f"{waiting}{_limit_named(profile, share=share)}."


def _limit_named(profile: Profile, *, share: float) -> str:
    """Returns what the limit is, after a colon; empty: it is not known.

    Args:
        profile: Whose parts explain its step.
        share: Of a step that cached batches would save, waiting included.
    """
    states = {state.id for state in profile.states}
    limit = limit_words("accelerator")
    if "neighbour" in states:
        return f": the limit is {limit}, slowed by its own host's loading"
    if share < LEAST_GAIN and "transfer" in states:
        copying = ms(profile.timed_step.transfer_seconds or 0.0)
        return f": the limit is {limit}, which waits {copying} of it for copies of its batch"
    if share < LEAST_GAIN and "launch" in states:
        return ": stoker does not help here; the script's own thread sets the pace, not the GPU"
    if share < LEAST_GAIN:
        return ": stoker does not help here; the accelerator sets the pace"
    if binding := _limit(profile):
        return f": the limit is {binding}"
    return ""


def _epochs(profile: Profile) -> list[str]:
    times = profile.epochs
    whole = whole_step_of(profile)
    if times is None or whole is None:
        return []
    step_seconds = profile.timed_step.step_seconds
    lines = epoch_words(times, step_seconds=step_seconds)
    if is_whole_longer(step_seconds, whole):
        waiting = ""
        if (wait := profile.timed_step.wait_seconds) is not None:
            whole_wait = times.whole_wait_seconds(wait)
            share = wait_share(step_seconds=whole, wait_seconds=whole_wait)
            waiting = f", {percentage(share)} of it waiting for data"
        lines.insert(0, f"over whole epochs a step takes {ms(whole)}{waiting}:")
    return lines


def _lost(step: StepTerms) -> float:
    """Returns the share of a step that cached batches save, waiting included; 0: not known."""
    if step.accelerator_step_seconds is None or step.wait_seconds is None:
        return 0.0
    return lost_share(
        step_seconds=step.step_seconds,
        wait_seconds=step.wait_seconds,
        accelerator_seconds=step.accelerator_step_seconds,
    )


def _lost_words(profile: Profile) -> str:
    """Returns why a step is shorter without its loading by more than its wait, and how short.

    As a time, because a reader would add up two shares of a step.
    """
    step = profile.timed_step
    without = ms(step.accelerator_step_seconds or 0.0)
    times = f"a step would take {without} instead of {ms(step.step_seconds)}"
    if "neighbour" in {state.id for state in profile.states}:
        return (
            ", and loading on the same cores slows the accelerator, whose kernels are launched "
            f"late. Without loading, {times}"
        )
    is_on_device = step.transfer_seconds is not None or step.neighbour_seconds is not None
    if is_on_device or profile.host.accelerators:
        # An accelerator needs little of the CPUs: what else it waits for is not known.
        return f". With cached batches, {times}"
    return f", and loading competes with the training for CPU time. Without loading, {times}"


def _too_busy(profile: Profile) -> str:
    capacity = profile.host.capacity
    if not capacity:
        return ""
    return too_busy(profile, vcpus=capacity * profile.host.count)


def _limit(profile: Profile) -> str | None:
    parts = parts_of(profile)
    if parts is None:
        return None
    if parts.bottleneck == "workers" and parts.workers == 0:
        return "loading in the trainer itself (num_workers=0)"
    return limit_words(parts.bottleneck)


def _check(profile: Profile) -> str:
    assert profile.check is not None
    check = profile.check
    error = percentage(check.error, signed=True)
    text = (
        f"self-check: the parts give {ms(check.predicted_step_seconds)} per step, measured were "
        f"{ms(profile.timed_step.step_seconds)} ({error})"
    )
    if check.explained:
        return text
    if check.state == "workers":
        return (
            f"{text}: loading does not take as long in the trainer as in a worker, and plans are "
            "predicted with workers"
        )
    if check.state:
        return (
            f"{text}: the rest is the state {check.state}, which no other host changes, so stoker "
            "recommends no other hosts"
        )
    return f"{text}: unexplained, so stoker recommends no other hosts"


def _table(profile: Profile) -> list[str]:
    lines = [f"{'':<30}{'ms per step':>11}   {'middle half':>19}   {'samples':>7}"]
    for name, title in TERMS:
        value = term(profile.timed_step, name)
        if value is None:
            continue
        line = f"{title:<30}{value * 1e3:>11.2f}"
        if spread := (profile.spread or {}).get(name):
            middle = f"{spread.low * 1e3:.2f} to {spread.high * 1e3:.2f}"
            line += f"   {middle:>19}   {spread.samples:>7}"
        lines.append(line)
    lines.append("; ".join(_facts(profile)))
    if clock := profile.what.get("clock"):
        lines.append(f"steps and waits are times of {clock}, CPU times of its host")
    return lines


def _facts(profile: Profile) -> Iterator[str]:
    """Yields what the step's figures are of: batch, workers, hosts."""
    step = profile.timed_step
    host = profile.host
    if step.global_batch_size is not None:
        batch = f"{numbered(step.global_batch_size, 'sample')} per step"
        if step.batch_bytes:
            batch += f", {size(step.batch_bytes)}"
        yield batch
    if step.num_workers is not None:
        yield f"{numbered(step.num_workers, 'worker')} per host"
    hosts = f"{host.count} x {host.instance_type}"
    if host.capacity:
        hosts += f" of {vcpus_words(host.capacity)}"
    yield hosts


def _storage(profile: Profile) -> str:
    step = profile.timed_step
    if not step.read_bytes:
        return ""
    words = f"a step reads {size(step.read_bytes)} from storage"
    if step.storage_bytes_per_second is not None:
        return f"{words}, which gives each host {size(step.storage_bytes_per_second)}/s"
    parts = parts_of(profile)
    if parts is not None and parts.limit == "storage":
        return words
    if any(state.id == "storage" for state in profile.states):
        return words
    return f"{words}, which keeps up"


def term(step: StepTerms, name: str) -> float | None:
    value: object = getattr(step, name)
    if not isinstance(value, float):
        return None
    return value


def explain_observed(profile: Profile) -> str:
    lines = observed_words(profile)
    lines += wrapped(
        "No step was timed, so nothing can be predicted for another cluster. Profile the training "
        "before money is spent on it: stoker profile."
    )
    return "\n".join([*lines, *_wrapped(f"note: {note}" for note in _notes_in(profile))])


def observed_words(profile: Profile) -> list[str]:
    observed = profile.observed
    assert observed is not None
    load = _busy("vCPUs", observed.cpu_utilization)
    if observed.others_vcpus:
        # What other programs used as well is another line's.
        load += " with this training run"
    loads = [load]
    if observed.gpu_utilization is not None or _may_have_gpus(profile):
        num_gpus = None
        if observed.gpus:
            num_gpus = len(used_gpus(observed.gpus))
        loads.append(_busy(gpu_noun(num_gpus), observed.gpu_utilization))
    text = f"{profile.host.count} x {profile.host.instance_type}: {', '.join(loads)}"
    # Where steps were seen to wait or not, a guess from the load is no news.
    if profile.step is None or profile.step.wait_seconds is None:
        text += f"; {_SUSPECTS[observed.suspect]}"
    lines = wrapped(f"{text}.")
    for gpu in observed.gpus[:_GPUS_SHOWN]:
        lines += wrapped(gpu_words(gpu), indent="  ")
    return lines


def _may_have_gpus(profile: Profile) -> bool:
    """Whether GPUs would be worth a word although their load is not known."""
    accelerators = profile.host.accelerators
    if accelerators is None and not profile.host.instance_type.startswith("local."):
        return True
    # On this machine the inventory would have found them.
    return bool(accelerators or (profile.observed and profile.observed.gpus))


def _busy(name: str, load: float | None) -> str:
    if load is None:
        return f"{name}: load not known"
    return f"{name} {percentage(load)} busy"
