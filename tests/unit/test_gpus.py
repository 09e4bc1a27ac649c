"""GPUs of a host and their load, as NVML tells them."""

import msgspec
import pynvml
import pytest
import torch

from stoker.host.gpus import (
    DeviceNames,
    Gpu,
    GpuReader,
    GpusUnreadError,
    throttle_reasons,
    visible_places,
)
from stoker.host.machine import num_accelerators
from support import nvml
from support.nvml import FakeGpu, FakeNvml, FakeSlice

LIBRARY = (
    "NVML: NVML Shared Library Not Found (containers: NVIDIA_DRIVER_CAPABILITIES=compute,utility)"
)
ONE, TWO, THREE = "GPU-aa11-0", "GPU-aa22-0", "GPU-bb33-0"
SLICES = ("MIG-1111", "MIG-2222", "MIG-2333")
WHOLE = (DeviceNames(ONE), DeviceNames(TWO), DeviceNames(THREE))
SLICED = (DeviceNames(ONE), DeviceNames(TWO, SLICES, is_sliced=True))
UNUSABLE = (DeviceNames(ONE, (), is_sliced=True),)


def reader(library, tmp_path, *, visible=None, has_gpu=True, has_rocm=False, **options):
    if has_gpu:
        (tmp_path / "nvidia0").touch()
    (tmp_path / "nvidiactl").touch()
    if has_rocm:
        (tmp_path / "kfd").touch()
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    return GpuReader(
        environ, nvml=lambda: library, rocm_device=tmp_path / "kfd", devices=tmp_path, **options
    )


def refusal(library, tmp_path, **options):
    with pytest.raises(GpusUnreadError) as caught:
        reader(library, tmp_path, **options)
    return str(caught.value), caught.value.is_news


@pytest.mark.parametrize(
    ("text", "indices"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("0", [0]),
        ("2,0", [2, 0]),
        (" 1 , 2 ", [1, 2]),
        ("1gpu2", [1]),
        ("0,7,1", [0]),
        ("0,-1,1", [0]),
        ("0,x,1", [0]),
        ("1,1", []),
        ("all", []),
        ("none", []),
        ("NoDevFiles", []),
        (ONE, [0]),
        (f"{THREE},{ONE}", [2, 0]),
        ("GPU-bb", [2]),
        ("GPU-aa", []),
        ("GPU-aa1", [0]),
        ("GPU-cc", []),
        (f"{ONE},{ONE}", []),
        (f"{ONE},GPU-cc,{TWO}", [0]),
        ("gpu-aa11-0", []),
    ],
)
def test_visible_gpus_are_those_of_cuda(text, indices):
    assert [index for index, _ in visible_places(text, WHOLE)] == indices


@pytest.mark.parametrize(
    "text", ["", "0", "2,0", "0,-1,1", "1,1", "1gpu2", ONE, "GPU-aa", "GPU-bb"]
)
def test_visible_gpus_are_those_of_torch(text, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
    theirs = torch.cuda._parse_visible_devices()
    if theirs and isinstance(theirs[0], str):
        theirs = torch.cuda._transform_uuid_to_ordinals(theirs, [own.uuid for own in WHOLE])
    assert [index for index, _ in visible_places(text, WHOLE)] == theirs


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("", 0),
        ("-1", 0),
        ("0,1", 2),
        (" 3 , 5", 2),
        ("0,-1,1", 1),
        ("0,,1", 1),
        ("1,1", 0),
        ("NoDevFiles", 0),
        ("none", 0),
        ("void", 0),
        (f"{ONE},GPU-bb", 2),
        ("MIG-1111", 1),
        ("MIG-GPU-1/1/0,MIG-GPU-1/2/0", 2),
    ],
)
def test_a_host_has_as_many_accelerators_as_cuda_is_shown(text, number):
    assert num_accelerators({"CUDA_VISIBLE_DEVICES": text}) == number


@pytest.mark.parametrize(
    ("text", "places"),
    [
        (None, [(0, None), (1, 0), (1, 1), (1, 2)]),
        ("MIG-1111", [(1, 0)]),
        ("MIG-22", [(1, 1)]),
        ("MIG-2", []),
        ("MIG-1111,MIG-2333", [(1, 0), (1, 2)]),
        ("MIG-1111,MIG-1111", []),
        (f"MIG-{TWO}/1/0", [(1, 0), (1, 1), (1, 2)]),
        ("1", [(1, 0), (1, 1), (1, 2)]),
    ],
)
def test_a_gpu_in_mig_mode_is_used_by_its_slices(text, places):
    assert list(visible_places(text, SLICED)) == places


def test_a_gpu_in_mig_mode_without_a_slice_cannot_be_used(tmp_path):
    assert visible_places(None, UNUSABLE) == ()
    found = reader(FakeNvml(FakeGpu(slices=())), tmp_path)
    assert found.gpus == ()
    assert found.left_out == "all are in MIG mode, without a slice"


def test_a_look_has_all_figures_in_their_units(tmp_path):
    look = reader(FakeNvml(FakeGpu(reasons=0x4 | 0x40 | 0x8)), tmp_path).look()
    (state,) = look.states
    assert (state.gpu.number, state.gpu.model) == ("0", "NVIDIA H100 80GB HBM3")
    assert state.gpu.memory_total_bytes == 80 << 30
    sample = state.sample
    assert (sample.utilization, sample.memory_bytes) == (0.28, 12 << 30)
    assert (sample.power_watts, sample.sm_clock_mhz) == (210.0, 1755.0)
    assert sample.pcie_received_bytes_per_second == 1.2e9
    assert sample.throttled == ("power", "thermal")
    assert look.refused == look.lost == ()


@pytest.mark.parametrize(
    ("bits", "reasons"),
    [
        (0, ()),
        (0x1, ()),
        (0x2, ()),
        (0x100, ()),
        (0x4, ("power",)),
        (0x88, ("power",)),
        (0x20, ("thermal",)),
        (0x48, ("thermal",)),
        (0x8, ("other",)),
        (0x10, ("other",)),
        (0x4 | 0x20 | 0x10, ("power", "thermal", "other")),
        (1 << 40, ()),
    ],
)
def test_idle_and_set_clocks_are_no_throttling(bits, reasons):
    assert throttle_reasons(bits) == reasons


@pytest.mark.parametrize("code", [3, 4, 13])
def test_a_question_that_is_refused_is_told_once_and_not_asked_again(tmp_path, code):
    gpu = FakeGpu(refuses={"nvmlDeviceGetPowerUsage": code})
    found = reader(FakeNvml(gpu), tmp_path)
    first = found.look()
    assert first.states[0].sample.power_watts is None
    assert first.states[0].sample.utilization == 0.28
    assert len(first.refused) == 1
    assert first.refused[0].startswith("power (")
    gpu.refuses.clear()
    second = found.look()
    assert second.states[0].sample.power_watts is None
    assert second.refused == ()


def test_what_many_gpus_refuse_is_told_by_question(tmp_path):
    gpus = [FakeGpu(uuid=f"GPU-{n}", refuses={"nvmlDeviceGetPowerUsage": 4}) for n in range(12)]
    gpus[3].refuses["nvmlDeviceGetPcieThroughput"] = 3
    assert reader(FakeNvml(*gpus), tmp_path).look().refused == (
        "power (Insufficient Permissions) of 12 GPUs",
        "PCIe traffic (Not Supported) of GPU 3",
    )


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("NVIDIA \x1b[31mA100\n80GB ", "NVIDIA [31mA100 80GB"),
        ("", "not known"),
        (" \x00", "not known"),
        ("x" * 300, "x" * 200),
    ],
    ids=["control characters", "empty", "blank", "long"],
)
def test_an_odd_name_of_a_gpu_goes_through_the_wire_and_into_the_record(tmp_path, name, model):
    (gpu,) = reader(FakeNvml(FakeGpu(name=name)), tmp_path).gpus
    assert gpu.model == model
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(gpu), type=Gpu) == gpu


def test_a_library_of_another_version_than_the_driver_is_told_with_its_fix(tmp_path):
    text, is_news = refusal(FakeNvml(init_code=18), tmp_path)
    assert is_news
    assert text.endswith("version mismatch. (the driver was updated while it was loaded: restart)")


def test_a_question_that_fails_once_is_asked_again(tmp_path):
    gpu = FakeGpu(refuses={"nvmlDeviceGetPowerUsage": 999})
    found = reader(FakeNvml(gpu), tmp_path)
    assert found.look().states[0].sample.power_watts is None
    gpu.refuses.clear()
    assert found.look().states[0].sample.power_watts == 210.0


@pytest.mark.parametrize("code", [15, 16, 9, 1])
def test_a_gpu_that_falls_off_the_bus_is_told_once_and_the_others_go_on(tmp_path, code):
    gone = FakeGpu(uuid=ONE, lost_after=2, lost_code=code)
    found = reader(FakeNvml(gone, FakeGpu(uuid=TWO)), tmp_path)
    looks = [found.look() for _ in range(5)]
    assert [len(look.states) for look in looks] == [2, 2, 1, 1, 1]
    assert [len(look.lost) for look in looks] == [0, 0, 1, 0, 0]
    assert looks[2].lost[0].startswith(f"GPU 0 ({ONE}): ")


def test_a_gpu_that_answers_nothing_is_lost_after_some_looks(tmp_path):
    found = reader(FakeNvml(FakeGpu(lost_after=1, lost_code=999)), tmp_path)
    looks = [found.look() for _ in range(5)]
    assert [len(look.states) for look in looks] == [1, 0, 0, 0, 0]
    assert [bool(look.lost) for look in looks] == [False, False, False, True, False]


def test_a_gpu_that_is_gone_at_the_start_does_not_hide_the_others(tmp_path):
    gone = FakeGpu(uuid=ONE, refuses={"nvmlDeviceGetHandleByIndex": 15})
    found = reader(FakeNvml(gone, FakeGpu(uuid=TWO)), tmp_path)
    assert [(gpu.index, gpu.uuid) for gpu in found.gpus] == [(1, TWO)]


def test_of_a_mig_slice_its_memory_and_the_gpus_clocks_are_known(tmp_path):
    found = reader(FakeNvml(FakeGpu(slices=(FakeSlice(),), reasons=0x4)), tmp_path)
    look = found.look()
    (state,) = look.states
    assert state.gpu.number == "0.0"
    assert state.gpu.memory_total_bytes == 10 << 30
    sample = state.sample
    assert (sample.utilization, sample.power_watts) == (None, None)
    assert sample.pcie_received_bytes_per_second is None
    assert (sample.memory_bytes, sample.sm_clock_mhz) == (2 << 30, 1755.0)
    assert sample.throttled == ("power",)
    assert look.refused == ("utilization (Not Supported) of GPU 0.0",)


def test_of_a_virtual_gpu_without_pcie_the_rest_is_known(tmp_path):
    gpu = FakeGpu(refuses={"nvmlDeviceGetPcieThroughput": 3, "nvmlDeviceGetMigMode": 3})
    (state,) = reader(FakeNvml(gpu), tmp_path).look().states
    assert state.sample.pcie_received_bytes_per_second is None
    assert state.sample.utilization == 0.28


def test_an_old_package_or_driver_has_the_clocks_reasons_under_their_older_name(tmp_path):
    name = "nvmlDeviceGetCurrentClocksEventReasons"
    package = FakeNvml(FakeGpu(reasons=0x4), lacks=(name,), gives_bytes=True)
    driver = FakeNvml(FakeGpu(reasons=0x4, refuses={name: 13}))
    for library in (package, driver):
        (state,) = reader(library, tmp_path).look().states
        assert state.sample.throttled == ("power",)
        assert state.gpu.model == "NVIDIA H100 80GB HBM3"


def test_gpus_that_the_command_may_not_use_are_left_out(tmp_path):
    library = FakeNvml(FakeGpu(uuid=ONE), FakeGpu(uuid=TWO))
    assert [gpu.uuid for gpu in reader(library, tmp_path, visible="GPU-aa22").gpus] == [TWO]
    nothing = reader(library, tmp_path, visible="")
    assert nothing.gpus == ()
    assert nothing.left_out == "CUDA_VISIBLE_DEVICES='' names none"


def test_a_host_without_a_gpu_is_no_news(tmp_path):
    assert refusal(FakeNvml(init_code=12), tmp_path, has_gpu=False) == (
        LIBRARY,
        False,
    )
    assert refusal(FakeNvml(init_code=12), tmp_path) == (
        LIBRARY,
        True,
    )
    assert refusal(FakeNvml(init_code=18), tmp_path, has_gpu=False)[1]


def test_a_missing_package_is_news_where_there_is_a_gpu(tmp_path):
    def missing():
        raise ModuleNotFoundError("No module named 'pynvml'")

    for has_gpu in (False, True):
        if has_gpu:
            (tmp_path / "nvidia0").touch()
        with pytest.raises(GpusUnreadError, match="nvidia-ml-py is not installed") as caught:
            GpuReader({}, nvml=missing, rocm_device=tmp_path / "kfd", devices=tmp_path)
        assert caught.value.is_news is has_gpu


def test_on_rocm_the_load_is_not_read(tmp_path):
    words, is_news = refusal(FakeNvml(init_code=12), tmp_path, has_gpu=False, has_rocm=True)
    assert words == "not read on ROCm: NVML knows only NVIDIA's GPUs"
    assert is_news


def test_a_package_that_is_broken_in_any_way_is_one_line(tmp_path):
    class Broken:
        def nvmlInit(self):
            raise OSError("libnvidia-ml.so.1: file too short")

    words, is_news = refusal(Broken(), tmp_path)
    assert words == "NVML: libnvidia-ml.so.1: file too short"
    assert is_news


def test_pcie_traffic_is_asked_rarely_where_counting_it_costs_cpu(tmp_path):
    now, cpu = [0.0], [0.0]
    gpu = FakeGpu()

    class Busy(FakeNvml):
        asked = 0

        def nvmlDeviceGetPcieThroughput(self, handle, counter):
            cpu[0] += 0.02
            Busy.asked += 1
            return super().nvmlDeviceGetPcieThroughput(handle, counter)

    found = reader(Busy(gpu), tmp_path, clock=lambda: now[0], cpu_clock=lambda: cpu[0])
    for _ in range(1000):
        found.look()
        now[0] += 1.0
    # 20 ms of a core, at 0.02% of one: every 100 s.
    assert 8 < Busy.asked < 12


def test_the_library_is_closed_once(tmp_path):
    library = FakeNvml(FakeGpu())
    found = reader(library, tmp_path)
    found.close()
    found.close()
    assert library.opened == 0


def test_the_double_has_the_names_and_errors_of_the_package():
    functions = [name for name in dir(FakeNvml()) if name.startswith("nvml")]
    assert len(functions) > 10
    assert [name for name in functions if not callable(getattr(pynvml, name, None))] == []
    assert (pynvml.NVML_CLOCK_SM, pynvml.NVML_PCIE_UTIL_RX_BYTES) == (
        nvml.NVML_CLOCK_SM,
        nvml.NVML_PCIE_UTIL_RX_BYTES,
    )
    for code, (name, text) in nvml.ERRORS.items():
        assert getattr(pynvml, f"NVML_ERROR_{name}") == code
        theirs = pynvml.NVMLError(code)
        assert type(theirs).__name__ == nvml.error_class(code)
        assert (str(theirs), theirs.value) == (text, code)


def test_the_package_without_a_driver_is_no_news_here(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a driver")
    with pytest.raises(GpusUnreadError, match="NVML Shared Library Not Found") as caught:
        GpuReader({}, rocm_device=tmp_path / "kfd", devices=tmp_path)
    assert not caught.value.is_news


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_real_gpu_tells_its_load():
    found = GpuReader({})
    try:
        look = found.look()
    finally:
        found.close()
    assert look.lost == ()
    for state in look.states:
        assert state.sample.memory_bytes
        assert 0 < state.sample.memory_bytes <= (state.gpu.memory_total_bytes or 0)
