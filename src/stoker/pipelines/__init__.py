"""Pipelines of a workload, on Kubeflow and on SageMaker: compiled, uploaded, started, shown.

`base` has what both services share (the class `PipelineClient`); each service's folder has its
compiler (`compile`), its `client` and what it shows of a run (`run_steps`, with the exit code).
`changes` tells what an upload would change, `schedules` what a schedule. The steps of users' own
pipelines are in `stoker.kubeflow` and `stoker.sagemaker`; what a step does is in `stoker.run`.
"""
