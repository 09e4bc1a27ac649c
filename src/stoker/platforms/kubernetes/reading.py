"""These functions read objects: what is not there is empty."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from stoker.records import Json

Document = Mapping[str, Json]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicatedJob:
    """A replicated job of a JobSet or of a runtime's template.

    Attributes:
        path: Where it stands.
        spec: Of the job.
        pods: The pods' spec.
        template: Of the pods.
    """

    name: str
    path: str
    document: Document
    spec: Document
    template: Document
    pods: Document

    @property
    def labels(self) -> Document:
        """Returns the labels of the job."""
        return mapping(self.document, "template", "metadata", "labels")


def mapping(document: Json, *keys: str) -> Document:
    """Returns the mapping at the path `keys`."""
    value: Json = document
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def mappings(document: Json, *keys: str) -> list[Document]:
    """Returns the list of mappings at the path `keys`."""
    parent = mapping(document, *keys[:-1])
    value = parent.get(keys[-1])
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def text(document: Document, key: str) -> str:
    """Returns a text, or the empty one."""
    value = document.get(key)
    return value if isinstance(value, str) else ""


def texts(document: Document, key: str) -> list[str]:
    """Returns a list of texts."""
    value = document.get(key)
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def number(document: Document, key: str, default: int = 0) -> int:
    """Returns a whole number."""
    value = document.get(key)
    return value if isinstance(value, int) else default


def name_of(document: Document) -> str:
    """Returns the name of an object."""
    return text(mapping(document, "metadata"), "name")


def jobset_of(document: Document) -> tuple[str, Document]:
    """Returns path and spec of the JobSet in a JobSet or TrainingRuntime; none of other objects."""
    match document.get("kind"):
        case "JobSet":
            return "spec", mapping(document, "spec")
        case "TrainingRuntime":
            return "spec.template.spec", mapping(document, "spec", "template", "spec")
    return "", {}


def replicated_jobs(document: Document) -> Iterator[ReplicatedJob]:
    """Yields the replicated jobs of a JobSet or TrainingRuntime."""
    path, spec = jobset_of(document)
    for index, job in enumerate(mappings(spec, "replicatedJobs")):
        described = mapping(job, "template", "spec")
        template = mapping(described, "template")
        yield ReplicatedJob(
            name=text(job, "name"),
            path=f"{path}.replicatedJobs[{index}]",
            document=job,
            spec=described,
            template=template,
            pods=mapping(template, "spec"),
        )
