"""A pipeline's memory: runs that passed, read by the next one; a bad memory never ends a run."""

import itertools
import json
import threading

import msgspec
import pytest

from stoker.catalog import load_catalog
from stoker.decide import LastRun, remembered
from stoker.records import Comparison, Decision, read_json, write_json
from stoker.records.memory import compared, remembered_run, workload_facts
from stoker.records.training import InputVersion, Lineage
from stoker.run.earlier_runs import memory_in
from stoker.run.pipeline_memory import keep_run, remembered_runs
from support import builders, decisions, sample_records
from support.command import stoker

replace = msgspec.structs.replace
TYPES = ("ml.g5.8xlarge", "ml.c7i.4xlarge", "ml.c7i.12xlarge")
FACTS = {"image": "sha256:1", "code": "sha256:2", "channel.train": "sha256:3"}


def workload(name="mnist", *overrides):
    return builders.workload(name, "platform=sagemaker", *overrides)


def profile(loading=6.1):
    """Returns a profile whose loading takes these CPU-seconds of 32 vCPUs."""
    seconds = max(0.08, loading / 31)
    return builders.starved(loader_cpu_seconds=loading, step_seconds=seconds, predicted=seconds)


def decided(loading=6.1):
    limits = {"max_data_hosts": 2, "allowed_instance_types": TYPES}
    return decisions.decided(profile(loading), catalog=load_catalog("sagemaker"), **limits)


def trained(decision, *, day):
    record = sample_records.training()
    events = tuple(replace(event, when=f"{day}T08:15:41Z") for event in record.events)
    job = replace(record.job, platform="sagemaker")
    return replace(record, events=events, job=job, groups=decision.plan.groups)


def run_of(run="mnist--a", *, day="2026-11-20", loading=6.2, made_of=FACTS, **about):
    decision = decided(loading)
    of = {"workload": workload(), "branch": "", "execution": "", "now": f"{day}T09:00:00Z", **about}
    records = (profile(loading), decision, trained(decision, day=day))
    return remembered_run(run=run, made_of=made_of, records=records, **of)


def test_a_run_is_read_as_it_was_written(tmp_path):
    run = run_of()
    keep_run(tmp_path, run)
    assert remembered_runs(tmp_path, workload=workload()).runs == (run,)


LINEAGES = {
    "the same": ({"version": FACTS["channel.train"]}, FACTS["image"], []),
    "not known": ({"version": None}, None, []),
    "data that changed meanwhile": ({"version": "sha256:9"}, FACTS["image"], ["channel.train"]),
    "a tag that was pushed again": ({"version": None}, "sha256:9", ["image"]),
}


@pytest.mark.parametrize(("data", "image", "lost"), LINEAGES.values(), ids=LINEAGES)
def test_what_the_training_saw_otherwise_is_no_fact_of_its_run(data, image, lost):
    """Red before: it trained on other data than its first step saw, and was taken for the same."""
    lineage = Lineage(image_digest=image, inputs={"train": InputVersion(address="a", **data)})
    training = replace(trained(decided(), day="2026-11-20"), lineage=lineage)
    about = {"branch": "", "execution": "", "now": "", "made_of": FACTS}
    records = (profile(), decided(), training)
    run = remembered_run(workload=workload(), run="a", records=records, **about)
    assert FACTS.keys() - run.made_of.keys() == set(lost)
    assert compared(FACTS, unknown={}, last=run).has_changed == bool(lost)
    # A name by digest is no other image, however the cluster spells it.
    pinned = replace(workload(), image=f"a/b@sha256:{'1' * 64}")
    run = remembered_run(workload=pinned, run="a", records=records, **about)
    assert "image" in run.made_of


def test_metrics_that_are_no_numbers_do_not_spoil_the_memory(tmp_path):
    training = replace(trained(decided(), day="2026-11-20"), metrics={"loss": float("nan")})
    about = {"branch": "", "execution": "", "now": "2026-11-20T09:00:00Z", "made_of": {}}
    records = (profile(), decided(), training)
    keep_run(tmp_path, remembered_run(workload=workload(), run="a", records=records, **about))
    assert remembered_runs(tmp_path, workload=workload()).runs


def test_the_newest_run_is_first_and_of_the_branch_that_asks(tmp_path):
    for day, branch in (("2026-11-06", ""), ("2026-11-20", "-Large"), ("2026-11-13", "")):
        keep_run(tmp_path, run_of(f"mnist--{day}", day=day, branch=branch))
    runs = remembered_runs(tmp_path, workload=workload()).runs
    assert [run.run for run in runs] == ["mnist--2026-11-13", "mnist--2026-11-06"]
    (large,) = remembered_runs(tmp_path, workload=workload(), branch="-Large").runs
    assert large.run == "mnist--2026-11-20"


def test_a_step_that_was_repeated_has_one_run(tmp_path):
    keep_run(tmp_path, run_of(day="2026-11-20"))
    keep_run(tmp_path, run_of(day="2026-11-21"))
    assert len(remembered_runs(tmp_path, workload=workload()).runs) == 1


def test_runs_that_end_at_once_are_all_remembered(tmp_path):
    runs = [run_of(f"mnist--{number}") for number in range(8)]
    writers = [threading.Thread(target=keep_run, args=(tmp_path, run)) for run in runs]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    names = {run.run for run in remembered_runs(tmp_path, workload=workload()).runs}
    assert names == {run.run for run in runs}


def test_only_the_newest_files_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("stoker.run.pipeline_memory._MOST_KEPT", 3)
    for day in range(1, 7):
        keep_run(tmp_path, run_of(f"mnist--{day}", day=f"2026-11-0{day}"))
    names = [run.run for run in remembered_runs(tmp_path, workload=workload()).runs]
    assert names == ["mnist--6", "mnist--5", "mnist--4"]


BROKEN = {
    "empty": "",
    "half": '{"schema": "stoker.memory/v1", "pipel',
    "no record": "[]",
    "newer": '{"schema": "stoker.memory/v9"}',
    "unknown key": '{"schema": "stoker.memory/v1", "color": 3}',
    "binary": "\x00\x01",
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_a_newest_file_that_cannot_be_read_is_told_and_no_older_run_takes_its_place(tmp_path, text):
    keep_run(tmp_path, run_of(day="2026-11-06"))
    (tmp_path / "20261120T080000Z--mnist--b.json").write_text(text)
    found = memory_in(tmp_path, workload=workload())
    assert found.last is None
    assert "20261120T080000Z--mnist--b.json cannot be read" in found.why_not
    decision = decided(1.5)
    told = found.applied(decision)
    assert told.plan == decision.plan
    assert "decided without the last run's plan" in told.warnings[-1]


def test_the_memory_of_another_pipeline_is_told(tmp_path):
    keep_run(tmp_path, run_of(workload=workload("other")))
    found = memory_in(tmp_path, workload=workload())
    assert found.last is None
    assert "is the memory of other, not of mnist" in found.why_not


@pytest.mark.parametrize("kind", ["missing", "empty", "a file", "other files"])
def test_before_the_first_run_there_is_no_memory_and_no_warning(tmp_path, kind):
    folder = tmp_path / "memory"
    if kind == "a file":
        folder.write_text("")
    elif kind != "missing":
        folder.mkdir()
    if kind == "other files":
        (folder / "README.txt").write_text("Runs that passed.")
    found = memory_in(folder, workload=workload())
    assert (found.last, found.why_not) == (None, "")


def test_a_run_of_another_command_is_not_the_last_one(tmp_path):
    own = workload("mnist", 'command=["python", "other.py"]')
    run = run_of()
    keys = workload().profile_keys()
    decision = replace(run.decision, workload_keys=keys, workload_sha256=workload().digest())
    keep_run(tmp_path, replace(run, decision=decision))
    assert memory_in(tmp_path, workload=workload()).last is not None
    assert memory_in(tmp_path, workload=own).last is None


def test_a_decision_in_another_region_forgets_the_last_plan(tmp_path):
    run = run_of()
    prices = replace(run.decision.prices, region="eu-west-1")
    keep_run(tmp_path, replace(run, decision=replace(run.decision, prices=prices)))
    found = memory_in(tmp_path, workload=workload()).applied(decided(3.8))
    assert "other prices" in found.previous.forgotten


def hosts_of(decision):
    return [(group.instance_type, group.count) for group in decision.plan.groups]


def held_loading():
    """Returns a loading whose own best plan does not replace that of 6.2 by the margin."""
    last = LastRun(run="a", decision=decided(6.2), training=trained(decided(6.2), day="2026-11-20"))
    for loading in (4.2, 4.0, 3.8, 3.6, 3.4, 3.2):
        if remembered(decided(loading), last).previous.is_held:
            return loading
    raise AssertionError("no decision was held")


def test_a_plan_is_held_by_the_memory_of_a_pipeline(tmp_path):
    keep_run(tmp_path, run_of("mnist--a", loading=6.2))
    loading = held_loading()
    fresh = decided(loading)
    found = memory_in(tmp_path, workload=workload()).applied(fresh)
    assert found.previous.is_held
    assert hosts_of(found) == hosts_of(decided(6.2)) != hosts_of(fresh)
    assert found.plan.reason.startswith("as in mnist--a of 2026-11-20: ")


def step_files(folder, loading):
    folder.mkdir(exist_ok=True)
    write_json(folder / "profile.json", profile(loading))
    limits = {"max_data_hosts": 2, "allowed_instance_types": list(TYPES)}
    document = {
        "name": "mnist",
        "command": ["python", "train.py"],
        "platform": "sagemaker",
        "constraints": limits,
        "gate": [{"metric": "accuracy", "min": 0.9}],
    }
    (folder / "workload.json").write_text(json.dumps(document))


def decide_by(folder, *words):
    names = ("decide", "profile.json", "--workload", "workload.json", "--out", "decision.json")
    done = stoker(*names, *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    return read_json(folder / "decision.json", Decision), done.stdout


def evaluate_by(folder, memory, *words, **training):
    decision = read_json(folder / "decision.json", Decision)
    record = replace(trained(decision, day=training.pop("day", "2026-11-20")), **training)
    write_json(folder / "training.json", record)
    files = ("--profile", "profile.json", "--decision", "decision.json", "--training")
    words = ("--remember", str(memory), "--always", *words)
    done = stoker("evaluate", "workload.json", *files, "training.json", *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done


def test_decide_keeps_to_the_plan_that_evaluate_has_remembered(tmp_path):
    memory = tmp_path / "memory"
    step_files(tmp_path / "first", 6.2)
    first, _ = decide_by(tmp_path / "first", "--memory", str(memory))
    assert first.previous is None
    evaluate_by(tmp_path / "first", memory)
    step_files(tmp_path / "second", held_loading())
    alone, _ = decide_by(tmp_path / "second")
    held, told = decide_by(tmp_path / "second", "--memory", str(memory))
    assert hosts_of(held) == hosts_of(first) != hosts_of(alone)
    assert held.previous.is_held
    assert "as in mnist-20261120-081500 of 2026-11-20" in told


REFUSED = {
    "failed": {"status": "failed", "exit_code": 1},
    "stopped": {"status": "stopped"},
    "below its gate": {"metrics": {"accuracy": 0.5}},
    "without its metric": {"metrics": {}},
}


@pytest.mark.parametrize("training", REFUSED.values(), ids=REFUSED)
def test_a_run_that_did_not_pass_is_not_remembered(tmp_path, training):
    step_files(tmp_path / "run", 6.2)
    decide_by(tmp_path / "run")
    evaluate_by(tmp_path / "run", tmp_path / "memory", **training)
    assert not (tmp_path / "memory").exists()


def test_a_memory_that_cannot_be_written_does_not_fail_the_run(tmp_path):
    step_files(tmp_path / "run", 6.2)
    decide_by(tmp_path / "run")
    (tmp_path / "memory").write_text("")
    done = evaluate_by(tmp_path / "run", tmp_path / "memory" / "below")
    assert "this run is not remembered" in done.stdout + done.stderr


def test_decide_corrects_its_prediction_by_the_runs_of_the_pipeline(tmp_path):
    memory = tmp_path / "memory"
    step_files(tmp_path / "run", 6.2)
    digest = workload().digest()
    write_json(tmp_path / "run" / "profile.json", replace(profile(6.2), workload_sha256=digest))
    decision, _ = decide_by(tmp_path / "run")
    measured = sample_records.training().measured
    slower = replace(measured, step_seconds=decision.plan.predicted.step_seconds * 1.2)
    for day in range(1, 4):
        record = {"measured": slower, "workload_sha256": digest, "day": f"2026-11-0{day}"}
        job = replace(sample_records.training().job, name=f"mnist--{day}", platform="sagemaker")
        evaluate_by(tmp_path / "run", memory, job=job, **record)
    corrected, _ = decide_by(tmp_path / "run", "--memory", str(memory))
    assert corrected.calibration.runs == 3
    assert corrected.previous.run == "mnist--3"


def test_facts_that_are_the_same_change_nothing():
    found = compared(FACTS, unknown={}, last=run_of())
    assert not found.has_changed
    assert found.words.startswith("nothing changed since mnist--a of 2026-11-20: skipped")
    assert found.since == "mnist--a"


@pytest.mark.parametrize("fact", FACTS)
def test_a_fact_that_differs_is_new_or_gone_trains_and_is_named(fact):
    without = {name: each for name, each in FACTS.items() if name != fact}
    for here, there in itertools.permutations([FACTS, without, {**FACTS, fact: "sha256:9"}], 2):
        found = compared(here, unknown={}, last=run_of(made_of=there))
        assert found.has_changed
        assert fact in found.words


def test_what_is_not_known_trains_and_says_why():
    found = compared(FACTS, unknown={"image": "access denied"}, last=run_of())
    assert found.has_changed
    assert "image: access denied" in found.words
    nothing = compared(FACTS, unknown={}, last=run_of(made_of={}))
    assert nothing.has_changed


@pytest.mark.parametrize(
    ("override", "fact"),
    [
        ("training.epochs=7", "workload.training"),
        ("hyperparameters.lr=0.5", "workload.hyperparameters"),
        ("constraints.max_data_hosts=3", "workload.constraints"),
        ("environment.DEBUG=yes-please", "workload.environment"),
        ('command=["python", "b.py"]', "workload.command"),
        ("watchdog.then=stop", None),
        ("skip_unchanged=true", None),
        ("on_no_capacity.wait_minutes=7", None),
        ("image=mine:2", None),
    ],
)
def test_a_key_that_changes_the_model_is_a_fact(override, fact):
    before, after = workload_facts(workload()), workload_facts(workload("mnist", override))
    changed = [name for name in after if before.get(name) != after[name]]
    assert changed == ([fact] if fact else [])


def compare_in(folder, *words):
    done = stoker("compare", "workload.json", "--memory", "memory", *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    return read_json(folder / "comparison.json", Comparison)


@pytest.fixture
def compared_folder(tmp_path):
    step_files(tmp_path, 6.2)
    document = json.loads((tmp_path / "workload.json").read_text())
    document |= {
        "skip_unchanged": True,
        "image": "mine:1",
        "channels": {"train": {"uri": "pvc://a"}},
    }
    (tmp_path / "workload.json").write_text(json.dumps(document))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.csv").write_text("1\n")
    return tmp_path


WORDS = ("--image-digest", "sha256:1", "--code", "sha256:2", "--channel", "train=data")


def test_the_second_run_is_skipped_and_one_with_other_data_trains(compared_folder):
    first = compare_in(compared_folder, *WORDS)
    assert first.has_changed
    assert "no run of this pipeline is remembered yet" in first.words
    decide_by(compared_folder)
    evaluate_by(compared_folder, "memory", "--comparison", "comparison.json")
    second = compare_in(compared_folder, *WORDS)
    assert not second.has_changed, second.words
    forced = compare_in(compared_folder, *WORDS, "--param", "skip_unchanged=false")
    assert forced.has_changed
    (compared_folder / "data" / "b.csv").write_text("2\n")
    third = compare_in(compared_folder, *WORDS)
    assert third.has_changed
    assert "channel.train" in third.words


def test_the_webhook_is_told_of_a_run_that_is_skipped_where_it_wants_all_runs(
    compared_folder, monkeypatch
):
    sent = []
    monkeypatch.setenv("STOKER_WEBHOOK_URL", "https://example.com/hook")
    monkeypatch.setenv("STOKER_PIPELINE_RUN", "mnist--b")
    monkeypatch.setattr(
        "stoker.run.webhook.post", lambda url, body, timeout: sent.append(body) or ""
    )
    file = compared_folder / "workload.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"notify": {"on": "always"}}))
    compare_in(compared_folder, *WORDS)
    # It trains: a later step tells how.
    assert sent == []
    decide_by(compared_folder)
    evaluate_by(compared_folder, "memory", "--comparison", "comparison.json")
    sent.clear()
    assert not compare_in(compared_folder, *WORDS).has_changed
    (body,) = sent
    assert body["text"].startswith("stoker: run mnist--b of mnist succeeded: nothing changed since")
    assert body["stoker"]["status"] == "succeeded"
    assert body["stoker"]["note"].startswith("nothing changed since")


UNREADABLE = {
    "no such folder": ("--channel", "train=nowhere"),
    "an empty folder": ("--channel", "train=empty"),
    "no image": ("--image-digest", ""),
}


@pytest.mark.parametrize("words", UNREADABLE.values(), ids=UNREADABLE)
def test_what_the_first_step_cannot_read_trains(compared_folder, words):
    (compared_folder / "empty").mkdir()
    compare_in(compared_folder, *WORDS)
    decide_by(compared_folder)
    evaluate_by(compared_folder, "memory", "--comparison", "comparison.json")
    assert not compare_in(compared_folder, *WORDS).has_changed
    found = compare_in(compared_folder, *WORDS, *words)
    assert found.has_changed
    assert found.unknown


def test_a_run_whose_comparison_is_lost_is_remembered_for_decisions_alone(compared_folder):
    decide_by(compared_folder)
    evaluate_by(compared_folder, "memory", "--comparison", "comparison.json")
    found = compare_in(compared_folder, *WORDS)
    assert found.has_changed
    assert "it is not known what" in found.words
    assert decide_by(compared_folder, "--memory", "memory")[0].previous.run


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--as", "ml.g5.2xlarge", "--memory", "runs"), "--memory cannot be used with --as"),
        (("--memory", "runs"), "--memory needs the workload"),
    ],
)
def test_a_memory_that_cannot_be_used_is_refused(tmp_path, words, told):
    step_files(tmp_path, 6.2)
    done = stoker("decide", "profile.json", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert told in done.stderr
