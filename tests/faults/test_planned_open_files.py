"""What a dataset holds open is read by as many workers under a plan as in the script: one, or none.

Forked workers share the position of an open file, and what comes through a pipe or socket.
"""

import json
import re

import pytest

from support.cluster import run_script
from support.ordinary_scripts import HEAD

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

# The setup of `held`, and how a sample of 8 bytes is read of it.
KINDS = {
    "binary file": ("held = open(path, 'rb')", "held.seek(8 * index); return held.read(8)"),
    "text file": ("held = open(path)", "held.seek(0); return held.read()[8 * index :][:8]"),
    "no buffer": ("held = open(path, 'rb', 0)", "held.seek(8 * index); return held.read(8)"),
    "gzip": (
        "gzip.open(path + 'z', 'wb').write(open(path, 'rb').read()); held = gzip.open(path + 'z')",
        "held.seek(8 * index); return held.read(8)",
    ),
    "zip archive": (
        "zipfile.ZipFile(path + 'z', 'w').write(path, 'a'); held = zipfile.ZipFile(path + 'z')",
        "return held.read('a')[8 * index :][:8]",
    ),
    "tar archive": (
        "archive = tarfile.open(path + 'z', 'w'); archive.add(path, 'a'); archive.close(); "
        "held = tarfile.open(path + 'z')",
        "return held.extractfile('a').read()[8 * index :][:8]",
    ),
    "copy of a descriptor": (
        "file = open(path, 'rb'); held = io.BufferedReader(io.FileIO(os.dup(file.fileno())))",
        "held.seek(8 * index); return held.read(8)",
    ),
    "descriptor": (
        "held = os.open(path, os.O_RDONLY)",
        "os.lseek(held, 8 * index, os.SEEK_SET); return os.read(held, 8)",
    ),
    "lines of an iterator": (
        "open(path + 'l', 'w').writelines(f'{i:07}\\n' for i in range(64)); "
        "held = map(str.strip, open(path + 'l'))",
        "return next(held)",
    ),
    "database": (
        "held = sqlite3.connect(':memory:', check_same_thread=False); "
        "held.execute('create table t as select 7 as a')",
        "return [index, held.execute('select a + ? from t', [index]).fetchall()]",
    ),
    "pipe": (
        "held, other = os.pipe(); os.write(other, bytes(range(32)) * 32); held = open(held, 'rb')",
        "return held.read(8)",
    ),
    "socket": (
        "held, other = socket.socketpair(); other.sendall(bytes(range(32)) * 32)",
        "return held.recv(8)",
    ),
    "connection": (
        "held, other = multiprocessing.Pipe(); [other.send(i) for i in range(200)]",
        "return held.recv()",
    ),
}

SCRIPT = """\
import gzip, io, multiprocessing, socket, sqlite3, tarfile, tempfile, zipfile
import stoker

path = tempfile.mkdtemp() + "/a"
open(path, "w").writelines(f"{i:07}\\n" for i in range(64))


class Held(Dataset):
    def __init__(self):
        SETUP
        vars(self).update({k: v for k, v in locals().items() if k != "self"})

    def __len__(self):
        return 48

    def __getitem__(self, index):
        held = self.held
        return os.getpid(), self.read(held, index)

    def read(self, held, index):
        READ


for epoch in range(2):
    pids = set()
    for batch in LOADER:
        pids |= {pid for pid, _ in batch}
        show([sample for _, sample in batch])
    show(len(pids), os.getpid() in pids)
"""
LOADERS = {
    "one worker": "DataLoader(Held(), 4, num_workers=1, collate_fn=list)",
    "no worker": "DataLoader(Held(), 4, collate_fn=list)",
    "none, of stoker's class": "stoker.DataLoader(Held(), 4, collate_fn=list)",
    "one that stays": (
        "globals().setdefault('kept', DataLoader("
        "Held(), 4, num_workers=1, collate_fn=list, persistent_workers=True))"
    ),
}
PLANNED = {
    "ORDINARY_IS_FED": "1",
    "STOKER_REPLACE_DATALOADER": "auto",
    "STOKER_WORKERS": json.dumps({"dnn": 3}),
}


def script_of(folder, kind, loader):
    setup, read = KINDS[kind]
    text = SCRIPT.replace("SETUP", setup.replace("; ", "\n        "))
    text = text.replace("READ", read.replace("; ", "\n        ")).replace("LOADER", loader)
    path = folder / "train.py"
    path.write_text(HEAD + text)
    return str(path)


@pytest.mark.parametrize("kind", KINDS)
def test_one_worker_reads_what_is_open_under_a_plan_of_three(kind, tmp_path):
    script = script_of(tmp_path, kind, LOADERS["one worker"])
    expected = run_script({}, script=script).finish()
    trainer = run_script({}, env=PLANNED, script=script)
    assert trainer.finish() == expected
    assert expected[-1] == {"said": ["tuple", "1", "False"]}
    lines = re.findall(r"dataset\.\S+ \(.*\) is open, and 3 workers of the plan", trainer.errors)
    assert len(lines) == 1


@pytest.mark.parametrize("loader", ["no worker", "none, of stoker's class", "one that stays"])
@pytest.mark.parametrize("kind", ["binary file", "connection"])
def test_a_plan_leaves_the_scripts_own_number_of_workers(kind, loader, tmp_path):
    script = script_of(tmp_path, kind, LOADERS[loader])
    expected = run_script({}, script=script).finish()
    trainer = run_script({}, env=PLANNED, script=script)
    assert trainer.finish() == expected


def test_a_loader_without_open_files_has_the_plans_workers(tmp_path):
    loader = "DataLoader(Numbers(), 1, num_workers=1, collate_fn=with_pid)"
    text = (
        "def with_pid(batch):\n    return [(os.getpid(), float(batch[0]))]\n\n\n"
        f"show(len({{pid for batch in {loader} for pid, _ in batch}}))\n"
    )
    path = tmp_path / "train.py"
    path.write_text(HEAD + text)
    assert run_script({}, env=PLANNED, script=str(path)).finish() == [{"said": ["tuple", "3"]}]
