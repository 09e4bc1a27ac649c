"""Whatever a script does to a file that was there before is refused first, and nothing else is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

# What the script does to ckpt/last.pt, which was there before, and what is said of it.
OVERWRITES = [
    "open('ckpt/last.pt', 'w')",
    "open('ckpt/last.pt', 'a')",
    "open('ckpt/last.pt', 'r+b')",
    "os.open(b'ckpt/last.pt', os.O_WRONLY)",
    "pathlib.Path('ckpt/last.pt').write_bytes(b'x')",
    "torch.save({}, 'ckpt/last.pt')",
    "torch.save({}, 'ckpt/last.pt', _use_new_zipfile_serialization=False)",
    "torch.jit.script(torch.nn.Linear(1, 1)).save('ckpt/last.pt')",
    "numpy.save(open('ckpt/last.pt', 'wb'), numpy.ones(2))",
    "numpy.ones(2).tofile('ckpt/last.pt')",
    "from safetensors.torch import save_file; save_file({}, 'ckpt/last.pt')",
    "torch.save({}, 'ckpt/new.pt'); os.replace('ckpt/new.pt', 'ckpt/last.pt')",
    "shutil.copy('own/result.json', 'ckpt/last.pt')",
    "os.symlink('ckpt', 'link'); torch.save({}, 'link/last.pt')",
]
REFUSED = [
    *((statement, "overwrite ckpt/last.pt") for statement in OVERWRITES),
    ("os.remove('ckpt/last.pt')", "remove ckpt/last.pt"),
    ("shutil.rmtree('ckpt')", "remove ckpt/last.pt"),
    ("os.truncate('ckpt/last.pt', 0)", "cut ckpt/last.pt"),
    ("os.rename('ckpt/last.pt', 'ckpt/before.pt')", "rename ckpt/last.pt"),
    ("os.rename('ckpt', 'old')", "rename ckpt"),
    ("os.system('echo > ckpt/last.pt')", "start the program echo"),
    ("subprocess.run(['aws', 's3', 'sync', 'ckpt', 's3://b'])", "start the program aws"),
]
# What the script does before batches are repeated, and what it does then.
ALLOWED = [
    ("", "open('ckpt/last.pt').read()"),
    ("", "torch.save({}, 'ckpt/new.pt'); torch.save({}, 'ckpt/new.pt')"),
    ("torch.save({}, 'log.pt')", "torch.save({}, 'log.pt'); os.remove('log.pt')"),
    ("open('log', 'w').write('x')", "open('log', 'a').write('y'); os.rename('log', 'log.1')"),
    ("os.makedirs('a/b')", "open('a/b/c', 'w').write('x'); shutil.rmtree('a')"),
    ("", "open('own/result.json', 'w').write('x')"),
    ("", "open('empty.lock', 'w')"),
    ("", "open('/dev/null', 'w').write('x'); print('x', file=open(1, 'w', closefd=False))"),
    ("", "[open(os.path.join(tempfile.mkdtemp(), 'x'), 'w').write('x') for _ in '12']"),
    ("", "subprocess.run(['uname'], check=True, capture_output=True)"),
]
FORKED = """
pid = os.fork()
if not pid:
    try:
        open("ckpt/last.pt", "w")
    except Exception as err:
        print(type(err).__name__ + ": " + str(err).splitlines()[0], flush=True)
    os._exit(0)
os.waitpid(pid, 0)
os._exit(0)
"""
OVERWRITTEN = "torch.save({}, 'ckpt/last.pt')"
WORKER = """
from stoker.profile.file_guard import guard_worker
guard_worker()
open("new", "w").write("x")
open("ckpt/last.pt", "w")
"""
CASES = [*(("", after) for after, _ in REFUSED), *ALLOWED]
CASES += [("", FORKED), (WORKER, ""), (OVERWRITTEN, OVERWRITTEN)]
GOOD = "three weeks on 8 GPUs"
# Each case is a process of its own, as an audit hook stays; forked, for torch takes seconds.
SCRIPT = """
import json, os, pathlib, shutil, subprocess, sys, tempfile
import numpy, torch
from stoker.profile.file_guard import FileGuard

def end(what):
    print("about to " + what, flush=True)
    os._exit(0)

def play(number, before, after):
    os.makedirs(f"{number}/ckpt")
    os.chdir(str(number))
    os.mkdir("own")
    for name in ("ckpt/last.pt", "own/result.json"):
        pathlib.Path(name).write_text(sys.argv[2])
    pathlib.Path("empty.lock").touch()
    os.dup2(os.open("output", os.O_WRONLY | os.O_CREAT), 1)
    guard = FileGuard([pathlib.Path("own")])
    guard.listen()
    exec(before)
    guard.arm(end)
    exec(after)
    print("went on", flush=True)

for number, case in enumerate(json.loads(sys.argv[1])):
    pid = os.fork()
    if not pid:
        try:
            play(number, *case)
        except BaseException as err:
            print(repr(err), flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
"""


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    folder = tmp_path_factory.mktemp("played")
    words = [sys.executable, "-c", SCRIPT, json.dumps(CASES), GOOD]
    subprocess.run(words, cwd=folder, check=True, timeout=100)
    return {case: folder / str(number) for number, case in enumerate(CASES)}


def words_of(folder: Path) -> str:
    return (folder / "output").read_text().strip().splitlines()[-1]


@pytest.mark.parametrize(("after", "words"), REFUSED)
def test_what_changes_a_file_that_was_there_is_refused_before_it(played, after, words):
    folder = played["", after]
    assert words_of(folder) == f"about to {words}"
    assert (folder / "ckpt/last.pt").read_text() == GOOD


@pytest.mark.parametrize(("before", "after"), ALLOWED)
def test_reading_and_what_is_new_go_on(played, before, after):
    assert words_of(played[before, after]) == "went on"


def test_a_file_that_was_overwritten_as_is_stays_the_users(played):
    assert words_of(played[OVERWRITTEN, OVERWRITTEN]) == "about to overwrite ckpt/last.pt"


@pytest.mark.parametrize("case", [("", FORKED), (WORKER, "")], ids=["forked", "spawned"])
def test_in_a_worker_of_the_loader_it_is_an_error(played, case):
    folder = played[case]
    words = words_of(folder)
    assert words.startswith("GuardedError")
    assert "the script is about to overwrite ckpt/last.pt while the profile repeats" in words
    assert (folder / "ckpt/last.pt").read_text() == GOOD
