"""Pipelines of a workload, on Kubeflow and on SageMaker: uploaded, started, scheduled, shown.

`base` has what both services share (the class `PipelineClient`); `kubeflow` and `sagemaker` each
have what a pipeline is built from, and the client. The steps of users' own pipelines are in
`stoker.kubeflow` and `stoker.sagemaker`; what a step does is in `stoker.run`.
"""
