"""`stoker doctor` prints one line for each finding."""

import json
import os
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.options import AsJson, Overrides
from stoker.cli.progress import working
from stoker.errors import PlatformError, UsageError

if TYPE_CHECKING:
    from stoker.doctor import Finding


def doctor_verb(
    workload: Annotated[
        str | None,
        typer.Argument(
            metavar="[WORKLOAD]",
            help="With --aws or --cluster: a workload file, whose needs are looked at.",
            show_default=False,
        ),
    ] = None,
    *,
    peer: Annotated[
        str | None,
        typer.Option(
            "--peer",
            metavar="HOST[:PORT]",
            help="Also tries to reach the feed's port there (default: tries none).",
        ),
    ] = None,
    aws: Annotated[
        bool,
        typer.Option(
            "--aws",
            help="Also asks AWS which account and role it sees; with a workload: whether bucket, "
            "data, images, roles, quotas and network are as it needs them.",
        ),
    ] = False,
    cluster: Annotated[
        bool,
        typer.Option(
            "--cluster",
            help="Asks the workload's cluster instead of this host: rights, JobSet or Trainer, "
            "claims, Kubeflow Pipelines, Argo.",
        ),
    ] = False,
    decision: Annotated[
        Path | None,
        typer.Option(
            "--decision",
            metavar="D",
            help="With --aws: looks at the quotas of this decision.json's plans (default: at those "
            "of all types that plans may have).",
        ),
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> int:
    """Checks what a host, an account or a cluster lacks.

    Nothing is made or changed. Exit code 4 means that something is missing.

    Examples:
        stoker doctor
        stoker doctor --aws configs/mnist-sagemaker.yaml
        stoker doctor --cluster configs/mnist-kubeflow.yaml
    """
    checks = []
    findings = _findings(
        workload,
        peer=peer,
        aws=aws,
        cluster=cluster,
        decision=decision,
        overrides=overrides or [],
    )
    while check := _next_of(findings, quiet=as_json):
        checks.append(check)
        if not as_json:
            # At once: some look-ups take seconds, and a hang shows at what.
            print(f"{check.state:<5} {check.name:<8} {check.text}", flush=True)
            if check.state != "ok" and check.fix:
                print(textwrap.indent(f"try: {check.fix}", " " * 15), flush=True)
    is_healthy = all(check.state != "fail" for check in checks)
    if as_json:
        print(json.dumps({"healthy": is_healthy, "checks": [asdict(c) for c in checks]}, indent=2))
    # A host that a run cannot use is the platform's fault, not the command line's.
    return 0 if is_healthy else PlatformError.exit_code


def _next_of(findings: Iterator["Finding"], *, quiet: bool) -> "Finding | None":
    with working("looking", quiet=quiet):
        return next(findings, None)


def _findings(
    file: str | None,
    *,
    peer: str | None,
    aws: bool,
    cluster: bool,
    decision: Path | None,
    overrides: list[str],
) -> Iterator["Finding"]:
    from stoker.doctor import examine

    if file is None and (cluster or decision or overrides):
        flag = "--cluster" if cluster else "--decision" if decision else "--set"
        raise UsageError(
            f"{flag} needs a workload", fix=f"stoker doctor --{'aws' if aws else 'cluster'} FILE"
        )
    if file is not None and not (aws or cluster):
        raise UsageError(
            "a workload is looked at in its account or its cluster",
            fix=f"stoker doctor --aws {file}, or --cluster",
        )
    if file is None:
        yield from examine(os.environ, peer=peer, aws=aws)
        return
    # Read before anything is looked at: a file that is wrong is told at once.
    from stoker.cli.workloads import read_with_params
    from stoker.records import Decision, read_json

    record = read_with_params(file, overrides=overrides)
    decided = read_json(decision, Decision) if decision else None
    if aws or peer or not cluster:
        yield from examine(os.environ, peer=peer, aws=aws)
    if aws:
        from stoker.doctor.account import examine_account

        yield from examine_account(record, decision=decided)
    if cluster:
        from stoker.doctor.cluster import examine_cluster

        yield from examine_cluster(record)
