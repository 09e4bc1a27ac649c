"""What the training command gets on a dnn host: variables, arguments, and how it is started.

With the variables and arguments that SageMaker's toolkit gives to a script, from the job folder's
files, a script for SageMaker's images runs unchanged in any image and on any platform.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import stoker
from stoker.environment import ProcessSettings
from stoker.errors import UsageError
from stoker.host import machine
from stoker.host.processes import LOOPBACK
from stoker.launch.failures import ERROR_FILE
from stoker.launch.host_client import HostRun
from stoker.launch.topology import Topology
from stoker.records import Json, read_text
from stoker.records.engine import Strategy
from stoker.records.hyperparameters import arguments, decoded

STARTUP_DIR = Path(stoker.__file__).parent / "startup"
# The toolkit's own hyperparameters: this prefix, and two names.
_RESERVED_PREFIX = "sagemaker_"
_RESERVED = ("_tuning_objective_metric", "default_user_module_name")
OWN_CHANNELS = "stoker_"
# The toolkit's own name the data hosts, too.
_OF_HOSTS = ("SM_HOSTS", "SM_RESOURCE_CONFIG", "SM_TRAINING_ENV")


class Trainer:
    """How a dnn host starts its training; raises UsageError if a file of the job is malformed.

    Attributes:
        arguments: Appended to the command: the job's hyperparameters.
        master: Address and port at which torchrun or mpirun connects the hosts.
    """

    def __init__(self, run: HostRun) -> None:
        settings = run.settings
        processes = settings.processes_per_host or max(1, machine.num_accelerators(run.environ))
        strategy = settings.strategy
        if strategy == "auto":
            # One process needs no rendezvous.
            strategy = "none" if processes * len(run.topology.dnn_hosts) == 1 else "torchrun"
        address, port = run.leader_address
        self.run = run
        self.strategy: Strategy = strategy
        self.processes_per_host = processes
        self.arguments = tuple(arguments(hyperparameters(settings)))
        # feed.port is for the run's server and agents, the next for batches, the third for
        # torchrun.
        self.master = (address, port + 2)

    def environ(self) -> dict[str, str]:
        """Returns the command's environment."""
        run = self.run
        topology = run.topology
        theirs = toolkit_variables(topology, run.settings.base_dir, environ=run.environ)
        if machine.requested_vcpus(run.environ):
            # Otherwise torch starts a thread per core of the node, which then compete.
            threads = machine.usable_vcpus() // self.processes_per_host
            theirs["OMP_NUM_THREADS"] = str(max(1, threads))
        if interface := topology.network_interface:
            theirs |= {"NCCL_SOCKET_IFNAME": interface, "GLOO_SOCKET_IFNAME": interface}
        is_fed = run.settings.engine.name == "feed" and bool(topology.data_hosts)
        ours = own_variables(run, startup=STARTUP_DIR, has_data_group=is_fed)
        ours |= {
            "STOKER_LAUNCHER_PID": str(os.getpid()),
            "STOKER_METRICS": str(run.output / "metrics.json"),
            "STOKER_RUN_ID": run.settings.run_id,
            # torchelastic's, of the process that the launcher starts.
            "TORCHELASTIC_ERROR_FILE": str(run.output / ERROR_FILE),
        }
        if run.keys:
            address, port = run.leader_address
            ours["STOKER_COORDINATOR"] = f"{address}:{port}"
        if topology.data_hosts:
            ours |= {name: theirs[name] for name in _OF_HOSTS}
        if self.strategy == "none" and len(topology.dnn_hosts) > 1:
            # For a command that starts its ranks itself, such as `accelerate launch`.
            ours |= {
                "MASTER_ADDR": self.master[0],
                "MASTER_PORT": str(self.master[1]),
                "NODE_RANK": str(topology.dnn_hosts.index(topology.host)),
                "NNODES": str(len(topology.dnn_hosts)),
            }
        # Variables of the toolkit or the user take precedence over ours for SageMaker.
        return {**theirs, **run.environ, **ours}

    def command(self, command: Sequence[str]) -> tuple[str, ...]:
        """Returns the command as started on this host: as it is, or under torchrun."""
        if self.strategy == "none":
            return tuple(command)
        topology = self.run.topology
        hosts = topology.dnn_hosts
        where: tuple[str, ...] = ("--standalone", f"--local-addr={LOOPBACK}")
        if len(hosts) > 1:
            where = (
                f"--nnodes={len(hosts)}",
                f"--node-rank={hosts.index(topology.host)}",
                f"--master-addr={self.master[0]}",
                f"--master-port={self.master[1]}",
                f"--rdzv-conf=timeout={round(self.run.settings.feed.start_deadline_seconds)}",
            )
        return (
            # -P: a module in the working directory must not replace one of ours.
            *(sys.executable, "-P", "-m", "stoker.launch.torchrun"),
            *where,
            f"--nproc-per-node={self.processes_per_host}",
            "--max-restarts=0",
            "--no-python",
            *command,
        )


def own_variables(
    run: HostRun, *, startup: Path | None = None, has_data_group: bool = False
) -> dict[str, str]:
    """Returns stoker's variables of a command on this host.

    Args:
        startup: Folder of a sitecustomize for its processes.
        has_data_group: Whether their loaders take batches from the feed.
    """
    # stoker's first; it runs the next sitecustomize.
    places = (startup, run.folder, run.environ.get("PYTHONPATH"))
    return {
        "PYTHONPATH": ":".join(str(place) for place in places if place),
        # Output goes through a pipe: lines must not wait in a buffer.
        "PYTHONUNBUFFERED": "1",
        "STOKER_BASE_DIR": str(run.settings.base_dir),
        "STOKER_HOST": run.topology.host,
        "STOKER_GROUP": run.topology.group.name,
        "STOKER_HAS_DATA_GROUP": str(int(has_data_group)),
        "STOKER_OUTPUT": str(run.output),
    }


def hyperparameters(settings: ProcessSettings) -> dict[str, Json]:
    """Returns the job's hyperparameters, decoded, without those for the toolkit."""
    values = _parameters(settings.base_dir)
    return {name: value for name, value in sorted(values.items()) if not _is_reserved(name)}


def toolkit_variables(
    topology: Topology, base_dir: Path, *, environ: Mapping[str, str]
) -> dict[str, str]:
    """Returns the SM_* variables of the toolkit that scripts read.

    Its cluster are the hosts that train: a script scales by their number, or starts a process group
    over them.

    Raises:
        UsageError: If a file of the job folder is malformed.
    """
    values = _parameters(base_dir)
    own_values = {name: value for name, value in values.items() if not _is_reserved(name)}
    channels = sorted(_read(base_dir, "inputdataconfig.json"))
    names = [name for name in channels if not name.startswith(OWN_CHANNELS)]
    folders: dict[str, Json] = {name: str(base_dir / "input" / "data" / name) for name in names}
    cluster: dict[str, Json] = {
        "current_host": topology.host,
        "current_instance_type": topology.dnn.instance_type,
        "current_instance_group": topology.dnn.name,
        "hosts": list(topology.dnn_hosts),
        "network_interface_name": topology.network_interface or "eth0",
    }
    facts: dict[str, Json] = {
        **cluster,
        "input_dir": str(base_dir / "input"),
        "input_config_dir": str(base_dir / "input" / "config"),
        "model_dir": str(base_dir / "model"),
        "output_dir": str(base_dir / "output"),
        "output_data_dir": str(base_dir / "output" / "data"),
        "num_cpus": machine.usable_vcpus(),
        "num_gpus": machine.num_accelerators(environ),
    }
    training_env: dict[str, Json] = {
        **facts,
        "channel_input_dirs": folders,
        "hyperparameters": dict(own_values),
        "master_hostname": topology.leader,
        "is_master": topology.is_leader,
        "job_name": environ.get("TRAINING_JOB_NAME"),
    }
    facts |= {
        "resource_config": cluster,
        "channels": list(folders),
        "hps": dict(own_values),
        "user_args": list(arguments(dict(sorted(own_values.items())))),
        "training_env": training_env,
        **{f"channel_{name}": folder for name, folder in folders.items()},
        **{f"hp_{name}": value for name, value in own_values.items()},
    }
    return {f"SM_{name.upper()}": _variable(value) for name, value in facts.items()}


def _is_reserved(name: str) -> bool:
    return name.startswith(_RESERVED_PREFIX) or name in _RESERVED


def _parameters(base_dir: Path) -> dict[str, Json]:
    document = _read(base_dir, "hyperparameters.json")
    return {name: decoded(value) for name, value in document.items()}


def _read(base_dir: Path, name: str) -> dict[str, Json]:
    path = base_dir / "input" / "config" / name
    if not path.exists():
        return {}
    try:
        return dict(json.loads(read_text(path)))
    except (ValueError, TypeError) as err:
        raise UsageError(f"not a JSON object: {err}", where=str(path)) from None


def _variable(value: Json) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
