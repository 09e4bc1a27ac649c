"""`stoker render` prints objects that somebody with more rights applies to a cluster once."""

from pathlib import Path
from typing import Annotated

import typer

from stoker.cli.options import Groups, Overrides, WorkloadFile
from stoker.errors import UsageError

_KINDS = ("rbac", "runtime", "network-policy")


def render_verb(
    kind: Annotated[
        str,
        typer.Argument(metavar="KIND", help="rbac, runtime or network-policy.", show_default=False),
    ],
    workload: WorkloadFile,
    *,
    decision: Annotated[
        Path | None,
        typer.Option(
            "--decision", metavar="D", help="For runtime: takes the groups of this decision.json."
        ),
    ] = None,
    groups: Groups = None,
    service_account: Annotated[
        str | None,
        typer.Option(
            "--service-account",
            metavar="NAME",
            help="For rbac: the account that submits jobs, such as pipeline-runner (default: makes "
            "one).",
        ),
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Prints YAML that a cluster administrator applies once.

    rbac is a Role and its binding, runtime a TrainingRuntime, network-policy the NetworkPolicies.
    """
    from stoker.cli.workloads import RUNS, groups_of, read_with_params
    from stoker.platforms.kubernetes.objects import network_policies
    from stoker.platforms.kubernetes.request import manifest, plan_runtime
    from stoker.platforms.kubernetes.submit import rbac
    from stoker.records import Decision, KubernetesSettings, nearest, read_json
    from stoker.train import prepare

    if kind not in _KINDS:
        raise UsageError(
            f"stoker cannot render {kind}",
            where="command line",
            fix=nearest(kind, _KINDS),
        )
    # Only there is something to render, whatever platform the workload names.
    record = read_with_params(workload, overrides=[*(overrides or ()), "platform=kubernetes"])
    settings = record.kubernetes or KubernetesSettings()
    if kind == "rbac":
        text = manifest(rbac(settings, service_account=service_account))
    elif kind == "network-policy":
        text = manifest(network_policies(record))
    else:
        decided = read_json(decision, Decision) if decision else None
        name = settings.runtime or f"stoker-{record.name}"
        job = prepare(
            workload=record,
            groups=decided.plan.groups if decided else groups_of(record, groups or ()),
            run_dir=RUNS / name,
            decision=decided,
        )
        note = f"Runs use it with --set kubernetes.api=trainer --set kubernetes.runtime={name}"
        text = manifest([plan_runtime(job, name=name)], notes={"TrainingRuntime": note})
    print(text, end="")
