"""Downloads the wheels of the image and builds stoker's own, so that `docker build` needs no index.

    python containers/build/wheels.py --out CONTEXT [--python-version 3.11] [--machine aarch64]
        [--torch cpu|none] [--torch-version 2.10.0] [--base-torch 2.10.0] [--lock FILE]

The build context gets four folders: control (what the command line and AWS need), torch and stoker,
one a layer of the image, and sbom, of which nothing stays. Each holds the wheels and SHA256SUMS,
which the build verifies; the sums of control and torch are in wheels.sha256. Versions are those of
constraints.txt. What is downloaded must have a hash of requirements/, except torch, whose builds
for CPUs and for CUDA have one version, NVIDIA's libraries that a CUDA build brings, and what
another version of torch needs in other versions than the locked ones: LOCK holds these fast.
"""

import argparse
import hashlib
import json
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name
from pip._vendor.packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / "constraints.txt"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Optional parts of the control layer.
CONTROL_EXTRAS = ("aws", "kubernetes")
GLIBC_MINORS = (28, 27, 26, 24, 17, 12, 5)


def main() -> None:
    """Fills the build context."""
    parser = argparse.ArgumentParser(description="Wheels for the image.")
    parser.add_argument("--out", type=Path, required=True, help="the build context")
    parser.add_argument("--python-version", default="", help="of the base image, as 3.11")
    parser.add_argument("--machine", default=platform.machine(), help="x86_64 or aarch64")
    parser.add_argument(
        "--torch", choices=("any", "cpu", "none"), default="any", help="which build of torch"
    )
    parser.add_argument("--torch-version", default="", help="with --torch cpu, as 2.10.0")
    parser.add_argument("--base-torch", default="", help="of the base image, which keeps it")
    parser.add_argument("--lock", type=Path, help="an earlier wheels.sha256 that must come out")
    options = parser.parse_args()
    if options.lock and not options.lock.is_file():
        sys.exit(f"error: no such file: {options.lock}\ntry:   without LOCK, which writes the sums")
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    version = options.python_version or running
    is_native = options.machine == platform.machine()
    target = [] if is_native and version == running else foreign(version, options.machine)

    extras = PROJECT["optional-dependencies"]
    control = ["pip", *PROJECT["dependencies"], *(one for e in CONTROL_EXTRAS for one in extras[e])]
    torch = ["-c", str(CONSTRAINTS), "torch"]
    if options.base_torch and options.torch != "none":
        refuse_base(options.base_torch, options.torch_version)
    if options.torch == "cpu":
        torch_version = options.torch_version or locked_versions(CONSTRAINTS)["torch"]
        torch = cpu_build(torch_version, target, machine=options.machine, python_version=version)
    # After what may be refused.
    download(options.out / "control", control, target, locked="image-control")
    if options.torch != "none":
        download(options.out / "torch", extras["torch"], target, locked="image-torch", also=torch)
    download(options.out / "sbom", [], target, locked="image-sbom")
    shutil.copy(Path(__file__).with_name("sbom.py"), options.out / "sbom")
    build(options.out / "stoker")
    record = options.out / "wheels.sha256"
    record.write_text(
        "".join(
            f"{line}\n"
            for folder in ("control", "torch")
            if folder == "control" or options.torch != "none"
            for line in (options.out / folder / "SHA256SUMS").read_text().splitlines()
        )
    )
    count = len(record.read_text().splitlines())
    print(f"wheels: {count} for Python {version} on {options.machine}, sums in {record}")
    if options.lock:
        verify(record, options.lock)


def foreign(version: str, machine: str) -> list[str]:
    """Returns pip's words for another Python or processor than those that run this."""
    tags = [f"manylinux_2_{minor}_{machine}" for minor in GLIBC_MINORS]
    words = ["--python-version", version, "--implementation", "cp"]
    for abi in (f"cp{version.replace('.', '')}", "abi3", "none"):
        words += ["--abi", abi]
    for tag in (*tags, f"manylinux2014_{machine}", f"linux_{machine}"):
        words += ["--platform", tag]
    return words


def lacking(torch: str) -> str:
    """Returns why stoker does not work with this version of torch, empty where it does."""
    least = next(need for need in PROJECT["optional-dependencies"]["torch"] if "torch" in need)
    # As pip decides in the image, which would put another torch in the place of the base's.
    try:
        fits = Requirement(least).specifier.contains(Version(torch), prereleases=True)
    except InvalidVersion:
        fits = False
    return "" if fits else f"stoker needs {least}"


def refuse_base(torch: str, torch_version: str) -> None:
    """Ends with an error where the base image's torch, which it keeps, is not what is wanted."""
    if lack := lacking(torch):
        sys.exit(
            f"error: BASE_IMAGE has torch {torch}: {lack}\n"
            "try:   a base image with it, or one without torch"
        )
    if torch_version:
        sys.exit(
            f"error: BASE_IMAGE has torch {torch} and keeps it: TORCH_VERSION={torch_version} "
            "would not be installed\n"
            "try:   the same without TORCH_VERSION, or a base image without torch"
        )


def cpu_build(version: str, target: list[str], *, machine: str, python_version: str) -> list[str]:
    """Returns pip's words for torch's CPU build, and for what it needs that is not locked.

    Where stoker does not work with that torch, or pip would take a CUDA build, it ends with an
    error, before gigabytes come.
    """
    if lack := lacking(version):
        sys.exit(
            f"error: TORCH_VERSION={version}: {lack}\n"
            "try:   the version of the dnn hosts' image, as 2.10.0"
        )
    asked = f"torch=={version}"
    words = ("--dry-run", "--ignore-installed", "--no-deps", "--only-binary=:all:", "--report=-")
    folder = ("--target=unused", *target) if target else ()
    report = pip("install", *words, *folder, asked)
    found = json.loads(report)["install"][0]["metadata"]
    # Of the image, not of this machine: one wheel's metadata can speak of all processors.
    environment = {
        "platform_machine": machine,
        "platform_system": "Linux",
        "sys_platform": "linux",
        "python_version": python_version,
        "extra": "",
    }
    needs = [
        need
        for need in map(Requirement, found.get("requires_dist", []))
        if need.marker is None or need.marker.evaluate(environment)
    ]
    if any(need.name.startswith(("nvidia-", "cuda-")) for need in needs):
        sys.exit(
            f"error: pip finds torch {found['version']} with CUDA, of which CPU hosts have no use\n"
            "try:   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make image-data, "
            "PyTorch's index of CPU builds"
        )
    locked = locked_versions(ROOT / "requirements" / "image-torch.txt")
    names = {need: canonicalize_name(need.name) for need in needs}
    others = [
        f"{name}{need.specifier}"
        for need, name in names.items()
        if name not in locked or locked[name] not in need.specifier
    ]
    # pip would look for what torch needs by the markers of this machine.
    return ["--no-deps", asked, *others]


def locked_versions(file: Path) -> dict[str, str]:
    """Returns the version of each package in a file of pip's."""
    return dict(re.findall(r"(?m)^([\w.-]+)==([^\s;\\]+)", file.read_text()))


def download(
    folder: Path,
    requirements: list[str],
    target: list[str],
    *,
    locked: str,
    also: Sequence[str] = (),
) -> None:
    """Downloads the wheels of `requirements` and all they need, unless nothing has changed.

    Args:
        folder: Where they go.
        requirements: What the build installs from the folder.
        target: pip's words for another Python than this one.
        locked: Name of the file in requirements/ with their versions and hashes.
        also: Packages without a hash; words of pip's.
    """
    wanted = "".join(f"{requirement}\n" for requirement in requirements)
    lock = ROOT / "requirements" / f"{locked}.txt"
    asked = "\n".join(
        (wanted, *also, *target, platform.machine(), CONSTRAINTS.read_text(), lock.read_text())
    )
    # Not among the wheels, which the build looks at: the same files give the same layer.
    stamp = folder.with_suffix(".asked")
    digest = hashlib.sha256(asked.encode()).hexdigest()
    is_whole = (folder / "SHA256SUMS").exists() and stamp.exists()
    if is_whole and stamp.read_text() == digest:
        print(f"wheels: {folder.name} as before")
        return
    # First, so that it never tells of another folder than this one.
    stamp.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "requirements.txt").write_text(wanted)
    words = ("download", "--only-binary=:all:", "--dest", str(folder), *target)
    if also:
        pip(*words, *also)
    # Last, so that no file without its hash takes the place of one with it.
    pip(*words, "--require-hashes", "--no-deps", "-r", str(lock))
    record_sums(folder)
    stamp.write_text(digest)
    print(f"wheels: {folder.name}, {sum(f.stat().st_size for f in folder.iterdir()) >> 20} MiB")


def build(folder: Path) -> None:
    """Builds stoker's own wheel."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    pip("wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
    record_sums(folder)


def record_sums(folder: Path) -> None:
    """Writes the sums of the wheels in `folder`."""
    sums = (
        f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n"
        for file in sorted(folder.glob("*.whl"))
    )
    (folder / "SHA256SUMS").write_text("".join(sums))


def verify(record: Path, lock: Path) -> None:
    """Ends with an error unless the sums are those of `lock`."""
    found, wanted = (set(file.read_text().splitlines()) for file in (record, lock))
    if found == wanted:
        print(f"wheels: as {lock} says")
        return
    differing = sorted(line.split()[-1] for line in found ^ wanted)
    sys.exit(
        f"error: these wheels are not those of {lock}: {', '.join(differing)}\n"
        f"try:   the index that {lock} was made with, or make image without LOCK to make a new one"
    )


def pip(*words: str) -> str:
    """Returns what pip prints, and is quiet unless it fails."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = "\n".join(done.stderr.strip().splitlines()[-3:])
        sys.exit(
            f"error: pip {words[0]} failed: {last}\n"
            "try:   the same with the network or the index that pip is set up for (pip config list)"
        )
    return done.stdout


if __name__ == "__main__":
    main()
