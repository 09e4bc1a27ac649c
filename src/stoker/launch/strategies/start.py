"""How the training command starts on a dnn host: directly, under torchrun, or by mpirun."""

import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import stoker
from stoker.environment import ProcessSettings
from stoker.host import machine
from stoker.host.processes import loopback
from stoker.launch import sagemaker_variables
from stoker.launch.strategies import mpi, smddp
from stoker.launch.topology import Topology
from stoker.logs import EventName, Log
from stoker.records import FeedSettings, StrategySettings
from stoker.records.engine import Strategy
from stoker.records.hyperparameters import arguments

STARTUP_DIR = Path(stoker.__file__).parent / "startup"
# Fields that a launcher sets for its child processes, whatever its own values are.
_TOLD = (
    "run_id",
    "base_dir",
    "host",
    "group",
    "launcher_pid",
    "has_data_group",
    "output",
    "metrics",
)


def _automatic(num_processes: int) -> Strategy:
    # One process needs no rendezvous.
    if num_processes == 1:
        return "none"
    return "torchrun"


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """How each dnn host starts its training.

    Attributes:
        strategy: torchrun in place of smddp's fallback.
        arguments: Appended to the command: the job's hyperparameters.
    """

    strategy: Strategy
    settings: StrategySettings
    processes_per_host: int
    arguments: tuple[str, ...]
    variables: Mapping[str, str]

    @classmethod
    def of(
        cls,
        settings: ProcessSettings,
        topology: Topology,
        environ: Mapping[str, str],
        *,
        log: Log | None = None,
    ) -> "Trainer":
        """Returns the trainer of this host; blocks while SageMaker's library is tried.

        Raises:
            UsageError: If the strategy cannot use this host, or a file of the job is malformed.
        """
        num_accelerators = machine.num_accelerators(environ)
        processes = settings.processes_per_host or max(1, num_accelerators)
        values = sagemaker_variables.hyperparameters(settings)
        variables = sagemaker_variables.environment(
            topology,
            settings.base_dir,
            values=values,
            forms=settings.hyperparameter_forms,
            num_cpus=machine.usable_vcpus(),
            num_accelerators=num_accelerators,
            environ=environ,
        )
        if machine.requested_vcpus(environ) and "OMP_NUM_THREADS" not in environ:
            # Otherwise torch starts a thread per core of the node, which then compete.
            variables["OMP_NUM_THREADS"] = str(max(1, machine.usable_vcpus() // processes))
        interface = topology.network_interface
        if interface not in [name for _, name in socket.if_nameindex()]:
            interface = None
        if interface:
            variables |= {"NCCL_SOCKET_IFNAME": interface, "GLOO_SOCKET_IFNAME": interface}
        strategy = settings.strategy.name
        if strategy == "auto":
            strategy = _automatic(processes * len(topology.dnn_hosts))
        if settings.strategy.max_restarts:
            # Otherwise all attempts share a store, with the addresses of dead ranks.
            variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        if strategy == "mpi":
            variables |= mpi.variables(interface)
        if strategy == "smddp":
            backend, reason = smddp.backend_of(
                settings.strategy,
                instance_type=topology.dnn.instance_type,
                host=topology.host,
                environ=environ,
            )
            variables |= replace(settings, backend=backend).to_environ("backend")
            if reason:
                strategy = "torchrun"
                if log:
                    log.event(EventName.BACKEND_FALLBACK, to=backend, reason=reason)
        return cls(
            strategy=strategy,
            settings=settings.strategy,
            processes_per_host=processes,
            arguments=tuple(arguments(values, settings.hyperparameter_forms)),
            variables=variables,
        )

    def environ(
        self,
        settings: ProcessSettings,
        topology: Topology,
        environ: Mapping[str, str],
        *,
        output: Path,
        coordinator: tuple[str, int] | None,
        launcher_pid: int,
        folder: Path | None = None,
    ) -> dict[str, str]:
        told = replace(
            settings,
            host=topology.host,
            group=topology.group.name,
            launcher_pid=launcher_pid,
            has_data_group=bool(topology.data_hosts),
            output=output,
            metrics=output / "metrics.json",
            coordinator=f"{coordinator[0]}:{coordinator[1]}" if coordinator else None,
        )
        places = [str(STARTUP_DIR), str(folder or ""), environ.get("PYTHONPATH", "")]
        ours = {
            # stoker's first; it runs the next sitecustomize.
            "PYTHONPATH": ":".join(filter(None, places)),
            # Output goes through a pipe: lines must not wait in a buffer.
            "PYTHONUNBUFFERED": "1",
            **told.to_environ(*_TOLD, *(("coordinator",) if coordinator else ())),
        }
        # Variables of the toolkit or the user take precedence over ours for SageMaker.
        return {**self.variables, **environ, **ours}

    def command(
        self,
        command: Sequence[str],
        topology: Topology,
        *,
        master: tuple[str, int],
        feed: FeedSettings,
    ) -> tuple[str, ...]:
        """Returns the command as started on this host, for torchrun with its store at `master`."""
        if self.strategy == "none":
            return tuple(command)
        where = self._rendezvous(topology, master, round(feed.start_deadline_seconds))
        return (
            # -P: a module in the working directory must not replace one of ours.
            *(sys.executable, "-P", "-m", "stoker.launch.strategies.torchrun"),
            *where,
            f"--nproc-per-node={self.processes_per_host}",
            f"--max-restarts={self.settings.max_restarts}",
            "--no-python",
            *command,
        )

    def _rendezvous(
        self, topology: Topology, master: tuple[str, int], seconds: int
    ) -> tuple[str, ...]:
        nodes = len(topology.dnn_hosts)
        rank = topology.dnn_hosts.index(topology.host)
        if nodes == 1:
            return "--standalone", f"--local-addr={loopback()}"
        if not self.settings.max_restarts:
            return (
                f"--nnodes={nodes}",
                f"--node-rank={rank}",
                f"--master-addr={master[0]}",
                f"--master-port={master[1]}",
                f"--rdzv-conf=timeout={seconds}",
            )
        # Here hosts restart together; with the rendezvous above each would alone.
        conf = {
            "is_host": int(topology.is_leader),
            "join_timeout": seconds,
            "last_call_timeout": 1,
            "timeout": seconds,
        }
        # Hosts are numbered in the order of these names; only the leader's is an address.
        name = master[0] if topology.is_leader else f"~{rank:05d}"
        return (
            f"--nnodes={nodes}",
            "--rdzv-backend=c10d",
            f"--rdzv-id={topology.leader}",
            f"--rdzv-endpoint={master[0]}:{master[1]}",
            "--rdzv-conf=" + ",".join(f"{key}={value}" for key, value in conf.items()),
            f"--local-addr={name}",
        )
