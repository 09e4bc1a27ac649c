"""The tutorial's notebook runs from its first cell to its last, in an empty folder."""

import importlib.util
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.library, pytest.mark.timeout(600)]


@pytest.mark.filterwarnings("ignore")  # Jupyter's own, and zmq's of the kernel's sockets.
def test_the_notebook_of_the_tutorial_leaves_a_report(tmp_path, monkeypatch):
    if importlib.util.find_spec("nbclient") is None:
        pytest.skip("no nbclient here: make test-libraries")
    import nbclient
    import nbformat

    # Its cells type `stoker`, as a reader does whose environment is active.
    monkeypatch.setenv("PATH", f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / ".ipython"))
    notebook = nbformat.read(ROOT / "docs" / "tutorial.ipynb", as_version=4)
    folder = tmp_path / "empty"
    folder.mkdir()
    nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
    (report,) = folder.glob("runs/shapes-*/report.html")
    assert "<h1" in report.read_text()
