"""What was seen beside the steps as is: the signs by which the states of a training are told."""

import msgspec


class Pass(msgspec.Struct, frozen=True, kw_only=True):
    """One pass over the main loader, its first batch left out: that one waits for workers to start.

    Attributes:
        batches: So many are behind the means.
        wait_seconds: In next(), a step.
        step_seconds: From batch to batch.
    """

    batches: int
    wait_seconds: float
    step_seconds: float


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over the time that was watched: the steps as is that count.

    The *reading thread* is the one that takes batches: the trainer's main thread, as a rule.

    Attributes:
        seconds: That was watched.
        steps: In it.
        wait_seconds: Of the reading thread in next().
        own_cpu_seconds: CPU of the reading thread outside next().
        queued_seconds: The reading thread was ready to run and others had the CPU.
        other_threads_seconds: CPU of the trainer process's other threads.
        knocks: How often another thread asked for the interpreter lock, the reading thread being
            outside next().
        held_knocks: Of them, the lock was held for 0.5 ms or more.
        collective_knocks: Of them, the reading thread was in a collective or in backward.
        worker_seconds: Seconds of the loader's workers together, of which
        worker_cpu_seconds: they had a CPU, and
        worker_queued_seconds: they were ready to run and others had it.
        busy_vcpus: vCPUs of ours that were busy, whoever kept them so; under a quota, of its group.
        elsewhere_vcpus: vCPUs of this machine that this process may not use, and that were busy.
        quota_vcpus: What the CPU quota of this control group, or of one above it, allows.
        periods: Of that quota; 0: there is none.
        throttled_periods: Of them, the group was stopped in.
        throttled_seconds: In which its threads were stopped, summed over vCPUs.
        received_bytes: By the network interfaces of this host or pod, loopback left out.
        read_bytes: From storage, by this process and those below it; page cache left out.
        storage_stall_seconds: Some process of the machine waited for storage; None: not known.
        core_looks: CPU-seconds of one and the same short computation, one every 0.1 s.
        passes: The epochs, in order.
    """

    seconds: float = 0.0
    steps: int = 0
    wait_seconds: float = 0.0
    own_cpu_seconds: float = 0.0
    queued_seconds: float = 0.0
    other_threads_seconds: float = 0.0
    knocks: int = 0
    held_knocks: int = 0
    collective_knocks: int = 0
    worker_seconds: float = 0.0
    worker_cpu_seconds: float = 0.0
    worker_queued_seconds: float = 0.0
    busy_vcpus: float = 0.0
    elsewhere_vcpus: float = 0.0
    quota_vcpus: float | None = None
    periods: int = 0
    throttled_periods: int = 0
    throttled_seconds: float = 0.0
    received_bytes: int = 0
    read_bytes: int = 0
    storage_stall_seconds: float | None = None
    core_looks: tuple[float, ...] = ()
    passes: tuple[Pass, ...] = ()

    @property
    def outside_seconds(self) -> float:
        """Of the reading thread outside next()."""
        return max(0.0, self.seconds - self.wait_seconds)

    @property
    def held_share(self) -> float:
        """How much of the time outside next() the interpreter lock was held; 0: not known."""
        return self.held_knocks / self.knocks if self.knocks else 0.0

    @property
    def idle_seconds(self) -> float:
        """The reading thread outside next() neither ran nor was ready to: it waited."""
        return max(0.0, self.outside_seconds - self.own_cpu_seconds - self.queued_seconds)

    @property
    def collective_seconds(self) -> float:
        """Of a step, in collectives and in backward."""
        if not self.knocks or not self.steps:
            return 0.0
        return self.collective_knocks / self.knocks * self.outside_seconds / self.steps
