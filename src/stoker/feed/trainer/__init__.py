"""The trainer's side of the feed: a client that requests batches over its connections.

`client` is the I/O thread of all loaders, `session` one loader's epoch. `scheduler` decides who is
asked for which batch (of an iterable dataset: `shards`), `late_batches` when one is given up.
"""
