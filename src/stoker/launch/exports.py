"""What SageMaker's toolkit would export to a training script, from the files of the job folder.

With these variables and arguments a script written for SageMaker's own images runs unchanged in a
bring-your-own image, on Kubernetes and on the local platform.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from stoker.errors import UsageError
from stoker.launch.topology import Topology
from stoker.records import Json, read_text


def hyperparameters(base_dir: Path) -> dict[str, Json]:
    """The hyperparameters of the job, each decoded from JSON where it is JSON; {} without a file.

    Raises:
        UsageError: If the file is no JSON object.
    """
    document = _read(base_dir / "input" / "config" / "hyperparameters.json")
    return {
        name: _decoded(value)
        for name, value in document.items()
        if not name.startswith("sagemaker_")
    }


def arguments(values: Mapping[str, Json]) -> list[str]:
    """Hyperparameters as the toolkit puts them behind the command: `--name value`, by name."""
    words = []
    for name in sorted(values):
        words += [f"--{name}" if len(name) > 1 else f"-{name}", _argument(values[name])]
    return words


def sagemaker_variables(
    topology: Topology,
    base_dir: Path,
    *,
    values: Mapping[str, Json],
    num_cpus: int,
    num_accelerators: int,
) -> dict[str, str]:
    """The SM_* variables of the toolkit, and the network interface for NCCL and gloo.

    Args:
        topology: Of the run.
        base_dir: The job folder.
        values: The hyperparameters.
        num_cpus: vCPUs of this host.
        num_accelerators: GPUs of this host.

    Raises:
        UsageError: If a file of the job folder is malformed.
    """
    inputs = _read(base_dir / "input" / "config" / "inputdataconfig.json")
    channels = sorted(inputs) or _folders(base_dir / "input" / "data")
    groups = {
        group.name: {
            "instance_group_name": group.name,
            "instance_type": group.instance_type,
            "hosts": list(group.hosts),
        }
        for group in topology.groups
    }
    facts: dict[str, Json] = {
        "HOSTS": [host for group in topology.groups for host in group.hosts],
        "CURRENT_HOST": topology.host,
        "CURRENT_INSTANCE_TYPE": topology.group.instance_type,
        "CURRENT_INSTANCE_GROUP": topology.group.name,
        "CURRENT_INSTANCE_GROUP_HOSTS": list(topology.group.hosts),
        "INSTANCE_GROUPS": [group.name for group in topology.groups],
        "INSTANCE_GROUPS_DICT": groups,
        "DISTRIBUTION_INSTANCE_GROUPS": [topology.dnn.name],
        "IS_HETERO": len(topology.groups) > 1,
        "RESOURCE_CONFIG": {
            "current_host": topology.host,
            "current_instance_type": topology.group.instance_type,
            "current_group_name": topology.group.name,
            "hosts": [host for group in topology.groups for host in group.hosts],
            "instance_groups": list(groups.values()),
            "network_interface_name": topology.network_interface,
        },
        "INPUT_DATA_CONFIG": inputs,
        "INPUT_DIR": str(base_dir / "input"),
        "INPUT_CONFIG_DIR": str(base_dir / "input" / "config"),
        "MODEL_DIR": str(base_dir / "model"),
        "OUTPUT_DIR": str(base_dir / "output"),
        "OUTPUT_DATA_DIR": str(base_dir / "output" / "data"),
        "CHANNELS": channels,
        "NUM_CPUS": num_cpus,
        "NUM_GPUS": num_accelerators,
        "NUM_NEURONS": 0,
        "HPS": dict(values),
        "USER_ARGS": arguments(values),
    }
    for channel in channels:
        facts[f"CHANNEL_{channel.upper()}"] = str(base_dir / "input" / "data" / channel)
    for name, value in values.items():
        facts[f"HP_{name.upper()}"] = value
    variables = {f"SM_{name}": _variable(value) for name, value in facts.items()}
    if topology.network_interface:
        for name in ("SM_NETWORK_INTERFACE_NAME", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            variables[name] = topology.network_interface
    return variables


def _read(path: Path) -> dict[str, Json]:
    if not path.exists():
        return {}
    try:
        document = json.loads(read_text(path))
    except ValueError as err:
        raise UsageError(f"not a JSON document: {err}", where=str(path)) from None
    if not isinstance(document, dict):
        raise UsageError(
            f"expected a JSON object, found {type(document).__name__}", where=str(path)
        )
    return document


def _folders(path: Path) -> list[str]:
    return sorted(child.name for child in path.iterdir() if child.is_dir()) if path.exists() else []


def _decoded(value: Json) -> Json:
    if not isinstance(value, str):
        return value
    try:
        decoded: Json = json.loads(value)
    except ValueError:
        return value
    return decoded


def _argument(value: Json) -> str:
    if isinstance(value, Mapping):
        return ",".join(f"{key}={item}" for key, item in sorted(value.items()))
    return str(value)


def _variable(value: Json) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
