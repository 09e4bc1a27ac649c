"""`stoker render` prints objects that somebody with more rights applies to a cluster once."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from stoker.cli.options import Debug, Groups, Overrides, WorkloadFile

_KINDS = ("rbac", "runtime", "network-policy")


def render_verb(
    kind: Annotated[
        str,
        typer.Argument(metavar="KIND", help="rbac, runtime or network-policy.", show_default=False),
    ],
    workload: WorkloadFile,
    *,
    decision: Annotated[
        Path | None, typer.Option("--decision", metavar="D", help="runtime: of its chosen plan.")
    ] = None,
    groups: Groups = None,
    service_account: Annotated[
        str | None,
        typer.Option(
            "--service-account",
            metavar="NAME",
            help="rbac: who submits, such as pipeline-runner; else an account is made.",
        ),
    ] = None,
    overrides: Overrides = None,
    debug: Debug = False,
) -> None:
    """Prints YAML for a cluster's administrators: a Role, a TrainingRuntime, or NetworkPolicies."""
    text = render(
        kind,
        workload,
        decision_file=decision,
        groups=groups or (),
        service_account=service_account,
        overrides=overrides or (),
    )
    print(text, end="")


def render(
    kind: str,
    workload_file: str,
    *,
    decision_file: Path | None,
    groups: Sequence[str],
    service_account: str | None,
    overrides: Sequence[str],
) -> str:
    """Returns the YAML of `kind` for a workload.

    Raises:
        UsageError: If there is no such kind, or the workload lacks what it needs.
    """
    from stoker.cli.workloads import read_with_params
    from stoker.errors import UsageError
    from stoker.platforms.kubernetes.access import network_policies, rbac
    from stoker.platforms.kubernetes.request import manifest
    from stoker.records import KubernetesSettings, nearest

    if kind not in _KINDS:
        raise UsageError(
            f"nothing called {kind} can be rendered",
            where="command line",
            fix=nearest(kind, _KINDS),
        )
    workload = read_with_params(workload_file, overrides=[*overrides, "platform=kubernetes"])
    settings = workload.kubernetes or KubernetesSettings()
    if kind == "rbac":
        return manifest(rbac(settings, service_account=service_account))
    if kind == "network-policy":
        return manifest(network_policies(workload))
    from stoker.cli.verbs import groups_of
    from stoker.cli.workloads import RUNS
    from stoker.platforms.kubernetes.request import plan_runtime
    from stoker.records import Decision, read_json
    from stoker.train import prepare

    record = read_json(decision_file, Decision) if decision_file else None
    name = settings.runtime or f"stoker-{workload.name}"
    job = prepare(
        workload=workload,
        groups=record.plan.groups if record else groups_of(workload, groups),
        run_dir=RUNS / name,
        decision=record,
    )
    note = f"Runs use it with --set kubernetes.api=trainer --set kubernetes.runtime={name}"
    return manifest([plan_runtime(job, name=name)], notes={"TrainingRuntime": note})
