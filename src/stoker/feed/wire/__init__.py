"""What crosses a connection of the feed: messages, batches, datasets, and who may speak."""
