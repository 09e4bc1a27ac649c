"""Decoding and augmenting on the accelerators: what can go there, and how long a step takes then.

Workers then only read files, and the training loop decodes on the device:

    t = max(g + b / r, (reading + trainer) / V)

g: accelerator-only step, in which files are copied in place of decoded pictures; b: samples of a
step for each accelerator; r: pictures that it decodes, crops, flips and normalises per second, as
the profile measured (`Profile.gpu_decoding`); V: vCPUs of today's hosts. Augmentations that are
many kernels for each picture cost more, and the script's own are not known: for those the formula
gives what a step takes at least, as it does where only decoding was timed. One H100 with ResNet-50
(2026-11-26): g 34.3 ms, r 3,457, so 71.3 ms; measured 67.9 ms, and 135 ms with RandAugment.
"""

from dataclasses import dataclass, replace

from stoker.decide.candidates import Candidate
from stoker.decide.model import Doubt, Estimate, StepWork
from stoker.decide.pricing import PlanRules, plan_of, predicted
from stoker.records import Advice, GpuDecoding, Limit, Plan, Profile, TransformCost
from stoker.units import ms, percentage

# An accelerator that computes for more of a step has no time for decoding.
MOST_BUSY = 0.7
# A smaller gain than this is not worth a rewrite of the loading code.
_LEAST_GAIN = 0.1
# What must be able to go there, as a share of getitem's CPU time.
_LEAST_SHARE = 0.5
# Launches overlap with the training's kernels, and the script's own crop may cost more or less.
# The limit of a step that decodes on the accelerator, and the next one.
_ACCELERATOR_FIRST: tuple[Limit, Limit] = ("accelerator", "cpu")
_CPU_FIRST: tuple[Limit, Limit] = ("cpu", "accelerator")
_BESIDE = Doubt(width=0.25, text="decoding beside the training was not measured")

# Names of transforms as torchvision (v1, v2), timm, Albumentations and DALI spell them.
# Of pictures alone, with few kernels for each:
_OF_PICTURES = frozenset(
    {
        "Resize",
        "CenterCrop",
        "RandomCrop",
        "RandomResizedCrop",
        "RandomResizedCropAndInterpolation",
        "ResizeKeepRatio",
        "CenterCropOrPad",
        "RandomCropOrPad",
        "RandomHorizontalFlip",
        "RandomVerticalFlip",
        "HorizontalFlip",
        "VerticalFlip",
        "Pad",
    }
)
# Of other samples, too, with some kernels for a whole batch:
_OF_NUMBERS = frozenset(
    {
        "Normalize",
        "ToTensor",
        "ToTensorV2",
        "MaybeToTensor",
        "MaybePILToTensor",
        "ToNumpy",
        "ToImage",
        "PILToTensor",
        "ToPureTensor",
        "ToDtype",
        "ConvertImageDtype",
        "RGB",
        "Grayscale",
    }
)
# Many kernels for each picture:
_COSTLY = frozenset(
    {
        "RandomApply",
        "RandomChoice",
        "RandAugment",
        "AutoAugment",
        "AugMixAugment",
        "TrivialAugmentWide",
        "AugMix",
        "ColorJitter",
        "RandomPhotometricDistort",
        "GaussianBlur",
        "RandomRotation",
        "RandomAffine",
        "RandomPerspective",
        "ElasticTransform",
        "RandomErasing",
        "RandomGrayscale",
        "RandomSolarize",
        "RandomPosterize",
        "RandomEqualize",
        "RandomInvert",
        "RandomAutocontrast",
        "RandomAdjustSharpness",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLoading:
    """Loading as it would be with pictures decoded on the accelerators.

    Attributes:
        moves: Names of what goes there at a small cost, JPEG decoding first.
        costs_more: Transforms that go there, at a cost that was not measured.
        stays: The script's own transforms, which have to be written for the device.
        step_seconds: A step, or what it takes at least; None: the rate was not measured.
        is_least: The step may take longer: something that goes there was not timed.
    """

    moves: tuple[str, ...]
    costs_more: tuple[str, ...] = ()
    stays: tuple[str, ...] = ()
    step_seconds: float | None = None
    is_least: bool = True


def device_loading(profile: Profile, work: StepWork) -> DeviceLoading | None:
    """Returns what decoding on the accelerators would give; None where it is not worth a try.

    That is without accelerators, where they have no time left, where the profile saw neither JPEGs
    nor a transform that can go there, and where the gain would be too small.
    """
    busy = work.accelerator_seconds / work.step_seconds
    if not work.reference.accelerators or busy >= MOST_BUSY:
        return None
    sorted_names = _sorted_names(profile)
    if sorted_names is None:
        return None
    decoding = profile.gpu_decoding
    copies = profile.timed_step.transfer_seconds or 0.0
    seconds = None
    if decoding:
        seconds = decoded_step_seconds(work, decoding, copies=copies)
    if seconds is not None and seconds > (1 - _LEAST_GAIN) * work.step_seconds:
        return None
    is_timed = decoding is not None and decoding.augmented_per_second is not None
    is_least = bool(sorted_names.costs_more or sorted_names.stays) or not is_timed
    return replace(sorted_names, step_seconds=seconds, is_least=is_least)


def decoded_step_seconds(work: StepWork, decoding: GpuDecoding, *, copies: float) -> float | None:
    """Returns the seconds of a step with pictures decoded on the accelerators.

    None where the samples of a step are not known.

    Args:
        copies: Seconds of today's accelerator-only step that wait for copies from the host.
    """
    samples = work.global_batch_size
    if samples is None:
        return None
    ranks = max(1, round(work.ranks * work.ranks_per_process))
    # A rank drives one accelerator: others of the hosts stand idle.
    accelerators = min(work.reference.accelerators * work.hosts, ranks)
    # Pictures per second of one accelerator: with crop, flip and normalise, where that was timed.
    rate = decoding.augmented_per_second or decoding.pictures_per_second
    decoded = samples / accelerators / rate
    # Files are copied in place of decoded pictures, which are larger.
    still_copied = 1.0
    if work.batch_bytes:
        file_bytes = samples * (decoding.picture_bytes or 0.0)
        still_copied = min(1.0, file_bytes / work.batch_bytes)
    computing = work.accelerator_seconds - copies * (1 - still_copied)
    return max(computing + decoded, _cpu_seconds(work, decoding, samples=samples))


def offload_plan(
    profile: Profile, work: StepWork, kept: Candidate, *, rules: PlanRules
) -> Plan | None:
    """Returns the row of the table for today's hosts, which takes a change of the script.

    None where it is not worth a try, and without a prediction.

    Args:
        kept: Today's cluster.
    """
    loading = device_loading(profile, work)
    decoding = profile.gpu_decoding
    if decoding is None or loading is None or loading.is_least:
        return None
    step = loading.step_seconds
    if step is None:
        return None
    cpu = _cpu_seconds(work, decoding, samples=work.global_batch_size or 0)
    limit, second = _ACCELERATOR_FIRST
    if cpu >= step:
        limit, second = _CPU_FIRST
    estimate = Estimate(
        step_seconds=step,
        remote_share=0.0,
        limit=limit,
        second_limit=second,
        second_seconds=min(cpu, step),
        # Decoding keeps the accelerator busy, too.
        accelerator_seconds=step,
    )
    candidate = replace(kept, action="offload_gpu", estimate=estimate, own_storage=None)
    doubted = replace(work, doubts=(*work.doubts, _BESIDE))
    outcome = predicted(doubted, candidate, today=kept.shape, rules=rules)
    reason = "the script has to decode on the accelerator: see decode-on-gpu"
    return plan_of(candidate, outcome, reason, global_batch_size=None)


def advice_on_decoding(
    loading: DeviceLoading, *, work: StepWork, decoding: GpuDecoding | None
) -> Advice:
    """Returns what to write, what it gives if known, and what it costs."""
    busy = percentage(work.accelerator_seconds / work.step_seconds)
    text = f"Decode on the accelerators, which are busy {busy} of a step: {_and(loading.moves)} "
    text += f"can go there{_rate_words(loading, decoding)}. "
    if loading.costs_more:
        text += (
            f"{_and(loading.costs_more)} can, too, at a cost that was not measured: torchvision "
            "runs such transforms picture by picture, DALI's pipelines have some "
            "(nvidia.dali.auto_aug). "
        )
    if loading.stays:
        text += f"{_and(loading.stays)} would have to be written for the accelerator. "
    text += (
        "What it costs: the dataset returns the file's bytes, and the training loop decodes each "
        "batch (decode_jpeg of torchcodec or torchvision, on cuda) and runs the v2 transforms "
        "there, or DALI's, which replace torchvision's by an import (2.1 or newer). Pixels differ "
        "a little from PIL's: compare the accuracy. The code: docs/how-to/decode-on-the-gpu.md."
    )
    when = "the loading code may be rewritten"
    if decoding is None:
        when += ", and the samples are JPEGs"
    return Advice(id="decode-on-gpu", text=text, when=when)


def _rate_words(loading: DeviceLoading, decoding: GpuDecoding | None) -> str:
    if decoding is None:
        return " (how fast was not measured)"
    timed = decoding.pictures_per_second
    what = "JPEGs a second were decoded there"
    if decoding.augmented_per_second is not None:
        timed = decoding.augmented_per_second
        what = f"{what}, cropped, flipped and normalised"
    words = f" ({timed:,.0f} {what}, with nothing else on it"
    if loading.step_seconds is not None:
        about = "at least" if loading.is_least else "about"
        words += f": {about} {ms(loading.step_seconds)} per step"
    return f"{words})"


def _cpu_seconds(work: StepWork, decoding: GpuDecoding, *, samples: int) -> float:
    """Returns the step if only the CPU's rest counted: reading the files, and the trainer."""
    reading = samples * (decoding.read_cpu_seconds or 0.0)
    vcpus = work.reference.capacity * work.hosts
    return (reading + work.trainer_cpu_seconds) / vcpus


def _sorted_names(profile: Profile) -> DeviceLoading | None:
    """Sorts the transforms by where they can run; None where too little can go there."""
    rows = {row.name: row for row in profile.transforms if row.within == "getitem"}
    moves = tuple(name for name in rows if _bare(name) in _OF_PICTURES | _OF_NUMBERS)
    costs_more = tuple(name for name in rows if _bare(name) in _COSTLY)
    stays = tuple(name for name in rows if name not in {*moves, *costs_more})
    is_jpeg = profile.gpu_decoding is not None
    is_picture = any(_bare(name) in _OF_PICTURES | _COSTLY for name in rows)
    if not (is_jpeg or is_picture):
        return None
    whole = next((row for row in profile.transforms if row.name == "getitem"), None)
    if whole is not None and _share([rows[name] for name in stays], whole) > 1 - _LEAST_SHARE:
        return None
    # What getitem does beside the transforms is reading and decoding.
    decoding = "JPEG decoding" if is_jpeg else "decoding"
    return DeviceLoading(moves=(decoding, *moves), costs_more=costs_more, stays=stays)


def _share(rows: list[TransformCost], whole: TransformCost) -> float:
    if not whole.cpu_seconds:
        return 0.0
    return sum(row.cpu_seconds for row in rows) / whole.cpu_seconds


def _bare(name: str) -> str:
    """Returns a class's name without what it is nested in."""
    return name.rpartition(".")[2]


def _and(names: tuple[str, ...]) -> str:
    *others, last = names
    if not others:
        return last
    return f"{', '.join(others)} and {last}"
