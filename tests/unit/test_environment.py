"""The environment of `make run` and `make test` breaks no training of its user."""

import itertools
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_nothing_installs_mpi4py_which_ends_lightning_where_no_mpi_library_is():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    wanted = [*project["dependencies"], *itertools.chain.from_iterable(extras)]
    wanted += (ROOT / "constraints.txt").read_text().splitlines()
    names = {re.split(r"[^\w-]", line, maxsplit=1)[0].lower() for line in wanted}
    assert "torch" in names
    assert "mpi4py" not in names
