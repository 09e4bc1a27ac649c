"""Pipelines for Kubeflow that train more than once: branches and loops, on the strict double."""

from collections.abc import Callable

import msgspec
import pytest

pytest.importorskip("kfp")

from kfp import dsl

from stoker import kubeflow
from stoker.cli.options import OutputFiles
from stoker.errors import UsageError
from stoker.kubeflow import PipelineRun, compiled, follower
from stoker.platforms.kubernetes.layout import object_name
from stoker.records import is_run_of
from stoker.run.outputs import step_inputs
from stoker.workload_file import workload_from
from support import kubeflow_pipeline as sample
from support.kubeflow_backend import KubeflowRun, Pipeline, Step, Store

DECLARED = {"lr": 0.1, "batch-size": 64, "optimizer": "sgd", "augment": True}
WORKLOAD = msgspec.structs.replace(sample.WORKLOAD, hyperparameters=DECLARED)


@dsl.component(base_image="a/b")
def scored(day: str) -> str:
    return day


def training(run: PipelineRun, *, name: str = "Train") -> kubeflow.Task:
    """Makes the steps that a training needs, in a pipeline's function."""
    measured = kubeflow.profile(**run.inputs(kubeflow.profile))
    profiled = follower(measured, run, name="Profile").outputs["profile"]
    return trained(run, profiled, name=name)


def trained(run: PipelineRun, profiled: object, *, name: str = "Train") -> kubeflow.Task:
    decided = kubeflow.decide(profile=profiled, **run.inputs(kubeflow.decide))
    decision = decided.outputs["decision"]
    job = kubeflow.train(profile=profiled, decision=decision, **run.inputs(kubeflow.train))
    return follower(job, run, name=name)


def played(steps: Callable[[PipelineRun], object], folder, **about) -> KubeflowRun:
    """Compiles and runs the steps, as the strict double of Kubeflow 2.17 does."""

    @dsl.pipeline(name="sweep")
    def sweep() -> None:
        steps(PipelineRun.of(WORKLOAD))

    def execute(step: Step) -> int:
        step.write_outputs()
        return 0

    run = KubeflowRun(Pipeline(compiled(sweep)), execute=execute, store=Store(folder), **about)
    assert run.run() == "SUCCEEDED", run.logs
    return run


def jobs_of(run: KubeflowRun) -> dict[str, dict[str, str]]:
    """Returns what the verb of each training makes of its inputs: job name, and parameters."""
    found: dict[str, dict[str, str]] = {}
    for step in run.steps:
        if not step.task.startswith("train"):
            continue
        flag = step.command.index("--executor-input")
        given = step_inputs(OutputFiles(executor_input=step.command[flag + 1]))
        assert given.run_id == run.run_id
        name = WORKLOAD.run_name(run.run_id, branch=given.branch)
        assert name not in found, "two trainings of one name"
        found[name] = dict(param.split("=", 1) for param in given.params)
    return found


def is_a_name_for(name: str, run_id: str) -> bool:
    folder = f"{name}-profile"
    return is_run_of(name, run_id) and len(folder) <= 63 and object_name(name) == name


@pytest.mark.parametrize(
    ("items", "parameter", "values"),
    [
        ([0.1, 0.01], "lr", ["0.1", "0.01"]),
        ([0.1, 1], "lr", ["0.1", "1"]),
        ([1, 0.5], "lr", ["1", "0.5"]),
        ([1e-05, 3e-4], "lr", ["1e-05", "0.0003"]),
        ([32, 64, 128], "batch_size", ["32", "64", "128"]),
        (["sgd", "AdamW", "lamb/v2"], "optimizer", ["sgd", "AdamW", "lamb/v2"]),
        (["s3://a/" + "x" * 80, "s3://a/" + "x" * 81], "optimizer", None),
        ([True, False], "augment", ["true", "false"]),
    ],
    ids=str,
)
def test_each_item_of_a_loop_has_its_own_job(items, parameter, values, tmp_path):
    """Red before: "Artifacts must have both a schema_title ...: float"; ints had one job."""

    def steps(run: PipelineRun) -> None:
        measured = kubeflow.profile(**run.inputs(kubeflow.profile))
        profiled = follower(measured, run, name="Profile").outputs["profile"]
        with dsl.ParallelFor(items) as item:
            trained(run.given(**{parameter: item}), profiled)

    run = played(steps, tmp_path)
    made = jobs_of(run)
    assert [told[parameter] for told in made.values()] == (values or items)
    assert all(is_a_name_for(name, run.run_id) for name in made)


def test_the_names_of_jobs_show_the_item_and_stay_the_same_on_a_retry(tmp_path):
    def steps(run: PipelineRun) -> None:
        measured = kubeflow.profile(**run.inputs(kubeflow.profile))
        profiled = follower(measured, run, name="Profile").outputs["profile"]
        with dsl.ParallelFor([32, 64]) as size:
            trained(run.given(batch_size=size), profiled)

    names = [*jobs_of(played(steps, tmp_path / "a"))]
    assert names == ["digits-32-5b1f6c3e", "digits-64-5b1f6c3e"]
    assert [*jobs_of(played(steps, tmp_path / "b"))] == names
    other = played(steps, tmp_path / "c", run_id="11111111-0000-4000-8000-00000000abcd")
    assert not set(jobs_of(other)) & set(names)


def test_a_loop_may_have_items_of_several_keys_and_types(tmp_path):
    items = [
        {"lr": 0.1, "optimizer": "sgd", "size": 32, "augment": True},
        {"lr": 1, "optimizer": "adamw", "size": 64, "augment": False},
    ]

    def steps(run: PipelineRun) -> None:
        measured = kubeflow.profile(**run.inputs(kubeflow.profile))
        profiled = follower(measured, run, name="Profile").outputs["profile"]
        with dsl.ParallelFor(items) as item:
            values = {"lr": item.lr, "optimizer": item.optimizer, "augment": item.augment}
            trained(run.given(batch_size=item.size, **values), profiled)

    first, second = jobs_of(played(steps, tmp_path)).values()
    chosen = ("lr", "optimizer", "batch_size", "augment")
    assert [first[name] for name in chosen] == ["0.1", "sgd", "32", "true"]
    assert [second[name] for name in chosen] == ["1", "adamw", "64", "false"]


def test_loops_in_loops_branches_in_loops_and_steps_before_a_training(tmp_path):
    def steps(run: PipelineRun) -> None:
        with dsl.ParallelFor([0.1, 0.01]) as lr, dsl.ParallelFor([32, 64]) as size:
            trial = run.given(lr=lr, batch_size=size)
            training(trial.branch("small"))
            training(trial.branch("large"))

    run = played(steps, tmp_path)
    assert len(jobs_of(run)) == 8
    profiles = [step for step in run.steps if step.task.startswith("profile")]
    assert len(profiles) == 8


def test_items_of_a_parameter_of_the_pipeline_are_known_only_in_the_run(tmp_path):
    @dsl.pipeline(name="sweep")
    def sweep(rates: list = [0.1, 0.01]) -> None:  # noqa: B006
        run = PipelineRun.of(WORKLOAD)
        measured = kubeflow.profile(**run.inputs(kubeflow.profile))
        profiled = follower(measured, run, name="Profile").outputs["profile"]
        with dsl.ParallelFor(rates) as rate:
            trained(run.given(lr=rate), profiled)

    def execute(step: Step) -> int:
        step.write_outputs()
        return 0

    pipeline, store = Pipeline(compiled(sweep)), Store(tmp_path)
    run = KubeflowRun(pipeline, execute=execute, store=store, parameters={"rates": [0.3, 0.5]})
    assert run.run() == "SUCCEEDED", run.logs
    assert [told["lr"] for told in jobs_of(run).values()] == ["0.3", "0.5"]


def test_two_trainings_with_branches_have_two_jobs(tmp_path):
    def steps(run: PipelineRun) -> None:
        training(run.branch("Low").given(lr=0.001), name="Low")
        training(run.branch("High").given(lr=0.5), name="High")

    made = jobs_of(played(steps, tmp_path))
    assert {name: told["lr"] for name, told in made.items()} == {
        "digits-low-5b1f6c3e": "0.001",
        "digits-high-5b1f6c3e": "0.5",
    }


def test_steps_have_the_label_of_their_name_in_the_pipeline(tmp_path):
    """By it `kubectl logs -l` shows the lines of one step: none of a driver's."""

    def steps(run: PipelineRun) -> None:
        training(run)
        training(run.branch("b"))

    run = played(steps, tmp_path)
    labels = {step.task: step.pod["metadata"]["labels"].get("stoker/step") for step in run.steps}
    assert labels == {"profile": "profile", "train": "train"} | {
        "profile-2": "profile-2",
        "train-2": "train-2",
        # Not made by control_step in this pipeline.
        "decide": None,
        "decide-2": None,
    }


def twice(run: PipelineRun) -> None:
    training(run)
    training(run)


def twice_of_one_branch(run: PipelineRun) -> None:
    training(run.branch("b"))
    training(run.branch("B").given(lr=0.5))


def twice_in_a_loop(run: PipelineRun) -> None:
    with dsl.ParallelFor([0.1, 0.2]) as lr:
        training(run.given(lr=lr))
        training(run.given(lr=lr, batch_size=8))


def in_two_conditions(run: PipelineRun) -> None:
    day = scored(day="monday").output
    with dsl.If(day == "monday"):
        training(run)
    with dsl.If(day != "tuesday"):
        training(run)


def two_trainings_of_one_profile(run: PipelineRun) -> None:
    measured = kubeflow.profile(**run.inputs(kubeflow.profile))
    profiled = follower(measured, run, name="Profile").outputs["profile"]
    trained(run, profiled)
    trained(run.given(lr=0.5), profiled)


@pytest.mark.parametrize(
    "steps",
    [twice, twice_of_one_branch, twice_in_a_loop, in_two_conditions, two_trainings_of_one_profile],
)
def test_two_jobs_of_one_name_are_refused_before_anything_runs(steps):
    def mine() -> None:
        steps(PipelineRun.of(WORKLOAD))

    with pytest.raises(UsageError, match="would make one job") as caught:
        dsl.pipeline(name="mine")(mine)
    assert "run.branch" in caught.value.fix


def test_the_two_sides_of_a_condition_may_have_one_job():
    @dsl.pipeline(name="mine")
    def mine(day: str = "monday") -> None:
        run = PipelineRun.of(WORKLOAD)
        with dsl.If(day == "monday"):
            training(run)
        with dsl.Else():
            training(run.given(lr=0.5))

    (pipeline,) = [each for each in sample.parsed(compiled(mine)) if "root" in each]
    assert {"train", "train-2"} <= set(sample.tasks(pipeline))


def test_two_workloads_of_one_pipeline_have_their_own_jobs(tmp_path):
    document = {**sample.DOCUMENT, "name": "letters"}

    def steps(run: PipelineRun) -> None:
        training(run)
        training(PipelineRun.of(workload_from(document)))

    assert len([step for step in played(steps, tmp_path).steps if "train" in step.task]) == 2


@pytest.mark.parametrize("name", ["", "a b", "-a", "a--b", "a.b", "ä", "a/b"])
def test_a_branch_that_no_name_can_have_is_refused(name):
    with pytest.raises(UsageError, match="cannot contain"):
        PipelineRun.of(WORKLOAD).branch(name)


def test_a_branch_may_be_a_value_that_only_the_run_knows(tmp_path):
    @dsl.container_component
    def choose(word: dsl.OutputPath(str)):  # type: ignore[no-untyped-def,valid-type]
        return dsl.ContainerSpec(image="a/b", command=["choose"], args=[word])

    def steps(run: PipelineRun) -> None:
        training(run)
        training(run.branch(choose().output))

    names = [*jobs_of(played(steps, tmp_path))]
    assert names[0] == "digits-5b1f6c3e"
    assert names[1].startswith("digits-word-of-choos-")


def test_a_component_s_document_takes_a_branch():
    (component, *_) = sample.parsed(sample.components()["train"])
    inputs = component["root"]["inputDefinitions"]["parameters"]
    assert inputs["branch"]["isOptional"]
