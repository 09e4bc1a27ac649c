"""`stoker catalog` lists the instance types and prices that decide knows."""

from typing import Annotated

from stoker.cli.options import PLATFORM_WORDS, AsJson, Prices, platform_option
from stoker.terminal import print_result


def catalog_verb(
    *,
    platform: Annotated[
        str,
        platform_option(f"List the types of this platform: {PLATFORM_WORDS} (default: sagemaker)."),
    ] = "sagemaker",
    prices: Prices = None,
    as_json: AsJson = False,
) -> None:
    """List the instance types and prices that decide uses.

    tools/refresh_prices.py writes a table of today's prices, tools/node_pools.py one of a cluster's
    node pools.

    Examples:
        stoker catalog --platform sagemaker
        stoker catalog --prices prices.csv
    """
    from stoker.catalog import load_catalog

    catalog = load_catalog(platform, prices=prices)
    print_result(catalog.to_document(), catalog.table(), as_json=as_json)
