"""One life of a run: plan, submit, follow, record, track, report, exit code."""
