"""Which runs a webhook is notified of, and where its address is."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from stoker.environment import pipeline_run, webhook_url
from stoker.errors import DeclinedError, StokerError
from stoker.notify import RunEnding, body_of, post
from stoker.platforms.aws import Aws, region_of
from stoker.records import NotifySettings, Workload
from stoker.terminal import say


@contextmanager
def telling(
    workload: Workload, *, run: str, step: str, quiet: bool, is_told: bool = True
) -> Iterator[RunEnding]:
    """Notifies the workload's webhook, if it has one, how the block ended.

    It gets failures and warnings, and all runs where it asks for them. An error of the webhook
    is only printed. Ctrl-C, or a no to the question whether to start, is
    not sent: the user who typed it knows. Nor is anything if another process notifies (`is_told`).

    Args:
        workload: With its webhook.
        run: Name of the run.
        step: What the block does.
        quiet: Whether an error of the webhook is not printed.
        is_told: Whether this process notifies; else another one does.
    """
    ending = RunEnding(workload=workload.name, run=run, step=step)
    try:
        yield ending
    except DeclinedError:
        is_told = False
        raise
    except Exception as err:
        # That the run failed is the greater news.
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
        is_news = ending.status == "failed" or bool(ending.warnings)
        if notify and is_told and (is_news or notify.on == "always"):
            trouble = _told(notify, workload, ending)
            if trouble:
                say(f"notify: webhook failed: {trouble}", quiet=quiet)


def warned(workload: Workload, *, run: str, step: str, text: str, quiet: bool) -> None:
    """Sends a warning about a run that continues; an error of the webhook is only printed.

    Args:
        workload: With its webhook.
        run: Name of the run.
        step: The step that continues.
        text: The warning.
        quiet: Whether an error of the webhook is not printed.
    """
    if workload.notify:
        ending = RunEnding(workload=workload.name, run=run, step=step, status="running", error=text)
        if trouble := _told(workload.notify, workload, ending):
            say(f"notify: webhook failed: {trouble}", quiet=quiet)


def _told(notify: NotifySettings, workload: Workload, ending: RunEnding) -> str:
    """Sends the message; returns why it could not be sent, or an empty text."""
    url = webhook_url(notify.variable, os.environ)
    if not url and notify.secret_arn and pipeline_run(os.environ):
        account = Aws(region=region_of(workload))
        try:
            answer = account.call("secretsmanager", "GetSecretValue", SecretId=notify.secret_arn)
        except StokerError as err:
            return err.what
        url = str(answer.get("SecretString") or "").strip()
    if not url:
        return f"variable {notify.variable}, the webhook's address, is not set"
    return post(url, body_of(ending, format=notify.format), timeout=notify.timeout_seconds)
