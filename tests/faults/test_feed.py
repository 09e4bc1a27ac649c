"""Checks the feed as a script meets it: real agents, real trainers, and what happens to them."""

import itertools
import json
import re

import psutil
import pytest

from support.cluster import SHORT_LEASE, Cluster, reference, wait_until
from support.tokens import new_token

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

SLOW = {"sample_seconds": 0.01}


def env_of(cluster: Cluster, **feed: object) -> dict[str, str]:
    return {"STOKER_FEED": json.dumps(cluster.settings | feed)}


@pytest.mark.parametrize(
    ("fixture", "options"),
    [
        ("host", {}),
        ("hosts", {}),
        ("host", {"num_workers": 1}),
        ("host", {"num_workers": 1, "loader": {"persistent_workers": True}}),
    ],
    ids=["one agent", "two agents", "mixed", "mixed, persistent"],
)
def test_batches_are_the_same_bytes_wherever_they_are_made(request, fixture, options):
    expected = reference(**options if "loader" in options else {})
    assert request.getfixturevalue(fixture).train(**options).finish() == expected


def test_batches_that_several_workers_make_are_the_same_bytes(host):
    env = env_of(host, split_batches=True)
    assert host.train(env=env, num_workers=2, **SLOW).finish() == reference(**SLOW)


def test_heavy_samples_of_a_data_host_change_no_byte():
    options = {"samples": 120, "batch_size": 12, **SLOW}
    with Cluster(agents=1, workers=3) as cluster:
        trainer = cluster.train(heavy=[3, 40, 77], heavy_seconds=0.6, **options)
        assert trainer.finish() == reference(**options)


def test_trainers_that_accept_no_pickles_get_what_needs_none(host):
    assert host.train(env=env_of(host, accept_pickles=False)).finish() == reference()


def test_trainers_that_accept_no_pickles_say_what_was_sent_and_what_was_raised(host):
    env = env_of(host, accept_pickles=False)
    lines = host.train(env=env, raise_at=17, objects=True, epochs=1).finish()
    found = [line for line in lines if "error" in line]
    (raised,) = (line for line in found if line["error"] == "RuntimeError")
    assert "LookupError at index 17" in str(raised["text"])
    assert "feed.accept_pickles is false" in str(raised["text"])
    refused = [str(line["text"]) for line in found if line is not raised]
    assert len(refused) == 11
    assert all("pickled (a set)" in text and "feed.accept_pickles" in text for text in refused)


@pytest.fixture(scope="module")
def around_a_host():
    found = {}
    with Cluster(agents=1, late=True, feed=SHORT_LEASE) as cluster:
        alone = cluster.paused(num_workers=1, pause_at=6)
        waiting = cluster.train(rank=1)
        wait_until(lambda: 1 in cluster.coordinator._ranks._senders, "the rank attends")
        cluster.start_agent(0)
        alone.go_on()
        found["came to local workers"] = alone.finish()
        found["was waited for"] = waiting.finish()
        helped = cluster.train(pause_at=4, num_workers=1, **SLOW)
        bereft = cluster.train(rank=1, pause_at=3, **SLOW)
        helped.until("pause")
        bereft.until("pause")
        cluster.kill(0)
        cluster.hosts[0].wait(150)
        helped.go_on()
        found["left local workers alone"] = helped.finish()
        cluster.start_agent(0)
        bereft.go_on()
        found["came back"] = bereft.finish()
    return found


def test_local_workers_alone_serve_until_agents_come(around_a_host):
    assert around_a_host["came to local workers"] == reference()


def test_training_waits_for_the_first_data_host(around_a_host):
    assert around_a_host["was waited for"] == reference(rank=1)


def test_local_workers_go_on_when_all_hosts_are_dead(around_a_host):
    assert around_a_host["left local workers alone"] == reference(**SLOW)


def test_host_that_reconnects_at_another_port_helps_again(around_a_host):
    assert around_a_host["came back"] == reference(rank=1, **SLOW)


def test_no_data_host_in_time_names_what_was_expected(nobody):
    trainer = nobody.train(env=env_of(nobody, start_deadline_seconds=1.0))
    assert trainer.end() == 5
    assert (
        "FeedLostError: no data worker came within 1 s: 2 data hosts expected, "
        "algo-0 (never came), algo-1 (never came)" in trainer.errors
    )


@pytest.mark.parametrize("num_hosts", [1, 2])
def test_a_host_with_another_token_is_named_with_that_in_the_last_words(num_hosts, tmp_path):
    other = tmp_path / "token"
    other.write_text(new_token())
    with Cluster(agents=num_hosts, late=True) as cluster:
        # In a usual run it gives up after 40 s.
        cluster.start_agent(0, token_file=str(other), key_refused_seconds=1.0)
        wait_until(lambda: cluster.coordinator.events, "it was refused")
        trainer = cluster.train(env=env_of(cluster, start_deadline_seconds=1.0))
        assert trainer.end() == 5
    # Names of local hosts have no address, so that of two it could be either.
    name = "algo-0" if num_hosts == 1 else "a host at 127.0.0.1"
    assert f"{name} (refused: its token differs)" in trainer.errors


def test_worker_killed_in_the_epoch_changes_nothing(host):
    trainer = host.paused(pause_at=5, **SLOW)
    host.kill_worker(0)
    trainer.go_on()
    assert trainer.finish() == reference(**SLOW)


def test_local_worker_killed_in_the_epoch_changes_nothing(nobody):
    trainer = nobody.paused(pause_at=5, num_workers=2, **SLOW)
    psutil.Process(trainer.process.pid).children()[0].kill()
    trainer.go_on()
    assert trainer.finish() == reference(**SLOW)
    assert "local_worker_died" in trainer.errors


def test_stopped_host_is_not_waited_for_and_its_late_answers_are_dropped(hosts):
    trainer = hosts.paused(pause_at=5, epochs=3, **SLOW)
    # The other one may have made what it has so far.
    wait_until(lambda: "agent_ready agent=algo-0" in trainer.errors, "it is asked for batches")
    hosts.stop(0)
    trainer.go_on()
    while trainer.lines[-1].get("epoch") != 1:
        trainer.until("hash")
    hosts.cont(0)
    assert trainer.finish() == reference(epochs=3, **SLOW)
    assert "batch_overdue" in trainer.errors


@pytest.fixture(scope="module")
def bereaved():
    with Cluster(agents=3, late=True, feed=SHORT_LEASE) as cluster:
        cluster.start_agent(0)
        cluster.start_agent(1)
        cluster.wait_for_agents(2)
        helped = cluster.train(rank=1, pause_at=5, **SLOW)
        trainer = cluster.train(pause_at=4, samples=200, **SLOW)
        helped.until("pause")
        trainer.until("pause")
        cluster.kill(1)
        helped.go_on()
        helped.end()
        cluster.hosts[0].terminate()
        wait_until(lambda: any("left" in e.what for e in cluster.coordinator.events), "it left")
        trainer.go_on()
        trainer.end()
    return helped, trainer


def test_host_killed_in_the_epoch_changes_nothing(bereaved):
    helped, _ = bereaved
    assert helped.finish() == reference(rank=1, **SLOW)


def test_all_hosts_gone_ends_with_code_5_and_names_each_and_when_it_was_heard(bereaved):
    _, trainer = bereaved
    assert trainer.end() == 5
    assert "stoker.errors.FeedLostError: lost all data workers" in trainer.errors
    assert "3 data hosts expected" in trainer.errors
    for fate in (
        r"algo-0 \(left, last heard \d+\.\d s ago\)",
        r"algo-1 \(lost, last heard \d+\.\d s ago\)",
        r"algo-2 \(never came\)",
    ):
        assert re.search(fate, trainer.errors), trainer.errors
    assert "batch" in trainer.errors.rpartition("where:")[2]


def test_a_loader_connects_as_it_is_made_and_says_nothing_until_it_is_iterated(host):
    def opened() -> int:
        return host.log_of(0).read_text().count("session_opened")

    before = opened()
    # A rank that no other trainer had.
    trainer = host.paused(rank=9, pause_at=-1)
    process = psutil.Process(trainer.process.pid)

    def connected() -> int:
        found = process.net_connections("tcp")
        return sum(each.status == psutil.CONN_ESTABLISHED for each in found)

    wait_until(lambda: connected() == 3, "connections to coordinator and agent")
    assert opened() == before
    assert 9 not in host.coordinator.progress
    trainer.go_on()
    assert trainer.finish() == reference(rank=9)
    assert opened() > before
    assert 9 in host.coordinator.progress


def test_two_ranks_share_the_agents(hosts):
    def held(number: int) -> set[psutil.Process]:
        # A dataset process without workers is one that was forked ahead.
        return {
            dataset_process
            for dataset_process in hosts.dataset_processes_of(number)
            if dataset_process.children()
        }

    def arrived(number: int) -> int:
        return hosts.log_of(number).read_text().count("spec_received")

    before = [(held(number), arrived(number)) for number in range(2)]
    ranks = [hosts.train(rank=rank, world=2, pause_at=2) for rank in range(2)]
    for trainer in ranks:
        trainer.until("pause")
        # One agent alone may have made what they have so far.
        for name in ("algo-0", "algo-1"):
            wait_until(
                lambda trainer=trainer, name=name: f"agent_ready agent={name}" in trainer.errors,
                name,
            )
    for number, (held_before, arrived_before) in enumerate(before):
        # The dataset is a class of the script: it is held, and has workers, once for both.
        wait_until(lambda n=number, had=held_before: len(held(n) - had) == 1, "one process")
        assert arrived(number) == arrived_before + 1
    for trainer in ranks:
        trainer.go_on()
    found = [trainer.finish() for trainer in ranks]
    first = [line["ids"] for lines in found for line in lines if line.get("epoch") == 0]
    assert sorted(itertools.chain(*first)) == list(range(48))
    assert found == [reference(rank=rank, world=2) for rank in range(2)]
    assert found[0][0]["hash"] != found[1][0]["hash"]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_broken_sample_is_named_and_the_epoch_goes_on(host, num_workers):
    found = host.train(raise_at=17, num_workers=num_workers).finish()
    expected = reference(raise_at=17)
    errors = [line for line in found if "error" in line]
    assert len(errors) == 2
    for line in errors:
        assert "LookupError" in line["kinds"]
        assert "sample 17 is broken" in line["text"]
        assert "index 17 of data worker" in line["text"]
        assert "on host algo-" in line["text"]
    keep = [line for line in found if "hash" in line]
    assert keep == [line for line in expected if "hash" in line]


# That the run of a launcher ends with a trainer's code and words: tests/faults/test_feed_lost.py.
def test_sys_exit_in_a_dataset_keeps_its_code_in_the_words(host):
    trainer = host.train(workers=0, exit_at=17)
    assert trainer.end() == 5
    (said,) = [line for line in trainer.errors.splitlines() if line.startswith("stoker.errors.")]
    assert "exit code 3" in said
    assert "memory" not in trainer.errors


ERROR, LOCAL = ({"unshippable": each} for each in ("error", "local"))


@pytest.mark.parametrize(("num_workers", "feed"), [(1, {}), (0, ERROR), (1, ERROR)])
def test_dataset_that_cannot_travel_is_named(nobody, num_workers, feed):
    trainer = nobody.train(env=env_of(nobody, **feed), lock=True, num_workers=num_workers)
    assert trainer.end() == 5
    assert "ShippingError: cannot send dataset.lock (_thread.lock)" in trainer.errors


@pytest.mark.parametrize(("num_workers", "feed"), [(0, {}), (0, LOCAL), (2, LOCAL)])
def test_dataset_that_cannot_travel_is_made_as_torch_makes_it(nobody, num_workers, feed):
    given = {"lock": True, "num_workers": num_workers, "loaders": 2}
    trainer = nobody.train(env=env_of(nobody, **feed), **given)
    assert trainer.finish() == reference(loaders=2, num_workers=num_workers)
    said = [line for line in trainer.errors.splitlines() if "loader_not_shippable" in line]
    # Once a loader, not once an epoch.
    assert len(said) == 2
    assert "cannot send dataset.lock (_thread.lock)" in said[0]
    assert "without help of data hosts" in said[0]


def test_what_cannot_travel_of_an_unchanged_script_is_made_as_torch_makes_it(nobody):
    env = env_of(nobody) | {"STOKER_REPLACE_DATALOADER": "auto"}
    trainer = nobody.train(env=env, lock=True, num_workers=2, is_torchs=True)
    assert trainer.finish() == reference(num_workers=2)
    assert trainer.errors.count("loader_not_shippable") == 1


def test_dataset_that_no_host_can_read_is_named(host):
    # Workers of its own, which do not read it back, may have made all before the host says so.
    trainer = host.train(workers=0, unreadable=True, num_workers=1)
    assert trainer.end() == 5
    said = "dataset.noise (__main__.Unreadable) cannot be read back from its pickle"
    assert said in trainer.errors
    assert "missing 1 required positional argument" in trainer.errors


KEPT = {"persistent_workers": True}


def num_failed_specs(host: Cluster) -> int:
    return host.log_of(0).read_text().count(" spec_failed ")


@pytest.mark.parametrize(
    ("given", "feed"),
    [
        ({"num_workers": 0}, {}),
        ({"num_workers": 2}, {**LOCAL, "local_workers": 0}),
        ({"num_workers": 2, "loader": KEPT}, LOCAL),
    ],
)
def test_dataset_that_no_host_can_read_is_made_here(host, given, feed):
    before = num_failed_specs(host)
    # Else workers of its own may have made all before the host says that it cannot read them.
    trainer = host.paused(pause_at=1, env=env_of(host, **feed), unreadable=True, loaders=2, **given)
    wait_until(lambda: num_failed_specs(host) == before + 2, "the host has answered of both")
    trainer.go_on()
    assert trainer.finish() == reference(unreadable=True, loaders=2, **given)
    said = [line for line in trainer.errors.splitlines() if "loader_not_shippable" in line]
    # Once a loader, not once an epoch.
    assert len(said) == 2
    assert "dataset.noise (__main__.Unreadable) cannot be read back from its pickle" in said[0]
    assert "without help of data hosts" in said[0]


def test_decided_workers_replace_the_scripts(nobody):
    trainer = nobody.train(num_workers=0, workers=2)
    assert trainer.finish() == reference()


def test_trainer_killed_leaves_no_local_worker(host):
    trainer = host.paused(pause_at=3, num_workers=2)
    workers = psutil.Process(trainer.process.pid).children()
    assert len(workers) == 2
    trainer.process.kill()
    trainer.end()
    assert not psutil.wait_procs(workers, timeout=150)[1]


def test_wrong_token_gets_nothing(host):
    other = host.folder / "other"
    other.write_text("ab" * 32)
    env = env_of(host, start_deadline_seconds=2.0) | {"STOKER_TOKEN_FILE": str(other)}
    trainer = host.train(env=env)
    assert trainer.end() != 0
    assert "did not answer" in trainer.errors


def test_a_crash_of_the_io_thread_is_an_error_and_no_hang(host):
    trainer = host.train(script="crash_script.py")
    assert trainer.end() == 0, (trainer.lines, trainer.errors)
