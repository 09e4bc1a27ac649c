"""Each state that a profile names is produced for real, and found: processes, quotas, a network."""

import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from stoker.profile import explain
from stoker.profile.combine import combine
from stoker.profile.rank_results import read_ranks
from stoker.profile.states import others_vcpus
from stoker.records import Profile, ProfileSettings, ProfileState, TodaysGroup
from support.cpu_quota import cpu_quota, measures, quiet_cpus
from support.narrow_network import narrow_network
from support.processes import started
from support.states_script import BATCH, SAMPLE_BYTES
from support.warm_python import WarmProcess, clean_environ

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "support" / "states_script.py"
STARTUP = ROOT / "src" / "stoker" / "startup"
DEADLINE_SECONDS = 150.0
BUDGET_SECONDS = 5.0


@dataclass
class Job:
    folder: Path
    ranks: "list[WarmProcess | subprocess.Popen[bytes]]"
    profile: Profile | None = None

    def result(self) -> Profile:
        if self.profile is None:
            codes = [rank.wait(DEADLINE_SECONDS) for rank in self.ranks]
            assert set(codes) == {0}, (self.folder / "log").read_text()
            self.profile = combine(
                read_ranks(self.folder),
                group=TodaysGroup(instance_type="local.c2"),
                settings=ProfileSettings(),
                what={},
            )
        return self.profile

    def states(self) -> dict[str, ProfileState]:
        found = {state.id: state for state in self.result().states}
        print(explain(self.result()), *read_ranks(self.folder), sep="\n")
        return found


@contextlib.contextmanager
def unless_disturbed(job: Job, *, others: float = 0.6) -> Iterator[dict[str, ProfileState]]:
    """Gives what was found; skips if it is unexpected, and others had most of the CPUs."""
    found = job.states()
    try:
        yield found
    except AssertionError as err:
        first = read_ranks(job.folder)[0]
        busy = others_vcpus([first])
        if busy <= others * first.vcpus:
            raise
        pytest.skip(f"others kept {busy:.1f} vCPUs busy: {err}")


def start(name, *, jobs, stack, ranks=1, budget=BUDGET_SECONDS, group=None, enter=(), **asked):
    folder = jobs / name
    folder.mkdir()
    words = [f"{key}={value}" for key, value in asked.items()]
    words += [f"group={group}"] if group else []
    asked_for = f'{{"budget_seconds": {budget}}}'
    environ = clean_environ(STOKER_OUTPUT=str(folder), RUN_PROFILE=asked_for)
    if enter:
        environ |= {"PYTHONPATH": os.pathsep.join([str(STARTUP), str(ROOT / "src")])}
        environ |= {"STOKER_LAUNCHER_PID": str(os.getpid())}
    if ranks > 1:
        # Not a port: another program may have it by the time that it is wanted.
        words += [f"store={folder / 'store'}"]
        environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    job = Job(folder, [])
    for rank in map(str, range(ranks)):
        own = environ | ({"RANK": rank, "LOCAL_RANK": rank} if ranks > 1 else {})
        if enter:
            command = [*enter, sys.executable, str(SCRIPT), *words]
            process = started(command, folder / "log", env=own)
        else:
            with (folder / "log").open("ab") as log:
                process = WarmProcess([str(SCRIPT), *words], own, log=log)
        stack.callback(process.wait)
        stack.callback(process.kill)
        job.ranks.append(process)
    return job


@pytest.fixture
def begin(tmp_path):
    with contextlib.ExitStack() as stack:
        yield functools.partial(start, jobs=tmp_path, stack=stack)


@pytest.fixture(scope="module")
def group():
    with quiet_cpus() as found:
        yield found


@pytest.fixture(scope="module")
def idle(tmp_path_factory, group):
    """Starts jobs that leave half of two CPUs idle, all at the same time."""
    with contextlib.ExitStack() as stack:
        folder = tmp_path_factory.mktemp("idle")
        begin = functools.partial(start, jobs=folder, stack=stack, group=group)
        started = {
            "late rank": begin(
                "late", ranks=2, budget=7, workers=1, model_ms=20, late_rank=1, late_ms=80
            ),
            "accelerator": begin("accelerator", workers=1, model_ms=40),
        }
        # Where there is none, its test is skipped, not these.
        with contextlib.suppress(pytest.skip.Exception):
            line = stack.enter_context(narrow_network(mbit=8, answer_bytes=SAMPLE_BYTES))
            started["network"] = begin(
                # A packet that is lost costs its worker half a second: not in most of its batches.
                "network",
                budget=9,
                enter=line.enter,
                workers=2,
                model_ms=5,
                server=line.server,
            )
        yield started


@measures
def test_a_rank_whose_reads_wait_is_named_and_so_is_what_it_waits_for(idle):
    with unless_disturbed(idle["late rank"]) as found:
        assert {"straggler", "workers"} <= set(found)
        assert "it waits for its data, not for a CPU" in found["workers"].text
        assert "rank 1" in found["straggler"].text
        assert found["straggler"].share == pytest.approx(0.7, abs=0.2)
        assert "cpu" not in found
        assert "straggler" in {fix.id for fix in idle["late rank"].result().fixes}


@measures
def test_an_accelerator_that_sets_the_pace_is_named_alone(idle):
    with unless_disturbed(idle["accelerator"]) as found:
        # Neighbours of this machine are none of the training's.
        assert set(found) - {"other-programs"} == {"accelerator"}


@measures
@pytest.mark.root
def test_a_narrow_network_is_what_a_loader_waits_for(idle):
    if "network" not in idle:
        pytest.skip("no network namespaces here")
    job = idle["network"]
    with unless_disturbed(job) as found:
        assert next(name for name in found if name != "other-programs") == "storage"
        assert not {"workers", "cpu"} & set(found)
        # 8 Mbit/s carry a batch of 49 kB in 49 ms.
        step = job.result().step.step_seconds
        assert step == pytest.approx(BATCH * SAMPLE_BYTES * 8 / 8e6, rel=0.3)
        check = job.result().check
        # What workers share is one of the parts.
        assert check.explained


@measures
def test_one_worker_beside_idle_cpus_is_too_few(begin, group):
    # Not with the jobs of `idle`: on slow cores these leave no idle CPU to a second worker.
    job = begin("few", workers=1, model_ms=5, burn_ms=20, sleep_ms=15, group=group)
    # Idle CPUs are what this is about.
    with unless_disturbed(job, others=0.3) as found:
        assert "workers" in found
        assert "busy" in found["workers"].text
        assert not {"cpu", "storage", "accelerator"} & set(found)
        assert "num_workers" in {fix.id for fix in job.result().fixes}


@pytest.mark.root
def test_too_many_workers_under_a_quota_are_throttled_cpu_bound_and_told_to_be_fewer(begin):
    with cpu_quota(vcpus=0.6) as group:
        # Long enough that 2 and 5 workers load dozens of batches: a quota gives its CPU in bursts.
        job = begin("quota", budget=14, workers=5, model_ms=5, burn_ms=8, group=group)
        with unless_disturbed(job) as found:
            assert {"cpu", "throttled"} <= set(found)
            assert not {"workers", "accelerator", "gil"} & set(found)
            assert "0.6 vCPUs" in found["cpu"].text
            fixes = {fix.id: fix.text for fix in job.result().fixes}
            assert "throttled" in fixes
            assert max(map(len, explain(job.result()).splitlines())) <= 88
