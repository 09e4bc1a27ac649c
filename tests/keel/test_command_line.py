"""Verbs, flags that stay, exit codes, and what is refused: with its place and the nearest name."""

import json
from pathlib import Path

import pytest

from stoker.records import Profile, ProfiledHost, StepTerms, write_json
from support.black_box import as_json, read, refused, stoker

VERBS = (
    "run profile decide train evaluate compile upload start schedule status stop watch report init "
    "doctor catalog schema launch"
)


def test_the_list_of_verbs_has_those_that_stay(tmp_path):
    said = stoker("--help", cwd=tmp_path)
    assert [verb for verb in VERBS.split() if f" {verb} " not in said] == []
    assert max(map(len, stoker("decide", "--help", cwd=tmp_path).splitlines())) <= 80
    assert stoker("--version", cwd=tmp_path).split()[-1][0].isdigit()


GOOD = "name: x\ncommand: [python, -c, pass]\n"
CLOUD = GOOD + "platform: sagemaker\n"
FILES = {
    "good.yaml": GOOD,
    "not-yaml.yaml": "name: x\ncommand: [a\n",
    "no-script.yaml": "name: x\ncommand: [python, missing.py]\n",
    "text.yaml": "name: x\ncommand: python train.py --lr\n",
    "number.yaml": "name: x\ncommand: [python, 1]\n",
    "name.yaml": "name: My Digits!\ncommand: [python]\n",
    "empty.yaml": "",
    "key.yaml": GOOD + "constraint: {}\n",
    "inner.yaml": GOOD + "feed: {lease_second: 3}\n",
    "removed.yaml": GOOD + "skip: true\n",
    "choice.yaml": GOOD + "constraints: {objective: fast}\n",
    "negative.yaml": GOOD + "constraints: {max_usd: -1}\n",
    "nan.yaml": GOOD + "constraints: {max_usd: .nan}\n",
    "cloud.yaml": CLOUD,
    "version.yaml": "schema: stoker.workload/v99\n" + GOOD,
    "twice.yaml": GOOD + "name: y\n",
    "twins.yaml": GOOD + "hyperparameters: {batch-size: 3}\n",
}
# The command, and words of names that the answer has: of a file, a key, a flag, the nearest name.
REFUSED = [
    ("run missing.yaml", ["missing.yaml"]),
    ("run not-yaml.yaml", ["not-yaml.yaml"]),
    ("run no-script.yaml", ["missing.py"]),
    ("run text.yaml", ["text.yaml", "command"]),
    ("run name.yaml", ["name"]),
    ("run empty.yaml", ["name", "command"]),
    ("run key.yaml", ["constraint", "constraints"]),
    ("run inner.yaml", ["lease_second", "lease_seconds"]),
    ("run removed.yaml", ["skip"]),
    ("run choice.yaml", ["objective", "time"]),
    ("run nan.yaml", ["max_usd"]),
    ("run version.yaml", ["version.yaml"]),
    ("run twice.yaml", ["name"]),
    ("run twins.yaml --set hyperparameters.batch_size=4", ["batch-size"]),
    ("run good.yaml --from trian", ["--from", "train"]),
    ("run good.yaml --from train", []),
    ("run good.yaml --set feed.lease_second=3", ["lease_second", "lease_seconds"]),
    ("run good.yaml --set feed.max_errors=lots", ["max_errors"]),
    ("run good.yaml --sett feed.max_errors=0", ["--set"]),
    ("run good.yaml --values none.yaml", ["none.yaml"]),
    ("train", []),
    ("train -- no-such-program", ["no-such-program"]),
    ("train --group dmn=1 -- true", ["dnn"]),
    ("train --group dnn=0 -- true", ["dnn"]),
    ("train --decision good.yaml -- true", ["good.yaml"]),
    ("train cloud.yaml --dry-run --yes", []),
    ("train --max-usd nan -- true", ["max"]),
    ("profile --budget many -- true", ["--budget"]),
    ("profile good.yaml -- python tiny.py", []),
    ("profile --out /proc -- true", ["/proc"]),
    ("decide", []),
    ("decide good.yaml", ["good.yaml"]),
    ("decide --step-seconds 1 --instance-type ml.g5.2xlage", ["ml.g5.2xlarge"]),
    ("decide --step-seconds 1 --instance-type local.c1 --objective fast", ["--objective"]),
    ("decide --step-seconds 1 --instance-type local.c1 --prices none.csv", ["none.csv"]),
    ("evaluate good.yaml --profile none.json", []),
    ("compile kubeflo good.yaml --out p.yaml", ["kubeflow"]),
    ("start sagemaker missing.yaml", ["missing.yaml"]),
    ("schema profil", ["profile"]),
    ("report nothing-here", ["nothing-here"]),
    ("watch nothing-here", ["nothing-here"]),
    ("trian good.yaml", ["train"]),
]


@pytest.mark.parametrize(("command", "words"), REFUSED, ids=[row[0] for row in REFUSED])
def test_bad_input_is_a_usage_error_that_names_it(tmp_path, command, words):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    said = refused(*command.split(), cwd=tmp_path)
    assert [word for word in words if word not in said] == []
    assert len(said.splitlines()) <= 3
    assert not (tmp_path / "runs").exists()


def profile_file(folder: Path) -> Path:
    host = ProfiledHost(instance_type="ml.g5.2xlarge", count=1)
    terms = StepTerms(step_seconds=0.2, accelerator_step_seconds=0.08, global_batch_size=256)
    write_json(folder / "profile.json", Profile(host=host, step=terms))
    return folder / "profile.json"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("schema",), "stoker.profile/v99"),
        (("schema",), "stoker.decision/v1"),
        (("step_second",), 1.0),
        (("step", "step_second"), 1.0),
        (("step", "step_seconds"), "NaN"),
        (("step", "step_seconds"), -1.0),
        (("step", "step_seconds"), "0.2"),
        (("host", "count"), 0),
    ],
)
def test_a_record_of_another_version_or_with_senseless_values_is_refused(tmp_path, path, value):
    file = profile_file(tmp_path)
    document = read(file)
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    text = json.dumps(document)
    file.write_text(text.replace('"NaN"', "NaN"))
    assert path[-1] in refused("decide", "profile.json", cwd=tmp_path)
    assert not (tmp_path / "decision.json").exists()


@pytest.mark.parametrize("record", ["workload", "profile", "decision", "training", "evaluation"])
def test_the_schema_of_a_record_is_json_schema(tmp_path, record):
    schema = json.loads(stoker("schema", record, cwd=tmp_path))
    assert schema["$schema"].startswith("https://json-schema.org/")


def test_the_catalog_has_types_with_prices(tmp_path):
    catalog = as_json("catalog", "--platform", "sagemaker", cwd=tmp_path)
    rows = {each["type"]: each for each in catalog["instances"]}
    assert rows["ml.g5.2xlarge"]["vcpus"] == 8
    assert rows["ml.g5.2xlarge"]["usd_per_hour"] > 0


def test_a_workload_s_keys_come_from_its_file_then_values_then_set(tmp_path):
    (tmp_path / "w.yaml").write_text(CLOUD + "constraints: {max_usd: 1, max_data_hosts: 1}\n")
    (tmp_path / "more.yaml").write_text("constraints: {max_usd: 2, max_data_hosts: 2}\n")
    words = ("--workload", "w.yaml", "--values", "more.yaml", "--set", "constraints.max_usd=3")
    profile_file(tmp_path)
    chosen = as_json("decide", "profile.json", *words, cwd=tmp_path)
    assert chosen["plan"]
    # The last one wins, also where it is wrong.
    words = (*words[:-1], "constraints.max_usd=-3")
    refused("decide", "profile.json", *words, cwd=tmp_path)


def test_init_writes_a_workload_of_a_command_that_a_run_takes(tmp_path):
    (tmp_path / "train.py").write_text("print('hello')\n")
    words = ("init", "project", "--", "python", "train.py", "--lr", "0.1", "--epochs", "3")
    stoker(*words, cwd=tmp_path)
    written = [path for path in (tmp_path / "project").iterdir() if path.suffix == ".yaml"]
    assert len(written) == 1
