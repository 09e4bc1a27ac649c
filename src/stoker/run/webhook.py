"""The webhook of a workload: one POST of {"text": ...} that says how a run ended.

Its address is a secret: anyone who has it can write there. It is in no record and no error message.
"""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from stoker.environment import pipeline_run, webhook_url
from stoker.errors import DeclinedError, StokerError, TerminatedError
from stoker.logs import printable
from stoker.platforms.aws import Aws, region_of
from stoker.records import Workload
from stoker.records.outcome import Outcome
from stoker.terminal import say

TIMEOUT_SECONDS = 10.0
_ATTEMPTS = 2
_MAX_ERROR = 500


@dataclass(slots=True, kw_only=True)
class RunEnding:
    """How a command ended, filled in as it runs; `step` is the run's last one.

    Attributes:
        warnings: What went wrong though the run may have succeeded; it is sent for these, too.
    """

    run: str
    step: str
    status: Literal["succeeded", "failed", "stopped"] = "succeeded"
    exit_code: int = 0
    error: str = ""
    warnings: tuple[str, ...] = ()
    links: dict[str, str] = field(default_factory=dict)

    def failed(self, error: str, *, exit_code: int = 0) -> None:
        self.status = "failed"
        self.error = error
        self.exit_code = exit_code

    def take(self, outcome: Outcome) -> None:
        """Takes over the result of the run."""
        if not outcome.is_good:
            self.failed(outcome.words, exit_code=outcome.exit_code)
        # A training run that was stopped has not failed.
        if outcome.state == "stopped":
            self.status = "stopped"

    def text(self, workload: str) -> str:
        head = f"stoker: run {self.run} of {workload} {self.status}"
        if self.status != "succeeded":
            head += f" in {self.step}"
        if self.exit_code:
            head += f" (exit code {self.exit_code})"
        if self.error:
            head += f": {_line(self.error)}"
        warnings = [f"warning: {_line(text)}" for text in self.warnings]
        links = [f"{name}: {address}" for name, address in self.links.items() if address]
        return "\n".join([head, *warnings, *links])


def _line(text: str) -> str:
    return printable(" ".join(text.split()))[:_MAX_ERROR]


@contextmanager
def telling(
    workload: Workload, *, run: str, step: str, quiet: bool, is_told: bool = True
) -> Iterator[RunEnding]:
    """Notifies the workload's webhook, if it has one, how the block ended.

    It gets failures and warnings, and all runs where it asks for them. What a person stops is not
    sent.

    Args:
        workload: With its webhook.
        run: Name of the run.
        step: What the block does.
        quiet: Whether an error of the webhook is not printed.
        is_told: Whether this process notifies; else another one does.
    """
    ending = RunEnding(run=run, step=step)
    try:
        yield ending
    except (DeclinedError, KeyboardInterrupt, TerminatedError):
        is_told = False
        raise
    except Exception as err:
        what = err.what if isinstance(err, StokerError) else f"{type(err).__name__}: {err}"
        # That the run failed is the greater news.
        if ending.status != "failed":
            ending.failed(what, exit_code=getattr(err, "exit_code", StokerError.exit_code))
        raise
    finally:
        notify = workload.notify
        is_news = ending.status == "failed" or ending.warnings
        if notify and is_told and (is_news or notify.on == "always"):
            trouble = _post(workload, ending.text(workload.name))
            if trouble:
                say(f"notify: webhook failed: {trouble}", quiet=quiet)


def _post(workload: Workload, text: str) -> str:
    """Sends a text, twice at most; returns why it could not be sent, or an empty text."""
    notify = workload.notify
    assert notify is not None
    url = webhook_url(notify.variable, os.environ)
    trouble = f"variable {notify.variable}, the webhook's address, is not set"
    if not url and notify.secret_arn and pipeline_run():
        aws = Aws(region=region_of(workload))
        try:
            answer = aws.call("secretsmanager", "GetSecretValue", SecretId=notify.secret_arn)
        except StokerError as err:
            return err.what
        url = str(answer.get("SecretString") or "").strip()
    for _ in range(_ATTEMPTS if url else 0):
        try:
            request = urllib.request.Request(
                url,
                data=json.dumps({"text": text}).encode(),
                headers={"Content-Type": "application/json"},
            )
            urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS).close()
            return ""
        except urllib.error.HTTPError as err:
            trouble = f"the webhook answered with {err.code}"
        # Only its kind: the text of an error may hold the address.
        except Exception as err:
            trouble = f"the webhook cannot be reached: {type(err).__name__}"
    return trouble
