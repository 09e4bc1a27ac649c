"""Folder from which Python imports `sitecustomize` in each process of a training run.

It is how a script that does not know stoker gets the feed's loaders: once torch is imported, it
puts `feed.replace` under torch's own DataLoader.
"""
