"""A command answers wrong input and broken surroundings with words and exit code 2, never a bug."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import termios
from pathlib import Path
from unittest.mock import Mock

import pytest

from stoker.cli.main import main, run
from stoker.records import Training, read_json
from stoker.run.command_lines import reproducing
from support.command import process, stoker

CLI = [sys.executable, "-m", "stoker.cli"]
PROFILED = ["decide", "--instance-type", "ml.g5.xlarge", "--step-seconds", "1"]


@pytest.mark.parametrize("verb", ["train", "profile", "run"])
@pytest.mark.parametrize("value", ["--", "yes", "--yes", "w.yaml"])
def test_an_option_that_needs_a_value_does_not_swallow_the_dashes(verb, value, capsys):
    words = ["python", "train.py", "--epochs", "1"]
    assert run([verb, "--replace-dataloader", value, *words]) == 2
    said = capsys.readouterr().err
    assert f"--replace-dataloader needs a value, not {value}" in said
    assert "one of auto, true, false" in said


def test_an_option_of_the_script_may_have_the_same_name(capsys):
    run(["train", "--set", "nothing=1", "--", "python", "no.py", "--replace-dataloader", "x"])
    assert "needs a value" not in capsys.readouterr().err


def test_a_report_names_the_whole_command_that_makes_it_again():
    typed = ["run", "a b.yaml", "--group", "dnn=local.c1:1", "--yes", "--from", "train", "--json"]
    assert reproducing(typed) == "stoker run 'a b.yaml' --group dnn=local.c1:1"
    assert reproducing(["run", "w.yaml", "--from=train", "--set", "a=1"]) == (
        "stoker run w.yaml --set a=1"
    )


@pytest.mark.parametrize(
    ("verb", "folder", "script", "words"),
    [
        ("train", b".", b"b\xffd.py", r"not UTF-8: b\udcffd.py"),
        ("train", b"n\xff", b"q.py", "this folder is not UTF-8"),
        ("profile", b"n\xff", b"q.py", "this folder is not UTF-8"),
    ],
)
def test_a_name_that_is_not_utf8_is_a_usage_error(tmp_path, verb, folder, script, words):
    place = tmp_path / os.fsdecode(folder)
    place.mkdir(exist_ok=True)
    (place / os.fsdecode(script)).write_text("")
    done = stoker(verb, "--", "python", os.fsdecode(script), cwd=place)
    assert done.returncode == 2
    assert words in done.stderr


def refuse(**_: object) -> None:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@pytest.mark.parametrize(
    ("out", "words"),
    [(".", "it is a folder"), ("file/x.json", "is not a folder"), ("shut", "Permission denied")],
)
@pytest.mark.parametrize(
    "command",
    [
        ["profile", "--out", "OUT", "--", "python", "q.py"],
        [*PROFILED, "--out", "OUT"],
        [*PROFILED, "--report", "OUT"],
        ["train", "--out", "OUT", "--", "python", "q.py"],
        ["train", "--summary", "OUT", "--", "python", "q.py"],
        ["evaluate", "w.yaml", "--out", "OUT"],
        ["compile", "kubeflow", "w.yaml", "--out", "OUT"],
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_an_output_that_cannot_be_written_is_found_before_the_work(
    tmp_path, monkeypatch, capsys, command, out, words
):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    Path("q.py").write_text("raise SystemExit('it began')")
    if out == "shut":
        # Root may write everywhere.
        monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    assert run([out if word == "OUT" else word for word in command]) == 2
    assert words in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "q.py"]


def test_what_only_prints_ends_quietly_when_its_reader_goes():
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*CLI, "catalog"], **pipes) as catalog:
        # Before it has printed a line, so that nothing of it is in a buffer of the pipe.
        catalog.stdout.close()
        errors = catalog.stderr.read()
        assert (catalog.wait(150), errors) == (0, b"")


PRINTS_ON = """
import pathlib, time
print("step 0", flush=True)
while not pathlib.Path("gone").exists():
    time.sleep(0.01)
for n in range(1, 20):
    print("step", n, flush=True)
    time.sleep(0.01)
# Longer than it takes the bar to be drawn again.
time.sleep(1.0)
pathlib.Path("done").touch()
"""


def test_a_training_goes_on_when_the_reader_of_its_output_goes(tmp_path):
    (tmp_path / "q.py").write_text(PRINTS_ON)
    command = [*CLI, "train", "--out", "t.json", "--", sys.executable, "q.py"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, cwd=tmp_path, **pipes) as train:
        train.stdout.readline()
        train.stdout.close()
        (tmp_path / "gone").touch()
        assert train.wait(150) == 0
    assert (tmp_path / "done").exists()
    assert (tmp_path / "t.json").exists()


def test_a_training_goes_on_when_its_terminal_goes(tmp_path):
    (tmp_path / "q.py").write_text(PRINTS_ON)
    master, slave = os.openpty()
    # With a size, so that the bar is drawn, too.
    termios.tcsetwinsize(slave, (24, 100))
    train = subprocess.Popen(
        [*CLI, "train", "--", sys.executable, "q.py"],
        cwd=tmp_path,
        env={**os.environ, "TERM": "xterm"},
        **dict.fromkeys(("stdin", "stdout", "stderr"), slave),
        # As `trap "" HUP`, nohup and disown leave it: without a signal, only writes fail.
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
        start_new_session=True,
    )
    os.close(slave)
    with train:
        shown = b""
        while b"step 0" not in shown:
            shown += os.read(master, 1 << 16)
        os.close(master)
        (tmp_path / "gone").touch()
        assert train.wait(150) == 0
    assert (tmp_path / "done").exists()
    (record,) = tmp_path.glob("runs/*/training.json")
    assert read_json(record, Training).status == "succeeded"


def printed_to(stdout):
    words, pipe = [*CLI, "catalog"], subprocess.PIPE
    return subprocess.run(words, stdout=stdout, stderr=pipe, text=True, timeout=150)


def test_what_only_prints_ends_quietly_when_its_terminal_goes():
    master, slave = os.openpty()
    os.close(master)
    printed = printed_to(slave)
    os.close(slave)
    assert (printed.returncode, printed.stderr) == (0, "")


def test_output_that_another_program_made_non_blocking_is_whole():
    reading, writing = os.pipe()
    # Less than the document has.
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(writing, False)
    with subprocess.Popen([*CLI, "catalog", "--json"], stdout=writing) as printed:
        os.close(writing)
        with open(reading) as stream:
            document = json.load(stream)
        assert printed.wait(150) == 0
    assert document["platform"] == "sagemaker"


@pytest.mark.usefixtures("forked")
def test_a_training_whose_record_cannot_be_written_has_not_failed(tmp_path):
    # What was a folder when it began is a file when it ends.
    script = "import pathlib; p = pathlib.Path('out'); p.rmdir(); p.touch()"
    (tmp_path / "out").mkdir()
    done = process("train", "--out", "out/t.json", "--", sys.executable, "-c", script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (told,) = [
        line for line in done.stderr.splitlines() if "no record of this training run" in line
    ]
    assert "cannot write out/t.json" in told


def test_what_only_prints_says_that_the_disk_is_full():
    with Path("/dev/full").open("wb") as full:
        printed = printed_to(full)
    assert printed.returncode == 2
    words = "error: cannot write the output: No space left on device"
    assert printed.stderr.splitlines() == [words, "try:   free some space"]


def test_a_training_goes_on_when_the_disk_of_its_output_is_full(tmp_path):
    (tmp_path / "q.py").write_text("print('step 1')\n")
    command = [*CLI, "train", "--out", "a/b/t.json", "--", sys.executable, "q.py"]
    with Path("/dev/full").open("wb") as full:
        assert subprocess.call(command, cwd=tmp_path, stdout=full, stderr=full, timeout=150) == 0
    assert (tmp_path / "a" / "b" / "t.json").exists()


@pytest.mark.parametrize("once", [["--once"], []])
@pytest.mark.parametrize(
    ("what", "words"), [(".", "is not a run"), ("q.py", "is not the log of a run")]
)
def test_watch_refuses_what_is_no_run(tmp_path, what, words, once):
    (tmp_path / "q.py").write_text("print('hello')\n")
    done = stoker("watch", str(tmp_path / what), *once, cwd=tmp_path)
    assert (done.returncode, words in done.stderr) == (2, True)


PROFILE = ["profile", "--budget", "9", "python", "t.py", "--epochs", "3"]
NO_SUCH_OPTION = (
    "error: no such option: --epochs\ntry:   stoker profile --budget 9 -- python t.py --epochs 3\n"
)
TRAIN = ["train", "--group=dnn=1", "--json", "./t.py", "-x"]


@pytest.mark.parametrize(
    ("arguments", "code", "out", "err"),
    [
        ([], 0, "Start here:", ""),
        (["train", "-h"], 0, "Usage: stoker train", ""),
        (["--version"], 0, "stoker 0.", ""),
        (["help", "train"], 0, "Usage: stoker train", ""),
        (["--verson"], 2, "", "no such option: --verson (Possible options: --version)"),
        (["nonsense"], 2, "", "try:   stoker --help"),
        (["trian", "w.yaml"], 2, "", "error: no such command 'trian'. Did you mean 'train'?"),
        (["train", "w.yaml", "--epochs", "3"], 2, "", "try:   stoker train --help"),
        # A command whose options would be stoker's: it begins after `--`.
        (PROFILE, 2, "", NO_SUCH_OPTION),
        (TRAIN, 2, "", "try:   stoker train --group=dnn=1 --json -- ./t.py -x\n"),
        (["profile", "sh", "-x"], 2, "", "try:   stoker profile -- sh -x\n"),
        (["profile", "--epochs", "3", "t.py"], 2, "", "try:   stoker profile --help"),
        # A workload's name with a slip is no command.
        (["train", "work/mnist", "--epochs", "3"], 2, "", "try:   stoker train --help"),
        (["train", "MNIST.YAML", "--epochs", "3"], 2, "", "try:   stoker train --help"),
        (["train", "--dry-rn", "--", "./t.py"], 2, "", "(Possible options: --dry-run)"),
        (["schema", "training"], 0, '"$schema": "https://json-schema.org/', ""),
        (["schema"], 0, "workload   A training command with its inputs", ""),
        (["step"], 0, "  stoker step gate      Exit with 3 if an evaluation did not pass", ""),
        (["step", "--help"], 0, "  stoker step train     Train on the cluster that a pipeline", ""),
        (["step", "-h"], 0, "  stoker compare        Compare what a pipeline's run", ""),
        (["step", "gate", "--help"], 0, "Usage: stoker step gate", ""),
        (["step", "tarin"], 2, "", "error: no such command 'step tarin'"),
    ],
)
def test_the_command_line_explains_itself(capsys, arguments, code, out, err):
    assert run(arguments) == code
    printed = capsys.readouterr()
    assert out in printed.out
    assert err in printed.err
    assert "error: Usage" not in printed.err


@pytest.mark.usefixtures("forked")
def test_shared_cores_are_said_on_the_terminal(tmp_path):
    groups = ["--group", "dnn=local.c1:1", "--group", "data=local.c999:1:1"]
    done = process("train", *groups, "--", "python", "-c", "pass", cwd=tmp_path)
    warning = "warning: dnn/algo-2: hosts share cores: its times cannot be compared with others"
    assert done.stderr.count(warning) == 1, done.stderr


def test_ctrl_c_while_the_parser_is_imported_ends_without_a_word(monkeypatch, capsys):
    monkeypatch.setitem(main.__globals__, "run", Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setitem(main.__globals__, "guard_standard_streams", lambda _: None)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["stoker", "doctor"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert capsys.readouterr() == ("", "")


INTERRUPTED = """
import os, signal, sys
class Finder:
    def find_spec(self, name, *rest):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from stoker.cli import main
main()
"""


def interrupted(module, **how):
    words = [sys.executable, "-c", INTERRUPTED, module]
    return subprocess.run(words, capture_output=True, text=True, timeout=150, **how)


@pytest.mark.parametrize("module", ["stoker.cli.main", "stoker.errors", "typer", "stoker.cli.app"])
def test_ctrl_c_while_stoker_is_imported_is_no_traceback(module):
    # Whatever follows is `stoker MODULE`, which it does not come to.
    done = interrupted(module)
    assert done.returncode in (-signal.SIGINT, 130)
    assert "Traceback" not in done.stderr


def test_a_process_that_ignores_ctrl_c_still_does():
    # As a shell's background jobs do.
    done = interrupted("typer", preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    assert (done.returncode, "no such command" in done.stderr) == (2, True)
