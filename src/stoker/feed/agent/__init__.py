"""The agent, the data host's side of the feed: it serves trainers; its workers make batches.

| question | module | what it answers |
| --- | --- | --- |
| Who takes the requests? | `agent` | its loop, and the sessions of its trainers |
| In which order are they made? | `dispatch` | the requests of all trainers |
| Where is a dataset? | `dataset_process` | in a process of its own, which forks its workers |
| | `forkserver` | starts those processes, and forks (`_fork`); all die with the agent |
| How do batches leave? | `batch_port` | on connections that a ticket opened |
"""
