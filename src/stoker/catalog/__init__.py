"""The catalog holds instance types and dated prices: what a plan can be made of, and its cost."""

from stoker.catalog.catalog import Catalog, Instance, load_catalog, local_instance
from stoker.catalog.pools import catalog_of, with_pools

__all__ = ["Catalog", "Instance", "catalog_of", "load_catalog", "local_instance", "with_pools"]
