"""Texts about a run's records, for the terminal and for the page of the report.

A page's figures have spaces that do not break and one unit of time; see `stoker.units`.
"""

from collections.abc import Iterable, Sequence

from stoker.logs import shown
from stoker.records import (
    EpochTimes,
    FeedSettings,
    GpuLoad,
    Group,
    Measured,
    Profile,
    ProfiledLoader,
    Training,
)
from stoker.records.outcome import outcome_of
from stoker.records.profile import busy_share, used_gpus
from stoker.records.training import NOT_COMPARABLE, UNHELPED
from stoker.units import (
    figure,
    is_whole_longer,
    ms,
    numbered,
    percentage,
    size,
    usd,
    wait_words,
)

# Of a step: less is in no line.
_WORTH_A_WORD = 0.01


def profile_words(record: Profile) -> str:
    """Returns a profile in one line."""
    step = record.step
    check = record.check
    words = f"a step takes {ms(step.step_seconds)}"
    if step.wait_seconds is None:
        return words
    words += f", {wait_words(step.wait_share or 0.0)}"
    if whole := whole_step_of(record):
        words += f", {ms(whole)} over whole epochs"
    if record.observed and (busy := busy_words(record.observed.gpus)):
        words += f", {busy}"
    if check and not check.explained:
        words += ", unexplained"
    return words


def unfed_words(loader: ProfiledLoader | None, feed: FeedSettings | None = None) -> str:
    """Returns why data hosts cannot make a loader's batches; empty: they can, or unknown."""
    if loader is None:
        return ""
    why = loader.unsendable
    if loader.reach == "own":
        why = "it makes batches in its own way"
    elif loader.reach != "stoker" and feed and not feed.replace_dataloader:
        why = "feed.replace_dataloader is false"
    return f"{loader.class_name} gets no help from data hosts: {why}" if why else ""


def loader_words(loader: ProfiledLoader) -> str:
    """Returns which loader was read, and how far data hosts can make its batches."""
    unfed = unfed_words(loader)
    if unfed:
        return f"loader: {unfed}"
    name = loader.class_name
    if not loader.iterable:
        return f"loader: {name}; data hosts can make its batches"
    shards = numbered(loader.shards or 1, "shard")
    return f"loader: {name} over a stream of {shards}, each made by one worker wherever it runs"


def group_arguments(groups: Iterable[Group]) -> list[str]:
    """Returns groups as arguments of `stoker train`: `--group dnn=TYPE:HOSTS[:WORKERS]`."""
    words = []
    for group in groups:
        hosts = f"{group.role}={group.instance_type}:{group.count}"
        if group.workers_per_host is not None:
            hosts += f":{group.workers_per_host}"
        words += ["--group", hosts]
    return words


def notes_on(training: Training) -> list[str]:
    """Returns what a reader of a good run's figures has to know beside them."""
    notes = []
    if training.bad_samples:
        notes.append(f"{numbered(training.bad_samples, 'bad sample')}, listed in bad_samples.csv")
    if memory := memory_cause(training):
        notes.append(f"memory was short: {memory}")
    # The platform says why: hosts share cores, or cores count as hosts of a cloud.
    kinds = (NOT_COMPARABLE, UNHELPED)
    notes += [event.what for event in training.events if event.what.startswith(kinds)]
    notes += [group.made_words for group in training.useless_groups]
    return notes


def memory_cause(training: Training) -> str:
    """Returns which host's memory was short and what was felt of it; empty: none was."""
    short = [host for host in training.memory if host.is_short]
    if not short:
        return ""
    host = max(short, key=lambda host: (host.kills, host.share))
    words = f"{size(host.peak_bytes)} of {size(host.limit_bytes)} in use on {host.host}"
    if host.kills:
        words += f"; the kernel killed {numbered(host.kills, 'process', 'processes')} for memory"
    return words


def training_words(training: Training) -> str:
    """Returns what a run did, and whether its times can be compared with other runs."""
    outcome = outcome_of(training)
    if not outcome.is_good:
        return outcome.words.removeprefix("the ")
    measured = training.measured
    words = "training succeeded; no step was timed"
    if measured:
        words = f"{numbered(measured.steps, 'step')} of {measured_words(measured)}"
        if busy := busy_words(training.gpus):
            words += f", {busy}"
    for name, value in training.metrics.items():
        words += f", {shown(name)} {figure(value, figures=4)}"
    if training.spent_usd is not None:
        words += f", {usd(training.spent_usd)} for the run"
    if training.predicted_usd is not None:
        words += f" (predicted {usd(training.predicted_usd)})"
    return "; ".join([words, *notes_on(training)])


def measured_words(measured: Measured) -> str:
    """Returns a run's step and its wait: `61.8 ms, 64% of it waiting for data`.

    With what whole epochs have beyond their steps, if that is worth a word: `75.1 ms over whole
    epochs (61.8 ms within them, 64% of it waiting for data)`.
    """
    least = measured.least_wait_share
    step = ms(measured.step_seconds)
    waiting = wait_words(measured.wait_share, least=least, rank=measured.rank)
    whole = measured.whole_step_seconds
    if whole is None or not is_whole_longer(measured.step_seconds, whole):
        return f"{step}, {waiting}"
    return f"{ms(whole)} over whole epochs ({step} within them, {waiting})"


def busy_words(gpus: Sequence[GpuLoad]) -> str:
    """Returns `GPU 28% busy`, with how many are in use if not all are; empty: not known."""
    share = busy_share(gpus)
    if share is None:
        return ""
    used = len(used_gpus(gpus))
    words = f"{gpu_noun(used)} {percentage(share)} busy"
    if used == len(gpus):
        return words
    return f"{words} ({used} of {len(gpus)} in use)"


def gpu_noun(number: int | None) -> str:
    return "GPU" if number == 1 else "GPUs"


def gpu_words(gpu: GpuLoad) -> str:
    """Returns the load of one GPU in a line, with the figures that are known."""
    parts = []
    if gpu.utilization is not None:
        parts.append(f"{percentage(gpu.utilization)} busy, pauses included")
    if gpu.memory_bytes is not None:
        total = f" of {size(gpu.memory_total_bytes)}" if gpu.memory_total_bytes else ""
        parts.append(f"{size(gpu.memory_bytes)}{total}")
    model = f" ({gpu.model})" if gpu.model else ""
    return f"GPU {gpu.index}{model}: {', '.join(parts)}"


def whole_step_of(profile: Profile) -> float | None:
    """Returns today's seconds of whole epochs over their steps; None: not known."""
    times = profile.epochs
    if times is None or not times.steps:
        return None
    return times.whole_step_seconds(profile.step.step_seconds)


def epoch_words(times: EpochTimes, *, step_seconds: float) -> list[str]:
    """Returns what whole epochs have beyond their steps, one thing a line.

    Args:
        times: Of whole epochs.
        step_seconds: Of a step within epochs.
    """
    lines = []
    shortest = _WORTH_A_WORD * step_seconds
    start = times.start
    between = times.between
    inside = times.inside_seconds or 0.0
    steps = round(times.steps or 0)
    if start and steps and start.seconds >= shortest * steps:
        lines.append(
            f"an epoch of {numbered(steps, 'step')} begins with {start.seconds:.2g} s of waiting: "
            "one worker makes its first batch"
        )
    if between and between.seconds >= shortest:
        lines.append(
            f"{between.seconds:.2g} s lie between two epochs ({between.count} seen): validation, "
            "checkpoints, logging"
        )
    if inside and inside >= shortest:
        lines.append(
            f"{ms(inside)} of a mean step are in no usual one: validation or checkpoints in "
            "mid-epoch, or steps that are slow themselves"
        )
    if steps and between is None:
        lines.append("what lies between epochs is not known: no two epochs were seen")
    return lines
