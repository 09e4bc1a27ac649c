"""What `stoker init` writes for Kubernetes."""

from stoker.platforms.project import Project

PROJECT = Project(
    workload="""\
platform: kubernetes
# With the script in the folder that its containers start in.
image: REGISTRY/stoker:TAG
# Where it trains today: an instance type, or a node pool.
cluster:
  dnn: {{instance_type: g5.xlarge, count: {hosts}{processes}}}
# The script finds it in the folder that $SM_CHANNEL_TRAINING names.
channels:
  training: {{uri: pvc://datasets/{name}}}
kubernetes:
  namespace: kubeflow
  # What a pod gets on a node of that type.
  pools:
    g5.xlarge: {{cpu: 3, memory: 12Gi, gpus: 1}}
  # Model, checkpoints and output of each run.
  output: pvc://runs/stoker
  max_run_seconds: 7200
""",
    target="kubeflow",
    compiled="p.yaml",
    example_files=("pipelines/kubeflow.py", "configs/kubernetes", "tools/node_pools.py"),
    script_files=(
        "configs/kubernetes/kustomization.yaml",
        "configs/kubernetes/rbac.yaml",
        "configs/kubernetes/network-policy.yaml",
        "tools/node_pools.py",
    ),
)
