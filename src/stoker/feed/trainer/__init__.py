"""The trainer's side of the feed: one client, its connections, and which batch is asked of whom."""
