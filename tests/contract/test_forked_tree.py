"""What tests start is forked of a Python that has torch: see support/forked_tree.py."""

import subprocess
import sys

from support.forked_tree import forking


def test_a_script_is_forked_also_where_torch_has_set_a_variable_for_itself(tmp_path, monkeypatch):
    # As an import of Lightning does, for all later tests of its process.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    script = tmp_path / "script.py"
    script.write_text("import os, sys; print('torch' in sys.modules, os.environ[sys.argv[1]])")
    words = [sys.executable, str(script), "TORCHINDUCTOR_CACHE_DIR"]
    with forking():
        done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", str(tmp_path)]
