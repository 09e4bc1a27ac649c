"""`stoker doctor` prints one line for each check."""

import json
import os
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from stoker.cli.options import AsJson, Overrides
from stoker.cli.progress import working
from stoker.errors import PlatformError, UsageError

if TYPE_CHECKING:
    from stoker.doctor import Finding


def doctor_verb(
    workload: str | None = None,
    *,
    peer: str | None = None,
    cluster: bool = False,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> int:
    """Check what a host or a cluster lacks.

    Changes nothing. Exit code 4 means that something is missing.

    Args:
        workload ([WORKLOAD]): With --cluster: the workload file to check the cluster for.
        peer (HOST[:PORT]): Also connect to the feed's port on this host (default: connect to none).
        cluster: Check the workload's cluster instead of this host: rights, JobSet or Trainer, the
            job, claims, Kubeflow Pipelines, Argo.

    Examples:
        stoker doctor
        stoker doctor --cluster configs/mnist-kubeflow.yaml
    """
    checks = []
    findings = _findings(workload, peer=peer, cluster=cluster, overrides=overrides or [])
    while check := _next_of(findings, quiet=as_json):
        checks.append(check)
        if not as_json:
            # At once: some checks take seconds, and the last line shows which one hangs.
            print(f"{check.state:<5} {check.name:<8} {check.text}", flush=True)
            if check.state != "ok" and check.fix:
                print(textwrap.indent(f"try: {check.fix}", " " * 15), flush=True)
    is_healthy = all(check.state != "fail" for check in checks)
    if as_json:
        print(json.dumps({"healthy": is_healthy, "checks": [asdict(c) for c in checks]}, indent=2))
    # A host that a run cannot use is the platform's error, not one of the command line.
    return 0 if is_healthy else PlatformError.exit_code


def _next_of(findings: Iterator["Finding"], *, quiet: bool) -> "Finding | None":
    with working("checking", quiet=quiet):
        return next(findings, None)


def _findings(
    file: str | None, *, peer: str | None, cluster: bool, overrides: list[str]
) -> Iterator["Finding"]:
    if file is None and (cluster or overrides):
        flag = "--cluster" if cluster else "--set"
        raise UsageError(f"{flag} needs a workload", fix="stoker doctor --cluster FILE")
    if file is not None and not cluster:
        raise UsageError("a workload needs --cluster", fix=f"stoker doctor --cluster {file}")
    if file is None:
        from stoker.doctor import examine

        yield from examine(os.environ, peer=peer)
        return
    if peer:
        raise UsageError("--peer cannot be used with --cluster", fix="run two commands")
    from stoker.cli.workloads import read_with_params
    from stoker.doctor.cluster import examine_cluster

    yield from examine_cluster(read_with_params(file, overrides=overrides))
