"""The webhook of a workload: one POST of {"text": ...} that says how a run ended.

Its address is a secret: anyone who has it can write there. It is in no record and no error message.
"""

import json
import os
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from stoker.environment import pipeline_run, webhook_url
from stoker.errors import DeclinedError, TerminatedError
from stoker.logs import printable
from stoker.platforms.aws import Aws
from stoker.records import NotifySettings, Workload
from stoker.records.outcome import Outcome
from stoker.terminal import say

TIMEOUT_SECONDS = 10.0


@dataclass(slots=True, kw_only=True)
class RunEnding:
    """How a command ended, filled in as it runs; `step` is the run's last one.

    Attributes:
        failure: Why it failed; empty: it succeeded.
        warnings: What went wrong though the run may have succeeded; it is sent for these, too.
        is_told: Whether the webhook is called; not for what a person stopped.
    """

    run: str
    step: str
    failure: str = ""
    warnings: tuple[str, ...] = ()
    links: dict[str, str] = field(default_factory=dict)
    is_told: bool = True

    def take(self, outcome: Outcome) -> None:
        """Takes over the result of the run."""
        self.failure = outcome.reason
        if outcome.state == "stopped":
            self.is_told = False

    def text(self, workload: str) -> str:
        end = f"failed in {self.step}: {self.failure}" if self.failure else "succeeded"
        lines = [f"stoker: run {self.run} of {workload} {end}"]
        lines += [f"warning: {text}" for text in self.warnings]
        lines += [f"{name}: {address}" for name, address in self.links.items() if address]
        return "\n".join(printable(line) for line in lines)


@contextmanager
def telling(
    workload: Workload, *, run: str, step: str, is_told: bool = True
) -> Iterator[RunEnding]:
    """Notifies the workload's webhook, if it has one, how the block ended.

    It gets failures and warnings, and all runs where it asks for them.

    Args:
        workload: With its webhook.
        run: Name of the run.
        step: What the block does.
        is_told: Whether this process notifies; else another one does.
    """
    ending = RunEnding(run=run, step=step, is_told=is_told)
    try:
        yield ending
    except (DeclinedError, KeyboardInterrupt, TerminatedError):
        ending.is_told = False
        raise
    except Exception as err:
        ending.failure = getattr(err, "what", "") or repr(err)
        raise
    finally:
        notify = workload.notify
        is_news = ending.failure or ending.warnings or (notify and notify.on == "always")
        if notify and ending.is_told and is_news:
            _post(notify, workload, ending.text(workload.name))


def _post(notify: NotifySettings, workload: Workload, text: str) -> None:
    """Sends a text; an error is one line of output."""
    try:
        url = webhook_url(notify.variable, os.environ)
        if not url and notify.secret_arn and pipeline_run():
            aws = Aws(region=workload.sagemaker_region)
            answer = aws.call("secretsmanager", "GetSecretValue", SecretId=notify.secret_arn)
            url = str(answer["SecretString"]).strip()
        if not url:
            say(f"notify: webhook failed: variable {notify.variable} with its address is not set")
            return
        body = json.dumps({"text": text}).encode()
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS).close()
    except Exception as err:
        # Of others than stoker's only the kind and HTTP's code: a text may hold the address.
        words = getattr(err, "what", "") or f"{type(err).__name__} {getattr(err, 'code', '')}"
        say(f"notify: webhook failed: {words.strip()}")
