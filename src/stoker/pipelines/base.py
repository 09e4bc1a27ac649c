"""Parts that both services share: what is compiled and uploaded, runs, schedules, the client.

The checks of a workload are in `checked`: what *decide*, *train* or the service would refuse in a
run is refused before its profile is paid.
"""

import contextlib
import hashlib
import importlib
import json
import math
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import ModuleType

import msgspec

from stoker.catalog import catalog_of, with_pools
from stoker.decide import refuse_undecidable
from stoker.environment import poll_seconds
from stoker.errors import (
    MissingExtraError,
    PlatformError,
    ServiceError,
    UsageError,
    install_command,
)
from stoker.host.installed import CARRIED
from stoker.parameters import Kind, Parameter, Value, run_values
from stoker.platforms import platform_named
from stoker.platforms.aws import Aws
from stoker.platforms.base import JobSpec
from stoker.platforms.kubernetes.api import ClusterApi
from stoker.platforms.kubernetes.state import keep_profile, kept_profile
from stoker.platforms.packing import check_files, package_of
from stoker.platforms.sagemaker.request import sagemaker_of
from stoker.records import (
    Group,
    Json,
    KubeflowSettings,
    PlatformName,
    Profile,
    Workload,
    read_json,
    to_document,
    to_json,
)
from stoker.records.base import sha256_of
from stoker.records.hyperparameters import values_of
from stoker.records.workload import is_same_cost
from stoker.repeat import Clock, Sleep

# Between two looks at a run.
WAIT_SECONDS = 10.0
# A service or network that is away for longer ends the waiting, never the run.
PATIENCE_SECONDS = 900.0
# The services' names for the types of parameters.
_KINDS: Mapping[str, Kind] = {
    **dict.fromkeys(("Integer", "NUMBER_INTEGER"), "integer"),
    **dict.fromkeys(("Float", "NUMBER_DOUBLE"), "number"),
    **dict.fromkeys(("Boolean", "BOOLEAN"), "boolean"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStep:
    """A step of a run; status and reason are the service's.

    Attributes:
        seconds: How long it took; None if it has not ended.
    """

    name: str
    status: str
    reason: str = ""
    seconds: float | None = None

    def __str__(self) -> str:
        seconds = "" if self.seconds is None else f"{self.seconds:.0f} s"
        return f"{self.name:<24} {self.status:<10} {seconds:>8}  {self.reason}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """A run of a pipeline, or a job; status and reason are the service's.

    Attributes:
        run: What `stoker status` and `stoker stop` take.
        exit_code: 0, 3 if a gate failed, 6 if the training did, 4 for any other end; None before.
        url: Its page; empty if unknown.
    """

    run: str
    status: str
    has_ended: bool
    exit_code: int | None
    url: str = ""
    reason: str = ""
    steps: tuple[RunStep, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A schedule of a pipeline, said whole each time.

    Attributes:
        expression: The times, which the service checks.
        parameters: NAME=VALUE texts.
        action: created or replaced; empty: not made yet.
        enabled: Whether it starts runs; one that somebody disabled stays so.
    """

    name: str
    expression: str
    time_zone: str = "UTC"
    parameters: Sequence[str] = ()
    action: str = ""
    enabled: bool = True

    def __str__(self) -> str:
        line = f"schedule {self.name}: {self.action}  {self.expression}  {self.time_zone}"
        return line if self.enabled else f"{line}  disabled, as before"

    def made(self, earlier: object, *, is_on: bool) -> "Schedule":
        """Returns the schedule as the service has it, in place of an earlier one if any."""
        action = "replaced" if earlier else "created"
        return replace(self, action=action, enabled=is_on)


def schedule_name(workload: Workload) -> str:
    """Returns the name of a workload's schedule: all pipelines' are in one list."""
    return f"stoker-{workload.name}"


def schedule_of_workload(workload: Workload, *, target: str) -> Schedule | None:
    """Returns the workload's own schedule for a service; None: it has none."""
    section = workload.sagemaker if target == "sagemaker" else workload.kubernetes_settings.kubeflow
    settings = section.schedule if section else None
    if settings is None:
        return None
    return Schedule(
        name=schedule_name(workload),
        expression=settings.cron,
        time_zone=settings.time_zone,
        parameters=[f"{name}={spelt(value)}" for name, value in settings.parameters.items()],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A compiled pipeline.

    Attributes:
        definition: JSON or YAML.
        uploads: Address to content of what the steps read.
    """

    name: str
    definition: str
    parameters: tuple[Parameter, ...]
    uploads: Mapping[str, bytes] = field(default_factory=dict)


def about(name: str) -> str:
    """Returns what a service's console shows of a pipeline."""
    return f"stoker: profile, decide, train, evaluate {name}."


def typed_values(
    texts: Sequence[str], *, workload: Workload, types: Mapping[str, str]
) -> dict[str, Value]:
    """Returns the values of NAME=VALUE texts; `types` are those of the uploaded pipeline."""
    declared = {name: _KINDS.get(kind, "string") for name, kind in types.items()}
    return run_values(texts, workload=workload, declared=declared)


def spelt(value: Json) -> str:
    """Returns a parameter's value as a text: true, not True."""
    return value if isinstance(value, str) else json.dumps(value)


class PipelineClient(ABC):
    """The verbs of pipelines on a service.

    Attributes:
        stop_seconds: How long `stop` waits for a run's end.
    """

    target: str
    stop_seconds: float
    clock: Clock = staticmethod(time.monotonic)
    sleep: Sleep = staticmethod(time.sleep)

    @abstractmethod
    def compared(self, compiled: Compiled) -> tuple[Json, Json]:
        """Returns the uploaded pipeline, None if there is none, and the compiled one."""

    @abstractmethod
    def upload(self, compiled: Compiled, *, is_changed: bool) -> dict[str, Json]:
        """Creates or updates the pipeline, and writes what its steps read."""

    @abstractmethod
    def start(self, workload: Workload, parameters: Sequence[str]) -> RunState:
        """Starts a run of the uploaded pipeline with NAME=VALUE texts."""

    @abstractmethod
    def status(self, run: str) -> RunState:
        """Returns a run by what the service calls it, or the newest of a pipeline."""

    @abstractmethod
    def stop(self, run: str) -> RunState:
        """Stops a run and its jobs; waits until they have ended, for `stop_seconds`."""

    @abstractmethod
    def put_schedule(self, workload: Workload, wanted: Schedule) -> Schedule:
        """Makes a schedule, or replaces the one of its name; returns it as it is then."""

    @abstractmethod
    def delete_schedule(self, workload: Workload, name: str) -> None:
        """Deletes a schedule of the pipeline; raises UsageError if there is none of the name."""

    def wait(self, run: str, *, show: Callable[[str], None]) -> RunState:
        """Waits until a run has ended; shows each step that changes.

        Raises:
            PlatformError: If the service refuses, or does not answer for `PATIENCE_SECONDS`.
        """
        return self._await_end(lambda: self.status(run), show=show)

    def _await_end(
        self,
        look: Callable[[], RunState],
        *,
        show: Callable[[str], None] = lambda line: None,
        seconds: float = math.inf,
    ) -> RunState:
        """Waits until a run has ended, for `seconds` at most."""
        began = heard = self.clock()
        shown = set[tuple[str, str]]()
        while True:
            try:
                state = look()
                heard = self.clock()
            except ServiceError as err:
                # Missing: a run that was just started may not be shown yet.
                passes = err.kind in ("away", "stale", "missing")
                if not passes or self.clock() - heard > PATIENCE_SECONDS:
                    raise
            else:
                for step in state.steps:
                    if step.status != "PENDING" and (step.name, step.status) not in shown:
                        shown.add((step.name, step.status))
                        show(str(step))
                if state.has_ended:
                    return state
                if heard - began >= seconds:
                    raise PlatformError(
                        f"{state.run} is {state.status} after {seconds:.0f} s {state.note}",
                        fix=f"it was asked to stop; see stoker status {self.target} {state.run}",
                    )
            self.sleep(poll_seconds(WAIT_SECONDS))

    def _not_uploaded(self, name: str) -> UsageError:
        what = f"pipeline {name} is not uploaded"
        return UsageError(what, fix=f"stoker upload {self.target} WORKLOAD")


def checked(workload: Workload, *, target: str) -> Workload:
    """Returns the workload as a pipeline's steps run it, on the target's platform.

    Raises:
        UsageError: For what *decide* and *train* would refuse in a run after its profile was paid,
            and for a job of today's cluster that the service would refuse.
    """
    where = f"workload {workload.name}, key"
    if workload.tracking.is_local:
        raise UsageError(
            "the steps of a pipeline do not share a folder of this machine",
            where=f"{where} tracking.mlflow",
            fix="the address of a tracking server",
        )
    if not workload.image or not workload.cluster:
        key = "cluster" if workload.image else "image"
        what = f"the pipeline needs the workload's {key}"
        raise UsageError(what, where=f"{where} {key}", fix=f"add {key} to the workload")
    # Whatever platform the file names: the pipeline's steps run on this one.
    platform: PlatformName = "kubernetes" if target == "kubeflow" else "sagemaker"
    placed = msgspec.structs.replace(workload, platform=platform)
    refuse_undecidable(placed, catalog_of(placed))
    # Which groups get a channel is known once a plan has them.
    channels = {
        name: msgspec.structs.replace(channel, groups=None)
        for name, channel in placed.channels.items()
    }
    todays = msgspec.structs.replace(with_pools(placed), channels=channels)
    job = JobSpec.of(
        todays,
        groups=[Group.of_today(workload.cluster.dnn)],
        run_dir=Path("runs"),
        name=workload.name,
    )
    platform_named(platform, settings=placed).plan(job)
    return placed


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The files that an upload puts where the steps read them.

    Attributes:
        workload: The workload with the code's address in place of its folder.
        workload_uri: Address of its file.
        uploads: Address to content. Each address has a digest of its content.
    """

    workload: Workload
    workload_uri: str
    uploads: Mapping[str, bytes]


def pack_inputs(workload: Workload, *, folder: Path | None = None) -> Inputs:
    """Packs the workload and its code, so that an upload never changes what a run reads.

    A relative `sagemaker.source` is in `folder`, by default the current one.
    """
    settings = sagemaker_of(workload)
    uploads: dict[str, bytes] = {}

    def kept(content: bytes, name: str) -> str:
        digest = hashlib.sha256(content).hexdigest()[:16]
        uri = f"{settings.output_uri.rstrip('/')}/stoker/inputs/{digest}/{name}"
        uploads[uri] = content
        return uri

    if settings.source is not None and not settings.source.startswith("s3://"):
        package = package_of((folder or Path.cwd()) / settings.source)
        check_files(package, command=workload.command, settings=settings)
        code = kept(package.content, "code.tar.gz")
        placed = msgspec.structs.replace(settings, source=code)
        workload = msgspec.structs.replace(workload, sagemaker=placed)
    uri = kept(to_json(workload).encode(), "workload.json")
    return Inputs(workload=workload, workload_uri=uri, uploads=uploads)


def project_pipeline(target: str, *, folder: Path, carried: Sequence[Path] = CARRIED) -> ModuleType:
    """Imports pipelines/TARGET.py of the project folder, or of the installation if it has none.

    Raises:
        UsageError: If there is no such file, it is not Python, or a library is not installed.
    """
    path = f"pipelines/{target}.py"
    root = next((root for root in (folder, *carried) if (root / path).is_file()), None)
    if root is None:
        raise UsageError(
            f"{path} not found",
            where=f"folder {folder}",
            fix="install stoker from its wheel, or run it in its checkout",
        )
    # Another folder's, of an earlier call.
    for name in [name for name in sys.modules if name.partition(".")[0] == "pipelines"]:
        del sys.modules[name]
    # Finders cache folders, and files may have been written a moment ago.
    importlib.invalidate_caches()
    sys.path.insert(0, str(root.resolve()))
    try:
        return importlib.import_module(f"pipelines.{target}")
    except MissingExtraError:
        raise
    except ImportError as err:
        raise UsageError(
            f"the pipeline cannot be imported: {err}",
            where=f"{root / path} and what it imports",
            fix=f"correct the import, or add the file (docs/{target}.md has an example); for the "
            f"library: {install_command(target)}",
        ) from err
    finally:
        sys.path.remove(str(root.resolve()))


def profile_key(workload: Workload) -> str:
    """Returns the digest by which a profile is found again: 16 hexadecimal digits."""
    same = workload.profile.same_cost
    settings = workload.sagemaker
    values = values_of(workload.hyperparameters).items()
    return sha256_of(
        {
            "command": list(workload.command),
            "image": workload.image,
            # The address of the uploaded code has a digest of its content.
            "code": settings.source if settings else None,
            "channels": {name: to_document(each) for name, each in workload.channels.items()},
            "hyperparameters": {
                name: value for name, value in values if not is_same_cost(name, same)
            },
            "instance_type": workload.todays_type,
            "instance_count": workload.num_todays_hosts,
        }
    )[:16]


@dataclass(frozen=True, kw_only=True)
class KeptProfiles:
    """The place of a profile that a workload's earlier runs may have kept.

    A run uses it whose command, image, code, data addresses, hyperparameters and today's cluster
    are the same; hyperparameters that leave a step's cost as it is (`profile.same_cost`) do not
    count.

    Attributes:
        days: The longest age of one that is used.
        read: Returns the kept text; empty without one.
    """

    days: int
    read: Callable[[], str]
    write: Callable[[str], None]

    def find(self, *, now: datetime | None = None) -> Profile | None:
        """Returns the kept profile; None without one that is young enough and can be read."""
        with contextlib.suppress(ServiceError, UsageError):
            text = self.read()
            profile = read_json(text, Profile) if text else None
            oldest = (now or datetime.now(UTC)) - timedelta(days=self.days)
            then = profile.measured_at if profile else None
            if then and datetime.fromisoformat(then) >= oldest:
                return profile
        return None

    def keep(self, profile: Profile) -> None:
        """Keeps a profile; a run does not fail because it cannot."""
        with contextlib.suppress(ServiceError):
            self.write(to_json(profile))


def kept_profiles(workload: Workload, *, cluster: ClusterApi | None = None) -> KeptProfiles | None:
    """Returns where runs keep profiles; None: `cache_days` is 0, or it has no place for them.

    On SageMaker it is the object OUTPUT_URI/stoker/profiles/NAME/KEY.json, on Kubernetes an entry
    of the ConfigMap stoker-NAME-profile, which has the newest one.
    """
    name = workload.name
    key = profile_key(workload)
    if workload.platform == "kubernetes":
        kubernetes = workload.kubernetes_settings
        days = (kubernetes.kubeflow or KubeflowSettings()).cache_days
        api = cluster or ClusterApi(namespace=kubernetes.namespace)
        write = partial(keep_profile, api, name, key)
        found = KeptProfiles(days=days, read=partial(kept_profile, api, name, key), write=write)
    elif workload.platform == "sagemaker":
        settings = sagemaker_of(workload)
        aws = Aws(region=settings.region)
        uri = f"{settings.output_uri.rstrip('/')}/stoker/profiles/{name}/{key}.json"
        write = partial(aws.write_object, uri, kms_key=settings.output_kms_key)
        found = KeptProfiles(
            days=settings.cache_days, read=lambda: aws.read_object(uri).decode(), write=write
        )
    else:
        return None
    return found if found.days else None


def given_profile(workload: Workload, named: str) -> str:
    """Returns the profile.json that the parameter reuse_profile names, as text.

    On SageMaker it names a folder in S3, or the file; on Kubeflow it is the text itself.
    """
    if not named.startswith("s3://"):
        return named
    uri = named if named.endswith(".json") else f"{named.rstrip('/')}/profile.json"
    return Aws(region=workload.sagemaker_region).read_object(uri).decode()
