"""What `stoker init` writes for SageMaker."""

from stoker.platforms.project import Project

# What hosts do not need of a project.
_STOKERIGNORE = """\
# Not packed and sent with sagemaker.source, as what git ignores; the form is .gitignore's.
/workload.schema.json
/configs/
/tools/refresh_prices.py
/.github/
/.gitlab/
/.gitlab-ci.yml
"""
PROJECT = Project(
    workload="""\
platform: sagemaker
image: ACCOUNT.dkr.ecr.REGION.amazonaws.com/stoker:TAG
# Where it trains today.
cluster:
  dnn: {{instance_type: ml.g5.xlarge, count: {hosts}{processes}}}
# The script finds it in the folder that $SM_CHANNEL_TRAINING names.
channels:
  training: {{uri: s3://BUCKET/{name}}}
sagemaker:
  region: REGION
  # The roles of one stack: configs/sagemaker/stoker.yaml.
  role: arn:aws:iam::ACCOUNT:role/stoker-{name}-REGION-training
  pipeline_role: arn:aws:iam::ACCOUNT:role/stoker-{name}-REGION-pipeline
  schedule_role: arn:aws:iam::ACCOUNT:role/stoker-{name}-REGION-scheduler
  output_uri: s3://BUCKET/stoker
  # This folder is packed and handed to all hosts.
  source: .
  max_run_seconds: 7200
  control:
    role: arn:aws:iam::ACCOUNT:role/stoker-{name}-REGION-step
""",
    target="sagemaker",
    compiled="p.json",
    example_files=("pipelines/sagemaker.py", "configs/sagemaker", "tools/refresh_prices.py"),
    script_files=(
        "configs/sagemaker/shared.yaml",
        "configs/sagemaker/stoker.yaml",
        "tools/refresh_prices.py",
    ),
    stokerignore=_STOKERIGNORE,
)
