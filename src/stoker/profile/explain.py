"""The text of a profile: a verdict, a table of terms, and what to do at no cost."""

from collections.abc import Iterator, Sequence

from stoker.decide.model import LEAST_GAIN, limit_words, lost_share
from stoker.decide.work import AGAIN, parts_of, too_busy
from stoker.record_words import epoch_words, gpu_noun, gpu_words, loader_words, whole_step_of
from stoker.records import Profile
from stoker.records.profile import used_gpus
from stoker.units import (
    capital,
    is_whole_longer,
    ms,
    numbered,
    percentage,
    size,
    vcpus_words,
    wrapped,
)

_NAME = 44
_TERMS = (
    ("step_seconds", "a step, as is"),
    ("wait_seconds", "  of it waiting for data"),
    ("accelerator_step_seconds", "a step without loading"),
    ("transfer_seconds", "  of it waiting for copies"),
    ("neighbour_seconds", "  more beside busy workers"),
    ("loader_cpu_seconds", "CPU time to load a batch"),
    ("loader_wall_seconds", "worker time to load it"),
    ("trainer_cpu_seconds", "CPU time of the trainer"),
    ("used_cpu_seconds", "CPU time of both in a step, as is"),
)
# All are in the record.
_MAX_STATES = 3
_GPUS_SHOWN = 8
SUSPECTS = {
    "cpu": "the CPUs are busy and the GPUs are not: probably CPU-bound",
    "accelerator": "the GPUs are busy: probably the accelerator sets the pace",
    "neither": "neither CPUs nor GPUs are busy: steps probably wait for storage or a service, "
    "for too few loader workers, or for one thread",
    "unknown": "that does not show the limit",
}


def explain(profile: Profile) -> str:
    """Returns the verdict, the parts of a step, and what to do at no cost, for a terminal."""
    host = profile.host
    busy = too_busy(profile, vcpus=host.capacity * host.count) if host.capacity else ""
    texts = [_verdict(profile, busy=busy), *_epochs(profile)]
    # Other programs are in the verdict, if they spoil it.
    hidden = "other-programs" if busy else ""
    states = [state for state in profile.states[:_MAX_STATES] if state.id != hidden]
    texts += [f"found: {state.text}" for state in states]
    if profile.loader:
        texts.append(loader_words(profile.loader))
    lines = _wrapped(texts)
    lines += ["", *_table(profile), *_transforms(profile)]
    if profile.observed:
        lines += ["", *_wrapped([*_observed(profile)])]
    notes = profile.what.get("notes")
    lines += ["", *_wrapped([*_check(profile)])]
    lines += _wrapped([f"note: {note}" for note in (notes if isinstance(notes, list) else [])])
    if profile.fixes:
        lines += ["", "free, or nearly free:"]
    for fix in profile.fixes:
        # While other programs run, a fix stays right, but its figure would be noise.
        saves = f" (saves {ms(fix.saves_seconds)} per step)" if fix.saves_seconds else ""
        lines += wrapped(f"- {fix.text}{'' if busy else saves}")
    return "\n".join(lines)


def _wrapped(texts: Sequence[str]) -> list[str]:
    return [line for text in texts for line in wrapped(text)]


def _verdict(profile: Profile, *, busy: str) -> str:
    step = profile.step
    if step.wait_seconds is None:
        return f"A step takes {ms(step.step_seconds)}; what it waits for was not measured."
    share = step.wait_share or 0.0
    waiting = f"{percentage(share)} of a step is waiting for data"
    computing = step.accelerator_step_seconds
    # Steps that wait for nothing may still be slowed by their own loading.
    lost = share
    if computing is not None:
        lost = lost_share(
            step_seconds=step.step_seconds,
            wait_seconds=step.wait_seconds,
            accelerator_seconds=computing,
        )
        if lost > share:
            now = ms(step.step_seconds)
            waiting += f". Without loading, a step would take {ms(computing)} instead of {now}"
    check = profile.check
    if busy:
        return f"{waiting}. {capital(busy)}; {AGAIN}."
    if check and not check.explained:
        if any(state.id == "straggler" for state in profile.states):
            return f"{waiting}: all ranks wait for one that is slow."
        return f"{waiting}, but the parts do not add up to it: unexplained."
    if profile.unmeasured:
        return f"{waiting}; what making it costs on the same CPUs is not known."
    return f"{waiting}{_limit(profile, share=lost)}."


def _limit(profile: Profile, *, share: float) -> str:
    """Returns what the limit is, after a colon; empty: it is not known.

    Args:
        profile: Whose parts explain its step.
        share: Of a step that steps without loading would save, waiting included.
    """
    states = {state.id for state in profile.states}
    parts = parts_of(profile)
    if "neighbour" in states:
        limit = f"{limit_words('accelerator')}, slowed by its own host's loading"
    elif share < LEAST_GAIN and "transfer" in states:
        limit = f"{limit_words('accelerator')}, which waits for copies of its batch"
    elif share < LEAST_GAIN and "launch" in states:
        return ": the script's own thread sets the pace, not the GPU"
    elif share < LEAST_GAIN:
        return ": the accelerator sets the pace"
    elif parts is None:
        return ""
    elif parts.workers == 0 and parts.bottleneck == "workers":
        limit = "loading in the trainer itself (num_workers=0)"
    else:
        limit = limit_words(parts.bottleneck)
    return f": the limit is {limit}"


def _epochs(profile: Profile) -> list[str]:
    whole = whole_step_of(profile)
    if profile.epochs is None or whole is None:
        return []
    step_seconds = profile.step.step_seconds
    lines = epoch_words(profile.epochs, step_seconds=step_seconds)
    if is_whole_longer(step_seconds, whole):
        lines.insert(0, f"over whole epochs a step takes {ms(whole)}:")
    return lines


def _check(profile: Profile) -> Iterator[str]:
    check = profile.check
    if check is None:
        return
    error = percentage(check.error, signed=True)
    text = (
        f"self-check: the parts give {ms(check.predicted_step_seconds)} per step, measured were "
        f"{ms(profile.step.step_seconds)} ({error})"
    )
    if not check.explained:
        text += ": unexplained, so stoker recommends no other hosts"
    yield text


def _table(profile: Profile) -> Iterator[str]:
    yield f"{'':<30}{'ms per step':>11}   {'middle half':>19}   {'samples':>7}"
    step = profile.step
    for name, title in _TERMS:
        value: float | None = getattr(step, name)
        if value is None:
            continue
        line = f"{title:<30}{value * 1e3:>11.2f}"
        if spread := (profile.spread or {}).get(name):
            middle = f"{spread.low * 1e3:.2f} to {spread.high * 1e3:.2f}"
            line += f"   {middle:>19}   {spread.samples:>7}"
        yield line
    facts = []
    if step.global_batch_size is not None:
        facts.append(f"{numbered(step.global_batch_size, 'sample')} per step")
    if step.batch_bytes:
        facts.append(size(step.batch_bytes))
    if step.num_workers is not None:
        facts.append(f"{numbered(step.num_workers, 'worker')} per host")
    host = profile.host
    hosts = f"{host.count} x {host.instance_type}"
    facts.append(f"{hosts} of {vcpus_words(host.capacity)}" if host.capacity else hosts)
    yield "; ".join(facts)


def _transforms(profile: Profile) -> Iterator[str]:
    """Yields lines of 63 columns."""
    if profile.transforms:
        yield ""
        yield f"{'loading a sample, one worker':<{_NAME}}{'CPU ms':>9}{'share':>8}"
    for part in profile.transforms:
        name = f"  {part.name}" if part.within else part.name
        yield f"{name[: _NAME - 1]:<{_NAME}}{part.cpu_seconds * 1e3:>9.3f}{part.share:>8.0%}"


def _observed(profile: Profile) -> Iterator[str]:
    """Yields how busy the hosts were, and each GPU."""
    observed = profile.observed
    assert observed is not None
    host = profile.host
    gpus = gpu_noun(len(used_gpus(observed.gpus)))
    loads = (("vCPUs", observed.cpu_utilization), (gpus, observed.gpu_utilization))
    words = [f"{name} {percentage(load)} busy" for name, load in loads if load is not None]
    yield f"{host.count} x {host.instance_type}: {', '.join(words) or 'load not known'}."
    for gpu in observed.gpus[:_GPUS_SHOWN]:
        yield gpu_words(gpu)
