"""Messages, batches and datasets on the feed's connections, and the keys that protect them."""
