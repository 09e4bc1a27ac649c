"""`stoker catalog`: the instance types and prices that decide knows, and a cluster's own pools."""

import json
from pathlib import Path
from typing import Annotated

import typer

from stoker.cli.options import AsJson, Debug, Prices


def catalog_verb(
    action: Annotated[
        str | None,
        typer.Argument(
            metavar="[refresh]",
            help="Writes the table anew, from --from-cluster.",
            show_default=False,
        ),
    ] = None,
    *,
    platform: Annotated[
        str, typer.Option("--platform", metavar="P", help="local, sagemaker or kubernetes.")
    ] = "sagemaker",
    prices: Prices = None,
    from_cluster: Annotated[
        bool,
        typer.Option("--from-cluster", help="refresh: the node pools of a Kubernetes cluster."),
    ] = False,
    context: Annotated[
        str | None,
        typer.Option("--context", metavar="C", help="Of the kube config; else its current one."),
    ] = None,
    pool_label: Annotated[
        str | None,
        typer.Option("--pool-label", metavar="KEY", help="Label that names a node's pool."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="F", help="File for the pools; else stdout.")
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Lists the instance types and dated prices that decide knows; refresh reads a cluster's."""
    if action is None and not from_cluster:
        _list(platform, prices=prices, as_json=as_json)
        return
    _refresh(
        action,
        from_cluster=from_cluster,
        context=context,
        pool_label=pool_label,
        prices=prices,
        out=out,
        as_json=as_json,
    )


def _list(platform: str, *, prices: Path | None, as_json: bool) -> None:
    from stoker.catalog import load_catalog

    catalog = load_catalog(platform, prices=prices)
    print(json.dumps(catalog.to_document(), indent=2) if as_json else catalog.table())


def _refresh(
    action: str | None,
    *,
    from_cluster: bool,
    context: str | None,
    pool_label: str | None,
    prices: Path | None,
    out: Path | None,
    as_json: bool,
) -> None:
    from stoker.errors import UsageError

    raise UsageError("soon")
