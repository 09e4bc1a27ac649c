"""A test runs each of configs/*.yaml for real, or it is said why not; each is a request."""

import re
from pathlib import Path

import pytest

from stoker.records import write_json
from support import sample_records
from support.command import stoker, succeeds
from support.examples import project

ROOT = Path(__file__).parents[2]


FILES = sorted(file.name for file in (ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("name", FILES)
def test_each_workload_is_a_request_that_its_platform_takes(name, tmp_path):
    succeeds("train", f"configs/{name}", "--dry-run", cwd=project(tmp_path))


@pytest.mark.parametrize(
    "words",
    [
        "profile",
        "train --dry-run",
        "evaluate --profile p --decision d --training t",
        "compile sagemaker --out p.json",
        "start sagemaker",
        "decide profile.json --workload",
    ],
)
def test_each_verb_refuses_a_workload_with_placeholders(words, tmp_path):
    write_json(tmp_path / "profile.json", sample_records.profile())
    done = stoker(*words.split(), str(ROOT / "configs" / "mnist-sagemaker.yaml"), cwd=tmp_path)
    assert done.returncode == 2
    assert "replace the placeholder: ACCOUNT in image" in done.stderr
    assert "configs/mnist-sagemaker.yaml:13, key image" in done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["profile.json"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], ["auto"]),
        (["--replace-dataloader", "true"], ["1"]),
        (["--replace-dataloader", "false"], []),
        (["--set", "feed.replace_dataloader=true", "--replace-dataloader", "false"], []),
    ],
)
@pytest.mark.parametrize("name", ["mnist-kubeflow.yaml", "mnist-sagemaker.yaml"])
def test_the_option_says_which_loaders_a_job_replaces(name, flags, expected, tmp_path):
    words = ["train", f"configs/{name}", "--dry-run", "--json", *flags]
    shown = succeeds(*words, cwd=project(tmp_path))
    found = re.findall(r'"STOKER_REPLACE_DATALOADER"(?:,\s*"value")?: "(\w+)"', shown.stdout)
    assert sorted(set(found)) == expected
