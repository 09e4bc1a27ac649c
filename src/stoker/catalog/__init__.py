"""Instance types and dated prices, from which plans are made and paid."""

from stoker.catalog.catalog import Catalog, Instance, load_catalog, local_instance, unknown_instance
from stoker.catalog.pools import catalog_of, with_pools, with_short_prices
from stoker.catalog.rules import is_burst_type

__all__ = [
    "Catalog",
    "Instance",
    "catalog_of",
    "is_burst_type",
    "load_catalog",
    "local_instance",
    "unknown_instance",
    "with_pools",
    "with_short_prices",
]
