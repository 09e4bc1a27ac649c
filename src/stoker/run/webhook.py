"""The webhook of a workload: one POST of {"text": ...} that says how a run ended.

Its address is a secret: anyone who has it can write there. It is in no record and no error message.
"""

import json
import os
import urllib.request
from dataclasses import dataclass

from stoker.environment import pipeline_run, webhook_url
from stoker.errors import EXIT_TERMINATED
from stoker.logs import printable
from stoker.platforms.aws import Aws
from stoker.records import Workload
from stoker.records.outcome import Outcome
from stoker.terminal import say

TIMEOUT_SECONDS = 10.0


@dataclass(slots=True, kw_only=True)
class RunEnding:
    """How a command ended, filled in as it runs; `step` is the run's last one.

    Attributes:
        failure: Why it failed; empty: it succeeded.
        warnings: What went wrong though the run may have succeeded; it is sent for these, too.
        report: Its address; page: the job's; mlflow: the run's there.
        is_told: Whether the webhook is called; not for what a person stopped.
    """

    run: str
    step: str
    failure: str = ""
    warnings: tuple[str, ...] = ()
    report: str = ""
    page: str = ""
    mlflow: str = ""
    is_told: bool = True

    def take(self, outcome: Outcome) -> None:
        """Takes over the result of the run."""
        self.failure = outcome.reason
        if outcome.exit_code == EXIT_TERMINATED:
            self.is_told = False

    def text(self, workload: str) -> str:
        end = f"failed in {self.step}: {self.failure}" if self.failure else "succeeded"
        lines = [f"stoker: run {self.run} of {workload} {end}"]
        lines += [f"warning: {text}" for text in self.warnings]
        lines += filter(None, (self.report, self.page, self.mlflow))
        return "\n".join(map(printable, lines))


def post(workload: Workload, ending: RunEnding) -> None:
    """Tells the workload's webhook, if it has one, how a run ended; an error is one line.

    It gets failures and warnings, and all runs where it asks for them.
    """
    notify = workload.notify
    if not notify or not ending.is_told:
        return
    if not ending.failure and not ending.warnings and notify.on != "always":
        return
    try:
        url = webhook_url(notify.variable, os.environ)
        if not url and notify.secret_arn and pipeline_run():
            aws = Aws(region=workload.sagemaker_region)
            answer = aws.call("secretsmanager", "GetSecretValue", SecretId=notify.secret_arn)
            url = str(answer["SecretString"]).strip()
        if not url:
            say(f"notify: webhook failed: variable {notify.variable} with its address is not set")
            return
        body = json.dumps({"text": ending.text(workload.name)}).encode()
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS).close()
    except Exception as err:
        # Of others than stoker's only the kind and HTTP's code: a text may hold the address.
        words = getattr(err, "what", "") or f"{type(err).__name__} {getattr(err, 'code', '')}"
        say(f"notify: webhook failed: {words.strip()}")
