"""A webhook is told how a command ended, with what is known of the run."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from stoker.cli.progress import say
from stoker.errors import DeclinedError, StokerError

if TYPE_CHECKING:
    from stoker.records import NotifySettings, Workload

Status = Literal["succeeded", "failed", "stopped"]


@dataclass(slots=True, kw_only=True)
class ToldEnding:
    """Holds what is known so far of how a command ends.

    Attributes:
        status: Status of the run; the command itself may end well whatever became of it.
    """

    run: str
    step: str
    status: Status = "succeeded"
    exit_code: int | None = None
    error: str = ""
    links: dict[str, str] = field(default_factory=dict)

    def failed(self, error: str, *, exit_code: int | None = None) -> None:
        """Notes that the run failed."""
        self.status, self.error, self.exit_code = "failed", error, exit_code


@contextmanager
def telling(
    workload: "Workload", *, run: str, step: str, quiet: bool, is_told: bool = True
) -> Iterator[ToldEnding]:
    """Tells the workload's webhook, if it has one, how the block ended.

    What goes wrong with that is a line, and changes nothing. Ctrl-C is not told, nor a no to
    the question whether to start: whoever typed it knows.

    Args:
        workload: Its `notify` says whom.
        run: Name of the run.
        step: Step that the block does.
        quiet: Whether to print nothing.
        is_told: False: somebody else tells of this run.
    """
    ending = ToldEnding(run=run, step=step)
    try:
        yield ending
    except DeclinedError:
        is_told = False
        raise
    except Exception as err:
        # That the run failed is the greater news, where it did.
        if ending.status != "failed" and isinstance(err, StokerError):
            ending.failed(err.what, exit_code=err.exit_code)
        elif ending.status != "failed":
            ending.failed(f"{type(err).__name__}: {err}", exit_code=StokerError.exit_code)
        raise
    except BaseException:
        is_told = False
        raise
    finally:
        notify = workload.notify
        if notify and is_told and (ending.status == "failed" or notify.on == "always"):
            trouble = _told(notify, workload, ending)
            if trouble:
                say(f"notify: nobody was told: {trouble}", quiet=quiet)


def _told(notify: "NotifySettings", workload: "Workload", ending: ToldEnding) -> str:
    """Sends it, and returns why it could not be sent; empty: it was."""
    from stoker.notify import WebhookMessage, body_of, post
    from stoker.settings import pipeline_run, webhook_url

    url = webhook_url(notify.variable, os.environ)
    if not url and notify.secret_arn and pipeline_run(os.environ):
        url, trouble = _of_secrets_manager(notify.secret_arn, workload)
        if trouble:
            return trouble
    if not url:
        return f"variable {notify.variable}, the webhook's address, is not set"
    outcome = WebhookMessage(
        workload=workload.name,
        run=ending.run,
        step=ending.step,
        status=ending.status,
        exit_code=ending.exit_code,
        error=ending.error,
        links=ending.links,
    )
    return post(url, body_of(outcome, format=notify.format), timeout=notify.timeout_seconds)


def _of_secrets_manager(arn: str, workload: "Workload") -> tuple[str, str]:
    """Returns the address in the secret, or why it cannot be read."""
    from stoker.cli.workloads import region_of
    from stoker.platforms.aws import Aws

    try:
        account = Aws(region=region_of(workload))
        answer = account.call("secretsmanager", "GetSecretValue", SecretId=arn)
    except StokerError as err:
        return "", err.what
    return str(answer.get("SecretString") or "").strip(), ""
