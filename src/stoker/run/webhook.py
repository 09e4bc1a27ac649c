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

from stoker.environment import pipeline_run, webhook_url
from stoker.errors import DeclinedError, StokerError, TerminatedError
from stoker.logs import printable
from stoker.platforms.aws import Aws
from stoker.records import NotifySettings, Workload
from stoker.records.outcome import Outcome
from stoker.terminal import say

TIMEOUT_SECONDS = 10.0
_MAX_ERROR = 500


@dataclass(slots=True, kw_only=True)
class RunEnding:
    """How a command ended, filled in as it runs; `step` is the run's last one.

    Attributes:
        failure: Why it failed; empty: it succeeded.
        is_stopped: Whether a person stopped it, which is not sent.
        warnings: What went wrong though the run may have succeeded; it is sent for these, too.
    """

    run: str
    step: str
    failure: str = ""
    exit_code: int = 0
    is_stopped: bool = False
    warnings: tuple[str, ...] = ()
    links: dict[str, str] = field(default_factory=dict)

    def take(self, outcome: Outcome) -> None:
        """Takes over the result of the run."""
        self.failure = outcome.reason
        self.exit_code = outcome.exit_code
        self.is_stopped = outcome.state == "stopped"

    def text(self, workload: str) -> str:
        head = f"stoker: run {self.run} of {workload} succeeded"
        if self.failure:
            code = f" (exit code {self.exit_code})" if self.exit_code else ""
            head = f"{head.removesuffix('succeeded')}failed in {self.step}{code}: {self.failure}"
        lines = [head, *(f"warning: {text}" for text in self.warnings)]
        lines += [f"{name}: {address}" for name, address in self.links.items() if address]
        return "\n".join(printable(" ".join(line.split()))[:_MAX_ERROR] for line in lines)


@contextmanager
def telling(
    workload: Workload, *, run: str, step: str, is_told: bool = True
) -> Iterator[RunEnding]:
    """Notifies the workload's webhook, if it has one, how the block ended.

    It gets failures and warnings, and all runs where it asks for them. What a person stops is not
    sent.

    Args:
        workload: With its webhook.
        run: Name of the run.
        step: What the block does.
        is_told: Whether this process notifies; else another one does.
    """
    ending = RunEnding(run=run, step=step)
    try:
        yield ending
    except (DeclinedError, KeyboardInterrupt, TerminatedError):
        ending.is_stopped = True
        raise
    except Exception as err:
        # That the run failed is the greater news.
        ending.failure = ending.failure or getattr(err, "what", "") or repr(err)
        ending.exit_code = ending.exit_code or getattr(err, "exit_code", StokerError.exit_code)
        raise
    finally:
        notify = workload.notify
        is_news = ending.failure or ending.warnings or (notify and notify.on == "always")
        if notify and is_told and is_news and not ending.is_stopped:
            _post(notify, workload, ending.text(workload.name))


def _post(notify: NotifySettings, workload: Workload, text: str) -> None:
    """Sends a text; an error is one line of output."""
    try:
        url = webhook_url(notify.variable, os.environ)
        trouble = "" if url else f"variable {notify.variable}, the webhook's address, is not set"
        if not url and notify.secret_arn and pipeline_run():
            aws = Aws(region=workload.sagemaker_region)
            answer = aws.call("secretsmanager", "GetSecretValue", SecretId=notify.secret_arn)
            url = str(answer.get("SecretString") or "").strip()
            trouble = ""
        if not trouble:
            body = json.dumps({"text": text}).encode()
            request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
            urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS).close()
    except StokerError as err:
        trouble = err.what
    except urllib.error.HTTPError as err:
        trouble = f"the webhook answered with {err.code}"
    # Only its kind: the text of an error may hold the address.
    except Exception as err:
        trouble = f"the webhook cannot be reached: {type(err).__name__}"
    if trouble:
        say(f"notify: webhook failed: {trouble}")
