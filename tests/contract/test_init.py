"""`stoker init` writes what was asked for, and never over a file that exists."""

import json
import os
import re
import subprocess
import zipfile
from pathlib import Path

import pytest
import yaml

from stoker.cli.init import write_project
from stoker.errors import UsageError
from stoker.platforms.packing import package_of
from stoker.project.ci_jobs import ci_file, ci_text
from stoker.project.script_command import command_of
from stoker.workload_file import read_workload
from support.command import process, stoker, succeeds

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
FILES = {Path(f"configs/{name}.yaml"): f"name: {name}\n" for name in "abcdefg"}


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_what_is_in_the_way_is_named_and_nothing_is_written(tmp_path):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "a.yaml").write_text("my own")
    with pytest.raises(UsageError, match=r"different files of these names: configs/a\.yaml"):
        write_project(tmp_path, FILES)
    assert files_in(tmp_path) == {"configs/a.yaml"}
    assert (tmp_path / "configs" / "a.yaml").read_text() == "my own"
    (tmp_path / "file" / "configs").parent.mkdir()
    (tmp_path / "file" / "configs").write_text("")
    with pytest.raises(UsageError, match="and 2 more"):
        write_project(tmp_path / "file", FILES)
    with pytest.raises(UsageError, match="is a file"):
        write_project(tmp_path / "file" / "configs", FILES)


def test_other_files_and_equal_ones_stay(tmp_path):
    write_project(tmp_path, FILES)
    (tmp_path / "notes.txt").write_text("mine")
    before = (tmp_path / "configs" / "a.yaml").stat().st_mtime_ns
    write_project(tmp_path, {**FILES, Path("configs") / "new.yaml": "name: new\n"})
    assert (tmp_path / "configs" / "a.yaml").stat().st_mtime_ns == before
    assert (tmp_path / "configs" / "new.yaml").read_text() == "name: new\n"
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_comes_with_what_it_needs_and_nothing_else(name, tmp_path):
    succeeds("init", "mine", "--example", name, cwd=tmp_path)
    made = files_in(tmp_path / "mine")
    workload = yaml.safe_load((tmp_path / "mine" / "configs" / f"{name}.yaml").read_text())
    assert {word for word in workload["command"] if word.startswith("examples/")} <= made
    # One workload; of the pipelines only the platform's.
    pipelines = {"sagemaker": {"pipelines/sagemaker.py"}, "kubernetes": {"pipelines/kubeflow.py"}}
    platform = workload.get("platform", "local")
    wanted = {f"configs/{name}.yaml", *pipelines.get(platform, ())}
    found = {f for f in made if re.match(r"configs/[\w-]+\.yaml|pipelines/", f)}
    assert found == wanted
    folders = ("configs/", "pipelines/", "tools/", "examples/", ".git")
    assert all(file.startswith(folders) for file in made)
    # Files that comments name are in the project, or said to be in stoker's checkout.
    for file in (each for each in made if each.endswith((".yaml", ".py"))):
        words = " ".join((tmp_path / "mine" / file).read_text().replace("\n#", " ").split())
        for page, where in re.findall(r"(docs/[\w/-]+\.md)(.{0,21})", words):
            assert (ROOT / page).is_file()
            assert where == " of stoker's checkout", f"{file}: {page}"


def test_an_example_of_another_name_is_refused_with_those_there_are(tmp_path):
    done = stoker("init", "mine", "--example", "mnits", cwd=tmp_path)
    assert done.returncode == 2
    assert "example mnits not found" in done.stderr
    assert "mnist" in done.stderr.partition("try:")[2]
    assert not (tmp_path / "mine").exists()


def test_an_installed_wheel_makes_a_project(tmp_path):
    wheels = pytest.importorskip("hatchling.builders.wheel", reason="make setup installs hatchling")
    folder, builder = str(tmp_path / "dist"), wheels.WheelBuilder(str(ROOT))
    (built,) = builder.build(directory=folder, versions=["standard"])
    installed = tmp_path / "installed"
    with zipfile.ZipFile(built) as wheel:
        wheel.extractall(installed)
    done = process("init", "mine", cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(installed)})
    assert done.returncode == 0, done.stderr
    assert "pip install -r examples/mnist/requirements.txt" in done.stdout
    stoker("init", "ours", cwd=tmp_path)
    assert files_in(tmp_path / "mine") == files_in(tmp_path / "ours")
    assert read_workload(tmp_path / "mine" / "configs" / "mnist.yaml").name == "mnist"


def test_a_script_gets_a_workload_that_trains_it_and_a_gitignore(tmp_path):
    (tmp_path / "Train It.py").write_text("")
    (tmp_path / "mine").mkdir()
    done = succeeds("init", "--script", "Train It.py", cwd=tmp_path)
    names = {".gitignore", "Train It.py", "mine", "train-it.yaml", "workload.schema.json"}
    assert {path.name for path in tmp_path.iterdir()} == names
    workload = read_workload(tmp_path / "train-it.yaml")
    assert workload.command == ("python", "Train It.py")
    assert "stoker run train-it.yaml" in done.stdout
    assert "runs/" in (tmp_path / ".gitignore").read_text().splitlines()
    # From another folder, and never over a file that was edited.
    succeeds("init", "mine", "--script", "Train It.py", cwd=tmp_path)
    assert read_workload(tmp_path / "mine" / "train-it.yaml").command[1] == "../Train It.py"
    (tmp_path / "train-it.yaml").write_text("name: mine")
    (tmp_path / ".gitignore").write_text("own")
    assert "different files" in stoker("init", "--script", "Train It.py", cwd=tmp_path).stderr
    assert (tmp_path / ".gitignore").read_text() == "own"


def project(folder: Path) -> None:
    """Writes scripts of many kinds, and a package."""
    texts = {
        "train.py": "import torch\n",
        "train.sh": "python train.py\n",
        "posix.sh": "#!/bin/sh\npython train.py\n",
        "shell": "#!/usr/bin/env bash\npython train.py\n",
        "windows": "#!/bin/bash\r\npython train.py\r\n",
        "py": "#!/usr/bin/env -S python3 -u\nprint(1)\n",
        "plain": "import torch\nprint(1)\n",
        "ruby": "#!/usr/bin/env ruby\nputs 1\n",
        "made": "#!/usr/bin/env Rscript\nprint(1)\n",
        "with space.py": "",
        "it's.sh": "",
        "-dash.py": "",
        "pkg/__init__.py": "",
        "pkg/relative.py": "from . import model\n",
        "pkg/absolute.py": "import pkg.model\n",
        "pkg/alone.py": "import model\n",
        "pkg/deep/__init__.py": "",
        "pkg/deep/train.py": "from ..model import Net\n",
        "pkg/__main__.py": "from pkg.model import Net\n",
        "tool/__main__.py": "print(1)\n",
        "notes.txt": "not a program\n",
        "book.ipynb": "{}",
    }
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    for name in ("made", "train.sh"):
        (folder / name).chmod(0o755)


COMMANDS = {
    "train.py": ("python", "train.py"),
    "train.sh": ("bash", "train.sh"),
    "posix.sh": ("sh", "posix.sh"),
    "shell": ("bash", "shell"),
    "windows": ("bash", "windows"),
    "py": ("python", "-u", "py"),
    "plain": ("python", "plain"),
    "ruby": ("ruby", "ruby"),
    "made": ("./made",),
    "with space.py": ("python", "with space.py"),
    "it's.sh": ("bash", "it's.sh"),
    "./-dash.py": ("python", "./-dash.py"),
    "pkg/relative.py": ("python", "-m", "pkg.relative"),
    "pkg/absolute.py": ("python", "-m", "pkg.absolute"),
    "pkg/alone.py": ("python", "pkg/alone.py"),
    "pkg/deep/train.py": ("python", "-m", "pkg.deep.train"),
    "pkg": ("python", "-m", "pkg"),
    "tool": ("python", "tool"),
    "pkg.relative": ("python", "-m", "pkg.relative"),
    "-m pkg.relative --lr 0.1": ("python", "-m", "pkg.relative", "--lr", "0.1"),
    "python -u train.py --epochs 3": ("python", "-u", "train.py", "--epochs", "3"),
    "accelerate launch train.py": ("accelerate", "launch", "train.py"),
    "torchrun train.py --lr 1": ("python", "train.py", "--lr", "1"),
    "torchrun -m pkg.relative": ("python", "-m", "pkg.relative"),
    "torchrun --no-python ./made": ("./made",),
}


@pytest.mark.parametrize("given", COMMANDS)
def test_a_workload_starts_a_script_as_the_user_would(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    project(tmp_path)
    assert command_of(given, Path()).words == COMMANDS[given]


@pytest.mark.parametrize("given", ["train.sh", "train.py", "shell", "made", "with space.py"])
def test_a_script_is_seen_from_the_project_s_folder(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    project(tmp_path)
    (tmp_path / "elsewhere" / "below").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere" / "below")
    *_, last = command_of(given, Path("mine")).words
    assert last == f"../{given}"
    # A program sees the folder, and not the link to it.
    *_, last = command_of(given, Path("link")).words
    assert (tmp_path / "link" / last).resolve() == tmp_path / given


@pytest.mark.parametrize(
    ("line", "processes", "hosts"),
    [
        ("torchrun --nproc-per-node 4 train.py", 4, 1),
        ("torchrun --nproc_per_node=2 --nnodes=2 --rdzv-backend c10d train.py", 2, 2),
        ("torchrun --standalone --nproc-per-node gpu train.py", None, 1),
        ("torchrun --nnodes 1:3 --max-restarts 3 train.py --nproc-per-node 9", None, 1),
    ],
)
def test_stoker_starts_the_ranks_that_a_line_of_torchrun_names(
    line, processes, hosts, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    project(tmp_path)
    succeeds("init", "--script", line, cwd=tmp_path)
    workload = read_workload(tmp_path / "train.yaml")
    assert workload.command[:2] == ("python", "train.py")
    assert workload.cluster.dnn.processes_per_host == processes
    assert workload.cluster.dnn.count == hosts


@pytest.mark.parametrize(
    ("given", "said", "fix"),
    [
        ("book.ipynb", "is a notebook", "nbconvert --to script book.ipynb"),
        ("notes.txt", "neither a Python or shell script", "--script 'PROGRAM notes.txt'"),
        ("mine/pkg", "no such script", "correct the path"),
        ("pkg/deep", "is a folder without", "name the script"),
        ("torchrun --nproc-per-node 2", "does not name a script", "train.py"),
    ],
)
def test_what_nothing_runs_is_refused(given, said, fix, tmp_path):
    project(tmp_path)
    done = stoker("init", "--script", given, cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert fix in done.stderr
    assert not list(tmp_path.glob("*.yaml"))


def test_a_script_of_a_package_needs_the_package_s_folder(tmp_path):
    project(tmp_path)
    done = stoker("init", "mine", "--script", "pkg/relative.py", cwd=tmp_path)
    assert "stoker init . --script pkg/relative.py" in done.stderr
    assert not (tmp_path / "mine").exists()


def test_a_shell_script_is_trained_by_its_workload(tmp_path):
    (tmp_path / "my scripts").mkdir()
    (tmp_path / "my scripts" / "train.sh").write_text("echo it-runs $PWD\n")
    done = succeeds("init", "mine", "--script", "my scripts/train.sh", cwd=tmp_path)
    assert read_workload(tmp_path / "mine" / "train.yaml").command == (
        *("bash", "../my scripts/train.sh"),
    )
    done = succeeds("train", "train.yaml", cwd=tmp_path / "mine")
    assert f"it-runs {tmp_path / 'mine'}" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no folder and no script"),
        (["--script", "none.py"], "no such script: none.py"),
        # No module could have this name.
        (["--script", "my-train.py"], "no such script: my-train.py"),
        (["mine", "--platform", "sagemaker"], "--platform is only for --script"),
        (["mine", "--region", "eu-central-1"], "--region is only for --from-training-job"),
        (["mine", "--example", "mnist", "--from-training-job", "j"], "cannot be used with"),
    ],
)
def test_init_says_what_is_missing(tmp_path, words, said):
    done = stoker("init", *words, cwd=tmp_path)
    assert (done.returncode, list(tmp_path.iterdir())) == (2, [])
    assert said in done.stderr


def test_a_script_that_would_not_travel_is_refused(tmp_path):
    (tmp_path / "train.py").write_text("")
    words = ("init", "mine", "--script", "train.py", "--platform", "sagemaker")
    done = stoker(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert "train.py is outside of mine" in done.stderr
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize(
    ("platform", "target"), [("sagemaker", "sagemaker"), ("kubernetes", "kubeflow")]
)
def test_a_script_s_workload_compiles_once_its_names_are_written(tmp_path, platform, target):
    (tmp_path / "train.py").write_text("")
    done = stoker("init", "--script", "train.py", "--platform", platform, cwd=tmp_path)
    (line,) = [line for line in done.stdout.splitlines() if "stoker compile" in line]
    _, *words = line.strip().partition("      ")[0].split()
    assert words[:3] == ["compile", target, "train.yaml"]
    job = yaml.safe_load((tmp_path / ".github" / "workflows" / "stoker.yml").read_text())
    assert job["jobs"]["compile"]["steps"][-1]["run"] == " ".join(["stoker", *words])
    assert "pip install stoker" not in str(job)
    assert job["permissions"] == {"contents": "read"}
    assert "p.json" in (tmp_path / ".gitignore").read_text()
    assert json.loads((tmp_path / "workload.schema.json").read_text())["$defs"]
    file = tmp_path / "train.yaml"
    assert "replace the placeholder" in stoker(*words, cwd=tmp_path).stderr
    names = {"ACCOUNT": "123456789012", "REGION": "eu-west-1", "BUCKET": "mine", "REGISTRY": "r.io"}
    text = file.read_text()
    for word, name in names.items():
        text = text.replace(word, name)
    file.write_text(text)
    succeeds(*words, cwd=tmp_path)
    if target == "sagemaker":
        kept = {".gitignore", ".stokerignore", "train.py", "train.yaml"}
        assert set(package_of(tmp_path).sizes) == kept
        assert (tmp_path / "configs" / "sagemaker" / "stoker.yaml").is_file()
        # Hints name it.
        assert (tmp_path / "tools" / "refresh_prices.py").is_file()
    else:
        rights = tmp_path / "configs" / "kubernetes" / "kustomization.yaml"
        for name in yaml.safe_load(rights.read_text())["resources"]:
            assert (rights.parent / name).is_file()
        assert (tmp_path / "tools" / "node_pools.py").is_file()


@pytest.mark.parametrize("target", ["sagemaker", "kubeflow"])
def test_jobs_of_github_check_a_pull_request_and_deploy_the_main_branch(target, tmp_path):
    text = ci_text("github", target=target, file=Path("train.yaml"), out="p.json")
    assert "@" not in re.sub(r"@v\d|@ git\+https|@REVISION", "", text)
    jobs = yaml.safe_load(text)["jobs"]
    assert list(jobs) == ["compile", "check", "deploy"]
    is_aws = target == "sagemaker"
    for name in ("check", "deploy"):
        job = jobs[name]
        assert job["permissions"].get("id-token") == ("write" if is_aws else None)
        uses = [step.get("uses", "") for step in job["steps"]]
        assert any("configure-aws-credentials" in each for each in uses) == is_aws
        assert job["timeout-minutes"] > 0
    assert "id-token" not in str(jobs["compile"])
    assert "head.repo.full_name == github.repository" in jobs["check"]["if"]
    assert jobs["deploy"]["if"] == "github.event_name == 'push'"
    assert jobs["deploy"]["steps"][-1]["run"] == f"stoker upload {target} train.yaml --yes"
    # No key of a cloud is stored.
    assert "secrets.AWS" not in text


@pytest.mark.parametrize(
    ("code", "is_good"), [(0, True), (10, True), (11, True), (2, False), (4, False), (143, False)]
)
def test_the_check_s_job_fails_for_errors_and_not_for_changes(code, is_good):
    text = ci_text("github", target="sagemaker", file=Path("train.yaml"), out="p.json")
    line = yaml.safe_load(text)["jobs"]["check"]["steps"][-1]["run"]
    script = f"stoker() {{ return {code}; }}\n{line}"
    done = subprocess.run(["bash", "-e", "-c", script], check=False)
    assert (done.returncode == 0) == is_good


@pytest.mark.parametrize("target", ["sagemaker", "kubeflow"])
def test_jobs_of_gitlab_check_a_merge_request_and_deploy_the_main_branch(target, tmp_path):
    text = ci_text("gitlab", target=target, file=Path("train.yaml"), out="p.json")
    jobs = yaml.safe_load(text)
    assert jobs["stoker-check"]["allow_failure"] == {"exit_codes": [10, 11]}
    assert jobs["stoker-check"]["script"] == [f"stoker upload {target} train.yaml --check"]
    assert jobs["stoker-deploy"]["script"] == [f"stoker upload {target} train.yaml --yes"]
    assert ("id_tokens" in jobs[".stoker-access"]) == (target == "sagemaker")
    for name in ("stoker-check", "stoker-deploy"):
        assert jobs[name]["extends"] == ".stoker-access"
    # It is not written over a project's own.
    assert ci_file("gitlab", tmp_path) == Path(".gitlab-ci.yml")
    (tmp_path / ".gitlab-ci.yml").write_text("a: {script: [b]}\n")
    assert ci_file("gitlab", tmp_path) == Path(".gitlab/stoker.yml")


def test_a_project_of_gitlab_gets_its_jobs_beside_its_own(tmp_path):
    (tmp_path / "train.py").write_text("")
    (tmp_path / ".gitlab-ci.yml").write_text("a: {script: [b]}\n")
    words = ("init", "--script", "train.py", "--platform", "sagemaker", "--ci", "gitlab")
    done = succeeds(*words, cwd=tmp_path)
    assert "include: [{local: .gitlab/stoker.yml}]" in done.stdout
    assert (tmp_path / ".gitlab" / "stoker.yml").is_file()
    assert not (tmp_path / ".github").exists()
