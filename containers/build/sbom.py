"""Writes a CycloneDX list (SBOM) of what an image holds; `docker build` runs it in the image.

    cat SUMS... | python3 sbom.py --name stoker-launcher --version 0.1.0 > sbom.cdx.json

Listed are the Python distributions of every site-packages folder with version and licence,
Debian's packages, and the Python that runs this. A distribution that was installed from one of our
wheels has the SHA-256 sum of that wheel, which the build verified; the others came with the base
image.
"""

import argparse
import os
import platform
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import Distribution, distributions

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import License
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

# Of the kernel, not of the image.
_NOT_THE_IMAGES = {"/dev", "/proc", "/sys"}
_PACKAGES = ("site-packages", "dist-packages")
_FORMAT = r"${db:Status-Abbrev}\t${Package}\t${Version}\t${Architecture}\n"


def main() -> None:
    """Reads sums of wheels, as sha256sum writes them, and writes the list."""
    parser = argparse.ArgumentParser(description="CycloneDX SBOM of this image.")
    parser.add_argument("--name", required=True)
    parser.add_argument("--version", required=True)
    options = parser.parse_args()
    sums = wheel_sums(sys.stdin.read().splitlines())
    bom = Bom(components=[*python_distributions(sums), *debian_packages(), interpreter()])
    bom.metadata.component = Component(
        name=options.name,
        version=options.version,
        type=ComponentType.CONTAINER,
        bom_ref=options.name,
    )
    # The same contents give the same file.
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH", "0"))
    bom.metadata.timestamp = datetime.fromtimestamp(epoch, tz=UTC)
    contents = "\n".join(sorted(f"{c.purl} {c.hashes}" for c in bom.components))
    bom.serial_number = uuid.uuid5(uuid.NAMESPACE_URL, contents)
    bom.register_dependency(bom.metadata.component, bom.components)
    print(JsonV1Dot6(bom).output_as_string(indent=1))


def wheel_sums(lines: list[str]) -> dict[tuple[str, str], str]:
    """Returns sums by distribution and version."""
    found = {}
    for line in lines:
        sum_, file = line.split()
        name, version = file.split("-")[:2]
        found[normalised(name), version] = sum_
    return found


def python_distributions(sums: dict[tuple[str, str], str]) -> Iterator[Component]:
    """Yields what is in site-packages and dist-packages, of whichever Python."""
    folders = []
    for at, names, _ in os.walk("/"):
        # Changed in place: the walk goes into what is left.
        names[:] = [name for name in names if os.path.join(at, name) not in _NOT_THE_IMAGES]
        folders += [os.path.join(at, name) for name in names if name in _PACKAGES]
    seen = set()
    for each in distributions(path=folders):
        name, version = each.metadata["Name"], each.version
        if not name or (name, version) in seen:
            continue
        seen.add((name, version))
        sum_ = sums.get((normalised(name), version))
        purl = PackageURL(type="pypi", name=normalised(name), version=version)
        yield Component(
            name=name,
            version=version,
            purl=purl,
            bom_ref=str(purl),
            licenses=licences(each),
            hashes=[HashType(alg=HashAlgorithm.SHA_256, content=sum_)] if sum_ else [],
        )


def licences(each: Distribution) -> list[License]:
    """Returns what a distribution's metadata say: an expression, else classifiers, else words."""
    factory = LicenseFactory()
    if expression := each.metadata["License-Expression"]:
        return [factory.make_from_string(expression)]
    classified = [
        words.rpartition(" :: ")[2]
        for words in each.metadata.get_all("Classifier") or []
        if words.startswith("License :: ")
    ]
    words = (each.metadata["License"] or "").strip()
    # Some put the whole text of the licence there.
    if not classified and words and "\n" not in words:
        classified = [words]
    if len(classified) == 1:
        return [factory.make_from_string(classified[0])]
    return [factory.make_with_name(words) for words in classified]


def debian_packages() -> Iterator[Component]:
    """Yields what dpkg has installed."""
    release = platform.freedesktop_os_release()
    listed = subprocess.run(
        ["dpkg-query", "-W", "-f", _FORMAT], check=True, capture_output=True, text=True
    )
    for line in listed.stdout.splitlines():
        state, name, version, architecture = line.split("\t")
        if state.strip() != "ii":
            continue
        purl = PackageURL(
            type="deb",
            namespace=release["ID"],
            name=name,
            version=version,
            qualifiers={"arch": architecture, "distro": release.get("VERSION_CODENAME", "")},
        )
        yield Component(name=name, version=version, purl=purl, bom_ref=str(purl))


def interpreter() -> Component:
    """Returns the Python that runs this, which Docker's own images of Python bring without dpkg."""
    version = platform.python_version()
    purl = PackageURL(type="generic", name="python", version=version)
    return Component(
        name="python",
        version=version,
        type=ComponentType.APPLICATION,
        purl=purl,
        bom_ref=str(purl),
    )


def normalised(name: str) -> str:
    """Returns a distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main()
