"""What `status` says of the steps of pipelines that are not stoker's own.

Loops in loops, conditions in loops, pipelines as components, tasks tried again, cached ones, exit
tasks: each is listed by the pipeline's own names, and a failed one by its own words. The nodes are
those that the strict double of Kubeflow 2.17 makes.
"""

from collections.abc import Callable, Mapping

import pytest
import yaml

pytest.importorskip("kfp")

from kfp import dsl
from kfp.dsl import ContainerSpec, PipelineTaskFinalStatus

from stoker import kubeflow
from stoker.pipelines.base import RunState, RunStep
from support.kfp_server import KfpServer
from support.kubeflow_backend import KubeflowRun, Pipeline, Step, Store
from support.kubeflow_uploads import client_at, upload, workload

LAUNCHER = "I1126 10:00:00.123456       1 launcher_v2.go:191] publish success.\n"
SECONDS = 7


@dsl.container_component
def make(word: dsl.OutputPath(str), of: str = "own"):  # type: ignore[no-untyped-def,valid-type]
    """Makes a word."""
    return ContainerSpec(image="a/b", command=["make"], args=[word, of])


@dsl.container_component
def use(text: str, with_: str = "own"):  # type: ignore[no-untyped-def]
    """Uses a word."""
    return ContainerSpec(image="a/b", command=["use"], args=[text, with_])


@dsl.container_component
def step_2_of_3x(text: str):  # type: ignore[no-untyped-def]
    """Has digits in its name."""
    return ContainerSpec(image="a/b", command=["step"], args=[text])


@dsl.container_component
def end(outcome: PipelineTaskFinalStatus):  # type: ignore[no-untyped-def]
    """Says how a run ended."""
    return ContainerSpec(image="a/b", command=["end"], args=[f"{outcome}"])


def nested_loops() -> None:
    with dsl.ParallelFor(["s", "t"]) as size, dsl.ParallelFor(["a", "b"]) as rate:
        use(text=rate, with_=size)


def condition_in_a_loop() -> None:
    with dsl.ParallelFor(["a", "b"]) as text:
        made = make(of=text)
        with dsl.If(made.outputs["word"] == "yes", name="wanted"):
            use(text=text, with_="b")


@dsl.pipeline(name="inner")
def inner(text: str) -> None:
    made = make(of=text)
    use(text=made.outputs["word"], with_=text)


def pipeline_in_a_pipeline() -> None:
    first = make(of="a")
    inner(text=first.outputs["word"])
    step_2_of_3x(text=first.outputs["word"])


def a_pipeline_used_twice() -> None:
    first = inner(text="a")
    inner(text="b").after(first)


def branches() -> None:
    made = step_2_of_3x(text="a")
    word = make(of="b").after(made).outputs["word"]
    with dsl.If(word == "yes", name="big"):
        inner(text="x")
    with dsl.If(word == "no", name="small"):
        inner(text="y")


def a_loop_beside_a_group() -> None:
    with dsl.ParallelFor(["a", "b"]) as text:
        inner(text=text)
    inner(text="c")


def with_an_exit_task() -> None:
    with dsl.ExitHandler(end()):
        made = make(of="a")
        use(text=made.outputs["word"], with_="b").set_retry(3, backoff_duration="60s")
        use(text="later", with_="b").after(made)


def dashes() -> None:
    first = step_2_of_3x(text="a")
    second = step_2_of_3x(text="b").after(first)
    step_2_of_3x(text="c").after(second)


def lacks_an_input() -> None:
    with dsl.ExitHandler(end()):
        made = make(of="a")
        # The driver resolves no input that a command names and nobody passes.
        use(text=made.outputs["word"])
        use(text="later", with_="b").after(made)


Ends = Mapping[tuple[str, int], int | str]


@pytest.fixture
def server():
    with KfpServer() as made:
        yield made
    assert made.problems == []


@pytest.fixture
def state_of(server, tmp_path):
    """Runs a pipeline on the double, and returns what `status` says; `ends` by task and call."""

    def told(
        pipeline: Callable[[], None],
        *,
        ends: Ends | None = None,
        words: Mapping[str, str] | None = None,
        runs: int = 1,
    ) -> RunState:
        upload(server)
        definition = kubeflow.compiled(dsl.pipeline(name="mnist")(pipeline))
        ((versions,),) = [server.versions.values()]
        spec, platform = _documents(definition)
        versions[-1]["pipeline_spec"] = {"pipeline_spec": spec, "platform_spec": platform}
        store = Store(tmp_path)
        for _ in range(runs):
            run = client_at(server).start(workload(), ()).run
            _play(server, definition, store=store, ends=ends or {}, words=words or {})
        return client_at(server).status(run)

    return told


def _documents(definition: str) -> list[object]:
    documents = [*yaml.load_all(definition, Loader=yaml.CSafeLoader)]
    return [*documents, {}][:2]


def _play(
    server: KfpServer, definition: str, *, store: Store, ends: Ends, words: Mapping[str, str]
) -> None:
    calls: dict[str, int] = {}

    def execute(step: Step) -> int | str:
        step.write_outputs()
        number = calls.get(step.task, 0)
        calls[step.task] = number + 1
        if words and step.task == "make":
            step.tell({"parameterValues": words})
        ended = ends.get((step.task, number), 0)
        if isinstance(ended, int):
            node = step.pod["metadata"]["annotations"]["workflows.argoproj.io/node-id"]
            server.logs[node] = f"{LAUNCHER}error: {step.task} {number} broke\n"
        run.clock.sleep(SECONDS)
        return ended

    run = KubeflowRun(Pipeline(definition), execute=execute, store=store)
    ended = run.run()
    server.tell(*run.workflow_nodes())
    server.end(ended)


def names_and_states(steps: tuple[RunStep, ...]) -> list[str]:
    return [f"{step.name} {step.status}" for step in steps]


def test_loops_in_loops_have_a_step_for_each_pair(state_of):
    state = state_of(nested_loops)
    assert names_and_states(state.steps) == [f"use[{number}] SUCCEEDED" for number in range(4)]
    assert {step.seconds for step in state.steps} == {SECONDS}


@pytest.mark.parametrize("number", range(4))
def test_the_failed_one_of_a_loops_steps_says_its_own_words(number, state_of):
    state = state_of(nested_loops, ends={("use", number): 1})
    failed = [step for step in state.steps if step.status == "FAILED"]
    assert [step.reason for step in failed] == [f"use {number} broke"]
    assert "use" in failed[0].log
    assert state.exit_code == 4


@pytest.mark.parametrize(("word", "status"), [("yes", "SUCCEEDED"), ("no", "not run")])
def test_a_condition_in_a_loop_that_is_not_met_ran_nothing(word, status, state_of):
    state = state_of(condition_in_a_loop, words={"word": word})
    states = names_and_states(state.steps)
    assert states[:2] == ["make[0] SUCCEEDED", "make[1] SUCCEEDED"]
    of_use = [step.status for step in state.steps if step.name.startswith("use")]
    assert set(of_use) == {status}


def test_the_tasks_of_a_pipeline_that_is_a_component_are_listed_and_it_is_not(state_of):
    state = state_of(pipeline_in_a_pipeline)
    assert sorted(names_and_states(state.steps)) == [
        "inner/make SUCCEEDED",
        "make SUCCEEDED",
        "step-2-of-3x SUCCEEDED",
        "use SUCCEEDED",
    ]


def test_of_a_pipeline_used_twice_each_task_is_told_with_its_group(state_of):
    state = state_of(a_pipeline_used_twice, ends={("use", 1): 1})
    ended = {step.name: step.status for step in state.steps}
    failed = [step for step in state.steps if step.status == "FAILED"]
    assert ended.keys() == {"inner/make", "inner/use", "inner-2/make", "inner-2/use"}
    assert [step.reason for step in failed] == ["use 1 broke"]
    first, second = (ended[f"{group}/use"] for group in ("inner", "inner-2"))
    assert {first, second} == {"SUCCEEDED", "FAILED"}


@pytest.mark.parametrize("word", ["yes", "no", "perhaps"])
def test_of_branches_with_tasks_of_one_name_only_the_one_that_was_taken_ran(word, state_of):
    state = state_of(branches, words={"word": word})
    expected = {"condition-1/inner/use": "yes", "condition-2/inner-2/use": "no"}
    ended = {step.name: step.status for step in state.steps if step.name in expected}
    assert ended == {
        name: "SUCCEEDED" if word == taken else "not run" for name, taken in expected.items()
    }


@pytest.mark.parametrize("number", range(3))
def test_a_failed_item_of_a_loop_is_not_taken_for_the_task_beside_the_loop(number, state_of):
    """Calls of `use` in their order: the two items of the loop's group, then the other group's."""
    state = state_of(a_loop_beside_a_group, ends={("use", number): 1})
    names = ["for-loop-2/inner/use[0]", "for-loop-2/inner/use[1]", "inner-2/use"]
    ended = {step.name: step for step in state.steps if step.name in names}
    assert sorted(ended) == names
    failed = [step for step in ended.values() if step.status == "FAILED"]
    assert [step.reason for step in failed] == [f"use {number} broke"]
    assert len({step.path for step in ended.values()}) == 3
    assert all(step.path.endswith(".use") for step in ended.values())


def test_of_two_tasks_of_one_name_the_cached_one_is_told(state_of):
    state = state_of(pipeline_in_a_pipeline, runs=2)
    cached = {step.name for step in state.steps if step.status == "cached"}
    assert cached == {"make", "inner/make", "use", "step-2-of-3x"}


def test_a_task_that_was_tried_again_is_one_step_with_the_time_of_all_tries(state_of):
    state = state_of(with_an_exit_task, ends={("use", 0): "vanished"})
    states = names_and_states(state.steps)
    assert states == ["make SUCCEEDED", "use SUCCEEDED", "use-2 SUCCEEDED", "end SUCCEEDED"]
    tried = next(step for step in state.steps if step.name == "use")
    assert tried.seconds is not None
    assert tried.seconds >= 2 * SECONDS


def test_what_waits_for_a_failed_task_did_not_run_and_the_exit_task_did(state_of):
    state = state_of(with_an_exit_task, ends={("make", 0): 1})
    states = names_and_states(state.steps)
    assert states == ["make FAILED", "use not run", "use-2 not run", "end SUCCEEDED"]
    assert state.steps[0].reason == "make 0 broke"


def test_cached_tasks_in_the_middle_are_told_apart(state_of):
    state = state_of(with_an_exit_task, runs=2)
    states = {step.name: step.status for step in state.steps}
    assert states["end"] == "SUCCEEDED"
    cached = {name for name, status in states.items() if status == "cached"}
    assert cached == {"make", "use", "use-2"}


def test_tasks_of_one_component_keep_their_numbers_and_order(state_of):
    state = state_of(dashes, ends={("step-2-of-3x-2", 0): 1})
    assert names_and_states(state.steps) == [
        "step-2-of-3x SUCCEEDED",
        "step-2-of-3x-2 FAILED",
        "step-2-of-3x-3 not run",
    ]
    assert state.steps[1].reason == "step-2-of-3x-2 0 broke"


@pytest.mark.parametrize("has_log", [True, False])
def test_a_task_whose_driver_failed_has_not_just_not_run(has_log, state_of, server):
    state = state_of(lacks_an_input)
    states = names_and_states(state.steps)
    assert states == ["make SUCCEEDED", "use FAILED", "use-2 SUCCEEDED", "end SUCCEEDED"]
    if not has_log:
        assert state.reason == "use: Kubeflow's driver could not begin it"
        return
    details = server.run()["run_details"]["task_details"]
    driver = next(each for each in details if each["display_name"] == "use-driver")
    node = driver["child_tasks"][0]["pod_name"]
    why = "driver.Container(...) failed: failed to resolve inputs: no value for with_"
    server.logs[node] = (
        "I1126 10:00:00.100000       1 main.go:50] begins\n"
        f"F1126 10:00:00.200000       1 main.go:79] {why}\n"
        'time="2026-11-26T10:00:01.000Z" level=info msg="sub-process exited"\n'
    )
    state = client_at(server).status(state.run)
    assert state.reason == f"use: Kubeflow's driver could not begin it: {why}"
    assert state.exit_code == 4
