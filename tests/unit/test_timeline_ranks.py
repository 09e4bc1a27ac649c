from io import StringIO

import pytest

from stoker.cli.profile import FollowedProfile
from stoker.cli.watch import RunView
from stoker.feed.timeline import (
    COLUMNS,
    FILE,
    longest_waiting_file,
    read_timelines,
)
from stoker.feed.wire.protocol import FeedWork, Progress
from stoker.launch.feed_log import ProgressLog, interval_between
from stoker.launch.passive_profile import measure
from stoker.logs import Log, parse_line
from stoker.platforms.base import LogLine
from stoker.records import Group, Job, Training
from stoker.report.verdict import collect
from stoker.text import wait_words
from stoker.words import training_words

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
    lines = ProgressLog(
        folder, Log(run="r", host="h", stream=stream), progress=lambda: progress or {}
    )
    lines.tick()
    lines.close()
    view = RunView()
    for line in stream.getvalue().splitlines():
        event = parse_line(line)
        assert event is not None
        view.take(event)
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
    assert figures.measured_wait_words("of it").replace("\xa0", " ") == (
        "4.0 % to 80 % of it (rank 1 waits longest)"
    )
    # What `watch` shows of all time: here 10 s at the start are not left out.
    interval = interval_between(
        {}, {r: told(r, s) for r, s in WAITS.items()}, start_seconds=0, seconds=5
    )
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
