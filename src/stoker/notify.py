"""A webhook's message of how a run ended: JSON for Slack, Teams and plain receivers.

The webhook's address is a secret: anyone who has it can write there. It is in no record and in no
error message: messages of Python's own libraries can hold it, so only their kind is printed.
"""

import http.client
import json
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Literal

from stoker.errors import ServiceError
from stoker.logs import now_utc, printable
from stoker.records import Json
from stoker.repeat import MAX_PAUSE_SECONDS, may_pass, repeated

ATTEMPTS = 3
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
    status: Literal["running", "succeeded", "failed", "stopped"] = "succeeded"
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
    """Sends once; raises ServiceError without the address.

    In a thread: neither a slow resolver nor an answer that trickles in exceeds the timeout.
    """
    ends: queue.SimpleQueue[ServiceError | None] = queue.SimpleQueue()

    def send() -> None:
        headers = {"Content-Type": "application/json", "User-Agent": "stoker"}
        try:
            request = urllib.request.Request(url, data=content, headers=headers)
            with urllib.request.build_opener(_NoRedirect).open(request, timeout=timeout):
                ends.put(None)
        except urllib.error.HTTPError as err:
            err.close()
            pause = _pause(err.headers.get("Retry-After", ""))
            is_passing = err.code == 429 or err.code >= 500
            what = f"the webhook answered with {err.code}"
            kind: Literal["away", "refused"] = "away" if is_passing else "refused"
            ends.put(ServiceError(what, kind=kind, status=err.code, retry_after_seconds=pause))
        except (OSError, http.client.HTTPException) as err:
            reason = err.reason if isinstance(err, urllib.error.URLError) else err
            words = reason.strerror if isinstance(reason, OSError) and reason is not err else ""
            ends.put(_away(words or type(reason).__name__))
        except Exception as err:
            # The address is malformed.
            ends.put(ServiceError(f"the webhook cannot be reached: {type(err).__name__}"))

    threading.Thread(target=send, name="webhook", daemon=True).start()
    try:
        end = ends.get(timeout=timeout)
    except queue.Empty:
        end = _away(f"no answer within {timeout:g} s")
    if end is not None:
        raise end


def _away(why: str) -> ServiceError:
    return ServiceError(f"the webhook cannot be reached: {why}", kind="away")


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
