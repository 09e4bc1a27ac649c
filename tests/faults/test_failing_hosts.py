"""Whatever fails on a data host, the script's last words name it: what, where, what to do."""

import json

import pytest

from support.cluster import Cluster
from support.failing_hosts import CASES, HEAD

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

# What is said where nothing is known.
VAGUE = ("lost all data workers", "no data worker came", "timed out")
SPAWNED = {"multiprocessing_context": "spawn"}
PERSISTENT = {"persistent_workers": True}
# Of each way to fail, one.
SOME = [
    "rebuilt: a variable",
    "rebuilt: SIGSEGV",
    "rebuilt: SystemExit('no licence')",
    "imported: os._exit",
    "sampled: a full disk",
    "sampled: SystemExit('no licence')",
    "sampled: SIGKILL",
    "collated: a module",
]


@pytest.fixture(scope="module")
def cluster():
    with Cluster(agents=2, workers=1) as made:
        made.wait_for_agents()
        yield made


def last_words(cluster, folder, name, **loader):
    script = folder / "train.py"
    script.write_text(HEAD + CASES[name].script)
    env = {"STOKER_REPLACE_DATALOADER": "auto", "LOADER": json.dumps(loader)}
    trainer = cluster.train(script=str(script), env=env, workers=0)
    code = trainer.end()
    lines = trainer.errors.splitlines()
    # Only what Python itself prints at the end: the log said it before.
    text = "\n".join(line for line in lines if not line.startswith("stoker 20"))
    assert "Traceback (most recent call last)" in text
    return code, text


@pytest.mark.parametrize("name", CASES)
def test_the_last_words_name_what_failed_where_and_what_to_do(name, cluster, tmp_path):
    code, text = last_words(cluster, tmp_path, name)
    assert [word for word in CASES[name].words if word not in text] == [], text
    assert [word for word in VAGUE if word in text] == []
    assert code == CASES[name].code
    # The hosts themselves live on.
    assert [host.poll() for host in cluster.hosts] == [None, None]


@pytest.mark.parametrize("loader", [SPAWNED, PERSISTENT], ids=["spawn", "persistent"])
@pytest.mark.parametrize("name", SOME)
def test_so_do_they_where_workers_start_or_live_otherwise(name, loader, cluster, tmp_path):
    code, text = last_words(cluster, tmp_path, name, **loader)
    # Where each worker imports and unpickles for itself, no process dies in its stead.
    words = [word.partition(": ")[2] or word for word in CASES[name].words]
    assert [word for word in words if word not in text] == [], text
    assert [word for word in VAGUE if word in text] == []
    assert code == CASES[name].code
