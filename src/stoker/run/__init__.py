"""One life of a run: plan, submit, follow, record, track, report, exit code.

`chain` has the four steps of `stoker run`. Training is `training_order` (planned and priced, not
yet sent), then `training_run`; `judging` evaluates it. A pipeline's step does the same, and returns
its `outputs` to the service. What a run exits with is decided in `records/outcome.py`.
"""

# Of `stoker run`, in this order; each leaves a record.
STEPS = ("profile", "decide", "train", "evaluate")
