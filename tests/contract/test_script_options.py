"""Options of scripts, read from their source, reach the script as its own defaults and help."""

import json
import subprocess
import sys

import pytest

from stoker.environment import RunEnvironment
from stoker.errors import UsageError
from stoker.parameters import overrides_of, parameters_of
from stoker.project.script_options import options_of, sources_of
from stoker.project.script_options_text import options_text
from stoker.records import Workload
from stoker.records.hyperparameters import arguments, decoded, encoded, values_of
from stoker.workload_file import read_workload

ARGPARSE = """
import argparse, json, os
from pathlib import Path
WIDTH = 1 << 10
parser = argparse.ArgumentParser()
group = parser.add_argument_group("optimizer")
group.add_argument("--learning-rate", "--lr", type=float, default=1e-3,
                   help="step size (default: %(default)s)")
group.add_argument("--weight-decay", type=float, default=0, help="L2 penalty")
parser.add_argument("-b", "--batch-size", type=int, default="64")
parser.add_argument("-k", type=int, default=3)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--optimizer", choices=["adam", "sgd"], default="adam")
parser.add_argument("--depth", type=int, choices=(18, 34), default=18)
parser.add_argument("--no-augment", action="store_true", help="pictures as they are")
parser.add_argument("--keep", dest="kept", action="store_false")
parser.add_argument("--amp", action=argparse.BooleanOptionalAction, default=True,
                    help="mixed precision: 50%% of the memory")
parser.add_argument("--ema", action=argparse.BooleanOptionalAction)
parser.add_argument("--milestones", type=int, nargs="+", default=[30, 60])
parser.add_argument("--betas", type=float, nargs=2, default=(0.9, 0.999))
parser.add_argument("--names", nargs="*", default=["a b", "c"])
parser.add_argument("--resume", help="a checkpoint")
parser.add_argument("--data", type=Path, default=os.environ.get("NOWHERE", "."))
parser.add_argument("--out", type=Path, default="runs/1")
parser.add_argument("--width", type=int, default=WIDTH)
parser.add_argument("--clip", type=float)
parser.add_argument("--shift", type=int, default=-4)
parser.add_argument("--tag", action="append")
parser.add_argument("--debug", type=bool, default=False)
parser.add_argument("--ratio", default=0.25)
parser.add_argument("--crop", type=lambda text: text.split("x"), default="3x4")
parser.add_argument("--eps", type=float, default=1e-8)
parser.add_argument("--no", default="yes")
told = vars(parser.parse_args())
told["weight_decay"] += 0.0
print(json.dumps({k: str(v) for k, v in told.items()}))
"""
CLICK = """
import click, json
@click.command()
@click.option("--lr", default=0.1, help="step size")
@click.option("-n", "--num-layers", type=int, default=4)
@click.option("--optimizer", type=click.Choice(["adam", "sgd"]), default="sgd")
@click.option("--amp/--no-amp", default=False)
@click.option("--verbose", is_flag=True)
@click.option("--seed", type=int)
@click.option("--size", nargs=2, type=int, default=(3, 4))
@click.option("--tag", multiple=True)
def main(**told):
    print(json.dumps({k: str(v) for k, v in told.items()}))
main()
"""
TYPER = """
import json
from pathlib import Path
from typing import Annotated, Optional
import typer
def main(
    lr: Annotated[float, typer.Option(help="step size")] = 0.01,
    num_layers: int = 4,
    out: Path = Path("runs"),
    name: str = typer.Option("small", help="the model"),
    amp: bool = True,
    seed: Optional[int] = None,
):
    print(json.dumps({k: str(v) for k, v in locals().items()}))
typer.run(main)
"""
ABSL = """
import json
from absl import app, flags
flags.DEFINE_float("learning_rate", 1e-4, "step size")
flags.DEFINE_integer("batch_size", 32, "samples of a step")
flags.DEFINE_enum("optimizer", "adam", ["adam", "sgd"], "which one")
flags.DEFINE_bool("debug", False, "say more")
flags.DEFINE_bool("shuffle", True, "shuffles")
flags.DEFINE_string("resume", None, "a checkpoint")
NAMES = ("learning_rate", "batch_size", "optimizer", "debug", "shuffle", "resume")
def main(_):
    print(json.dumps({name: str(flags.FLAGS[name].value) for name in NAMES}))
app.run(main)
"""
HF = """
import json
from dataclasses import dataclass, field
from typing import List, Literal, Optional
from transformers import HfArgumentParser
@dataclass
class Model:
    name: str = field(default="tiny", metadata={"help": "which model"})
    dropout: float = 0.1
    layers: int = 2
    frozen: bool = False
    kind: Literal["a", "b"] = "b"
    sizes: List[int] = field(default_factory=lambda: [1, 2])
    resume: Optional[str] = None
(told,) = HfArgumentParser(Model).parse_args_into_dataclasses()
print(json.dumps({k: str(v) for k, v in vars(told).items()}))
"""
SCRIPTS = {
    "argparse": ARGPARSE,
    "click": CLICK,
    "typer": TYPER,
    "absl": ABSL,
    "transformers": HF,
}


def workload_for(tmp_path, script: str, *more: str, given: tuple[str, ...] = ()) -> Workload:
    file = tmp_path / "w.yaml"
    found = options_of([script], given=given)
    file.write_text(f"name: w\ncommand: [python, train.py]\n{options_text(found)}")
    return read_workload(file, overrides=more)


def words_of(workload: Workload) -> list[str]:
    """The arguments that a launcher writes, after a service that stores texts."""
    told = encoded(values_of(workload.hyperparameters))
    values = {name: decoded(text) for name, text in told.items()}
    return arguments(values, RunEnvironment.of(workload).hyperparameter_forms)


def run(tmp_path, script: str, *words: str) -> dict[str, str]:
    file = tmp_path / "train.py"
    file.write_text(script)
    command = [sys.executable, str(file), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("library", SCRIPTS)
def test_a_script_gets_its_own_defaults(library, tmp_path):
    pytest.importorskip(library)
    workload = workload_for(tmp_path, SCRIPTS[library])
    words = words_of(workload)
    assert len(words) > 5
    assert run(tmp_path, SCRIPTS[library], *words) == run(tmp_path, SCRIPTS[library])


@pytest.mark.parametrize(
    ("library", "params", "told"),
    [
        (
            "argparse",
            ["weight-decay=0.01", "LearningRate=3e-4", "no_augment=true", "amp=false", "ema=True"],
            {"weight_decay": "0.01", "learning_rate": "0.0003", "no_augment": "True"}
            | {"amp": "False", "ema": "True"},
        ),
        (
            "argparse",
            ["milestones=1 2 3", "clip=2", "depth=34", "resume=a b.pt", "keep=true", "k=5"],
            {"milestones": "[1, 2, 3]", "clip": "2.0", "depth": "34", "resume": "a b.pt"}
            | {"kept": "False", "k": "5"},
        ),
        (
            "click",
            ["lr=1", "num-layers=8", "amp=true", "verbose=true", "size=5 6"],
            {"lr": "1.0", "num_layers": "8", "amp": "True", "verbose": "True", "size": "(5, 6)"},
        ),
        ("typer", ["lr=0.5", "amp=false", "seed=7"], {"lr": "0.5", "amp": "False", "seed": "7"}),
        ("absl", ["learning_rate=1", "debug=true"], {"learning_rate": "1.0", "debug": "True"}),
        ("transformers", ["frozen=true", "sizes=7 8"], {"frozen": "True", "sizes": "[7, 8]"}),
    ],
)
def test_a_run_s_parameters_reach_the_script(library, params, told, tmp_path):
    pytest.importorskip(library)
    script = SCRIPTS[library]
    workload = workload_for(tmp_path, script)
    changed = workload_for(tmp_path, script, *overrides_of(params, workload=workload))
    found = run(tmp_path, script, *words_of(changed))
    assert found == {**run(tmp_path, script), **told}


def test_each_option_is_a_parameter_with_its_kind_help_and_default(tmp_path):
    workload = workload_for(tmp_path, ARGPARSE)
    known = {p.hyperparameter: p for p in parameters_of(workload)}
    told = {name: (p.kind, p.default(workload)) for name, p in known.items() if name}
    assert told["learning-rate"] == ("number", 0.001)
    assert told["weight-decay"] == ("number", 0.0)
    assert told["batch-size"] == ("integer", 64)
    assert told["no-augment"] == ("boolean", False)
    assert told["amp"] == ("boolean", True)
    assert told["milestones"] == ("string", "30 60")
    assert told["clip"] == ("string", "")
    assert told["shift"] == ("integer", -4)
    assert known["learning-rate"].text == "step size"
    assert known["amp"].text == "mixed precision: 50% of the memory"
    assert known["resume"].text == "a checkpoint; empty: not passed."
    assert known["optimizer"].choices == ("adam", "sgd")
    epochs = next(p for p in parameters_of(workload) if p.name == "epochs")
    assert epochs.default(workload) == 3


@pytest.mark.parametrize(
    ("param", "words"),
    [
        ("optimizer=adagrad", "use adam, sgd"),
        ("depth=50", "use 18, 34"),
        ("clip=much", "expected a number"),
        ("batch-size=1.5", "expected a whole number"),
        ("no-augment=perhaps", "use true, false"),
        ("ema=perhaps", "use true, false"),
        ("learning-rat=1", "no parameter learning-rat"),
        ("tag=x", "no parameter tag"),
    ],
)
def test_a_value_that_the_script_would_refuse_is_refused_before(param, words, tmp_path):
    workload = workload_for(tmp_path, ARGPARSE)
    with pytest.raises(UsageError) as raised:
        overrides_of([param], workload=workload)
    assert words in f"{raised.value.what} {raised.value.fix}"


def test_a_whole_number_says_how_it_becomes_a_fraction(tmp_path):
    file = tmp_path / "w.yaml"
    file.write_text("name: w\ncommand: [python]\nhyperparameters: {weight-decay: 0}\n")
    with pytest.raises(UsageError, match=r"write 0\.0 there"):
        overrides_of(["weight-decay=0.01"], workload=read_workload(file))


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import hydra", "hydra"),
        ("import fire\nfire.Fire(main)", "fire"),
        ("import getopt, sys\ngetopt.getopt(sys.argv[1:], 'e:', ['epochs='])", "getopt"),
        ("from optparse import OptionParser", "optparse"),
        ("from configargparse import ArgParser\nArgParser().add('--lr')", "configargparse"),
        ("from docopt import docopt", "docopt"),
        ("import tyro", "tyro"),
        ("from lightning.pytorch.cli import LightningCLI\nLightningCLI()", "LightningCLI"),
        ("from pytorch_lightning import cli\ncli.LightningCLI(Model)", "LightningCLI"),
        ("import sys\nlr = float(sys.argv[1])", "sys.argv"),
        ("import argparse\nargparse.ArgumentParser().add_argument('++lr')", "++lr"),
        ("import argparse\nargparse.ArgumentParser().add_argument('-lr')", "-lr"),
    ],
)
def test_options_in_another_form_are_named_and_never_passed(source, name):
    found = options_of([source])
    assert found.options == ()
    assert [line.partition(":")[0] for line in found.left_out] == [name]
    assert "positional" not in "".join(found.left_out)
    assert f"- {name}: " in options_text(found)


def test_a_script_with_options_may_also_look_at_its_words():
    source = f"import sys\n{ARGPARSE}\nprint(sys.argv)\n"
    assert options_of([source]) == options_of([ARGPARSE])


def test_what_is_not_read_is_named_with_its_reason():
    found = options_of([ARGPARSE, "import hydra\nparser.add_argument('config')\n"])
    assert [line.partition(":")[0] for line in found.left_out] == ["config", "--tag", "hydra"]
    why = {option.name: option.why for option in found.options if option.why}
    assert why == {
        "betas": "its default, (0.9, 0.999), would arrive as a list",
        "data": "its default is computed",
        "debug": "type=bool takes every text for true",
        "ratio": "its default, 0.25, would arrive as a text",
    }


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (["--learning-rate", "0.5"], "learning-rate"),
        (["--lr=0.5"], "learning-rate"),
        (["-b", "8"], "batch-size"),
        (["--batch", "8"], "batch-size"),
        (["--no-amp"], "amp"),
    ],
)
def test_what_the_command_sets_stays_the_command_s(given, name):
    found = options_of([ARGPARSE], given=given)
    assert name not in [option.name for option in found.options]
    assert f"--{name}: the command sets it" in found.left_out


def test_options_of_a_module_beside_the_script_are_read(tmp_path):
    (tmp_path / "train.py").write_text("from options import parser\nparser().parse_args()\n")
    (tmp_path / "options.py").write_text(ARGPARSE)
    sources = sources_of(["python", "train.py"], tmp_path)
    assert len(options_of(sources).options) == len(options_of([ARGPARSE]).options)


@pytest.mark.parametrize("source", ["", "x = (", "print(1)", "\0", "def f(:\n"])
def test_a_script_without_options_has_none(source):
    assert options_text(options_of([source])) == ""


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ("hyperparameters: {a: 1}\noptions: {b: {}}", "no hyperparameter b"),
        ("hyperparameters: {a: 1}\noptions: {a: {type: flag}}", "neither true nor false"),
        ("hyperparameters: {a: x}\noptions: {a: {type: float}}", "and x is not a number"),
        ("hyperparameters: {a: x}\noptions: {a: {choices: [y]}}", "x is not possible"),
        ("hyperparameters: {a: x}\noptions: {a: {type: bolean}}", "type"),
    ],
)
def test_an_option_that_its_value_contradicts_is_refused(keys, words, tmp_path):
    file = tmp_path / "w.yaml"
    file.write_text(f"name: w\ncommand: [python]\n{keys}\n")
    with pytest.raises(UsageError, match=words):
        read_workload(file)
