"""The trainer's side of the feed is one client, which asks over its connections for batches."""
