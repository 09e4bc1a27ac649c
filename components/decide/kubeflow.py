"""The decide component on Kubeflow; see README.md for its contract."""

from components.kubeflow_run import Component, Run, Task, Value
from components.kubeflow_steps import (
    EXECUTOR_INPUT,
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


def decide_component(image: str) -> Component:
    """The component, whose container runs `image`."""

    @container_component
    def decide(
        profile: Input[Artifact],
        decision: Output[Artifact],
        metrics: Output[Metrics],
        summary: Output[Markdown],
        action: OutputText,
        where: OutputText,
        workload: str,
        instance_type: str,
        instance_count: int,
        objective: str = "cost",
        max_usd_per_hour: str = "",
        max_data_hosts: int = 8,
        allowed_types: str = "",
        epochs: int = 0,
        pools_file: str = "",
    ) -> ContainerSpec:
        """Which cluster pays, in time and money? Records and prices in, ranked plans out.

        Args:
            profile: profile.json.
            workload: The workload, as JSON.
            instance_type: Instance type, or node pool, that trains today.
            instance_count: Hosts that train today.
            objective: What ranks the plans: cost or time.
            max_usd_per_hour: Dollars an hour that all hosts may cost; empty: no limit.
            max_data_hosts: Most data hosts that a plan may have; 0: no data group.
            allowed_types: Types that a plan may have, by commas; empty: all that are known.
            epochs: Epochs of the training; 0: as the workload says.
            pools_file: Text of the CSV file of node pools; empty: those of the workload.
            decision: decision.json.
            metrics: What the chosen plan promises.
            summary: The plans, and why, in words.
            action: keep, tune, scale_up, heterogeneous or scale_out.
            where: pod: the plan is one host of today's type; job: any other.
        """
        return ContainerSpec(
            image=image,
            command=["stoker", "decide"],
            args=[
                profile.path,
                *("--workload", workload),
                f"--param=instance_type={instance_type}",
                f"--param=instance_count={instance_count}",
                f"--param=objective={objective}",
                f"--param=max_usd_per_hour={max_usd_per_hour}",
                f"--param=max_data_hosts={max_data_hosts}",
                f"--param=allowed_types={allowed_types}",
                f"--param=epochs={epochs}",
                f"--param=pools_file={pools_file}",
                f"--out={decision.path}",
                f"--summary={summary.path}",
                *("--executor-input", EXECUTOR_INPUT),
            ],
        )

    return decide


def decide_step(run: Run, *, profile: Value) -> Task:
    """Ranks clusters; never taken from the cache: prices grow old, and it is the cheapest step."""
    task = decide_component(run.request.image)(
        profile=profile,
        **run.given(
            "workload",
            "instance_type",
            "instance_count",
            "objective",
            "max_usd_per_hour",
            "max_data_hosts",
            "allowed_types",
            "epochs",
            "pools_file",
        ),
    )
    return step(run, task, display_name="Decide")
