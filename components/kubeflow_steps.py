"""Components and steps of a Kubeflow pipeline: the one module of the project that knows kfp.

A component is a container: stoker's image, a verb of stoker, file paths and scalars. A step is a
component with the pod that it needs. Everything that may differ from run to run is a parameter of
the pipeline; the rest is fixed when it is compiled, with no network.
"""

import ast
import inspect
import json
import pprint
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from components.kubeflow_run import Component, Run, Task, Value
from kfp import compiler, dsl, kubernetes
from kfp.dsl import (
    HTML,
    Artifact,
    ContainerSpec,
    Input,
    Markdown,
    Metrics,
    Model,
    Output,
    PipelineTaskFinalStatus,
)

from stoker.orchestrators.kubeflow.compile import KubeflowRequest
from stoker.parameters import Parameter
from stoker.platforms.kubernetes.objects import PodGroup
from stoker.records import Toleration
from stoker.records.platforms import amount

if TYPE_CHECKING:
    OutputText = str
else:
    OutputText = dsl.OutputPath(str)

# Kubeflow puts a JSON document in its place: the step's inputs, and where its outputs belong.
EXECUTOR_INPUT: str = dsl.PIPELINE_TASK_EXECUTOR_INPUT_PLACEHOLDER
# Stands for the run's own id, but only as the whole value of an input.
RUN_ID: str = dsl.PIPELINE_JOB_ID_PLACEHOLDER

_TYPES = {"string": str, "integer": int, "object": dict}
_SHM = "shm"


def container_component(function: object) -> Component:
    """The component that `function` describes: its arguments are inputs and outputs.

    kfp calls it once, with a placeholder for each argument; its docstring describes them.
    """
    made: Component = dsl.container_component(function)
    return made


def pipeline(request: KubeflowRequest, body: Callable[[Run], None], *, description: str) -> str:
    """The compiled pipeline, as YAML: the same text for the same request.

    Args:
        request: Gives it a name and parameters.
        body: Makes the steps.
        description: For whoever looks at it in Kubeflow.
    """
    parameters = request.parameters

    def graph(*values: Value) -> None:
        names = (parameter.name for parameter in parameters)
        body(Run(request=request, parameters=dict(zip(names, values, strict=True))))

    graph.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [_argument(parameter, request) for parameter in parameters]
    )
    # Kubeflow's console shows a parameter's description beside its field.
    texts = "\n".join(f"    {parameter.name}: {parameter.text}" for parameter in parameters)
    graph.__doc__ = f"{description}\n\nArgs:\n{texts}\n"
    return compiled(dsl.pipeline(name=request.workload.name, description=description)(graph))


def compiled(component: object) -> str:
    """A component or pipeline as YAML."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "compiled.yaml"
        compiler.Compiler().compile(component, str(file))
        return _with_sorted_defaults(file.read_text(encoding="utf-8"))


def _with_sorted_defaults(text: str) -> str:
    """Sorts the default objects in kfp's heading: it writes them in the order of their hashes."""
    return re.sub(
        r"(?m)^(#    \w+: dict \[Default: )(\{.*\})\]$",
        lambda found: f"{found[1]}{pprint.pformat(ast.literal_eval(found[2]), width=sys.maxsize)}]",
        text,
    )


def step(
    run: Run,
    task: Task,
    *,
    display_name: str,
    on_todays_host: bool = False,
    is_cached: bool = False,
) -> Task:
    """The step in its pod: with the run's image, and on a host of today's type if that is asked.

    Args:
        run: Of the pipeline.
        task: Of a component.
        display_name: In the console.
        on_todays_host: With its GPUs, node labels, data and shared memory.
        is_cached: Whether an earlier run's outputs of the same inputs will do.
    """
    task.set_display_name(display_name)
    task.set_caching_options(is_cached)
    settings = run.request.settings
    pod = run.request.pod
    if pod is None:
        return task
    task.set_container_image(run.parameters["image"])
    if settings.image_pull_policy:
        kubernetes.set_image_pull_policy(task, settings.image_pull_policy)
    if settings.image_pull_secrets:
        kubernetes.set_image_pull_secrets(task, list(settings.image_pull_secrets))
    if on_todays_host:
        _host_of_today(run, task, pod.group, pod.claims)
    return task


def with_own_pod(run: Run, task: Task) -> Task:
    """The step with its pod's name in its environment: what it creates is deleted with it."""
    if run.request.pod:
        for name, path in (("NAME", "name"), ("UID", "uid"), ("NAMESPACE", "namespace")):
            kubernetes.use_field_path_as_env(task, f"POD_{name}", f"metadata.{path}")
    return task


def with_retries(task: Task, *, num_retries: int, wait_seconds: int) -> Task:
    """The step, tried again when it fails; waits double."""
    task.set_retry(num_retries, backoff_duration=f"{wait_seconds}s", backoff_factor=2.0)
    return task


def ending_with(task: Task) -> AbstractContextManager[object]:
    """Runs the step when all others inside have ended, whatever became of them."""
    made: AbstractContextManager[object] = dsl.ExitHandler(task, name="run")
    return made


def when(condition: object) -> AbstractContextManager[object]:
    """Steps that run where the condition holds."""
    made: AbstractContextManager[object] = dsl.If(condition, name="in-a-pod")
    return made


def otherwise() -> AbstractContextManager[object]:
    """Steps that run where the condition before it does not hold."""
    made: AbstractContextManager[object] = dsl.Else(name="as-a-job")
    return made


def one_of(*values: Value) -> Value:
    """The value of the branch that ran. Texts only: no server before 2026 joins files."""
    made: Value = dsl.OneOf(*values)
    return made


def _argument(parameter: Parameter, request: KubeflowRequest) -> inspect.Parameter:
    default: object = parameter.default(request.workload)
    if parameter.kind == "object":
        default = _object(str(default))
    return inspect.Parameter(
        parameter.name,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        default=default,
        annotation=_TYPES[parameter.kind],
    )


def _host_of_today(run: Run, task: Task, group: PodGroup, claims: Mapping[str, str]) -> None:
    if group.gpus:
        gpu_type, gpu_count = run.parameters["gpu_type"], run.parameters["gpu_count"]
        task.set_accelerator_type(gpu_type).set_accelerator_limit(gpu_count)
        # kfp forgets these two on the way into a group of steps.
        task.register_pipeline_channels([gpu_type, gpu_count])
    task.set_cpu_request(group.requests["cpu"]).set_cpu_limit(group.limits["cpu"])
    task.set_memory_request(_memory(group.requests)).set_memory_limit(_memory(group.limits))
    kubernetes.add_node_selector_json(task, run.parameters["node_selector"])
    for toleration in group.tolerations:
        _tolerate(task, toleration)
    shm = run.request.settings.shm
    kubernetes.empty_dir_mount(
        task,
        volume_name=_SHM,
        mount_path="/dev/shm",
        medium="Memory",
        size_limit=None if shm is None else str(shm),
    )
    for claim, mount_path in claims.items():
        kubernetes.mount_pvc(task, pvc_name=claim, mount_path=mount_path)
    _volumes(task, group)
    for name, value in sorted(group.settings.environment.items()):
        task.set_env_variable(name, value)


def _volumes(task: Task, group: PodGroup) -> None:
    for volume in group.settings.volumes:
        path = volume.mount_path
        if volume.claim:
            sub_path = volume.sub_path or ""
            kubernetes.mount_pvc(task, pvc_name=volume.claim, mount_path=path, sub_path=sub_path)
        elif volume.secret:
            kubernetes.use_secret_as_volume(task, secret_name=volume.secret, mount_path=path)
        elif volume.config_map:
            name = volume.config_map
            kubernetes.use_config_map_as_volume(task, config_map_name=name, mount_path=path)
        else:
            kubernetes.empty_dir_mount(
                task,
                volume_name=volume.name,
                mount_path=path,
                size_limit=str(volume.scratch),
            )


def _tolerate(task: Task, toleration: Toleration) -> None:
    kubernetes.add_toleration(
        task,
        key=toleration.key,
        operator=toleration.operator,
        value=toleration.value,
        effect=toleration.effect,
    )


def _memory(resources: Mapping[str, str]) -> str:
    """In MiB, rounded up: kfp takes no fractions."""
    return f"{-(-int(amount(resources['memory'])) // 2**20)}Mi"


def _object(text: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(text)
    return found


__all__ = [
    "EXECUTOR_INPUT",
    "HTML",
    "RUN_ID",
    "Artifact",
    "ContainerSpec",
    "Input",
    "Markdown",
    "Metrics",
    "Model",
    "Output",
    "OutputText",
    "PipelineTaskFinalStatus",
    "compiled",
    "container_component",
    "ending_with",
    "one_of",
    "otherwise",
    "pipeline",
    "step",
    "when",
    "with_own_pod",
    "with_retries",
]
