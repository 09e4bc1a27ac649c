"""The profile component on Kubeflow; see README.md for its contract."""

from components.kubeflow_run import Component, Run, Task
from components.kubeflow_steps import (
    EXECUTOR_INPUT,
    Artifact,
    ContainerSpec,
    Markdown,
    Metrics,
    Output,
    container_component,
    step,
    with_own_pod,
)


def profile_component(image: str) -> Component:
    """The component, whose container runs `image`."""

    @container_component
    def profile(
        profile: Output[Artifact],
        metrics: Output[Metrics],
        summary: Output[Markdown],
        workload: str,
        instance_type: str,
        instance_count: int,
        platform: str = "local",
        input_data: str = "",
    ) -> ContainerSpec:
        """What does a training step wait for? Runs the unchanged command for a few minutes.

        Args:
            workload: The workload, as JSON.
            instance_type: Instance type, or node pool, that trains today.
            instance_count: Hosts that train today.
            platform: local: on this step's own node; kubernetes: as a job that it creates.
            input_data: Address of the training data; empty: the workload has none.
            profile: profile.json.
            metrics: Seconds of a step and of its parts.
            summary: The verdict in words.
        """
        return ContainerSpec(
            image=image,
            command=["stoker", "profile"],
            args=[
                workload,
                f"--platform={platform}",
                f"--param=instance_type={instance_type}",
                f"--param=instance_count={instance_count}",
                f"--param=input_data={input_data}",
                f"--out={profile.path}",
                f"--summary={summary.path}",
                *("--executor-input", EXECUTOR_INPUT),
            ],
        )

    return profile


def profile_step(run: Run) -> Task:
    """Profiles on today's cluster; an earlier run's profile of the same inputs will do.

    Today's cluster is the step's own pod where it is one host, as the workload says; else a job.
    """
    is_one_host = run.num_hosts_today == 1
    task = profile_component(run.request.image)(
        platform="local" if is_one_host else run.platform,
        **run.given("workload", "instance_type", "instance_count", "input_data"),
    )
    step(run, task, display_name="Profile", on_todays_host=is_one_host, is_cached=True)
    return task if is_one_host else with_own_pod(run, task)
