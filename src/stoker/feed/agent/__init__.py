"""The data host's side of the feed: an agent serves trainers, and has workers make batches."""
