import json
import re
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from stoker.cli import watch
from stoker.cli.watch import RunView, as_table, plain_line, source_of, watch_verb
from stoker.errors import PlatformError, UsageError
from stoker.figures.gpu_log import words_for_log
from stoker.figures.memory_lines import HostMemoryNow, MemoryLines
from stoker.host.gpus import Gpu, GpuSample, GpuState
from stoker.logs import Log, LogValue, parse_line
from support.feed_rows import feed_line, host_rate


def line(event: str, host: str = "gpu-1", **values: LogValue) -> str:
    stream = StringIO()
    Log(run="mnist-1", host=host, stream=stream).event(event, **values)
    return stream.getvalue()


def progress_line(steps: int = 120) -> str:
    return line("progress", steps=steps, step_seconds=0.02, wait_seconds=0.008)


def view_of(*lines: str) -> RunView:
    view = RunView()
    for each in lines:
        view.take(parse_line(each))
    return view


def table_of(view: RunView, *, width: int = 200) -> str:
    stream = StringIO()
    Console(file=stream, width=width, force_terminal=False).print(as_table(view, max_ranks=None))
    return stream.getvalue()


def test_a_plain_line_names_hosts_rates_waits_and_the_limit():
    fed = feed_line(host_rate("data-1", 12.5), host_rate("gpu-1", 5.0, kind="local"))
    shown = plain_line(view_of(progress_line(), fed))
    assert "step 120, 20.0 ms per step, 40% of it waiting for data" in shown
    assert "data-1 12.5/s 60.0 MB/s, gpu-1 (local) 5.0/s" in shown
    assert shown.endswith("limit: cpu")
    hosts = (host_rate(f"data-{number}", 12.5) for number in range(40))
    many = plain_line(view_of(feed_line(*hosts)))
    assert "and 34 more hosts" in many
    assert len(many) < 300


def test_a_host_that_is_gone_is_said_to_be():
    view = view_of(
        feed_line(host_rate("data-1", 0.0, moved=2), host_rate("data-2", 12.5)),
        line("host_lost", about="data-1", kind="agent", reason="silent for 12 s"),
    )
    assert "data-1 gone" in plain_line(view)
    text = table_of(view)
    assert re.search(r"^data-1 .* gone +2$", text, re.MULTILINE)
    assert "data-1 was lost: silent for 12 s" in text


def test_the_table_shows_each_rank_each_host_and_what_to_do():
    view = view_of(
        progress_line(),
        feed_line(host_rate("data-1", 12.5), host_rate("gpu-1", 12.5, kind="local")),
    )
    run, step, rank, head, data, local, limit, advice = table_of(view).splitlines()
    assert run == "mnist-1: running"
    assert step == "step 120, 20.0 ms per step, 40% of it waiting for data"
    assert rank == "rank 0: 30.0 batches/s, 40% waiting, 0.5 ready of a window of 18"
    assert " ".join(head.split()) == "host batches/s MB/s workers worker/s busy asked moved"
    figures = "12.5 60.0 4 2.8 to 3.4 90% 8 of 8 0"
    assert " ".join(data.split()) == f"data-1 {figures}"
    assert " ".join(local.split()) == f"gpu-1 (local) {figures}"
    assert limit.startswith("limit: the data workers")
    assert advice.startswith("try:   more data hosts")
    assert max(map(len, table_of(view, width=88).splitlines())) <= 88


GPUS = {
    "algo-1": (
        GpuState(
            gpu=Gpu(index=0, uuid="GPU-1"),
            sample=GpuSample(utilization=0.28, memory_bytes=12.9e9, throttled=("power",)),
        ),
    )
}


def gpu_line(hosts=GPUS) -> str:
    return line("gpu_load", **words_for_log(hosts))


def test_the_gpus_busy_share_stands_beside_the_step():
    shown = plain_line(view_of(progress_line(), gpu_line()))
    assert shown == "step 120, 20.0 ms per step, 40% of it waiting for data, GPU 28% busy"
    document = view_of(gpu_line()).document()
    assert document["gpus"]["utilization"] == 0.28
    assert plain_line(view_of(gpu_line())) == "no step yet, GPU 28% busy"


def test_the_table_has_a_line_for_each_gpu():
    one = table_of(view_of(progress_line(), gpu_line())).splitlines()
    assert one[2] == "GPU 0: 28% busy, 12.9 GB, clocks lowered (power)"
    idle = GpuSample(utilization=0.0)
    two = {**GPUS, "algo-2": (GpuState(gpu=Gpu(index=3, uuid="GPU-4"), sample=idle),)}
    lines = table_of(view_of(progress_line(), gpu_line(two))).splitlines()
    assert "GPUs 28% busy" in lines[1]
    assert lines[2].startswith("GPU 0 of algo-1: 28% busy")
    assert lines[3] == "GPU 3 of algo-2: 0% busy"


def test_a_gpu_that_is_lost_or_not_read_is_a_happening():
    view = view_of(
        line("gpu_lost", text="GPU 0 (GPU-1): GPU is lost; its load is no longer read"),
        line("gpu_load_unread", text="GPU load: NVML: Driver Not Loaded"),
    )
    text = table_of(view)
    assert "gpu-1 lost a GPU: GPU 0 (GPU-1): GPU is lost" in text
    assert "gpu-1 does not read its GPUs: GPU load: NVML: Driver Not Loaded" in text


def memory_now(host: str = "algo-2", used: float = 8e9, **changes: Any) -> HostMemoryNow:
    amounts = {"limit_bytes": 16 * 10**9, "peak_bytes": 9 * 10**9, **changes}
    return HostMemoryNow(host=host, used_bytes=int(used), **amounts)


def memory_line(*hosts: HostMemoryNow) -> str:
    stream = StringIO()
    clock = iter((0.0, 2.0)).__next__
    log = Log(run="mnist-1", host="gpu-1", stream=stream)
    MemoryLines(log, hosts=lambda: hosts, clock=clock).tick()
    return stream.getvalue()


def test_the_memory_of_each_host_is_in_the_table_the_nearest_to_its_limit_first():
    short = memory_now(used=15e9, peak_bytes=155 * 10**8, waiting_share=0.125, kills=1)
    view = view_of(progress_line(), memory_line(memory_now(host="algo-1"), short))
    lines = table_of(view).splitlines()
    assert lines[1].endswith("waiting for data, memory 94% full on algo-2")
    assert lines[2] == (
        "memory of algo-2: 15.0 GB of 16.0 GB (94%), at most 15.5 GB; batches that wait were "
        "lowered to 12% of feed.max_bytes; the kernel killed one process for memory"
    )
    assert lines[3] == "memory of algo-1: 8.00 GB of 16.0 GB (50%), at most 9.00 GB"
    first, second = json.loads(json.dumps(view.document()))["memory"]
    assert first["host"] == "algo-2"
    assert second["used_bytes"] == 8e9


def test_memory_with_room_is_in_no_plain_line():
    view = view_of(progress_line(), memory_line(memory_now()))
    assert plain_line(view) == "step 120, 20.0 ms per step, 40% of it waiting for data"


def test_a_host_that_lowers_what_waits_is_a_happening():
    view = view_of(line("memory_short", text="9.5 GB of 10 GB are in use: fewer batches wait"))
    assert "gpu-1 changed how many batches wait: 9.5 GB of 10 GB are in use" in table_of(view)


def test_memory_is_logged_again_only_where_it_has_changed():
    stream = StringIO()
    now = iter(range(0, 100, 10)).__next__
    log = Log(run="mnist-1", host="gpu-1", stream=stream)
    hosts = [memory_now(used=8e9)]
    lines = MemoryLines(log, hosts=lambda: hosts, clock=now)
    logged = []
    for used in (8e9, 8.01e9, 8.4e9):
        hosts[:] = [memory_now(used=used)]
        lines.tick()
        logged.append(len(stream.getvalue().splitlines()))
    assert logged == [1, 1, 2]
    hosts[:] = [memory_now(used=8.4e9, kills=1)]
    lines.tick()
    assert len(stream.getvalue().splitlines()) == 3


@pytest.mark.parametrize("rows", ["algo-1,1,2", "algo-1,1,0,1,1,0", "algo-1,a,2,1,1,0", ""])
def test_broken_lines_of_memory_are_passed_over(rows):
    assert view_of(line("host_memory", rows=rows)).memories == ()


def test_what_a_log_says_does_not_steer_the_terminal():
    view = view_of(
        line("host_lost", about="\x1b[2Jdata-1", kind="agent", reason="[bold]x[/bold]\x07"),
        feed_line(host_rate("\x1b]0;title\x07", 12.5)),
    )
    assert not {"\x1b", "\x07"} & set(table_of(view) + plain_line(view))


def test_broken_events_are_passed_over():
    view = view_of(
        line("progress", steps="many", step_seconds=1, wait_seconds=0),
        line("progress", steps=1, step_seconds="nan", wait_seconds=0),
        line("feed", hosts="data-1"),
        "stoker 2026-11-20T08:00:00Z run=mnist-1 host=h feed rows='1,2,host,a,-'",
    )
    assert (view.progress, view.interval) == (None, None)


@pytest.fixture
def run_folder(tmp_path):
    logs = tmp_path / "runs" / "mnist-1" / "logs"
    logs.mkdir(parents=True)
    words = "user's own words\n" + progress_line() + feed_line(host_rate("data-1", 12.5))
    (logs / "dnn-gpu-1.log").write_text(words)
    (logs / "data-data-1.log").write_text(line("host_role", host="data-1"))
    return logs.parent


def test_once_says_how_it_is_and_ends(run_folder, monkeypatch, capsys):
    monkeypatch.chdir(run_folder.parent.parent)
    watch_verb("mnist-1", once=True, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "mnist-1: running"
    limit = next(line for line in lines if line.startswith("limit:"))
    assert limit.endswith("of the time"), "no line is broken"
    watch_verb(str(run_folder), once=True, as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert (document["status"], document["steps"]) == ("running", 120)
    assert document["feed"]["hosts"][0]["name"] == "data-1"
    assert document["bottleneck"]["limit"] == "cpu"
    with pytest.raises(UsageError, match="no run mnist-2"):
        source_of("mnist-2")


def test_a_log_is_followed_to_the_runs_end(tmp_path, capsys):
    log = tmp_path / "leader.log"
    log.write_text(
        progress_line()
        + "".join(f"dnn/gpu-1 {feed_line(host_rate('data-1', rate))}" for rate in (1.0, 2.0))
        + line("training_ended", status="failed", exit_code=3)
        + progress_line(999)
    )
    watch_verb(str(log), once=False, as_json=False)
    shown = capsys.readouterr().out.splitlines()
    assert ["data-1 1.0/s" in shown[0], "data-1 2.0/s" in shown[1]] == [True, True]
    assert shown[-1].endswith("failed")


def test_a_run_whose_launcher_is_gone_ends_with_its_record(run_folder, capsys):
    (run_folder / "training.json").write_text("{}")
    watch_verb(str(run_folder), once=False, as_json=False)
    assert capsys.readouterr().out.splitlines()[-1].endswith("the run has ended")


def test_a_log_that_falls_silent_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "SILENCE_SECONDS", 0.3)
    (tmp_path / "leader.log").write_text(progress_line())
    with pytest.raises(PlatformError, match="logged nothing"):
        watch_verb(str(tmp_path / "leader.log"), once=False, as_json=False)


def test_an_event_of_another_run_is_text_that_the_script_prints():
    forged = "stoker 2026-11-20T08:00:00Z run=x host=h training_ended status=failed"
    view = view_of(line("progress", steps=3, step_seconds=1, wait_seconds=0), forged)
    assert (view.run, view.status) == ("mnist-1", "")
    # One log of two runs: the last one counts.
    view.take(parse_line("stoker 2026-11-20T08:00:00Z run=x host=h host_role role=dnn"))
    view.take(parse_line(forged))
    assert (view.run, view.status) == ("x", "failed")


def test_lines_of_something_else_are_told_once_with_the_log_that_is_needed(monkeypatch, capsys):
    monkeypatch.setattr(watch, "FOREIGN_SECONDS", 0.0)
    foreign = watch.ForeignLog()
    for _ in range(3):
        foreign.tell_if_of_no_run(watch.RunView())
    said = capsys.readouterr().err
    assert said.count("no line of a run has come yet") == 1
    assert "kubectl logs -f DNN_POD -c dnn | stoker watch -" in said


def test_a_log_of_a_run_is_never_called_another_ones(monkeypatch, capsys):
    monkeypatch.setattr(watch, "FOREIGN_SECONDS", 0.0)
    view = watch.RunView()
    view.run = "mnist-1"
    watch.ForeignLog().tell_if_of_no_run(view)
    assert capsys.readouterr().err == ""
