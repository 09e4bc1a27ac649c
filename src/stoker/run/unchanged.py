"""Whether anything has changed since a workload's last run: `skip_unchanged`.

What counts: the workload without its reports, the code in this folder (what stoker would pack), the
packages and version of Python, and names, sizes and times of the files of each channel. What cannot
be read has changed.
"""

import hashlib
import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stoker.errors import StokerError, what_of
from stoker.host.listing import listing_version
from stoker.host.packages import packages_here
from stoker.platforms.local import channel_folder
from stoker.platforms.packing import pack
from stoker.records import Json, Training, Workload, read_json, to_document
from stoker.records.training import Lineage
from stoker.run.earlier_runs import last_run

# Other values of these keys train the same model.
_NO_CHANGE = ("skip_unchanged", "notify", "tracking", "watchdog", "on_no_capacity")
_COUNTS = "the workload, the code in this folder, Python's packages, the files of its channels"


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """The code in this folder.

    Attributes:
        digest: Of all files that stoker would pack; empty: not known.
        why: Why it is not known.
    """

    digest: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Since:
    """What has changed since the last run.

    Attributes:
        words: What to tell, in one line.
    """

    is_unchanged: bool
    words: str


def code_here(workload: Workload) -> Code:
    """Returns the code of a workload with `skip_unchanged`; reads all files of this folder."""
    # Nobody would compare it, and a large folder takes seconds.
    if not workload.skip_unchanged:
        return Code(why="skip_unchanged is false")
    if not workload.platform_info.is_this_machine:
        return Code(why=f"it runs on {workload.platform}")
    try:
        packed = pack(Path.cwd())
    except (StokerError, OSError) as err:
        return Code(why=what_of(err))
    return Code(digest=f"sha256:{hashlib.sha256(packed).hexdigest()}")


def since_last_run(workload: Workload, *, runs: Path) -> Since:
    """Returns whether a run would train what the last run that passed has trained."""
    folder = last_run(workload, runs=runs)
    if folder is None:
        words = "skip_unchanged: it trains, as no run of this workload has passed yet"
        return Since(is_unchanged=False, words=words)
    try:
        before = read_json(folder / "workload.json", Workload)
        training = read_json(folder / "training.json", Training)
    except StokerError as err:
        words = f"skip_unchanged: it trains, as {folder.name} cannot be read: {err.what}"
        return Since(is_unchanged=False, words=words)
    name = folder.name
    if training.events:
        name += f" of {training.events[0].when[:10]}"
    changed = _changed_keys(workload, before) or _changed(workload, training.lineage)
    if changed:
        words = f"skip_unchanged: it trains, as this changed since {name}: {changed}"
        return Since(is_unchanged=False, words=words)
    again = "--set skip_unchanged=false trains again"
    words = f"nothing changed since {name}: skipped (a change would be in {_COUNTS}; {again})"
    return Since(is_unchanged=True, words=words)


def _changed_keys(workload: Workload, before: Workload) -> str:
    here = _counting(workload)
    there = _counting(before)
    names = sorted(here.keys() | there.keys())
    return ", ".join(name for name in names if here.get(name) != there.get(name))


def _counting(workload: Workload) -> dict[str, Json]:
    return {key: each for key, each in to_document(workload).items() if key not in _NO_CHANGE}


def _changed(workload: Workload, before: Lineage) -> str:
    """Returns the first thing that differs, or is not known; empty: nothing."""
    code = code_here(workload)
    if not code.digest:
        return f"the code is not known: {code.why}"
    if before.code is None:
        return "the code of that run is not known"
    if code.digest != before.code:
        return "the code"
    if (platform.python_version(), packages_here()) != (before.python, before.packages):
        return "Python or its packages"
    if not workload.channels:
        return "the workload names no channels, so that new data would not be seen"
    texts = (_of_channel(name, workload, before) for name in workload.channels)
    return next((text for text in texts if text), "")


def _of_channel(name: str, workload: Workload, before: Lineage) -> str:
    """Returns how the files of a channel differ, or that they are not known."""
    last = before.inputs.get(name)
    version = None
    with suppress(StokerError, OSError):
        folder = channel_folder(name, workload.channels[name].uri)
        if not has_linked_folders(folder):
            version = listing_version(folder)
    if version is None or last is None or last.version is None:
        return f"channel {name} could not be read whole"
    if version == last.version:
        return ""
    return f"the files of channel {name}"


def has_linked_folders(folder: Path) -> bool:
    """Whether there are folders in it that a listing does not follow."""
    for root, folders, _ in os.walk(folder):
        if any(Path(root, name).is_symlink() for name in folders):
            return True
    return False
