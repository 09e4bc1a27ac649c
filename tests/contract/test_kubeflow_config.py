"""configs/mnist-kubeflow.yaml and its pools, which people start from, work as they stand."""

import re
import shutil
from datetime import date
from pathlib import Path

import pytest
import yaml

from stoker.catalog import catalog_of, load_catalog, with_pools
from stoker.decide import DecisionInputs, decide
from stoker.errors import UsageError
from stoker.platforms.base import JobSpec
from stoker.platforms.kubernetes import KubernetesPlatform
from stoker.records import Profile, ProfiledHost, StepTerms, Workload
from stoker.run.clusters import parse_groups
from stoker.workload_file import read_workload
from support.examples import project

ROOT = Path(__file__).parents[2]
FILE = "configs/mnist-kubeflow.yaml"


@pytest.fixture
def workload(tmp_path, monkeypatch):
    monkeypatch.chdir(project(tmp_path))
    found = read_workload(FILE)
    # No file is read later: the pools are in the document that a pipeline carries.
    shutil.rmtree("configs")
    return with_pools(found)


def nodes(workload: Workload, *groups: str) -> dict[str, str]:
    parsed = parse_groups(groups, default_type="gpu")
    job = JobSpec.of(workload, groups=parsed, run_dir=Path("runs/mnist-1"))
    platform = KubernetesPlatform()
    *_, jobset = yaml.safe_load_all(platform.manifest(platform.plan(job)))
    pods = {j["name"]: j["template"]["spec"]["template"] for j in jobset["spec"]["replicatedJobs"]}
    label = "eks.amazonaws.com/nodegroup"
    return {name: pod["spec"]["nodeSelector"][label] for name, pod in pods.items()}


def test_every_pool_of_the_example_can_be_planned_on(workload):
    assert nodes(workload, "dnn=1", "data=cpu-spot:2") == {"dnn": "gpu", "data": "cpu-spot"}
    assert nodes(workload, "dnn=gpu-large:2", "data=cpu:1") == {"dnn": "gpu-large", "data": "cpu"}
    with pytest.raises(UsageError, match="has GPUs"):
        nodes(workload, "dnn=1", "data=gpu-large:1")


def test_the_examples_prices_are_those_of_the_catalog(workload):
    types = {"gpu": "g5.xlarge", "gpu-large": "g5.2xlarge", "cpu": "c7i.4xlarge"}
    known = load_catalog("kubernetes")
    pools = catalog_of(workload)
    assert {i.type for i in pools.instances} == {*types, "cpu-spot"}
    for pool, kind in types.items():
        assert pools.get(pool).usd_per_hour == known.get(kind).usd_per_hour
        assert pools.get(pool).priced_on == known.get(kind).priced_on
        assert pools.get(pool).vcpus < known.get(kind).vcpus
    assert pools.get("cpu-spot").usd_per_hour is None


GUIDE = (ROOT / "docs" / "kubeflow.md").read_text()


def test_the_guides_table_of_parameters_is_that_of_the_pipeline(workload):
    from stoker.pipelines.kubeflow.compile import kubeflow_request

    table = GUIDE[GUIDE.index("| parameter | default") :].partition("\n\n")[0]
    listed = re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE)
    assert listed == [parameter.name for parameter in kubeflow_request(workload).parameters]


def test_the_guides_pools_are_those_of_the_example(workload):
    pools = catalog_of(workload)
    pattern = r"^\| `([\w-]+)` \| [\w.]+ \| (\d+) vCPUs, [^|]* \| ([\w. ]+) \|$"
    listed = re.findall(pattern, GUIDE, flags=re.MULTILINE)
    assert [name for name, _, _ in listed] == ["gpu", "gpu-large", "cpu", "cpu-spot"]
    for name, vcpus, usd in listed:
        found = pools.get(name)
        known = "not known" if found.usd_per_hour is None else f"{found.usd_per_hour:.3f}"
        assert (int(vcpus), usd) == (found.vcpus, known)
        assert found.priced_on is None or str(found.priced_on) in GUIDE


def test_the_guides_worked_example_is_what_decide_says(workload):
    seconds = {"step_seconds": 0.36, "accelerator_step_seconds": 0.06, "loader_cpu_seconds": 1.2}
    step = StepTerms(**seconds, global_batch_size=1)
    profile = Profile(host=ProfiledHost(instance_type="gpu"), step=step)
    about = {"constraints": workload.constraints, "today": date(2026, 11, 20)}
    decision = decide(DecisionInputs(profile=profile, catalog=catalog_of(workload), **about))
    assert decision.action == "heterogeneous"
    table = GUIDE[GUIDE.index("| cluster | step") :].partition("\n\n")[0]
    listed = re.findall(r"(\d+) ms \| ([\d.]+) \| ([\d.]+) \|", table)
    assert len(listed) == 3
    clusters = ([("gpu", 1)], [("gpu", 1), ("cpu", 1)], [("gpu-large", 1)])
    assert sorted(listed) == sorted(
        (f"{p.step_seconds * 1000:.0f}", f"{p.usd_per_hour:.3f}", f"{p.usd_per_1000_steps:.3f}")
        for plan in decision.plans
        if [(g.instance_type, g.count) for g in plan.groups] in clusters and (p := plan.predicted)
    )
