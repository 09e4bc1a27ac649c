"""Engines: what makes data on the data group in place of the feed.

`records.engine` has the presets: which hosts run which command, as Ray's head and nodes.
"""
