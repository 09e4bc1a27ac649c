"""A secret of the run for an engine's own servers: a file that only this user may read."""

import hashlib
import os
from pathlib import Path

from stoker.errors import UsageError
from stoker.launch.hostrun import HostRun

_NAME = "engine-secret"


def secret_file(run: HostRun) -> Path:
    """The file, written if it is not there: 64 hexadecimal digits, the same on all hosts of a run.

    They are derived from the run's token, which they do not tell.

    Raises:
        UsageError: If the job folder cannot be written to.
    """
    assert run.keys is not None  # a run with a data group has them
    secret = hashlib.blake2b(key=run.keys.mac_key, digest_size=32, person=b"stoker engine")
    path = _path(run)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secret.hexdigest())
    except OSError as err:
        raise UsageError(
            f"cannot write the engine's secret: {err.strerror}",
            where=str(path),
            fix="set STOKER_BASE_DIR to a folder of yours",
        ) from None
    return path


def forget_secret(run: HostRun) -> None:
    """Removes the file, if there is one."""
    _path(run).unlink(missing_ok=True)


def _path(run: HostRun) -> Path:
    return run.settings.base_dir / _NAME
