import json
from importlib import metadata

import msgspec

from stoker.host.listing import listing_version
from stoker.host.packages import packages_here
from stoker.records import write_json
from stoker.records.training import InputVersion, Lineage, TrainingFacts, training_record
from stoker.run.outputs import carried, told_of_training
from stoker.tracking import tags_of
from support.command import stoker
from support.sample_records import training

WHOLE = Lineage(
    job_id="arn:1",
    image_digest="sha256:a",
    git="0a1b",
    git_dirty=True,
    inputs={"train": InputVersion(address="s3://b/", version="sha256:1 of 2 objects")},
    seeds={"seed": 7},
    packages={"torch": "2.9", "numpy": "2.3"},
)


def test_what_several_know_is_one_record_and_the_later_counts():
    asked = Lineage(image="r/i:1", inputs={"train": InputVersion(address="s3://b/")})
    assert asked.joined(WHOLE) == msgspec.structs.replace(WHOLE, image="r/i:1")
    # Who knows nothing of a fact does not delete it.
    more = WHOLE.joined(Lineage(inputs={"labels": InputVersion(address="s3://c/")}))
    assert (sorted(more.inputs), more.git) == (["labels", "train"], "0a1b")


def test_the_version_of_a_folder_changes_with_its_files_and_is_bounded(tmp_path):
    assert listing_version(tmp_path) is None
    (tmp_path / "a").mkdir()
    for name in ("a/1", "b"):
        (tmp_path / name).write_text("x")
    first = listing_version(tmp_path)
    assert first == listing_version(tmp_path)
    assert first.endswith(" of 2 files")
    (tmp_path / "b").write_text("xy")
    assert listing_version(tmp_path) != first
    assert listing_version(tmp_path, clock=iter((0.0, 4.0)).__next__) is None
    assert listing_version(tmp_path, max_files=1) is None


def test_the_leader_s_listing_stays_where_the_platform_knows_the_claim():
    seen = Lineage(inputs={"train": InputVersion(address="/opt/ml/input/data/train", version="v")})
    asked = Lineage(inputs={"train": InputVersion(address="pvc://digits")})
    claim = Lineage(inputs={"train": InputVersion(address="pvc://digits", claim_uid="u")})
    found = seen.joined(asked, claim)
    whole = InputVersion(address="pvc://digits", version="v", claim_uid="u")
    assert found.inputs == {"train": whole}
    assert found.facts() == {"input_train": "pvc://digits v claim u"}


def test_only_the_leader_knows_the_packages_that_were_there():
    leader = msgspec.structs.replace(training(), lineage=Lineage(packages={"torch": "2.9"}))
    known = {"job": leader.job, "status": "succeeded", "groups": leader.groups}
    facts = TrainingFacts(leader=leader, lineage=Lineage(git="0a1b"), **known)
    assert training_record(facts).lineage == Lineage(git="0a1b", packages={"torch": "2.9"})


def test_packages_are_those_that_python_knows_but_for_damaged_ones(tmp_path, monkeypatch):
    texts = {
        "whole.dist-info/METADATA": b"Name: whole\r\nVersion: 1.0 \r\n\r\nName: other\r\n",
        "older.egg-info/PKG-INFO": b"Metadata-Version: 1.0\nName: older\nVersion: 2.0\n",
        "single.egg-info": b"Name: single\nVersion: 3.0\n",
        "binary.dist-info/METADATA": b"Name: \xff\nVersion: 4.0\n",
        "nameless.dist-info/METADATA": b"Version: 5.0\n\nName: told in the description\n",
        "empty.dist-info/RECORD": b"",
    }
    for name, text in texts.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(text)
    known = {each.name: each.version for each in metadata.distributions()}
    monkeypatch.syspath_prepend(tmp_path)
    here = {"whole": "1.0", "older": "2.0", "single": "3.0"}
    assert packages_here() == known | here


def test_two_runs_are_compared_by_what_they_were_made_of(tmp_path):
    other = msgspec.structs.replace(
        WHOLE, job_id="arn:2", git="2c3d", git_dirty=False, packages={"torch": "2.10"}, seeds={}
    )
    for name, lineage in (("one", WHOLE), ("two", other)):
        (tmp_path / name).mkdir()
        record = msgspec.structs.replace(training(), lineage=lineage)
        write_json(tmp_path / name / "training.json", record)
    ran = stoker("report", "one", "--compare", "two", cwd=tmp_path)
    assert ran.stdout.splitlines() == [
        "git: 0a1b | 2c3d",
        "git_dirty: true | not known",
        "package numpy: 2.3 | not known",
        "package torch: 2.9 | 2.10",
        "seed_seed: 7 | not known",
    ]
    same = stoker("report", "one", "--compare", "one/training.json", cwd=tmp_path)
    assert same.stdout.strip() == "no difference is known"
    found = stoker("report", "one", "--compare", "two", "--json", cwd=tmp_path).stdout
    assert json.loads(found)["git"] == {"run": "0a1b", "other": "2c3d"}


def test_mlflow_and_kubeflow_get_the_lineage_as_texts():
    record = msgspec.structs.replace(training(), lineage=WHOLE)
    tags = tags_of(record, None)
    assert tags["stoker_input_train"] == "s3://b/ sha256:1 of 2 objects"
    assert tags["stoker_packages"].endswith(" of 2")
    assert tags["mlflow.source.git.commit"] == "0a1b"
    assert told_of_training(record).origin == WHOLE.facts()
    # A parameter of Kubeflow has no room for hundreds of versions.
    assert not json.loads(carried(record))["lineage"].get("packages")
