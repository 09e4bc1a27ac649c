"""Fakes of a guide's programs, which check their arguments. Arguments: a program and its own."""

import base64
import json
import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
NOT_IN_MOTO = (("service-quotas", "list-service-quotas"), ("iam", "simulate-principal-policy"))
CRDS = ("jobsets.jobset.x-k8s.io", "trainjobs.trainer.kubeflow.org")


class WrongError(Exception):
    """The program would refuse it."""


def expect(is_so: object, words: str) -> None:
    if not is_so:
        raise WrongError(words)


def option(arguments: Sequence[str], name: str, default: str = "") -> str:
    return arguments[arguments.index(name) + 1] if name in arguments else default


def pip(arguments: list[str]) -> None:
    expect(arguments[:1] == ["install"], "pip install")
    for named in arguments[1:]:
        found = re.fullmatch(r"(.+)\[([\w,-]+)\]", named)
        project = Path(found.group(1)) / "pyproject.toml"
        expect(project.exists(), f"{named}: neither a package nor a project")
        known = tomllib.loads(project.read_text())["project"]["optional-dependencies"]
        for extra in found.group(2).split(","):
            expect(extra in known, f"there is no extra {extra}")


def make(arguments: list[str]) -> None:
    folder = Path(option(arguments, "-C", "."))
    expect((folder / "Makefile").exists(), f"no Makefile in {folder}")
    targets = [word for word in arguments if re.fullmatch(r"[a-z-]+", word)]
    for target in targets:
        text = (folder / "Makefile").read_text()
        expect(re.search(rf"^{target}:", text, re.MULTILINE), f"no rule for {target}")


def docker(arguments: list[str]) -> None:
    if arguments[0] == "push":
        expect(re.fullmatch(r"[a-z0-9.-]+(:\d+)?/[a-z0-9./-]+:[\w.-]+", arguments[1]), arguments[1])
        if ".amazonaws.com/" in arguments[1]:
            push(arguments[1])
    if arguments[0] == "login":
        expect(sys.stdin.read().strip(), "an empty password")
    if arguments[0] == "build":
        place = arguments[-1]
        name = option(arguments, "-f", "Dockerfile")
        text = sys.stdin.read() if place == "-" else Path(name).read_text()
        expect(text.startswith("FROM launcher\n"), "not on top of the launcher's image")
        for source in re.findall(r"^COPY (\S+)", text, re.MULTILINE):
            expect(place != "-" and (Path(place) / source).exists(), f"COPY {source}: not there")


def push(image: str) -> None:
    import boto3

    repository, _, tag = image.partition("/")[2].partition(":")
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
        "config": {"digest": "sha256:" + "0" * 64},
        "layers": [],
    }
    boto3.Session().client("ecr").put_image(
        repositoryName=repository, imageTag=tag, imageManifest=json.dumps(manifest)
    )


def deploy(client: Any, arguments: list[str]) -> None:
    flag = "--parameter-overrides"
    overrides = arguments[arguments.index(flag) + 1 :] if flag in arguments else []
    asked = {
        "StackName": option(arguments, "--stack-name"),
        "TemplateBody": Path(option(arguments, "--template-file")).read_text(),
        "Capabilities": [option(arguments, "--capabilities")],
        "Parameters": [
            dict(zip(("ParameterKey", "ParameterValue"), each.split("=", 1), strict=True))
            for each in overrides
        ],
    }
    names = [stack["StackName"] for stack in client.describe_stacks()["Stacks"]]
    (client.update_stack if asked["StackName"] in names else client.create_stack)(**asked)


def kubectl(arguments: list[str]) -> None:
    from support.kubernetes_nodes import node
    from support.kubernetes_rules import rule_problems, schema_problems, unknown_fields

    if arguments[:2] == ["get", "crd"]:
        expect(arguments[2] in CRDS, f"no CRD {arguments[2]}")
    if arguments == ["get", "nodes", "-o", "json"]:
        pools = {"gpu": ("g5.xlarge", 1), "cpu": ("c7i.4xlarge", 0)}
        nodes = [
            node(name, kind=kind, gpus=gpus, labels={"eks.amazonaws.com/nodegroup": name})
            for name, (kind, gpus) in pools.items()
        ]
        print(json.dumps({"items": nodes}))
    if "apply" not in arguments:
        return
    name = option(arguments, "-f") or option(arguments, "-k")
    if "-k" in arguments:
        named = yaml.safe_load((Path(name) / "kustomization.yaml").read_text())["resources"]
        text = "---\n".join((Path(name) / each).read_text() for each in named)
    else:
        text = sys.stdin.read() if name == "-" else Path(name).read_text()
    documents = [each for each in yaml.safe_load_all(text) if each]
    expect(documents, f"no objects in {name}")
    for document in documents:
        kind, called = document["kind"], document["metadata"]["name"]
        if kind in ("JobSet", "TrainJob", "TrainingRuntime"):
            found = [*schema_problems(document), *unknown_fields(document)]
            expect(not found, f"{kind} {called}: {found}")
        found = [*rule_problems(document, among=documents)]
        expect(not found, f"{kind} {called}: {found}")
        print(f"{kind.lower()}/{called} created")


def aws(arguments: list[str]) -> None:
    import boto3
    from botocore import xform_name

    service, operation, *rest = arguments
    # Its own, as a process has: the test's knows of accounts that others had.
    client = boto3.Session().client(service)
    if service == "s3" and operation == "mb":
        region = client.meta.region_name
        client.create_bucket(
            Bucket=rest[0].removeprefix("s3://"),
            CreateBucketConfiguration={"LocationConstraint": region},
        )
    elif service == "s3" and operation == "cp":
        source, target = rest[-2:]
        bucket, _, prefix = target.removeprefix("s3://").partition("/")
        expect(prefix.endswith("/"), "a folder's name without a slash")
        for file in sorted(Path(source).rglob("*")):
            if file.is_file():
                client.upload_file(str(file), bucket, prefix + str(file.relative_to(source)))
    elif (service, operation) == ("cloudformation", "deploy"):
        deploy(client, rest)
    elif (service, operation) == ("ecr", "get-login-password"):
        (found,) = client.get_authorization_token()["authorizationData"]
        print(base64.b64decode(found["authorizationToken"]).decode().partition(":")[2])
    else:
        model = client.meta.service_model.operation_model(
            "".join(part.capitalize() for part in operation.split("-"))
        )
        known = {
            xform_name(name, "-"): (name, shape)
            for name, shape in model.input_shape.members.items()
        }
        given, shown = {}, {}
        for flag, value in zip(rest[::2], rest[1::2], strict=True):
            if flag in ("--query", "--output"):
                shown[flag] = value
                continue
            expect(flag[2:] in known, f"aws {service} {operation} has no {flag}")
            name, shape = known[flag[2:]]
            given[name] = value if shape.type_name == "string" else _structure(value)
        if (service, operation) in NOT_IN_MOTO:
            return
        answer = getattr(client, xform_name(model.name))(**given)
        if "--query" in shown:
            print(answer[shown["--query"]])


def _structure(value: str) -> object:
    """Reads lists of objects, as JSON or in the short way: Key=Value,Key=Value."""
    if value.lstrip()[:1] in "[{":
        return json.loads(value)
    if value.isdigit():
        return int(value)
    if "=" not in value:
        return value.split(",")
    return [dict(part.split("=", 1) for part in value.split(","))]


PLAYED = {"pip": pip, "make": make, "docker": docker, "kubectl": kubectl, "aws": aws}


def play(name: str, *arguments: str) -> int:
    try:
        PLAYED[name]([*arguments])
    except WrongError as err:
        print(f"{name}: {err}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "tests")]
    sys.exit(play(*sys.argv[1:]))
