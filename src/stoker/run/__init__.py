"""One life of a run: plan, submit, follow, record, track, report, exit code.

`chain` has the four steps of `stoker run`, `train` a training run, and `judging` evaluates it. A
pipeline's step does the same, and returns its `outputs` to the service. What a run exits with is
decided in `records/outcome.py`.
"""
