"""Files that hold what stoker printed once: a diff shows what a change does.

They leave out what only stoker's own parts read of each other: variables STOKER_*, digests, and
workloads that travel as JSON.
Write them again with KEEL_WRITES=1 in the environment.
"""

import os
import re
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "data"


def shown(document: Any) -> Any:
    """Returns a document without what is stoker's own."""
    if isinstance(document, dict):
        kept = {key: value for key, value in document.items() if not _is_own(key)}
        return {key: shown(value) for key, value in kept.items()}
    if isinstance(document, list):
        kept = [each for each in document if not _is_named_own(each)]
        return [shown(each) for each in kept]
    return _shown_text(document) if isinstance(document, str) else document


def _shown_text(text: str) -> str:
    if text.startswith("{") and '"command"' in text:
        return "WORKLOAD"
    return re.sub(r"/inputs/[0-9a-f]{16,}/", "/inputs/DIGEST/", text)


def _is_named_own(item: Any) -> bool:
    if not isinstance(item, dict):
        return False
    return any(_is_own(str(item.get(key, ""))) for key in ("name", "Key"))


def _is_own(name: str) -> bool:
    return name.startswith("STOKER_") or name.endswith("sha256") or name in ("run", "run.json")


def check_golden(name: str, text: str) -> None:
    """Asserts that a text is that of a file in tests/data."""
    file = DATA / name
    if os.environ.get("KEEL_WRITES"):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")
