"""Instance types and dated prices: what a plan can be made of, and what it costs."""

from stoker.catalog.instances import Catalog, Instance
from stoker.catalog.load import load_catalog, local_instance
from stoker.catalog.pools import catalog_of, with_pools

__all__ = ["Catalog", "Instance", "catalog_of", "load_catalog", "local_instance", "with_pools"]
