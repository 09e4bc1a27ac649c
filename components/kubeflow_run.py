"""What the steps of one run of a Kubeflow pipeline share, and what kfp makes of them, typed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from stoker.orchestrators.kubeflow.compile import KubeflowRequest


class Value(Protocol):
    """What is known when a run starts, or when an earlier step has ended."""

    def __eq__(self, other: object) -> bool:
        """For conditions; kfp makes a condition of it, not a bool."""
        ...


class Task(Protocol):
    """A step."""

    @property
    def outputs(self) -> Mapping[str, Value]:
        """By name: parameters and artifacts."""
        ...

    def set_display_name(self, name: str) -> "Task":
        """In the console."""
        ...

    def set_caching_options(self, enable_caching: bool) -> "Task":
        """Whether an earlier run's outputs of the same inputs will do."""
        ...

    def set_container_image(self, name: Value) -> "Task":
        """In place of the component's."""
        ...

    def set_accelerator_type(self, accelerator: Value) -> "Task":
        """Of its pod."""
        ...

    def set_accelerator_limit(self, limit: Value) -> "Task":
        """Of its pod."""
        ...

    def register_pipeline_channels(self, pipeline_channels: list[Value]) -> None:
        """Has these handed down to it."""
        ...

    def set_cpu_request(self, cpu: str) -> "Task":
        """Of its pod."""
        ...

    def set_cpu_limit(self, cpu: str) -> "Task":
        """Of its pod."""
        ...

    def set_memory_request(self, memory: str) -> "Task":
        """Of its pod."""
        ...

    def set_memory_limit(self, memory: str) -> "Task":
        """Of its pod."""
        ...

    def set_env_variable(self, name: str, value: str) -> "Task":
        """Of its container."""
        ...

    def set_retry(self, num_retries: int, backoff_duration: str, backoff_factor: float) -> "Task":
        """How often it is tried again."""
        ...


class Component(Protocol):
    """A component; called inside of a pipeline it makes a step."""

    def __call__(self, **inputs: object) -> Task:
        """The step with these inputs."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What all steps of a run share.

    Attributes:
        request: What the pipeline is built from.
        parameters: Of the pipeline, by name.
    """

    request: KubeflowRequest
    parameters: Mapping[str, Value]

    @property
    def platform(self) -> str:
        """Of a training that no step's pod can hold."""
        return self.request.workload.platform

    @property
    def num_hosts_today(self) -> int:
        """As the workload says: it is known when the pipeline is compiled."""
        cluster = self.request.workload.cluster
        return cluster.dnn.count if cluster else 1

    def given(self, *names: str) -> dict[str, Value | str]:
        """Inputs of a step that are parameters of the run; empty texts where it has none such."""
        return {name: self.parameters.get(name, "") for name in names}


__all__ = ["Component", "Run", "Task", "Value"]
