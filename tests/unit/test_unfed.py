"""A training under a data group that takes no batches from it is told so."""

import io
import sys
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from stoker.environment import RELEASED_FILE, from_environment, unfed_file
from stoker.feed import unfed
from stoker.feed.bookkeeping import TrainerProcess
from stoker.feed.rank_reports import (
    Loading,
    Unfed,
    counted_steps,
    discard_loadings,
    read_loadings,
    why_unfed,
    why_unhelped,
)
from stoker.feed.timeline import COLUMNS, FILE, MeasuredStep, Timeline
from stoker.feed.unfed import ENOUGH_STEPS, OptimizerWatch, is_released
from stoker.feed.wire.protocol import FeedWork, HostWork, Progress
from stoker.launch.run_guards import Release
from stoker.logs import Log


def watch_of(folder: Path, *, rank: int = 0, world: int = 1) -> tuple[OptimizerWatch, io.StringIO]:
    environ = {"STOKER_OUTPUT": str(folder), "RANK": str(rank), "WORLD_SIZE": str(world)}
    said = io.StringIO()
    log = Log(run="test", host="algo-1", stream=said)
    process = TrainerProcess(from_environment(environ), Timeline(None))
    return OptimizerWatch(process.settings, log, lambda: process), said


@pytest.fixture(autouse=True)
def without_feed(monkeypatch):
    monkeypatch.setattr(unfed, "_FEED", "no.such.module")
    monkeypatch.setattr("stoker.launch.run_guards._POLL_SECONDS", 0.0)


def test_a_loader_that_is_not_stokers_is_named_at_the_first_step(tmp_path):
    watch, said = watch_of(tmp_path)
    watch.seen = "torch.utils.data.dataloader.DataLoader"
    watch.step()
    assert "torch.utils.data.dataloader.DataLoader is read without stoker" in said.getvalue()
    assert "--replace-dataloader" in said.getvalue()
    take_steps(watch)
    assert said.getvalue().count("feed_unused") == 1


def test_a_librarys_own_loader_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fastai.data.load", ModuleType("fastai.data.load"))
    watch, said = watch_of(tmp_path)
    watch.step()
    assert "fastai.data.load.DataLoader makes batches in its own way" in said.getvalue()


def test_steps_before_the_first_batch_are_not_judged(tmp_path):
    watch, said = watch_of(tmp_path)
    take_steps(watch, ENOUGH_STEPS - 1)
    assert said.getvalue() == ""
    assert not (tmp_path / unfed_file(0)).exists()
    watch.step()
    assert "no loader of torch or stoker was read" in said.getvalue()
    assert (tmp_path / unfed_file(0)).exists()


def test_a_training_with_a_loader_of_stokers_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(unfed, "_FEED", "stoker.feed.unfed")
    watch, said = watch_of(tmp_path)
    watch.seen = "torch.utils.data.dataloader.DataLoader"
    take_steps(watch)
    assert said.getvalue() == ""
    assert not (tmp_path / unfed_file(0)).exists()


@pytest.mark.parametrize("is_one_fed", [True, False])
def test_hosts_are_given_back_where_every_loader_is_made_in_the_trainer(
    tmp_path, monkeypatch, is_one_fed
):
    # A loader that was refused has imported the feed.
    monkeypatch.setattr(unfed, "_FEED", "stoker.feed.unfed")
    watch, said = watch_of(tmp_path)
    process = watch.process()
    monkeypatch.setattr(unfed, "known_process", lambda: process)
    take_steps(watch)
    assert not (tmp_path / unfed_file(0)).exists()
    # In the middle of the training, too: its loop changes the dataset.
    process.note_made_here("dataset.epoch is a tensor in shared memory")
    if is_one_fed:
        process.fed_loaders.add(1)
    take_steps(watch)
    assert (tmp_path / unfed_file(0)).exists() is not is_one_fed
    assert process.said_unfed is not is_one_fed
    if not is_one_fed:
        file = (tmp_path / unfed_file(0)).read_bytes()
        assert "dataset.epoch" in msgspec.json.decode(file, type=Unfed).words
    assert said.getvalue() == ""
    assert watch.loading().is_fed


def test_steps_are_counted_without_a_data_group_too_and_told_once_a_second(tmp_path):
    watch, said = watch_of(tmp_path)
    watch.is_planned = False
    now = [10.0]
    watch.clock = lambda: now[0]
    told = []
    for seconds in (0.0, 0.5, 0.4, 0.2):
        now[0] += seconds
        watch.step()
        told.append(read_loadings(tmp_path)[0].optimizer_steps)
    assert told == [1, 1, 1, 4]
    take_steps(watch, ENOUGH_STEPS)
    watch.write()
    assert read_loadings(tmp_path)[0].optimizer_steps == ENOUGH_STEPS + 4
    assert said.getvalue() == ""
    assert not (tmp_path / unfed_file(0)).exists()


# Of torch's own, as it imports its compiler.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_step_is_not_broken_and_its_number_is_not_known(tmp_path):
    watch, _ = watch_of(tmp_path)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = register_optimizer_step_pre_hook(lambda *_: watch.step())
    step = torch.compile(optimizer.step, backend="eager")
    try:
        for _ in range(3):
            model(torch.ones(3, 2)).sum().backward()
            step()
    finally:
        handle.remove()
        torch.compiler.reset()
    # Whichever way torch takes: all are counted, or none is and that is said.
    assert watch.loading().optimizer_steps in (None, 3)
    assert watch.loading().has_optimizer


def test_a_loader_of_torchs_is_seen_only_where_its_iterator_is_torchs(tmp_path):
    class Own(torch.utils.data.DataLoader[object]):
        def _get_iterator(self) -> object:
            return stokers.pop() if stokers else super()._get_iterator()

    stokers = [type("Fed", (), {"__module__": "stoker.feed.iterators"})()]
    watch, _ = watch_of(tmp_path)
    unfed._see_loaders(Own, watch)
    loader = Own([1, 2])
    loader._get_iterator()
    assert watch.seen == ""
    loader._get_iterator()
    assert watch.seen.endswith("Own")
    # Or `stoker.timed` would take it for one that stoker times.
    assert Own._get_iterator.__module__ == __name__


LOG = Log(run="test", host="algo-1", stream=io.StringIO())


class Released:
    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.unfed_ranks = 0

    def release_agents(self, reason: str) -> None:
        self.reasons.append(reason)


def take_steps(watch: OptimizerWatch, count: int = ENOUGH_STEPS) -> None:
    for _ in range(count):
        watch.step()


@pytest.mark.parametrize("asks_after_all", [False, True])
def test_data_hosts_are_given_back_when_all_ranks_say_the_same(tmp_path, asks_after_all):
    (tmp_path / unfed_file(1)).write_bytes(msgspec.json.encode(Unfed(1, "of an attempt before")))
    coordinator = Released()
    release = Release(tmp_path, coordinator, ranks=2, all_ranks=2, log=LOG)
    first, second = (watch_of(tmp_path, rank=rank, world=2)[0] for rank in (0, 1))
    take_steps(first)
    release.tick()
    assert coordinator.reasons == []
    take_steps(second)
    if asks_after_all:
        # Before the launcher has looked: it takes its word back.
        assert not is_released(first.process())
    release.tick()
    release.tick()
    assert (tmp_path / RELEASED_FILE).exists() is not asks_after_all
    said = "takes no batches from its data hosts"
    assert [said in reason for reason in coordinator.reasons] == [True] * (not asks_after_all)
    # Who reads a loader of stoker's after all makes its batches itself.
    assert is_released(first.process()) is not asks_after_all


# With strategy none the process of each host may be a world of its own.
@pytest.mark.parametrize("world", [1, 2])
def test_the_data_hosts_of_several_hosts_wait_for_the_word_of_all(tmp_path, monkeypatch, world):
    coordinator = Released()
    release = Release(tmp_path, coordinator, ranks=1, all_ranks=2, log=LOG)
    rank = watch_of(tmp_path, rank=0, world=world)[0]
    take_steps(rank)
    release.tick()
    assert coordinator.reasons == []
    # Whatever this rank reads from now on is made here.
    assert is_released(rank.process())
    coordinator.unfed_ranks = 1
    release.tick()
    assert len(coordinator.reasons) == 1


TORCHS = "torch.utils.data.dataloader.DataLoader"
TIMELINE = {0: [MeasuredStep(loader=0, epoch=0, wait_seconds=0.1, compute_seconds=0.1, samples=4)]}
# Rank 1 is on another host: its timeline is there.
PROGRESS = {1: Progress(rank=1, steps=7, samples=28, wait_seconds=0.1, compute_seconds=0.1)}


def say(folder: Path, *loadings: Loading) -> Path:
    for pid, loading in enumerate(loadings):
        loading.write(folder, pid=pid)
    return folder


@pytest.mark.parametrize(
    ("loadings", "steps"),
    [
        ((), None),
        # A process that imports torch for something else is no training without steps.
        ((Loading(),), None),
        ((Loading(has_optimizer=True),), 0),
        # A launcher beside the rank, of the same rank's number.
        ((Loading(), Loading(optimizer_steps=125, has_optimizer=True, seen=TORCHS)), 125),
        ((Loading(optimizer_steps=None, has_optimizer=True),), None),
        # It read batches, and updated its model without an optimizer of torch's.
        ((Loading(has_optimizer=True, seen=TORCHS),), None),
    ],
)
def test_steps_are_counted_whichever_loader_made_the_batches(tmp_path, loadings, steps):
    assert counted_steps(say(tmp_path, *loadings), {}, {}) == steps


def test_batches_of_the_main_loader_come_before_optimizer_steps(tmp_path):
    # Gradients that are accumulated: two batches for an optimizer's step.
    (tmp_path / FILE.format(rank=0)).write_text(COLUMNS + "\n")
    assert counted_steps(tmp_path, {}, {}) == 0, "a loader was made and never read"
    say(tmp_path, Loading(optimizer_steps=3, has_optimizer=True))
    assert counted_steps(tmp_path, TIMELINE, {}) == 1
    assert counted_steps(tmp_path, TIMELINE, PROGRESS) == 7


READ = Loading(optimizer_steps=9, seen=TORCHS)
OWN = Loading(optimizer_steps=9, own=("litdata.StreamingDataLoader",))
_PYTHON = {"python": "/opt/py/bin/python", "version": "3.9.1"}
_NO_STOKER = {**_PYTHON, "problem": "ModuleNotFoundError: No module named 'stoker'"}
ELSEWHERE, ELSEWHERE_IDLE = Loading(optimizer_steps=9, **_NO_STOKER), Loading(**_NO_STOKER)
NO_ZMQ = Loading(
    optimizer_steps=9, **{**_PYTHON, "problem": "ModuleNotFoundError: No module named 'zmq'"}
)
IGNORING = Loading(**_PYTHON, options=("-I",))
UNREPLACED = f"{TORCHS} is read without stoker; train with --replace-dataloader true"


@pytest.mark.parametrize(
    ("loadings", "why"),
    [
        ((), "no loader of torch or stoker was read"),
        ((Loading(),), "no loader of torch or stoker was read"),
        ((Loading(), READ, Loading()), UNREPLACED),
        ((OWN,), "litdata.StreamingDataLoader makes batches in its own way"),
        (
            (Loading(is_fed=True, epochs=3, has_optimizer=True),),
            "a DataLoader was read and gave no batch; is its dataset",
        ),
        ((Loading(optimizer_steps=9, made="train.py:7"),), "made at train.py:7 was never read"),
        ((Loading(is_fed=True, optimizer_steps=9, made="a.py:1"),), "made at a.py:1 was never"),
        # A loader of torch's class that is read is nearer than one that is not.
        ((Loading(optimizer_steps=9, made="a.py:1", seen=TORCHS),), f"{TORCHS} is read"),
        (
            (Loading(), ELSEWHERE),
            "/opt/py/bin/python (Python 3.9.1), which runs the script, has no",
        ),
        ((Loading(), NO_ZMQ), "cannot import stoker: ModuleNotFoundError: No module named 'zmq'"),
        ((IGNORING,), "python, started with -I, does not read PYTHONPATH"),
        # A helper's Python is not the training's.
        ((ELSEWHERE_IDLE, OWN), "litdata.StreamingDataLoader makes batches"),
        # Its own loader was made; what it trained on was another one.
        ((Loading(is_fed=True, optimizer_steps=9, seen=TORCHS),), f"{TORCHS} is read"),
        # A training that goes on from its last epoch: nothing is wrong with its loaders.
        ((Loading(is_fed=True, has_optimizer=True),), ""),
    ],
)
def test_a_run_without_a_fed_batch_is_told_by_its_cause(tmp_path, loadings, why):
    words = why_unfed(say(tmp_path, *loadings), {})
    assert why in words
    assert words.startswith("no batch came from its data hosts: ") is bool(why)


def test_batches_of_the_feed_count_wherever_they_were_made(tmp_path):
    say(tmp_path, Loading(is_fed=True, optimizer_steps=9))
    assert why_unfed(tmp_path, PROGRESS) == ""
    (tmp_path / FILE.format(rank=0)).write_text("0,0,0,0,0.1,0.1,4,1,1")
    assert why_unfed(tmp_path, {}) == ""
    # Batches that are only timed are none of the feed's.
    say(tmp_path, Loading(optimizer_steps=9, own=("x.Loader",)))
    assert "x.Loader makes batches in its own way" in why_unfed(tmp_path, {})


def test_what_an_earlier_attempt_said_is_forgotten(tmp_path):
    say(tmp_path, Loading(optimizer_steps=9))
    (tmp_path / "loading-7.json").write_text("cut off")
    assert len(read_loadings(tmp_path)) == 1
    discard_loadings(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_loader_that_is_made_and_not_read_is_named_by_its_line(tmp_path, monkeypatch):
    # Other tests of this process have read loaders of their own classes, and of stoker's.
    monkeypatch.setattr(unfed, "own_loaders", list)
    monkeypatch.setattr(unfed, "known_process", lambda: None)

    class Own(torch.utils.data.DataLoader[object]):
        pass

    watch, said = watch_of(tmp_path)
    unfed._see_loaders(Own, watch)
    loaders = [Own([1, 2]), Own([3])]
    assert watch.made == f"{__file__}:{line_of('loaders = [Own(')}"
    take_steps(watch)
    assert f"made at {watch.made} was never read" in said.getvalue()
    assert len(loaders) == 2


def line_of(words: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return 1 + next(number for number, line in enumerate(lines) if line.strip().startswith(words))


# A script may end sooner than the next look.
@pytest.mark.parametrize("ends_first", [False, True])
def test_a_python_without_stoker_is_told_by_the_launcher_and_releases_the_hosts(
    ends_first, tmp_path
):
    coordinator, said = Released(), io.StringIO()
    log = Log(run="test", host="algo-1", stream=said)
    release = Release(tmp_path, coordinator, ranks=1, all_ranks=1, log=log)
    if ends_first:
        release.tick()
    word = Unfed(rank=0, **_NO_STOKER)
    (tmp_path / unfed_file(0)).write_bytes(msgspec.json.encode(word))
    release.tick()
    release.tick()
    release.close()
    if ends_first:
        assert said.getvalue().count("feed_unused") == 1
        return
    assert said.getvalue().count("feed_unused") == 1
    assert "has no stoker; install stoker in that Python" in said.getvalue()
    assert ["has no stoker" in reason for reason in coordinator.reasons] == [True]


HERE = HostWork(host="algo-2", is_local=True, batches=7)


@pytest.mark.parametrize(
    ("hosts", "reasons", "why"),
    [
        ((HERE,), ("cannot send dataset.s",), "made all batches: cannot send dataset.s"),
        ((HERE, HostWork(host="algo-1")), ("a", "b", "a"), "made all batches: a; b"),
        ((), ("a",), "made all batches: a"),
        ((HERE,), (), ""),
        ((HERE, HostWork(host="algo-1", batches=1)), ("a",), ""),
    ],
)
def test_a_run_that_data_hosts_did_not_help_says_why(tmp_path, hosts, reasons, why):
    say(tmp_path, Loading(is_fed=True, optimizer_steps=9, made_here=reasons))
    work = FeedWork(seconds=1.0, hosts=hosts)
    progress = {0: msgspec.structs.replace(PROGRESS[1], rank=0, feed=work)}
    words = why_unhelped(tmp_path, progress)
    assert words.endswith(why)
    assert words.startswith("no batch came from its data hosts: ") is bool(why)
