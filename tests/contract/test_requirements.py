"""What is installed: one version of each package, each of its files known by its hash."""

import contextlib
import json
import re
import runpy
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# `make lock` writes them; torch has no hash, for its builds (CPU, CUDA) have one version.
LOCKED = ("run", "dev", "image-control", "image-torch", "image-sbom")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
WANTED = {
    "run": (PROJECT["dependencies"], EXTRAS["torch"]),
    "dev": (
        PROJECT["dependencies"],
        *(EXTRAS[extra] for extra in EXTRAS if extra not in ("aws", "gpu")),
    ),
    "image-control": (PROJECT["dependencies"], EXTRAS["aws"], EXTRAS["kubernetes"]),
    "image-torch": (EXTRAS["torch"],),
    "image-sbom": (["cyclonedx-python-lib"],),
}


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned(text: str) -> dict[str, str]:
    """Returns the version of each package."""
    found = re.findall(r"(?m)^([A-Za-z0-9][\w.-]*)==([^\s;\\]+)", text)
    return {normalised(name): version for name, version in found}


def locked(name: str) -> str:
    return (ROOT / "requirements" / f"{name}.txt").read_text()


@pytest.mark.parametrize("name", LOCKED)
def test_locked_versions_are_those_of_the_constraints(name: str) -> None:
    constraints = pinned((ROOT / "constraints.txt").read_text())
    differing = {
        package: version
        for package, version in pinned(locked(name)).items()
        if constraints.get(package, version) != version
    }
    assert not differing


@pytest.mark.parametrize("name", LOCKED)
def test_each_locked_package_has_a_hash(name: str) -> None:
    entries = re.split(r"(?m)^(?=[A-Za-z0-9])", locked(name))[1:]
    assert entries
    assert [e.split()[0] for e in entries if "--hash=sha256:" not in e] == []


@pytest.mark.parametrize("name", LOCKED)
def test_all_that_the_project_asks_for_is_locked(name: str) -> None:
    asked = {
        normalised(re.match(r"[\w.-]+", requirement)[0])  # type: ignore[index]
        for part in WANTED[name]
        for requirement in part
    }
    assert asked - {"torch"} <= pinned(locked(name)).keys()


def test_the_set_up_and_the_image_take_nothing_without_its_hash_but_torch() -> None:
    make = (ROOT / "Makefile").read_text()
    installed = re.findall(r"(?m)^\t@\$\(PIP\) (.*)$", make)
    free = [line for line in installed if "--require-hashes" not in line]
    assert free == ["-c constraints.txt $(TORCH)", "--no-deps --no-build-isolation -e ."]
    wheels = (ROOT / "containers" / "build" / "wheels.py").read_text()
    assert '"--require-hashes", "--no-deps", "-r", str(lock)' in wheels


@pytest.mark.parametrize(
    ("needs", "is_refused"),
    # As torch's wheels for Linux say on PyPI, and on PyTorch's index of CPU builds.
    [
        (['cuda-toolkit[cudart]==13.0.3; platform_system == "Linux"', "sympy>=1.13.3"], True),
        (["sympy>=1.13.3", 'nvidia-cutlass-dsl; extra == "cutlass"'], False),
    ],
)
def test_an_image_for_data_hosts_takes_no_torch_with_cuda(
    needs: list[str], is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = runpy.run_path(str(ROOT / "containers" / "build" / "wheels.py"))
    torch = {"metadata": {"version": "2.13.0", "requires_dist": needs}}
    check = wheels["check_cpu_build"]
    monkeypatch.setitem(check.__globals__, "pip", lambda *_: json.dumps({"install": [torch]}))
    with pytest.raises(SystemExit) if is_refused else contextlib.nullcontext():
        check([])
