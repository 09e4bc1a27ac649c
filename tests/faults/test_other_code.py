"""A data host with other code than the trainer's makes no batches, with real processes."""

import contextlib
from pathlib import Path

import pytest

from support.cluster import Cluster, wait_until

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

FILES = {
    "skewed.py": """
import os, sys, time
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "site-packages"))
import skewed_package.parts as parts

class Numbers:
    def __len__(self):
        return 40

    def __getitem__(self, index):
        time.sleep(0.01)
        return index, parts.VERSION
""",
    "skewed_package/__init__.py": "",
    "skewed_package/parts.py": "import skewed_library\nVERSION = {version}\n",
    "site-packages/skewed_library/__init__.py": "",
    "site-packages/skewed_library-1.dist-info/METADATA": (
        "Metadata-Version: 2.1\nName: skewed_library\nVersion: {installed}\n"
    ),
}


def write(folder: Path, *, version: int = 1, installed: str = "1.0", **more: str) -> str:
    for name, text in (FILES | {f"{key}.py": text for key, text in more.items()}).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.format(version=version, installed=installed))
    return str(folder)


@contextlib.contextmanager
def cluster_of(*folders: str, check: str = "error"):
    with Cluster(agents=len(folders), late=True, feed={"code_check": check}) as cluster:
        for number, folder in enumerate(folders):
            cluster.start_agent(number, folder=folder)
        cluster.wait_for_agents()
        yield cluster


def train(cluster, folder, **given):
    return cluster.train(
        workers=0, script="skewed_script.py", folder=folder, **{"epochs": 2, **given}
    )


def versions_of(lines):
    assert all(line["ids"] == list(range(40)) for line in lines)
    return [line["versions"] for line in lines]


@pytest.fixture
def own(tmp_path):
    return write(tmp_path / "own")


OTHERS = {
    "module": ({"version": 2}, r"module skewed_package.parts ("),
    "its package": ({"skewed_package/__init__": "# edited\n"}, "module skewed_package ("),
    "library": ({"installed": "2.0"}, "package skewed_library is 2.0 on the data host, 1.0 in"),
    "failing": ({"skewed": "import not_there\n"}, "module skewed ("),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_data_host_with_other_code_is_left_out_and_the_others_make_its_batches(
    name, own, tmp_path
):
    more, told = OTHERS[name]
    with cluster_of(own, write(tmp_path / "other", **more)) as cluster:
        trainer = train(cluster, own)
        assert versions_of(trainer.finish()) == [[1], [1]]
        assert "data host algo-1 makes no batches in this epoch: its code differs" in trainer.errors
        assert told in trainer.errors
        assert "algo-0 makes no batches" not in trainer.errors


def test_without_another_host_the_training_ends_with_the_reason_and_what_to_do(own, tmp_path):
    with cluster_of(write(tmp_path / "other", version=2)) as cluster:
        trainer = train(cluster, own)
        assert trainer.end() == 5
        assert (
            "its code differs from the trainer's: module skewed_package.parts (" in trainer.errors
        )
        assert "give all hosts the same image and the same files" in trainer.errors


@pytest.mark.parametrize(("check", "num_told"), [("warn", 1), ("off", 0)])
def test_other_code_is_used_where_the_workload_says_so(check, num_told, own, tmp_path):
    with cluster_of(write(tmp_path / "other", version=2), check=check) as cluster:
        trainer = train(cluster, own)
        assert versions_of(trainer.finish()) == [[2], [2]]
        assert trainer.errors.count("code_differs") == num_told


def test_what_counts_is_the_code_that_was_imported_not_the_file_by_now(tmp_path):
    """One folder for all, edited in mid-run, and then edited back."""
    shared = tmp_path / "shared"
    with Cluster(agents=3, late=True) as cluster:
        cluster.start_agent(0, folder=write(shared))
        trainer = train(cluster, str(shared), epochs=3, pauses=[1, 2])
        trainer.until("pause")
        write(shared, version=22)
        cluster.start_agent(1, folder=str(shared))
        wait_until(lambda: "data host algo-1 makes no batches" in trainer.errors, "left out")
        trainer.go_on()
        trainer.until("pause")
        write(shared)
        cluster.start_agent(2, folder=str(shared))
        wait_until(lambda: "agent_ready agent=algo-2" in trainer.errors, "used")
        trainer.go_on()
        assert versions_of(trainer.finish()) == [[1]] * 3
