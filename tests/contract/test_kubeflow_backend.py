"""Compiled pipelines and components run through a double that is as strict as Kubeflow 2.17.

What the double does that kfp's local runner does not is claimed here too, each by the smallest
pipeline that shows it.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("kfp")

from kfp import dsl, kubernetes
from kfp.dsl import Artifact, ContainerSpec, Input, Output, PipelineTaskFinalStatus

from stoker import kubeflow
from stoker.pipelines.kubeflow.compile import COMPONENTS, compile_kubeflow
from stoker.records import Workload
from stoker.settings import read_workload
from support import examples
from support import kubeflow_pipeline as sample
from support.kubeflow_backend import (
    KubeflowRun,
    NotPlayedError,
    Pipeline,
    RefusedError,
    Step,
    Store,
)

pytestmark = pytest.mark.usefixtures("quick_kfp")

ROOT = Path(__file__).resolve().parents[2]
# As its user says it who has no claim yet; kept in a bucket, data is nothing that pods mount.
WITHOUT_CLAIM = "channels={}"
POOL = "{cpu: 3, memory: 12Gi, gpus: 1}"
# Workloads that the repository ships with an image: those for SageMaker need a pool here.
SHIPPED = {
    "claim": ("mnist-kubeflow",),
    "no claim": ("mnist-kubeflow", WITHOUT_CLAIM),
    "sagemaker": ("mnist-sagemaker", WITHOUT_CLAIM, f"kubernetes.pools={{g5.xlarge: {POOL}}}"),
}


@dsl.container_component
def tell(text: str, word: dsl.OutputPath(str), made: Output[Artifact], aside: str = "own"):  # type: ignore[no-untyped-def,valid-type]
    """Says a word."""
    return ContainerSpec(
        image="a/b", command=["say"], args=["{{$}}", "--word", word, "--made", made.path]
    )


@dsl.container_component
def hear(made: Input[Artifact]):  # type: ignore[no-untyped-def]
    """Reads what another one made."""
    return ContainerSpec(image="a/b", command=["hear"], args=[made.path])


@dsl.container_component
def named(text: str, aside: str = "own"):  # type: ignore[no-untyped-def]
    """Names an input in its command that a caller may leave out."""
    return ContainerSpec(image="a/b", command=["say"], args=[text, f"--aside={aside}"])


@dsl.container_component
def end(outcome: PipelineTaskFinalStatus):  # type: ignore[no-untyped-def]
    """Says how a run ended."""
    return ContainerSpec(image="a/b", command=["end"], args=[f"{outcome}"])


class Player:
    """Plays the commands of steps: what each ends with, and what it tells.

    Args:
        ends: Name of a task to the ends of its attempts, in order; 0 where nothing is said.
        words: Name of an output to what is written into its file.
        seconds: Name of a task to how long its attempts take.
    """

    def __init__(
        self,
        ends: Mapping[str, list[int | str]] | None = None,
        words: Mapping[str, str] | None = None,
        seconds: Mapping[str, list[float]] | None = None,
    ) -> None:
        self.ends = {name: list(found) for name, found in (ends or {}).items()}
        self.words = {"word": "a", "number": "1", "passed": "true", **(words or {})}
        self.seconds = {name: list(found) for name, found in (seconds or {}).items()}
        self.run: KubeflowRun | None = None

    def __call__(self, step: Step) -> int | str:
        outputs = step.executor_input["outputs"]
        for name in (*outputs["artifacts"], *outputs.get("parameters", {})):
            if name != "executor-logs":
                step.output(name).write_text(self.words.get(name, f"{name} of {step.task}"))
        if self.run is not None and self.seconds.get(step.task):
            self.run.clock.sleep(self.seconds[step.task].pop(0))
        left = self.ends.get(step.task, [])
        return left.pop(0) if left else 0


def played(
    definition: str, folder: Path, *, player: Player | None = None, **about: Any
) -> KubeflowRun:
    """Runs a pipeline to its end."""
    player = player or Player()
    run = KubeflowRun(
        Pipeline(definition), execute=player, store=about.pop("store", Store(folder)), **about
    )
    player.run = run
    run.run()
    return run


def compiled(function: Callable[..., object]) -> str:
    return kubeflow.compiled(dsl.pipeline(name="small")(function))


def shipped(kind: str) -> Workload:
    """Returns a shipped workload, as its user fills it in."""
    name, *overrides = SHIPPED[kind]
    return read_workload(examples.document(f"{name}.yaml"), overrides=["image=a/b:1", *overrides])


# What the product ships.


@pytest.mark.parametrize("name", COMPONENTS)
def test_each_component_alone_runs_with_its_required_inputs_only(name, tmp_path):
    component = getattr(kubeflow, name)
    needed = {
        key: "x"
        for key, about in (component.component_spec.inputs or {}).items()
        if not about.optional and about.type == "String"
    }
    numbers = {
        key: 1
        for key, about in (component.component_spec.inputs or {}).items()
        if not about.optional and about.type == "Integer"
    }
    files = [
        key
        for key, about in (component.component_spec.inputs or {}).items()
        if not about.optional and about.type.startswith("system.")
    ]

    def one() -> None:
        made = tell(text="first").outputs["made"] if files else None
        task = component(**needed, **numbers, **dict.fromkeys(files, made))
        assert task

    def last() -> None:
        with dsl.ExitHandler(component(**needed)):
            tell(text="first")

    run = played(compiled(last if name == "finish" else one), tmp_path)
    assert run.state == "SUCCEEDED", run.logs
    (step,) = [step for step in run.steps if step.task == name]
    assert not [word for word in step.command if "{{" in word]


@pytest.mark.parametrize("kind", SHIPPED)
def test_each_shipped_workload_runs_to_its_gate(kind, tmp_path):
    definition = compile_kubeflow(shipped(kind), folder=ROOT).definition
    run = played(definition, tmp_path)
    assert run.state == "SUCCEEDED", run.logs
    tasks = [step.task for step in run.steps]
    assert tasks[:3] == ["period", "profile", "decide"]
    assert tasks[-3:] == ["evaluate", "gate", "finish"]
    assert not [word for step in run.steps for word in step.command if "{{" in word]
    assert {step.container["image"] for step in run.steps} == {"a/b:1"}


def test_a_step_finds_its_run_in_its_environment(tmp_path):
    """A profile's input would spoil the cache: its run comes from the pod's label."""
    definition = compile_kubeflow(shipped("claim"), folder=ROOT).definition
    run = played(definition, tmp_path)
    (train,) = [step for step in run.steps if step.task.startswith("train")][:1]
    assert train.environment["POD_RUN_ID"] == run.run_id
    assert train.environment["POD_NAME"] == train.pod["metadata"]["name"]


def test_a_profile_of_the_same_inputs_comes_from_the_cache_of_another_run(tmp_path):
    definition = compile_kubeflow(shipped("claim"), folder=ROOT).definition
    store = Store(tmp_path)
    first = played(definition, tmp_path, store=store)
    again = played(definition, tmp_path, store=store, run_id=first.run_id.replace("abcd", "0001"))
    assert "profile" in [step.task for step in first.steps]
    assert "profile" not in [step.task for step in again.steps]
    assert again.state == "SUCCEEDED"
    # Argo has no executor(0) then, and the task itself has succeeded.
    boundary = next(name for name in again.nodes if name.endswith(".profile(0)"))
    assert again.nodes[f"{boundary}.executor"].phase == "Skipped"


# Inputs.


def test_what_a_command_names_must_be_passed(tmp_path):
    def one() -> None:
        named(text="a")

    run = played(compiled(one), tmp_path)
    assert run.state == "FAILED"
    assert run.steps == []
    assert (
        "failed to resolve container args: failed to resolve input parameters: "
        'parameter "aside" not found in executor input'
        in run.logs[f"{boundary(run)}.named-driver(0)"]
    )


def boundary(run: KubeflowRun) -> str:
    """Returns the name of the node that the pipeline's own tasks are in."""
    return f"{run.workflow}(0).root(0)"


def test_the_launcher_adds_defaults_to_the_whole_input_only(tmp_path):
    def one() -> None:
        tell(text="a")

    run = played(compiled(one), tmp_path)
    (step,) = run.steps
    told = json.loads(step.command[1])
    assert told["inputs"]["parameterValues"] == {"text": "a", "aside": "own"}
    assert step.command[3] == "/tmp/kfp/outputs/word"
    assert step.command[5].startswith(f"/minio/mlpipeline/v2/artifacts/small/{run.run_id}/tell/")


def test_an_input_of_the_pipeline_without_a_value_is_not_passed(tmp_path):
    def one(text: str, aside: str = None) -> None:  # type: ignore[assignment]  # noqa: RUF013
        tell(text=text, aside=aside)

    run = played(compiled(one), tmp_path, parameters={"text": "a"})
    told = json.loads(run.steps[0].command[1])
    assert told["inputs"]["parameterValues"] == {"text": "a", "aside": "own"}


def test_a_constant_is_put_in_place_only_where_it_is_the_whole_value(tmp_path):
    def one() -> None:
        tell(text=kubeflow.RUN_ID, aside=f"run {kubeflow.RUN_ID}")

    run = played(compiled(one), tmp_path)
    values = json.loads(run.steps[0].command[1])["inputs"]["parameterValues"]
    assert values == {"text": run.run_id, "aside": "run {{$.pipeline_job_uuid}}"}


@pytest.mark.parametrize(
    "given", [{}, {"text": 3}, {"text": "a", "unknown": "b"}], ids=["missing", "kind", "unknown"]
)
def test_a_run_with_wrong_parameters_is_refused(given, tmp_path):
    def one(text: str) -> None:
        tell(text=text)

    with pytest.raises(RefusedError, match=r"text|unknown"):
        played(compiled(one), tmp_path, parameters=given)


def test_the_first_of_several_that_ran_is_taken(tmp_path):
    def one(text: str) -> None:
        with dsl.If(text == "left"):
            left = tell(text="left")
        with dsl.Else():
            right = tell(text="right")
        tell(text=dsl.OneOf(left.outputs["word"], right.outputs["word"])).set_display_name("last")

    run = played(compiled(one), tmp_path, parameters={"text": "right"}, player=Player())
    assert [step.task for step in run.steps] == ["tell-2", "tell-3"]
    assert run.state == "SUCCEEDED"


# Outputs.


def test_an_artifact_without_a_file_is_no_error_and_a_parameter_without_one_is(tmp_path):
    def one() -> None:
        hear(made=tell(text="a").outputs["made"])

    def without(name: str) -> Callable[[Step], int]:
        def execute(step: Step) -> int:
            if step.task == "tell":
                step.output("word").write_text("a")
                step.output("made").write_text("b")
                step.output(name).unlink()
            return 0

        return execute

    for name, state in (("made", "SUCCEEDED"), ("word", "FAILED")):
        run = KubeflowRun(
            Pipeline(compiled(one)), execute=without(name), store=Store(tmp_path / name)
        )
        assert run.run() == state


@pytest.mark.parametrize(
    ("uri", "state"), [("pvc://runs/a", "SUCCEEDED"), ("s3://elsewhere/a", "FAILED")]
)
def test_an_address_in_another_bucket_fails_the_step(uri, state, tmp_path):
    """The launcher uploads what it can name a path of, and knows the run's own bucket only."""

    def one() -> None:
        tell(text="a")

    def execute(step: Step) -> int:
        told = {"name": "made", "uri": uri, "metadata": {}}
        step.tell({"parameterValues": {"word": "a"}, "artifacts": {"made": {"artifacts": [told]}}})
        return 0

    run = KubeflowRun(Pipeline(compiled(one)), execute=execute, store=Store(tmp_path))
    assert run.run() == state


# Nodes and retries.


def test_nodes_have_the_names_that_merged_retries_give_them(tmp_path):
    def one() -> None:
        with dsl.ExitHandler(end()):
            tell(text="a")

    run = played(compiled(one), tmp_path)
    wanted = {"executor": "Succeeded", "executor(0)": "Succeeded", run.workflow: "Succeeded"}
    names = ("root", "exit-handler-1", "tell", "end", "exit-handler-1.onExit")
    for name in names:
        wanted |= {name: "Succeeded", f"{name}(0)": "Succeeded"}
        if "." not in name:
            wanted |= {f"{name}-driver": "Succeeded", f"{name}-driver(0)": "Succeeded"}
    assert run.shown() == {**wanted, f"{run.workflow}(0)": "Succeeded"}


def test_an_exit_code_is_never_tried_again(tmp_path):
    def one() -> None:
        with dsl.ExitHandler(end()):
            tell(text="a").set_retry(3, backoff_duration="60s")
            tell(text="b")

    run = played(compiled(one), tmp_path, player=Player({"tell": [137]}))
    assert [step.task for step in run.steps] == ["tell", "tell-2", "end"]
    assert run.state == "FAILED"
    executor = f"{boundary(run)}.exit-handler-1(0).tell(0).executor"
    # The launcher's own code, whatever the command's was.
    assert run.nodes[executor].message == "main: Error (exit code 1)"


def test_a_pod_that_vanishes_is_tried_again_with_its_backoff(tmp_path):
    def one() -> None:
        tell(text="a").set_retry(3, backoff_duration="60s", backoff_factor=2.0)

    run = played(compiled(one), tmp_path, player=Player({"tell": ["vanished", "vanished"]}))
    assert run.state == "SUCCEEDED"
    assert [step.attempt for step in run.steps] == [0, 1, 2]
    assert [step.environment["KFP_RETRY_INDEX"] for step in run.steps] == ["0", "1", "2"]
    assert run.clock.seconds == 60 + 120


def test_a_later_attempt_is_ended_when_the_longest_backoff_is_over(tmp_path):
    """Argo's maxDuration is kfp's hour: it counts from the first attempt's begin."""

    def one() -> None:
        tell(text="a").set_retry(3, backoff_duration="60s")

    player = Player({"tell": ["vanished"]}, seconds={"tell": [600.0, 3600.0]})
    run = played(compiled(one), tmp_path, player=player)
    assert run.state == "FAILED"
    executor = f"{boundary(run)}.tell(0).executor(1)"
    assert run.nodes[executor].message == "Step exceeded its deadline"
    assert run.clock.seconds == 3600


@pytest.mark.parametrize("hours", [(0.3, 0.3), (0.3, 20), (20, 0.3), (40, 20)])
@pytest.mark.parametrize("task", ["profile", "train"])
def test_a_follower_whose_pod_vanishes_follows_to_the_end(task, hours, tmp_path):
    definition = compile_kubeflow(shipped("claim"), folder=ROOT).definition
    player = Player({task: ["vanished"]}, seconds={task: [each * 3600 for each in hours]})
    run = played(definition, tmp_path, player=player)
    assert [step.attempt for step in run.steps if step.task == task] == [0, 1]
    assert run.state == "SUCCEEDED", {n.name: n.message for n in run.nodes.values() if n.message}


def test_pods_are_gone_an_hour_after_the_end(tmp_path):
    def one() -> None:
        tell(text="a")

    run = played(compiled(one), tmp_path)
    assert set(run.left_pods()) == {n.pod for n in run.nodes.values() if n.type == "Pod"}
    run.clock.sleep(3599)
    assert run.left_pods()
    run.clock.sleep(1)
    assert not run.left_pods()


# Exit tasks.


@pytest.mark.parametrize(
    ("ends", "state"), [([], "COMPLETE"), ([1], "FAILED"), (["killed"], "RUNNING")]
)
def test_an_exit_task_is_told_a_state_and_no_reason(ends, state, tmp_path):
    def one() -> None:
        with dsl.ExitHandler(end()):
            tell(text="a")

    run = played(compiled(one), tmp_path, player=Player({"tell": ends}))
    assert json.loads(run.steps[-1].command[1]) == {
        "error": {},
        "pipelineJobResourceName": run.workflow,
        "pipelineTaskName": "exit-handler-1",
        "state": state,
    }


def test_a_task_after_an_exit_task_is_refused():
    def one() -> None:
        first = tell(text="a")
        last = tell(text="b", aside="c").after(first).ignore_upstream_failure()
        tell(text="c").after(last)

    with pytest.raises(RefusedError, match="sorting failed: invalid dependency tell-2"):
        Pipeline(compiled(one))


# Pods.


def test_the_second_document_is_applied_to_the_pod(tmp_path):
    def one() -> None:
        task = tell(text="a")
        kubernetes.mount_pvc(task, pvc_name="data", mount_path="/data", sub_path="mnist")
        kubernetes.use_field_path_as_env(task, "RUN", "metadata.labels['pipeline/runid']")
        kubernetes.use_secret_as_env(task, "key", {"url": "URL"}, optional=True)
        kubernetes.add_pod_label(task, "role", "a")
        kubernetes.set_timeout(task, 60)

    run = played(compiled(one), tmp_path)
    (step,) = run.steps
    spec = step.pod["spec"]
    assert {"name": "data", "persistentVolumeClaim": {"claimName": "data"}} in spec["volumes"]
    mount = {"name": "data", "mountPath": "/data", "subPath": "mnist"}
    assert mount in step.container["volumeMounts"]
    assert step.environment["RUN"] == run.run_id
    reference = {"name": "key", "key": "url", "optional": True}
    variable = {"name": "URL", "valueFrom": {"secretKeyRef": reference}}
    assert variable in step.container["env"]
    assert step.pod["metadata"]["labels"]["role"] == "a"
    assert spec["activeDeadlineSeconds"] == 60


def test_what_the_double_leaves_out_is_refused():
    def one() -> None:
        with dsl.ParallelFor(["a", "b"]) as text:
            tell(text=text)

    with pytest.raises(NotPlayedError, match="parameterIterator"):
        Pipeline(compiled(one))


def test_an_unknown_key_is_refused():
    pipeline, platform = sample.parsed(compile_kubeflow(sample.WORKLOAD, folder=ROOT).definition)
    first = next(iter(platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"].values()))
    first["pvcMounts"] = []
    with pytest.raises(RefusedError, match="pvcMounts"):
        Pipeline(yaml.safe_dump_all([pipeline, platform]))
