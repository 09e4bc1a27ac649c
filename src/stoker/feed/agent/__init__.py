"""The agent, the data host's side of the feed: it serves trainers; its workers make batches.

`agent` is its loop and `dispatch` the order of the requests. A dataset's workers are forked
(`forkserver._fork`) by a process that has the dataset alone (`dataset_process`), which `forkserver`
starts; all of them die with the agent.
"""
