"""An engineer's way with an own script, typed from the pages, on moto and on Kubeflow's double.

Every command of every page is typed here or by another test, or it is named with the reason why no
test can type it.
"""

import math
import os
import shutil
import struct
import subprocess
import wave
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from stoker.platforms.aws import Aws
from support import spoken_digits
from support.guide import GuideShell, steps
from support.guides import archive, jobs_leave, records
from support.kfp_server import KfpServer
from support.kubernetes_api import kube_config, kubernetes_api
from support.pages import ROOT, command_of, commands_of, pages

SAGEMAKER, KUBEFLOW = "docs/sagemaker.md", "docs/kubeflow.md"
OPERATIONS, CI = "docs/operations.md", "docs/how-to/ci.md"
HIGHER = "gate=[{metric: accuracy, min: 0.99}]"
GATE = "gate:\n- {metric: accuracy, min: 0.90, regex: 'accuracy ([0-9.]+)'}\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Typed:
    """A command of a page, and how it ends.

    Attributes:
        start: How it begins on the page.
        more: What is typed behind it.
        code: Its exit code.
        says: A part of what it prints.
        changes: Words of the page, and what this project has in their place.
    """

    page: str
    start: str
    more: str = ""
    code: int = 0
    says: str = ""
    changes: dict[str, str] = field(default_factory=dict)


def typed(page: str, start: str, **more) -> Typed:
    return Typed(page=page, start=start, **more)


# This project's names for the example's.
NAMES = {
    "configs/mnist-sagemaker.yaml": "train.yaml",
    "configs/mnist-kubeflow.yaml": "train.yaml",
    "WORKLOAD": "train.yaml",
    "examples/mnist/data": "sounds",
    "Data=mnist/": "Data=sounds/",
    "$BUCKET/mnist/": "$BUCKET/sounds/",
    "Name=mnist": "Name=train",
    "stoker-mnist": "stoker-train",
    "stoker-ci-mnist": "stoker-ci-train",
    "stoker:mnist": "stoker:TAG",
    " sagemaker mnist": " sagemaker train",
    " kubeflow mnist": " kubeflow train",
    "RUN": "train",
}
BEGUN = (
    typed(SAGEMAKER, "export STOKER"),
    typed(SAGEMAKER, "export AWS_DEFAULT_REGION"),
    typed(SAGEMAKER, "export BUCKET"),
    typed(CI, "stoker init --script", says="train.yaml"),
    typed(SAGEMAKER, "stoker compile", code=2, says="replace the placeholder"),
    typed(SAGEMAKER, "sed -i"),
    typed(SAGEMAKER, "stoker doctor --aws", code=4, says="there is no role stoker-train"),
    typed(SAGEMAKER, "aws cloudformation deploy --template-file configs/sagemaker/shared"),
    typed(SAGEMAKER, "aws cloudformation deploy --template-file configs/sagemaker/stoker"),
    typed(SAGEMAKER, "export REGISTRY"),
    typed(SAGEMAKER, "docker push $REGISTRY/stoker:mnist"),
    typed(SAGEMAKER, "aws s3 cp"),
    typed(SAGEMAKER, "stoker train --dry-run", says="CreateTrainingJob"),
)
# With the records of a job, which moto does not run.
BY_HAND = (
    typed(SAGEMAKER, "stoker profile configs"),
    typed(SAGEMAKER, "stoker decide profile.json --workload"),
    typed(SAGEMAKER, "stoker train configs/mnist-sagemaker.yaml --decision"),
    typed(SAGEMAKER, "stoker evaluate"),
    typed(SAGEMAKER, "stoker evaluate", more=f" --set '{HIGHER}'", code=3, says="0.99"),
)
IN_PRODUCTION = (
    typed(SAGEMAKER, "stoker compile", says="learning_rate"),
    typed(SAGEMAKER, "stoker upload sagemaker", more=" --check", code=11, says="new: train"),
    typed(SAGEMAKER, "stoker start", code=2, says="stoker upload sagemaker"),
    typed(SAGEMAKER, "stoker upload sagemaker", says="created"),
    typed(SAGEMAKER, "stoker upload sagemaker", more=" --check", says="unchanged: train"),
    typed(SAGEMAKER, "stoker start", more=" --param learning-rate=fast", code=2, says="a number"),
    typed(SAGEMAKER, "stoker start", more=" --param hidden=33", code=2, says="use 16, 32, 64"),
    typed(SAGEMAKER, "stoker start", more=" --param hiden=32", code=2, says="hidden?"),
    typed(SAGEMAKER, "stoker start", more=" --param learning-rate=1e-3 --param augment=true"),
    typed(SAGEMAKER, "stoker status", says="train/"),
    typed(SAGEMAKER, "stoker schedule", more=" --param hidden=33", code=2, says="use 16, 32, 64"),
    typed(SAGEMAKER, "stoker schedule", says="cron(0 3 ? * MON *)"),
    typed(OPERATIONS, "aws scheduler list-schedules"),
    typed(CI, "stoker upload sagemaker train.yaml --values stage.yaml", code=2, says="stage.yaml"),
    typed(CI, "stoker upload sagemaker train.yaml --values prod.yaml", says="train-prod"),
    typed(OPERATIONS, "stoker stop sagemaker"),
)
ON_KUBEFLOW = (
    typed(KUBEFLOW, "export STOKER"),
    typed(KUBEFLOW, "export REGISTRY"),
    typed(CI, "stoker init --script", changes={"--platform sagemaker": "--platform kubernetes"}),
    typed(KUBEFLOW, "stoker compile", code=2, says="replace the placeholder"),
    typed(KUBEFLOW, "sed -i"),
    typed(KUBEFLOW, "kubectl apply -k"),
    typed(KUBEFLOW, "stoker train --dry-run", says=""),
    typed(KUBEFLOW, "stoker compile", says="learning_rate"),
    typed(KUBEFLOW, "stoker upload", more=" --check", code=11, says="new: train"),
    typed(KUBEFLOW, "stoker start", code=2, says="stoker upload kubeflow"),
    typed(KUBEFLOW, "stoker upload", says="train"),
    typed(KUBEFLOW, "stoker upload", more=" --check", says="unchanged: train"),
    typed(KUBEFLOW, "stoker start", more=" --param learning-rate=fast", code=2, says="a number"),
    typed(KUBEFLOW, "stoker start", more=" --param hidden=33", code=2, says="use 16, 32, 64"),
    typed(KUBEFLOW, "stoker start", more=" --param learning-rate=1e-3 --param augment=true"),
    typed(KUBEFLOW, "stoker status", says="train"),
    typed(KUBEFLOW, "stoker schedule", says="0 0 3 * * 1"),
)
# Typed by other tests; of a page or of a command.
ELSEWHERE = {
    "README.md": "tests/contract/test_readme.py",
    "docs/README.md": "tests/e2e/test_unchanged_scripts.py",
    "docs/engines.md": "tests/e2e/test_example_workloads.py",
    "docs/libraries.md": "tests/libraries/test_libraries.py",
    "docs/method.md": "tests/e2e/test_profile.py",
    "docs/strategies.md": "tests/e2e/test_strategies.py",
    "docs/tutorial.md": "tests/libraries/test_tutorial.py",
    "stoker init --script train.py --platform sagemaker --ci": "tests/contract/test_init.py",
    "stoker upload sagemaker WORKLOAD --versions": "tests/contract/test_going_back.py",
    "stoker upload sagemaker WORKLOAD --back-to": "tests/contract/test_going_back.py",
    "stoker start sagemaker WORKLOAD --version": "tests/contract/test_going_back.py",
    "stoker stop kubeflow RUN": "tests/contract/test_kubeflow_client.py",
    "stoker init retraining --from": "tests/contract/test_from_training_job.py",
    "stoker profile --training-job": "tests/contract/test_profile_from_job.py",
    "stoker decide profile.json --prices": "tests/contract/test_refresh_prices.py",
    "python tools/refresh_prices.py": "tests/contract/test_refresh_prices.py",
    "stoker decide --platform sagemaker": "tests/unit/test_decide_published.py",
    "stoker decide --workload configs/mnist-kubeflow": "tests/unit/test_decide_published.py",
    "stoker step gate --gate-of": "tests/contract/test_step_verbs.py",
    "stoker train --set feed.on_error=skip": "tests/e2e/test_bad_samples_run.py",
    "stoker train --set feed.max_bytes=": "tests/faults/test_memory_limit.py",
    "stoker profile -- python train.py": "tests/e2e/test_profile.py",
    "stoker train --dry-run configs/mnist-kubeflow.yaml --decision": (
        "tests/contract/test_kubernetes_run.py"
    ),
    "stoker train configs/mnist-kubeflow.yaml --decision decision.json --set": (
        "tests/contract/test_kubernetes_run.py"
    ),
}
# What no test can type, and why.
CANNOT = {
    "python train.py --version": "it shows what a launcher types",
    "python resume.py": "the page's own script: tests/contract/test_docs.py reads it",
    "stoker train WORKLOAD": "the first line of a page, with a workload of the reader",
    "pip install": "what runs the tests has stoker; its extras are read by test_import_extras.py",
    "aws iam create-open-id-connect-provider": "GitHub's own tokens: needs a real account",
    "aws iam create-role": "the reader's trust.json: needs a real account",
    "aws iam attach-role-policy": "needs the role above",
    "aws cloudformation deploy ...": "a part of the command of step 3",
    "aws sagemaker list-model-packages": "a group of the reader: test_policies.py has its right",
    "aws sagemaker update-model-package": "a package of the reader",
    "aws sagemaker list-training-jobs": "a job of the reader",
    "aws s3api get-bucket-lifecycle-configuration": "a bucket of the reader",
    "aws s3api put-bucket-lifecycle-configuration": "the rule is in shared.yaml",
    "kubectl create secret": "a secret of the reader",
    "kubectl get jobsets": "a namespace of the reader",
    "kubectl get trainjobs": "a namespace of the reader",
    "kubectl apply -f runtime.yaml": "an administrator's cluster; its objects are golden files",
    "kfp recurring-run list": "kfp's own command",
}


def in_guides(page: str) -> set[str]:
    """Returns the commands of the ten steps, which test_guides.py types as they stand."""
    text = (ROOT / page).read_text(encoding="utf-8")
    lines = [line for _, found in steps(text) for line in found]
    return {" ".join(line.split()) for line in lines}


def test_each_command_of_each_page_is_typed_or_named_with_its_reason():
    walked = [*BEGUN, *BY_HAND, *IN_PRODUCTION, *ON_KUBEFLOW]
    starts = {(each.page, command_of(each.page, each.start)) for each in walked}
    guides = in_guides(SAGEMAKER) | in_guides(KUBEFLOW)
    named = (*ELSEWHERE, *CANNOT)
    forgotten = [
        f"{page}: {command}"
        for page in pages()
        for command in commands_of(page)
        if page not in ELSEWHERE
        and (page, command) not in starts
        and not any(line.startswith(" ".join(command.split())) for line in guides)
        and not command.startswith(named)
    ]
    assert forgotten == [], "type them in a test, or name them with the reason"


def test_what_is_named_is_on_a_page_and_the_tests_are_there():
    commands = [command for page in pages() for command in commands_of(page)]
    for name in (*ELSEWHERE, *CANNOT):
        assert name in pages() or any(each.startswith(name) for each in commands), name
    assert [file for file in ELSEWHERE.values() if not (ROOT / file).is_file()] == []


@pytest.fixture
def project(tmp_path):
    """A folder with a script that nothing of stoker has seen, its sounds, and no more."""
    folder = tmp_path / "voice"
    folder.mkdir()
    shutil.copy(spoken_digits.__file__, folder / "train.py")
    (folder / "requirements.txt").write_text("numpy\n")
    (folder / ".gitignore").write_text("sounds/\n")
    for digit in range(3):
        for number in range(8):
            write_sound(folder / "sounds" / str(digit) / f"{number}.wav", 300 * (digit + 1))
    subprocess.run(["git", "init", "-q", folder], check=True)
    (tmp_path / "stoker").symlink_to(ROOT)
    return folder


def write_sound(file: Path, hertz: float) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    tones = (int(9000 * math.sin(2 * math.pi * hertz * n / 8000)) for n in range(2000))
    with wave.open(str(file), "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(8000)
        sound.writeframes(b"".join(struct.pack("<h", tone) for tone in tones))


def walk(shell: GuideShell, *way: Typed) -> None:
    for each in way:
        line = command_of(each.page, each.start)
        for there, here in {**NAMES, **each.changes}.items():
            line = line.replace(there, here)
        command, redirect, file = line.partition(" > ")
        done = shell.type(f"{command}{each.more}{redirect}{file}")
        told = f"{each.page}: {command}{each.more}\n{done.stdout}{done.stderr}"
        assert done.returncode == each.code, told
        assert each.says in done.stdout + done.stderr, told
        assert "Traceback" not in told
        if done.returncode:
            # What failed says a way out.
            assert "try: " in told or each.code in (3, 11), told


def change(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def values_of_the_page(account: str, bucket: str) -> str:
    """Returns the page's file of values, with this account and the names of this project."""
    text = (ROOT / SAGEMAKER).read_text()
    shown = text.partition("    $ cat prod.yaml\n")[2].partition("    $ ")[0]
    values = shown.replace("111122223333", account).replace("acme-prod", bucket)
    values = values.replace("mnist-prod", "train-prod").replace("{train:", "{training:")
    return "\n".join(line[4:] for line in values.splitlines()) + "\n"


@pytest.mark.timeout(600)
def test_the_way_to_production_on_sagemaker(project, aws_server, monkeypatch):
    monkeypatch.setattr("stoker.platforms.sagemaker.job.QUIET_SECONDS", 0.0)
    monkeypatch.setattr("stoker.platforms.sagemaker.job.MIN_INTERVAL_SECONDS", 0.01)
    shell = GuideShell(project, env={**aws_server.environ(), "HOME": str(project.parent)})
    walk(shell, *BEGUN[:6])
    change(project / "train.yaml", "# gate:\n", GATE)
    walk(shell, *BEGUN[6:])
    left = records(project.parent / "records", host="ml.g5.xlarge", data="ml.c7i.4xlarge")
    with jobs_leave(archive(left)):
        walk(shell, *BY_HAND)
        bucket = "acme-prod-of-voice"
        place = {"LocationConstraint": "eu-west-1"}
        Aws(region="eu-west-1").call(
            "s3", "CreateBucket", Bucket=bucket, CreateBucketConfiguration=place
        )
        (project / "prod.yaml").write_text(values_of_the_page("123456789012", bucket))
        walk(shell, *IN_PRODUCTION)
    package = yaml.safe_load((project / "train.yaml").read_text())
    assert package["hyperparameters"]["learning-rate"] == 0.01


@pytest.mark.timeout(600)
def test_the_way_to_production_on_kubeflow(project, monkeypatch):
    with kubernetes_api() as api, KfpServer() as pipelines:
        api.namespaces.add("kubeflow")
        config = kube_config(project.parent, api.url, namespace="kubeflow")
        env = {"PATH": os.environ["PATH"], "HOME": str(project.parent), "KUBECONFIG": str(config)}
        env["KF_PIPELINES_ENDPOINT"] = pipelines.url
        default = "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION"
        monkeypatch.setattr(default, str(config))
        pipelines.script = [lambda: pipelines.end("SUCCEEDED")]
        walk(GuideShell(project, env=env), *ON_KUBEFLOW)
        assert pipelines.problems == []
