"""A training that takes no batch from its data hosts trains on without them, and has failed."""

import pytest

from stoker.record_words import training_words
from stoker.records import FeedSettings
from stoker.records.outcome import outcome_of, training_exit_code
from support.local_job import LocalJob

pytestmark = pytest.mark.fault

HEAD = """
import torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
"""
UNCHANGED = {"feed": FeedSettings(), "replace_dataloader": "auto"}
STEPS = """
for (batch,) in loader:
    model(batch).square().mean().backward()
    optimizer.step()
"""
FORGOT = """
import os, pathlib, time
go = pathlib.Path(os.environ["STOKER_TEST_DIR"]) / "go"
loader = DataLoader(TensorDataset(torch.rand(64, 4)), batch_size=4)
while not go.exists():
    for (batch,) in loader:
        model(batch).square().mean().backward()
        optimizer.step()
        time.sleep(0.01)
import stoker
late = stoker.DataLoader(TensorDataset(torch.arange(8.0)), batch_size=4)
print("late", [batch.tolist() for batch, in late], flush=True)
"""
TORCHS = "import stoker; loader = DataLoader(TensorDataset(torch.rand(12, 4)), batch_size=4)"
EMPTY = "import stoker; loader = stoker.DataLoader(TensorDataset(torch.rand(0, 4)), batch_size=4)"


# Of two hosts as of one: each rank's process counts steps, and tests/unit/test_unfed.py has the
# data hosts wait for the word of all.
@pytest.mark.parametrize("dnn", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_data_hosts_are_given_back_where_no_loader_asks_them(tmp_path, dnn):
    # No lease of 2 s, as other tests have: nobody is lost here, however busy the machine is.
    patient = {"feed": FeedSettings(), "strategy": "none"}
    with LocalJob(tmp_path, HEAD + FORGOT, dnn=dnn, data=1, **patient) as job:
        (host,) = [host.name for host in job.request.hosts if host.group == "data"]
        job.wait_for_log(host, "agent_ended")
        (tmp_path / "go").touch()
        job.succeeds()
        training = job.training()
    assert "takes no batches from its data hosts" in job.log(host)
    assert "DataLoader is read without stoker" in job.log(job.leader)
    assert any("data hosts released" in event.what for event in training.events)
    for host in (host.name for host in job.request.hosts if host.group == "dnn"):
        assert "late [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]" in job.log(host)


PAUSED = """
import os, pathlib, time
go = pathlib.Path(os.environ["STOKER_TEST_DIR"]) / "go"
def step(batch, number):
    model(batch).square().mean().backward()
    optimizer.step()
    while number == 40 and not go.exists():
        time.sleep(0.01)
"""
WAITING = (
    PAUSED
    + """
import queue
class Waiting(torch.utils.data.Dataset):
    def __init__(self):
        self.ready = queue.Queue()
    def __len__(self):
        return 60
    def __getitem__(self, index):
        return self.ready.get()
dataset = Waiting()
dataset.ready.put(torch.zeros(4))
loader = DataLoader(dataset)
for number, batch in enumerate(loader):
    step(batch, number)
    dataset.ready.put(torch.ones(4))
"""
)
SHARED = (
    PAUSED
    + """
class Shared(torch.utils.data.Dataset):
    def __init__(self):
        self.epoch = torch.zeros(4).share_memory_()
    def __len__(self):
        return 60
    def __getitem__(self, index):
        return self.epoch + index
for number, batch in enumerate(DataLoader(Shared(), num_workers=1)):
    step(batch, number)
"""
)


@pytest.mark.parametrize(
    ("script", "name"), [(WAITING, "dataset.ready"), (SHARED, "dataset.epoch")]
)
def test_data_hosts_are_given_back_where_the_trainer_makes_all_batches(tmp_path, script, name):
    with LocalJob(tmp_path, HEAD + script, data=1, **UNCHANGED) as job:
        (host,) = [host.name for host in job.request.hosts if host.group == "data"]
        job.wait_for_log(host, "agent_ended")
        (tmp_path / "go").touch()
        assert job.end().status == "succeeded"
        training = job.training()
        log = job.log(job.leader)
    assert (training.status, training.steps, training.is_unfed) == ("succeeded", 60, False)
    assert any("data hosts released" in event.what for event in training.events)
    assert any("no batch came from its data hosts" in event.what for event in training.events)
    assert log.count("loader_made_here") == 1
    assert name in log
    assert "feed_unused" not in log


REFUSED = (
    PAUSED.replace("number == 40", "number == 0")
    + """
import ctypes, socket, sqlite3, threading
class Refused(torch.utils.data.Dataset):
    def __init__(self):
        self.held = {held}
    def __len__(self):
        return 60
    def __getitem__(self, index):
        return torch.full((4,), float(index))
"""
)
READ = """
for number, batch in enumerate({loader}):
    step(batch, number)
"""
# Each is another reason why a dataset cannot be sent.
HELD = [
    "socket.socket()",
    "open(os.devnull, 'w')",
    "(each for each in [1])",
    "ctypes.pointer(ctypes.c_int(1))",
    "threading.current_thread()",
    "sqlite3.connect(':memory:')",
]
TORCHS_LOADER = "DataLoader(Refused(), num_workers=1)"
STOKERS_LOADER = "__import__('stoker').DataLoader(Refused())"


def refused(held, loader):
    return REFUSED.format(held=held) + READ.format(loader=loader)


def data_group_of(training):
    (group,) = [each for each in training.spending if each.group == "data"]
    return group


# Without an optimizer of torch's the launcher waits a moment for another loader.
@pytest.mark.parametrize(
    ("held", "steps"),
    [
        (HELD[0], "optimizer.step()"),
        (HELD[0], "pass"),
        *(pytest.param(held, "optimizer.step()", marks=pytest.mark.soak) for held in HELD[1:]),
    ],
)
def test_data_hosts_are_given_back_at_the_first_step_where_a_dataset_cannot_be_sent(
    tmp_path, held, steps
):
    script = HEAD + refused(held, TORCHS_LOADER).replace("optimizer.step()", steps)
    with LocalJob(tmp_path, script, data=1, **UNCHANGED) as job:
        (host,) = [host.name for host in job.request.hosts if host.group == "data"]
        # The script waits in its first step.
        job.wait_for_log(host, "agent_ended")
        (tmp_path / "go").touch()
        end, training, failure = job.end(), job.training(), job.failure_file() or ""
    assert any("data hosts released" in event.what for event in training.events)
    # The hosts end well: a platform keeps the model, and does not train once more.
    assert (end.status, training.status, training.exit_code) == ("succeeded", "failed", 0)
    assert (training.is_unfed, training.steps, training_exit_code(training)) == (True, 60, 6)
    assert "no batch came from its data hosts: the trainer made all batches: cannot send" in failure
    assert "dataset.held" in failure
    group = data_group_of(training)
    assert (group.batches, group.all_batches, group.idle_share) == (0, 60, 1.0)
    assert "the data group made 0 of 60 batches" in outcome_of(training).words
    assert training.is_helped is False


@pytest.mark.parametrize("loader", [TORCHS_LOADER, STOKERS_LOADER])
def test_the_workload_may_want_a_refused_dataset_made_on_the_trainers_host(tmp_path, loader):
    (tmp_path / "go").touch()
    settings = {**UNCHANGED, "feed": FeedSettings(unshippable="local")}
    with LocalJob(tmp_path, HEAD + refused(HELD[0], loader), data=1, **settings) as job:
        assert job.end().status == "succeeded"
        training = job.training()
    assert (training.status, training.is_unfed, training_exit_code(training)) == (
        *("succeeded", True),
        0,
    )
    assert any("no batch came from its data hosts" in event.what for event in training.events)
    assert "the data group made 0 of 60 batches" in training_words(training)


def test_a_loader_that_is_fed_later_takes_the_word_back(tmp_path):
    (tmp_path / "go").touch()
    script = HEAD + refused(HELD[0], TORCHS_LOADER).replace("    step(batch, number)", "    pass")
    script += """
loader = DataLoader(TensorDataset(torch.rand(12000, 4)), batch_size=4, num_workers=1)
"""
    settings = {**UNCHANGED, "feed": FeedSettings(local_workers=0)}
    with LocalJob(tmp_path, script + STEPS, data=1, **settings) as job:
        job.succeeds()
        training = job.training()
    group = data_group_of(training)
    assert (training.status, training.is_unfed) == ("succeeded", False)
    assert (group.batches, group.all_batches) == (3000, 3060)
    assert (group.is_of_no_use, training.is_helped) == (False, True)


def test_a_group_that_made_next_to_nothing_is_named(tmp_path):
    (tmp_path / "go").touch()
    script = HEAD + refused(HELD[0], TORCHS_LOADER).replace("return 60", "return 600")
    # Read before any step, so that data hosts are still there.
    fed = "for few in DataLoader(TensorDataset(torch.rand(12, 4)), batch_size=4, num_workers=1):"
    script = script.replace("for number, batch", f"{fed}\n    pass\nfor number, batch")
    settings = {**UNCHANGED, "feed": FeedSettings(local_workers=0)}
    with LocalJob(tmp_path, script, data=1, **settings) as job:
        job.succeeds()
        training = job.training()
    assert (training.status, training.is_unfed, training.is_helped) == ("succeeded", False, False)
    assert "the data group made 3 of 603 batches" in training_words(training)


@pytest.mark.parametrize(
    ("script", "steps", "why"),
    [
        (TORCHS + STEPS, 3, "torch.utils.data.dataloader.DataLoader is read without stoker"),
        (EMPTY + STEPS, 0, "gave no batch; is its dataset empty?"),
        # It goes on from a checkpoint of its last epoch.
        (EMPTY, 0, ""),
    ],
)
def test_a_run_without_one_fed_batch_has_failed_by_its_cause(tmp_path, script, steps, why):
    feed = FeedSettings()
    with LocalJob(tmp_path, HEAD + script, data=1, feed=feed) as job:
        end = job.end()
        record = job.training()
        told = job.failure_file() or ""
    # The hosts end well: a platform keeps the model then, and does not train once more.
    assert (end.status, record.status) == ("succeeded", "failed" if why else "succeeded")
    # The command itself ended well.
    assert (record.exit_code, record.steps, record.is_unfed) == (0, steps, bool(why))
    assert why in told
    assert why in record.cause
    outcome = outcome_of(record)
    assert outcome.state == ("not fed" if why else "did no step")
    assert training_exit_code(record) == (6 if why else 0)
