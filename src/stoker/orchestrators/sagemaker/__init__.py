"""SageMaker Pipelines is an orchestrator: upload, start, schedule, status, logs, stop."""
