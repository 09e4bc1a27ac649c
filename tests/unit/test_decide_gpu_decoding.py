"""Decoding on the accelerators as a plan, on the figures of one H100 of 2026-11-26."""

import msgspec
import pytest

from stoker.catalog import load_catalog
from stoker.decide import explain
from stoker.decide.scaled_profile import TakeAs
from stoker.records import Check, GpuDecoding, Observed, Profile, ProfiledHost, TransformCost
from support.decisions import decided
from support.gpu_profiles import H100

LOCAL = load_catalog("local", cores=16)
# Four cores, ResNet-50, batch 128; the step on a batch that is on the device takes 34.3 ms.
STEP = msgspec.structs.replace(H100.timed_step, accelerator_step_seconds=0.0343)
NVJPEG = GpuDecoding(
    device="cuda:0",
    library="torchvision",
    pictures_per_second=18557,
    augmented_per_second=3457,
    pictures=256,
    picture_bytes=80_000,
    read_cpu_seconds=0.0001,
)
PLAIN = ("RandomResizedCrop", "RandomHorizontalFlip", "ToImage", "ToDtype", "Normalize")


def transforms(*names, own_share=0.0):
    """Rows of getitem: decoding is 60% of it, less what the script's own take."""
    rows = [TransformCost(name="getitem", cpu_seconds=0.0046, share=0.98, samples=900)]
    rows += [
        TransformCost(
            name=name, within="getitem", cpu_seconds=0.4 * 0.0046 / len(names), share=0.1, samples=9
        )
        for name in names
    ]
    if own_share:
        cost = own_share * 0.0046
        rows.append(
            TransformCost(
                name="AddNoise", within="getitem", cpu_seconds=cost, share=own_share, samples=9
            )
        )
    return tuple(rows)


def profile(*names, decoding=NVJPEG, own_share=0.0, **step):
    return Profile(
        host=ProfiledHost(instance_type="local.c4", vcpus=4, accelerators=1),
        step=msgspec.structs.replace(STEP, **step),
        observed=Observed(cpu_utilization=0.9),
        check=Check(predicted_step_seconds=0.1508, error=-0.055, explained=True),
        transforms=transforms(*names, own_share=own_share) if names else (),
        gpu_decoding=decoding,
    )


def outcome(found, **more):
    decision = decided(found, catalog=LOCAL, **more)
    advice = {each.id: each for each in decision.advice}
    plans = [plan for plan in decision.plans if plan.action == "offload_gpu"]
    return decision, advice.get("decode-on-gpu"), plans


def test_step_is_the_accelerators_own_and_the_decoding_of_its_pictures():
    _, advice, (plan,) = outcome(profile(*PLAIN))
    # With one crop, flip and normalise on the device 1,886 pictures/s were measured.
    measured = 128 / 1886
    assert plan.predicted.step_seconds == pytest.approx(0.0343 + 128 / 3457)
    assert plan.predicted.step_seconds == pytest.approx(measured, rel=0.06)
    assert plan.predicted.step_seconds_low < measured < plan.predicted.step_seconds_high
    assert plan.predicted.limit == "accelerator"
    assert "about 71.3 ms per step" in advice.text
    assert "3,457 JPEGs a second were decoded there, cropped, flipped" in advice.text


def test_plan_is_named_and_never_chosen_as_it_takes_a_change_of_the_script():
    for objective in ("time", "cost"):
        decision, _, (plan,) = outcome(profile(*PLAIN), objective=objective)
        assert not plan.feasible
        assert "decode-on-gpu" in plan.reason
        assert decision.plan.action != "offload_gpu"
        assert decision.plans[0] is not plan


def test_plan_is_a_row_of_the_table_that_says_what_it_needs():
    decision, _, _ = outcome(profile(*PLAIN))
    text = explain(decision)
    (row,) = [line for line in text.splitlines() if line.startswith("+offload_gpu")]
    assert "today, decoding on its GPUs" in row
    assert " 71.3ms  2.24x " in row
    assert "+ needs another loading code" in text
    (answer,) = [each for each in decision.path if each.question == "Can the accelerators decode?"]
    assert "71.3 ms per step (2.24x), once the script decodes there" in answer.because
    assert "loading code" not in explain(outcome(profile(*PLAIN, decoding=None))[0]).split("How")[0]


def test_randaugment_on_the_device_has_no_figure_but_what_decoding_takes_at_least():
    _, advice, plans = outcome(profile(*PLAIN, "RandAugment"))
    assert plans == []
    assert "RandAugment can, too, at a cost that was not measured" in advice.text
    assert "at least 71.3 ms per step" in advice.text
    # 945 pictures/s were measured: slower than the least, faster than today.
    assert 0.0713 < 128 / 945 < STEP.step_seconds


def test_decoding_alone_gives_only_what_a_step_takes_at_least():
    alone = msgspec.structs.replace(NVJPEG, augmented_per_second=None)
    _, advice, plans = outcome(profile(*PLAIN, decoding=alone))
    assert plans == []
    assert "18,557 JPEGs a second were decoded there, with nothing else on it" in advice.text
    assert "at least 41.2 ms per step" in advice.text


def test_without_a_rate_there_is_no_figure():
    _, advice, plans = outcome(profile(*PLAIN, decoding=None))
    assert plans == []
    assert "how fast was not measured" in advice.text
    assert "samples are JPEGs" in advice.when
    assert " ms per step" not in advice.text


@pytest.mark.parametrize(
    "changes",
    [
        {"accelerator_step_seconds": 0.140, "wait_seconds": 0.01},
        {"decoding": msgspec.structs.replace(NVJPEG, augmented_per_second=1000)},
        {"decoding": None, "names": ("ToTensor", "Normalize")},
        {"decoding": None, "names": ("LoadCase", "SpacingD")},
        {"own_share": 0.6},
    ],
    ids=["a busy accelerator", "a slow decoder", "no pictures", "others' transforms", "own code"],
)
def test_nothing_is_claimed_where_it_would_not_help(changes):
    names = changes.pop("names", PLAIN)
    decision, advice, plans = outcome(profile(*names, **changes))
    assert (advice, plans) == (None, [])
    assert "offload-gpu" not in {each.id for each in decision.advice}


def test_own_code_of_a_small_part_is_named_as_what_has_to_be_written():
    _, advice, plans = outcome(profile(*PLAIN, own_share=0.1))
    assert plans == []
    assert "AddNoise would have to be written for the accelerator" in advice.text


TIMM = ("RandomResizedCropAndInterpolation", "RandomHorizontalFlip", "MaybeToTensor", "Normalize")
ALBUMENTATIONS = ("RandomResizedCrop", "HorizontalFlip", "Normalize", "ToTensorV2")


@pytest.mark.parametrize("names", [TIMM, ALBUMENTATIONS, ("transforms.Resize", "_misc.Normalize")])
def test_other_libraries_transforms_are_known_by_name(names):
    _, advice, plans = outcome(profile(*names))
    assert len(plans) == 1
    assert "would have to be written" not in advice.text


def test_transforms_that_are_applied_now_and_then_have_a_cost_that_is_not_known():
    _, advice, plans = outcome(profile(*PLAIN, "RandomApply"))
    assert plans == []
    assert "RandomApply can, too, at a cost that was not measured" in advice.text


def test_jpegs_of_a_dataset_without_a_list_of_transforms_are_enough():
    found = msgspec.structs.replace(profile(*PLAIN), transforms=transforms(*PLAIN)[:1])
    _, advice, (plan,) = outcome(found)
    assert "JPEG decoding can go there" in advice.text
    assert plan.predicted.step_seconds == pytest.approx(0.0713, rel=0.01)


def test_a_profile_that_saw_no_transforms_says_what_it_said():
    decision, advice, plans = outcome(profile(decoding=None))
    assert (advice, plans) == (None, [])
    assert "offload-gpu" in {each.id for each in decision.advice}


def test_several_accelerators_divide_the_pictures():
    step = {"global_batch_size": 512, "loader_cpu_seconds": 2.41, "used_cpu_seconds": 2.4}
    step |= {"loader_wall_seconds": 2.41, "step_seconds": 0.64, "wait_seconds": 0.6}
    found = profile(*PLAIN, **step)
    host = ProfiledHost(instance_type="local.c4", vcpus=4, accelerators=4)
    _, _, (plan,) = outcome(msgspec.structs.replace(found, host=host))
    assert plan.predicted.step_seconds == pytest.approx(0.0343 + 128 / 3457)


def test_files_are_copied_in_place_of_decoded_pictures():
    step = {"accelerator_step_seconds": 0.0452, "transfer_seconds": 0.0109}
    _, _, (plan,) = outcome(profile(*PLAIN, **step))
    files = 128 * 80_000 / STEP.batch_bytes
    expected = 0.0452 - 0.0109 * (1 - files) + 128 / 3457
    assert plan.predicted.step_seconds == pytest.approx(expected)


def test_reading_files_on_few_cores_may_be_the_limit():
    slow = msgspec.structs.replace(NVJPEG, read_cpu_seconds=0.0025)
    _, _, (plan,) = outcome(profile(*PLAIN, decoding=slow))
    assert plan.predicted.limit == "cpu"
    assert plan.predicted.step_seconds == pytest.approx((128 * 0.0025 + 0.0591) / 4)


def test_rate_of_one_accelerator_is_not_taken_to_another():
    taken = TakeAs(instance_type="ml.g6e.xlarge", accelerator_step_seconds=0.05)
    decision = decided(profile(*PLAIN), objective="time", take_as=taken)
    texts = [each.text for each in decision.advice if each.id == "decode-on-gpu"]
    assert all("3,457" not in text for text in texts)
    assert all(plan.action != "offload_gpu" for plan in decision.plans)
