"""Orchestrators of compiled pipelines: compile, upload, start, schedule, follow, stop."""
