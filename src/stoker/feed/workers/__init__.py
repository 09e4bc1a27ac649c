"""Data workers and their pools, on data hosts and in trainers.

| question | module | what it answers |
| --- | --- | --- |
| Who makes batches? | `worker` | a worker's process, from its first order to its end |
| | `samples` | the samples of a batch, one by one, and their collation |
| | `shards` | a shard of an iterable dataset |
| | `own_states` | states that such a dataset takes itself |
| | `fetching` | what torch's worker does before its first batch |
| | `torch_streams` | the same streams in torch's own workers |
| | `spawned` | a worker in a fresh interpreter |
| Who gives them work? | `pool` | starts workers, gives them jobs, ends those that hang |
| | `worker_handle` | its handle of one worker |
| | `jobs` | what a worker is asked for, and what comes of it |
| | `splitting` | one batch, made by several workers in parts |
| How do they speak? | `pipe` | messages between a pool and a worker |
| | `slots` | shared memory in which a worker's batches are sent |
| | `part_memory` | memory of a part of a batch |
| Which sample is to blame? | `progress` | where a worker is, also when it is dead |
| | `crashes` | the search for samples that end or block a process |
| | `stacks` | what a late worker does |
| | `fitness` | can a process still send batches after its samples? |
"""
