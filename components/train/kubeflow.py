"""The train component on Kubeflow, and a run's last step; see README.md for their contract."""

from components.kubeflow_run import Component, Run, Task, Value
from components.kubeflow_steps import (
    EXECUTOR_INPUT,
    RUN_ID,
    Artifact,
    ContainerSpec,
    Input,
    Markdown,
    Metrics,
    Model,
    Output,
    OutputText,
    PipelineTaskFinalStatus,
    container_component,
    step,
    with_own_pod,
    with_retries,
)

_INPUTS = (
    "workload",
    "instance_type",
    "instance_count",
    "input_data",
    "epochs",
    "pools_file",
)


def train_component(image: str) -> Component:
    """The component, whose container runs `image`."""

    @container_component
    def train(
        decision: Input[Artifact],
        record: Output[Artifact],
        metrics: Output[Metrics],
        summary: Output[Markdown],
        model: Output[Model],
        status: OutputText,
        training: OutputText,
        workload: str,
        platform: str,
        run_id: str,
        instance_type: str,
        instance_count: int,
        job_image: str,
        input_data: str = "",
        epochs: int = 0,
        pools_file: str = "",
    ) -> ContainerSpec:
        """Trains on the cluster that was decided on.

        Args:
            decision: decision.json.
            workload: The workload, as JSON.
            platform: local: in this step's own pod; kubernetes: as a job that it creates.
            run_id: The run's own id: the job's name has it, so that a retry adopts the job.
            instance_type: Instance type, or node pool, that trains today.
            instance_count: Hosts that train today.
            job_image: Image of the job's hosts.
            input_data: Address of the training data; empty: the workload has none.
            epochs: Epochs of the training; 0: as the workload says.
            pools_file: Text of the CSV file of node pools; empty: those of the workload.
            record: training.json.
            metrics: What the script reported, and seconds of a step.
            summary: What the training did, in words.
            model: The model that it left; of a job, its address.
            status: succeeded, failed or stopped: a failed training does not fail this step.
            training: training.json as a text, which branches of a pipeline can be joined on.
        """
        return ContainerSpec(
            image=image,
            command=["stoker", "train"],
            args=[
                workload,
                f"--platform={platform}",
                f"--decision={decision.path}",
                f"--run-id={run_id}",
                f"--param=instance_type={instance_type}",
                f"--param=instance_count={instance_count}",
                f"--param=image={job_image}",
                f"--param=input_data={input_data}",
                f"--param=epochs={epochs}",
                f"--param=pools_file={pools_file}",
                f"--out={record.path}",
                f"--summary={summary.path}",
                f"--model={model.path}",
                "--always",
                "--yes",
                *("--executor-input", EXECUTOR_INPUT),
            ],
        )

    return train


def clean_up_component(image: str) -> Component:
    """The component that ends a run; its container runs `image`."""

    @container_component
    def finish(
        outcome: PipelineTaskFinalStatus,
        workload: str,
        platform: str,
        run_id: str,
    ) -> ContainerSpec:
        """Ends the run's job if it is still there, and says how the run ended.

        Args:
            outcome: How the run ended, as Kubeflow tells it.
            workload: The workload, as JSON.
            platform: Of the job.
            run_id: The run's own id.
        """
        return ContainerSpec(
            image=image,
            command=["stoker", "train"],
            args=[
                workload,
                f"--platform={platform}",
                f"--run-id={run_id}",
                f"--clean-up={outcome}",
            ],
        )

    return finish


def train_here_step(run: Run, *, decision: Value) -> Task:
    """Trains in the step's own pod, a host of today's type. No retries: they would train anew."""
    task = _train(run, decision=decision, platform="local")
    return step(run, task, display_name="Train", on_todays_host=True)


def train_as_job_step(run: Run, *, decision: Value) -> Task:
    """Creates the job that was decided on, follows it, and adopts it on a retry.

    Only a cluster that does not answer, or refuses, fails the step: that is worth another try.
    """
    task = _train(run, decision=decision, platform=run.platform)
    step(run, task, display_name="Train as a job")
    return with_own_pod(run, with_retries(task, num_retries=3, wait_seconds=60))


def clean_up_step(run: Run) -> Task:
    """The last step of a run, whatever became of it."""
    task = clean_up_component(run.request.image)(
        **run.given("workload"), platform=run.platform, run_id=RUN_ID
    )
    return step(run, task, display_name="Finish")


def _train(run: Run, *, decision: Value, platform: str) -> Task:
    return train_component(run.request.image)(
        decision=decision,
        platform=platform,
        run_id=RUN_ID,
        job_image=run.parameters["image"],
        **run.given(*_INPUTS),
    )
