"""The trainer's side of the feed: a client that requests batches over its connections.

| question | module | what it answers |
| --- | --- | --- |
| Who does what in this process? | `client` | the I/O thread of all loaders |
| | `session` | one loader's epoch: batches in order for the thread that iterates |
| Who is asked for which batch? | `scheduler` | of a map-style dataset |
| | `shards` | of an iterable dataset: a shard is pinned to one host |
| | `shared_batch` | first and last batches, made by several hosts |
| | `late_batches` | when a batch is given up |
| | `host_watch` | how long a loader waits without hosts |
| Who makes them here? | `local_workers` | child processes of the trainer |
| How does a batch arrive? | `links` | the trainer's links to coordinator and agents |
| | `control_connection` | a link's messages |
| | `receiver` | batches of one host, in its thread |
| | `answers` | what hosts and local workers answer, handed to sessions |
| | `buffers`, `pinned` | memory that is used again; memory from which a device copies |
| What is counted? | `observer` | who made which batches, and their cost |
"""
