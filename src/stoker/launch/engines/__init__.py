"""Engines: what makes data on the data group in place of the feed."""
