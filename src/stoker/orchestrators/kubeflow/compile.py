"""A workload's pipeline on Kubeflow is compiled, and read back for comparing."""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import yaml

from stoker.catalog import with_pools
from stoker.errors import UsageError
from stoker.orchestrators.base import CARRIED, check_complete, fixed, project_pipeline
from stoker.orchestrators.sagemaker.compile import Compiled
from stoker.parameters import Parameter, parameters_of
from stoker.platforms.base import JobSpec
from stoker.platforms.kubernetes.objects import claim_of, lay_out
from stoker.records import (
    Group,
    Json,
    KubeflowSettings,
    KubernetesSettings,
    Workload,
    to_document,
)
from stoker.records.base import mapping

# Of SageMaker's model registry.
_NOT_HERE = ("model_group", "approval")
# Kubeflow has no address that every pod can read: the profile itself comes along.
_REUSE = "Text of a profile.json to use instead of a new profile; empty: profile."
# The parameter of the model in use, and where steps have the folder of champions.
CHAMPION = "champion"
CHAMPIONS_FOLDER = "/mnt/champions"
_CHAMPION = (
    "The model in use, for gates such as accuracy>=champion-0.005: a folder of champions, an "
    "evaluation.json there, or registry:GROUP of SageMaker; empty: none."
)
# A text in the executor input, with each quote escaped, beside the training's record: together they
# are one argument of a process, which has 128 KiB at most.
MAX_WORKLOAD_BYTES = 48 << 10
# By name, where each is in the folder of components.
COMPONENTS = {
    "profile": "profile/component.yaml",
    "decide": "decide/component.yaml",
    "train": "train/component.yaml",
    "evaluate": "evaluate/component.yaml",
    "gate": "evaluate/gate.yaml",
    "finish": "train/finish.yaml",
    "period": "profile/period.yaml",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeflowRequest:
    """Holds all that pipelines/kubeflow.py builds a pipeline from.

    Attributes:
        workload: Workload as the steps read it.
        parameters: Parameters of the pipeline; the first is the workload itself.
        settings: Settings for Kubernetes.
    """

    workload: Workload
    parameters: tuple[Parameter, ...]
    settings: KubernetesSettings

    @property
    def image(self) -> str:
        """Returns the image of all steps, unless a run names another."""
        assert self.workload.image
        return self.workload.image

    @property
    def champions(self) -> tuple[str, str] | None:
        """Returns claim and folder of the champions; None: there is no such folder."""
        named = self.settings.champion
        if not named or not named.startswith("pvc://"):
            return None
        return claim_of(named, where="key kubernetes.champion")


def compile_kubeflow(workload: Workload, *, folder: Path | None = None) -> Compiled:
    """Compiles the workload's pipeline: the same text whenever and wherever, with no network.

    The project's own `pipelines/kubeflow.py` makes it of `stoker.kubeflow`, with kfp's compiler.

    Args:
        workload: Workload with an image, today's cluster and its pool.
        folder: Project folder; absent: the current one.

    Raises:
        UsageError: If the workload lacks what the pipeline needs, the cluster would refuse a pod
            of it, or the project's files or kfp cannot be used.
    """
    request = kubeflow_request(workload)
    with project_pipeline("kubeflow", folder=folder or Path.cwd()) as module:
        definition = str(module.build(request))
    return Compiled(
        name=workload.name,
        description=description_of(request.workload),
        definition=definition,
        parameters=request.parameters,
        uploads={},
    )


def component_files() -> dict[str, str]:
    """Returns one shareable YAML document for each component, by its name.

    Raises:
        UsageError: If this installation has no components.
    """
    for root in CARRIED:
        if all((root / "components" / file).is_file() for file in COMPONENTS.values()):
            return {
                name: (root / "components" / file).read_text(encoding="utf-8")
                for name, file in COMPONENTS.items()
            }
    raise UsageError(
        "this installation of stoker has no compiled components",
        where=" and ".join(map(str, CARRIED)),
        fix="install stoker from its wheel, or run it in its checkout",
    )


def kubeflow_request(workload: Workload) -> KubeflowRequest:
    """Returns all that the pipeline of `workload` is built from.

    Raises:
        UsageError: If the workload lacks what the pipeline needs.
    """
    check_complete(workload, image="REGISTRY/stoker:TAG", instance_type="g5.xlarge")
    settings = workload.kubernetes or KubernetesSettings()
    # The compiling user's own connections are none of a pod's.
    inside = msgspec.structs.replace(settings, kubeflow=None, context=None)
    # Profile and training are jobs on the cluster that Kubeflow is on, wherever people run it else.
    placed = msgspec.structs.replace(
        workload,
        platform="kubernetes",
        sagemaker=None,
        kubernetes=inside if workload.kubernetes else None,
    )
    # Now, not in the run: what the cluster would refuse of today's pods.
    lay_out(_todays_job(placed))
    days = settings.kubeflow.cache_days if settings.kubeflow else KubeflowSettings().cache_days
    parameters = kubeflow_parameters(placed, cache_days=days)
    champion = parameters[[p.name for p in parameters].index(CHAMPION)].default(placed)
    if not champion and any(gate.needs_champion for gate in workload.gate):
        raise UsageError(
            "a gate holds the model against the champion, and nothing says which that is",
            where=f"workload {workload.name}, key gate",
            fix="kubernetes.champion: pvc://CLAIM/FOLDER, or registry:GROUP of SageMaker",
        )
    text = workload_text(placed)
    if len(text.encode()) > MAX_WORKLOAD_BYTES:
        raise UsageError(
            f"the workload's document has {len(text.encode())} bytes, at most {MAX_WORKLOAD_BYTES}",
            where=f"workload {workload.name}",
            fix="shorten it; a pools file needs only the pools that plans may have",
        )
    return KubeflowRequest(workload=placed, parameters=parameters, settings=settings)


def kubeflow_parameters(workload: Workload, *, cache_days: int) -> tuple[Parameter, ...]:
    """Returns the pipeline's parameters."""
    known = [
        dataclasses.replace(p, text=_REUSE) if p.name == "reuse_profile" else p
        for p in parameters_of(workload)
        if p.name not in _NOT_HERE
    ]
    text = "Days for which Kubeflow may re-use a profile of the same inputs; 0: it may not."
    mine = [
        fixed("workload", "string", "The workload, as JSON.", workload_text(workload)),
        fixed("cache_days", "integer", text, cache_days),
        fixed(CHAMPION, "string", _CHAMPION, _champion(workload)),
    ]
    control = (workload.kubernetes or KubernetesSettings()).control
    if control.image:
        text = "Image of the steps, which train nothing themselves."
        mine.append(fixed("control_image", "string", text, control.image))
    return (*mine[:1], *known, *mine[1:])


def _champion(workload: Workload) -> str:
    """Returns what the steps know the model in use by: where its claim is mounted, or its name."""
    named = workload.kubernetes.champion if workload.kubernetes else None
    return CHAMPIONS_FOLDER if named and named.startswith("pvc://") else named or ""


def workload_text(workload: Workload) -> str:
    """Returns the workload's document as the pipeline carries it."""
    return json.dumps(to_document(workload), sort_keys=True, separators=(",", ":"))


def description_of(workload: Workload) -> str:
    """Returns the pipeline's description, in a sentence."""
    return f"stoker: profile, decide, train, evaluate {workload.name}."


def _todays_job(workload: Workload) -> JobSpec:
    assert workload.cluster
    today = Group.of_today(workload.cluster.dnn)
    return JobSpec.of(
        with_pools(workload), groups=[today], run_dir=Path("runs"), name=workload.name
    )


Document = Mapping[str, Json]

# Keys of a task that say only where it is in the tree: not a change of the task itself.
_TOLD_APART = ("taskInfo", "componentRef", "dependentTasks")
_COMPILER = "sdkVersion"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledTask:
    """A compiled pipeline consists of tasks: containers, conditions, loops, imports and groups.

    Attributes:
        kind: Container, Condition, Loop, Import or Group.
        depth: 0 for a task of the pipeline itself.
        around: Name of the task that it is in; empty: the pipeline.
        document: The task's own part.
        component: What it runs.
    """

    name: str
    kind: str
    depth: int
    around: str
    document: Document
    component: Document


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """Describes a parameter of an uploaded pipeline; `default` is None where it has none."""

    name: str
    kind: str
    text: str
    default: Json
    is_optional: bool
    choices: tuple[Json, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledSpec:
    """Holds a pipeline's two documents; `platforms` is {} where it has one only."""

    pipeline: Document
    platforms: Document

    @property
    def digest(self) -> str:
        """Returns twelve hex digits: the same for the same pipeline, whichever kfp compiled it."""
        told = [_plain(_without_compiler(self.pipeline)), _plain(self.platforms)]
        text = json.dumps(told, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def spec_of_text(definition: str) -> CompiledSpec:
    """Returns the spec of a compiled file.

    Raises:
        UsageError: If it is not YAML of one or two documents.
    """
    try:
        documents = list(yaml.load_all(definition, Loader=_loader()))
    except yaml.YAMLError as err:
        raise UsageError(f"the compiled pipeline is not YAML: {err}") from None
    parts = [part for part in documents if isinstance(part, Mapping)]
    if not parts or "root" not in parts[0]:
        raise UsageError("the compiled pipeline is not Kubeflow's: it has no root")
    # A second document has what only Kubernetes knows: tolerations, volumes, secrets.
    return CompiledSpec(pipeline=parts[0], platforms=parts[1] if len(parts) > 1 else {})


def spec_of_answer(answer: Json) -> CompiledSpec | None:
    """Returns the spec as the service shows it, in one document or two; None if it shows none."""
    whole = mapping(answer)
    # The service wraps them where the file had both; one document it gives as it is.
    if "pipeline_spec" in whole:
        pipeline, platforms = mapping(whole["pipeline_spec"]), mapping(whole, "platform_spec")
    else:
        pipeline, platforms = whole, {}
    return CompiledSpec(pipeline=pipeline, platforms=platforms) if "root" in pipeline else None


def inputs_of(spec: CompiledSpec) -> dict[str, Input]:
    """Returns the parameters that a run may set, by name."""
    found = mapping(spec.pipeline, "root", "inputDefinitions", "parameters")
    return {name: _input(name, mapping(about)) for name, about in found.items()}


def tasks_of(spec: CompiledSpec) -> Iterator[CompiledTask]:
    """Yields all tasks, each above those inside it, in the order in which they can run."""
    yield from _tasks(spec.pipeline, mapping(spec.pipeline, "root"), "", 0, ())


def readable(spec: CompiledSpec) -> Json:
    """Returns the pipeline as `differences` compares it: steps and parameters with names."""
    executors = mapping(spec.pipeline, "deploymentSpec", "executors")
    of_platform = _platform_executors(spec)
    inside: dict[str, list[Json]] = {}
    # From the last to the first, so that a group's steps are there when the group is reached.
    for task in reversed(list(tasks_of(spec))):
        arguments: dict[str, Json] = {
            _spelt(key): value for key, value in task.document.items() if key not in _TOLD_APART
        }
        arguments["After"] = sorted(
            str(name) for name in items(task.document.get("dependentTasks"))
        )
        label = str(task.component.get("executorLabel", ""))
        arguments |= _container(mapping(executors, label))
        arguments |= {_spelt(key): value for key, value in mapping(of_platform, label).items()}
        if task.name in inside:
            arguments["Steps"] = inside.pop(task.name)
        step: Json = {"Name": task.name, "Type": task.kind, "Arguments": arguments}
        inside.setdefault(task.around, []).insert(0, step)
    parameters = [_readable_input(item) for item in inputs_of(spec).values()]
    about = mapping(spec.pipeline, "pipelineInfo").get("description")
    return _plain(
        {
            "Steps": inside.get("", []),
            "Parameters": parameters,
            **({"description": about} if about else {}),
        }
    )


def items(value: Json) -> Sequence[Json]:
    """Returns the value if it is a list, else an empty one."""
    return value if isinstance(value, list | tuple) else ()


def _tasks(
    pipeline: Document, component: Document, around: str, depth: int, path: tuple[str, ...]
) -> Iterator[CompiledTask]:
    tasks = mapping(component, "dag", "tasks")
    for name in _in_order(tasks):
        document = mapping(tasks[name])
        reference = str(mapping(document, "componentRef").get("name", ""))
        inner = mapping(pipeline, "components", reference)
        yield CompiledTask(
            name=name,
            kind=_kind(document, inner, pipeline),
            depth=depth,
            around=around,
            document=document,
            component=inner,
        )
        # A component that contains itself is not followed again.
        if reference not in path:
            yield from _tasks(pipeline, inner, name, depth + 1, (*path, reference))


def _in_order(tasks: Document) -> Iterator[str]:
    """Sorts names, those first that others wait for; by the alphabet where nothing says more."""
    left = {name: _waits_for(mapping(task)) & set(tasks) for name, task in tasks.items()}
    while left:
        ready = sorted(name for name, before in left.items() if not before & set(left))
        # What waits for itself in a circle is none of the service's pipelines: shown as it is.
        for name in ready or sorted(left):
            yield name
            del left[name]


def _waits_for(task: Document) -> set[str]:
    found = {str(name) for name in items(task.get("dependentTasks"))}
    inputs = mapping(task, "inputs")
    # An order is written down (dependentTasks), or follows from what a task reads.
    for kind in ("parameters", "artifacts"):
        for value in mapping(inputs, kind).values():
            for how in mapping(value).values():
                producer = mapping(how).get("producerTask")
                if isinstance(producer, str):
                    found.add(producer)
    return found


def _kind(document: Document, component: Document, pipeline: Document) -> str:
    # Loops and conditions are groups as well (`dag`): asked first.
    if "parameterIterator" in document or "artifactIterator" in document:
        return "Loop"
    if "condition" in mapping(document, "triggerPolicy"):
        return "Condition"
    if "dag" in component:
        return "Group"
    executors = mapping(pipeline, "deploymentSpec", "executors")
    executor = mapping(executors.get(str(component.get("executorLabel", ""))))
    return "Import" if "importer" in executor else "Container"


def _container(executor: Document) -> dict[str, Json]:
    """Returns what an executor runs: its image, command, arguments, variables and resources."""
    container = mapping(executor, "container")
    named = {_spelt(key): value for key, value in container.items() if key != "env"}
    for variable in items(container.get("env")):
        about = mapping(variable)
        named[f"Variable {about.get('name')}"] = about.get("value")
    if "importer" in executor:
        named["Import"] = executor["importer"]
    return named


def _platform_executors(spec: CompiledSpec) -> Document:
    kubernetes = mapping(spec.platforms, "platforms", "kubernetes")
    return mapping(kubernetes, "deploymentSpec", "executors")


def _input(name: str, about: Document) -> Input:
    return Input(
        name=name,
        kind=str(about.get("parameterType", "STRING")),
        text=str(about.get("description") or ""),
        default=_plain(about.get("defaultValue")),
        is_optional=bool(about.get("isOptional")) or "defaultValue" in about,
        choices=tuple(items(about.get("literals"))),
    )


def _readable_input(found: Input) -> Json:
    default = found.default
    if isinstance(default, str) and default.lstrip().startswith("{"):
        # The workload travels as text: what changed in it is told by its keys.
        try:
            default = json.loads(default)
        except ValueError:
            default = found.default
    shown: dict[str, Json] = {"Name": found.name, "Type": found.kind, "DefaultValue": default}
    if found.choices:
        shown["EnumValues"] = list(found.choices)
    if found.text:
        shown["description"] = found.text
    return shown


def _without_compiler(pipeline: Document) -> Document:
    # Another version of kfp (sdkVersion) alone makes no other pipeline.
    return {key: value for key, value in pipeline.items() if key != _COMPILER}


def _plain(value: Json) -> Json:
    """Makes 3.0 into 3, and the like: a trip through protobuf turns whole numbers into floats."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _spelt(key: str) -> str:
    """Spells `cachingOptions` as `caching options`, for people."""
    return "".join(f" {c.lower()}" if c.isupper() else c for c in key).capitalize()


def _loader() -> type[yaml.SafeLoader]:
    # libyaml's own is ten times as fast; it is not everywhere.
    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)
