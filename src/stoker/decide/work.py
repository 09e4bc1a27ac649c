"""Values the cost model works on: what a step asks for, and the hosts that could give it."""

from dataclasses import dataclass

from stoker.catalog import Instance
from stoker.records import Limit, Shared
from stoker.records.parts import WAITS


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
        receive_seconds: Not overlapped, in the trainer's own thread, with the feed.
        local_receive_seconds: The same with local workers alone, and inside what a rank's process
            uses; None: not known, as with the feed.
        handover_seconds: Wall clock to take a ready batch from a local worker; 0: not known.
        loader_cpu_seconds: Loading and augmenting, all ranks: those that were measured.
        loader_wall_seconds: Worker-seconds of the same work, with the fewest workers.
        trainer_cpu_seconds: The trainer processes themselves, all ranks.
        reserved_vcpus: Of one host, instead of trainer_cpu_seconds.
        receive_cpu_seconds: The feed's receive side for a whole global batch, all ranks.
        batch_bytes: 0: not known.
        read_seconds: What the storage of today's hosts needs for a step; 0: not known.
        shared: What today's loader workers share.
        others_vcpus: vCPUs of today's hosts that other programs kept busy.
        machine_width: The relative error that they, and a CPU of changing speed, may cause.
        has_own_storage: Whether each host brings storage bandwidth of its own.
        doubts: What was not measured.
        is_checked: Whether the profile was checked against its own parts.
        unexplained: Why no spending may be advised on this profile; empty: it may.
        global_batch_size: Samples of a step today; None: not known.
        efficiency: Factor on what data hosts reach, from earlier runs.
        calibration_spread: Relative error that those runs leave; 0: none, or no such runs.
        data: Data hosts that load today; none, but where the profile is of such a run.
        parts_seconds: The step that the parts give.
        correction: Measured step over the step the parts gave.
        corrected: The limits that the correction is for: those that bind today.
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
    read_seconds: float = 0.0
    shared: Shared = Shared()  # noqa: RUF009 - frozen
    others_vcpus: float = 0.0
    machine_width: float = 0.0
    has_own_storage: bool = False
    local_receive_seconds: float | None = None
    handover_seconds: float = 0.0
    doubts: tuple[Doubt, ...] = ()
    unexplained: str = ""
    is_checked: bool = False
    parts_seconds: float = 0.0
    correction: float = 1.0
    corrected: tuple[Limit, ...] = ()
    global_batch_size: int | None = None
    efficiency: float = 1.0
    calibration_spread: float = 0.0
    data: "tuple[Hosts, ...]" = ()

    @property
    def parallel_seconds(self) -> float:
        """Worker-seconds of loading that more workers divide among them."""
        return max(0.0, self.loader_wall_seconds - self.shared.least * self.shared.seconds)

    @property
    def waits(self) -> bool:
        """Whether loading waits for something, beside what its workers share."""
        return self.parallel_seconds > WAITS * self.loader_cpu_seconds

    def factor(self, limit: Limit) -> float:
        """What a term of the model is corrected by, so that today's cluster gives today's step."""
        return self.correction if limit in self.corrected else 1.0


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
