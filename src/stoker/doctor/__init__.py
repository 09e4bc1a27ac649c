"""Checks of this host, of an AWS account and of a cluster for what a run needs."""

from collections.abc import Iterator

from stoker.doctor.host import Finding, examine_host
from stoker.doctor.services import examine_account, examine_cluster
from stoker.records import Workload


def examine(workload: Workload | None) -> Iterator[Finding]:
    """Yields what is found where the workload runs; None, or a local one: on this host."""
    if workload and workload.platform == "sagemaker":
        return examine_account(workload)
    if workload and workload.platform == "kubernetes":
        return examine_cluster(workload)
    return examine_host()
