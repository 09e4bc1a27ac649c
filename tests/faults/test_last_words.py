"""The last words of `stoker train` name why a training was not fed, and what to do."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from stoker.records import FeedSettings
from support.command import stoker
from support.forked_tree import forking
from support.local_job import LocalJob
from support.other_python import other_version, python_without, with_stoker, with_version

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

HEAD = """
import os, shutil, signal, socket, sys, types
import torch
from torch.utils.data import DataLoader, Dataset

HERE = os.path.dirname(os.path.abspath(__file__))

class Base(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.rand(4)

class Rebuilt(Base):
    def __getstate__(self):
        return {"a": 1}

def in_memory(name, text):
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(text, vars(module))
    for value in vars(module).values():
        if isinstance(value, type):
            value.__module__ = name
    return module

def batches(dataset, **more):
    return DataLoader(dataset, **{"batch_size": 4, "num_workers": 1, **more})

def train(loader):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for batch in loader:
        model(getattr(batch, "x", batch)).sum().backward()
        optimizer.step()
"""
TENSORS = "(torch.rand(4) for _ in range(64))"
CASES: dict[str, tuple[str, Sequence[str]]] = {
    "a module in the trainer's memory": (
        'class D(Base):\n    kind = in_memory("made_up", "class T: pass").T()\n'
        "    def __init__(self): self.kind = D.kind\ntrain(batches(D()))",
        ["has no module made_up", "put made_up into a file"],
    ),
    "a module that only the trainer has": (
        'in_memory("only_here", "")\nclass D(Base):\n'
        "    def __getitem__(self, index):\n        import only_here\ntrain(batches(D()))",
        ["No module named 'only_here'", "install it in the image of the data hosts"],
    ),
    "a library of the system": (
        "class D(Rebuilt):\n    def __setstate__(self, state):\n"
        "        raise ImportError('libGL.so.1: cannot open shared object file: No such file')\n"
        "train(batches(D()))",
        ["has no library libGL.so.1", "the system's package with libGL.so.1"],
    ),
    "a part of numpy": (
        "class D(Rebuilt):\n    def __setstate__(self, state):\n"
        "        import numpy._core_of_3\ntrain(batches(D()))",
        ["has no numpy._core_of_3", "install the same numpy"],
    ),
    "a file": (
        "class D(Rebuilt):\n    def __setstate__(self, state):\n"
        "        open('/no/such/index.bin')\ntrain(batches(D()))",
        ["cannot open /no/such/index.bin", "at the same path"],
    ),
    "a file of the trainer's at the first sample": (
        "open(os.path.join(HERE, 'here.txt'), 'w').close()\nclass D(Base):\n"
        "    def __getitem__(self, index):\n"
        "        raise FileNotFoundError(2, 'No such file or directory', HERE + '/here.txt')\n"
        "train(batches(D()))",
        ["here.txt", "have it at the same path on the data hosts"],
    ),
    "the script's own error": (
        "class D(Rebuilt):\n    def __setstate__(self, state):\n"
        "        raise ValueError('in my own words')\ntrain(batches(D()))",
        ["cannot be rebuilt on data host algo-1", "in my own words"],
    ),
    "no memory": (
        "class D(Rebuilt):\n    def __setstate__(self, state):\n"
        "        raise MemoryError\ntrain(batches(D()))",
        ["data host algo-1 ran out of memory", "more memory, or fewer workers"],
    ),
    "a dataset process that is killed": (
        "class D(Rebuilt):\n    def __setstate__(self, state):\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\ntrain(batches(D()))",
        ["data host algo-1: the dataset process died", "memory"],
    ),
    "workers that are killed": (
        "class D(Base):\n    def __getitem__(self, index):\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\ntrain(batches(D()))",
        ["batch 0 cannot be made", "SIGKILL", "memory"],
    ),
    "other code": (
        "import importlib\nfrom stoker.feed.wire.imported_code import imported_code\n"
        "name = 'helper' + os.environ.get('RANK', '0')\n"
        "text = os.path.join(HERE, name + '.py')\nopen(text, 'w').write('class T: pass')\n"
        "helper = importlib.import_module(name)\n"
        "imported_code().note([name])\nopen(text, 'w').write('class T: a = 1')\n"
        "class D(Base):\n    def __init__(self): self.t = helper.T()\ntrain(batches(D()))",
        ["its code differs from the trainer's: module helper", "the same image and the same files"],
    ),
    "a class that the trainer lacks": (
        "class D(Base):\n    def __getitem__(self, index):\n"
        "        made = in_memory('made_there', 'class B: pass').B()\n"
        "        made.x = torch.rand(4)\n        return made\n"
        "train(batches(D(), batch_size=None))",
        ["the trainer has no module made_there", "in the Python of the training script"],
    ),
    "a module in the memory of ranks of mp.spawn": (
        'module = in_memory("made_up", "class T: pass")\nclass D(Base):\n'
        "    def __init__(self): self.kind = module.T()\n"
        "def main(rank): train(batches(D()))\n"
        "if __name__ == '__main__': torch.multiprocessing.spawn(main, nprocs=2)",
        ["has no module made_up", "put made_up into a file"],
    ),
    "a dataset that cannot be pickled": (
        "import stoker\nclass D(Base):\n    def __init__(self): self.parts = (i for i in [1])\n"
        "train(stoker.DataLoader(D(), batch_size=4))",
        ["cannot send dataset.parts (builtins.generator)"],
    ),
    "a dataset of torch's class that cannot be pickled": (
        "class D(Base):\n    def __init__(self): self.parts = (i for i in [1])\n"
        "train(batches(D()))",
        ["no batch came from its data hosts", "dataset.parts (builtins.generator)"],
    ),
    "a dataset that is too large": (
        "import stoker\nclass D(Base):\n    def __init__(self): self.table = torch.rand(1 << 20)\n"
        "train(stoker.DataLoader(D(), batch_size=4, num_workers=1))",
        ["more than feed.max_dataset_bytes", "dataset.table", "stoker.remote"],
    ),
    "no loader": (f"train{TENSORS}", ["no loader of torch or stoker was read"]),
    "a library's own loader": (
        f"in_memory('litdata.streaming.dataloader', '')\ntrain{TENSORS}",
        ["litdata.streaming.dataloader.StreamingDataLoader makes batches in its own way"],
    ),
    "a loader that is never read": (
        f"loader = batches(Base())\ntrain{TENSORS}",
        ["script.py:", "was never read"],
    ),
    "a loader of stoker's that is never read": (
        f"import stoker\nloader = stoker.DataLoader(Base(), batch_size=4)\ntrain{TENSORS}",
        ["script.py:", "was never read"],
    ),
    "an empty dataset": (
        "import stoker\nempty = torch.utils.data.TensorDataset(torch.rand(0, 4))\n"
        "train(stoker.DataLoader(empty))\n" + f"train{TENSORS}",
        ["gave no batch", "is its dataset empty?"],
    ),
}
SETTINGS = {
    "a dataset that is too large": ["feed.max_dataset_bytes=1000000"],
    "a loader of torch's class that is left": ["feed.replace_dataloader=false"],
}
# What spawns its ranks says so: then they are forked of a Python that has torch, as it is itself.
ARGUMENTS = {"a module in the memory of ranks of mp.spawn": ["spawn"]}


def last_words(
    folder: Path,
    script: str,
    *settings: str,
    command: Sequence[str] = ("python", "script.py"),
    dnn: str = "local.c1:1",
    data: int = 1,
) -> list[str]:
    """Returns what `stoker train` printed, the words of the hosts' own logs left out."""
    (folder / "script.py").write_text(HEAD + script)
    groups = ["--group", f"dnn={dnn}", "--group", f"data=local.c1:{data}"]
    sets = [word for each in ("feed.local_workers=0", *settings) for word in ("--set", each)]
    # The verb runs here, its hosts as processes: they are what fails.
    with forking():
        done = stoker("train", *groups, *sets, "--", *command, cwd=folder)
    lines = [*done.stdout.splitlines(), *done.stderr.splitlines()]
    return [line for line in lines if not line.startswith(("dnn/", "data/"))]


def end_of(lines: Sequence[str]) -> str:
    """Returns the line that says how the training ended."""
    ended = [line for line in lines if line.startswith("training ") or " steps of " in line]
    assert len(ended) == 1, "\n".join(lines)
    return ended[0]


# Others show the way of such words; these words themselves: test_rebuilding and test_unfed.
KNOWN = {
    "a module that only the trainer has",
    "a library of the system",
    "a part of numpy",
    "no memory",
    "a library's own loader",
    "a loader of stoker's that is never read",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.soak] * (name in KNOWN)) for name in CASES]
)
def test_the_cause_and_the_remedy_are_in_the_last_words(name, tmp_path):
    script, words = CASES[name]
    command = ["python", "script.py", *ARGUMENTS.get(name, [])]
    lines = last_words(tmp_path, script, *SETTINGS.get(name, []), command=command)
    ended = end_of(lines)
    assert [word for word in words if word not in ended] == []
    # The same words in the record, so in the report and the webhook.
    (record,) = tmp_path.glob("runs/*/training.json")
    document = json.loads(record.read_text())
    told = str(document.get("failure")) + str(document.get("events"))
    assert [word for word in words if word not in told] == []


# The kinds whose hosts or ranks may each see another symptom first.
SEVERAL = [
    "a module in the trainer's memory",
    "other code",
    "a dataset process that is killed",
    "a class that the trainer lacks",
]


@pytest.mark.parametrize("name", SEVERAL)
def test_two_ranks_and_two_data_hosts_say_the_first_cause_once(name, tmp_path):
    script, words = CASES[name]
    lines = last_words(tmp_path, script, dnn="local.c1:2", data=2)
    ended = end_of(lines)
    wanted = [word.removeprefix("data host algo-1: ") for word in words]
    assert [word for word in wanted if word not in ended] == []
    assert sum(wanted[0] in line for line in lines if line.startswith("training ")) == 1


LACKING = ["has no stoker", "install stoker in that Python"]


@pytest.fixture(scope="module")
def without_stoker(tmp_path_factory):
    return python_without(tmp_path_factory.mktemp("python") / "without")


def test_a_python_without_stoker_is_refused_before_anything_starts(without_stoker, tmp_path):
    script = "open(os.path.join(HERE, 'began'), 'w').close()\ntrain(batches(Base()))"
    lines = last_words(tmp_path, script, command=(str(without_stoker), "script.py"))
    text = "\n".join(lines)
    assert [word for word in LACKING if word not in text] == []
    assert "error: " in text
    assert not (tmp_path / "began").exists()
    assert not list(tmp_path.glob("runs/*/logs/*"))


@pytest.mark.parametrize("dnn", [1, 2])
def test_a_host_refuses_a_python_without_stoker_and_ends_the_data_hosts(
    dnn, without_stoker, tmp_path
):
    # As on other platforms, where only the host has the script's Python.
    script = tmp_path / "script.py"
    script.write_text(HEAD + "open(os.path.join(HERE, 'began'), 'w').close()")
    command = (str(without_stoker), str(script))
    with LocalJob(tmp_path, command, dnn=dnn, data=1, feed=FeedSettings()) as job:
        record = job.training()
        told = job.failure_file() or ""
    assert (record.status, record.steps) == ("failed", None)
    assert [word for word in LACKING if word not in record.cause] == []
    assert [word for word in LACKING if word not in told] == []
    assert "training_not_started" in job.log(job.leader)
    assert not (tmp_path / "began").exists()


@pytest.mark.parametrize("version", ["3.12", "3.13", "3.9"])
def test_another_python_version_is_refused_too(version, tmp_path):
    python = other_version(version)
    lines = last_words(tmp_path, "", command=(str(python), "script.py"))
    assert f"(Python {version}." in "\n".join(lines)
    assert [word for word in LACKING if word not in "\n".join(lines)] == []


def test_a_python_that_has_stoker_but_not_what_it_needs_is_refused(tmp_path):
    python = with_stoker(python_without(tmp_path / "python", "msgspec"))
    lines = last_words(tmp_path, "", command=(str(python), "script.py"))
    text = "\n".join(lines)
    assert "cannot import stoker: ModuleNotFoundError: No module named 'msgspec'" in text


@pytest.mark.parametrize("is_loader", [True, False])
def test_a_python_that_a_shell_script_starts_is_told_with_its_first_step(
    is_loader, without_stoker, tmp_path
):
    (tmp_path / "train.sh").write_text(f"{without_stoker} script.py\n")
    script = f"train(batches(Base()))\ntrain{TENSORS}" if is_loader else f"train{TENSORS}"
    lines = last_words(tmp_path, script, command=("bash", "train.sh"))
    assert [word for word in LACKING if word not in end_of(lines)] == []
    assert str(without_stoker) in end_of(lines)
    # Not only in the end.
    assert [line for line in lines if line.startswith("warning: ") and LACKING[0] in line]


def test_another_torch_on_the_data_hosts_is_named(tmp_path):
    python = with_stoker(python_without(tmp_path / "python"))
    with_version(python, "torch", "1.13.1")
    lines = last_words(tmp_path, "train(batches(Base()))", command=(str(python), "script.py"))
    assert "package torch is" in end_of(lines)
    assert "1.13.1 in the trainer" in end_of(lines)


def test_a_python_that_ignores_stoker_is_told_in_the_last_words(tmp_path):
    command = ("python", "-I", "script.py")
    lines = last_words(tmp_path, "train(batches(Base()))", command=command)
    assert "started with -I, does not read PYTHONPATH" in end_of(lines)


def test_data_hosts_that_are_killed_before_they_come_are_named(tmp_path):
    script = (
        "import psutil\n"
        "own = os.path.dirname(os.environ['STOKER_BASE_DIR'])\n"
        "killed = []\n"
        # On a busy machine they start later than the script.
        "while not killed:\n"
        "    for process in psutil.process_iter():\n"
        "        try:\n"
        "            base = process.environ().get('STOKER_BASE_DIR', '')\n"
        "            is_data = process.environ().get('STOKER_GROUP') == 'data'\n"
        "        except psutil.Error:\n"
        "            continue\n"
        "        if is_data and os.path.dirname(base) == own:\n"
        "            process.kill()\n"
        "            killed.append(process)\n"
        "train(batches(Base()))"
    )
    settings = ["feed.start_deadline_seconds=15", "feed.lease_seconds=2"]
    ended = end_of(last_words(tmp_path, script, *settings))
    assert "algo-1" in ended
    assert "see the logs of the data hosts, or set feed.local_workers" in ended


AT_A_SAMPLE = {
    "a full disk": (
        "raise OSError(28, 'No space left on device', '/scratch/cache.bin')",
        ["OSError", "the disk of /scratch/cache.bin is full on data host algo-1", "free space"],
    ),
    "a variable": (
        "os.environ['THEIR_ROOT']",
        ["KeyError: 'THEIR_ROOT'", "has no environment variable THEIR_ROOT", "for all hosts"],
    ),
    "sys.exit": (
        "sys.exit('no licence on this host')",
        ["SystemExit: no licence on this host", "__getitem__ (script.py:", "ended its own process"],
    ),
    "native code": (
        "import ctypes; ctypes.string_at(0)",
        ["signal 11 (SIGSEGV)", "see the stack in the host's log"],
    ),
}


@pytest.mark.parametrize("name", AT_A_SAMPLE)
def test_what_a_host_lacks_at_a_sample_is_in_the_last_words(name, tmp_path):
    body, words = AT_A_SAMPLE[name]
    script = (
        f"class D(Base):\n    def __getitem__(self, index):\n        {body}\ntrain(batches(D()))"
    )
    ended = end_of(last_words(tmp_path, script))
    assert [word for word in words if word not in ended] == []


def test_an_error_of_several_lines_keeps_its_advice(tmp_path):
    script = (
        "class D(Rebuilt):\n    def __setstate__(self, state):\n"
        "        raise RuntimeError('first line\\nsecond line\\nthird line\\nfourth line')\n"
        "train(batches(D()))"
    )
    ended = end_of(last_words(tmp_path, script))
    wanted = ["first line second line third line", "__setstate__ (script.py:", "in __getstate__"]
    assert [word for word in wanted if word not in ended] == []


def test_another_numpy_on_the_data_hosts_is_named(tmp_path):
    python = with_stoker(python_without(tmp_path / "python"))
    with_version(python, "numpy", "1.21.6")
    script = (
        "import numpy\nclass D(Base):\n    def __init__(self): self.table = numpy.zeros(3)\n"
        "train(batches(D()))"
    )
    ended = end_of(last_words(tmp_path, script, command=(str(python), "script.py")))
    assert "package numpy is" in ended
    assert "1.21.6 in the trainer" in ended
