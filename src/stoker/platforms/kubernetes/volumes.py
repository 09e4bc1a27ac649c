"""Volumes of a run's pods: the job folder, shared memory, channels, token and configuration."""

import posixpath
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stoker.errors import UsageError
from stoker.platforms.base import groups_of_channel
from stoker.platforms.kubernetes.groups import Layout, PodGroup
from stoker.platforms.kubernetes.names import config_map, token_secret
from stoker.platforms.kubernetes.reading import mapping
from stoker.records import Channel, Json, PodVolume
from stoker.records.cloud import written

JOB_FOLDER = "/opt/ml"
TOKEN_FOLDER = "/var/run/secrets/stoker"
TOKEN_KEY = "token"
HYPERPARAMETERS_KEY = "hyperparameters.json"
# The folders of the job folder that are written to.
_WRITTEN = ("model", "checkpoints", "output")
# Read by the owner; Kubernetes adds the pod's group to it.
_TOKEN_MODE = 0o400


@dataclass(frozen=True, slots=True, kw_only=True)
class Mounted:
    """A volume with its mounts."""

    volume: dict[str, Json]
    mounts: tuple[dict[str, Json], ...]


def volumes_of_group(layout: Layout, group: PodGroup) -> list[Mounted]:
    """Volumes that are the same for every run of the workload.

    Raises:
        UsageError: If a channel or volume is none that pods can mount.
    """
    settings = layout.settings
    shm: dict[str, Json] = {"medium": "Memory"}
    if settings.shm is not None:
        shm["sizeLimit"] = written(settings.shm)
    return _one_volume_a_claim(
        [
            _job_folder(layout, group),
            Mounted(
                volume={"name": "shm", "emptyDir": shm},
                mounts=({"name": "shm", "mountPath": "/dev/shm"},),
            ),
            *_channels(layout, group),
            *(_of_user(volume, group) for volume in group.settings.volumes),
        ]
    )


def volumes_of_run(layout: Layout, group: PodGroup) -> list[Mounted]:
    """Volumes of this run alone: its token, and what its launchers read."""
    items: list[Json] = [
        {"key": HYPERPARAMETERS_KEY, "path": "hyperparameters.json"},
        {"key": inputs_key(group), "path": "inputdataconfig.json"},
    ]
    return [
        Mounted(
            volume={
                "name": "token",
                "secret": {
                    "secretName": token_secret(layout.name),
                    "defaultMode": _TOKEN_MODE,
                    "items": [{"key": TOKEN_KEY, "path": TOKEN_KEY}],
                },
            },
            mounts=({"name": "token", "mountPath": TOKEN_FOLDER, "readOnly": True},),
        ),
        Mounted(
            volume={
                "name": "config",
                "configMap": {"name": config_map(layout.name), "items": items},
            },
            mounts=(
                {"name": "config", "mountPath": f"{JOB_FOLDER}/input/config", "readOnly": True},
            ),
        ),
    ]


def inputs_key(group: PodGroup) -> str:
    """Where in the ConfigMap the group's inputdataconfig.json is."""
    return f"inputdataconfig.{group.job}.json"


def channels_of(layout: Layout, group: PodGroup) -> dict[str, Channel]:
    """The channels that a group gets, by name.

    Raises:
        UsageError: If a channel names a group that is none of the job's.
    """
    found = {}
    for name, channel in sorted(layout.job.channels.items()):
        groups = groups_of_channel(name, channel, layout.job.groups)
        if not groups or group.group.name in groups:
            found[name] = channel
    return found


def claim_of(uri: str, *, where: str) -> tuple[str, str]:
    """Claim and folder of a pvc:// address; the folder is empty where it is the whole claim.

    Raises:
        UsageError: If it is none.
    """
    claim, _, path = uri.removeprefix("pvc://").partition("/")
    folder = posixpath.normpath(path).strip("/") if path.strip("/") else ""
    if not uri.startswith("pvc://") or not claim or ".." in folder.split("/"):
        raise UsageError(
            f"pods mount claims, not {uri}",
            where=where,
            fix="pvc://CLAIM/FOLDER: a bucket, too, is one with its CSI driver; what a script "
            "reads from S3 itself is a hyperparameter, its keys kubernetes.data.env_from_secrets",
        )
    return claim, folder


def _job_folder(layout: Layout, group: PodGroup) -> Mounted:
    """Model, checkpoints and output: on the node, or of the dnn group in the claim for outputs.

    Not the whole job folder: images bring code in it.
    """
    output = layout.settings.output
    if output and group.is_dnn:
        claim, folder = claim_of(output, where="key kubernetes.output")
        parent = posixpath.join(folder.replace("$", "$$"), "$(STOKER_RUN_ID)")
        # Every host has an output folder of its own; model and checkpoints are the run's.
        paths = {name: f"{parent}/{name}" for name in _WRITTEN}
        paths["output"] += "/$(JOB_COMPLETION_INDEX)"
        return Mounted(
            volume={"name": "job", "persistentVolumeClaim": {"claimName": claim}},
            mounts=tuple(
                {"name": "job", "mountPath": f"{JOB_FOLDER}/{name}", "subPathExpr": paths[name]}
                for name in _WRITTEN
            ),
        )
    scratch = layout.settings.scratch
    size: dict[str, Json] = {"sizeLimit": written(scratch)} if scratch is not None else {}
    return Mounted(
        volume={"name": "job", "emptyDir": size},
        mounts=tuple(
            {"name": "job", "mountPath": f"{JOB_FOLDER}/{name}", "subPath": name}
            for name in _WRITTEN
        ),
    )


def _channels(layout: Layout, group: PodGroup) -> Iterator[Mounted]:
    for index, (name, channel) in enumerate(channels_of(layout, group).items()):
        _check_channel(name, channel)
        claim, folder = claim_of(channel.uri, where=f"key channels.{name}.uri")
        volume = f"channel-{index}"
        mount: dict[str, Json] = {
            "name": volume,
            "mountPath": f"{JOB_FOLDER}/input/data/{name}",
            "readOnly": True,
        }
        if folder:
            mount["subPath"] = folder
        source: Json = {"claimName": claim, "readOnly": True}
        yield Mounted(volume={"name": volume, "persistentVolumeClaim": source}, mounts=(mount,))


def _one_volume_a_claim(mounted: Sequence[Mounted]) -> list[Mounted]:
    """The same mounts, of one volume for each claim: a kubelet takes two for one, and waits."""
    kept: dict[str, Mounted] = {}
    for one in mounted:
        source = one.volume.get("persistentVolumeClaim")
        name = str(one.volume["name"])
        key = f"claim {source['claimName']}" if isinstance(source, dict) else f"volume {name}"
        first = kept.get(key)
        if first is None:
            kept[key] = one
        elif isinstance(source, dict):
            volume = dict(first.volume)
            before = volume["persistentVolumeClaim"]
            if not source.get("readOnly") or not mapping(before).get("readOnly"):
                volume["persistentVolumeClaim"] = {"claimName": source["claimName"]}
            renamed = tuple({**mount, "name": volume["name"]} for mount in one.mounts)
            kept[key] = Mounted(volume=volume, mounts=(*first.mounts, *renamed))
        else:
            kept[f"{key} again"] = one  # which the rules refuse
    return list(kept.values())


def _check_channel(name: str, channel: Channel) -> None:
    if channel.data_type != "S3Prefix" or channel.distribution != "FullyReplicated":
        raise UsageError(
            "manifests and sharding by key are SageMaker's",
            where=f"key channels.{name}",
            fix="leave data_type and distribution out: every host sees the whole folder",
        )
    if channel.mode == "Pipe":
        raise UsageError(
            "there are no pipes on Kubernetes", where=f"key channels.{name}.mode", fix="use File"
        )


def _of_user(volume: PodVolume, group: PodGroup) -> Mounted:
    sources: dict[str, Json] = {}
    if volume.claim is not None:
        sources["persistentVolumeClaim"] = {
            "claimName": volume.claim,
            **({"readOnly": True} if volume.read_only else {}),
        }
    if volume.secret is not None:
        sources["secret"] = {"secretName": volume.secret}
    if volume.config_map is not None:
        sources["configMap"] = {"name": volume.config_map}
    if volume.scratch is not None:
        sources["emptyDir"] = {"sizeLimit": written(volume.scratch)}
    if len(sources) != 1:
        raise UsageError(
            f"volume {volume.name} has {len(sources)} sources, and needs exactly one",
            where=f"key kubernetes.{group.group.role}.volumes",
            fix="name one of claim, secret, config_map and scratch",
        )
    mount: dict[str, Json] = {"name": volume.name, "mountPath": volume.mount_path}
    if volume.read_only and volume.scratch is None:
        mount["readOnly"] = True
    if volume.sub_path:
        mount["subPath"] = volume.sub_path
    return Mounted(volume={"name": volume.name, **sources}, mounts=(mount,))
