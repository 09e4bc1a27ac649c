"""Several data hosts make an epoch's first and last batches: the bytes of one, in any case."""

import json
import random
import re
from pathlib import Path

import pytest

from support.cluster import Cluster, reference, wait_until

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

SCRIPT = "shared_batch_script.py"
ALWAYS = {"split_batches": True, "lease_seconds": 30.0}
# With two hosts of one worker each: the first sample of each host in batches of 24.
FIRST, FIRST_OF_OTHER = 0, 12
# And in the epoch's last batch: its first sample, and one that the other host makes in any case.
LAST, LAST_OF_OTHER = 72, 95


def env_of(cluster, **feed):
    return {"STOKER_FEED": json.dumps(cluster.settings | feed)}


# Two hosts are a part of three, and those of `pair`.
TWO_HOSTS = pytest.param(2, id="two hosts", marks=pytest.mark.soak)


@pytest.fixture(scope="module", params=[TWO_HOSTS, pytest.param(3, id="three hosts")])
def sharing(request):
    with Cluster(agents=request.param, workers=2, feed=ALWAYS) as cluster:
        cluster.wait_for_agents()
        yield cluster


@pytest.fixture
def pair():
    with Cluster(agents=2, workers=1, feed=ALWAYS) as cluster:
        cluster.wait_for_agents()
        yield cluster


def started(cluster, **given):
    """A trainer at its second epoch, for which all hosts are ready."""
    trainer = cluster.paused(script=SCRIPT, pause_at=1, **given)
    wait_until(lambda: trainer.errors.count(" agent_ready ") >= cluster.agents, "all are ready")
    trainer.go_on()
    return trainer


def shared_samples(trainer, *, batch=0, collator="algo"):
    """Samples of other hosts in each of the batches with that number, if they were asked for it."""
    lines = [line for line in trainer.errors.splitlines() if " batch_shared " in line]
    lines = [line for line in lines if f" batch={batch} " in line and f"agent={collator}" in line]
    return [sum(map(int, re.findall(r"(\d+) of algo", line))) for line in lines]


def makers(folder, index):
    file = Path(folder) / str(index)
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def host_of(cluster, folder, index):
    """The data host that was the first to begin that sample, while its worker lives."""
    wait_until(lambda: makers(folder, index), f"somebody makes sample {index}")
    pid = makers(folder, index)[0]
    hosts = range(cluster.agents)
    (host,) = [host for host in hosts if pid in {each.pid for each in cluster.workers_of(host)}]
    return host


@pytest.mark.parametrize("batch_size", [24, 48])
def test_batches_that_several_hosts_make_are_the_same_bytes(sharing, batch_size):
    # Of the larger ones, two samples each draw in a row.
    options = {"epochs": 3, "batch_size": batch_size}
    # So long that no host makes all of a batch while the others stand still for a moment.
    trainer = started(sharing, sample_seconds=0.04, **options)
    assert trainer.finish() == reference(script=SCRIPT, **options)
    # The first epoch may have begun before all hosts were ready.
    assert len(shared_samples(trainer)) >= 2
    assert min(shared_samples(trainer)) > 0


@pytest.mark.parametrize(
    ("feed", "is_shared"),
    [
        ({"split_batches": "auto"}, True),
        ({"split_batches": False}, False),
        ({"split_batches": "auto", "seeding": "torch"}, False),
    ],
    ids=["auto", "false", "torch"],
)
def test_first_batches_are_shared_where_it_pays(pair, feed, is_shared):
    trainer = started(pair, env=env_of(pair, **feed), sample_seconds=0.05)
    lines = trainer.finish()
    assert [line["indices"] for line in lines] == 2 * [
        [*range(first, first + 24)] for first in range(0, 96, 24)
    ]
    # In the first epoch nothing is known.
    assert len(shared_samples(trainer)) == is_shared


def test_samples_of_megabytes_come_whole(sharing):
    options = {"size": 300_000, "epochs": 3}
    trainer = started(sharing, sample_seconds=0.02, **options)
    assert trainer.finish() == reference(script=SCRIPT, **options)
    assert shared_samples(trainer)


def test_hosts_make_samples_of_one_batch_at_the_same_time(pair, tmp_path):
    holds = [FIRST, FIRST_OF_OTHER]
    trainer = started(pair, folder=str(tmp_path), holds=holds)
    # Neither ends before the other one has begun.
    hosts = {host_of(pair, tmp_path, index) for index in holds}
    assert hosts == {0, 1}
    (tmp_path / "go").touch()
    assert trainer.finish() == reference(script=SCRIPT)


@pytest.mark.parametrize("batch_size", [24, 48])
@pytest.mark.parametrize("helps", [False, True], ids=["that collates", "that helps"])
def test_a_host_killed_while_it_makes_samples_changes_nothing(pair, tmp_path, helps, batch_size):
    # The second one is in the middle of a stretch, where a batch has stretches of two samples.
    holds = [FIRST, batch_size // 2 + (batch_size > 32)]
    trainer = started(pair, folder=str(tmp_path), holds=holds, batch_size=batch_size)
    hosts = {index: host_of(pair, tmp_path, index) for index in holds}
    killed = holds[helps]
    pair.kill(hosts[killed])
    (tmp_path / "go").touch()
    assert trainer.finish() == reference(script=SCRIPT, batch_size=batch_size)
    assert len(makers(tmp_path, killed)) > 1


def test_a_host_that_says_nothing_is_not_waited_for(pair, tmp_path):
    holds = [FIRST, FIRST_OF_OTHER]
    trainer = started(pair, folder=str(tmp_path), holds=holds)
    hosts = {index: host_of(pair, tmp_path, index) for index in holds}
    pair.stop(hosts[FIRST_OF_OTHER])
    (tmp_path / "go").touch()
    facts = {"epoch": 1, "batch": 0}
    wait_until(
        lambda: any(line.items() >= facts.items() for line in read(trainer)), "the first batch"
    )
    pair.cont(hosts[FIRST_OF_OTHER])
    assert trainer.finish() == reference(script=SCRIPT)


def read(trainer):
    """The lines that a trainer has printed so far."""
    while not trainer._queue.empty():
        trainer._next()
    return trainer.lines


def started_to_its_end(cluster, folder, **given):
    """A trainer, and the hosts that make its second epoch's last batch together, both held."""
    holds = [LAST, LAST_OF_OTHER]
    trainer = started(cluster, folder=str(folder), holds=holds, **given)
    return trainer, {index: host_of(cluster, folder, index) for index in holds}


def test_a_host_without_a_batch_makes_samples_of_the_last_one(pair, tmp_path):
    trainer, hosts = started_to_its_end(pair, tmp_path, epochs=3)
    # Neither ends before the other one has begun.
    assert set(hosts.values()) == {0, 1}
    (tmp_path / "go").touch()
    assert trainer.finish() == reference(script=SCRIPT, epochs=3)


def test_the_last_batches_of_two_ranks_are_shared_and_counted(pair, tmp_path):
    given = {"world": 2, "pause_at": 1, "sample_seconds": 0.01}
    # A host is free for the last batch of the first rank once the other one has ended.
    held = {"holds": [LAST], "folder": str(tmp_path)}
    ranks = [pair.paused(script=SCRIPT, rank=0, **given, **held)]
    ranks.append(pair.paused(script=SCRIPT, rank=1, **given))

    def are_ready():
        return all(one.errors.count(" agent_ready ") >= pair.agents for one in ranks)

    wait_until(are_ready, "all are ready")
    for trainer in ranks:
        trainer.go_on()
    last = ranks[1].finish()
    (tmp_path / "go").touch()
    read = [ranks[0].finish(), last]
    # Made without data hosts.
    assert read == [reference(script=SCRIPT, rank=rank) for rank in range(2)]
    samples = sum(sum(shared_samples(ranks[0], batch=number)) for number in range(4))
    assert sum(shared_samples(ranks[0], batch=3)) > 0
    feed = pair.coordinator.progress[0].feed
    assert sum(host.shared_samples for host in feed.hosts) == samples


@pytest.mark.parametrize("killed", [LAST, LAST_OF_OTHER], ids=["that collates", "that helps"])
def test_a_host_killed_at_the_last_batch_changes_nothing(pair, tmp_path, killed):
    trainer, hosts = started_to_its_end(pair, tmp_path, epochs=3)
    pair.kill(hosts[killed])
    (tmp_path / "go").touch()
    assert trainer.finish() == reference(script=SCRIPT, epochs=3)
    assert len(makers(tmp_path, killed)) > 1


def test_a_host_that_says_nothing_is_not_waited_for_at_the_end(pair, tmp_path):
    trainer, hosts = started_to_its_end(pair, tmp_path)
    pair.stop(hosts[LAST_OF_OTHER])
    (tmp_path / "go").touch()
    assert trainer.finish() == reference(script=SCRIPT)
    pair.cont(hosts[LAST_OF_OTHER])


def test_an_epoch_that_is_left_as_its_last_batch_is_shared_leaves_nothing(pair, tmp_path):
    left = {"epochs": 4, "leaves_at": [1, 3]}
    trainer, _ = started_to_its_end(pair, tmp_path, **left)
    (tmp_path / "go").touch()
    lines = reference(script=SCRIPT, epochs=4)
    assert trainer.finish() == [line for line in lines if (line["epoch"], line["batch"]) != (1, 3)]


@pytest.mark.parametrize("feed", [{"split_batches": False}, {"seeding": "torch"}])
def test_last_batches_are_made_by_one_host_each_where_that_is_set(pair, feed):
    trainer = started(pair, env=env_of(pair, **feed), sample_seconds=0.02)
    lines = trainer.finish()
    assert len(lines) == 8
    if "seeding" not in feed:
        assert lines == reference(script=SCRIPT)
    assert not any(shared_samples(trainer, batch=number) for number in range(4))


@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 8))]
)
def test_epochs_of_heavy_samples_are_the_same_whoever_makes_them(sharing, seed):
    chosen = random.Random(seed)
    heavy = {str(chosen.randrange(96)): 0.3 for _ in range(4)}
    bad = chosen.sample(range(96), 2)
    options = {"epochs": 3, "batch_size": chosen.choice([5, 8, 24, 48, 96]), "bad": bad}
    trainer = started(sharing, sample_seconds=0.004, heavy=heavy, **options)
    assert trainer.finish() == reference(script=SCRIPT, **options), seed


@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_bad_samples_of_the_last_batch_are_the_same_ones(pair, tmp_path, on_error):
    options = {"bad": [74, 85, 93], "epochs": 3}
    feed = {"on_error": on_error, "max_errors": 100}
    with Cluster(agents=1, workers=1, feed=ALWAYS) as lone:
        lone.wait_for_agents()
        expected = lone.train(script=SCRIPT, env=env_of(lone, **feed), **options).finish()
    trainer, _ = started_to_its_end(pair, tmp_path, env=env_of(pair, **feed), **options)
    (tmp_path / "go").touch()
    assert trainer.finish() == expected


def test_hosts_make_samples_of_a_batch_that_local_workers_have():
    with Cluster(agents=1, workers=1, feed=ALWAYS) as cluster:
        cluster.wait_for_agents()
        options = {"epochs": 3, "num_workers": 2, "batch_size": 12}
        # The local workers are four times as fast as the host, and get the first batch. They have
        # the cores last: samples wait for so long that this does not make them as slow as the host.
        trainer = started(cluster, workers=2, sample_seconds=0.1, slower=2, **options)
        assert trainer.finish() == reference(script=SCRIPT, **options)
        assert any(shared_samples(trainer, collator="algo-dnn"))


@pytest.mark.parametrize("bad", [[13], [2, 13], [13, 20], [11, 12]])
def test_the_error_of_the_first_sample_in_order_counts(sharing, bad):
    options = {"bad": bad, "epochs": 3}
    trainer = started(sharing, sample_seconds=0.01, **options)
    expected = reference(script=SCRIPT, **options)
    assert trainer.finish() == expected
    assert {"epoch": 2, "batch": 0, "error": f"sample {bad[0]} is broken"} in expected


@pytest.mark.parametrize(
    ("on_error", "batch_size", "spoils"),
    [
        ("skip", 24, False),
        ("skip", 48, False),
        ("replace", 24, False),
        ("replace", 48, False),
        ("skip", 24, True),
    ],
)
def test_bad_samples_of_another_host_are_the_same_ones(sharing, on_error, batch_size, spoils):
    options = {"bad": [5, 13, 14, 40], "sample_seconds": 0.01, "epochs": 3}
    options["batch_size"] = batch_size
    feed = {"on_error": on_error, "max_errors": 100}
    alone = sharing.train(
        script=SCRIPT, env=env_of(sharing, split_batches="auto", **feed), **options | {"epochs": 1}
    )
    trainer = started(sharing, env=env_of(sharing, **feed), **options, spoils=spoils)
    lines = trainer.finish()
    assert alone.finish() == lines[: 96 // batch_size]
    assert shared_samples(trainer)
