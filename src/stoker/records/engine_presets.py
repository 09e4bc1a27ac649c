"""Engines that are known by name: settings that a workload need not spell out."""

from collections.abc import Mapping

from msgspec.structs import replace

from stoker.records.engine import EngineCommand, EngineName, EngineSettings, Ready

_TF_DATA = ("python", "-P", "-m", "stoker.launch.engines.tf_data_server")
_TF_DATA_WORKER = EngineCommand(
    command=(
        *(*_TF_DATA, "worker", "--dispatcher", "{leader:dispatcher}"),
        *("--address", "{address:worker}", "--cores", "{workers}"),
    ),
    ready=Ready(port="worker"),
    needs_workers=True,
)

_RAY_NODE = (
    *("--gcs", "{leader:gcs}", "--address", "{address}", "--cpus", "{workers}"),
    *("--ports", "{node_manager},{object_manager},{client}", "--joined", "{joined}"),
)
# Ray has no encryption by default, but a token it has.
_RAY_TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "{secret_file}"}


def _ray(role: str, *, followers_only: bool = False) -> EngineCommand:
    return EngineCommand(
        command=("python", "-P", "-m", "stoker.launch.engines.ray_node", role, *_RAY_NODE),
        ready=Ready(port="joined"),
        environment=_RAY_TOKEN,
        followers_only=followers_only,
    )


PRESETS: Mapping[EngineName, EngineSettings] = {
    "tf.data.service": EngineSettings(
        name="tf.data.service",
        leader=EngineCommand(
            command=(*_TF_DATA, "dispatcher", "--port", "{dispatcher}"),
            ready=Ready(port="dispatcher"),
        ),
        dnn=_TF_DATA_WORKER,
        data=_TF_DATA_WORKER,
        ports={"dispatcher": 5050, "worker": 5051},
        # What a training gives to tf.data.experimental.service.distribute.
        environment={"TF_DATA_SERVICE_ADDRESS": "grpc://{leader:dispatcher}"},
        # A training that had asked a worker waits for it for ever (measured with 2.21).
        needs_all=True,
    ),
    "ray": EngineSettings(
        name="ray",
        leader=_ray("head"),
        dnn=_ray("node", followers_only=True),
        data=_ray("node"),
        ports={
            "gcs": 6379,
            "node_manager": 6380,
            "object_manager": 6381,
            "client": 6382,
            "joined": 6383,
        },
        # `ray.init()` finds the cluster with it.
        environment={"RAY_ADDRESS": "{leader:gcs}", "RAY_USAGE_STATS_ENABLED": "0", **_RAY_TOKEN},
        # Tasks that no node can run any more wait for one for ever.
        needs_all=True,
    ),
}


def completed(settings: EngineSettings) -> EngineSettings:
    """The engine with what its preset says and the settings leave open."""
    preset = PRESETS.get(settings.name)
    if preset is None:
        return settings
    return replace(
        settings,
        leader=settings.leader or preset.leader,
        dnn=settings.dnn or preset.dnn,
        data=settings.data or preset.data,
        ports={**preset.ports, **settings.ports},
        environment={**preset.environment, **settings.environment},
        needs_all=preset.needs_all if settings.needs_all is None else settings.needs_all,
    )
