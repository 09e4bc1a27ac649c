"""`stoker render` prints what somebody with more rights applies to a cluster or an account once."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.options import Groups, Overrides, WorkloadFile, offered
from stoker.errors import UsageError

if TYPE_CHECKING:
    from stoker.records import Workload

_OF_AWS = ("iam", "cloudformation")
_KINDS = ("rbac", "runtime", "network-policy", "priority", *_OF_AWS)


def render_verb(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND",
            help=f"One of {', '.join(_KINDS)}.",
            show_default=False,
            autocompletion=offered(*_KINDS),
        ),
    ],
    workload: WorkloadFile,
    *,
    decision: Annotated[
        Path | None,
        typer.Option(
            "--decision",
            metavar="D",
            help="For runtime: takes the groups of this decision.json (default: today's cluster).",
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
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="For iam: writes a file for each policy to this folder (default: stdout).",
        ),
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Prints what an administrator applies once.

    To a cluster, as YAML: rbac is a Role and its binding, runtime a TrainingRuntime, network-policy
    the NetworkPolicies, priority a PriorityClass for the pods that follow jobs. To an AWS account:
    iam is the policies and trust policies of the roles, as JSON, cloudformation a template that
    makes these roles and a schedule.

    Examples:
        stoker render rbac configs/mnist-kubeflow.yaml | kubectl apply -f -
        stoker render iam configs/mnist-sagemaker.yaml --out policies
    """
    from stoker.cli.workloads import read_with_params
    from stoker.records import nearest

    if kind not in _KINDS:
        raise UsageError(
            f"stoker cannot render {kind}",
            where="command line",
            fix=nearest(kind, _KINDS),
        )
    # Only there is something to render, whatever platform the workload names.
    platform = "sagemaker" if kind in _OF_AWS else "kubernetes"
    record = read_with_params(workload, overrides=[*(overrides or ()), f"platform={platform}"])
    if kind in _OF_AWS:
        text = _for_account(kind, record, out=out)
    else:
        text = _for_cluster(
            kind,
            record,
            decision=decision,
            groups=groups or (),
            service_account=service_account,
        )
    print(text, end="")


def _for_account(kind: str, workload: "Workload", *, out: Path | None) -> str:
    """Returns the text to print; the policies themselves may go to files instead."""
    from stoker.orchestrators.sagemaker.roles import iam_files, stack

    if kind == "cloudformation":
        return stack(workload)
    files = iam_files(workload)
    if out is None:
        return json.dumps(files, indent=2) + "\n"
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, policy in files.items():
            (out / name).write_text(json.dumps(policy, indent=2) + "\n")
    except OSError as err:
        raise UsageError(f"cannot write to {out}: {err.strerror}", where="--out") from None
    return "".join(f"{out / name}\n" for name in files)


def _for_cluster(
    kind: str,
    record: "Workload",
    *,
    decision: Path | None,
    groups: Sequence[str],
    service_account: str | None,
) -> str:
    from stoker.cli.workloads import RUNS, groups_of
    from stoker.platforms.kubernetes.follower import follower_priority
    from stoker.platforms.kubernetes.objects import network_policies
    from stoker.platforms.kubernetes.request import manifest, plan_runtime
    from stoker.platforms.kubernetes.submit import rbac
    from stoker.records import Decision, KubernetesSettings, read_json
    from stoker.train import prepare

    settings = record.kubernetes or KubernetesSettings()
    if kind == "rbac":
        return manifest(rbac(settings, service_account=service_account))
    if kind == "network-policy":
        return manifest(network_policies(record))
    if kind == "priority":
        return manifest(follower_priority(settings))
    decided = read_json(decision, Decision) if decision else None
    name = settings.runtime or f"stoker-{record.name}"
    job = prepare(
        workload=record,
        groups=decided.plan.groups if decided else groups_of(record, groups),
        run_dir=RUNS / name,
        decision=decided,
    )
    note = f"Runs use it with --set kubernetes.api=trainer --set kubernetes.runtime={name}"
    return manifest([plan_runtime(job, name=name)], notes={"TrainingRuntime": note})
