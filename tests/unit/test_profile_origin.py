"""What is told of a profile that was measured earlier."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from stoker.platforms.imported import imported_files
from stoker.records.profile_origin import (
    MAX_PROFILE_DAYS,
    ProfileOrigin,
    age_words,
    compared,
    digests_of,
    undated,
)

NOW = datetime(2026, 11, 26, 12, tzinfo=UTC)
THEN = ProfileOrigin(
    measured_at="2026-11-23T10:00:00.000Z",
    image="registry/train:7",
    code={"train.py": "aa", "loader.py": "bb"},
    data={"training": "s3://b/day=2026-11-23/"},
)


def told(**changes):
    document = {name: getattr(THEN, name) for name in THEN.__struct_fields__}
    return compared(THEN, today=ProfileOrigin(**{**document, **changes}), now=NOW)


def test_a_profile_with_nothing_changed_is_told_in_one_line():
    found = told()
    assert found.words == "profile of 3 days ago (2026-11-23), image and code the same"
    assert found.warnings == ()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"image": "registry/train:8"}, "image changed: registry/train:7 -> registry/train:8"),
        ({"code": {"train.py": "aa", "loader.py": "cc"}}, "code changed: loader.py"),
        ({"code": {"train.py": "aa"}}, "code changed: loader.py"),
        ({"code": {**THEN.code, "new.py": "dd"}}, "code changed: new.py"),
        (
            {"data": {"training": "s3://other/day=2026-11-26/"}},
            "data of training changed: s3://b/day=2026-11-23/ -> s3://other/day=2026-11-26/",
        ),
    ],
)
def test_what_has_changed_is_named_and_should_be_measured_again(changes, words):
    found = told(**changes)
    assert words in found.words
    assert "\n" not in found.words
    assert found.warnings == (f"{words}: measure again, stoker profile",)


def test_code_that_only_has_a_digest_is_compared_by_it():
    then = ProfileOrigin(measured_at=THEN.measured_at, code_digest="a")
    same = ProfileOrigin(measured_at=THEN.measured_at, code_digest="a")
    other = ProfileOrigin(measured_at=THEN.measured_at, code_digest="b")
    assert compared(then, today=same, now=NOW).words.endswith("code the same")
    assert "code changed" in compared(then, today=other, now=NOW).words


def test_nothing_is_claimed_of_what_is_not_known():
    bare = ProfileOrigin(measured_at=THEN.measured_at)
    assert compared(bare, today=THEN, now=NOW).words == "profile of 3 days ago (2026-11-23)"


def test_data_of_another_day_is_the_same_dataset():
    found = told(data={"training": "s3://b/day=2026-11-26/"})
    assert "data of training of another date" in found.words
    assert found.warnings == ()


def test_an_old_profile_is_named_as_old():
    old = ProfileOrigin(measured_at="2026-10-01T10:00:00.000Z")
    found = compared(old, today=THEN, now=NOW)
    assert found.words.startswith("profile of OLD: 56 days ago")
    assert f"more than {MAX_PROFILE_DAYS}" in found.warnings[0]
    edge = ProfileOrigin(measured_at="2026-10-27T13:00:00.000Z")
    assert compared(edge, today=THEN, now=NOW).warnings == ()


@pytest.mark.parametrize(
    ("measured_at", "words"),
    [
        ("2026-11-26T11:59:01.000Z", "less than a minute ago (2026-11-26)"),
        ("2026-11-26T11:59:00.000Z", "1 minute ago (2026-11-26)"),
        ("2026-11-26T02:00:00.000Z", "10 hours ago (2026-11-26)"),
        ("2026-11-24T12:00:00", "2 days ago (2026-11-24)"),
        ("2026-11-27T12:00:00.000Z", "a later time than now (2026-11-27T12:00:00.000Z)"),
        ("yesterday", "an unknown date"),
    ],
)
def test_an_age_is_told_in_its_unit(measured_at, words):
    assert age_words(measured_at, now=NOW) == words


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("s3://b/day=2026-11-25/", "s3://b/day=2026-11-26/"),
        ("s3://b/2026-11-25/", "s3://b/2026-11-26/"),
        ("s3://b/20261125", "s3://b/20261126"),
        ("s3://b/x/2026/11/25/y", "s3://b/x/2026/11/26/y"),
        ("s3://b/year=2026/month=11/day=25/hour=07/", "s3://b/year=2026/month=12/day=1/hour=23/"),
        ("s3://b/dt=2026-11-25T07/part", "s3://b/dt=2026-11-26T08/part"),
        ("pvc://claim/2026-11", "pvc://claim/2026-12"),
        ("file:///data/snapshot=20261125/a", "file:///data/snapshot=20261126/a"),
        ("s3://b/train-2026-11-25.tar", "s3://b/train-2026-11-26.tar"),
        ("s3://b/day_20261125.parquet", "s3://b/day_20261126.parquet"),
        ("s3://b/export_2026_11_25/", "s3://b/export_2026_12_01/"),
        ("s3://b/2026-11-25T07-30/x", "s3://b/2026-11-26T08-15/x"),
    ],
)
def test_dated_folders_of_one_parent_are_one_dataset(one, other):
    assert undated(one) == undated(other)
    assert "*" in undated(one)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("s3://b/v1/", "s3://b/v2/"),
        ("s3://b/day=2026-11-25/", "s3://c/day=2026-11-25/"),
        ("s3://b/a/2026-11-25/", "s3://b/c/2026-11-25/"),
        ("s3://b/size=224/", "s3://b/size=336/"),
        ("s3://b/shards-1000/", "s3://b/shards-2000/"),
        ("s3://b/20269999/", "s3://b/20261125/"),
        ("s3://b/imagenet-2012/", "s3://b/imagenet-2017/"),
        ("s3://b/part-120261125/", "s3://b/part-120261126/"),
        ("s3://b/run-20261340/", "s3://b/run-20261341/"),
    ],
)
def test_what_is_no_date_is_another_dataset(one, other):
    assert undated(one) != undated(other)


def test_code_is_the_script_and_what_it_imports(tmp_path: Path):
    (tmp_path / "train.py").write_text("import loader\nfrom models import net\n")
    (tmp_path / "loader.py").write_text("import torch\n")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").write_text("")
    (tmp_path / "models" / "net.py").write_text("")
    (tmp_path / "other.py").write_text("")
    names = ["loader.py", "models/__init__.py", "models/net.py", "train.py"]
    assert list(imported_files(tmp_path, ["python", "train.py", "--lr", "1"])) == names
    assert list(imported_files(tmp_path, ["python", "-m", "train"])) == names
    assert imported_files(tmp_path, ["sh", "run.sh"]) == {}
    before = digests_of(imported_files(tmp_path, ["python", "train.py"]))
    (tmp_path / "other.py").write_text("x = 1")
    assert digests_of(imported_files(tmp_path, ["python", "train.py"])) == before
    (tmp_path / "loader.py").write_text("import torch, os\n")
    after = digests_of(imported_files(tmp_path, ["python", "train.py"]))
    assert {name for name in names if before[name] != after[name]} == {"loader.py"}
