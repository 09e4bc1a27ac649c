"""Facts about this host and its processes; imports nothing else of stoker."""
