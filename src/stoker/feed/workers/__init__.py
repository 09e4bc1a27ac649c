"""Data workers, on either side, are the processes that make batches, in pools."""
