"""Instance types and dated prices: what a plan can be made of, and what it costs."""

from stoker.catalog.instances import Catalog, Instance
from stoker.catalog.load import load_catalog, local_instance

__all__ = ["Catalog", "Instance", "load_catalog", "local_instance"]
