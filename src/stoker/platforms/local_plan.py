"""A job as this machine runs it: a pure value, and the files of its hosts."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from stoker.errors import UsageError
from stoker.platforms.base import JobSpec, groups_of_channel, hyperparameters
from stoker.records import Json, Role

# Where the steps of a pipeline on Kubernetes mount the claims that channels name.
CLAIMS_FOLDER = "/mnt/pvc"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalHost:
    """One host of a run.

    Attributes:
        cores: That it is pinned to; empty where it is not.
        num_cores: Of its instance type.
    """

    name: str
    group: str
    role: Role
    instance_type: str
    cores: tuple[int, ...]
    num_cores: int
    processes: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRequest:
    """A job as this machine runs it.

    Attributes:
        hosts: The dnn group first; the first one leads.
        not_comparable: Why its times cannot be compared with other runs'; empty where they can.
    """

    job: JobSpec
    hosts: tuple[LocalHost, ...]
    not_comparable: str

    @property
    def leader(self) -> LocalHost:
        """The host that leads."""
        return self.hosts[0]

    def base_dir(self, host: LocalHost) -> Path:
        """The directory that stands for /opt/ml on `host`."""
        return (self.job.run_dir / "hosts" / host.name).absolute()

    def log_file(self, host: LocalHost) -> Path:
        """Where the output of `host` goes."""
        return (self.job.run_dir / "logs" / f"{host.group}-{host.name}.log").absolute()


def channel_folder(name: str, uri: str) -> Path:
    """The folder that a channel of a local job names; of a claim, where it is mounted.

    Raises:
        UsageError: If it is not there.
    """
    if uri.startswith("pvc://"):
        uri = f"{CLAIMS_FOLDER}/{uri.removeprefix('pvc://')}"
    folder = Path(uri.removeprefix("file://")).absolute()
    if not folder.is_dir():
        raise UsageError(
            f"no such folder: {folder}", where=f"channel {name}", fix="check the channel's uri"
        )
    return folder


def make_job_folder(request: LocalRequest, host: LocalHost) -> None:
    """Makes the directory of `host` in SageMaker's layout; what an earlier run left is deleted.

    Raises:
        UsageError: If a channel's folder is not there.
    """
    job = request.job
    base = request.base_dir(host)
    shutil.rmtree(base, ignore_errors=True)
    for folder in ("input/config", "input/data", "model", "output/data", "checkpoints", "code"):
        (base / folder).mkdir(parents=True)
    channels: dict[str, Json] = {}
    for name, channel in sorted(job.channels.items()):
        if host.group not in (groups_of_channel(name, channel, job.groups) or (host.group,)):
            continue
        (base / "input" / "data" / name).symlink_to(channel_folder(name, channel.uri))
        channels[name] = {
            "TrainingInputMode": "File",
            "S3DistributionType": "FullyReplicated",
            "RecordWrapperType": "None",
        }
    _write(base, "inputdataconfig", channels)
    _write(base, "hyperparameters", {**hyperparameters(job.hyperparameters)})
    _write(base, "resourceconfig", resource_config(request, host))


def resource_config(request: LocalRequest, host: LocalHost) -> dict[str, Json]:
    """What SageMaker would tell `host` of the run."""
    return {
        "current_host": host.name,
        "current_instance_type": host.instance_type,
        "current_group_name": host.group,
        "hosts": [other.name for other in request.hosts],
        "instance_groups": [
            {
                "instance_group_name": group.name,
                "instance_type": group.instance_type,
                "hosts": [other.name for other in request.hosts if other.group == group.name],
            }
            for group in request.job.groups
        ],
        "network_interface_name": "lo",
    }


def _write(base: Path, name: str, document: dict[str, Json]) -> None:
    path = base / "input" / "config" / f"{name}.json"
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
