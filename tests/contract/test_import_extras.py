import subprocess
import sys

import pytest


@pytest.mark.parametrize(("package", "library"), [("kubeflow", "kfp"), ("sagemaker", "sagemaker")])
def test_a_package_without_its_extra_says_what_to_install(package, library):
    code = f"import sys; sys.modules[{library!r}] = None; import stoker.{package}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    *trace, raised, fix = done.stderr.splitlines()
    assert raised == f"stoker.errors.MissingExtraError: {library} is not installed"
    assert fix.startswith("try:   pip install ")
    assert f"[{package}]" in fix
    # Its own import and stoker's: not how the library looks for its parts.
    assert len(trace) < 20
