"""`stoker doctor` prints one line for each check."""

import json
import os
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Literal

from stoker.cli.options import AsJson, Overrides
from stoker.errors import PlatformError, UsageError
from stoker.terminal import working

if TYPE_CHECKING:
    from stoker.doctor import Finding

CheckedPlace = Literal["host", "cluster", "aws"]


def doctor_verb(
    workload: str | None = None,
    *,
    peer: str | None = None,
    cluster: bool = False,
    aws: bool = False,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> int:
    """Check a host, a cluster or an AWS account for what a run needs.

    Changes nothing. Exit code 4 means that something is missing.

    Args:
        workload ([WORKLOAD]): With --cluster or --aws: the workload file to check for.
        peer (HOST[:PORT]): Also connect to the feed's port on this host (default: connect to none).
        cluster: Check the workload's cluster instead of this host: rights, JobSet or Trainer, the
            job, claims, Kubeflow Pipelines and Argo.
        aws: Check the workload's AWS account instead: roles, images, buckets, data, quotas of all
            allowed types, the queue, and the network route out of a VPC.

    Examples:
        stoker doctor
        stoker doctor --cluster configs/mnist-kubeflow.yaml
        stoker doctor --aws configs/mnist-sagemaker.yaml
    """
    checks = []
    if cluster and aws:
        raise UsageError("--cluster and --aws cannot be used together", fix="run two commands")
    place: CheckedPlace = "host"
    if cluster:
        place = "cluster"
    elif aws:
        place = "aws"
    findings = _findings(workload, peer=peer, place=place, overrides=overrides or [])
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
    if is_healthy:
        return 0
    # A host that a run cannot use is the platform's error, not one of the command line.
    return PlatformError.exit_code


def _next_of(findings: Iterator["Finding"], *, quiet: bool) -> "Finding | None":
    with working("checking", quiet=quiet):
        return next(findings, None)


def _findings(
    file: str | None, *, peer: str | None, place: CheckedPlace, overrides: list[str]
) -> Iterator["Finding"]:
    if file is None and (place != "host" or overrides):
        if place == "host":
            what = "--set needs a workload"
            fix = "stoker doctor --cluster FILE"
        else:
            what = f"--{place} needs a workload"
            fix = f"stoker doctor --{place} FILE"
        raise UsageError(what, fix=fix)
    if file is not None and place == "host":
        fix = f"stoker doctor --cluster {file}, or stoker doctor --aws {file}"
        raise UsageError("a workload needs --cluster or --aws", fix=fix)
    if file is None:
        from stoker.doctor import examine

        yield from examine(os.environ, peer=peer)
        return
    if peer:
        raise UsageError(f"--peer cannot be used with --{place}", fix="run two commands")
    from stoker.cli.workloads import read_with_params

    workload = read_with_params(file, overrides=overrides)
    if place == "aws":
        from stoker.doctor.account import examine_account

        yield from examine_account(workload)
        return
    from stoker.doctor.cluster import examine_cluster

    yield from examine_cluster(workload)
