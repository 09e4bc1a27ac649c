"""The evaluate component on Kubeflow, and the gate; see README.md for their contract."""

from components.kubeflow_run import Component, Run, Task, Value
from components.kubeflow_steps import (
    EXECUTOR_INPUT,
    HTML,
    Artifact,
    ContainerSpec,
    Input,
    Markdown,
    Metrics,
    Output,
    OutputText,
    container_component,
    step,
)


def evaluate_component(image: str) -> Component:
    """The component, whose container runs `image`."""

    @container_component
    def evaluate(
        profile: Input[Artifact],
        decision: Input[Artifact],
        evaluation: Output[Artifact],
        report: Output[HTML],
        metrics: Output[Metrics],
        summary: Output[Markdown],
        passed: OutputText,
        workload: str,
        training: str,
        instance_type: str,
        instance_count: int,
        gate: str = "",
    ) -> ContainerSpec:
        """Did quality hold, did the promise hold? Ends well whatever the verdict.

        Args:
            profile: profile.json.
            decision: decision.json.
            workload: The workload, as JSON.
            training: training.json as a text.
            instance_type: Instance type, or node pool, that trains today.
            instance_count: Hosts that train today.
            gate: What the model must reach, as accuracy>=0.94, loss<=0.2; empty: no gate.
            evaluation: evaluation.json.
            report: The whole run on a page.
            metrics: The gate's metrics, speed and cost.
            summary: The verdict in words.
            passed: true or false.
        """
        return ContainerSpec(
            image=image,
            command=["stoker", "evaluate"],
            args=[
                workload,
                f"--profile={profile.path}",
                f"--decision={decision.path}",
                *("--training", training),
                f"--param=instance_type={instance_type}",
                f"--param=instance_count={instance_count}",
                f"--param=gate={gate}",
                f"--out={evaluation.path}",
                f"--report={report.path}",
                f"--summary={summary.path}",
                "--always",
                *("--executor-input", EXECUTOR_INPUT),
            ],
        )

    return evaluate


def gate_component(image: str) -> Component:
    """The component that fails where the evaluation did; its container runs `image`."""

    @container_component
    def gate(evaluation: Input[Artifact]) -> ContainerSpec:
        """Fails, in the evaluation's own words, where the evaluation did not pass.

        Args:
            evaluation: evaluation.json.
        """
        return ContainerSpec(
            image=image,
            command=["stoker", "evaluate"],
            args=[f"--gate-of={evaluation.path}"],
        )

    return gate


def evaluate_step(run: Run, *, profile: Value, decision: Value, training: Value) -> Task:
    """Judges the run, and makes its report."""
    task = evaluate_component(run.request.image)(
        profile=profile,
        decision=decision,
        training=training,
        **run.given("workload", "instance_type", "instance_count", "gate"),
    )
    return step(run, task, display_name="Evaluate")


def gate_step(run: Run, *, evaluation: Value) -> Task:
    """Fails the run where the evaluation did not pass."""
    task = gate_component(run.request.image)(evaluation=evaluation)
    return step(run, task, display_name="Gate")
