"""Figures of a run: computed by its hosts, written to files and log lines, read by other rooms.

A launcher writes them, and the report, `stoker watch` and the profile read them, so they belong to
none of these. `feed_intervals` has rates of the feed, `step_progress` times of steps, `gpu_log` the
load of GPUs, `passive_profile` what a training run itself tells of its cost.
"""
