"""Who owns what: when an owner is gone, the cluster deletes what it owned."""

from collections.abc import Sequence

from stoker.platforms.kubernetes.reading import Document, mapping, mappings, name_of, text
from stoker.records import Json
from stoker.settings import OwnPod


def pod_reference(pod: OwnPod, *, namespace: str) -> Document | None:
    """The pod as an owner of a job; None for a job of another namespace, which it cannot own."""
    if pod.namespace is not None and pod.namespace != namespace:
        return None
    return {"apiVersion": "v1", "kind": "Pod", "name": pod.name, "uid": pod.uid}


def object_reference(document: Document, *, is_waited_for: bool) -> Document:
    """An object as an owner.

    Args:
        document: The object as the cluster gives it.
        is_waited_for: Whether the owner is gone only when what it owns is: who makes another one
            of its name then finds none of the old one's things.
    """
    reference = {
        "apiVersion": text(document, "apiVersion"),
        "kind": text(document, "kind"),
        "name": name_of(document),
        "uid": text(mapping(document, "metadata"), "uid"),
    }
    return {**reference, "blockOwnerDeletion": True} if is_waited_for else reference


def owners_of(document: Document) -> list[Document]:
    """The owners of an object."""
    return mappings(document, "metadata", "ownerReferences")


def owned(document: Document, owners: Sequence[Document]) -> Document:
    """The object with these owners."""
    references: list[Json] = [dict(owner) for owner in owners]
    metadata = {**mapping(document, "metadata"), "ownerReferences": references}
    return {**document, "metadata": metadata}
