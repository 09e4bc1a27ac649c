"""One version of each package is installed, and each of its files is known by its hash."""

import contextlib
import json
import re
import runpy
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# `make lock` writes these files; torch has no hash, for its builds (CPU, CUDA) have one version.
OF_DEV = [EXTRAS[extra] for extra in EXTRAS if extra not in ("aws", "gpu")]
WANTED = {
    "run": (PROJECT["dependencies"], EXTRAS["torch"]),
    "dev": (PROJECT["dependencies"], *OF_DEV),
    "docs": (["mkdocs-material"],),
    "image-control": (PROJECT["dependencies"], EXTRAS["aws"], EXTRAS["kubernetes"]),
    "image-torch": (EXTRAS["torch"],),
    "image-sbom": (["cyclonedx-python-lib"],),
}


def normalised(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned(text):
    found = re.findall(r"(?m)^([A-Za-z0-9][\w.-]*)==([^\s;\\]+)", text)
    return {normalised(name): version for name, version in found}


@pytest.mark.parametrize("name", WANTED)
def test_all_that_the_project_asks_for_is_locked_with_one_version_and_a_hash(name):
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    found = pinned(text)
    asked = {
        normalised(re.match(r"[\w.-]+", requirement)[0])  # type: ignore[index]
        for part in WANTED[name]
        for requirement in part
    }
    assert asked - {"torch"} <= found.keys()
    constraints = pinned((ROOT / "constraints.txt").read_text())
    assert [p for p, version in found.items() if constraints.get(p, version) != version] == []
    # It ends a training with Lightning where no MPI library is.
    assert "mpi4py" not in asked | found.keys() | constraints.keys()
    entries = re.split(r"(?m)^(?=[A-Za-z0-9])", text)[1:]
    assert [e.split()[0] for e in entries if "--hash=sha256:" not in e] == []


def test_the_set_up_and_the_image_take_nothing_without_its_hash_but_torch():
    make = (ROOT / "Makefile").read_text()
    installed = re.findall(r"(?m)^\t@? *\$\(PIP\) (.*)$", make)
    free = [line for line in installed if "--require-hashes" not in line]
    assert [line.partition("$(TORCH)")[0] for line in free] == [
        "--no-deps --retries 1 --timeout 15 --index-url $(CPU_TORCH) ",
        "-c constraints.txt ",
        "--no-deps --no-build-isolation -e .",
    ]
    wheels = (ROOT / "containers" / "build" / "wheels.py").read_text()
    assert '"--require-hashes", "--no-deps", "-r", str(lock)' in wheels


def with_pip(monkeypatch, name, pip):
    found = runpy.run_path(str(ROOT / "containers" / "build" / "wheels.py"))[name]
    monkeypatch.setitem(found.__globals__, "pip", pip)
    return found


def cpu_build(monkeypatch, needs, *, machine, version):
    torch = {"metadata": {"version": version, "requires_dist": needs}}
    find = with_pip(monkeypatch, "cpu_build", lambda *_: json.dumps({"install": [torch]}))
    words: list[str] = find(version, [], machine=machine, python_version="3.11")
    return words


# As torch's wheels for Linux say on PyPI, of 2.13 and of 2.10, and on the index of CPU builds.
ON_BOTH = 'cuda-toolkit[cudart]==13.0.3; platform_system == "Linux"'
ON_X86 = 'nvidia-nccl-cu12==2.27.5; platform_system == "Linux" and platform_machine == "x86_64"'


@pytest.mark.parametrize(
    ("need", "machine", "is_refused"),
    [
        (ON_BOTH, "x86_64", True),
        (ON_BOTH, "aarch64", True),
        (ON_X86, "x86_64", True),
        (ON_X86, "aarch64", False),
        ('nvidia-cutlass-dsl; extra == "cutlass"', "x86_64", False),
    ],
)
def test_an_image_for_data_hosts_takes_no_torch_with_cuda(need, machine, is_refused, monkeypatch):
    with pytest.raises(SystemExit) if is_refused else contextlib.nullcontext():
        needs = ["sympy>=1.13.3", need]
        words = cpu_build(monkeypatch, needs, machine=machine, version="2.13.0")
        assert words == ["--no-deps", "torch==2.13.0"]


def test_another_torch_brings_what_it_needs_in_other_versions_than_the_locked(monkeypatch):
    # As torch 2.6 has its sympy, on PyPI.
    needs = ["filelock", 'sympy==1.13.1; python_version >= "3.9"', "typing_extensions>=4.10.0"]
    words = cpu_build(monkeypatch, needs, machine="aarch64", version="2.6.0")
    assert words == ["--no-deps", "torch==2.6.0", "sympy==1.13.1"]


def test_an_image_for_data_hosts_takes_no_torch_that_stoker_does_not(monkeypatch):
    with pytest.raises(SystemExit, match=r"TORCH_VERSION=2\.3\.1: stoker needs torch>=2\.4"):
        cpu_build(monkeypatch, [], machine="x86_64", version="2.3.1")


def asked_of_pip(monkeypatch, tmp_path, *words):
    calls: list[tuple[str, ...]] = []
    main = with_pip(monkeypatch, "main", lambda *words: calls.append(words) or "")
    monkeypatch.setattr("sys.argv", ["wheels.py", "--out", str(tmp_path), *words])
    main()
    return calls


OTHER_VERSION = ["--base-torch=2.12.0", "--torch=cpu", "--torch-version=2.10.0"]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--base-torch=2.3.0+cu121"], r"torch 2\.3\.0\+cu121: stoker needs torch>="),
        # No distribution of that name is installed: pip would not see it.
        (["--base-torch=of unknown version"], "torch of unknown version: stoker needs torch>="),
        (OTHER_VERSION, r"torch 2\.12\.0 and keeps it: TORCH_VERSION=2\.10\.0 would not"),
        (["--base-torch=2.12.0+cu128"], None),
        (["--base-torch=2.3.0", "--torch=none"], None),
    ],
)
def test_a_base_of_another_torch_is_refused_before_a_download(words, error, monkeypatch, tmp_path):
    if error is None:
        assert asked_of_pip(monkeypatch, tmp_path, *words)[-1][0] == "wheel"
        return
    refusal = rf"^error: BASE_IMAGE has {error}.*\ntry:   .*without torch$"
    with pytest.raises(SystemExit, match=refusal):
        asked_of_pip(monkeypatch, tmp_path, *words)
    assert list(tmp_path.iterdir()) == []


def test_wheels_of_a_download_that_broke_off_are_not_taken_for_whole(monkeypatch, tmp_path):
    calls: list[tuple[str, ...]] = []
    folder = tmp_path / "torch"

    def pip(*words):
        calls.append(words)
        if "torch==2.12.0" in words:
            raise SystemExit("no such version")
        return ""

    download = with_pip(monkeypatch, "download", pip)

    def wheels(version):
        calls.clear()
        download(folder, ["torch"], [], locked="image-torch", also=[f"torch=={version}"])
        return len(calls)

    assert (wheels("2.13.0"), wheels("2.13.0")) == (2, 0)
    with pytest.raises(SystemExit):
        wheels("2.12.0")
    assert wheels("2.13.0") == 2
    assert (folder / "SHA256SUMS").exists()
    # As after `rm -rf` of the folder alone.
    (folder / "SHA256SUMS").unlink()
    assert wheels("2.13.0") == 2
