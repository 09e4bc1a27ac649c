"""What `stoker init` makes a workload of: a script, or a training job that ran on SageMaker.

Of a script, `script_command` has the command and `script_options` the hyperparameters.
"""
