"""The feed: batches from local workers and from the data group, in one order."""
