"""Builds records as small as a test needs them; whole ones of a run are in `sample_records`."""

from io import StringIO
from pathlib import Path
from queue import SimpleQueue

from stoker.environment import from_environment
from stoker.launch.host_client import HostRun
from stoker.launch.topology import HostGroup, Topology
from stoker.logs import Log
from stoker.records import (
    Check,
    GpuLoad,
    Group,
    Json,
    Observed,
    Profile,
    ProfiledHost,
    StepTerms,
    Workload,
)
from stoker.workload_file import workload_from


def group(role, kind="local.c1", count=1, *, name="", **more) -> Group:
    return Group(name=name or role, role=role, instance_type=kind, count=count, **more)


def clusters(dnn: str, data: str = "", count: int = 1, **of_dnn: object) -> tuple[Group, ...]:
    """Makes a cluster of one dnn host, and so many data hosts where their type is named."""
    return (group("dnn", dnn, **of_dnn), *([group("data", data, count)] if data else []))


def workload(name: str = "mnist", *overrides: str, **sections: Json) -> Workload:
    command: Json = ["python", "train.py"]
    return workload_from({"name": name, "command": command, **sections}, overrides=overrides)


def profile(kind="local.c1", *, count=1, vcpus=None, is_explained=None, predicted=None, **values):
    """Makes a profile of today's hosts, with a check unless `is_explained` is None."""
    terms = _taken(values, StepTerms)
    seen = _taken(values, Observed)
    check = None
    if is_explained is not None:
        step = predicted if predicted is not None else terms["step_seconds"]
        check = Check(predicted_step_seconds=step, error=0.0, explained=is_explained)
    made: dict[str, object] = {
        "host": ProfiledHost(instance_type=kind, count=count, vcpus=vcpus),
        "step": StepTerms(**terms) if terms else None,
        "observed": Observed(**seen) if seen else None,
        "check": check,
    }
    return Profile(**made | values)


def _taken(values: dict[str, object], record: type) -> dict[str, object]:
    names = record.__struct_fields__
    return {name: values.pop(name) for name in names if name in values}


def topology(host, *, kinds=None, **groups) -> Topology:
    """Makes hosts of named groups, (role, hosts) each, as `host` sees them."""
    return Topology(
        host=host,
        groups=tuple(
            HostGroup(name=name, role=role, instance_type=(kinds or {}).get(name, ""), hosts=hosts)
            for name, (role, hosts) in groups.items()
        ),
    )


def host_run(folder, topology, environ, *, keys=None) -> HostRun:
    """Makes a host's part of a run, as its environment says."""
    return HostRun(
        settings=from_environment(environ),
        topology=topology,
        environ=environ,
        output=folder / "out",
        log=Log(run="r", host=topology.host, stream=StringIO()),
        inbox=SimpleQueue(),
        keys=keys,
        folder=Path("/code"),
    )


def starved(kind: str = "ml.g5.8xlarge", *, count: int = 1, **changes: object) -> Profile:
    """Makes a profile whose loading is two and a half times as long as the accelerator's step."""
    terms: dict[str, object] = {
        "step_seconds": 0.2,
        "accelerator_step_seconds": 0.08,
        "loader_cpu_seconds": 6.1,
        "trainer_cpu_seconds": 0.3,
        "num_workers": 32,
        "batch_bytes": 20e6,
        "global_batch_size": 256,
    }
    return profile(kind, count=count, is_explained=True, **(terms | changes))


def gpu_load(share: float | None = 0.28, **changes: object) -> GpuLoad:
    """Makes the load of a GPU that was busy for `share` of the time; None: it does not tell."""
    made: dict[str, object] = {
        "host": "algo-1",
        "index": 0,
        "model": "NVIDIA H100 80GB HBM3",
        "seconds": 60.0,
        "utilization": share,
    }
    return GpuLoad(**made | changes)
