"""Compiled pipelines and components run through a double that is as strict as Kubeflow 2.17."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

pytest.importorskip("kfp")

from kfp import dsl
from kfp.dsl import Artifact, ContainerSpec, Output, PipelineTaskFinalStatus

from stoker import kubeflow
from stoker.pipelines.kubeflow.compile import COMPONENTS, compile_kubeflow
from stoker.records import Workload
from stoker.workload_file import read_workload
from support import examples
from support.kubeflow_backend import KubeflowRun, NotPlayedError, Pipeline, Step, Store

ROOT = Path(__file__).resolve().parents[2]
# As its user says it who has no claim yet; kept in a bucket, data is nothing that pods mount.
WITHOUT_CLAIM = "channels={}"
POOL = "{cpu: 3, memory: 12Gi, gpus: 1}"
# Workloads that the repository ships with an image: those for SageMaker need a pool here.
SHIPPED = {
    "claim": ("mnist-kubeflow",),
    "no claim": ("mnist-kubeflow", WITHOUT_CLAIM),
    "sagemaker": (
        "mnist-sagemaker",
        WITHOUT_CLAIM,
        f"kubernetes.pools={{g5.xlarge: {POOL}}}",
        # The other types of SageMaker are no pools.
        "constraints.allowed_instance_types=[ml.g5.xlarge]",
    ),
}


@dsl.container_component
def tell(text: str, word: dsl.OutputPath(str), made: Output[Artifact], aside: str = "own"):  # type: ignore[no-untyped-def,valid-type]
    """Says a word."""
    words = ["{{$}}", "--word", word, "--made", made.path]
    return ContainerSpec(image="a/b", command=["say"], args=words)


@dsl.container_component
def named(text: str, aside: str = "own"):  # type: ignore[no-untyped-def]
    """Names an input in its command that a caller may leave out."""
    return ContainerSpec(image="a/b", command=["say"], args=[text, f"--aside={aside}"])


@dsl.container_component
def judge(score: dsl.OutputPath(float)):  # type: ignore[no-untyped-def,valid-type]
    """Tells a number."""
    return ContainerSpec(image="a/b", command=["judge"], args=[score])


@dsl.container_component
def end(outcome: PipelineTaskFinalStatus):  # type: ignore[no-untyped-def]
    """Says how a run ended."""
    return ContainerSpec(image="a/b", command=["end"], args=[f"{outcome}"])


def played(
    pipeline: str | Callable[[], None],
    folder: Path,
    *,
    ends: Mapping[str, Sequence[int | str]] = MappingProxyType({}),
    hours: Mapping[str, Sequence[float]] = MappingProxyType({}),
    told: Mapping[str, Any] | None = None,
    store: Store | None = None,
    **about: Any,
) -> KubeflowRun:
    """Runs a pipeline, or a small one's function; `ends` and `hours` are of a task's attempts."""
    if callable(pipeline):
        pipeline = kubeflow.compiled(dsl.pipeline(name="small")(pipeline))

    def execute(step: Step) -> int | str:
        step.write_outputs()
        if told:
            step.tell(told)
        if step.task in hours:
            run.clock.sleep(3600 * hours[step.task][step.attempt])
        left = ends.get(step.task, ())[step.attempt :]
        return left[0] if left else 0

    run = KubeflowRun(Pipeline(pipeline), execute=execute, store=store or Store(folder), **about)
    run.run()
    return run


def shipped(kind: str) -> Workload:
    name, *overrides = SHIPPED[kind]
    return read_workload(examples.document(f"{name}.yaml"), overrides=["image=a/b:1", *overrides])


@pytest.mark.parametrize("name", COMPONENTS)
def test_each_component_alone_runs_with_its_required_inputs_only(name, tmp_path):
    component = getattr(kubeflow, name)
    inputs = component.component_spec.inputs.items()
    needed = {key: about.type for key, about in inputs if not about.optional and key != "outcome"}

    def one() -> None:
        given: dict[str, object] = {"String": "x", "Integer": 1}
        if name == "finish":
            with dsl.ExitHandler(component(**{key: given[kind] for key, kind in needed.items()})):
                tell(text="first")
        else:
            made = tell(text="first").outputs["made"]
            component(**{key: given.get(kind, made) for key, kind in needed.items()})

    run = played(one, tmp_path)
    assert run.state == "SUCCEEDED", run.logs
    (step,) = [step for step in run.steps if step.task == name]
    assert not [word for word in step.command if "{{" in word]


@pytest.mark.parametrize("kind", SHIPPED)
def test_each_shipped_workload_runs_to_its_gate(kind, tmp_path):
    definition = compile_kubeflow(shipped(kind), folder=ROOT).definition
    run = played(definition, tmp_path)
    assert run.state == "SUCCEEDED", run.logs
    tasks = ["period", "profile", "decide", "train", "evaluate", "gate", "finish"]
    assert [step.task for step in run.steps] == tasks
    for step in run.steps:
        assert not [word for word in step.command if "{{" in word]
        assert step.container["image"] == "a/b:1"
        given = step.executor_input["inputs"]["parameterValues"]
        assert given.get("run_id") == (run.run_id if step.task in ("train", "finish") else None)
    # A profile's input would spoil the cache: its run comes from the pod's label.
    train = run.steps[3]
    assert train.environment["POD_RUN_ID"] == run.run_id
    assert train.environment["POD_NAME"] == train.pod["metadata"]["name"]


def test_only_a_profile_of_the_same_inputs_comes_from_the_cache_of_another_run(tmp_path):
    definition = compile_kubeflow(shipped("claim"), folder=ROOT).definition
    store = Store(tmp_path)
    first = played(definition, tmp_path, store=store)
    again = played(definition, tmp_path, store=store, run_id=first.run_id.replace("abcd", "0001"))
    assert again.state == "SUCCEEDED"
    tasks = [step.task for step in first.steps if step.task != "profile"]
    assert [step.task for step in again.steps] == tasks


def test_what_a_command_names_must_be_passed(tmp_path):
    def one() -> None:
        named(text="a")

    run = played(one, tmp_path)
    assert (run.state, run.steps) == ("FAILED", [])
    assert 'parameter "aside" not found in executor input' in str(run.logs)


def test_the_launcher_adds_defaults_and_constants_that_are_a_whole_value(tmp_path):
    def one(left_out: str = None) -> None:  # type: ignore[assignment]  # noqa: RUF013
        tell(text=kubeflow.RUN_ID, aside=left_out)
        tell(text=f"run {kubeflow.RUN_ID}")

    run = played(one, tmp_path)
    first, second = (json.loads(step.command[1])["inputs"] for step in run.steps)
    assert first["parameterValues"] == {"text": run.run_id, "aside": "own"}
    assert second["parameterValues"]["text"] == "run {{$.pipeline_job_uuid}}"
    assert run.steps[0].command[3] == "/tmp/kfp/outputs/word"


@pytest.mark.parametrize(
    ("uri", "state"), [("pvc://runs/a", "SUCCEEDED"), ("s3://elsewhere/a", "FAILED")]
)
def test_an_address_in_another_bucket_fails_the_step(uri, state, tmp_path):
    """The launcher uploads what it can name a path of, and knows the run's own bucket only."""

    def one() -> None:
        tell(text="a")

    made = {"artifacts": [{"name": "made", "uri": uri, "metadata": {}}]}
    assert played(one, tmp_path, told={"artifacts": {"made": made}}).state == state


def test_an_exit_code_is_never_tried_again(tmp_path):
    def one() -> None:
        with dsl.ExitHandler(end()):
            tell(text="a").set_retry(3, backoff_duration="60s")
            tell(text="b")

    run = played(one, tmp_path, ends={"tell": [137]})
    assert [step.task for step in run.steps] == ["tell", "tell-2", "end"]
    assert run.state == "FAILED"
    # The launcher's own code, whatever the command's was.
    assert "main: Error (exit code 1)" in [node.message for node in run.nodes.values()]


def test_a_later_attempt_is_ended_when_the_longest_backoff_is_over(tmp_path):
    """Argo's maxDuration is kfp's hour: it counts from the first attempt's begin."""

    def one() -> None:
        tell(text="a").set_retry(3, backoff_duration="60s")

    run = played(one, tmp_path, ends={"tell": ["vanished"]}, hours={"tell": [0.1, 1.0]})
    assert run.state == "FAILED"
    assert "Step exceeded its deadline" in [node.message for node in run.nodes.values()]
    assert run.clock.seconds == 3600


@pytest.mark.parametrize("hours", [(0.3, 0.3), (0.3, 20), (40, 20)])
@pytest.mark.parametrize("task", ["profile", "train"])
def test_a_follower_whose_pod_vanishes_follows_to_the_end(task, hours, tmp_path):
    definition = compile_kubeflow(shipped("claim"), folder=ROOT).definition
    run = played(definition, tmp_path, ends={task: ["vanished"]}, hours={task: hours})
    assert [step.attempt for step in run.steps if step.task == task] == [0, 1]
    assert run.state == "SUCCEEDED", {n.name: n.message for n in run.nodes.values() if n.message}


@pytest.mark.parametrize(
    ("ends", "state"), [([], "COMPLETE"), ([1], "FAILED"), (["killed"], "RUNNING")]
)
def test_an_exit_task_is_told_a_state_and_no_reason(ends, state, tmp_path):
    def one() -> None:
        with dsl.ExitHandler(end()):
            tell(text="a")

    outcome = json.loads(played(one, tmp_path, ends={"tell": ends}).steps[-1].command[1])
    assert (outcome["state"], outcome["error"]) == (state, {})


@pytest.mark.parametrize(
    ("score", "tasks", "state"),
    [(0.95, ["judge", "named"], "COMPLETE"), (0.94, ["judge"], "RUNNING")],
)
def test_steps_under_a_condition_run_where_it_is_met(score, tasks, state, tmp_path):
    """Where it is not met and comes last, no launcher tells the state of the group around it."""

    def one(least: float = 0.95) -> None:
        with dsl.ExitHandler(end()), dsl.If(judge().output >= least, name="good-enough"):
            named(text="a", aside="b")

    run = played(one, tmp_path, told={"parameterValues": {"score": score}})
    assert (run.state, [step.task for step in run.steps]) == ("SUCCEEDED", [*tasks, "end"])
    assert json.loads(run.steps[-1].command[1])["state"] == state


@pytest.mark.parametrize("word", ["yes", "no", ""])
def test_of_two_conditions_on_a_text_one_runs(word, tmp_path):
    """Of the group that ends last, a launcher tells the state: it is complete."""

    def one() -> None:
        with dsl.ExitHandler(end()):
            made = tell(text="first")
            with dsl.If(made.outputs["word"] == "yes", name="first"):
                named(text="a", aside="b")
            with dsl.If(made.outputs["word"] != "yes", name="second"):
                judge()

    run = played(one, tmp_path, told={"parameterValues": {"word": word, "score": 1}})
    expected = ["tell", "named" if word == "yes" else "judge", "end"]
    assert (run.state, [step.task for step in run.steps]) == ("SUCCEEDED", expected)
    if word != "yes":
        assert json.loads(run.steps[-1].command[1])["state"] == "COMPLETE"


def test_a_condition_with_another_branch_is_not_played(tmp_path):
    def one(least: float = 0.95) -> None:
        with dsl.If(judge().output >= least):
            tell(text="a")
        with dsl.Else():
            tell(text="b")

    with pytest.raises(NotPlayedError, match="condition"):
        played(one, tmp_path)
