"""Figures of a run: computed by its hosts, written to a file and to the log, read by other rooms.

`intervals` has the rows, `progress` the steps in them, `gpus` the load of GPUs, `limit` what limits
a run that is fed, `measured` what a training run's steps took in the end.
"""
