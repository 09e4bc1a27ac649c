import contextlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from stoker.cli.parser import app
from support.command import process, succeeds

ROOT = Path(__file__).parents[2]
EVERY = {"--set", "--values", "--json"}


def flags(words: str) -> set[str]:
    return {f"--{word}" for word in words.split()}


VERBS = {
    "run": EVERY | flags("from group replace-dataloader prices yes"),
    "profile": EVERY | flags("budget training-job platform out yes"),
    "decide": EVERY
    | flags("workload objective max-usd-per-hour prices group as platform")
    | flags("instance-type step-seconds accelerator-step-seconds vcpus-needed out")
    | flags("executor-input"),
    "train": EVERY
    | flags("platform decision group replace-dataloader dry-run name out prices max-usd yes"),
    "evaluate": EVERY | flags("profile decision training champion report out"),
    "report": flags("json"),
    "watch": flags("json"),
    "compile": EVERY | flags("out"),
    "upload": EVERY | flags("yes check diff"),
    "start": EVERY | flags("yes param wait"),
    "schedule": EVERY | flags("cron time-zone param delete"),
    "status": EVERY | flags("workload"),
    "stop": EVERY | flags("workload yes"),
    "init": flags("from-training-job json"),
    "doctor": EVERY,
    "catalog": flags("platform prices json"),
    "schema": flags("json"),
    "launch": set(),
}

HEAVY = ("torch numpy zmq rich jinja2 boto3 kfp sagemaker kubernetes yaml").split()  # noqa: SIM905


def verbs():
    commands = typer.main.get_command(app).commands
    return {name: command for name, command in commands.items() if not command.hidden}


def test_verbs_and_flags_equal_the_list():
    found = {
        name: {flag for param in command.params for flag in param.opts if flag.startswith("--")}
        for name, command in verbs().items()
    }
    assert found == VERBS


def test_verbs_of_steps_alone_work_and_are_not_listed(tmp_path):
    assert "Usage: stoker step train " in succeeds("step", "train", "--help", cwd=tmp_path).stdout
    words = re.findall(r"^  (\w+) ", process("--help", cwd=tmp_path).stdout, flags=re.MULTILINE)
    assert "step" not in words


def test_each_example_is_a_command_line_that_the_verb_takes(tmp_path):
    for name, command in verbs().items():
        _, _, text = (command.help or "").partition("\b\n")
        examples = text.splitlines()
        assert examples, name
        for example in examples:
            shown = re.split(r" [|>] ", example)[-1 if example.endswith("watch -") else 0]
            stoker_word, verb, *words = shlex.split(shown)
            assert (stoker_word, verb) == ("stoker", name)
            if name != "launch":
                # Raises an error of the parser for an option or an argument that there is not.
                with contextlib.chdir(tmp_path):
                    command.make_context(verb, words)


@pytest.mark.parametrize(
    ("code", "shown"),
    [("from stoker.cli.main import run; run(['--help'])", VERBS), ("import stoker", ())],
)
def test_help_names_every_verb_and_imports_nothing_heavy(code, shown):
    code += f"; import sys; print('HEAVY', [m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=150, check=True
    )
    assert "HEAVY []" in done.stdout
    assert all(verb in done.stdout for verb in shown)
