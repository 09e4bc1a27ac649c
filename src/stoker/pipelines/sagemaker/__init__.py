"""SageMaker Pipelines: compiled pipelines, roles, and the client of their runs."""
