"""Errors of stoker, with the exit codes of the command line.

    StokerError                  1  a bug, or an error without a class
    ├── UsageError               2  wrong command line, setting or record (also a ValueError)
    │   ├── DeclinedError           the user answered no
    │   └── MissingExtraError       a library of an extra is not installed (also an ImportError)
    ├── GateError                3  the model missed the workload's gate, or nothing was trained
    ├── PlatformError            4  a platform refused or lost a request
    │   ├── ServiceError            a cloud service or cluster refused a call, or did not answer
    │   └── JobStoppedError         a rule stops the job, such as a bound of a wait
    │       └── NoCapacityError     no hosts for the job, now or by a quota
    ├── FeedError                5  the feed failed
    │   ├── FeedLostError           no data worker is left, or none arrived in time (also a
    │   │                           RuntimeError, which torch's loader raises)
    │   ├── ShippingError           a dataset or collate function cannot be sent to a data host
    │   │   └── RebuildingError     its own code raised as it was read back from its pickle
    │   └── ProtocolError           a peer violated the protocol
    └── WorkloadError            6  the user's command failed; its exit code is in training.json

Ctrl-C exits with 130, SIGTERM with 143, and a launcher whose peer was lost with 75. `stoker upload
--check` exits with 10 if the pipeline would change, and with 11 if there is none yet.

To add an exit code: a class here, with `exit_code` and a line above. What a training run ends with
is in `records/outcome.py`.
"""

from functools import partial
from typing import Literal

# Of upload --check: no code of an error.
EXIT_CHANGED = 10
EXIT_NEW = 11
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143
# Of a launcher on a dnn host, if another dnn host was lost: EX_TEMPFAIL of sysexits.h. Platforms
# restart the job for it, where the workload allows that.
EXIT_PEER_LOST = 75
# Of a container that was killed (SIGKILL), or ran out of memory.
EXIT_KILLED = 137
# Of a dnn host's pod, for which Kubernetes restarts the job: no failure of the script.
RESTARTING_CODES = (EXIT_PEER_LOST, EXIT_KILLED, EXIT_TERMINATED)
ServiceErrorKind = Literal["missing", "denied", "taken", "stale", "away", "refused"]


# Not an Exception: no `except Exception` may swallow it.
class TerminatedError(BaseException):
    """SIGTERM; unwinds the stack as Ctrl-C does. Its text, if any, names what keeps running."""


class StokerError(Exception):
    """Base of all errors of stoker, for one `except` around a call of the library.

    Attributes:
        what: What went wrong, with the values.
        where: The file, key, host, rank or service; may be empty.
        fix: What to do next: a command, or a sentence that begins with a verb; may be empty.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        super().__init__(what, where, fix)
        self.what = what
        self.where = where
        self.fix = fix

    def __str__(self) -> str:
        """Returns the facts as the command line prints them, one per line."""
        lines = [self.what]
        if self.where:
            lines.append(f"where: {self.where}")
        if self.fix:
            lines.append(f"try:   {self.fix}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickles the facts, which are keyword arguments and so not in `args`."""
        return partial(type(self), where=self.where, fix=self.fix), (self.what,)


# Also a ValueError: in a script it is a wrong argument like any other.
class UsageError(StokerError, ValueError):
    """A wrong command line, setting or record."""

    exit_code = 2


class DeclinedError(UsageError):
    """The user's no to the question whether to start."""


# Also an ImportError, which programs with optional libraries catch.
class MissingExtraError(UsageError, ImportError):
    """A library of an extra is not installed."""

    @classmethod
    def of(cls, err: ImportError, *, extra: str) -> "MissingExtraError":
        """Returns the error for a failed import."""
        library = (err.name or "").partition(".")[0] or str(err)
        return cls(f"{library} is not installed", fix=install_command(extra))


class GateError(StokerError):
    """The model missed the workload's gate, or its training run made no step."""

    exit_code = 3


class PlatformError(StokerError):
    """A platform refused or lost a request."""

    exit_code = 4


class ServiceError(PlatformError):
    """A cloud service or a cluster refused a call, or did not answer it.

    Attributes:
        code: The service's own error code, or the HTTP status; empty without an answer.
        action: The call as a policy names it: `sagemaker:CreateTrainingJob`, `create pods`.
        kind: `missing`: no such object; `denied`: a permission is missing; `taken`: the name is in
            use; `stale`: the login has expired; `away`: no answer, a retry may help; `refused`:
            anything else.
        user: Account that lacks the permission, where the service names it.
        retry_after_seconds: How long the service asks to wait before the next call; 0: not said.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str = "",
        fix: str = "",
        code: str = "",
        action: str = "",
        kind: ServiceErrorKind = "refused",
        user: str = "",
        retry_after_seconds: float = 0.0,
    ) -> None:
        super().__init__(what, where=where, fix=fix)
        self.code = code
        self.action = action
        self.kind = kind
        self.user = user
        self.retry_after_seconds = retry_after_seconds


class JobStoppedError(PlatformError):
    """A written rule stops the job: the platform will not run it, or a bound has passed.

    Any other error of a follower leaves the job running (`stoker.platforms.base.leave_or_stop`).
    """


class NoCapacityError(JobStoppedError):
    """A platform has no hosts for a job; a retry later or other instance types may work.

    Attributes:
        types: Instance types without capacity; empty where the platform does not say.
        may_pass: Whether waiting may help: not with a quota of 0, or after the job has waited.
        still_there: Error to raise before another job is tried; None once this job is deleted.
    """

    types: frozenset[str] = frozenset()
    may_pass = True
    still_there: PlatformError | None = None


class FeedError(StokerError):
    """The feed cannot give this rank its next batch: raised in the script, by `next(loader)`."""

    exit_code = 5


# Also a RuntimeError, as torch's loader raises where a worker has died.
class FeedLostError(FeedError, RuntimeError):
    """No data worker is left, or none arrived in time."""


class ShippingError(FeedError):
    """A dataset, collate function or sampler index cannot be sent to another host."""


class RebuildingError(ShippingError):
    """A dataset's own code raised as it was read back from its pickle."""


class ProtocolError(FeedError):
    """A peer violated the protocol."""


class WorkloadError(StokerError):
    """The user's command failed, on any host; its own exit code is in the record."""

    exit_code = 6


def what_of(err: BaseException) -> str:
    """Returns what went wrong, without the lines on where and how to go on of stoker's errors."""
    if isinstance(err, StokerError):
        return err.what
    return str(err)


def install_command(extra: str) -> str:
    """Returns the command that installs an extra; stoker is not on PyPI."""
    return f"pip install '.[{extra}]' in a checkout of stoker"
