"""What is below is the keel: stoker from outside, before and after its rooms are rewritten.

Only command lines, output of scripts, JSON files and HTTP; only keys, flags, fields and exit codes
that stay; no wording.
"""

from pathlib import Path

import pytest

KEEL = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if KEEL in item.path.parents:
            item.add_marker(pytest.mark.keel)
