"""`stoker catalog refresh --region R` renews the table of AWS's types with today's prices."""

import json
from datetime import date
from pathlib import Path

from stoker.catalog.refresh import (
    RenewedTable,
    ec2_filters,
    ec2_prices,
    machines,
    renewed,
    shipped_text,
    shipped_types,
    training_filters,
    training_prices,
)
from stoker.cli.progress import say
from stoker.errors import PlatformError
from stoker.platforms.aws import (
    Aws,
    AwsError,
    described_types,
    failed,
    price_list_region,
    products,
    trainable_types,
)
from stoker.records import write_text


def refresh_from_aws(*, region: str | None, out: Path | None, as_json: bool, today: date) -> None:
    """Writes the table to `out` or stdout, and prints what was not found.

    Raises:
        PlatformError: If AWS refuses or cannot be reached, or lists no price of the region.
    """
    aws = Aws(region=region)
    where = region or aws.region
    pricing = Aws(region=price_list_region(where))
    say(f"prices of {where}: reading AWS's price list, which takes a minute", quiet=as_json)
    try:
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
    aws: Aws, pricing: Aws, *, region: str, today: date
) -> tuple[RenewedTable, list[str]]:
    """Returns the table, and notes on what was not found.

    Args:
        aws: The account, in the region.
        pricing: The account, in a region that has the price list.
        region: Region of the prices.
        today: Date of the prices.

    Raises:
        PlatformError: If AWS refuses or cannot be reached, or lists no price of the region.
    """
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
