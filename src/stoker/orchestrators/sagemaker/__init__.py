"""SageMaker Pipelines: upload, start, schedule, status, logs, stop."""
