"""Tells a webhook how a run ended: JSON that Slack, Teams and plain receivers take.

It has `notify.timeout_seconds`; `cli/notify.py` says of which runs, and finds the address.

The webhook's address is a secret: who has it can write to the channel. It is in no record, and in
no message of an error: those of Python's own libraries can hold it, so only their kind is told.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookMessage:
    """Says how a run ended.

    Attributes:
        workload: Name of the workload.
        run: Name of the run.
        step: Step that failed, or the last one.
        status: succeeded, failed or stopped.
        exit_code: Exit code of the command; None where it is not known.
        error: What failed, in a line; empty where nothing did.
        links: Where to look: what it is to its address or file.
    """

    workload: str
    run: str
    step: str
    status: Literal["succeeded", "failed", "stopped"]
    exit_code: int | None = None
    error: str = ""
    links: Mapping[str, str] = field(default_factory=dict)


def body_of(outcome: WebhookMessage, *, format: Literal["text", "teams"]) -> dict[str, Json]:
    """Returns what is sent. Pure but for the time."""
    text = "\n".join(_lines(outcome))
    if format == "teams":
        card: Json = {
            "type": "AdaptiveCard",
            "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
            "version": "1.4",
            "body": [{"type": "TextBlock", "wrap": True, "text": text.replace("\n", "\n\n")}],
        }
        kind = "application/vnd.microsoft.card.adaptive"
        return {"type": "message", "attachments": [{"contentType": kind, "content": card}]}
    facts: dict[str, Json] = {
        "workload": outcome.workload,
        "run": outcome.run,
        "step": outcome.step,
        "status": outcome.status,
        "exit_code": outcome.exit_code,
        "error": _error(outcome),
        "links": dict(outcome.links),
        "when": now_utc(),
    }
    return {"text": text, "stoker": facts}


def post(url: str, body: Mapping[str, Json], *, timeout: float) -> str:
    """Sends the body; returns why it could not be sent, without the address; empty: it was.

    Blocks for about `timeout` seconds at most.
    """
    if not url.startswith(("https://", "http://")):
        return "the webhook's address does not begin with https://"
    try:
        request = urllib.request.Request(
            url,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json", "User-Agent": "stoker"},
        )
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=timeout):
            return ""
    except urllib.error.HTTPError as err:
        err.close()
        return f"the webhook answered with {err.code}"
    except urllib.error.URLError as err:
        reason = err.reason
        words = reason.strerror if isinstance(reason, OSError) else ""
        return f"the webhook cannot be reached: {words or type(reason).__name__}"
    except (OSError, ValueError, http.client.HTTPException) as err:
        return f"the webhook cannot be reached: {type(err).__name__}"


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Takes a redirection for an answer: urllib would follow it with a GET, and nobody is told."""

    def redirect_request(self, *arguments: object) -> None:
        """Returns that there is no further request."""


def _lines(outcome: WebhookMessage) -> list[str]:
    how = f" in {outcome.step}" if outcome.status != "succeeded" and outcome.step else ""
    code = "" if outcome.exit_code in (None, 0) else f" (exit code {outcome.exit_code})"
    error = _error(outcome)
    head = f"stoker: run {outcome.run} of {outcome.workload} {outcome.status}{how}{code}"
    links = [f"{name}: {address}" for name, address in outcome.links.items()]
    return [f"{head}: {error}" if error else head, *links]


def _error(outcome: WebhookMessage) -> str:
    return printable(" ".join(outcome.error.split()))[:_MAX_ERROR]
