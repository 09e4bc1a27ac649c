"""gpu.csv, its lines in the log, and the loads of a run's GPUs."""

import io
import os
import time

import pytest

from stoker.feed.timeline import COLUMNS as STEP_COLUMNS
from stoker.feed.timeline import MeasuredStep
from stoker.figures.gpu_log import (
    GpuLines,
    GpuLog,
    GpuRow,
    StepSpans,
    _Rows,
    gpus_in,
    loads_of,
    look_pause,
    read_rows,
    row_of,
    spans_of,
)
from stoker.host.gpus import Gpu, GpuReader, GpuSample, GpuState, GpusUnreadError, Look
from stoker.logs import Log, parse_line
from stoker.records.gpu import busy_share, step_busy_share
from support.nvml import FakeGpu, FakeNvml
from support.processes import until

H100 = Gpu(index=0, uuid="GPU-1", model="NVIDIA H100 80GB HBM3", memory_total_bytes=80 << 30)
FULL = GpuSample(
    utilization=0.283333,
    memory_bytes=12.5e9,
    power_watts=312.451,
    sm_clock_mhz=1755.0,
    pcie_received_bytes_per_second=1.2345e9,
    throttled=("power", "thermal", "other"),
)
NO_STEPS = StepSpans()
OTHER = Gpu(index=1, uuid="GPU-2", model="NVIDIA H100 80GB HBM3")


def row(start, utilization, *, seconds=1.0, gpu="0", **figures):
    return GpuRow(
        start_seconds=start,
        seconds=seconds,
        samples=round(seconds),
        gpu=gpu,
        utilization=utilization,
        **figures,
    )


def step(start, seconds, *, epoch=0, weight=1, steps=1):
    return MeasuredStep(
        loader=0,
        epoch=epoch,
        start_seconds=start,
        wait_seconds=0.0,
        compute_seconds=seconds,
        samples=1,
        steps=steps,
        weight=weight,
    )


def load(rows, spans=NO_STEPS):
    (found,) = loads_of(rows, (H100,), host="algo-1", spans=spans)
    return found


def test_a_row_is_the_mean_of_its_samples():
    samples = [
        GpuSample(utilization=0.2, power_watts=100.0, throttled=("power",)),
        GpuSample(utilization=0.4, throttled=()),
        GpuSample(),
    ]
    found = row_of("0", samples, start_seconds=0.0, seconds=3.0)
    assert found.utilization == pytest.approx(0.3)
    assert (found.power_watts, found.memory_bytes) == (100.0, None)
    assert (found.throttled_power, found.throttled_thermal) == (0.5, 0.0)
    assert found.samples == 3


def test_rows_are_read_as_they_were_written(tmp_path):
    written = _Rows(tmp_path / "gpu.csv", Log(run="r", host="h", stream=io.StringIO()))
    state = GpuState(gpu=H100, sample=GpuSample(utilization=0.28, throttled=("thermal",)))
    for second in range(3):
        written.add((state,), now=float(second))
    written.close(now=2.0)
    rows = read_rows(tmp_path / "gpu.csv")
    assert [each.start_seconds for each in rows] == [0.0, 1.0]
    assert {(each.gpu, each.utilization, each.throttled_thermal) for each in rows} == {
        ("0", 0.28, 1.0)
    }
    assert rows[0].power_watts is None


@pytest.mark.parametrize(
    "line", ["", "1,1", "nan,1,1,0", "0,0,1,0", "0,1,1,0,1.5", "0,1,1,0,-1", "x,1,1,0", "0,1,0,0"]
)
def test_broken_rows_are_left_out(tmp_path, line):
    file = tmp_path / "gpu.csv"
    head = "start_seconds,seconds,samples,gpu,utilization\n"
    file.write_text(f"{head}0,1,1,0,0.5\n{line}\n2,1,1,0,0.7\n")
    assert [each.utilization for each in read_rows(file)] == [0.5, 0.7]
    assert read_rows(tmp_path / "missing.csv") == []


def test_rows_of_a_long_run_stand_for_twice_as_long_again_and_again(tmp_path, monkeypatch):
    monkeypatch.setattr("stoker.figures.gpu_log.LEVEL_BYTES", 4096)
    file = tmp_path / "gpu.csv"
    rows = _Rows(file, Log(run="r", host="h", stream=io.StringIO()))
    states = (GpuState(gpu=H100, sample=FULL), GpuState(gpu=OTHER, sample=FULL))
    # A real run has 128 times as many of them.
    for second in range(5000):
        rows.add(states, now=float(second))
    rows.close(now=5000.0)
    assert file.stat().st_size < 8 * 4096
    found = read_rows(file)
    assert found[0].seconds == 1.0
    assert 64 <= found[-3].seconds <= 256
    assert sum(each.seconds for each in found) == pytest.approx(2 * 5000, rel=0.01)


def test_a_full_disk_is_told_once_and_the_samples_go_on(tmp_path):
    stream = io.StringIO()
    rows = _Rows(tmp_path / "missing" / "gpu.csv", Log(run="r", host="h", stream=stream))
    state = GpuState(gpu=H100, sample=GpuSample(utilization=0.28))
    for second in range(5):
        rows.add((state,), now=float(second))
    rows.close(now=5.0)
    assert stream.getvalue().count("gpu_write_failed") == 1


def test_the_load_is_that_of_the_steps_without_the_start():
    rows = [row(float(second), 0.0 if second < 40 else 0.3) for second in range(100)]
    found = load(rows, StepSpans(((40.0, 70.0), (80.0, 100.0))))
    assert (found.during, found.samples) == ("steps", 60)
    assert found.utilization is not None
    assert found.utilization.mean == pytest.approx(0.3)
    whole = load(rows)
    assert (whole.during, whole.samples) == ("command", 100)
    assert whole.utilization is not None
    assert whole.utilization.mean == pytest.approx(0.18)


def test_time_between_epochs_is_in_the_load_and_not_in_that_of_the_steps():
    rows = [row(float(second), 0.0 if 50 <= second < 75 else 0.4) for second in range(100)]
    found = load(rows, StepSpans(((0.0, 50.0), (75.0, 100.0))))
    assert found.utilization is not None
    assert found.utilization.mean == pytest.approx(0.3)
    assert found.step_utilization == pytest.approx(0.4)


def test_quartiles_are_weighted_by_time():
    rows = [row(0.0, 0.1, seconds=10.0), row(10.0, 0.9, seconds=30.0), row(40.0, 0.5)]
    figure = load(rows).utilization
    assert figure is not None
    assert (figure.low, figure.median, figure.high) == (0.5, 0.9, 0.9)
    assert figure.mean == pytest.approx((1 + 27 + 0.5) / 41)


def test_what_a_gpu_does_not_tell_is_not_known():
    found = load([row(0.0, None, memory_bytes=2e9)])
    assert (found.utilization, found.power_watts, found.throttled) == (None, None, {})
    assert found.memory_bytes is not None


def test_a_short_training_between_two_looks_has_the_commands_load():
    found = load([row(0.0, 0.2), row(1.0, 0.4)], StepSpans(((0.6, 0.9),)))
    assert found.during == "command"


def test_idle_gpus_beside_a_busy_one_do_not_count():
    rows = [row(0.0, 0.28), row(0.0, 0.0, gpu="1")]
    gpus = loads_of(rows, (H100, OTHER), host="algo-1", spans=StepSpans(((0.0, 1.0),)))
    assert len(gpus) == 2
    assert busy_share(gpus) == step_busy_share(gpus) == 0.28
    idle = loads_of([row(0.0, 0.0)], (H100,), host="algo-1", spans=StepSpans())
    assert (busy_share(idle), step_busy_share(idle), busy_share(())) == (0.0, None, None)


def test_the_first_steps_of_an_epoch_and_the_time_between_two_are_no_spans():
    first = [step(float(n), 1.0) for n in range(10)]
    second = [step(20.0 + n, 1.0, epoch=1) for n in range(10)]
    found = spans_of({0: (100.0, first + second)})
    assert found.spans == ((102.0, 110.0), (122.0, 130.0))
    assert found.bounds == (102.0, 130.0)
    assert [found.has(at) for at in (101.0, 105.0, 115.0, 125.0, 131.0)] == [
        *(False, True, False),
        *(True, False),
    ]


def test_rows_of_several_steps_and_those_of_other_ranks_are_in_the_spans():
    long = [step(float(n), 1.0, weight=2) for n in range(4)] + [step(4.0, 6.0, weight=0, steps=6)]
    found = spans_of({0: (0.0, long), 1: (30.0, long)})
    assert found.spans == ((2.0, 10.0), (32.0, 40.0))
    assert StepSpans().bounds is None
    assert not StepSpans().has(0.0)


def test_looks_cost_at_most_a_thousandth_of_a_core():
    assert look_pause([0.0003] * 9) == 1.0
    assert look_pause([0.004] * 9) == 5.0
    assert look_pause([0.5] * 9) == 20.0
    # The first one imports and opens, another one met a page fault.
    assert look_pause([0.2]) == 1.0
    assert look_pause([0.2, 0.0003, 0.0003, 0.1, 0.0003]) == 1.0


def logged(states, *, seconds):
    stream, now = io.StringIO(), [0.0]
    lines = GpuLines(
        Log(run="r", host="algo-1", stream=stream), hosts=lambda: states, clock=lambda: now[0]
    )
    for _ in range(seconds * 2):
        now[0] += 0.5
        lines.tick()
    return stream.getvalue().splitlines()


def test_a_line_of_the_log_has_all_hosts_gpus():
    busy = GpuSample(utilization=0.28, memory_bytes=12e9, throttled=("power", "thermal"))
    states = {
        "algo-2": (GpuState(gpu=OTHER, sample=GpuSample(utilization=0.0)),),
        "algo-1": (GpuState(gpu=H100, sample=busy),),
    }
    lines = logged(states, seconds=5)
    assert len(lines) == 2
    event = parse_line(lines[0])
    assert event is not None
    found = gpus_in(event)
    assert found is not None
    assert (found.count, found.utilization) == (2, 0.28)
    first, second = found.gpus
    assert (first.host, first.gpu, first.utilization) == ("algo-1", "0", 0.28)
    assert (first.memory_bytes, first.power_watts) == (12e9, None)
    assert first.throttled == "power+thermal"
    assert (second.host, second.utilization, second.throttled) == ("algo-2", 0.0, "")


def test_a_line_of_thousands_of_gpus_fits_into_a_containers_log():
    states = {
        f"algo-{host}": tuple(
            GpuState(gpu=Gpu(index=index, uuid=f"GPU-{host}-{index}"), sample=FULL)
            for index in range(8)
        )
        for host in range(500)
    }
    (line,) = logged(states, seconds=2)
    assert len(line) < 16 << 10
    event = parse_line(line)
    assert event is not None
    found = gpus_in(event)
    assert found is not None
    assert found.count == 4000


def test_without_a_gpu_there_is_no_line():
    assert logged({"algo-1": ()}, seconds=5) == []


@pytest.mark.parametrize(
    "rows",
    ["algo-1,0,7", "algo-1,0,x", "algo-1", "algo-1,0,-0.5", "algo-1,0,nan", "a,b,1,1,1,1,1,1,1"],
)
def test_a_broken_line_is_no_load(rows):
    line = f"stoker 2026-11-26T10:00:00.000Z run=r host=h gpu_load count=1 rows={rows}"
    event = parse_line(line)
    assert event is not None
    assert gpus_in(event) is None


def gpu_log(tmp_path, library, *, stream=None, **options):
    (tmp_path / "nvidia0").touch()

    def open_reader(environ):
        return GpuReader(environ, nvml=lambda: library, devices=tmp_path)

    return GpuLog(
        tmp_path,
        environ={},
        host="algo-1",
        log=Log(run="r", host="algo-1", stream=stream or io.StringIO()),
        open_reader=open_reader,
        **options,
    )


def test_the_thread_looks_until_it_is_closed(tmp_path):
    told = []
    log = gpu_log(tmp_path, FakeNvml(FakeGpu()), tell=told.append)
    log.start()
    until(lambda: bool(log.states), what="the first look")
    log.close()
    log.close()
    (found,) = log.loads()
    assert (found.host, found.uuid, found.during) == ("algo-1", FakeGpu().uuid, "command")
    assert found.utilization is not None
    assert found.utilization.mean == 0.28
    assert len(told) == 1


def test_a_run_without_nvml_has_one_line_and_no_load(tmp_path):
    stream = io.StringIO()
    log = gpu_log(tmp_path, FakeNvml(init_code=18), stream=stream)
    log.start()
    until(lambda: "gpu_load_unread" in stream.getvalue(), what="the line")
    log.close()
    assert log.loads() == ()
    assert stream.getvalue().count("\n") == 1
    assert "GPU load: NVML: RM has detected" in stream.getvalue()


@pytest.mark.parametrize("is_allotted", [False, True])
def test_gpus_that_only_processes_outside_the_run_use_are_told(tmp_path, is_allotted):
    """As a container's that the script starts: its processes are not below the launcher."""
    stream = io.StringIO()
    outside = FakeGpu(foreign_pids=(os.getppid(),))
    log = gpu_log(tmp_path, FakeNvml(outside), stream=stream, is_allotted=is_allotted)
    log.start()
    until(lambda: (tmp_path / "gpu.csv").exists(), what="the first look")
    log.close()
    assert len(log.loads()) == len(log.loads()) == is_allotted
    words = "GPU load: only processes outside this run compute on the 1 GPU"
    assert stream.getvalue().count(words) == (not is_allotted)


def test_a_host_without_gpus_logs_nothing(tmp_path):
    stream = io.StringIO()

    def open_reader(environ):
        raise GpusUnreadError("NVML: NVML Shared Library Not Found", is_news=False)

    log = GpuLog(
        tmp_path,
        environ={},
        host="h",
        log=Log(run="r", host="h", stream=stream),
        open_reader=open_reader,
    )
    log.start()
    log.close()
    assert (log.loads(), log.states, stream.getvalue()) == ((), (), "")
    assert not (tmp_path / "gpu.csv").exists()


class Hangs:
    """A driver that answers once, and then never."""

    gpus = (H100,)
    left_out = ""

    def __init__(self, release):
        self.release = release
        self.looks = 0

    def look(self):
        self.looks += 1
        if self.looks > 1:
            self.release.wait(150)
        return Look((GpuState(gpu=H100, sample=GpuSample(utilization=0.28)),))

    def pids_on(self, gpu):
        return ()

    def close(self):
        pass


def test_a_driver_that_hangs_holds_up_nothing(tmp_path, monkeypatch):
    import threading

    monkeypatch.setattr("stoker.figures.gpu_log.CLOSE_SECONDS", 0.2)
    release, now, stream = threading.Event(), [0.0], io.StringIO()
    driver = Hangs(release)
    log = GpuLog(
        tmp_path,
        environ={},
        host="h",
        log=Log(run="r", host="h", stream=stream),
        open_reader=lambda environ: driver,
        clock=lambda: time.monotonic() + now[0],
    )
    log.start()
    until(lambda: driver.looks > 1, what="the driver hangs")
    assert log.states
    now[0] = 60.0
    assert log.states == (), "the sample is old"
    log.close()
    log.close()
    assert stream.getvalue().count("gpu_load_unread") == 1
    assert "GPU load: the driver does not answer" in stream.getvalue()
    release.set()


def timeline_of(tmp_path, *, name, rows, ended_ago=0.0):
    file = tmp_path / name
    lines = [f"0,{row.epoch},0,{row.start_seconds},0,{row.compute_seconds},1,1,1" for row in rows]
    file.write_text("\n".join([STEP_COLUMNS, *lines]) + "\n")
    written = time.time() - ended_ago
    os.utime(file, (written, written))


def steps_bounds(tmp_path, **kept):
    log = gpu_log(tmp_path, FakeNvml(FakeGpu()))
    log._began -= 1000.0
    log._zero -= 100.0
    for name, ended_ago in kept.items():
        rows = [step(float(n), 1.0) for n in range(10)]
        timeline_of(tmp_path, name=f"{name.replace('_', '-')}.csv", rows=rows, ended_ago=ended_ago)
    return log._spans().bounds


def test_steps_are_placed_by_the_time_at_which_their_rows_were_written(tmp_path):
    """Ten seconds of steps that ended 20 s ago, 100 s after the first look."""
    assert steps_bounds(tmp_path, timeline_rank0=20.0) == pytest.approx((72.0, 80.0), abs=0.5)


def test_of_a_profile_the_unchanged_steps_count(tmp_path):
    found = steps_bounds(tmp_path, timeline_rank0=20.0, baseline_timeline_rank0=50.0)
    assert found == pytest.approx((42.0, 50.0), abs=0.5)


def test_a_timeline_of_an_earlier_attempt_does_not_count(tmp_path):
    assert steps_bounds(tmp_path, timeline_rank0=2000.0) is None
