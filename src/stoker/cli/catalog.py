"""`stoker catalog` lists the instance types and prices that decide knows, and a cluster's pools."""

import json
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.options import PLATFORM_WORDS, AsJson, Prices, offered, writable_file
from stoker.cli.progress import say, working
from stoker.errors import PlatformError, UsageError
from stoker.platforms import PLATFORMS

if TYPE_CHECKING:
    from stoker.catalog.catalog import Table
    from stoker.catalog.refresh import RenewedTable
    from stoker.platforms.aws import Aws


def catalog_verb(
    action: Annotated[
        str | None,
        typer.Argument(
            metavar="[refresh]",
            help="Writes a new table: of AWS's prices today, or --from-cluster.",
            show_default=False,
        ),
    ] = None,
    *,
    platform: Annotated[
        str,
        typer.Option(
            "--platform",
            metavar="P",
            help=f"Lists the types of this platform: {PLATFORM_WORDS} (default: sagemaker).",
            show_default=False,
            autocompletion=offered(*PLATFORMS),
        ),
    ] = "sagemaker",
    prices: Prices = None,
    from_cluster: Annotated[
        bool,
        typer.Option(
            "--from-cluster", help="With refresh: reads the node pools of a Kubernetes cluster."
        ),
    ] = False,
    context: Annotated[
        str | None,
        typer.Option(
            "--context", metavar="C", help="Context in the kube config (default: the current one)."
        ),
    ] = None,
    pool_label: Annotated[
        str | None,
        typer.Option(
            "--pool-label",
            metavar="KEY",
            help="Label that names a node's pool (default: those of the known providers).",
        ),
    ] = None,
    region: Annotated[
        str | None,
        typer.Option(
            "--region",
            metavar="R",
            help="With refresh: AWS region of the prices (default: as boto3 finds it).",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="F",
            help="Writes the table to this file (default: stdout).",
            callback=writable_file,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Lists the instance types and prices that decide uses.

    `stoker catalog refresh` writes a table of its own: prices of today from AWS, or the node pools
    of a Kubernetes cluster.

    Examples:
        stoker catalog --platform sagemaker
        stoker catalog refresh --region eu-west-1 --out prices.csv
        stoker catalog refresh --from-cluster --out pools.csv
    """
    # These options write a table, so that without `refresh` they are most likely a slip.
    if action is None and not (from_cluster or region or out):
        _list(platform, prices=prices, as_json=as_json)
        return
    _check(action, from_cluster=from_cluster, region=region)
    if not from_cluster:
        _check_aws(context=context, pool_label=pool_label, prices=prices)
        refresh_from_aws(region=region, out=out, as_json=as_json, today=date.today())
        return
    _refresh_pools(
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


def _check(action: str | None, *, from_cluster: bool, region: str | None) -> None:
    if action not in (None, "refresh"):
        raise UsageError(f"stoker catalog has no action {action}", fix="stoker catalog refresh")
    if action is None:
        flag = "--from-cluster" if from_cluster else f"--region {region or 'REGION'}"
        raise UsageError(
            "a new table is only written with refresh", fix=f"stoker catalog refresh {flag}"
        )
    if from_cluster and region:
        raise UsageError(
            "--from-cluster and --region exclude each other",
            fix="use --from-cluster for a cluster's pools, or --region for AWS's prices",
        )


def _check_aws(*, context: str | None, pool_label: str | None, prices: Path | None) -> None:
    given = {"--context": context, "--pool-label": pool_label, "--prices": prices}
    for flag, value in given.items():
        if value is not None:
            raise UsageError(
                f"{flag} is only for --from-cluster",
                fix="stoker catalog refresh --region REGION --out FILE",
            )


def _refresh_pools(
    *,
    context: str | None,
    pool_label: str | None,
    prices: Path | None,
    out: Path | None,
    as_json: bool,
) -> None:
    from stoker.catalog import load_catalog
    from stoker.catalog.pools import daemon_requests, pools_of
    from stoker.catalog.refresh import pools_table
    from stoker.platforms.kubernetes.api import ClusterApi, list_nodes, pods_of_node
    from stoker.records import write_text

    cluster = ClusterApi(context=context)
    nodes = list_nodes(cluster)
    pools, notes = pools_of(nodes, pool_label=pool_label)
    daemons = {}
    for pool in pools:
        # One node of a pool stands for all: daemons run on each of them.
        pods = pods_of_node(cluster, pool.nodes[0])
        if pods is None:
            notes.append(
                "what daemons request is not known, as you may not list pods in all namespaces: "
                "half a core and 1 GiB per node are left to them"
            )
            # The right is missing for all pools alike.
            break
        daemons[pool.name] = daemon_requests(pods)
    table = pools_table(
        pools,
        daemons=daemons,
        catalog=load_catalog("kubernetes", prices=prices),
        # Read before it is written over: prices that were put in by hand stay.
        earlier=_earlier(out),
        left_out=notes,
    )
    if out:
        write_text(out, table.csv())
    elif not as_json:
        print(table.csv(), end="")
    notes += table.notes
    if as_json:
        print(json.dumps({"pools": table.rows, "notes": notes, "file": str(out or "")}, indent=2))
        return
    for note in notes:
        say(f"note: {note}", quiet=False)
    if out:
        print(f"{len(table.rows)} pools of {len(nodes)} nodes\nwritten: {out}")


def _earlier(out: Path | None) -> "Table | None":
    """Reads the pools file, if there is one."""
    from stoker.catalog.catalog import parse_table
    from stoker.records import read_text

    if out is None or not out.is_file():
        return None
    return parse_table(read_text(out), platform="kubernetes", source=str(out))


def refresh_from_aws(*, region: str | None, out: Path | None, as_json: bool, today: date) -> None:
    """Writes the table to `out` or stdout, and prints what was not found.

    Raises:
        PlatformError: If AWS refuses or cannot be reached, or lists no price of the region.
    """
    from stoker.platforms.aws import Aws, AwsError, failed, price_list_region
    from stoker.records import write_text

    aws = Aws(region=region)
    where = region or aws.region
    # Only a few regions serve the price list, each of them that of all regions.
    pricing = Aws(region=price_list_region(where))
    # A minute without a word looks like a hang.
    say(f"prices of {where}: reading AWS's price list, which takes a minute", quiet=as_json)
    try:
        with working(f"reading the prices of {where}", quiet=as_json):
            table, notes = refreshed(aws, pricing, region=where, today=today)
    except AwsError as err:
        fix = (
            err.fix
            or "try again later; the table that came with stoker still works: stoker catalog"
        )
        raise failed(err.what, err.action, where=err.where, code=err.code, fix=fix) from err
    if out:
        write_text(out, table.csv())
    elif not as_json:
        print(table.csv(), end="")
    if as_json:
        document = {
            "region": where,
            "priced_on": today.isoformat(),
            "types": len(table.rows),
            "priced": {"sagemaker": table.priced[0], "ec2": table.priced[1]},
            "notes": notes,
            "file": str(out or ""),
        }
        print(json.dumps(document, indent=2))
        return
    for note in notes:
        say(f"note: {note}", quiet=False)
    if out:
        print(
            f"{len(table.rows)} types, {table.priced[0]} with today's SageMaker price, "
            f"{table.priced[1]} with today's EC2 price\nwritten: {out}\n"
            f"next: stoker decide profile.json --prices {out}"
        )


def refreshed(
    aws: "Aws", pricing: "Aws", *, region: str, today: date
) -> "tuple[RenewedTable, list[str]]":
    """Returns the table, and notes on what was not found.

    Args:
        aws: The account, in the region.
        pricing: The account, in a region that has the price list.
        region: Region of the prices.
        today: Date of the prices.

    Raises:
        PlatformError: If AWS refuses or cannot be reached, or lists no price of the region.
    """
    from stoker.catalog.refresh import (
        ec2_filters,
        ec2_prices,
        machines,
        renewed,
        shipped_text,
        shipped_types,
        training_filters,
        training_prices,
    )
    from stoker.platforms.aws import AwsError, described_types, products, trainable_types

    training = training_prices(
        products(pricing, service="AmazonSageMaker", filters=training_filters(region)),
        region=region,
    )
    if not training.usd:
        raise PlatformError(
            f"AWS's price list has no training prices for {region}",
            where="pricing:GetProducts, service AmazonSageMaker",
            fix="check the region's name",
        )
    ec2 = ec2_prices(
        products(pricing, service="AmazonEC2", filters=ec2_filters(region)), region=region
    )
    notes: list[str] = []
    try:
        described = machines(described_types(aws, shipped_types()))
    except AwsError as err:
        # Sizes change rarely: without that right the shipped ones do; any other error is one.
        if not err.is_denied:
            raise
        described = {}
        notes.append(f"the sizes are those that came with stoker: {err.what}")
    table = renewed(
        shipped_text(),
        region=region,
        training=training,
        ec2=ec2,
        described=described,
        trainable=trainable_types(aws),
        today=today,
    )
    return table, [*notes, *table.notes]
