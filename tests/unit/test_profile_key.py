"""By what a cached profile is found again: each key of a workload counts, or does not."""

import json
from typing import Any

import msgspec
import pytest

from stoker.environment import RunEnvironment
from stoker.errors import UsageError
from stoker.launch.sagemaker_variables import hyperparameters
from stoker.pipelines.sagemaker.compile import compile_pipeline
from stoker.platforms.imported import code_digest, counted_files
from stoker.records import KubernetesSettings, SageMakerSettings, Workload
from stoker.records.profile_key import COUNTS, SAME, profile_key, reuse_key
from stoker.records.step_cost import split_command
from stoker.records.workload import refuse_foreign
from support import sagemaker_pipeline as sample
from support.builders import workload
from support.sagemaker_job import IMAGE, ROLE

SECTIONS = {"": Workload, "sagemaker": SageMakerSettings, "kubernetes": KubernetesSettings}


@pytest.mark.parametrize("section", SECTIONS)
def test_each_key_of_a_workload_counts_or_does_not(section):
    """A new key belongs into one of the two lists of `records.profile_key`."""
    names = {field.encode_name for field in msgspec.structs.fields(SECTIONS[section])}
    sections = SECTIONS.keys() - {""} if not section else set()
    assert COUNTS[section] | SAME[section] == names - sections
    assert not COUNTS[section] & SAME[section]


BASE: dict[str, Any] = {
    "command": ["python", "train.py", "--lr", "0.1", "--width", "32"],
    "image": IMAGE,
    "platform": "sagemaker",
    "cluster": {"dnn": {"instance_type": "ml.g5.xlarge"}},
    "channels": {"train": {"uri": "s3://bucket/train"}},
    "hyperparameters": {"batch_size": 64, "learning-rate": 0.1, "epochs": 3, "seed": 1},
    "sagemaker": {"role": ROLE, "output_uri": "s3://bucket/out", "cache_days": 7},
    "kubernetes": {"pools": {"g5.xlarge": {"cpu": 3, "memory": "12Gi", "gpus": 1}}},
}
SAME_CHANGES: dict[str, Any] = {
    "gate": [{"metric": "accuracy", "min": 0.9}],
    "constraints.objective": "time",
    "constraints.max_usd": 5.0,
    "training.steps": 1000,
    "tracking.tensorboard": True,
    "notify.on": "always",
    "watchdog.then": "stop",
    "on_no_capacity.wait_minutes": 3,
    "skip_unchanged": True,
    "secrets.X": "arn:aws:secretsmanager:eu-west-1:123456789012:secret:x-AbCdEf",
    "sagemaker.max_run_seconds": 3600,
    "sagemaker.role": "arn:aws:iam::123456789012:role/another",
    "sagemaker.checkpoint_uri": "s3://bucket/checkpoints",
    "sagemaker.model.approval": "Approved",
    "sagemaker.control.instance_type": "ml.m5.large",
    "sagemaker.overlap": "refuse",
    "sagemaker.request.Tags": [{"Key": "team", "Value": "vision"}],
    "kubernetes.namespace": "team-a",
    "kubernetes.max_run_seconds": 600,
    "kubernetes.output": "pvc://claim/out",
    "kubernetes.image_pull_secrets": ["registry"],
    "hyperparameters.learning-rate": 0.3,
    "hyperparameters.epochs": 90,
    "hyperparameters.seed": 7,
    "command": ["python", "train.py", "--width", "32", "--lr=0.3"],
}
COUNTING_CHANGES: dict[str, Any] = {
    "image": f"{IMAGE}2",
    "cluster.dnn.instance_type": "ml.g6.xlarge",
    "cluster.dnn.count": 2,
    "channels.train.mode": "FastFile",
    "hyperparameters.batch_size": 128,
    "hyperparameters.depth": 4,
    "environment.OMP_NUM_THREADS": "2",
    "feed.seeding": "torch",
    "feed.pin": "script",
    "strategy": "torchrun",
    "profile.budget_seconds": 60.0,
    "sagemaker.entrypoint": ["my", "launch", "--"],
    "sagemaker.request.VolumeSizeInGB": 10,
    "kubernetes.dnn.cpu": 7,
    "kubernetes.shm": "2Gi",
    "command": ["python", "train.py", "--lr", "0.1", "--width", "64"],
}


def changed(path: str, value: object) -> Workload:
    """Returns BASE with the value at a key path."""
    document: Any = json.loads(json.dumps(BASE))
    target, names = document, path.split(".")
    for name in names[:-1]:
        target = target.setdefault(name, {})
    target[names[-1]] = value
    return workload("mnist", **document)


@pytest.mark.parametrize("path", SAME_CHANGES)
def test_a_change_that_leaves_a_steps_cost_finds_the_profile_again(path):
    assert profile_key(changed(path, SAME_CHANGES[path])) == profile_key(workload("mnist", **BASE))


@pytest.mark.parametrize("path", COUNTING_CHANGES)
def test_a_change_that_may_cost_measures_again(path):
    key = profile_key(changed(path, COUNTING_CHANGES[path]))
    assert key != profile_key(workload("mnist", **BASE))


# A key path, and two values of it.
DATED: list[tuple[str, Any, Any]] = [
    ("channels.train.uri", "s3://b/data/2026-11-26/", "s3://b/data/2026-11-27/"),
    ("channels.train.uri", "s3://b/data/day=20261126/", "s3://b/data/day=20261127/"),
    ("hyperparameters.train_uri", "s3://b/2026-11-26/", "s3://b/2026-11-27/"),
    ("hyperparameters.day", "2026-11-26", "2026-12-01"),
    ("hyperparameters.files", ["s3://b/a-2026-11-26.tar"], ["s3://b/a-2026-11-27.tar"]),
    ("environment.DATA", "/mnt/2026/11/26/x", "/mnt/2026/11/27/x"),
    ("command", ["python", "t.py", "--data=s3://b/2026-11-26"], None),
    ("command", ["python", "t.py", "--data", "/mnt/2026-11-26/"], None),
    ("command", ["python", "t.py", "--day", "2026-11-26"], None),
]
# The same places, and what is no date.
UNDATED: list[tuple[str, Any, Any]] = [
    ("channels.train.uri", "s3://b/small/2026-11-26/", "s3://b/large/2026-11-26/"),
    ("hyperparameters.size", 20261126, 20261127),
    ("hyperparameters.transform", "crop=224", "crop=336"),
    ("hyperparameters.labels", "v1/labels", "v2/labels"),
    ("environment.DATA", "/mnt/a", "/mnt/b"),
    ("image", "registry/train:2026-11-26", "registry/train:2026-11-27"),
    ("image", f"train@sha256:{'a' * 64}", f"train@sha256:{'b' * 64}"),
    ("command", ["python", "t.py", "--width=2011"], ["python", "t.py", "--width=2012"]),
]


def _other_day(values: tuple[str, Any, Any]) -> tuple[str, Any, Any]:
    path, first, second = values
    later = [word.replace("11-26", "11-27") for word in first] if second is None else second
    return path, first, later


@pytest.mark.parametrize(("path", "first", "second"), [_other_day(each) for each in DATED])
def test_data_of_another_date_finds_the_profile_again(path, first, second):
    one, other = changed(path, first), changed(path, second)
    assert first != second
    assert profile_key(one) == profile_key(other)
    assert reuse_key(one, code="c") == reuse_key(other, code="c")
    # The step that decides takes it, too.
    refuse_foreign("profile", keys=one.profile_keys(), digest=one.digest(), workload=other)


@pytest.mark.parametrize(("path", "first", "second"), UNDATED)
def test_what_is_no_date_measures_again(path, first, second):
    assert profile_key(changed(path, first)) != profile_key(changed(path, second))


def test_help_of_an_option_is_no_change_and_its_type_is_one():
    own = [{"type": kind, "help": words} for kind, words in (("int", "a"), ("int", "b"))]
    keys = [profile_key(changed("options.batch_size", each)) for each in own]
    assert keys[0] == keys[1]
    assert profile_key(changed("options.batch_size", {"type": "float"})) != keys[0]


POOLS_FILE = """# of this cluster
instance_type,vcpus,memory_gib,gpus,ec2_usd_per_hour_us_east_1,priced_on,node_selector
g5.xlarge,3,12,1,1.006,2026-07-20,pool=train
feed,15,28,0,0.714,2026-07-20,pool=feed
"""


@pytest.mark.parametrize(
    ("was", "now", "is_same"),
    [
        ("1.006,2026-07-20", "1.21,2026-11-20", True),
        ("# of this cluster", "# of another", True),
        ("g5.xlarge,3,12", "g5.xlarge,2,12", False),
        ("pool=train", "pool=other", False),
    ],
    ids=["price", "comment", "vcpus", "nodes"],
)
def test_a_price_of_a_node_pool_measures_nothing_again(was, now, is_same):
    first = changed("kubernetes.pools_file", POOLS_FILE)
    later = changed("kubernetes.pools_file", POOLS_FILE.replace(was, now))
    assert (profile_key(first) == profile_key(later)) is is_same


def test_other_code_or_another_span_of_time_finds_no_profile():
    first = reuse_key(workload("mnist", **BASE), code="a", span="30.1")
    assert reuse_key(workload("mnist", **BASE), code="b", span="30.1") != first
    assert reuse_key(workload("mnist", **BASE), code="a", span="30.2") != first


def test_the_lists_of_this_test_have_each_section():
    for names, changes in ((SAME, SAME_CHANGES), (COUNTS, COUNTING_CHANGES)):
        # schema has one value; name and platform make another pipeline.
        left_out = {"schema", "name", "platform", "not_numbers", "engine", "options"}
        heads = {path.partition(".")[0] for path in changes}
        assert names[""] - left_out <= heads


def test_the_workload_says_which_hyperparameters_cost_nothing():
    own = {"profile": {"same_cost": ["dropout"]}}
    one, other = ({**BASE, **own, "hyperparameters": {"dropout": each}} for each in (0.1, 0.2))
    assert profile_key(workload("mnist", **one)) == profile_key(workload("mnist", **other))
    rates = ({**BASE, **own, "hyperparameters": {"lr": each}} for each in (0.1, 0.2))
    assert len({profile_key(workload("mnist", **each)) for each in rates}) == 2


@pytest.mark.parametrize(
    ("command", "kept", "options"),
    [
        ("t.py --lr 0.1 --width 3", "t.py --width 3", {"lr": "0.1"}),
        ("t.py --learning-rate=1e-3", "t.py", {"learning-rate": "1e-3"}),
        ("t.py --seed -1", "t.py", {"seed": "-1"}),
        # No value, a flag of the same name, an option with one dash, words for another program.
        ("t.py --seed --width 3", "t.py --seed --width 3", {}),
        ("t.py -lr 0.1", "t.py -lr 0.1", {}),
        ("t.py -- --lr 0.1", "t.py -- --lr 0.1", {}),
        ("lr 0.1", "lr 0.1", {}),
        ("t.py --lrs 0.1 --my-lr 3", "t.py --lrs 0.1 --my-lr 3", {}),
    ],
)
def test_options_with_one_value_are_taken_out_of_a_command(command, kept, options):
    found = split_command(command.split(), ("lr", "learning_rate", "seed"))
    assert found == (tuple(kept.split()), options)


FILES = {
    "train.py": b"import model.net\nfrom data import reader\n",
    "model/__init__.py": b"",
    "model/net.py": b"from . import blocks\nfrom .deep.layers import Layer\n",
    "model/blocks.py": b"",
    "model/deep/__init__.py": b"",
    "model/deep/layers.py": b"import torch\n",
    "model/unused.py": b"",
    "data/__init__.py": b"",
    "data/reader.py": b"def broken(:\n",
    "serve.py": b"import model.unused\n",
    "README.md": b"words",
    "train.yaml": b"name: mnist\ncommand: [python, train.py]\n",
    "conf/augment.yaml": b"size: 224\n",
    "labels.txt": b"a\n",
    "tests/test_net.py": b"",
}


def test_what_a_script_imports_counts_and_prose_and_workloads_do_not():
    counted = counted_files(FILES, ["python", "train.py"])
    left_out = {"model/unused.py", "serve.py", "README.md", "train.yaml", "tests/test_net.py"}
    assert FILES.keys() - counted == left_out


@pytest.mark.parametrize(
    ("files", "command"),
    [
        ({}, ["python", "-m", "train"]),
        ({}, ["bash", "run.sh"]),
        ({"train.py": b"import importlib\n"}, ["python", "train.py"]),
        ({"model/net.py": b"__import__('x')\n"}, ["python", "train.py"]),
    ],
)
def test_all_python_counts_where_imports_cannot_be_followed(files, command):
    counted = counted_files({**FILES, **files}, command)
    assert {"serve.py", "model/unused.py"} <= counted
    assert "README.md" not in counted


@pytest.mark.parametrize(
    ("name", "is_same"),
    [
        ("README.md", True),
        ("serve.py", True),
        ("train.yaml", True),
        ("train.py", False),
        ("model/deep/layers.py", False),
        ("conf/augment.yaml", False),
        ("labels.txt", False),
    ],
)
def test_the_digest_changes_with_what_counts(name, is_same):
    command = ["python", "train.py"]
    other = {**FILES, name: FILES[name] + b"\n# changed\n"}
    assert (code_digest(other, command) == code_digest(FILES, command)) is is_same


def profile_step(tmp_path, files=FILES, **changes: Any) -> tuple[str, dict[str, Any]]:
    """Returns what the service compares of the profile, and the uploads."""
    source = tmp_path / "code"
    for name, content in files.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(content)
    described = {**BASE, "kubernetes": None, **changes}
    described = {key: value for key, value in described.items() if value is not None}
    settings = {**described["sagemaker"], "source": str(source)}
    compiled = compile_pipeline(
        workload("mnist", **{**described, "sagemaker": settings}), folder=sample.ROOT
    )
    steps = json.loads(compiled.definition)["Steps"]
    (needed,) = [step for step in steps if step["Name"] == "NeedsProfile"]
    (kept,) = [step for step in needed["Arguments"]["IfSteps"] if step["Type"] == "Condition"]
    (profile,) = [step for step in kept["Arguments"]["ElseSteps"] if step["Name"] == "Profile"]
    arguments = profile["Arguments"]
    compared = {key: arguments[key] for key in arguments.keys() - {"RoleArn", "Tags"}}
    return json.dumps(compared, sort_keys=True), dict(compiled.uploads)


@pytest.mark.parametrize(
    "changes",
    [
        {"gate": [{"metric": "accuracy", "min": 0.5}]},
        {"constraints": {"max_usd": 9.0}},
        {"hyperparameters": {"batch_size": 64, "learning-rate": 0.7, "epochs": 9, "seed": 3}},
        {"command": ["python", "train.py", "--width", "32", "--lr", "0.7"]},
        {"sagemaker": {**BASE["sagemaker"], "max_run_seconds": 80_000}},
        {"files": {**FILES, "README.md": b"other words"}},
        {"files": {**FILES, "train.yaml": FILES["train.yaml"] + b"# a comment\n"}},
    ],
    ids=["gate", "budget", "rates", "command", "limit", "prose", "comment"],
)
def test_the_pipelines_profile_is_the_same_request_after_a_change_that_costs_nothing(
    changes, tmp_path
):
    first, uploads = profile_step(tmp_path / "a")
    again, _ = profile_step(tmp_path / "b", **changes)
    assert first == again
    # The script still gets them: a required option is there.
    (values,) = [json.loads(each) for name, each in uploads.items() if name.endswith("eters.json")]
    assert values == {"lr": "0.1", "learning-rate": 0.1, "epochs": 3, "seed": 1}


@pytest.mark.parametrize(
    "changes",
    [
        {"hyperparameters": {"batch_size": 32, "learning-rate": 0.1}},
        {"files": {**FILES, "model/blocks.py": b"slow = 1\n"}},
        {"environment": {"OMP_NUM_THREADS": "1"}},
        {"feed": {"seeding": "torch"}},
    ],
    ids=["batch", "code", "environment", "feed"],
)
def test_the_pipelines_profile_is_another_request_after_a_change_that_may_cost(changes, tmp_path):
    first, _ = profile_step(tmp_path / "a")
    again, _ = profile_step(tmp_path / "b", **changes)
    assert first != again


def test_a_launcher_adds_the_values_that_the_request_does_not_have(tmp_path):
    config = tmp_path / "input" / "config"
    config.mkdir(parents=True)
    (config / "hyperparameters.json").write_text('{"batch_size": "64", "act": "\\"relu\\""}')
    more = tmp_path / "more.json"
    more.write_text('{"learning-rate": 0.1, "lr": "1e-3", "seed": 3}')
    settings = RunEnvironment(base_dir=tmp_path, more_hyperparameters=more)
    assert [*hyperparameters(settings).items()] == [
        ("act", "relu"),
        ("batch_size", 64),
        ("learning-rate", 0.1),
        ("lr", "1e-3"),
        ("seed", 3),
    ]


@pytest.mark.parametrize(
    ("command", "is_same"),
    [
        (["python", "train.py", "--width", "32", "--lr=0.3"], True),
        (["python", "train.py", "--lr", "0.1", "--width", "64"], False),
        (["python", "other.py", "--lr", "0.1", "--width", "32"], False),
    ],
)
def test_a_reused_profile_is_foreign_only_if_its_command_may_cost_otherwise(command, is_same):
    first, later = workload("mnist", **BASE), changed("command", command)
    told = {"keys": first.profile_keys(), "digest": first.digest(), "workload": later}
    if is_same:
        refuse_foreign("profile", **told)
        # It has the profile's digest, and is what train follows.
        refuse_foreign("decision", **told)
        with pytest.raises(UsageError, match="another workload"):
            refuse_foreign("training", **told)
    else:
        with pytest.raises(UsageError, match="another workload"):
            refuse_foreign("profile", **told)
