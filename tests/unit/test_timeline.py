import json
import random
import re
import threading
from collections.abc import Callable
from io import StringIO
from itertools import pairwise
from pathlib import Path, PosixPath
from statistics import fmean, median, quantiles
from typing import ClassVar

import pytest
import torch

from stoker.cli.watch import RunView
from stoker.feed.device_events import FoundDevice
from stoker.feed.metrics import log_metrics
from stoker.feed.timeline import (
    COLUMNS,
    FILE,
    MeasuredStep,
    Timeline,
    read_timeline,
    steps_in,
    typical_step,
)
from stoker.feed.training_steps import longest_waiting_file, read_timelines, training_steps
from stoker.feed.wire.protocol import FeedWork, Progress
from stoker.figures.feed_intervals import interval_between
from stoker.figures.passive_profile import measure
from stoker.figures.step_progress import ProgressLog, progress_in
from stoker.logs import Log, parse_line
from stoker.platforms.base import LogLine
from stoker.record_words import training_words
from stoker.records import Group, Job, Training
from stoker.report.step_times import Strip, describe_windows, read_steps
from stoker.report.verdict import collect
from stoker.run.profile_progress import FollowedProfile
from stoker.units import wait_words
from support.aws_answers import Clock
from support.device_double import DeviceDouble


@pytest.fixture
def path(tmp_path):
    return tmp_path / "timeline-rank0.csv"


def rows_of(path: Path) -> list[str]:
    return path.read_text().splitlines()


def step(steps, clock, *, samples=32, wait=0.0, compute=0.05):
    steps.ask()
    clock.now += wait
    steps.got(samples)
    clock.now += compute


def test_row_tells_wait_and_compute_of_a_step(tmp_path):
    clock = Clock()
    timeline = Timeline(tmp_path / "t.csv", clock=clock)
    steps = timeline.epoch(loader=timeline.new_loader(), epoch=3)
    for _ in range(2):
        step(steps, clock, wait=0.25, compute=0.5)
    steps.ask()
    for _ in range(2):
        steps.end()
        timeline.close()
    assert rows_of(tmp_path / "t.csv") == [
        COLUMNS,
        "0,3,0,0.000000,0.250000,0.500000,32,1,1",
        "0,3,1,0.750000,0.250000,0.500000,32,1,1",
    ]
    assert (timeline.steps, timeline.samples) == (2, 64)
    assert (timeline.wait_seconds, timeline.compute_seconds) == (0.5, 1.0)


def test_rows_reach_the_file_about_once_a_second(tmp_path):
    clock = Clock()
    timeline = Timeline(tmp_path / "t.csv", clock=clock)
    steps = timeline.epoch(loader=0, epoch=0)
    for _ in range(25):
        step(steps, clock, compute=0.1)
    assert len(rows_of(tmp_path / "t.csv")) >= 20


def with_a_step(path: Path) -> Timeline:
    timeline = Timeline(path, clock=Clock())
    steps = timeline.epoch(loader=0, epoch=0)
    steps.ask()
    steps.got(1)
    steps.end()
    return timeline


def test_second_process_appends_below_one_header(tmp_path):
    for _ in range(2):
        with_a_step(tmp_path / "t.csv").close()
    assert [row.startswith("loader") for row in rows_of(tmp_path / "t.csv")] == [True, False, False]


def test_unwritable_timeline_does_not_end_the_training(tmp_path):
    (tmp_path / "file").write_text("")
    assert with_a_step(tmp_path / "file" / "t.csv").steps == 1


def test_metrics_are_merged(tmp_path, monkeypatch):
    path = tmp_path / "new" / "metrics.json"
    monkeypatch.setenv("STOKER_METRICS", str(path))
    log_metrics(accuracy=0.5, loss=2)
    log_metrics(accuracy=torch.tensor(0.75))
    assert json.loads(path.read_text()) == {"accuracy": 0.75, "loss": 2.0}
    assert list(path.parent.iterdir()) == [path]


def test_only_rank_0_writes_metrics(tmp_path, monkeypatch):
    monkeypatch.setenv("STOKER_METRICS", str(tmp_path / "metrics.json"))
    monkeypatch.setenv("RANK", "1")
    log_metrics(accuracy=0.5)
    assert not (tmp_path / "metrics.json").exists()


def test_sums_are_those_of_the_loader_with_most_steps_and_know_its_steady_pace():
    clock = Clock()
    timeline = Timeline(None, clock=clock)

    def epoch(loader: int, number: int, waits: list[float]) -> None:
        steps = timeline.epoch(loader=loader, epoch=number)
        for wait in waits:
            step(steps, clock, samples=8, wait=wait, compute=1.0)
        steps.end()

    # The workers of each epoch start in its first two steps.
    for number in range(2):
        epoch(0, number, [50.0, 40.0, 0.5, 0.5])
        epoch(1, number, [9.0, 9.0, 9.0])
    main = timeline.training
    assert (main.steps, main.samples, main.epochs) == (8, 64, 2)
    assert (main.wait_seconds, main.compute_seconds) == (182.0, 8.0)
    assert main.steady_steps == 4
    assert (main.steady_wait_seconds, main.steady_compute_seconds) == (2.0, 4.0)


def trained(path, clock, *, epochs, steps, wait=lambda number: 0.01):
    """Writes the timeline of a training with a validation loader between its epochs."""
    timeline = Timeline(path, clock=clock)
    loaders = timeline.new_loader(), timeline.new_loader()
    number = 0
    for epoch in range(epochs):
        for loader, batches in zip(loaders, (steps, steps // 10), strict=True):
            recorded = timeline.epoch(loader=loader, epoch=epoch)
            for _ in range(batches):
                step(recorded, clock, wait=wait(number), compute=0.04)
                number += loader == loaders[0]
            recorded.end()
    timeline.close()
    return timeline


@pytest.fixture
def small_levels(monkeypatch):
    monkeypatch.setattr("stoker.feed.timeline.LEVEL_BYTES", 16 << 10)


def test_a_timeline_grows_by_one_level_when_the_training_doubles(tmp_path, small_levels):
    sizes = []
    for number, epochs in enumerate((8, 16, 32, 64)):
        path = tmp_path / f"{number}.csv"
        trained(path, Clock(), epochs=epochs, steps=500)
        sizes.append(path.stat().st_size)
    # Unthinned they have about 0.2 to 1.9 MB.
    assert sizes[0] > 3 * (16 << 10)
    assert all(after - before < 2 * (16 << 10) for before, after in pairwise(sizes)), sizes


def test_sums_of_a_thinned_timeline_are_exact(path, small_levels):
    timeline = trained(path, Clock(), epochs=40, steps=333)
    rows = read_timeline(path)
    assert sum(row.steps for row in rows) == timeline.steps == 40 * (333 + 33)
    assert sum(row.samples for row in rows) == timeline.samples
    assert sum(row.wait_seconds for row in rows) == pytest.approx(timeline.wait_seconds, rel=1e-4)
    assert sum(row.seconds for row in rows) == pytest.approx(
        timeline.wait_seconds + timeline.compute_seconds, rel=1e-4
    )
    assert len(training_steps(rows)) < 3000
    assert steps_in(training_steps(rows)) == 40 * 333
    # The beginning, the size of a batch, and the count of the record.
    assert [row.batch for row in rows[:300]] == list(range(300))
    found = measure({0: training_steps(rows)}, {})
    assert (found.steps, found.rank) == (40 * 333, 0)


def test_medians_of_a_thinned_timeline_weigh_all_of_the_training(path, small_levels):
    # The pace changes after 30% of the steps, which are most of the single ones that are kept.
    steps = 60 * 500

    def wait(number):
        noise = random.Random(number).lognormvariate(0, 0.3)
        return (0.01 if number < 0.3 * steps else 0.06) * noise

    trained(path, Clock(), epochs=60, steps=500, wait=wait)
    rows = training_steps(read_timeline(path))
    step_seconds, wait_seconds = typical_step(rows)
    every = [wait(number) for number in range(steps)]
    blocks = [fmean(every[at : at + 20]) for at in range(0, steps, 20)]
    assert wait_seconds == pytest.approx(median(blocks), rel=0.02)
    assert step_seconds == pytest.approx(0.04 + median(blocks), rel=0.02)
    found = measure({0: rows}, {})
    # Each epoch has 500 steps, and 50 more of its validation.
    expected = 32 * 500 / 550 / (0.04 + fmean(every))
    assert found.samples_per_second == pytest.approx(expected, rel=0.02)
    assert found.spread["wait_seconds"].low == pytest.approx(quantiles(blocks)[0], rel=0.1)


def test_a_thinned_training_that_runs_is_seen_to_advance(path, small_levels):
    clock, stream = Clock(), StringIO()
    trained(path, clock, epochs=40, steps=500)
    lines = ProgressLog(path.parent, Log(run="r", host="h", stream=stream), clock=clock)
    lines.tick()
    # A second process after a restart, at the same level.
    timeline = Timeline(path, clock=clock)
    steps = timeline.epoch(loader=0, epoch=0)
    for _ in range(2000):
        step(steps, clock)
        lines.tick()
    lines.close()
    events = [parse_line(line) for line in stream.getvalue().splitlines()]
    told = [event for event in events if event]
    seen = [int(event.values["steps"]) for event in told]
    assert seen[0] == 40 * 500
    # At this level a row has the steps of 16 s at most.
    assert max(after - before for before, after in pairwise(seen)) < 20 * 18
    assert 40 * 500 + 1700 < seen[-1] <= 40 * 500 + 2000
    assert {float(event.values["step_seconds"]) for event in told} == {0.05}


def test_a_killed_process_loses_its_last_two_rows(path, small_levels):
    clock = Clock()
    trained(path, clock, epochs=40, steps=500)
    before = steps_in(read_timeline(path))
    timeline = Timeline(path, clock=clock)
    steps = timeline.epoch(loader=0, epoch=0)
    for _ in range(1000):
        step(steps, clock)
    # Neither ended nor closed, and cut in a row.
    path.write_bytes(path.read_bytes()[:-5])
    # The open one, and the cut one: 16 s each at this level.
    assert before + 1000 - 2 * 20 * 17 < steps_in(read_timeline(path)) < before + 1000


def test_the_picture_of_a_long_run_shows_single_steps_of_its_middle(path, small_levels):
    trained(path, Clock(), epochs=40, steps=500)
    found = read_steps(path)
    assert found.total == 20_000
    window = found.window(1.2)
    assert len(window) == 24
    assert {step.steps for step in window} == {1}
    said = describe_windows([Strip("After", "one host", found)])
    figures = re.findall(r"\d[\d,]*", said)
    first, last, total = (int(word.replace(",", "")) for word in figures)
    assert (last - first, total) == (23, 20_000)
    assert 5_000 < first < 15_000


@pytest.mark.parametrize(("steps", "words"), [(1, "step 1 of 1"), (5, "steps 1 to 5 of 5")])
def test_a_picture_of_all_steps_is_not_of_the_middle_of_a_run(path, steps, words):
    trained(path, Clock(), epochs=1, steps=steps)
    times = read_steps(path)
    assert times is not None
    said = describe_windows([Strip("After", "one host", times)])
    assert said == f"After: {words}."


def test_only_so_much_of_a_timeline_is_read(path, monkeypatch):
    trained(path, Clock(), epochs=1, steps=100)
    monkeypatch.setattr("stoker.feed.timeline.MAX_READ_BYTES", 1000)
    assert 10 < len(read_timeline(path)) < 25


def test_no_row_is_longer_than_a_minute(tmp_path, monkeypatch):
    # Levels that are else reached after weeks.
    monkeypatch.setattr("stoker.feed.timeline.LEVEL_BYTES", 1000)
    trained(tmp_path / "t.csv", Clock(), epochs=40, steps=1000)
    rows = read_timeline(tmp_path / "t.csv")
    assert max(row.weight for row in rows) > 1000
    # The other loader has its own rows.
    assert 50 < max(row.seconds for row in rows if not row.weight) <= 60.1


STEP = 0.05
WAITS = {0: 0.04, 1: 0.8}


def write(folder, shares, *, steps=100):
    for rank, share in shares.items():
        wait = share * STEP
        rows = [f"0,0,{n},{n * STEP:.6f},{wait:.6f},{STEP - wait:.6f},8,1,1" for n in range(steps)]
        (folder / FILE.format(rank=rank)).write_text("\n".join([COLUMNS, *rows]) + "\n")


def told(rank, share, *, steps=100):
    wait = share * STEP * steps
    compute = STEP * steps - wait
    return Progress(
        rank=rank,
        steps=steps + 2,
        samples=8 * steps,
        # With the first steps of the epoch, which are of no steady pace.
        wait_seconds=wait + 10,
        compute_seconds=compute,
        steady_steps=steps,
        steady_wait_seconds=wait,
        steady_compute_seconds=compute,
        feed=FeedWork(seconds=STEP * steps, taken=steps),
    )


def record(measured):
    return Training(
        status="succeeded",
        groups=(Group(name="dnn", role="dnn", instance_type="local.c1", count=1),),
        measured=measured,
        job=Job(platform="local", name="r"),
    )


def progress_of(folder, progress=None):
    stream = StringIO()
    log = Log(run="r", host="h", stream=stream)
    lines = ProgressLog(folder, log, progress=lambda: progress or {})
    lines.tick()
    lines.close()
    view = RunView()
    for line in stream.getvalue().splitlines():
        view.take(parse_line(line))
    return view


def test_every_place_says_what_the_slowest_rank_waits(tmp_path):
    write(tmp_path, WAITS)
    measured = measure(read_timelines(tmp_path), {})
    assert (measured.rank, measured.timeline_file) == (1, "timeline-rank1.csv")
    assert measured.wait_share == pytest.approx(0.8)
    assert measured.least_wait_share == pytest.approx(0.04)
    words = "4% to 80% of it waiting for data (rank 1 waits longest)"
    assert words in training_words(record(measured))
    assert words in progress_of(tmp_path).head()
    assert longest_waiting_file(tmp_path) == tmp_path / "timeline-rank1.csv"
    figures = collect(profile=None, decision=None, training=record(measured), evaluation=None)
    assert figures.measured.wait_words("of it").replace("\xa0", " ") == (
        "4.0% to 80% of it (rank 1 waits longest)"
    )
    # What `watch` shows of all time: here 10 s at the start are not left out.
    progress = {rank: told(rank, share) for rank, share in WAITS.items()}
    interval = interval_between({}, progress, start_seconds=0, seconds=5)
    assert interval.wait_share == pytest.approx((4 + 10) / (5 + 10))


def test_a_rank_on_another_host_waits_as_it_reported(tmp_path):
    write(tmp_path, {0: 0.04})
    # What the leader's own rank reports is no better than its timeline.
    far = {0: told(0, 0.5), 1: told(1, 0.8)}
    measured = measure(read_timelines(tmp_path), far)
    assert (measured.rank, measured.timeline_file) == (1, "timeline-rank0.csv")
    assert measured.step_seconds == pytest.approx(STEP)
    assert measured.wait_share == pytest.approx(0.8)
    assert measured.compute_seconds == pytest.approx(0.2 * STEP)
    assert measured.least_wait_share == pytest.approx(0.04)
    assert set(measured.spread) == {"step_seconds"}
    assert (
        "4% to 80% of it waiting for data (rank 1 waits longest)"
        in progress_of(tmp_path, far).head()
    )


def test_a_rank_without_a_new_step_still_waits_as_it_did(tmp_path):
    now, stream = [0.0], StringIO()
    write(tmp_path, WAITS, steps=3)
    lines = ProgressLog(tmp_path, Log(run="r", host="h", stream=stream), clock=lambda: now[0])
    lines.tick()
    with (tmp_path / FILE.format(rank=0)).open("a") as file:
        file.write(f"0,0,3,{3 * STEP},0.001,0.049,8,1,1\n")
    now[0] = 2.0
    lines.tick()
    lines.close()
    events = [parse_line(line) for line in stream.getvalue().splitlines()]
    said = [(event.values["steps"], event.values["rank"]) for event in events if event]
    assert said == [("3", "1"), ("4", "1")]


def test_ranks_that_wait_alike_have_one_figure(tmp_path):
    assert wait_words(0.81, least=0.78, rank=3) == "81% of it waiting for data"
    write(tmp_path, {0: 0.5})
    measured = measure(read_timelines(tmp_path), {})
    assert (measured.rank, measured.least_wait_share) == (0, None)
    assert training_words(record(measured)).endswith("50.0 ms, 50% of it waiting for data")
    assert "rank" not in progress_of(tmp_path).head()


class Live:
    """A training whose live line is read after each step."""

    def __init__(self, path: Path) -> None:
        self.clock, self.stream = Clock(), StringIO()
        self.timeline = Timeline(path, clock=self.clock)
        log = Log(run="r", host="h", stream=self.stream)
        self.lines = ProgressLog(path.parent, log, clock=self.clock)

    def epoch(self, number, *, steps=42, first_wait=0.8, between=0.0):
        recorded = self.timeline.epoch(loader=0, epoch=number)
        for batch in range(steps):
            step(recorded, self.clock, wait=first_wait if batch == 0 else 0.002, compute=0.045)
            self.lines.tick()
        recorded.end()
        for _ in range(int(between / 0.5)):
            self.lines.tick()
            self.clock.now += 0.5

    def progress(self):
        events = map(parse_line, self.stream.getvalue().splitlines())
        return [progress_in(event) for event in events if event]


@pytest.fixture
def live(path):
    training = Live(path)
    yield training
    training.lines.close()


def test_live_line_has_no_pause_across_an_epochs_end(live):
    for number in range(6):
        live.epoch(number)
    # 1.15 s each, 97% waiting: that was the first batch of an epoch alone.
    assert len(live.progress()) > 4
    for progress in live.progress()[1:]:
        assert progress.step_seconds == pytest.approx(0.047)
        assert progress.wait_seconds == pytest.approx(0.002)
    # Of the rest of the training: whole epochs, each with the start of one.
    assert live.progress()[-1].whole_step_seconds == pytest.approx(0.047 + 0.798 / 42)


def test_live_line_says_between_epochs(live):
    for number in range(3):
        live.epoch(number, between=9.0)
    told = live.progress()
    between = [progress for progress in told if progress.is_between_epochs]
    # An epoch's length is known after the first one; said once each.
    assert [progress.steps for progress in between] == [84, 126]
    assert all(progress.step_seconds == pytest.approx(0.047) for progress in between)
    assert between[0].words.startswith("between epochs; 47.0 ms per step, 4% of it")
    view = RunView()
    for line in live.stream.getvalue().splitlines():
        view.take(parse_line(line))
    assert "between epochs" in view.head()
    live.epoch(3)
    assert not live.progress()[-1].is_between_epochs


def test_live_line_says_between_epochs_where_the_last_step_has_not_ended(live):
    # Lightning keeps its iterator until the next epoch.
    for number in range(3):
        recorded = live.timeline.epoch(loader=0, epoch=number)
        for _ in range(42):
            step(recorded, live.clock, wait=0.002, compute=0.045)
            live.lines.tick()
        live.timeline.flush()
        for _ in range(20):
            live.lines.tick()
            live.clock.now += 0.5
        recorded.end()
    assert [each.steps for each in live.progress() if each.is_between_epochs] == [83, 125]


def test_live_line_of_epochs_of_one_step_has_their_steps(live):
    for number in range(20):
        live.epoch(number, steps=1, first_wait=0.3)
    assert live.progress()[-1].step_seconds == pytest.approx(0.345)


def test_a_profile_says_what_the_slowest_rank_waits(capsys):
    shown = FollowedProfile(bar=None, quiet=False, budget="180 s")

    def log(event, **values):
        stream = StringIO()
        Log(run="r", host="h", stream=stream).event(event, **values)
        shown.line(LogLine(group="dnn", host="h", text=stream.getvalue().strip()))

    for rank, share in ((0, 0.14), (1, 0.53)):
        assert "as is" not in capsys.readouterr().err
        log("profile_as_is", rank=rank, ranks=2, steps=40, step_seconds=0.05, wait_share=share)
    assert "14% to 53% of it waiting for data (rank 1 waits longest)" in " ".join(
        capsys.readouterr().err.split()
    )
    # The log of rank 2 is not seen: its words are not waited for.
    log("profile_progress", rank=0, ranks=3, steps=40, step_seconds=0.05, wait_share=0.5)
    log("profile_accelerator", rank=0, steps=40, step_seconds=0.02)
    said = capsys.readouterr().err
    assert said.index("50% of the time") < said.index("with cached batches")


def waited(tmp_path: Path, *, kernel_seconds: float, thread: bool = False) -> MeasuredStep:
    """Returns a step of a script that never waits for its device, and 50 ms for each batch."""
    device = DeviceDouble()
    file = tmp_path / "timeline.csv"

    def train() -> None:
        timeline = Timeline(file, clock=device.now, found=FoundDevice(lambda: device))
        steps = timeline.epoch(loader=0, epoch=0)
        for _ in range(60):
            steps.ask()
            device.work(0.050)
            steps.got(8)
            device.launch_step(kernel_seconds, kernels=20, host_seconds=0.005)
        steps.ask()
        steps.end()
        timeline.close()

    if thread:
        other = threading.Thread(target=train)
        other.start()
        other.join()
    else:
        train()
    assert device.waited_seconds == 0.0
    return read_timeline(file)[30]


def test_a_wait_that_the_device_does_not_notice_is_none(tmp_path):
    assert waited(tmp_path, kernel_seconds=0.060).wait_seconds == 0.0


def test_a_wait_counts_as_far_as_the_device_is_idle(tmp_path):
    step = waited(tmp_path, kernel_seconds=0.030)
    assert step.wait_seconds == pytest.approx(0.025, abs=0.002)
    # The step is as long as it was.
    assert step.seconds == pytest.approx(0.055, abs=0.001)


def test_a_loader_that_another_thread_reads_is_timed_by_the_host(tmp_path):
    step = waited(tmp_path, kernel_seconds=0.030, thread=True)
    assert step.wait_seconds == pytest.approx(0.050, abs=0.001)


def test_a_lost_device_ends_no_training(tmp_path):
    device = DeviceDouble()
    timeline = Timeline(tmp_path / "t.csv", clock=device.now, found=FoundDevice(lambda: device))
    steps = timeline.epoch(loader=0, epoch=0)
    for number in range(10):
        device.is_lost = number > 4
        steps.ask()
        device.work(0.050)
        steps.got(8)
    steps.end()
    assert timeline.wait_seconds == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize("between", [0.0, 1.0])
def test_live_line_of_short_epochs_says_what_whole_epochs_wait(live, between):
    for number in range(6):
        live.epoch(number, steps=8, first_wait=0.8, between=between)
    live.lines.close()
    last = live.progress()[-1]
    # As the script sees it: 0.8 s and seven times 2 ms of an epoch's 8 steps.
    whole = 0.8 + 7 * 0.002 + 8 * 0.045 + between
    assert last.whole_wait_share == pytest.approx(0.814 / whole, abs=0.04)
    assert "over whole epochs" in last.words
    assert last.words.endswith("per step)") or "(47.0 ms within them, 4% of it)" in last.words


def test_live_line_of_many_loaders_counts_them_all(path):
    live = Live(path)
    for client in range(10):
        recorded = live.timeline.epoch(loader=client, epoch=0)
        for _ in range(8):
            step(recorded, live.clock, wait=0.2, compute=0.1)
            live.lines.tick()
        recorded.end()
    live.lines.close()
    last = live.progress()[-1]
    assert last.steps == 80
    assert last.step_seconds == pytest.approx(0.3, rel=0.05)


class InterruptedPath(PosixPath):
    """A file as whose opening a signal comes; its handler runs in the same thread."""

    handlers: ClassVar[list[Callable[[], None]]] = []

    def open(self, *args, **how):
        if self.handlers:
            self.handlers.pop()()
        return super().open(*args, **how)


@pytest.mark.timeout(60)
def test_a_signal_s_handler_that_closes_it_does_not_wait_for_the_write_that_it_interrupts(tmp_path):
    # As of a profile that is stopped, before the process ends.
    clock = Clock()
    timeline = Timeline(InterruptedPath(tmp_path / "t.csv"), clock=clock)
    steps = timeline.epoch(loader=0, epoch=0)
    step(steps, clock, wait=0.2, compute=3.0)
    InterruptedPath.handlers.append(timeline.close)
    steps.ask()
    assert not InterruptedPath.handlers
    assert len(read_timeline(tmp_path / "t.csv")) == 1
