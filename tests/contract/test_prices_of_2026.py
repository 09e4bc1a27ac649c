"""Types and prices of 2026 through the verbs: compile, upload, start, and the run's *decide*."""

import json
from pathlib import Path

import msgspec
import pytest
import yaml

from stoker.records import Decision, ProfiledHost, read_json, write_json
from stoker.sagemaker import compile_pipeline
from stoker.workload_file import read_workload
from support import builders
from support.command import stoker, succeeds
from support.sagemaker_uploads import BUCKET, WORKLOAD

ROOT = Path(__file__).resolve().parents[2]
# In no catalog and no list of the service.
UNHEARD = "ml.q9x-ultra.480xlarge"
MISSPELT = "ml.g5.2xlrage"
# The service trains on it, and no price of it is known.
UNPRICED = "ml.trn2.48xlarge"
ESTIMATED = ("ml.p5en.48xlarge",)
# The region of the catalog's prices.
HERE = ("--set", "sagemaker.region=us-east-1")
TYPES = ("ml.g5.xlarge", *ESTIMATED, UNPRICED)


@pytest.fixture
def server(aws_server):
    aws_server.make_bucket(BUCKET)
    return aws_server


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "pipelines").symlink_to(ROOT / "pipelines")
    (tmp_path / "w.yaml").write_text(yaml.safe_dump(WORKLOAD))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def on(name: str) -> tuple[str, ...]:
    return ("--set", f"cluster.dnn.instance_type={name}", *HERE)


def refused(*words: str) -> str:
    done = stoker(*words)
    assert done.returncode == 2, done.stdout + done.stderr
    return done.stderr


def profiled(name: str, folder: Path) -> None:
    """Writes what a profile measures on one host of the type: also its vCPUs."""
    host = ProfiledHost(instance_type=name, count=1, vcpus=8, accelerators=1)
    write_json(folder / "profile.json", msgspec.structs.replace(builders.starved(), host=host))


def decided(name: str, folder: Path, *sets: str) -> Decision:
    """Runs the step *decide* of the compiled pipeline on a profile of that type."""
    overrides = [word for word in (*on(name), *sets) if word != "--set"]
    compiled = compile_pipeline(read_workload("w.yaml", overrides=overrides), folder=folder)
    (text,) = [text for uri, text in compiled.uploads.items() if uri.endswith("workload.json")]
    (folder / "workload.json").write_bytes(text)
    return decide_step(name, folder)


def decide_step(name: str, folder: Path, *more: str) -> Decision:
    profiled(name, folder)
    out = folder / "decision.json"
    words = ("decide", "profile.json", "--workload", "workload.json", "--out", str(out))
    succeeds(*words, "--set", "constraints.max_data_hosts=3", *more)
    return read_json(out, Decision)


@pytest.mark.parametrize("name", TYPES)
def test_a_type_goes_through_all_verbs_and_its_price_is_never_promised(server, project, name):
    succeeds("compile", "sagemaker", "w.yaml", *on(name), "--out", "p.json")
    succeeds("upload", "sagemaker", "w.yaml", *on(name), "--yes")
    started = succeeds("start", "sagemaker", "w.yaml", *on(name), "--yes")
    line = next(line for line in started.stderr.splitlines() if line.startswith("profile on"))
    is_estimate = name in ESTIMATED
    assert ("price unknown" in line) == (name == UNPRICED)
    assert ("~$" in line) == is_estimate

    decision = decided(name, project)
    keep = next(plan for plan in decision.plans if plan.action == "keep")
    if name == UNPRICED:
        assert (decision.action, decision.verdict, keep.predicted) == ("keep", "unknown", None)
    else:
        assert keep.predicted.usd_per_hour > 0
        assert any(name in each for each in decision.prices.estimated or {}) == is_estimate


WRONG = {
    UNHEARD: "no instance type",
    MISSPELT: "did you mean ml.g5.2xlarge",
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("key", ["cluster.dnn.instance_type", "constraints.allowed_instance_types"])
def test_a_type_that_nobody_knows_is_refused_before_anything_is_rented(project, name, key):
    value = name if key.startswith("cluster") else f"[ml.c7i.4xlarge, {name}]"
    for verb, *more in (("compile", "--out", "p.json"), ("upload", "--yes"), ("start", "--yes")):
        said = refused(verb, "sagemaker", "w.yaml", "--set", f"{key}={value}", *more)
        assert WRONG[name] in said
        assert key in said


def pool(name: str) -> tuple[str, ...]:
    """Returns the options for a cluster with two pools, one of them of that type."""
    size = {"cpu": 7, "memory": "28Gi"}
    pools = {name: {**size, "gpus": 1}, "c7i.4xlarge": {**size, "gpus": 0}}
    return ("--set", f"kubernetes={json.dumps({'pools': pools})}")


def with_prices(folder: Path, rows: str, *, head="instance_type,usd_per_hour,priced_on"):
    (folder / "prices.csv").write_text(f"{head}\n{rows}\n")
    return ("--set", "constraints.prices_file=prices.csv")


def test_the_prices_file_reaches_every_step_of_both_pipelines(project):
    sets = with_prices(project, f"{UNPRICED[3:]},40,2026-11-20\nc7i.4xlarge,0.2,2026-11-20")
    decision = decided(UNPRICED, project, *sets)
    keep = next(plan for plan in decision.plans if plan.action == "keep")
    assert keep.predicted.usd_per_hour == 40
    assert decision.prices.source.startswith("constraints.prices_file")
    # The table is in the run's inputs, not in every record.
    assert decision.constraints.prices_file is None

    from stoker.kubeflow import PipelineRun

    claim = ("--set", "channels.train.uri=pvc://data/train")
    words = (*on(UNPRICED), *sets, *claim, *pool(UNPRICED[3:]))
    overrides = [word for word in words if word != "--set"]
    run = PipelineRun.of(read_workload("w.yaml", overrides=overrides))
    (project / "workload.json").write_text(run.workload)
    # Elsewhere: the pod has no such file.
    (project / "prices.csv").unlink()
    kubernetes = decide_step(UNPRICED[3:], project)
    keep = next(plan for plan in kubernetes.plans if plan.action == "keep")
    assert keep.predicted.usd_per_hour == 40
