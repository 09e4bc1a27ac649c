"""Workloads as users write them, with keys that stay.

`PATCH` of a platform is the key whose value is merged into the service's own request. It and
`NO_CAPACITY` will be renamed.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

NO_CAPACITY = "on_no_capacity"
PATCH: Mapping[str, str] = {"sagemaker": "request", "kubernetes": "jobset"}
IMAGE = "123456789012.dkr.ecr.eu-central-1.amazonaws.com/stoker:1.0"
ROLE = "arn:aws:iam::123456789012:role/stoker"
BUCKET = "stoker-test"
POOLS: Mapping[str, Any] = {
    "g5.2xlarge": {"cpu": 7, "memory": "28Gi", "gpus": 1},
    "c7i.4xlarge": {"cpu": 15, "memory": "28Gi"},
}
ON_KUBERNETES: Mapping[str, Any] = {
    "name": "mnist",
    "platform": "kubernetes",
    "command": ["python", "train.py"],
    "image": "registry.example/mnist:1",
    "cluster": {"dnn": {"instance_type": "g5.2xlarge"}},
    "kubernetes": {"pools": POOLS},
}
ON_SAGEMAKER: Mapping[str, Any] = {
    "name": "mnist",
    "platform": "sagemaker",
    "command": ["python", "train.py"],
    "image": IMAGE,
    "cluster": {"dnn": {"instance_type": "ml.g5.2xlarge"}},
    "sagemaker": {"role": ROLE, "output_uri": f"s3://{BUCKET}/out"},
}


def write(folder: Path, workload: Mapping[str, Any], name: str = "workload.yaml") -> str:
    """Writes a workload's file, and returns its name."""
    (folder / name).write_text(yaml.safe_dump(dict(workload), sort_keys=False))
    return name


def changed(workload: Mapping[str, Any], **sections: Any) -> dict[str, Any]:
    """Returns a workload with changed sections; a mapping is merged into the one there."""
    merged = dict(workload)
    for name, value in sections.items():
        is_map = isinstance(value, Mapping) and isinstance(merged.get(name), Mapping)
        merged[name] = {**merged[name], **value} if is_map else value
    return merged
