"""Values the cost model works on: what a step asks for, and the hosts that could give it."""

from dataclasses import dataclass

from stoker.catalog import Instance


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """Something that was not measured: `width` is the relative error that it may cause."""

    width: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one global step asks for. CPU-seconds are those of the profiled host's vCPUs.

    Attributes:
        reference: The profiled type, with the vCPUs and accelerators that were measured.
        hosts: Hosts of that type that train today.
        ranks: Trainer processes of all of them.
        num_workers: Loader workers of one host; None: not known.
        step_seconds: Measured, as is.
        accelerator_seconds: Accelerator-only step with its all-reduce; 0: not known.
        receive_seconds: Not overlapped, in the trainer's own thread.
        loader_cpu_seconds: Loading and augmenting, all ranks.
        loader_wall_seconds: Worker-seconds of the same work, uncontended.
        trainer_cpu_seconds: The trainer processes themselves, all ranks.
        reserved_vcpus: Of one host, instead of trainer_cpu_seconds.
        receive_cpu_seconds: The feed's receive side for a whole global batch, all ranks.
        batch_bytes: 0: not known.
        read_bytes: 0: not known.
        storage_bytes_per_second: Of one host; None: not known.
        doubts: What was not measured.
        is_checked: Whether the profile was checked against its own parts.
        unexplained: Why no spending may be advised on this profile; empty: it may.
        global_batch_size: Samples of a step today; None: not known.
        efficiency: Factor on what data hosts reach, from earlier runs.
        calibration_spread: Relative error that those runs leave; 0: none, or no such runs.
        data: Data hosts that load today; none, but where the profile is of such a run.
        correction: Measured step over the step the parts gave; it is already applied.
    """

    reference: Instance
    hosts: int
    ranks: int
    num_workers: int | None
    step_seconds: float
    accelerator_seconds: float
    receive_seconds: float
    loader_cpu_seconds: float
    loader_wall_seconds: float
    trainer_cpu_seconds: float
    reserved_vcpus: float
    receive_cpu_seconds: float
    batch_bytes: float
    read_bytes: float
    storage_bytes_per_second: float | None
    doubts: tuple[Doubt, ...] = ()
    unexplained: str = ""
    is_checked: bool = False
    correction: float = 1.0
    global_batch_size: int | None = None
    efficiency: float = 1.0
    calibration_spread: float = 0.0
    data: "tuple[Hosts, ...]" = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """Hosts of one type. workers: data workers of one host; None: as many as its vCPUs."""

    instance: Instance
    count: int
    workers: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A cluster.

    Attributes:
        dnn: The hosts that train; with `workers` 0 and data hosts they load nothing.
        data: The hosts that only load.
        processes: Trainer processes of one dnn host.
        replicas: Accelerators over today's.
        scaling: What each further replica is worth, of a whole one.
    """

    dnn: Hosts
    data: tuple[Hosts, ...] = ()
    processes: int = 1
    replicas: float = 1.0
    scaling: float = 1.0

    @property
    def machines(self) -> int:
        """All hosts together."""
        return self.dnn.count + sum(hosts.count for hosts in self.data)

    @property
    def data_hosts(self) -> int:
        """Hosts that only load."""
        return sum(hosts.count for hosts in self.data)
