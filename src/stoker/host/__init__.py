"""Facts of this host, and ties between its processes: imports nothing else of stoker."""
