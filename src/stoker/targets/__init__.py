"""Targets of compiled pipelines: compile, upload, start, schedule, follow, stop."""
