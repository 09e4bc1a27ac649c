"""One life of a run: plan, submit, follow, record, track, report, exit code."""

# Of `stoker run`, in this order; each leaves a record.
STEPS = ("profile", "decide", "train", "evaluate")
