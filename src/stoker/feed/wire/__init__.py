"""Messages, batches and datasets cross a connection of the feed; keys decide who may speak."""
