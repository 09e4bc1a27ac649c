"""run.json of processes that tests start themselves: `RUN_NAME` in an environment is a setting."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

_MARK = "RUN_"
_TEXTS = ("run_id", "strategy", "image", "requirements")
_FILES = ("code_file", "profile_file", "more_hyperparameters")


def _value(name: str, text: str) -> object:
    if name in (*_TEXTS, *_FILES):
        return text
    if name == "replace_dataloader":
        return {"1": True, "true": True, "0": False, "false": False}.get(text, text)
    return json.loads(text)


def document(environ: Mapping[str, str]) -> dict[str, object]:
    """Returns the run.json that an environment means."""
    names = {name.removeprefix(_MARK).lower(): name for name in environ if name.startswith(_MARK)}
    names.pop("token", None)
    settings = {name: _value(name, environ[full]) for name, full in names.items()}
    if environ.get("STOKER_RUN_ID"):
        settings.setdefault("run_id", environ["STOKER_RUN_ID"])
    return settings


def in_run(environ: Mapping[str, str], *, place: str = "") -> dict[str, str]:
    """Returns the environment with STOKER_RUN in place of its RUN_ variables.

    Args:
        environ: RUN_TOKEN names the token's file, RUN_FEED and others are JSON.
        place: The folder of the token's file as the process will see it.
    """
    others = {name: text for name, text in environ.items() if not name.startswith(_MARK)}
    if len(others) == len(environ):
        return others
    text = json.dumps(document(environ), sort_keys=True)
    token = environ.get("RUN_TOKEN")
    if not token:
        return {**others, "STOKER_RUN": text}
    digest = hashlib.sha256(f"{text}{token}".encode()).hexdigest()[:8]
    folder = Path(token).parent / f"run-{digest}"
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(text)
    copy = folder / "token"
    if not copy.exists():
        copy.symlink_to(Path(token).absolute())
    seen = Path(place) / folder.name if place else folder
    return {**others, "STOKER_RUN": str(seen / "run.json")}
