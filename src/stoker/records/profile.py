"""The profile: what a global step of the workload waits for, measured on today's cluster."""

import shlex
from typing import Literal

from stoker.errors import UsageError
from stoker.records.base import (
    Fraction,
    Name,
    Names,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Record,
    Value,
)
from stoker.records.epochs import EpochTimes
from stoker.records.gpu import GpuLoads
from stoker.records.profile_origin import ProfileOrigin
from stoker.units import wait_share

# Means over minutes, pauses included: above the first a part is probably the limit, below the
# second it has room (published CPU-bound jobs: CPU 99%, GPU 38 to 48%).
_BUSY = 0.85
_SLACK = 0.7
# Of a limit of memory: from here on the feed lowers what waits (feed/memory_guard.py).
NEAR_LIMIT = 0.92
# Fixes that are about memory, by their ids.
_OF_MEMORY = (
    "copied_objects",
    "growing_cache",
    "growing_worker",
    "growing_trainer",
    "memory_files",
    "prefetch_factor",
    "fewer_workers",
    "page_cache",
    "swap",
)


class ProfiledHost(Record, frozen=True, kw_only=True):
    """The hosts that were measured.

    Attributes:
        instance_type: Type in the catalog.
        count: Number of hosts.
        vcpus: Whole vCPUs of one host that the training may use. None: the catalog's.
        quota_vcpus: The same if it is not a whole number, such as 1.5.
        accelerators: Accelerators of one host. None: the catalog's.
        accelerator_model: Accelerator model, as the driver spells it.
        cpu_model: CPU model, as the kernel spells it.
    """

    instance_type: Name
    count: PositiveInt = 1
    vcpus: PositiveInt | None = None
    quota_vcpus: PositiveFloat | None = None
    accelerators: NonNegativeInt | None = None
    accelerator_model: Name | None = None
    cpu_model: Name | None = None

    @property
    def capacity(self) -> float | None:
        """vCPUs of one host, fractions included; None: the catalog's."""
        if self.quota_vcpus is None:
            return self.vcpus
        return self.quota_vcpus


class ProfiledData(Record, frozen=True, kw_only=True):
    """Data hosts of one type that worked during the profile.

    Attributes:
        instance_type: Type in the catalog.
        count: Number of hosts.
        workers_per_host: Data workers of one host.
    """

    instance_type: Name
    count: PositiveInt
    workers_per_host: NonNegativeInt | None = None


class StepTerms(Record, frozen=True, kw_only=True):
    """Parts of one *global* step: all ranks together do one step.

    Attributes:
        step_seconds: Median step, in seconds of wall clock.
        wait_seconds: Wait for data of the rank that waits longest, in seconds per step.
        accelerator_step_seconds: Step with cached batches, all-reduce included, in seconds.
        transfer_seconds: Part of accelerator_step_seconds in which the accelerator waits for copies
            from the host. None: not measured, or no accelerator.
        neighbour_seconds: How much longer a step with cached batches takes while the host's loader
            workers are busy. None: not measured, or no accelerator.
        loader_cpu_seconds: CPU-seconds of loading, all ranks, with all vCPUs busy.
        receive_seconds: Seconds in which a rank's main thread receives a batch from the feed.
        local_receive_seconds: The same for a batch from today's local workers.
        handover_seconds: The same while its worker makes the next batch; not measured with CUDA.
        receive_cpu_seconds: CPU-seconds of receiving in other threads, per rank.
        loader_wall_seconds: Worker-seconds of loading, all ranks, with idle vCPUs.
        hidden_load_seconds: Part of it, of one rank without workers, that passes while its
            accelerator still computes. None: there are workers, or no accelerator.
        trainer_cpu_seconds: CPU-seconds of the trainer processes, all ranks.
        trainer_vcpus: vCPUs of one host that the trainer uses, if trainer_cpu_seconds is not known.
        used_cpu_seconds: CPU-seconds of trainers and workers in the unchanged step, all ranks.
        num_workers: Loader workers of one host, all ranks.
        global_batch_size: Samples of one step, all ranks.
        batch_bytes: Bytes of the batches of one step, all ranks.
        read_bytes: Bytes read from storage in one step, all ranks.
        storage_bytes_per_second: Read rate of one host.
    """

    step_seconds: PositiveFloat
    wait_seconds: NonNegativeFloat | None = None
    accelerator_step_seconds: NonNegativeFloat | None = None
    transfer_seconds: NonNegativeFloat | None = None
    neighbour_seconds: NonNegativeFloat | None = None
    loader_cpu_seconds: NonNegativeFloat | None = None
    receive_seconds: NonNegativeFloat | None = None
    local_receive_seconds: NonNegativeFloat | None = None
    handover_seconds: NonNegativeFloat | None = None
    receive_cpu_seconds: NonNegativeFloat | None = None
    loader_wall_seconds: NonNegativeFloat | None = None
    hidden_load_seconds: NonNegativeFloat | None = None
    trainer_cpu_seconds: NonNegativeFloat | None = None
    trainer_vcpus: NonNegativeFloat | None = None
    used_cpu_seconds: NonNegativeFloat | None = None
    num_workers: NonNegativeInt | None = None
    global_batch_size: PositiveInt | None = None
    batch_bytes: NonNegativeFloat | None = None
    read_bytes: NonNegativeFloat | None = None
    storage_bytes_per_second: PositiveFloat | None = None

    @property
    def wait_share(self) -> float | None:
        """Share of a step that waits for data."""
        if self.wait_seconds is None:
            return None
        return wait_share(step_seconds=self.step_seconds, wait_seconds=self.wait_seconds)


class LoaderRate(Record, frozen=True, kw_only=True):
    """Throughput of the loader alone with one number of workers.

    Attributes:
        workers: Loader workers of one host, all ranks.
        steps_per_second: Global batches per second, all hosts.
        wait_seconds: Worker-seconds per step spent waiting for storage, a service or other workers.
    """

    workers: PositiveInt
    steps_per_second: PositiveFloat
    wait_seconds: NonNegativeFloat | None = None


class Observed(Record, frozen=True, kw_only=True):
    """Utilization of the dnn hosts.

    Attributes:
        cpu_utilization: Busy share of all vCPUs, 0 to 1.
        gpu_utilization: Busy share of the GPUs in use, 0 to 1; where steps were timed, during them.
        gpus: Load of each GPU, while the script ran unchanged.
        hosts: Number of hosts observed.
        others_vcpus: vCPUs of all hosts that other programs used during the unchanged steps.
        elsewhere_vcpus: Busy vCPUs of this machine outside its only host.
        cpu_speed_spread: Standard deviation of the CPU's speed between seconds, over its mean.
    """

    cpu_utilization: Fraction | None = None
    gpu_utilization: Fraction | None = None
    gpus: GpuLoads = ()
    hosts: PositiveInt | None = None
    others_vcpus: NonNegativeFloat | None = None
    elsewhere_vcpus: NonNegativeFloat | None = None
    cpu_speed_spread: NonNegativeFloat | None = None

    @property
    def is_known(self) -> bool:
        return self.cpu_utilization is not None or self.gpu_utilization is not None

    @property
    def suspect(self) -> Literal["cpu", "accelerator", "neither", "unknown"]:
        """The limit that these loads suggest; means over minutes prove nothing.

        `neither`: both idle, so steps wait for storage, a service or too few workers, or one thread
        sets the pace.
        """
        cpu = self.cpu_utilization
        gpu = self.gpu_utilization
        # GPUs first: while they are busy, busy CPUs do not matter.
        if gpu is not None and gpu >= _BUSY:
            return "accelerator"
        # Between the bounds a mean fits either kind of step.
        if cpu is None or gpu is None or gpu > _SLACK:
            return "unknown"
        if cpu >= _BUSY:
            return "cpu"
        return "neither" if cpu <= _SLACK else "unknown"


class Spread(Record, frozen=True, kw_only=True):
    """Spread of one measured field.

    Attributes:
        low: Lower quartile, in the field's unit.
        high: Upper quartile, likewise.
        samples: Number of samples.
    """

    low: NonNegativeFloat
    high: NonNegativeFloat
    samples: PositiveInt


class Check(Record, frozen=True, kw_only=True):
    """Self-check: whether the parts add up to the step.

    Attributes:
        predicted_step_seconds: Step computed from the parts, in seconds.
        error: predicted / measured - 1.
        explained: Whether the error is within `profile.max_unexplained`.
        state: The state that explains a step which the parts do not.
    """

    predicted_step_seconds: NonNegativeFloat
    error: float
    explained: bool
    state: Name | None = None


class TransformCost(Record, frozen=True, kw_only=True):
    """Cost of one part of loading, in one worker alone.

    The rows `getitem` and `collate` are the whole; other rows are `within` one of them.

    Attributes:
        name: `getitem`, `collate`, or a transform's class or function.
        within: Row that contains this one.
        cpu_seconds: CPU-seconds per sample.
        share: Share of getitem and collate together, 0 to 1.
        bytes_in: Mean bytes of its input, in profiles of earlier versions.
        bytes_out: Mean bytes of its output, in profiles of earlier versions.
        samples: Calls that were timed.
    """

    name: Name
    within: Literal["getitem", "collate"] | None = None
    cpu_seconds: NonNegativeFloat
    share: Fraction
    bytes_in: NonNegativeFloat | None = None
    bytes_out: NonNegativeFloat | None = None
    samples: PositiveInt


class GpuDecoding(Record, frozen=True, kw_only=True):
    """JPEGs of the dataset that the accelerator decoded during the profile.

    Attributes:
        device: Device that decoded, such as cuda:0.
        library: Package whose decoder was used, such as torchvision.
        pictures_per_second: Pictures decoded per second, with nothing else on the device.
        augmented_per_second: The same with each picture cropped at random to 224 x 224, flipped
            and normalised. None: not tried.
        pictures: Number of different pictures.
        picture_bytes: Mean bytes of their files.
        read_cpu_seconds: CPU-seconds to read one of the files.
    """

    device: Name
    library: Name
    pictures_per_second: PositiveFloat
    augmented_per_second: PositiveFloat | None = None
    pictures: PositiveInt
    picture_bytes: NonNegativeFloat | None = None
    read_cpu_seconds: NonNegativeFloat | None = None


class Fix(Record, frozen=True, kw_only=True):
    """A change to the script or its settings that costs no host.

    Attributes:
        id: Name for programs.
        text: What to change.
        saves_seconds: Seconds saved per step.
        cost: Work needed. none: a setting; small: some lines of code; large: more.
    """

    id: Name
    text: str
    saves_seconds: NonNegativeFloat | None = None
    cost: Literal["none", "small", "large"] = "none"


class ProfileState(Record, frozen=True, kw_only=True):
    """A state that limits the training.

    Attributes:
        id: cpu, accelerator, transfer, neighbour, launch, storage (or network), workers, gil,
            throttled, straggler or other-programs; later versions may add others.
        text: The state and its figures.
        share: Share of a step that it explains or costs, 0 to 1.
    """

    id: Name
    text: str
    share: Fraction | None = None


class Shippable(Record, frozen=True, kw_only=True):
    """Whether what makes a loader's batches can be sent to data hosts.

    Attributes:
        ok: Whether it can, by the part of its pickle that was looked at.
        why: The object that cannot, and its error. Empty: it can.
        fix: What to do about it.
    """

    ok: bool
    why: str = ""
    fix: str = ""


class ProfiledLoader(Record, frozen=True, kw_only=True):
    """The loader that made the profiled batches.

    Attributes:
        class_name: Full name of its class.
        reach: Whether data hosts can make its batches. stoker, torch: yes; left: torch's class in a
            script that imports stoker's, with `replace_dataloader: true`; own: no.
        iterable: Whether its dataset is iterable-style.
        shards: Shards of an iterable dataset, all ranks; no more workers can be busy.
        divides: Whether the dataset uses `get_worker_info()`, so that it can have more shards.
        made_here: Why the trainer's host makes its batches also where there are data hosts, such as
            what it shares in memory. None: it does not, or that is not known.
        in_step: Why a loader without workers is made only as its loop asks for it, such as what the
            loop changes: neither data hosts nor workers help. None: nothing was seen to change.
        fails_in_workers: Error of a loader without workers in any worker: neither workers nor data
            hosts help. None: there was none.
        shippable: Whether its dataset can be sent to data hosts. None: not known.
        splits: Whether samples of a batch are made one by one, so that several workers of a data
            host can make it together. None: not known.
    """

    class_name: Name
    reach: Literal["stoker", "torch", "left", "own"]
    iterable: bool = False
    shards: PositiveInt | None = None
    divides: bool | None = None
    made_here: str | None = None
    in_step: str | None = None
    fails_in_workers: str | None = None
    shippable: Shippable | None = None
    splits: bool | None = None


class HeldObjects(Record, frozen=True, kw_only=True):
    """A collection of Python objects that the dataset holds, and that forked workers copy.

    Attributes:
        name: Attribute, by its class, such as Photos.paths.
        container: Type of the attribute, such as list.
        element: Type of its elements, or of a mapping's values.
        count: Number of elements.
        num_bytes: Estimated bytes of the collection with its elements.
    """

    name: str
    container: str
    element: str
    count: PositiveInt
    num_bytes: NonNegativeInt


class GrowingObjects(Record, frozen=True, kw_only=True):
    """A collection or cache of the dataset that grows in its workers.

    Attributes:
        name: Attribute, by its class, or a variable of the dataset's module, or of a stream's
            generator with its function, such as `buffer in __iter__()`.
        container: Its type, such as dict; lru_cache: results that a function keeps.
        count_per_sample: Elements that are added for each sample.
        max_count: Elements that it holds at most; None: it has no limit.
        of_elements: Whether its elements keep more than before, and are as many as they were.
        element_bytes: Of its latest element. 0: it is not known.
    """

    name: str
    container: str
    count_per_sample: NonNegativeFloat
    max_count: NonNegativeInt | None = None
    of_elements: bool = False
    element_bytes: NonNegativeInt = 0

    @property
    def is_bounded(self) -> bool:
        """Whether it is a cache or a buffer that was given a limit."""
        return self.max_count is not None and not self.of_elements

    @property
    def is_of_a_stream(self) -> bool:
        """Whether it is a variable of a generator, which may end at a size, as a shuffle buffer."""
        return " in " in self.name and self.name.endswith("()")


class KeptObjects(Record, frozen=True, kw_only=True):
    """What the script's loop keeps of each step.

    Attributes:
        name: Variable with its function, or attribute by its class, such as `losses in train()`.
        container: Type of the collection, such as list; sum: a tensor that others are added to;
            joined: a tensor or array that becomes longer; graph: a tensor that is computed from
            what it was in the step before; objects: those of a class become more.
        element: Type of its elements.
        has_graph: Whether they are tensors with the graph that they were computed by.
        count_per_step: Elements that are added in each step.
        max_count: Elements that it holds at most, as `deque(maxlen=100)`; None: it has no limit.
    """

    name: str
    container: str
    element: str
    has_graph: bool = False
    count_per_step: NonNegativeFloat
    max_count: NonNegativeInt | None = None


class ProfiledMemory(Record, frozen=True, kw_only=True):
    """Memory of the profiled host, while the script ran unchanged unless it says otherwise.

    Attributes:
        limit_bytes: The limit that leaves least room: a control group's, or the machine's memory.
        used_bytes: Highest use of it, without files that the kernel can drop.
        limited_by: Whose limit it is.
        only_slows: Whether the kernel slows processes there, and kills none (`memory.high`).
        trainer_bytes: PSS of the trainer processes, all ranks of the host.
        trainer_grown_bytes_per_step: What they grow by in each step.
        workers: Loader workers that were looked at, all ranks of the host.
        worker_bytes: Mean PSS of a worker: pages that processes share are divided among them.
        worker_private_bytes: Mean bytes that only one worker has written.
        copied_bytes_per_sample: Bytes that a worker copies on write for each sample that it makes.
        grown_bytes_per_sample: Bytes that a worker grows by for each sample that it makes.
        waiting_bytes: Batches that wait at most: workers x prefetch_factor x batch.
        epoch_samples: Samples of an epoch, all ranks of the host. None: not known.
        swapped_bytes: Bytes of trainers and workers that were swapped out.
        swapped_bytes_per_second: Swapped in and out, by all programs of the machine.
        refaulted_bytes_per_second: Read again from files that the page cache had just thrown out.
        major_faults_per_second: Accesses to memory that waited for a disk.
        look_seconds: Mean time of a look at all these, once a second at most.
        objects: Collections of Python objects in the dataset, the largest first.
        growing: What of the dataset grows as samples are made, in one worker alone.
        kept: What the loop keeps of each step, tensors with their graph first.
        files_bytes: Files in a folder that is memory, such as /dev/shm; 0 where memory has room.
        files_folder: That folder. Empty: none.
        group_others_bytes: What other programs of the control group held; 0 where it was not short.
        largest_other: Name of the program that held most of it. Empty: none.
    """

    limit_bytes: PositiveInt
    used_bytes: NonNegativeInt
    limited_by: Literal["cgroup", "machine"]
    only_slows: bool = False
    trainer_bytes: NonNegativeInt
    trainer_grown_bytes_per_step: NonNegativeFloat = 0.0
    workers: NonNegativeInt = 0
    worker_bytes: NonNegativeFloat = 0.0
    worker_private_bytes: NonNegativeFloat = 0.0
    copied_bytes_per_sample: NonNegativeFloat = 0.0
    grown_bytes_per_sample: NonNegativeFloat = 0.0
    waiting_bytes: NonNegativeInt = 0
    epoch_samples: NonNegativeInt | None = None
    swapped_bytes: NonNegativeInt = 0
    swapped_bytes_per_second: NonNegativeFloat = 0.0
    refaulted_bytes_per_second: NonNegativeFloat = 0.0
    major_faults_per_second: NonNegativeFloat = 0.0
    look_seconds: NonNegativeFloat = 0.0
    objects: tuple[HeldObjects, ...] = ()
    growing: tuple[GrowingObjects, ...] = ()
    kept: tuple[KeptObjects, ...] = ()
    files_bytes: NonNegativeInt = 0
    files_folder: str = ""
    group_others_bytes: NonNegativeInt = 0
    largest_other: str = ""

    @property
    def room_bytes(self) -> float:
        """Bytes that may be used in addition, until the limit."""
        return max(0.0, self.limit_bytes - self.used_bytes)

    @property
    def taken_by_worker(self) -> float:
        """Bytes that one more worker takes: its own pages, and the batches that wait in it."""
        return self.worker_private_bytes + self.waiting_bytes / max(1, self.workers)

    @property
    def others_bytes(self) -> float:
        """What other programs hold of a machine's memory, or of a group's where they are seen."""
        if self.limited_by == "cgroup":
            return self.group_others_bytes
        ours = self.trainer_bytes + self.workers * self.worker_bytes + self.files_bytes
        return max(0.0, self.used_bytes - ours)

    @property
    def most_workers(self) -> int | None:
        """Loader workers that the host has memory for. None: not known."""
        if not self.workers:
            return None
        room = NEAR_LIMIT * self.limit_bytes - self.used_bytes
        return self.workers + int(max(0.0, room) // max(1.0, self.taken_by_worker))


class Profile(Record, frozen=True, kw_only=True):
    """Measured parts of a global step of the workload.

    Attributes:
        schema: Version of the file format.
        workload_sha256: Digest of command, strategy and engine.
        workload_keys: Keys that affect the measurement; workloads with other values are refused.
        host: The hosts that were measured.
        data: Data hosts that made batches for this step, which is then the whole cluster's.
        step: Parts of the step. None: only `observed` is known, and no plan can be priced.
        observed: Utilization of the hosts.
        spread: Spread of the fields of `step`, by name.
        check: Whether the parts add up to the step. None: parts are missing.
        states: States that limit the training, most important first.
        fixes: Changes that help without another host.
        loader_rates: Throughput of the loader alone by number of workers; upper bounds for plans.
        transforms: Parts of loading a sample, most expensive first.
        gpu_decoding: JPEGs of the dataset, decoded on the accelerator. None: not tried.
        loader: The loader that made the batches.
        epochs: Time beyond the usual steps of whole epochs. None: not known.
        memory: Memory of trainers and workers. None: not known.
        unmeasured: Parts that cannot be measured without torch's DataLoader.
        origin: When it was measured, and with what. None: an early version wrote it.
        what: Facts about the profiled run, such as ranks and versions; not stable.
    """

    schema: Literal["stoker.profile/v1"] = "stoker.profile/v1"
    workload_sha256: str | None = None
    workload_keys: dict[str, str] | None = None
    host: ProfiledHost
    data: tuple[ProfiledData, ...] = ()
    step: StepTerms | None = None
    observed: Observed | None = None
    spread: dict[str, Spread] | None = None
    check: Check | None = None
    states: tuple[ProfileState, ...] = ()
    fixes: tuple[Fix, ...] = ()
    loader_rates: tuple[LoaderRate, ...] = ()
    transforms: tuple[TransformCost, ...] = ()
    gpu_decoding: GpuDecoding | None = None
    loader: ProfiledLoader | None = None
    epochs: EpochTimes | None = None
    memory: ProfiledMemory | None = None
    unmeasured: Names = ()
    origin: ProfileOrigin | None = None
    what: dict[str, Value] = {}

    def __post_init__(self) -> None:
        if self.step is None and (self.observed is None or not self.observed.is_known):
            raise ValueError("a profile needs `step` or `observed`")

    @property
    def timed_step(self) -> StepTerms:
        """The step.

        Raises:
            UsageError: If the profile has none.
        """
        if self.step is None:
            raise UsageError(
                "the profile has no step, only the hosts' utilization",
                where="profile, key step",
                fix="profile the training: stoker profile",
            )
        return self.step

    @property
    def memory_fixes(self) -> tuple[Fix, ...]:
        """The fixes that are about memory, the largest first."""
        return tuple(fix for fix in self.fixes if fix.id in _OF_MEMORY)

    @property
    def command(self) -> list[str]:
        """Words of the profiled command; empty: not known."""
        command = self.what.get("command")
        if isinstance(command, list):
            return [str(word) for word in command]
        if isinstance(command, str):
            return shlex.split(command)
        return []
