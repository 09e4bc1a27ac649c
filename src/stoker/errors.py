"""Stoker raises these errors on purpose.

    StokerError                  1  a bug, or something no other class names
    ├── UsageError               2  a wrong command line, setting or record (also a ValueError)
    │   ├── DeclinedError           the person did not want to start it
    │   └── MissingExtraError       a library of an extra is not installed (also an ImportError)
    ├── GateError                3  the model missed the workload's gate, or is not this run's
    ├── PlatformError            4  a platform refused or lost a request
    │   ├── ServiceError            a cloud service or cluster refused a call, or did not answer
    │   └── NoCapacityError         it has no hosts for the job, now or by a quota
    ├── FeedError                5  the feed cannot go on
    │   ├── FeedLostError           no data worker is left, or none came in time (also a
    │   │                           RuntimeError, as what torch's loader raises then)
    │   ├── ShippingError           a dataset or collate function cannot travel
    │   └── ProtocolError           a peer sent what the protocol does not allow
    └── WorkloadError            6  the user's command failed; its own exit code is in training.json

The numbers are the exit codes of the command line. After Ctrl-C it is 130, after SIGTERM 143. A
script ends with 5 by the hook of `feed/trainer/client.py`, verbs that train or judge by
`records/outcome.py`, a data host to which no leader came by `NEVER_CAME` in
`launch/engines/hosts.py`.
"""

import json
import shlex
from contextlib import suppress
from typing import Literal
from urllib.parse import unquote

EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143
ServiceErrorKind = Literal["missing", "denied", "taken", "stale", "away", "refused"]


# Not an Exception: no `except Exception` on the way may take it for a failure of its own.
class TerminatedError(BaseException):
    """SIGTERM came: unwinds the stack as Ctrl-C does, so that all that runs is ended.

    With words where something goes on all the same.
    """


class StokerError(Exception):
    """All errors of stoker derive from this one: they say what went wrong, where, and what to do.

    Attributes:
        what: What went wrong, with the values.
        where: File, line, key, host, rank or batch; empty where there is no place.
        fix: What to do next; empty where nothing is known to help.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        super().__init__(what, where, fix)
        self.what = what
        self.where = where
        self.fix = fix

    def __str__(self) -> str:
        """Returns the facts as the command line prints them, one a line."""
        lines = [self.what]
        if self.where:
            lines.append(f"where: {self.where}")
        if self.fix:
            lines.append(f"try:   {self.fix}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        """Lets the error travel between processes with all its facts."""
        # By default an exception is made anew from `args`: as positional arguments, which these are
        # not.
        return (_rebuild, (type(self), self.what, self.where, self.fix))


def _rebuild(kind: type[StokerError], what: str, where: str, fix: str) -> StokerError:
    return kind(what, where=where, fix=fix)


# A ValueError, too: in a script it is a wrong argument like any other.
class UsageError(StokerError, ValueError):
    """A command line, setting or record is wrong."""

    exit_code = 2


class DeclinedError(UsageError):
    """The person answered no to the question whether to start: nothing has failed."""


# An ImportError, too: programs that do without a library catch that.
class MissingExtraError(UsageError, ImportError):
    """A library that an extra brings along is not installed."""

    @classmethod
    def of(cls, err: ImportError, *, extra: str) -> "MissingExtraError":
        """Returns the error for an import that failed."""
        library = (err.name or "").partition(".")[0] or str(err)
        found = cls(f"{library} is not installed", fix=install_command(extra))
        found.name = err.name
        return found


class GateError(StokerError):
    """The model missed the workload's gate, or the training that it is of did no step."""

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
        is_repeated: An earlier attempt of the same call was sent and not answered.
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
    ) -> None:
        super().__init__(what, where=where, fix=fix)
        self.code = code
        self.action = action
        self.kind = kind
        self.user = user
        self.is_repeated = False


class NoCapacityError(PlatformError):
    """A platform has no hosts for a job: another time, or with other types, it may.

    Attributes:
        types: Instance types that are short; none where the platform does not say.
        may_pass: Waiting may help; not where a quota is 0, or the job has waited on its own.
        had_hosts: The job had all its dnn hosts before they were short.
        still_there: What to raise before another job has its turn; None where this one is gone.
    """

    types: frozenset[str] = frozenset()
    may_pass = True
    had_hosts = False
    still_there: PlatformError | None = None


class FeedError(StokerError):
    """The feed cannot go on."""

    exit_code = 5


class FeedLostError(FeedError, RuntimeError):
    """No data worker is left, or none came in time: `feed/trainer/client.py` says so, code 5."""


class ShippingError(FeedError):
    """A dataset, collate function or sampler index cannot travel to another host."""


class ProtocolError(FeedError):
    """A peer sent what the protocol does not allow."""


class WorkloadError(StokerError):
    """The user's command failed."""

    exit_code = 6


def install_command(extra: str) -> str:
    """Returns the command that installs an extra into this environment.

    stoker is not on PyPI: its name alone would install what somebody else has put there.
    """
    from importlib.metadata import PackageNotFoundError, distribution

    with suppress(PackageNotFoundError, ValueError):
        origin = json.loads(distribution("stoker").read_text("direct_url.json") or "{}")
        url = str(origin.get("url", ""))
        if "vcs_info" in origin:
            url = f"{origin['vcs_info']['vcs']}+{url}@{origin['vcs_info']['commit_id']}"
            return f"pip install 'stoker[{extra}] @ {url}'"
        if "dir_info" in origin:
            edited = "-e " if origin["dir_info"].get("editable") else ""
            folder = unquote(url.removeprefix("file://"))
            return f"pip install {edited}{shlex.quote(f'{folder}[{extra}]')}"
    return f"pip install '.[{extra}]' in a checkout of stoker"
