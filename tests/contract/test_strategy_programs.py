import json
import os
import subprocess
import sys
from io import StringIO

import pytest

from stoker.errors import UsageError
from stoker.launch.strategies import mpi, mpi_programs, smddp
from stoker.logs import Log
from stoker.records import StrategySettings

# SageMaker's library registers a backend as it is imported; so does the one that torch itself is
# given in tests/e2e/test_strategies.py.
FAKE = """
import torch.distributed as dist
dist.Backend.register_backend("smddp")
"""
FAKE_TORCH = """
class Backend:
    @staticmethod
    def register_backend(name):
        pass
"""


@pytest.fixture
def fake_library(tmp_path):
    package = tmp_path / "lib" / "smdistributed" / "dataparallel" / "torch"
    package.mkdir(parents=True)
    (package / "torch_smddp.py").write_text(FAKE)
    torch = tmp_path / "lib" / "torch"
    torch.mkdir()
    (torch / "__init__.py").write_text("")
    (torch / "distributed.py").write_text(FAKE_TORCH)
    return tmp_path / "lib"


def backend(environ, *, instance_type="ml.p4d.24xlarge", fallback=False):
    strategy = StrategySettings(name="smddp", fallback="gloo" if fallback else None)
    return smddp.backend_of(strategy, instance_type=instance_type, host="algo-3", environ=environ)


def test_smddp_is_used_where_its_library_can_be_imported(fake_library):
    assert backend({"PYTHONPATH": str(fake_library)}) == ("smddp", "")


def test_without_its_library_smddp_is_refused_or_falls_back():
    with pytest.raises(UsageError, match=r"(?s)No module named 'smdistributed'.*algo-3"):
        backend({})
    name, reason = backend({}, fallback=True)
    assert name == "gloo"
    assert "No module named 'smdistributed'" in reason


def test_on_a_type_that_it_is_not_for_smddp_is_refused_or_falls_back(fake_library):
    environ = {"PYTHONPATH": str(fake_library)}
    with pytest.raises(UsageError, match=r"does not support ml\.p5\.48xlarge"):
        backend(environ, instance_type="ml.p5.48xlarge")
    assert backend(environ, instance_type="ml.p5.48xlarge", fallback=True)[0] == "gloo"


@pytest.fixture
def asked():
    return []


@pytest.fixture
def session(asked):
    def start(host, arguments):
        asked.append((host, arguments))
        return "" if host == "algo-2" else "no such host"

    session = mpi.MpiSession(start, Log(run="r", host="algo-3", stream=StringIO()))
    yield session
    session.close()
    assert not session.folder.exists()


PROGRAM = (sys.executable, "-I", "-S", mpi_programs.__file__)


def ask(session, *words):
    words = [*PROGRAM, "agent", str(session.socket), *words]
    return subprocess.run(words, capture_output=True, text=True, timeout=150)


def test_the_agent_hands_mpiruns_words_to_the_launcher(session, asked):
    assert ask(session, "algo-2", " orted", "-mca", "a", '"b c;d"').returncode == 0
    assert asked == [("algo-2", ("-mca", "a", "b c;d"))]
    # Only this user reaches the socket.
    assert session.folder.stat().st_mode & 0o077 == 0


def test_the_agent_fails_with_the_launchers_reason(session):
    refused = ask(session, "algo-9", "orted", "-mca", "a", "b")
    assert refused.returncode == 1
    assert "not started on algo-9: no such host" in refused.stderr
    assert "expected orted" in ask(session, "algo-2", "sh -c 'reboot'").stderr
    session.close()
    assert "cannot reach the launcher" in ask(session, "algo-2", "orted").stderr


def test_a_rank_of_mpirun_gets_what_torchrun_would_give_it(tmp_path):
    told = {"master_addr": "10.0.0.3", "master_port": 7602, "folder": str(tmp_path), "tmpdir": ""}
    of_mpi = {"RANK": "3", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    theirs = {f"OMPI_COMM_WORLD_{name}": value for name, value in of_mpi.items()}
    theirs |= {"PATH": os.environ["PATH"], "STOKER_MPI": json.dumps(told), "TMPDIR": "/gone"}
    show = "import json, os; print(json.dumps([os.getcwd(), dict(os.environ)]))"
    words = [*PROGRAM, "rank", sys.executable, "-c", show]
    done = subprocess.run(words, env=theirs, capture_output=True, text=True, check=True)
    folder, environ = json.loads(done.stdout)
    assert folder == str(tmp_path)
    given = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    given |= {"MASTER_ADDR": "10.0.0.3", "MASTER_PORT": "7602"}
    assert given.items() <= environ.items()
    assert not {"TMPDIR", "STOKER_MPI"} & set(environ)
