"""Instance types and dated prices: of aws_training_instances.csv, or the user's prices file.

What a run costs is predicted in `decide.price`, asked about in `run.cost` before it starts,
and counted in `launch.spending` while it runs.
"""

from stoker.catalog.catalog import Catalog, Instance, load_catalog, local_instance
from stoker.catalog.pools import catalog_of, with_pools

__all__ = [
    "Catalog",
    "Instance",
    "catalog_of",
    "load_catalog",
    "local_instance",
    "with_pools",
]
