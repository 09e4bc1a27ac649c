import contextlib
import inspect
import re
import shlex
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import typer.main

from stoker.cli.app import PANELS, STEP_VERBS, app_for
from stoker.cli.main import with_step
from stoker.cli.train import train_verb
from support.command import process, stoker, succeeds

ROOT = Path(__file__).parents[2]
# Where Kubeflow is.
REACH = {"--host", "--namespace", "--token-file", "--ca-file"}

STEP = {"--param", "--executor-input"}
EVERY = {"--set", "--values", "--json", "--debug"}
OF_STEP = EVERY | STEP | {"--out", "--summary"}


def flags(words: str) -> set[str]:
    return {f"--{word}" for word in words.split()}


VERBS = {
    "run": EVERY | flags("from group replace-dataloader prices yes"),
    "profile": OF_STEP
    | flags("budget copy training-job instance-type region platform yes find package"),
    "decide": OF_STEP
    | flags("workload objective max-usd-per-hour prices group as cpu-speed platform report")
    | flags("instance-type step-seconds accelerator-step-seconds vcpus-needed calibrate package")
    | flags("memory branch"),
    "train": EVERY
    | flags("platform decision group replace-dataloader dry-run name out summary model prices")
    | flags("max-usd executor-input yes"),
    "evaluate": EVERY
    | flags("profile decision training champion report out summary executor-input"),
    "report": flags("scaling compare json debug"),
    "catalog": flags("platform prices json debug"),
    "schema": flags("debug"),
    "watch": flags("once json debug"),
    "doctor": EVERY | flags("peer cluster aws"),
    "init": flags("script example platform ci from-training-job region debug"),
    "compile": EVERY | flags("out components"),
    "upload": REACH | EVERY | flags("yes check versions back-to alias"),
    "start": REACH | EVERY | flags("yes param version wait"),
    "schedule": REACH | EVERY | flags("cron name time-zone param fresh yes"),
    "status": REACH | flags("workload json debug"),
    "stop": REACH | flags("workload json yes debug"),
    "prune": EVERY | flags("older-than-days delete yes"),
    "launch": set(),
}

# Only steps of pipelines use them: they work, and no help shows them.
HIDDEN = {
    "profile": STEP | flags("find package"),
    "decide": STEP | flags("package branch"),
    "train": {"--executor-input"},
    "evaluate": {"--executor-input"},
}

HEAVY = ("torch numpy zmq rich jinja2 boto3 kfp sagemaker kubernetes yaml").split()  # noqa: SIM905


def verbs():
    return typer.main.get_command(app_for(*VERBS)).commands


# They start, change, stop or delete something that costs, or that others use.
ASKING = {"run", "profile", "train", "upload", "start", "schedule", "stop", "prune"}


def test_each_verb_that_may_ask_takes_yes_and_no_other_does():
    flags_of = {
        name: {option for each in verb.params for option in each.opts}
        for name, verb in verbs().items()
    }
    assert {name for name, flags in flags_of.items() if "--yes" in flags} == ASKING


def test_verbs_and_flags_equal_the_list():
    found = {
        name: {flag for param in command.params for flag in param.opts if flag.startswith("--")}
        for name, command in verbs().items()
    }
    assert found == VERBS


def test_hidden_flags_equal_the_list_and_are_documented():
    found = {
        name: {param.opts[0] for param in command.params if getattr(param, "hidden", False)}
        for name, command in verbs().items()
    }
    assert {name: flags for name, flags in found.items() if flags} == HIDDEN
    page = (ROOT / "components" / "README.md").read_text()
    assert set().union(*HIDDEN.values()) <= set(re.findall(r"`(--[a-z-]+)", page))


def test_verbs_of_steps_alone_work_and_are_not_listed(tmp_path):
    assert not STEP_VERBS.keys() & VERBS.keys()
    for name, line in STEP_VERBS.items():
        help_text = succeeds(*name.split(), "--help", cwd=tmp_path).stdout
        assert line in help_text.replace("\n ", "")
        assert f"Usage: stoker {name} " in help_text
    words = re.findall(r"^  (\w+) ", process("--help", cwd=tmp_path).stdout, flags=re.MULTILINE)
    assert not {"compare", "step"} & set(words)


@pytest.mark.parametrize(
    ("typed", "step"),
    [
        ("train --finish --out=f", "step finish"),
        ("train w.yaml --run-id 1", "step train"),
        ("train w.yaml --run-id=1 -- python --always", "step train"),
        ("train --executor-input {}", "step train"),
        ("train w.yaml --param epochs=3", "step train"),
        ("evaluate --gate-of=e.json --remember=m", "step gate"),
        ("evaluate w.yaml --always", "step evaluate"),
        ("status sagemaker mnist --besides 1", "step alone"),
        ("step gate --gate-of=e.json", "step gate"),
        ("train w.yaml -- python t.py --always --finish", "train"),
        ("evaluate w.yaml --report always", "evaluate"),
        ("status sagemaker mnist", "status"),
        ("compare --memory m", "compare"),
    ],
)
def test_what_an_earlier_version_compiled_reaches_the_verb_of_its_step(typed, step):
    verb, *words = with_step(typed.split())
    assert verb == step
    assert words[-1] == typed.split()[-1]


def test_the_verb_that_trains_is_short_and_has_few_parameters():
    file = ROOT / "src" / "stoker" / "cli" / "train.py"
    assert len(file.read_text().splitlines()) <= 120
    assert len(inspect.signature(train_verb).parameters) <= 12


def test_the_list_of_verbs_shows_the_whole_first_line_of_the_help_of_each(tmp_path):
    lines = process("--help", cwd=tmp_path).stdout.splitlines()
    first_lines = {name: verb.help.partition("\n")[0] for name, verb in verbs().items()}
    assert [title.rstrip(":") for title in lines if title.endswith(":")] == [*PANELS, "Options"]
    assert {f"  {name:<8}  {words}" for name, words in first_lines.items()} <= set(lines)
    assert max(map(len, lines)) <= 80


def test_each_example_is_a_command_line_that_the_verb_takes(tmp_path):
    for name, command in verbs().items():
        _, title, *examples = command.epilog.splitlines()
        assert (title, bool(examples)) == ("Examples:", True), name
        for example in examples:
            assert len(example) <= 78, example
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


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "launch"])
def test_every_verb_explains_itself(tmp_path, verb):
    done = succeeds(verb, "--help", cwd=tmp_path)
    hidden = HIDDEN.get(verb, set())
    assert all(f"{flag} " in done.stdout for flag in VERBS[verb] - hidden)
    assert not any(f" {flag} " in done.stdout for flag in hidden)
    assert max(map(len, done.stdout.splitlines())) <= 80


BOTH = "profile good.yaml -- python"
EITHER = "stoker profile good.yaml or stoker profile"
DECIDE = "decide --step-seconds 1 --instance-type"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("run missing.yaml", ["no such file: missing.yaml", "where:", "try:"]),
        ("run not-yaml.yaml", ["not YAML", "not-yaml.yaml:3"]),
        ("run no-script.yaml", ["no such script: missing.py"]),
        ("run good.yaml --from trian", ["--from trian", "did you mean train?"]),
        ("run good.yaml --from train", ["no earlier run"]),
        ("run good.yaml --set feed.credit=3", ["--set feed.credit", "credits?"]),
        ("train -- no-such-program", ["command not found: no-such-program"]),
        ("train", ["no workload and no command"]),
        ("train --group dmn=1 -- true", ["did you mean dnn?"]),
        ("profile --out /proc/p.json -- true", ["cannot write", "another file with --out"]),
        ("profile --budget 99999999999 -- true", ["--budget\n", "86400"]),
        ("profile --budget 5s -- true", ["--budget': not a number", "--budget 5 -- true"]),
        ("profile --budget=2min -- true", ["try:", "--budget 120 -- true"]),
        ("run good.yaml --set feed.max_errors=5%", ["found '5%'", "try:   max_errors: 0.05"]),
        ("profile --copy cloud.yaml", ["--copy cannot be used on sagemaker"]),
        ("decide", ["no profile to decide on"]),
        ("decide good.yaml", ["expected a profile in JSON, found a workload", "--workload"]),
        ("run text.yaml", ["text.yaml:2", "try:   command: [python, train.py, --lr]"]),
        ("run number.yaml", ["command[1]", 'try:   in quotes: "1"']),
        ("run name.yaml", ["lower-case letters, digits and", "name: my-digits"]),
        ("run -- python tiny.py", ["takes a workload", "try:   stoker init --script tiny.py"]),
        ("compile sagemaker -- true", ["not a command", "stoker init --script train.py"]),
        ("run tiny.py", ["try:   stoker init --script tiny.py"]),
        ("run empty.yaml", ["at least the keys name and command", "stoker init --script"]),
        ("profile tiny.py", ["try:   stoker profile -- python tiny.py"]),
        (f"{BOTH} tiny.py", ["a workload cannot be used with a command", f"{EITHER} -- python"]),
        ("profile --platform lokal -- true", ["mean local?", "--platform\n"]),
        ("profile --set profile.budget_seconds=1 -- true", ["where: --set pr"]),
        (f"{DECIDE} local.c1 --objective fast", ["where: --objective\n", "cost, time"]),
        (
            f"{DECIDE} ml.g5.2xlage",
            ["did you mean ml.g5.2xlarge? Or add it with constraints.prices_file or --prices"],
        ),
        ("train --group dnn=local.c99:1 -- true", ["this machine has"]),
        ("train --group data=local.c1:1 -- true", ["--group data=local.c1:1:1"]),
        ("schema profil", ["did you mean profile?"]),
        ("report nothing-here", ["no run in nothing-here"]),
        ("watch nothing-here", ["no run nothing-here"]),
    ],
)
def test_bad_input_gets_three_lines_and_the_usage_exit_code(tmp_path, command, words):
    good = "name: x\ncommand: [python, -c, pass]\n"
    files = {
        "good.yaml": good,
        "not-yaml.yaml": "name: x\ncommand: [a\n",
        "no-script.yaml": "name: x\ncommand: [python, missing.py]\n",
        "cloud.yaml": good + "platform: sagemaker\n",
        "text.yaml": "name: x\ncommand: python train.py --lr\n",
        "number.yaml": "name: x\ncommand: [python, 1]\n",
        "name.yaml": "name: My Digits!\ncommand: [python]\n",
        "tiny.py": "pass\n",
        "empty.yaml": "",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    is_first = command == "run missing.yaml"
    done = (process if is_first else stoker)(*command.split(), cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.strip().splitlines()) <= 3
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


def test_a_profile_says_first_that_the_script_writes_its_files_and_what_is_kept_of_it(
    tmp_path, monkeypatch
):
    interrupted = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("stoker.run.profiling.profile_and_keep", interrupted)
    done = stoker("profile", "--", "true", cwd=tmp_path)
    assert done.returncode == 130
    first, *_, stopped, kept, again = done.stderr.splitlines()
    assert first == (
        "the command runs for real and writes its files; --copy runs it in a copy of this folder"
    )
    assert stopped == "stopped before there was a verdict"
    assert kept.startswith("kept:  runs/true-profile-")
    assert again == "again: stoker profile -- true"


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--dry-run", "--group", "dnn=ml.foo:1", "--", "true"],
        ["run", "w.yaml"],
        ["profile", "w.yaml"],
    ],
)
def test_a_type_of_a_cloud_is_not_taken_for_this_machine_without_a_word(tmp_path, arguments):
    today = "cluster: {dnn: {instance_type: ml.foo, count: 1}}\n"
    (tmp_path / "w.yaml").write_text(f"name: x\nplatform: local\ncommand: ['true']\n{today}")
    done = stoker(*arguments, cwd=tmp_path)
    assert done.stderr.count("note: ml.foo is not started: the platform is local") == 1


def test_bash_completes_what_is_installed():
    stoker_path = Path(sys.executable).with_name("stoker")
    script = f"""
source <(_STOKER_COMPLETE=source_bash {stoker_path})
for words in "stoker tra" "stoker start k" "stoker train --gr" "stoker train --run-i"; do
    COMP_WORDS=($words) COMP_CWORD=$(( $(wc -w <<<"$words") - 1 ))
    _stoker_completion {stoker_path}
    echo "${{COMPREPLY[@]}}"
done
"""
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=150, check=True
    )
    assert done.stdout.splitlines() == ["train", "kubeflow", "--group", ""]
