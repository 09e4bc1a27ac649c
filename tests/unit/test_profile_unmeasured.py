import json
import sys

import msgspec
import pytest

from stoker.feed.resource_usage import LoaderUsage, RankUsage
from stoker.figures.passive_profile import FILE, MIN_STEPS, UNMEASURED
from stoker.profile import explain
from stoker.profile.profiled_job import (
    _CPU_NOTE,
    NOTE,
    CommandUsage,
    Heard,
    ProcessReport,
    ProfiledCommand,
    UnmeasuredError,
    fix_of_missing_module,
    no_verdict,
    notebook_refusal,
    read_seen,
    timed_profile,
    too_few,
    unmeasured,
)
from stoker.profile.rank_results import RankResult
from stoker.profile.steps import NO_BATCH
from stoker.records import ProfiledLoader, ProfileSettings, TodaysGroup, write_json
from support import builders
from support.profiled_ranks import changed, rank_of

TORCH = ProcessReport(packages=("torch", "json"))
USED = CommandUsage(wall_seconds=10.0, cpu_seconds=5.0, vcpus=2, hosts=1)
END = (
    "stoker 2026-11-20T08:00:00.123Z run=r host={host} command_ended pid=1 returncode=0 "
    "wall_seconds={wall} cpu_seconds=4.0 vcpus=2"
)


def rank(*, missing: str = "the script ended after 6 batches", number: int = 0) -> RankResult:
    whole = rank_of(rank=number, world_size=2 if number else 1, vcpus=2, workers=3)
    return changed(whole, missing=missing, as_is=None, accelerator=None)


def reason(
    *ranks: RankResult, command: tuple[str, ...] = ("python", "train.py"), **given: object
) -> UnmeasuredError:
    subject = ProfiledCommand(
        command=command,
        group=TodaysGroup(instance_type="local.c2"),
        settings=ProfileSettings(),
        what={"when": "now"},
        workload_sha256=None,
        workload_keys={},
    )
    known = {"seen": (TORCH,), "used": USED, "timed": ""}
    return unmeasured(ranks, subject=subject, **known | given)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (reason(rank()), "ended too soon: after 6 batches"),
        (reason(rank(number=1)), "(rank 1)"),
        (
            reason(changed(rank(missing="3 of the 20 steps needed"), needed_seconds=310.0)),
            "needs a longer budget: 3 of the 20 steps needed",
        ),
        (reason(rank(missing=NO_BATCH)), "the script ended, and its loader gave no batch"),
        (reason(changed(rank(), ended_before="overwrite a.pt")), "was about to overwrite a.pt"),
        (reason(rank(missing="")), "it was cut off"),
        (reason(), "imported torch and never read from a DataLoader of torch"),
        (reason(seen=(ProcessReport(packages=("torch", "tensorflow")),)), "but uses tf.data"),
        (reason(seen=(ProcessReport(packages=("torch", "nvidia.dali")),)), "but uses DALI"),
        (reason(seen=(ProcessReport(packages=("jax",)),)), "never imported torch; it uses jax"),
        (reason(seen=()), "no Python process of the command could be profiled"),
        (reason(seen=(ProcessReport(problem="ModuleNotFoundError: x"),)), "ModuleNotFoundError: x"),
        (reason(seen=(ProcessReport(packages=("ipykernel",)),)), "in which no DataLoader"),
        (reason(rank(), command=("jupyter", "nbconvert", "a.ipynb")), "a notebook ran, and ended"),
        (reason(command=("papermill", "a.ipynb", "b.ipynb")), "a notebook ran"),
    ],
    ids=range(15),
)
def test_each_reason_has_its_own_words(error, words):
    assert words in error.what
    assert error.fix
    assert error.exit_code == 2


def test_a_profile_that_timed_out_while_its_script_compiled_names_a_budget():
    compiling = no_verdict([changed(rank(), steps=1)], budget_seconds=180.0)
    assert "--budget 480" in compiling.fix
    assert "reach its first batch sooner" in no_verdict([], budget_seconds=180.0).fix


def test_what_was_observed_is_said_and_is_a_record():
    error = reason(rank())
    assert "it ran 10.0 s and used 5.0 CPU-seconds: 25% of 2 vCPUs" in error.where
    assert "num_workers=3" in error.where
    assert "or lower profile.budget_seconds (--budget)" in error.fix
    assert error.observed.step is None
    assert error.observed.observed.cpu_utilization == 0.25
    assert error.observed.what["when"] == "now"
    assert (reason(used=None).observed, reason(used=None).where) == (None, "")


def test_a_launchers_last_line_is_heard_and_others_are_not():
    heard = Heard()
    for line in ("command_ended by the user", "stoker command_ended", "loss 0.1"):
        heard.line(line)
    assert heard.used is None
    heard.line(END.format(host="algo-1", wall=3.0))
    heard.line(END.format(host="algo-2", wall=5.0))
    assert heard.used == CommandUsage(wall_seconds=5.0, cpu_seconds=8.0, vcpus=2, hosts=2)
    assert heard.used.utilization == pytest.approx(8.0 / 20.0)


def test_what_processes_left_is_read_and_a_torn_file_is_passed_over(tmp_path):
    (tmp_path / "seen-1.json").write_text(json.dumps({"packages": ["torch"], "problem": ""}))
    (tmp_path / "seen-2.json").write_text('{"packages": [')
    assert read_seen(tmp_path) == [ProcessReport(packages=("torch",))]


@pytest.mark.parametrize(
    ("command", "is_refused"),
    [
        (("python", "train.ipynb"), True),
        (("/usr/bin/python3", "-u", "train.ipynb"), True),
        (("python", "train.py"), False),
        (("python", "-m", "jupyter", "execute", "train.ipynb"), False),
        (("jupyter", "execute", "train.ipynb"), False),
    ],
)
def test_a_notebook_given_as_a_script_is_refused(command, is_refused):
    refused = notebook_refusal(command, where="command line")
    assert (refused is not None) == is_refused
    if refused:
        assert "--to script train.ipynb, then: stoker profile -- python train.py" in refused.fix


def test_a_loader_of_a_library_that_the_feed_cannot_reach_is_in_the_profile():
    loader = "fastai.data.load.DataLoader"
    report = ProcessReport(packages=("torch", "fastai"), loaders=(loader,))
    error = reason(seen=(report,))
    assert f"{loader} makes batches in its own way, so that data hosts cannot help it" in str(error)
    assert error.observed.loader == ProfiledLoader(class_name=loader, reach="own")
    # A library that is only imported is not what the script reads.
    assert reason(rank(), seen=(report,)).observed.loader is None


def test_a_script_that_ended_after_a_few_timed_batches_is_told_so(tmp_path):
    def told(*, steps: int) -> UnmeasuredError:
        own = LoaderUsage(steps=steps, is_elsewhere=True)
        content = msgspec.json.encode(RankUsage(rank=0, loaders={0: own}))
        (tmp_path / "usage-rank0.json").write_bytes(content)
        return reason(seen=(ProcessReport(packages=("tensorflow",)),), timed=too_few(tmp_path))

    error = told(steps=3)
    assert "after 4 batches of stoker.timed" in error.what
    assert "longer" in error.fix
    # Else its users are told of stoker.timed.
    fix = told(steps=MIN_STEPS).fix
    assert "stoker.timed(batches)" in fix
    assert "stoker.keras.timed" in fix


def test_the_timed_steps_are_the_profile_where_no_loader_was_measured(tmp_path):
    assert timed_profile(tmp_path, [], what={}) is None
    what = {"passive": True, "steps": 40, "status": "failed"}
    passive = builders.profile("local.c2", step_seconds=0.1, wait_seconds=0.05, what=what)
    write_json(tmp_path / FILE, passive)
    assert timed_profile(tmp_path, [], what={}) is None
    write_json(tmp_path / FILE, msgspec.structs.replace(passive, unmeasured=UNMEASURED))
    found = timed_profile(tmp_path, [rank()], what={"when": "now"})
    assert found.what == {"steps": 40, "when": "now", "notes": [NOTE, _CPU_NOTE]}
    verdict = explain(found)
    assert verdict.startswith("50% of a step is waiting for data; what making it costs")
    assert "note: only the steps as they are" in verdict


def test_a_missing_module_is_installed_from_the_requirements_next_to_the_script(tmp_path):
    command = ("python", str(tmp_path / "train.py"), "--data", "other.py")
    found = fix_of_missing_module("PIL.Image", command)
    assert found == f"install the package of module PIL for {sys.executable}"
    (tmp_path / "requirements.txt").write_text("pillow")
    found = fix_of_missing_module("PIL.Image", command)
    assert found == f"{sys.executable} -m pip install -r {tmp_path / 'requirements.txt'}"
