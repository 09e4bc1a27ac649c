"""stoker.DataLoader has torch's own iterators without a data group, numbered and seeded."""

import subprocess
import sys

import stoker
from stoker.launch.job_environment import STARTUP_DIR
from support.loader_draws import Drawing, hashes
from support.warm_python import run_code


def test_epochs_differ_and_persistent_workers_count_them():
    one = stoker.DataLoader(Drawing(), batch_size=3, num_workers=1, persistent_workers=True)
    two = stoker.DataLoader(Drawing(), batch_size=3, num_workers=2, persistent_workers=True)
    found = hashes(one, epochs=3)
    assert found == hashes(two, epochs=3)
    assert len(set(found)) == len(found)


def test_torch_seeding_is_torchs():
    script = (
        "import stoker, torch.utils.data\n"
        "from support.loader_draws import Drawing, hashes\n"
        "for n in (0, 2):\n"
        "    ours = hashes(stoker.DataLoader(Drawing(), batch_size=3, num_workers=n))\n"
        "    torchs = hashes(torch.utils.data.DataLoader(Drawing(), batch_size=3, num_workers=n))\n"
        "    assert ours == torchs\n"
    )
    run_code(script, RUN_FEED='{"seeding": "torch"}')


def test_decided_workers_replace_the_scripts():
    script = (
        "import torch, stoker\n"
        "from support.dropin_claims import Plain\n"
        "iterator = iter(stoker.DataLoader(Plain(), num_workers=0))\n"
        "print(iterator._num_workers, len(list(iterator)))\n"
    )
    for rank, workers in (("0", 2), ("1", 1)):
        env = {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": rank}
        assert run_code(script, RUN_WORKERS='{"dnn": 3}', **env) == f"{workers} 10\n"


def test_the_timeline_has_the_loaders_of_the_script_and_not_those_of_a_dataset(tmp_path):
    script = (
        "import torch, stoker\n"
        "from support.dropin_claims import Plain\n"
        "class Outer(Plain):\n"
        "    def __getitem__(self, i): return sum(map(int, stoker.DataLoader(Plain())))\n"
        "class Other(Outer): pass\n"
        "kinds = enumerate((Outer, Other))\n"
        "train, test = (stoker.DataLoader(d(), batch_size=4, num_workers=n) for n, d in kinds)\n"
        "for loader in (train, test, train):\n"
        "    for batch in loader: pass\n"
        "for batch in train: break\n"
    )
    run_code(script, STOKER_OUTPUT=str(tmp_path), RANK="1")
    rows = [row.split(",") for row in (tmp_path / "timeline-rank1.csv").read_text().splitlines()]
    assert [(row[0], row[1], row[2], row[6]) for row in rows[1:]] == [
        (loader, epoch, batch, samples)
        for loader, epoch in [("0", "0"), ("1", "0"), ("0", "1")]
        for batch, samples in [("0", "4"), ("1", "4"), ("2", "2")]
    ] + [("0", "2", "0", "4")]


# One finder waits for torch, whatever is to be put into it; profiles: tests/e2e.
def test_torch_is_changed_also_when_stoker_imports_it(tmp_path):
    importing = "import stoker.feed.engine.feed, torch.utils.data as d"
    words = [sys.executable, "-c", f"{importing}; print(d.DataLoader._get_iterator.__module__)"]
    environ = {"PYTHONPATH": str(STARTUP_DIR), "STOKER_LAUNCHER_PID": "1"}
    environ |= {"STOKER_OUTPUT": str(tmp_path), "STOKER_RUN": '{"replace_dataloader": true}'}
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=150)
    assert (done.stdout, done.stderr) == ("stoker.feed.replace\n", "")
