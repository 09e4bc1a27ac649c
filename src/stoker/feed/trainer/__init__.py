"""The trainer's side of the feed: a client that requests batches over its connections."""
