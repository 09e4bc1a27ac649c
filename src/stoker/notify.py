"""A webhook's message of how a run ended: JSON for Slack, Teams and plain receivers.

The webhook's address is a secret: anyone who has it can write there. It is in no record and in no
error message: messages of Python's own libraries can hold it, so only their kind is printed.
"""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from stoker.logs import now_utc, printable
from stoker.records import Json

_MAX_ERROR = 500


@dataclass(slots=True, kw_only=True)
class RunEnding:
    """How a command ended, filled in as it runs.

    Attributes:
        workload: Name of the workload.
        run: Name of the run.
        step: Step that failed, or the last one.
        status: Status of the run, which may differ from the command's.
        error: What failed, in a line; empty if nothing did.
        links: Name to address or file.
    """

    workload: str
    run: str
    step: str
    status: Literal["succeeded", "failed", "stopped"] = "succeeded"
    exit_code: int | None = None
    error: str = ""
    links: dict[str, str] = field(default_factory=dict)

    def failed(self, error: str, *, exit_code: int | None = None) -> None:
        """Records that the run failed."""
        self.status, self.error, self.exit_code = "failed", error, exit_code


def body_of(ending: RunEnding, *, format: Literal["text", "teams"]) -> dict[str, Json]:
    """Returns what is sent. Pure but for the time."""
    error = printable(" ".join(ending.error.split()))[:_MAX_ERROR]
    how = f" in {ending.step}" if ending.status != "succeeded" and ending.step else ""
    code = f" (exit code {ending.exit_code})" if ending.exit_code else ""
    head = f"stoker: run {ending.run} of {ending.workload} {ending.status}{how}{code}"
    lines = [f"{head}: {error}" if error else head]
    lines += [f"{name}: {address}" for name, address in ending.links.items()]
    if format == "teams":
        card: Json = {
            "type": "AdaptiveCard",
            "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
            "version": "1.4",
            "body": [{"type": "TextBlock", "wrap": True, "text": "\n\n".join(lines)}],
        }
        kind = "application/vnd.microsoft.card.adaptive"
        return {"type": "message", "attachments": [{"contentType": kind, "content": card}]}
    facts: dict[str, Json] = {
        "workload": ending.workload,
        "run": ending.run,
        "step": ending.step,
        "status": ending.status,
        "exit_code": ending.exit_code,
        "error": error,
        "links": {**ending.links},
        "when": now_utc(),
    }
    return {"text": "\n".join(lines), "stoker": facts}


def post(url: str, body: Mapping[str, Json], *, timeout: float) -> str:
    """Sends the body; returns why it could not be sent, without the address, or an empty text.

    Blocks for about `timeout` seconds at most.
    """
    if not url.startswith(("https://", "http://")):
        return "the webhook's address does not begin with https://"
    headers = {"Content-Type": "application/json", "User-Agent": "stoker"}
    try:
        request = urllib.request.Request(url, data=json.dumps(body).encode(), headers=headers)
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=timeout):
            return ""
    except urllib.error.HTTPError as err:
        err.close()
        return f"the webhook answered with {err.code}"
    except (OSError, ValueError, http.client.HTTPException) as err:
        reason = err.reason if isinstance(err, urllib.error.URLError) else err
        words = reason.strerror if isinstance(reason, OSError) and reason is not err else ""
        return f"the webhook cannot be reached: {words or type(reason).__name__}"


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Handler that treats a redirection as an answer: urllib would follow it with a GET."""

    def redirect_request(self, *arguments: object) -> None:
        """Returns None: no further request."""
