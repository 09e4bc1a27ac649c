from pathlib import Path

from stoker.profile.inventory import accelerators


class Driver:
    def nvmlInit(self) -> None:
        pass

    nvmlShutdown = nvmlInit

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> object:
        return index

    def nvmlDeviceGetName(self, handle: object) -> str | bytes:
        return b"NVIDIA A10G"


class Broken(Driver):
    def nvmlInit(self) -> None:
        raise RuntimeError("driver not loaded")


def program(tmp_path: Path, text: str) -> str:
    file = tmp_path / "nvidia-smi"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return str(file)


def test_accelerators_are_counted_by_nvml_else_by_nvidia_smi(tmp_path):
    assert accelerators(nvml=Driver, smi="/none") == (2, "NVIDIA A10G")
    smi = program(tmp_path, "echo 'NVIDIA L4'; echo 'NVIDIA L4'; echo 'NVIDIA L4'")
    assert accelerators(nvml=Broken, smi=smi) == (3, "NVIDIA L4")
    assert accelerators(nvml=lambda: None, smi=smi) == (3, "NVIDIA L4")


def test_without_a_driver_the_accelerators_are_not_known(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert accelerators(nvml=lambda: None, smi="/none") == (None, None)
    failing = program(tmp_path, "echo 'no devices were found'; exit 6")
    assert accelerators(nvml=lambda: None, smi=failing) == (None, None)
