"""Reads lists of bad samples as a run leaves them."""

import csv
from pathlib import Path

from stoker.feed.bad_samples import FILE, join_files


def rows_of(folder: Path, *names: str) -> list[tuple[str, ...]]:
    """Returns the columns `names` of the list in a host's folder, whose ranks' lists are joined."""
    join_files(folder)
    with (folder / FILE).open(newline="", encoding="utf-8") as file:
        return [tuple(row[name] for name in names) for row in csv.DictReader(file)]
