"""A webhook's message of how a run ended: JSON for Slack, Teams and plain receivers.

The webhook's address is a secret: anyone who has it can write there. It is in no record and in no
error message: messages of Python's own libraries can hold it, so only their kind is printed.
"""

import http.client
import json
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Literal

from stoker.errors import ServiceError
from stoker.logs import now_utc, printable
from stoker.records import Json, Notice
from stoker.records.base import Document
from stoker.repeat import MAX_PAUSE_SECONDS, may_pass, repeated, within

ATTEMPTS = 3
_MAX_ERROR = 500


@dataclass(slots=True, kw_only=True)
class RunEnding:
    """How a command ended, filled in as it runs; `status` is the run's, and `step` its last one.

    Attributes:
        note: What else to tell of it, in its first line: why nothing was trained.
        warnings: What went wrong though the run may have succeeded; it is sent for these, too.
        notices: The same with their kinds, where they are of an evaluation.
    """

    workload: str
    run: str
    step: str
    status: Literal["running", "succeeded", "failed", "stopped"] = "succeeded"
    exit_code: int | None = None
    error: str = ""
    note: str = ""
    warnings: tuple[str, ...] = ()
    notices: tuple[Notice, ...] = ()
    links: dict[str, str] = field(default_factory=dict)

    def tells(self, notices: tuple[Notice, ...]) -> None:
        """Adds what an evaluation tells."""
        self.notices = notices
        self.warnings = tuple(notice.text for notice in notices)

    def failed(self, error: str, *, exit_code: int | None = None) -> None:
        self.status = "failed"
        self.error = error
        self.exit_code = exit_code


def body_of(ending: RunEnding, *, format: Literal["text", "teams"]) -> dict[str, Json]:
    """Returns what is sent. Pure but for the time."""
    error = _line(ending.error)
    head = f"stoker: run {ending.run} of {ending.workload} {ending.status}"
    if ending.step and ending.status != "succeeded":
        head += f" in {ending.step}"
    if ending.exit_code:
        head += f" (exit code {ending.exit_code})"
    note = _line(ending.note)
    lines = [": ".join(filter(None, (head, error, note)))]
    warnings = [_line(text) for text in ending.warnings]
    lines += [f"warning: {text}" for text in warnings]
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
        "note": note,
        "warnings": [*warnings],
        "notices": [{"kind": notice.kind, "text": _line(notice.text)} for notice in ending.notices],
        "links": {**ending.links},
        "when": now_utc(),
    }
    return {"text": "\n".join(lines), "stoker": facts}


def _line(text: str) -> str:
    return printable(" ".join(text.split()))[:_MAX_ERROR]


def post(url: str, body: Document, *, timeout: float) -> str:
    """Sends the body; returns why it could not be sent, without the address, or an empty text.

    Tries up to ATTEMPTS times, `timeout` seconds each, where the webhook does not answer, is
    overloaded or fails (429, 5xx); waits between them as it asks, at most MAX_PAUSE_SECONDS.
    """
    if not url.startswith(("https://", "http://")):
        return "the webhook's address does not begin with https://"
    left = iter(range(ATTEMPTS - 1))
    try:
        repeated(
            partial(_attempt, url, json.dumps(body).encode(), timeout=timeout),
            seconds=ATTEMPTS * (timeout + MAX_PAUSE_SECONDS),
            is_passing=lambda error: may_pass(error) and next(left, None) is not None,
        )
    except ServiceError as err:
        return err.what
    return ""


def _attempt(url: str, content: bytes, *, timeout: float) -> None:
    """Sends once; raises ServiceError without the address."""

    def send() -> None:
        request = urllib.request.Request(
            url, data=content, headers={"Content-Type": "application/json", "User-Agent": "stoker"}
        )
        urllib.request.build_opener(_NoRedirect).open(request, timeout=timeout).close()

    kind: Literal["away", "refused"] = "away"
    try:
        # Neither a slow resolver nor an answer that trickles in exceeds the timeout.
        within(timeout, send)
        return
    except urllib.error.HTTPError as err:
        err.close()
        pause = _pause(err.headers.get("Retry-After", ""))
        kind = "away" if err.code == 429 or err.code >= 500 else "refused"
        raise ServiceError(
            f"the webhook answered with {err.code}",
            kind=kind,
            retry_after_seconds=pause,
        ) from None
    except TimeoutError:
        why = f"no answer within {timeout:g} s"
    except (OSError, http.client.HTTPException) as err:
        reason = err.reason if isinstance(err, urllib.error.URLError) else err
        words = reason.strerror if isinstance(reason, OSError) and reason is not err else ""
        why = words or type(reason).__name__
    except Exception as err:
        # The address is malformed.
        kind = "refused"
        why = type(err).__name__
    raise ServiceError(f"the webhook cannot be reached: {why}", kind=kind)


def _pause(retry_after: str) -> float:
    """Returns the seconds in a Retry-After header, which may be a date; 0 where it is neither."""
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(retry_after).timestamp() - time.time()
        except (ValueError, OverflowError):
            return 0.0
    # In this order: not a number is 0.
    return min(max(0.0, seconds), MAX_PAUSE_SECONDS)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Handler that treats a redirection as an answer: urllib would follow it with a GET."""

    def redirect_request(self, *arguments: object) -> None:
        """Returns None: no further request."""
