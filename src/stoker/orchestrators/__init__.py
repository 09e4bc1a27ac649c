"""Orchestrators compile pipelines, upload, start and schedule them, and follow and stop runs."""
