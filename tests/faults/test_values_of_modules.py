"""What a script sets in its modules does not reach data hosts, and the script's log says so."""

import re
import textwrap
from pathlib import Path

import pytest

from support.cluster import Cluster

pytestmark = [pytest.mark.fault, pytest.mark.timeout(180)]

CFG = "import socket, os\nSIZE = 3\nKEY = 'none'\nSAME = 1\nPID = os.getpid()\n"
DATA = """
import cfg

class Data:
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return cfg.SIZE, cfg.KEY, cfg.SAME, cfg.PID > 0
"""
SCRIPT = """
import json, os
import cfg, data
from stoker import DataLoader

def collate(items):
    return items

cfg.KEY = "a secret"
loader = DataLoader(data.Data(), collate_fn=collate, batch_size=2)
for size in SIZES:
    cfg.SIZE = size + int(os.environ["RANK"])
    for batch in loader:
        print(json.dumps({"batch": batch}), flush=True)
"""


def test_values_that_the_script_has_set_in_its_modules_are_warned_of_once(tmp_path: Path) -> None:
    (tmp_path / "cfg.py").write_text(CFG)
    (tmp_path / "data.py").write_text(DATA)
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT.replace("SIZES", "(5, 5, 7)")))
    with Cluster(agents=2) as cluster:
        cluster.wait_for_agents()
        ranks = [cluster.train(script=str(script), rank=rank, world=2) for rank in range(2)]
        for rank, trainer in enumerate(ranks):
            # As data hosts have it: that is what is warned of.
            assert trainer.finish() == [{"batch": [[3, "none", 1, True]] * 2}] * 3
            told = re.findall(r"module_values_differ agent=algo-\d text='?(.*)", trainer.errors)
            assert len(told) == 2, trainer.errors
            for size, text in zip((5, 7), told, strict=True):
                assert f"cfg.KEY, cfg.SIZE ({size + rank} here, 3 there); data hosts" in text
            assert "secret" not in trainer.errors
        # Ranks that set different values have one spec.
        logs = [cluster.log_of(number).read_text() for number in range(2)]
        assert [log.count(" spec_arrives ") for log in logs] == [1, 1]


def test_values_as_the_source_has_them_are_not_warned_of(tmp_path: Path) -> None:
    (tmp_path / "cfg.py").write_text(CFG)
    (tmp_path / "data.py").write_text(DATA)
    script = tmp_path / "script.py"
    text = SCRIPT.replace("SIZES", "(3, 3)").replace("a secret", "none")
    script.write_text(textwrap.dedent(text))
    with Cluster(agents=1) as cluster:
        trainer = cluster.train(script=str(script))
        assert trainer.finish() == [{"batch": [[3, "none", 1, True]] * 2}] * 2
        assert "module_values_differ" not in trainer.errors
