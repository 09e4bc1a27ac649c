"""Data workers, on either side: the processes that make batches, and the pools that they are in."""
