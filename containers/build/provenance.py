"""Writes how an image was built: a statement of in-toto with SLSA's provenance, version 1.

`containers/build/image` calls it after the build. The statement is not signed: it says what was
built of what, and its signer (cosign attest) confirms it.
"""

import argparse
import hashlib
import json
import subprocess
import uuid
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_BUILD_TYPE = "urn:stoker:containers/build/image:1"
# Whose contents decide what is built, besides the commit.
_FILES = (
    "constraints.txt",
    "requirements/image-control.txt",
    "requirements/image-torch.txt",
    "requirements/image-sbom.txt",
    "containers/launcher/Dockerfile",
)


def main() -> None:
    """Writes the statement."""
    parser = argparse.ArgumentParser(description="Provenance of an image.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--context", type=Path, required=True, help="folder with the wheels")
    parser.add_argument("--image", required=True)
    parser.add_argument("--image-id", required=True, help="as docker image inspect says")
    parser.add_argument("--base", required=True, help="as it was asked for")
    parser.add_argument("--base-digest", default="")
    parser.add_argument("--base-id", required=True)
    parser.add_argument("--sbom", type=Path, required=True)
    parser.add_argument("--started-on", required=True)
    parser.add_argument("--engine", required=True, help="version of the Docker engine")
    parser.add_argument("--builder", required=True, help="URI of who runs builds")
    parser.add_argument("arguments", nargs="*", help="NAME=VALUE of the build")
    options = parser.parse_args()
    base = {"uri": f"docker-image:{options.base}", "digest": {}, "annotations": {}}
    if options.base_digest:
        base["digest"] = digest(options.base_digest)
    base["annotations"] = {"id": options.base_id}
    files = [(name, ROOT / name) for name in _FILES]
    files.append(("wheels.sha256", options.context / "wheels.sha256"))
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        # The id, which is the digest of the image's configuration: a registry gives the manifest.
        "subject": [{"name": options.image, "digest": digest(options.image_id)}],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": _BUILD_TYPE,
                "externalParameters": dict(one.split("=", 1) for one in options.arguments),
                "resolvedDependencies": [
                    base,
                    source(),
                    *({"name": name, "digest": {"sha256": sha256(path)}} for name, path in files),
                ],
            },
            "runDetails": {
                "builder": {"id": options.builder, "version": {"docker": options.engine}},
                "metadata": {
                    "invocationId": str(uuid.uuid4()),
                    "startedOn": options.started_on,
                    "finishedOn": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
                },
                "byproducts": [
                    {"name": options.sbom.name, "digest": {"sha256": sha256(options.sbom)}}
                ],
            },
        },
    }
    options.out.write_text(json.dumps(statement, indent=1) + "\n")


def source() -> dict[str, object]:
    """Returns the commit that was built, and whether files differ from it."""
    commit = git("rev-parse", "HEAD")
    if not commit:
        return {"name": "source", "annotations": {"note": "no git checkout"}}
    return {
        "name": "source",
        "digest": {"gitCommit": commit},
        "annotations": {"dirty": bool(git("status", "--porcelain"))},
    }


def git(*words: str) -> str:
    """Returns what git prints; nothing where there is no git, or no checkout."""
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def digest(text: str) -> dict[str, str]:
    """Returns `sha256:...` as statements have it."""
    algorithm, _, value = text.partition(":")
    return {algorithm: value}


def sha256(path: Path) -> str:
    """Returns a file's sum."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    main()
