"""Pipelines of one's own: steps around stoker's, two trainings, and a training in a loop."""

import importlib.util
import json
from pathlib import Path

import pytest

from stoker.errors import UsageError
from support import kubeflow_pipeline, sagemaker_pipeline
from support.sagemaker_execution import checked_steps

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(service: str):
    file = EXAMPLES / f"{service}_pipeline" / f"{service}.py"
    spec = importlib.util.spec_from_file_location(f"own_{service}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_on_sagemaker_steps_of_ones_own_stand_before_between_and_after():
    pytest.importorskip("sagemaker")
    from stoker.sagemaker import PipelineRun, definition_of

    run = PipelineRun.of(sagemaker_pipeline.WORKLOAD, session=sagemaker_pipeline.SESSION)
    definition = definition_of(example("sagemaker").build(run))
    found = checked_steps(definition)
    own = {"Prepare", "Holdout", "Deploy"}
    assert own <= found.keys()
    names = {each["Name"] for each in json.loads(definition)["Parameters"]}
    assert {"day", "least", "lr"} <= names
    words = json.dumps(found["Profile"]["Arguments"]["AppSpecification"])
    assert "--param=input_data=s3://BUCKET/mnist/" in words


def test_on_sagemaker_a_parameter_that_a_run_does_not_have_is_refused():
    pytest.importorskip("sagemaker")
    from stoker.sagemaker import PipelineRun

    run = PipelineRun.of(sagemaker_pipeline.WORKLOAD, session=sagemaker_pipeline.SESSION)
    with pytest.raises(UsageError, match="no parameter epoch"):
        run.params(epoch=3)


def test_on_kubeflow_steps_of_ones_own_stand_before_between_and_after(tmp_path):
    pytest.importorskip("kfp")
    from stoker.kubeflow import PipelineRun, compiled

    run = PipelineRun.of(kubeflow_pipeline.WORKLOAD)
    definition = compiled(example("kubeflow").build(run))
    tasks = kubeflow_pipeline.tasks(kubeflow_pipeline.read(definition)[0])
    assert {"prepare", "judge", "deploy"} <= tasks.keys()
    given = tasks["profile"]["inputs"]["parameters"]
    assert given["param_input_data"]["taskOutputParameter"]["producerTask"] == "prepare"
    assert given["param_epochs"] == {"componentInputParameter": "pipelinechannel--epochs"}
    assert tasks["prepare"]["inputs"]["parameters"]["day"] == {
        "componentInputParameter": "pipelinechannel--day"
    }


def test_on_kubeflow_each_item_of_a_loop_has_its_own_job():
    pytest.importorskip("kfp")
    from kfp import dsl

    from stoker.kubeflow import RUN_ID, PipelineRun, compiled, profile

    run = PipelineRun.of(kubeflow_pipeline.WORKLOAD)

    @dsl.pipeline(name="sweep")
    def sweep() -> None:
        with dsl.ParallelFor(["a", "b"]) as item:
            task = profile(image="i:1", workload=run.workload, run_id=RUN_ID, branch=item)
            run.step(task, "Profile", follows_job=True)

    tasks = kubeflow_pipeline.tasks(kubeflow_pipeline.read(compiled(sweep))[0])
    (loop,) = [each for each in tasks.values() if "parameterIterator" in each]
    item = loop["parameterIterator"]["itemInput"]
    assert tasks["profile"]["inputs"]["parameters"]["branch"] == {"componentInputParameter": item}
