"""The nodes of a cluster, and what runs on one of them."""

from stoker.errors import PlatformError
from stoker.platforms.kubernetes.api import Cluster, Document
from stoker.platforms.kubernetes.api_errors import ApiError
from stoker.platforms.kubernetes.resources import ALL_PODS, NODES

_ATTEMPTS = 3


def list_nodes(cluster: Cluster) -> list[Document]:
    """All nodes, as the API gives them.

    Raises:
        PlatformError: If the cluster refuses, with the right that it takes, or does not answer.
    """
    try:
        return cluster.list(NODES, attempts=_ATTEMPTS)[0]
    except ApiError as err:
        if not err.is_denied:
            raise
        raise PlatformError(
            f"{err.user} may not list the nodes of the cluster",
            where="the cluster's RBAC: nodes belong to no namespace",
            fix="let an administrator run it, or grant it: kubectl create clusterrole "
            "stoker-catalog --verb=list --resource=nodes,pods, and bind it",
        ) from err


def pods_of_node(cluster: Cluster, node: str) -> list[Document] | None:
    """The pods of all namespaces on a node; None where one may not see them.

    Raises:
        PlatformError: If the cluster does not answer.
    """
    try:
        query = {"fieldSelector": f"spec.nodeName={node}"}
        return cluster.list(ALL_PODS, query=query, attempts=_ATTEMPTS)[0]
    except ApiError as err:
        if err.is_denied:
            return None
        raise


__all__ = ["list_nodes", "pods_of_node"]
