"""The training command is started on a dnn host: on its own, under torchrun, or by mpirun."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import stoker
from stoker.host import machine
from stoker.launch import sagemaker_variables
from stoker.launch.strategies import mpi, smddp
from stoker.launch.topology import Topology
from stoker.logs import EventName, Log
from stoker.records import FeedSettings, StrategySettings
from stoker.records.engine import Strategy
from stoker.settings import ProcessSettings

STARTUP_DIR = Path(stoker.__file__).parent / "startup"
# Fields that a launcher sets for the processes that it starts, whatever it was told itself.
_TOLD = (
    *("run_id", "base_dir", "host", "group"),
    *("launcher_pid", "has_data_group", "output", "metrics"),
)


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """Says how each dnn host starts its training: with which command, and by which strategy.

    Attributes:
        strategy: none: the command itself; torchrun: one process a rank; smddp: the same with
            SageMaker's library; mpi: mpirun on the leader.
        settings: Settings of the strategy.
        processes_per_host: Ranks of one host.
        arguments: After the command: the job's hyperparameters.
        variables: What SageMaker's toolkit would export, and the network interface for NCCL and
            gloo.
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
        """Returns the trainer of this host.

        Blocks for as long as torch's import takes where SageMaker's library is tried.

        Args:
            settings: Settings of this launcher.
            topology: Topology of the run.
            environ: Environment of this launcher.
            log: Log of this host; gets a line if another backend is used.

        Raises:
            UsageError: If the strategy cannot use this host, or a file of the job folder is
                malformed.
        """
        num_accelerators = machine.num_accelerators(environ)
        processes = settings.processes_per_host or max(1, num_accelerators)
        values = sagemaker_variables.hyperparameters(settings.base_dir)
        variables = sagemaker_variables.environment(
            topology,
            settings.base_dir,
            values=values,
            num_cpus=machine.usable_vcpus(),
            num_accelerators=num_accelerators,
            environ=environ,
        )
        if machine.requested_vcpus(environ) and "OMP_NUM_THREADS" not in environ:
            # Else torch begins a thread for each core of the node, and they wait for each other.
            variables["OMP_NUM_THREADS"] = str(max(1, machine.usable_vcpus() // processes))
        interface = topology.network_interface
        if interface and not machine.has_interface(interface):
            interface = None
        if interface:
            variables |= {"NCCL_SOCKET_IFNAME": interface, "GLOO_SOCKET_IFNAME": interface}
        strategy = _strategy(settings.strategy, processes * len(topology.dnn_hosts))
        if settings.strategy.max_restarts:
            # Else ranks of all attempts share a store, and find the addresses of the dead.
            variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        if strategy == "mpi":
            variables |= mpi.variables(interface)
        if strategy == "smddp":
            backend = smddp.backend_of(
                settings.strategy,
                instance_type=topology.dnn.instance_type,
                host=topology.host,
                environ=environ,
            )
            variables |= replace(settings, backend=backend.name).to_environ("backend")
            if backend.reason:
                strategy = "torchrun"
                if log:
                    log.event(EventName.BACKEND_FALLBACK, to=backend.name, reason=backend.reason)
        return cls(
            strategy=strategy,
            settings=settings.strategy,
            processes_per_host=processes,
            arguments=tuple(sagemaker_variables.arguments(values)),
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
        """Returns the command's whole environment.

        Args:
            settings: Settings of this launcher.
            topology: Topology of the run.
            environ: Environment of this launcher.
            output: STOKER_OUTPUT.
            coordinator: Its name and port, where there is one.
            launcher_pid: This process.
            folder: Folder with the training's code, whose modules all its processes may import.
        """
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
            # In front, so that it is found; it chains on to the next sitecustomize.
            "PYTHONPATH": ":".join(filter(None, places)),
            # Output of the command comes through a pipe: lines must not wait in its buffer.
            "PYTHONUNBUFFERED": "1",
            **told.to_environ(*_TOLD, *(("coordinator",) if coordinator else ())),
        }
        # What is set already stays: by the toolkit, which has looked at this host, or by the user.
        return {**self.variables, **environ, **ours}

    def command(
        self,
        command: Sequence[str],
        topology: Topology,
        *,
        master: tuple[str, int],
        feed: FeedSettings,
    ) -> tuple[str, ...]:
        """Returns the command as it is started on this host; see MpiHost for mpi.

        Args:
            command: Command with its program found, and all arguments.
            topology: Topology of the run.
            master: Address and port of torchrun's store on the leader.
            feed: Its start deadline is that of torchrun's rendezvous, too.
        """
        if self.strategy == "none":
            return tuple(command)
        where = self._rendezvous(topology, master, round(feed.start_deadline_seconds))
        return (
            # -P: a module in the working directory must not stand in for one of ours.
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
        """Returns torchrun's options by which the hosts find each other."""
        nodes, rank = len(topology.dnn_hosts), topology.dnn_hosts.index(topology.host)
        if nodes == 1:
            return "--standalone", "--local-addr=127.0.0.1"
        if not self.settings.max_restarts:
            return (
                f"--nnodes={nodes}",
                f"--node-rank={rank}",
                f"--master-addr={master[0]}",
                f"--master-port={master[1]}",
                f"--rdzv-conf=timeout={seconds}",
            )
        # With the rendezvous above, each host would begin the next attempt alone. With this one
        # they agree when, even where ranks do not notice a death elsewhere.
        conf = {
            "is_host": int(topology.is_leader),
            "join_timeout": seconds,
            "last_call_timeout": 1,
            "timeout": seconds,
        }
        # Hosts are numbered in the order of these names; only the leader's is connected to.
        name = master[0] if topology.is_leader else f"~{rank:05d}"
        return (
            f"--nnodes={nodes}",
            "--rdzv-backend=c10d",
            f"--rdzv-id={topology.leader}",
            f"--rdzv-endpoint={master[0]}:{master[1]}",
            "--rdzv-conf=" + ",".join(f"{key}={value}" for key, value in conf.items()),
            f"--local-addr={name}",
        )


def _strategy(wanted: StrategySettings, num_processes: int) -> Strategy:
    if wanted.name == "auto":
        return "torchrun" if num_processes > 1 else "none"
    return wanted.name
