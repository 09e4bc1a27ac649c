"""A profile that was measured earlier: what the run that uses it says."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from stoker.records import Profile, read_json, write_json
from stoker.records.profile_origin import ProfileOrigin, digests_of
from stoker.run.chain import Chain
from stoker.workload_file import read_workload
from support import builders
from support.command import succeeds


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import loader\n")
    (tmp_path / "loader.py").write_text("a = 1\n")
    (tmp_path / "w.yaml").write_text("name: mnist\nimage: train:7\ncommand: [python, train.py]\n")
    return tmp_path


def keep(project: Path, *, days: float = 3, image: str = "train:7") -> Profile:
    files = {name: (project / name).read_bytes() for name in ("train.py", "loader.py")}
    origin = ProfileOrigin(
        measured_at=f"{datetime.now(UTC) - timedelta(days=days, minutes=5):%Y-%m-%dT%H:%M:%SZ}",
        image=image,
        code=digests_of(files),
    )
    profile = builders.profile(step_seconds=0.5, wait_seconds=0.3, is_explained=True)
    profile = msgspec.structs.replace(profile, origin=origin)
    write_json(project / "profile.json", profile)
    return profile


def decided(project: Path, *words: str) -> tuple[str, dict[str, object]]:
    done = succeeds("decide", "profile.json", "--workload", "w.yaml", "--out", "d.json", *words)
    return done.stdout + done.stderr, json.loads((project / "d.json").read_text())


def test_decide_tells_the_age_of_a_profile_and_that_nothing_has_changed(project):
    keep(project)
    text, record = decided(project, "--report", "r.html")
    assert "profile of 3 days ago" in text
    assert str(record["measured"]).endswith("image and code the same")
    assert "image and code the same" in (project / "r.html").read_text()
    assert not [each for each in record.get("warnings", ()) if "measure again" in each]


def test_decide_names_the_file_that_has_changed_since(project):
    keep(project)
    (project / "loader.py").write_text("a = 2\n")
    text, record = decided(project)
    assert "code changed: loader.py" in text
    assert any("code changed: loader.py" in each for each in record["warnings"])


def test_decide_names_the_image_that_has_changed_since(project):
    keep(project, image="train:6")
    _, record = decided(project)
    assert "image changed: train:6 -> train:7" in str(record["measured"])


def test_decide_names_an_old_profile_as_old(project):
    keep(project, days=45)
    _, record = decided(project)
    assert any("45 days old, more than 30" in each for each in record["warnings"])


def test_a_chain_that_uses_a_profile_again_tells_its_age(project, capsys):
    kept = keep(project)
    (project / "loader.py").write_text("a = 2\n")
    chain = Chain(
        workload=read_workload("w.yaml"),
        source="w.yaml",
        run_dir=project,
        first=1,
        fallback=(),
        prices=None,
        quiet=False,
        assume_yes=True,
        arguments=(),
    )
    found = chain.step("profile", Profile, lambda: kept, lambda _: "words")
    assert found == read_json(project / "profile.json", Profile)
    said = "".join(capsys.readouterr())
    assert "profile of 3 days ago" in said
    assert "code changed: loader.py" in said


def test_a_profile_of_an_early_version_has_its_age_alone(project):
    profile = builders.profile(step_seconds=0.5, wait_seconds=0.3, is_explained=True)
    profile.what["when"] = "2026-01-02T03:04:05.678Z"
    write_json(project / "profile.json", profile)
    _, record = decided(project)
    assert "(2026-01-02)" in str(record["measured"])
    assert "the same" not in str(record["measured"])
