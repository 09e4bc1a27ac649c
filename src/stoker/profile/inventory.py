"""The inventory of a host: its accelerators, its CPU and its type, each asked for a short time."""

import contextlib
import functools
import http.client
import importlib
import subprocess
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

import msgspec
import torch

from stoker.environment import named_instance_type
from stoker.profile.rank_results import Inventory

METADATA_ADDRESS = "169.254.169.254:80"
METADATA_SECONDS = 1.0
_SMI_SECONDS = 5.0
_NVML_SECONDS = 3.0
_DMI = Path("/sys/class/dmi/id")
_CPU = Path("/proc/cpuinfo")
_RESOURCES = Path("/opt/ml/input/config/resourceconfig.json")
_PYNVML = functools.partial(importlib.import_module, "pynvml")
_MAX_NAME = 64


def take_inventory(*, given: str | None = None) -> Inventory:
    """Blocks for some seconds at most; a `given` type is the user's."""
    count, model = accelerators()
    name, source = instance_type(given=given)
    return Inventory(
        accelerators=count,
        accelerator_model=model,
        cpu_model=cpu_model(),
        instance_type=name,
        source=source,
    )


def instance_type(
    *,
    given: str | None = None,
    environ: Mapping[str, str] | None = None,
    resources: Path = _RESOURCES,
    dmi: Path = _DMI,
    metadata: str = METADATA_ADDRESS,
) -> tuple[str | None, str]:
    if given and given != "auto":
        return given, "given"
    if named := named_instance_type(environ):
        return named, "environment"
    if named := _sagemaker_type(resources):
        return named, "resourceconfig.json"
    # Elsewhere no service answers at this address, and each profile would wait for a second.
    if (given == "auto" or is_ec2(dmi)) and (named := metadata_type(metadata)):
        return named, "metadata"
    return None, ""


def is_ec2(dmi: Path = _DMI) -> bool:
    for name in ("sys_vendor", "board_vendor", "product_version", "bios_version"):
        with contextlib.suppress(OSError):
            if "amazon" in (dmi / name).read_text(errors="replace").lower():
                return True
    return False


def metadata_type(address: str = METADATA_ADDRESS, *, seconds: float = METADATA_SECONDS) -> str:
    """Returns the type by EC2's metadata service; empty: no answer, however slow, in `seconds`."""
    answers: list[str] = []
    fetch = functools.partial(_fetch, address, seconds=seconds)

    def ask() -> None:
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
            # Version 2 of the service: a token first. Hosts may refuse version 1.
            lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
            headers = {"X-aws-ec2-metadata-token": fetch("PUT", "/latest/api/token", lifetime)}
            answers.append(fetch("GET", "/latest/meta-data/instance-type", headers))

    # The connection's own timeout restarts with each packet.
    _in_time(ask, seconds)
    name = answers[0].strip() if answers else ""
    # A proxy may answer in place of the service, with a page.
    return name if name.replace(".", "").replace("-", "").isalnum() else ""


def accelerators(
    *,
    nvml: Callable[[], ModuleType] = _PYNVML,
    smi: str = "nvidia-smi",
) -> tuple[int | None, str | None]:
    """Returns the number of NVIDIA accelerators, and the first one's name; None: not known."""
    found = _by_nvml(nvml) or _by_smi(smi)
    if not found and torch.cuda.is_available():
        # Last: torch makes a CUDA context for this, which takes memory of the GPU.
        found = torch.cuda.device_count(), torch.cuda.get_device_name(0)
    return found or (None, None)


def cpu_model(file: Path = _CPU) -> str | None:
    with contextlib.suppress(OSError):
        for line in file.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return " ".join(value.split())[:200]
    return None


def _by_nvml(load: Callable[[], ModuleType]) -> tuple[int, str | None] | None:
    found: list[tuple[int, str | None]] = []

    def ask() -> None:
        # No pynvml, or any error of a driver: the next way is tried.
        with contextlib.suppress(Exception):
            nvml = load()
            nvml.nvmlInit()
            try:
                count = nvml.nvmlDeviceGetCount()
                name = nvml.nvmlDeviceGetName(nvml.nvmlDeviceGetHandleByIndex(0)) if count else None
            finally:
                nvml.nvmlShutdown()
            text = name.decode(errors="replace") if isinstance(name, bytes) else name
            found.append((int(count), text))

    _in_time(ask, _NVML_SECONDS)
    return found[0] if found else None


def _by_smi(program: str) -> tuple[int, str | None] | None:
    try:
        done = subprocess.run(
            [program, "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=_SMI_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    names = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return (len(names), names[0][:200]) if done.returncode == 0 and names else None


class _Resources(msgspec.Struct):
    current_instance_type: str = ""


def _sagemaker_type(file: Path) -> str:
    try:
        return msgspec.json.decode(file.read_bytes(), type=_Resources).current_instance_type
    except (OSError, msgspec.DecodeError):
        return ""


def _fetch(
    address: str, method: str, path: str, headers: Mapping[str, str], *, seconds: float
) -> str:
    connection = http.client.HTTPConnection(address, timeout=seconds)
    with contextlib.closing(connection):
        connection.request(method, path, headers=dict(headers))
        answer = connection.getresponse()
        text = answer.read(1024).decode("ascii")
    if answer.status != 200 or not 0 < len(text) <= (1024 if method == "PUT" else _MAX_NAME):
        raise ValueError(f"status {answer.status}")
    return text


def _in_time(ask: Callable[[], None], seconds: float) -> None:
    """Waits up to `seconds` for `ask`; then leaves it in a daemon thread."""
    thread = threading.Thread(target=ask, name="stoker-inventory", daemon=True)
    thread.start()
    thread.join(seconds)
