"""The agent, the data host's side of the feed: it serves trainers; its workers make batches."""
