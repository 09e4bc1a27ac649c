"""The GPUs' load in words, figures and pictures of a run."""

import re
from itertools import combinations

import msgspec
import pytest

from stoker.evaluate import evaluate
from stoker.profile.explain import explain
from stoker.record_words import (
    busy_words,
    evaluation_table,
    gpu_words,
    profile_words,
    training_words,
)
from stoker.records import Observed, ProfiledHost, TakenElsewhere, Training, read_json
from stoker.records.gpu import (
    GpuFigure,
    during_steps,
    loads_as_json,
    loads_in,
    step_busy_share,
)
from stoker.report.gpu_picture import draw_gpus, gpu_rows, read_gpu_strip
from stoker.run.outputs import carried, told_of_evaluation, told_of_profile, told_of_training
from stoker.tracking import metrics_of
from support import sample_records
from support.builders import gpu_load

replace = msgspec.structs.replace
BEFORE = gpu_load(0.28)
AFTER = gpu_load(0.86)


def profiled(*gpus):
    seen = Observed(cpu_utilization=0.9, gpu_utilization=0.31, gpus=gpus, hosts=1)
    return replace(sample_records.profile(), observed=seen)


def evaluated(**changes):
    records = {
        "workload": sample_records.workload(),
        "profile": profiled(BEFORE),
        "decision": sample_records.decision(),
        "training": replace(sample_records.training(), gpus=(AFTER,)),
    }
    return evaluate(**records | changes)


def test_the_load_of_a_gpu_is_a_line_of_what_is_known():
    even = GpuFigure(mean=12.9e9, low=12e9, median=13e9, high=14e9)
    known = replace(
        BEFORE,
        memory_bytes=even,
        memory_total_bytes=85_899_345_920,
        throttled={"power": 0.4, "thermal": 0.0, "other": 0.002},
    )
    assert gpu_words(known) == (
        "GPU 0 (NVIDIA H100 80GB HBM3): 28% busy, pauses included (14% to 42% half of the time), "
        "12.9 GB of 85.9 GB, clocks lowered 40% of the time (power)"
    )
    part = gpu_load(None, slice=1, model=None, memory_bytes=even)
    assert gpu_words(part) == "GPU 0.1: 12.9 GB"


def test_gpus_that_are_not_in_use_are_told_apart():
    idle = gpu_load(0.0, index=1)
    assert busy_words((BEFORE,)) == "GPU 28% busy"
    assert busy_words((BEFORE, AFTER)) == "GPUs 57% busy"
    assert busy_words((BEFORE, idle)) == "GPU 28% busy (1 of 2 in use)"
    assert busy_words((idle, idle)) == "GPUs 0% busy"
    assert busy_words((gpu_load(None),)) == busy_words(()) == ""


def test_the_profile_says_how_busy_the_gpu_was():
    text = explain(profiled(BEFORE))
    assert "1 x local.c1: vCPUs 90% busy, GPU 31% busy." in text
    assert "  GPU 0 (NVIDIA H100 80GB HBM3): 28% busy" in text
    two = explain(profiled(BEFORE, AFTER))
    assert "GPUs 31% busy." in two


@pytest.mark.parametrize(
    ("host", "words"),
    [
        # Nothing was found on this machine.
        ({"instance_type": "local.c4"}, "vCPUs 90% busy."),
        ({"instance_type": "local.c4", "accelerators": 1}, "GPUs: load not known."),
        ({"instance_type": "ml.g5.xlarge"}, "GPUs: load not known."),
        ({"instance_type": "ml.c5.xlarge", "accelerators": 0}, "vCPUs 90% busy."),
    ],
)
def test_a_load_that_is_not_known_is_a_word_where_there_may_be_gpus(host, words):
    seen = Observed(cpu_utilization=0.9, hosts=1)
    profile = replace(sample_records.profile(), host=ProfiledHost(**host), observed=seen)
    assert words in explain(profile)


def test_a_busy_share_of_the_steps_needs_a_sample_from_their_time():
    start_up = gpu_load(0.02, during="command", step_utilization=None)
    pauses = gpu_load(0.2, step_utilization=None)
    assert step_busy_share((start_up,)) is None
    assert step_busy_share((pauses,)) == 0.2
    assert step_busy_share((gpu_load(0.2, step_utilization=0.3),)) == 0.3
    assert during_steps((start_up, pauses)) == (pauses,)


def test_the_line_of_a_profile_says_how_busy_the_gpu_was():
    assert profile_words(profiled(BEFORE)).endswith(", GPU 28% busy")
    assert "GPU" not in profile_words(sample_records.profile())


def test_a_training_says_how_busy_its_gpu_was():
    assert ", GPU 86% busy, accuracy" in training_words(
        replace(sample_records.training(), gpus=(AFTER,))
    )
    assert "GPU" not in training_words(sample_records.training())


def test_an_evaluation_has_the_busy_share_before_and_after():
    found = evaluated()
    assert found.performance is not None
    assert found.performance.baseline.gpu_utilization == 0.28
    assert found.performance.measured.gpu_utilization == 0.86
    assert "the GPUs were 86% busy, 28% in the profile" in evaluation_table(found)


def test_without_gpus_an_evaluation_does_not_speak_of_them():
    found = evaluated(profile=sample_records.profile(), training=sample_records.training())
    assert found.performance is not None
    assert found.performance.measured.gpu_utilization is None
    assert "GPU" not in evaluation_table(found)
    only_after = evaluated(profile=sample_records.profile())
    assert "the GPUs were 86% busy" in evaluation_table(only_after)


def test_the_gpu_of_another_machine_is_not_the_baselines():
    taken = TakenElsewhere(
        profiled_on="local.c1",
        taken_as="ml.g5.xlarge",
        cpu_speed=1.0,
        cpu_speed_source="given",
        accelerator_step_source="given",
    )
    decision = replace(sample_records.decision(), taken_elsewhere=taken)
    found = evaluated(decision=decision)
    assert found.performance is not None
    assert found.performance.baseline.gpu_utilization is None


def test_pipelines_and_mlflow_get_the_busy_share():
    training = replace(sample_records.training(), gpus=(AFTER,))
    assert told_of_training(training).metrics["gpu_utilization"] == 0.86
    assert "gpu_utilization" not in told_of_training(sample_records.training()).metrics
    assert told_of_profile(profiled(BEFORE)).metrics["gpu_utilization"] == 0.31
    assert told_of_evaluation(evaluated()).metrics["gpu_utilization"] == 0.86
    assert metrics_of(training, None)["stoker_gpu_utilization"] == 0.86
    assert "stoker_gpu_utilization" not in metrics_of(sample_records.training(), None)


def test_as_many_loads_are_sent_as_there_is_room_for():
    gpus = [gpu_load(0.28, index=index) for index in range(100)]
    assert loads_in(loads_as_json(gpus, max_bytes=1 << 20)) == tuple(gpus)
    some = loads_in(loads_as_json(gpus, max_bytes=4096))
    assert 1 < len(some) < 100
    assert some == tuple(gpus[: len(some)])
    assert loads_as_json(gpus, max_bytes=10) == b""


def test_a_record_of_many_gpus_is_carried_within_its_bound():
    figure = GpuFigure(mean=12.9e9, low=12e9, median=13e9, high=14e9)
    gpus = tuple(
        gpu_load(
            0.28, index=index, memory_bytes=figure, power_watts=figure, throttled={"power": 0.4}
        )
        for index in range(200)
    )
    text = carried(replace(sample_records.training(), gpus=gpus))
    assert len(text) < 16 << 10
    assert read_json(text, Training).gpus[0].utilization == gpus[0].utilization


@pytest.mark.parametrize("width", [360.0, 960.0])
def test_labels_of_the_strips_do_not_clash(tmp_path, width):
    records = sample_records.with_gpus(tmp_path)
    training = records["training"]
    strip = read_gpu_strip("Before", records["before_gpus"], training.gpus)
    other = read_gpu_strip("After", records["after_gpus"], training.gpus)
    assert strip is not None
    assert other is not None
    drawing = draw_gpus((strip, other), width=width, name="gpus")
    for one, two in combinations(drawing.labels, 2):
        assert not one.overlaps(two), f"{one.text} / {two.text}"
    assert all(box.left >= -1 and box.right <= width + 1 for box in drawing.labels)


def test_a_strip_has_the_time_of_the_steps_and_the_gpus_in_use(tmp_path):
    records = sample_records.with_gpus(tmp_path)
    strip = read_gpu_strip("After", records["after_gpus"], records["training"].gpus)
    assert strip is not None
    assert strip.title == "After: one GPU (NVIDIA H100 80GB HBM3)"
    assert strip.right == "86% busy, top 100%"
    assert (strip.points[0][0], strip.points[-1][1]) == (0.0, 280.0)
    assert [share for _, _, share in strip.points] == pytest.approx([0.86] * len(strip.points))
    assert len(strip.points) <= 160


def test_without_samples_or_a_busy_share_there_is_no_strip(tmp_path):
    records = sample_records.with_gpus(tmp_path)
    gpus = records["training"].gpus
    assert read_gpu_strip("After", None, gpus) is None
    assert read_gpu_strip("After", tmp_path / "missing.csv", gpus) is None
    assert read_gpu_strip("After", records["after_gpus"], ()) is None
    assert read_gpu_strip("After", records["after_gpus"], (gpu_load(None),)) is None


def test_the_report_has_strips_before_and_after_and_a_table_of_gpus(tmp_path):
    text = sample_records.write_page(
        tmp_path, **sample_records.with_gpus(tmp_path), **timelines(tmp_path)
    )
    assert "Load of the GPUs" in text
    assert text.count("Before: one GPU") == 4, "label and description, wide and narrow"
    assert re.search(r"training host, GPU 0<span[^>]*>NVIDIA H100", text)
    assert "GPU" not in sample_records.write_page(tmp_path)


def timelines(folder):
    before, after = sample_records.write_timelines(folder)
    return {"before_timeline": before, "after_timeline": after}


def test_what_a_gpu_does_not_tell_is_not_known_in_the_table():
    (row,) = gpu_rows([gpu_load(None)], names={"algo-1": "training host"})
    assert row.name == "training host, GPU 0"
    assert {row.busy, row.memory, row.power, row.lowered} == {"not known"}
    (never,) = gpu_rows([gpu_load(throttled={"power": 0.0})], names={})
    assert never.lowered == "never"
