"""Engines make data on the data group in place of the feed; the launcher starts and ends them."""
