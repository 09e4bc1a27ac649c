"""Data workers and their pools, on data hosts and in trainers.

`worker` is the process that makes batches. `pool` starts it, gives it jobs, and decides that it is
late or hangs: then others make its batches, or it is killed. `crashes` finds the guilty sample.
"""
