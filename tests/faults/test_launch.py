"""A run ends, always: real runs on the local platform, ended in all the ways a run can end."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from stoker.records import Channel, FeedSettings
from stoker.records.outcome import outcome_of
from stoker.records.training import Budget
from support.local_job import LocalJob, is_running, marked_processes, until

pytestmark = [pytest.mark.fault, pytest.mark.e2e]


TELL = """
import os, pathlib, signal, sys, time
def tell(name, text="x"):
    path = pathlib.Path(os.environ["STOKER_TEST_DIR"]) / name
    # Two hosts may tell the same at once.
    new = path.with_name(f"{name}.{os.getpid()}.new")
    new.write_text(str(text))
    new.rename(path)
def wait_for(name):
    path = pathlib.Path(os.environ["STOKER_TEST_DIR"]) / name
    while not path.exists():
        time.sleep(0.02)
"""


def told(script: str) -> str:
    return TELL + script


STAY = TELL + "tell('ready', os.getpid()); time.sleep(300)\n"


# Two ranks that are connected, and need no torch for it. The other's end is an error, as gloo's is.
CONNECTED = told("""
import socket, struct
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if rank == 0:
    server = socket.create_server(("127.0.0.1", 0))
    tell("port", server.getsockname()[1])
    peer, _ = server.accept()
else:
    wait_for("port")
    port = int(pathlib.Path(os.environ["STOKER_TEST_DIR"], "port").read_text())
    peer = socket.create_connection(("127.0.0.1", port))
peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
lines = peer.makefile()
def say(words):
    peer.sendall(f"{words}\\n".encode())
def hear():
    return lines.readline().strip()
say(f"rank {rank}")
print(f"rank {rank} of {world} hears of {hear()}", flush=True)
""")


# Takes epochs, without a pause, until the test says `begin`; then one that stops now and then.
FEED = told("""
import torch
from stoker import DataLoader
class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        time.sleep(0.08)
        return index, os.getpid()
if __name__ == "__main__":
    loader = DataLoader(Slow(), batch_size=2, num_workers=0)
    are_exact = True
    while not pathlib.Path(os.environ["STOKER_TEST_DIR"], "begin").exists():
        seen = []
        for indices, _ in loader:
            seen += indices.tolist()
            tell("begun")
        are_exact &= seen == list(range(64))
    seen = []
    for indices, pids in loader:
        seen += indices.tolist()
        tell("worker", pids[0].item())
        if len(seen) in (16, 32, 48):
            tell(f"at-{len(seen)}")
            wait_for(f"go-{len(seen)}")
    print("exact", are_exact and seen == list(range(64)), flush=True)
""")


def test_a_normal_end_leaves_a_record_and_nothing_else(tmp_path):
    script = "import stoker; stoker.log_metrics(accuracy=0.97); print('done')"
    with LocalJob(tmp_path, script) as job:
        end = job.end()
        assert (end.status, end.exit_code, end.failure) == ("succeeded", 0, None)
        assert end.output_dir == job.base_dir(job.leader) / "output" / "data"
        training = job.training()
        assert (training.status, training.exit_code, training.failure) == ("succeeded", 0, None)
        assert training.metrics == {"accuracy": 0.97}
        assert [(h.host, h.group) for h in training.hosts] == [("algo-1", "dnn")]
        assert training.job.platform == "local"
        assert job.failure_file() is None


@pytest.mark.parametrize(
    ("script", "code", "words"),
    [
        ("def step():\n    raise ValueError('broken at 7')\nstep()", 1, "ValueError: broken at 7"),
        ("import sys; print('the last words', file=sys.stderr); sys.exit(9)", 9, "the last words"),
        ("import os; os.kill(os.getpid(), 9)", 137, "signal 9"),
        (
            "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'def step():\\n  "
            "raise OSError(3)\\nstep()'], check=True)",
            1,
            "OSError: 3",
        ),
    ],
)
def test_a_failed_command_keeps_its_code_and_last_words(tmp_path, script, code, words):
    with LocalJob(tmp_path, script) as job:
        end = job.end()
        assert (end.status, end.exit_code) == ("failed", code)
        training = job.training()
        assert (training.exit_code, training.failure) == (code, end.failure)
        assert words in end.failure
        assert ("in step" in end.failure) == ("step" in script)
        assert job.failure_file() == end.failure[:1024]


def test_a_command_that_is_not_found_is_named_and_127(tmp_path):
    with LocalJob(tmp_path, ("no-such-program", "x"), data=1, has_torch=False) as job:
        end = job.end()
        assert (end.status, end.exit_code) == ("failed", 127)
        assert "cannot start no-such-program" in (end.failure or "")


# Long enough for those that are not struck, if the machine stands still for 2 s.
STRUCK = FeedSettings(lease_seconds=5.0)


def test_a_killed_leader_launcher_takes_its_trainer_along_and_frees_the_data_host(tmp_path):
    with LocalJob(tmp_path, STAY, data=1, feed=STRUCK) as job:
        trainer = int(job.wait_for_file("ready"))
        job.wait_for_log("algo-1", "run_joined")
        job.processes("algo-1")
        job.kill(job.launchers[job.leader])
        until(lambda: not is_running(trainer), what="the trainer ends with its launcher")
        end = job.end()
        assert end.status == "failed"
        assert job.leader in (end.failure or "")
        assert "signal 9" in (end.failure or "")
        # The data host noticed, and ended by itself.
        assert "was silent for more than 5 s" in job.log("algo-1")
        assert "agent_ended" in job.log("algo-1")


@pytest.fixture(scope="module")
def struck(tmp_path_factory):
    with LocalJob(tmp_path_factory.mktemp("struck"), FEED, data=3, feed=STRUCK) as job:
        job.wait_for_file("begun")
        yield job


def goes_on(job, at):
    (job.tmp_path / "begin").write_text("x")
    for stop in range(16, at + 1, 16):
        (job.tmp_path / f"go-{stop}").write_text("x")
    if at < 48:
        job.wait_for_file(f"at-{at + 16}")
        return
    job.succeeds()
    assert "exact True" in job.log(job.leader)


def test_training_goes_on_when_a_data_worker_is_killed(struck):
    goes_on(struck, 0)
    struck.kill(int(struck.wait_for_file("worker")))
    goes_on(struck, 16)


def test_killing_only_the_launcher_of_a_data_host_ends_all_of_that_host(struck):
    pids = struck.processes("algo-2")
    assert len(pids) > 1
    struck.kill(struck.launchers["algo-2"])
    until(lambda: not any(map(is_running, pids)), what="the data host is gone")
    goes_on(struck, 32)


def test_training_goes_on_when_a_whole_data_host_is_killed(struck):
    pids = struck.processes("algo-1")
    # All at once: none is left that could tell of another's death.
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    for pid in pids:
        struck.kill(pid)
    goes_on(struck, 48)
    events = [event for event in struck.training().events if event.host == "algo-1"]
    assert any("signal 9" in event.what for event in events)
    # It was not struck, but for its leader, which stood still.
    said = [event.what for event in struck.training().events if event.host == "algo-3"]
    assert not [what for what in said if "lost" in what], said


FAILING = """
say("ready")
hear()
if rank == 1:
    raise LookupError("only rank one")
hear()
"""


def test_the_rank_that_failed_first_gives_the_code_and_the_traceback(tmp_path):
    script = CONNECTED + FAILING
    with LocalJob(tmp_path, script, dnn=2, processes=1) as job:
        end = job.end()
        logs = "".join(job.log(host.name) for host in job.request.hosts)
        assert "rank 0 of 2 hears of rank 1" in logs
        assert "rank 1 of 2 hears of rank 0" in logs
        assert "reset by peer" in logs
        assert (end.status, end.exit_code) == ("failed", 1)
        assert "LookupError: only rank one" in (end.failure or "")
        assert (end.failure or "").startswith("rank 1 on ")
        assert job.training().strategy == "torchrun"


def test_a_killed_follower_launcher_fails_the_run_and_is_named(tmp_path):
    script = TELL + "tell('ready-' + os.environ['STOKER_HOST'], os.getpid()); time.sleep(300)\n"
    with LocalJob(tmp_path, script, dnn=2, strategy="none", feed=STRUCK) as job:
        for host in job.request.hosts:
            job.wait_for_file(f"ready-{host.name}")
        follower = job.request.hosts[1].name
        job.wait_for_log(job.leader, "host_joined")
        job.kill(job.launchers[follower])
        end = job.end()
        assert end.status == "failed"
        assert f"dnn host {follower} was lost" in (end.failure or "")


@pytest.mark.parametrize("who", ["rank", "torchrun"])
def test_a_killed_rank_or_torchrun_fails_the_run_and_takes_all_ranks_along(tmp_path, who):
    script = TELL + "tell('ready-' + os.environ['RANK'], os.getpid()); time.sleep(300)\n"
    with LocalJob(tmp_path, script, processes=2) as job:
        ranks = [int(job.wait_for_file(f"ready-{rank}")) for rank in (0, 1)]
        job.kill(ranks[1] if who == "rank" else psutil.Process(ranks[0]).ppid())
        end = job.end()
        assert (end.status, end.exit_code) == ("failed", 137)
        assert (end.failure or "").startswith("rank 1 on ") == (who == "rank")
        assert not any(map(is_running, ranks))


SAVING = told("""
def save(number, frame):
    tell("saved", number)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
tell("ready", os.getpid())
time.sleep(300)
""")


def test_stop_lets_the_trainer_save_its_state(tmp_path):
    with LocalJob(tmp_path, SAVING, data=1, has_torch=False) as job:
        job.wait_for_file("ready")
        job.run.stop()
        end = job.end()
        assert (end.status, end.exit_code) == ("stopped", 0)
        assert (tmp_path / "saved").read_text() == str(int(signal.SIGTERM))
        assert job.training().status == "stopped"
        job.run.stop()


def test_a_second_sigterm_does_not_wait_for_a_trainer_that_ignores_the_first(tmp_path):
    ignoring = "signal.signal(signal.SIGTERM, lambda *_: tell('ignored'))\n"
    script = f"{TELL}{ignoring}tell('ready')\nwhile True: time.sleep(1)\n"
    with LocalJob(tmp_path, script) as job:
        job.wait_for_file("ready")
        launcher = job.launchers[job.leader]
        job.kill(launcher, signal.SIGTERM)
        job.wait_for_file("ignored")
        job.kill(launcher, signal.SIGTERM)
        end = job.end()
        assert end.status == "stopped"
        assert job.training().exit_code == 137


LEAVING = told("""
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        tell("left", os.getpid())
        time.sleep(300)
    os._exit(0)
wait_for("left")
""")


def test_the_launcher_itself_ends_what_its_command_left_behind(tmp_path):
    with LocalJob(tmp_path, LEAVING) as job:
        assert job.end().status == "succeeded"
        assert not is_running(int((tmp_path / "left").read_text()))


PLATFORM = """
import sys, pathlib
sys.path.insert(0, {tests!r})
from support.local_job import LocalJob
folder = pathlib.Path({folder!r})
with LocalJob(folder, (folder / "script.py").read_text(), data=1, has_torch=False) as job:
    job.end()
"""


def test_a_killed_platform_takes_its_hosts_along(tmp_path):
    # What a data host with datasets has ends with its launcher: a test above.
    (tmp_path / "script.py").write_text(STAY)
    code = PLATFORM.format(tests=str(Path(__file__).parents[1]), folder=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    log = tmp_path / "run" / "logs" / "data-algo-1.log"
    try:
        until((tmp_path / "ready").exists, what="the training runs")
        until(lambda: log.exists() and "run_joined" in log.read_text(), what="the data host runs")
        pids = marked_processes(tmp_path / "run")
    finally:
        process.kill()
        process.wait()
    assert len(pids) > 2
    until(lambda: not marked_processes(tmp_path / "run"), what="the hosts end")
    until(lambda: not any(map(is_running, pids)), what="each of their processes ends")


def test_a_channel_goes_to_the_groups_that_it_names(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "one").write_text("1")
    script = "import os; print('found', os.listdir(os.environ['SM_CHANNEL_TRAIN']))"
    channels = {"train": Channel(uri=str(tmp_path / "images"))}
    channels["more"] = Channel(uri=f"file://{tmp_path}/images", groups=("data",))
    with LocalJob(tmp_path, script, data=1, has_torch=False, channels=channels) as job:
        assert job.end().status == "succeeded"
        assert "found ['one']" in job.log(job.leader)
        assert not (job.base_dir(job.leader) / "input" / "data" / "more").exists()
        assert (job.base_dir("algo-1") / "input" / "data" / "more" / "one").exists()


# A run that has spent constraints.max_usd is ended by its leader, and may save before.


# Each host saves when it is told to end, and then ends with an error, as ranks without a peer do.
SAVES = """
import os, pathlib, signal, sys, time
host = os.environ["STOKER_HOST"]
def save(*_):
    pathlib.Path(os.environ["STOKER_TEST_DIR"], f"saved-{host}").write_text("x")
    sys.exit(1)
signal.signal(signal.SIGTERM, save)
pathlib.Path(os.environ["STOKER_TEST_DIR"], f"ready-{host}").write_text("x")
time.sleep(300)
"""


def test_a_run_over_its_budget_saves_on_all_dnn_hosts_and_is_not_restarted(tmp_path):
    job = LocalJob(tmp_path, SAVES, dnn=2, data=1, strategy="none", has_torch=False)
    # $3 a second: 10 s, in which the script starts.
    budget = Budget(usd_per_hour={"dnn": 3600.0, "data": 3600.0}, max_usd=30.0, predicted_usd=9.0)
    job.spec = replace(job.spec, settings=replace(job.spec.settings, budget=budget))
    with job:
        trainers = [host.name for host in job.request.hosts if host.group == "dnn"]
        assert [job.wait_for_file(f"ready-{name}") for name in trainers] == ["x", "x"]
        end = job.end()
        # Another code than 0 of any dnn host would make a platform restart the run.
        assert (end.status, end.exit_code) == ("succeeded", 0)
        assert [job.wait_for_file(f"saved-{name}") for name in trainers] == ["x", "x"]
        training = job.training()
        assert training.status == "failed"
        assert training.failure.startswith("max_usd reached: $")
        assert "constraints.max_usd is $30.00" in training.failure
        assert outcome_of(training).exit_code == 6
        # Nothing is billed here: what the leader counted.
        assert training.spent_usd >= 30
        by_group = {each.group: each.usd for each in training.spending}
        assert by_group["dnn"] == pytest.approx(2 * by_group["data"])
        log = job.log(job.leader)
        assert log.count(" budget_spent ") == 1
