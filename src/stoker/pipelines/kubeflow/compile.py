"""Compiles a workload's pipeline for Kubeflow, and reads compiled ones for comparison.

The graph of its steps (the DAG) is `steps` in the project's own pipelines/kubeflow.py, which
`stoker init` writes; `stoker.kubeflow.steps.pipeline` compiles it.
"""

import contextlib
import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import yaml

from stoker.catalog import with_pools, with_short_prices
from stoker.errors import UsageError
from stoker.host.carried import CARRIED
from stoker.parameters import Parameter, parameters_of
from stoker.pipelines.base import (
    Compiled,
    check_complete,
    check_decidable,
    fixed,
    project_pipeline,
)
from stoker.pipelines.schedules import check_own
from stoker.platforms.base import JobSpec
from stoker.platforms.kubernetes.checks import checked_job
from stoker.platforms.kubernetes.layout import lay_out
from stoker.platforms.kubernetes.pod_template import claim_of
from stoker.records import Group, Json, KubeflowSettings, KubernetesSettings, Workload, to_document
from stoker.records.base import Document, mapping
from stoker.records.profile_key import profiled

# Of SageMaker's model registry.
_NOT_HERE = ("model_group", "approval")
# Kubeflow has no address that every pod can read, so the parameter is the profile itself.
_REUSE = "Text of a profile.json to use instead of a new profile; empty: profile."
# The parameter of the model in use, and where steps have the folder of champions.
CHAMPION = "champion"
CHAMPIONS_FOLDER = "/mnt/champions"
# Where steps have the folder of the memory: that of `kubernetes.memory`, or the champion's.
MEMORY = "memory"
MEMORY_FOLDER = "/mnt/memory"
# Where the step that compares has the data, each channel in a folder of its name.
CHANNELS_FOLDER = "/mnt/channels"
COMPARE = "compare"
REMEMBER = "remember"
_CHAMPION = (
    "The model in use, for gates such as accuracy>=champion-0.005: a folder of champions, an "
    "evaluation.json there, or registry:GROUP of SageMaker; empty: none."
)
# With each quote escaped, and together with the training's record, it is one argument of a process,
# which has 128 KiB at most.
MAX_WORKLOAD_BYTES = 48 << 10
# Name to file in the folder of components.
COMPONENTS = {
    "profile": "profile/component.yaml",
    "decide": "decide/component.yaml",
    "train": "train/component.yaml",
    "evaluate": "evaluate/component.yaml",
    "gate": "evaluate/gate.yaml",
    "finish": "train/finish.yaml",
    "period": "profile/period.yaml",
    COMPARE: "profile/compare.yaml",
    "unchanged": "profile/unchanged.yaml",
    REMEMBER: "evaluate/remember.yaml",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MountedMemory:
    """The claim in which a pipeline remembers its runs.

    Attributes:
        mounted: Folder of the claim that steps mount at `MEMORY_FOLDER`.
        folder: Where steps have the memory.
    """

    claim: str
    mounted: str
    folder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeflowRequest:
    """What pipelines/kubeflow.py builds a pipeline from.

    Attributes:
        workload: Workload as the steps read it.
        parameters: Parameters of the pipeline; the first is the workload itself.
    """

    workload: Workload
    parameters: tuple[Parameter, ...]
    settings: KubernetesSettings

    @property
    def image(self) -> str:
        assert self.workload.image
        return self.workload.image

    @property
    def profiled(self) -> str:
        """The part of the workload that a profile depends on, by which Kubeflow finds one again."""
        return json.dumps(profiled(self.workload), separators=(",", ":"))

    @property
    def champions(self) -> tuple[str, str] | None:
        """Claim and folder of the champions, if they are in a claim."""
        named = self.settings.champion or ""
        where = "key kubernetes.champion"
        if named.startswith("pvc://"):
            return claim_of(named, where=where)
        return None

    @property
    def memory(self) -> MountedMemory | None:
        """The memory's claim; None: the pipeline has none."""
        if self.settings.memory:
            claim, mounted = claim_of(self.settings.memory, where="key kubernetes.memory")
            return MountedMemory(claim=claim, mounted=mounted, folder=MEMORY_FOLDER)
        if self.champions is None:
            return None
        claim, mounted = self.champions
        # Pods may write to the folder of champions; the kubelet would make another one as root.
        return MountedMemory(claim=claim, mounted=mounted, folder=f"{MEMORY_FOLDER}/{MEMORY}")


def compile_kubeflow(workload: Workload, *, folder: Path | None = None) -> Compiled:
    """Compiles the workload's pipeline by pipelines/kubeflow.py of the project, without network.

    Raises:
        UsageError: If the workload lacks something, or the project's files or kfp cannot be used.
    """
    request = kubeflow_request(workload)
    with project_pipeline("kubeflow", folder=folder or Path.cwd()) as module:
        definition = str(module.build(request))
    if workload.skip_unchanged:
        _check_compares(definition, where=f"workload {workload.name}, key skip_unchanged")
    return Compiled(
        name=workload.name,
        description=f"stoker: profile, decide, train, evaluate {workload.name}.",
        definition=definition,
        parameters=request.parameters,
        uploads={},
    )


def component_files() -> dict[str, str]:
    """Returns the YAML document of each component, by name."""
    for root in CARRIED:
        files = {name: root / "components" / file for name, file in COMPONENTS.items()}
        if all(file.is_file() for file in files.values()):
            return {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    raise UsageError(
        "this installation of stoker has no compiled components",
        where=" and ".join(map(str, CARRIED)),
        fix="install stoker from its wheel, or run it in its checkout",
    )


def kubeflow_request(workload: Workload) -> KubeflowRequest:
    """Returns what the pipeline is built from; raises UsageError if anything is missing."""
    check_complete(workload, image="REGISTRY/stoker:TAG", instance_type="g5.xlarge")
    check_own(workload, target="kubeflow")
    check_decidable(workload, platform="kubernetes")
    workload = with_short_prices(workload)
    settings = workload.kubernetes_settings
    # Profile and training are jobs on Kubeflow's cluster, whatever platform the file names.
    placed = msgspec.structs.replace(workload, platform="kubernetes", sagemaker=None)
    if workload.kubernetes:
        # The connections of the user who compiles are not for pods.
        inside = msgspec.structs.replace(settings, kubeflow=None, context=None)
        placed = msgspec.structs.replace(placed, kubernetes=inside)
    assert placed.cluster
    today = Group.of_today(placed.cluster.dnn)
    # Which groups get a channel is known once a plan has them.
    channels = {
        name: msgspec.structs.replace(channel, groups=None)
        for name, channel in placed.channels.items()
    }
    todays = msgspec.structs.replace(with_pools(placed), channels=channels)
    # Refuses today's pods if the cluster would, before the run does.
    job = JobSpec.of(todays, groups=[today], run_dir=Path("runs"), name=placed.name)
    lay_out(checked_job(job))
    days = (settings.kubeflow or KubeflowSettings()).cache_days
    parameters = kubeflow_parameters(placed, cache_days=days)
    where = f"workload {workload.name}"
    if not _champion(placed) and any(gate.needs_champion for gate in workload.gate):
        raise UsageError(
            "a gate compares with the champion, but no champion is configured",
            where=f"{where}, key gate",
            fix="kubernetes.champion: pvc://CLAIM/FOLDER, or registry:GROUP of SageMaker",
        )
    _check_can_skip(placed, settings)
    size = len(workload_text(placed).encode())
    if size > MAX_WORKLOAD_BYTES:
        raise UsageError(
            f"the workload's document has {size} bytes, at most {MAX_WORKLOAD_BYTES}",
            where=where,
            fix="shorten it; a pools file needs only the pools that plans may have",
        )
    return KubeflowRequest(workload=placed, parameters=parameters, settings=settings)


def _check_can_skip(workload: Workload, settings: KubernetesSettings) -> None:
    """Raises UsageError if no run of a pipeline with `skip_unchanged` could ever be skipped."""
    where = f"workload {workload.name}, key skip_unchanged"
    has_memory = settings.memory or (settings.champion or "").startswith("pvc://")
    if workload.skip_unchanged and not has_memory:
        raise UsageError(
            "the pipeline has no place where it remembers its runs, so it would always train",
            where=where,
            fix="kubernetes.memory: pvc://CLAIM/FOLDER, of a ReadWriteMany claim",
        )
    if workload.skip_unchanged and not workload.channels:
        raise UsageError(
            "the workload names no channels, so that new data would not be seen",
            where=where,
            fix="channels: {train: {uri: pvc://CLAIM/FOLDER}}, or leave skip_unchanged out",
        )


def _check_compares(definition: str, *, where: str) -> None:
    """Raises UsageError if a project's own pipeline lacks the steps that skip a run."""
    executors = mapping(spec_of_text(definition), "pipeline", "deploymentSpec", "executors")
    for component in (COMPARE, REMEMBER):
        if not any(re.fullmatch(rf"exec-{component}(-\d+)?", name) for name in executors):
            what = f"the project's pipelines/kubeflow.py has no step {component}"
            fix = "with if_changed(run): around its steps, and remember(...) as the last one, as "
            fix += "in stoker's own (docs/kubeflow.md, Only if something has changed)"
            raise UsageError(what, where=where, fix=fix)


def kubeflow_parameters(workload: Workload, *, cache_days: int) -> tuple[Parameter, ...]:
    standard = []
    for parameter in parameters_of(workload):
        if parameter.name == "reuse_profile":
            parameter = dataclasses.replace(parameter, text=_REUSE)
        if parameter.name not in _NOT_HERE:
            standard.append(parameter)
    text = "Days for which Kubeflow may reuse a profile of the same inputs; 0: it may not."
    mine = [
        fixed("workload", "string", "The workload, as JSON.", workload_text(workload)),
        fixed("cache_days", "integer", text, cache_days),
        fixed(CHAMPION, "string", _CHAMPION, _champion(workload)),
    ]
    control = workload.kubernetes_settings.control
    if control.image:
        text = "Image of the steps, which train nothing themselves."
        mine.append(fixed("control_image", "string", text, control.image))
    return (*mine[:1], *standard, *mine[1:])


def _champion(workload: Workload) -> str:
    """Returns where the champion's claim is mounted, or its name."""
    champion = workload.kubernetes_settings.champion or ""
    if champion.startswith("pvc://"):
        return CHAMPIONS_FOLDER
    return champion


def workload_text(workload: Workload) -> str:
    # Not sorted: a script gets its hyperparameters in the workload's order.
    return json.dumps(to_document(workload), separators=(",", ":"))


def spec_of_text(definition: str) -> Json:
    """Returns a compiled file's documents, as `readable` compares them."""
    # libyaml's own is ten times as fast; it is not everywhere.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    documents = list(yaml.load_all(definition, Loader=loader))
    # A second document has what only Kubernetes knows: tolerations, volumes, secrets.
    if len(documents) > 1:
        return readable(documents[0], documents[1])
    return readable(documents[0], {})


def spec_of_answer(answer: Json) -> Json:
    """Returns a version's documents in the form of `spec_of_text`; None if it shows none."""
    # The service wraps them where the file had both; one document it gives as it is.
    pipeline = mapping(answer, "pipeline_spec") or mapping(answer)
    if "root" in pipeline:
        return readable(pipeline, mapping(answer, "platform_spec"))
    return None


def inputs_of(spec: Json) -> Document:
    """Returns the definitions of the parameters that a run may set, by name."""
    return mapping(spec, "pipeline", "root", "inputDefinitions", "parameters")


def readable(pipeline: Document, platforms: Document) -> Json:
    """Returns both documents in one, without kfp's version."""
    kept = {key: value for key, value in pipeline.items() if key != "sdkVersion"}
    return _plain({"pipeline": kept, "platforms": platforms})


def _plain(value: Json) -> Json:
    """Makes 3.0 into 3, as protobuf makes whole numbers floats; texts of JSON into objects."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and value.startswith("{"):
        # The workload travels as text.
        with contextlib.suppress(ValueError):
            document: Json = json.loads(value)
            return _plain(document)
    return value
