"""Kubernetes runs a job from its objects, a pure value; they can be written as YAML."""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import yaml

from stoker.platforms.base import JobSpec, hyperparameters
from stoker.platforms.kubernetes.checks import check_objects
from stoker.platforms.kubernetes.objects import (
    HYPERPARAMETERS_KEY,
    REQUEST_ANNOTATION,
    TOKEN_KEY,
    WORKLOAD_ANNOTATION,
    Layout,
    channels_of,
    config_map,
    inputs_key,
    lay_out,
    token_secret,
)
from stoker.platforms.kubernetes.reading import Document, mapping
from stoker.platforms.kubernetes.trainer import (
    digest,
    jobset,
    metadata,
    train_job,
    training_runtime,
)
from stoker.records import Json, KubernetesSettings

# What stands for the token wherever the Secret is shown: a launcher refuses it as none.
NO_TOKEN = "made-when-the-job-is-submitted"


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesRequest:
    """A job as Kubernetes runs it.

    The job owns secret, configuration and a runtime of its own; their owner references, and the
    job's own to the pod that submits it, are set by submit().

    Attributes:
        layout: The groups behind the objects.
        main: The JobSet, or the TrainJob.
        runtime: The TrainingRuntime that the TrainJob needs; None with a JobSet.
        runtime_is_ours: Whether submit() makes the runtime; else it must be there, as it is here.
        config: The ConfigMap with what launchers read.
        secret: The Secret, with NO_TOKEN in place of the token.
    """

    job: JobSpec
    layout: Layout
    main: Document
    runtime: Document | None
    runtime_is_ours: bool
    config: Document
    secret: Document

    @property
    def name(self) -> str:
        """Returns the name of the job's objects."""
        return self.layout.name

    @property
    def namespace(self) -> str | None:
        """Returns the namespace; None: that of the pod or kube config that submits."""
        return self.layout.settings.namespace

    @property
    def objects(self) -> tuple[Document, ...]:
        """Returns all that submit() makes, in the order in which one needs the other."""
        runtime = (self.runtime,) if self.runtime and self.runtime_is_ours else ()
        return (self.secret, self.config, *runtime, self.main)

    @property
    def request_sha256(self) -> str:
        """Returns a digest of the job's spec and configuration: the same in each attempt."""
        return str(mapping(self.main, "metadata", "annotations")[REQUEST_ANNOTATION])


def plan_request(job: JobSpec) -> KubernetesRequest:
    """Returns the objects for `job`; reads and asks nothing.

    Raises:
        UsageError: If the cluster would refuse them, with the rule, the reason and a fix.
    """
    layout = lay_out(job)
    config = _config(layout)
    runtime: Document | None = None
    if layout.settings.api == "jobset":
        main = jobset(layout)
    else:
        runtime = training_runtime(layout, name=layout.settings.runtime or layout.name)
        main = train_job(layout, runtime=layout.settings.runtime or layout.name)
    request = KubernetesRequest(
        job=job,
        layout=layout,
        main=_signed(main, layout, parts=[config["data"], runtime and runtime["spec"]]),
        runtime=runtime,
        runtime_is_ours=runtime is not None and layout.settings.runtime is None,
        config=config,
        secret=_secret(layout),
    )
    check_objects(_checked(request))
    return request


def plan_runtime(job: JobSpec, *, name: str) -> Document:
    """Returns the TrainingRuntime for runs like `job`, to be applied before and named by them.

    Raises:
        UsageError: If the cluster would refuse it.
    """
    settings = msgspec.structs.replace(job.kubernetes or KubernetesSettings(), api="trainer")
    # A runtime is the same for all runs: it may be called as no run may be.
    any_run = dataclasses.replace(job, name="any-run", kubernetes=settings)
    runtime = training_runtime(lay_out(any_run), name=name)
    check_objects((runtime,))
    return runtime


def _checked(request: KubernetesRequest) -> tuple[Document, ...]:
    objects = request.objects
    if request.runtime and not request.runtime_is_ours:
        return (request.runtime, *objects)
    return objects


def _signed(main: dict[str, Json], layout: Layout, *, parts: list[Json]) -> Document:
    """Returns the job with a digest of it and `parts`, to know an earlier attempt's job by."""
    described = mapping(main, "metadata")
    annotations = {**mapping(described, "annotations")}
    annotations[REQUEST_ANNOTATION] = digest([main["spec"], *parts])
    if layout.job.settings.workload_sha256:
        annotations[WORKLOAD_ANNOTATION] = layout.job.settings.workload_sha256
    return {**main, "metadata": {**described, "annotations": annotations}}


def _config(layout: Layout) -> Document:
    data: dict[str, Json] = {
        HYPERPARAMETERS_KEY: _json(hyperparameters(layout.job.hyperparameters)),
    }
    for group in layout.groups:
        channels = channels_of(layout, group)
        data[inputs_key(group)] = _json(
            {
                name: {
                    "TrainingInputMode": "File",
                    "S3DistributionType": "FullyReplicated",
                    "RecordWrapperType": "None",
                }
                for name in channels
            }
        )
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(layout, name=config_map(layout.name)),
        "immutable": True,
        "data": data,
    }


def _secret(layout: Layout) -> Document:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(layout, name=token_secret(layout.name)),
        "type": "Opaque",
        "immutable": True,
        "stringData": {TOKEN_KEY: NO_TOKEN},
    }


def _json(document: Json) -> str:
    return json.dumps(document, indent=2, sort_keys=True) + "\n"


# Texts that no parser of any version of YAML takes for something else.
_PLAIN = re.compile(r"^[A-Za-z/][A-Za-z0-9_./-]*( [A-Za-z0-9_./-]+)*$")
_WORDS = frozenset(("y", "n", "yes", "no", "on", "off", "true", "false", "null"))


class _Dumper(yaml.SafeDumper):
    """Quotes whatever could be a number, a date or a truth to somebody: kubectl reads YAML 1.1."""

    def ignore_aliases(self, data: object) -> bool:
        """Returns True: objects are written in full, however often they are used."""
        return True


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = "'"
    if _PLAIN.match(text) and text.lower() not in _WORDS:
        style = ""
    elif "\n" in text and _is_block(text):
        style = "|"
    elif not text.isprintable():
        style = '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _is_block(text: str) -> bool:
    lines = text.split("\n")
    return all(line.isprintable() and line == line.rstrip() for line in lines) and bool(lines[0])


_Dumper.add_representer(str, _text)


def manifest(
    objects: Sequence[Mapping[str, Json]], *, notes: Mapping[str, str] | None = None
) -> str:
    """Returns the objects as YAML, one document each.

    Args:
        objects: In their order.
        notes: Words for those who read it, by the object's kind.
    """
    documents = []
    for document in objects:
        words = (notes or {}).get(str(document.get("kind")), "")
        comment = "".join(f"# {line}\n" for line in words.splitlines())
        documents.append(comment + _dump(document))
    return "---\n".join(documents)


def _dump(document: Mapping[str, Json]) -> str:
    written: str = yaml.dump(
        _plain(document),
        Dumper=_Dumper,
        sort_keys=False,
        default_flow_style=False,
        allow_unicode=True,
        width=10**6,
    )
    return written


def _plain(value: Json) -> Json:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
