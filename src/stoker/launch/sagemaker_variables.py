"""Variables and arguments that SageMaker's toolkit gives to a script, from the job folder's files.

With them, a script for SageMaker's images runs unchanged in any image and on any platform.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from stoker.environment import RunEnvironment
from stoker.errors import UsageError
from stoker.launch.topology import Topology, hosts_of
from stoker.records import Json, read_text
from stoker.records.base import Document
from stoker.records.hyperparameters import arguments, decoded, in_order, literal

# The toolkit's own hyperparameters: this prefix, and two names.
_RESERVED_PREFIX = "sagemaker_"
_RESERVED = ("_tuning_objective_metric", "default_user_module_name")
# Those that are not parameters of a framework.
_OF_THE_TOOLKIT = (
    "sagemaker_program",
    "sagemaker_submit_directory",
    "sagemaker_enable_cloudwatch_metrics",
    "sagemaker_region",
    "sagemaker_container_log_level",
    "sagemaker_job_name",
    "sagemaker_s3_output",
    *_RESERVED,
)
OWN_CHANNELS = "stoker_"
# The toolkit's default: logging.INFO.
_LOG_LEVEL = 20


def hyperparameters(settings: RunEnvironment) -> dict[str, Json]:
    """Returns the job's hyperparameters, decoded, without those for the toolkit.

    They have the workload's order. Those of a job that stoker did not make are sorted, as the
    toolkit's are.
    """
    config = settings.base_dir / "input" / "config"
    document = _read(config / "hyperparameters.json")
    given = {name: text for name, text in document.items() if not _is_reserved(name)}
    # A pipeline names the literal ones by place: their values, which it fills in, come later.
    names = sorted(given)
    literals = {names[place] for place in settings.literal_hyperparameters if place < len(names)}
    values = {
        name: literal(text) if name in literals else decoded(text) for name, text in given.items()
    }
    ordered = in_order(values, settings.hyperparameter_order)
    more = _read(settings.more_hyperparameters) if settings.more_hyperparameters else {}
    # From a file: what leaves a step's cost as it is must not make the job another one.
    return {**ordered, **more}


def program(base_dir: Path, environ: Mapping[str, str]) -> str:
    return environ.get("SAGEMAKER_PROGRAM") or _text(_parameters(base_dir), "sagemaker_program")


def module_dir(base_dir: Path) -> str:
    named = _text(_parameters(base_dir), "sagemaker_submit_directory")
    return named or str(base_dir / "code")


def environment(
    topology: Topology,
    base_dir: Path,
    *,
    values: Document,
    forms: str = "",
    num_cpus: int,
    num_accelerators: int,
    environ: Mapping[str, str],
) -> dict[str, str]:
    """Returns the SM_* variables of the toolkit.

    Raises:
        UsageError: If a file of the job folder is malformed.
    """
    config = base_dir / "input" / "config"
    inputs = _inputs(config)
    # A container started by hand has no inputdataconfig.json, only folders.
    channels = sorted(inputs) or _folders(base_dir / "input" / "data")
    folders: dict[str, Json] = {name: str(base_dir / "input" / "data" / name) for name in channels}
    facts: dict[str, Json] = {
        **_cluster(topology, _read(config / "resourceconfig.json")),
        **_code(base_dir, environ),
        **_places(base_dir),
        "input_data_config": inputs,
        "num_cpus": num_cpus,
        "num_gpus": num_accelerators,
        "num_neurons": 0,
    }
    training_env: dict[str, Json] = {
        **facts,
        "channel_input_dirs": folders,
        "hyperparameters": dict(values),
        "distribution_hosts": list(topology.dnn_hosts),
        "master_hostname": topology.leader,
        "is_master": topology.is_leader,
        "job_name": environ.get("TRAINING_JOB_NAME"),
        "topology": _read(config / "resourceconfig.json").get("topology", []),
    }
    # Its name in SM_TRAINING_ENV; the variable is SM_FRAMEWORK_PARAMS.
    training_env["additional_framework_parameters"] = training_env.pop("framework_params")
    facts |= {
        "channels": list(channels),
        "user_args": list(arguments(values, forms)),
        "training_env": training_env,
        **{f"channel_{channel}": folder for channel, folder in folders.items()},
        **{f"hp_{name}": value for name, value in values.items()},
    }
    variables = {f"SM_{name.upper()}": _variable(value) for name, value in facts.items()}
    # In the order of the arguments; sorted, mappings inside are sorted in the toolkit, too.
    is_sorted = [*values] == sorted(values)
    texts = json.dumps(values, sort_keys=is_sorted, separators=(",", ":"))
    return {**variables, "SM_HPS": texts}


def _inputs(config: Path) -> dict[str, Json]:
    """Returns the channels' descriptions, without those of stoker's own."""
    described = _read(config / "inputdataconfig.json")
    return {name: value for name, value in described.items() if not name.startswith(OWN_CHANNELS)}


def _places(base_dir: Path) -> dict[str, Json]:
    return {
        "input_dir": str(base_dir / "input"),
        "input_config_dir": str(base_dir / "input" / "config"),
        "model_dir": str(base_dir / "model"),
        "output_dir": str(base_dir / "output"),
        "output_data_dir": str(base_dir / "output" / "data"),
        "output_intermediate_dir": str(base_dir / "output" / "intermediate"),
    }


def _cluster(topology: Topology, config: Document) -> dict[str, Json]:
    groups: dict[str, Json] = {
        group.name: {
            "instance_group_name": group.name,
            "instance_type": group.instance_type,
            "hosts": list(group.hosts),
        }
        for group in topology.groups
    }
    current: dict[str, Json] = {
        "current_host": topology.host,
        "current_instance_type": topology.group.instance_type,
    }
    cluster: dict[str, Json] = {
        **current,
        "current_group_name": topology.group.name,
        "hosts": list(hosts_of(topology.groups)),
        "instance_groups": list(groups.values()),
        "network_interface_name": topology.network_interface,
    }
    return {
        **current,
        "hosts": config.get("hosts") or cluster["hosts"],
        "current_instance_group": topology.group.name,
        "current_instance_group_hosts": list(topology.group.hosts),
        "instance_groups": list(groups),
        "instance_groups_dict": groups,
        "distribution_instance_groups": [topology.dnn.name],
        "is_hetero": len(topology.groups) > 1,
        "network_interface_name": topology.network_interface or "eth0",
        "resource_config": config or cluster,
    }


def _code(base_dir: Path, environ: Mapping[str, str]) -> dict[str, Json]:
    parameters = _parameters(base_dir)
    entry = program(base_dir, environ)
    return {
        "user_entry_point": entry,
        "module_name": entry.removesuffix(".py"),
        "module_dir": module_dir(base_dir),
        "log_level": parameters.get("sagemaker_container_log_level", _LOG_LEVEL),
        "framework_module": environ.get("SAGEMAKER_TRAINING_MODULE"),
        "framework_params": {
            name: value
            for name, value in parameters.items()
            if _is_reserved(name) and name not in _OF_THE_TOOLKIT
        },
    }


def _is_reserved(name: str) -> bool:
    return name.startswith(_RESERVED_PREFIX) or name in _RESERVED


def _parameters(base_dir: Path) -> dict[str, Json]:
    document = _read(base_dir / "input" / "config" / "hyperparameters.json")
    return {name: decoded(value) for name, value in document.items()}


def _text(values: Document, name: str) -> str:
    value = values.get(name)
    if value is None:
        return ""
    return str(value)


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
    if not path.exists():
        return []
    names = (child.name for child in path.iterdir() if child.is_dir())
    return sorted(name for name in names if not name.startswith(OWN_CHANNELS))


def _variable(value: Json) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
