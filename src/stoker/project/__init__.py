"""What `stoker init` makes a workload of: a script, or a training job that ran on SageMaker."""
