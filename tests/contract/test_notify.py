"""Webhooks are told how a run ended: a receiver on loopback gets what is sent."""

import json
import socket
import struct
import threading
import time
from collections.abc import Callable
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stoker.cli.main import run as command
from stoker.errors import DeclinedError, GateError, TerminatedError
from stoker.notify import RunEnding, body_of, post
from stoker.records import NotifySettings, Workload, to_json, write_json
from stoker.repeat import repeated
from stoker.run.webhook import telling, warned
from support import sample_records

SECRET = "T0/B0/a-secret"


class Receiver:
    """Receives webhooks, and answers with `code`, after what `first` does."""

    def __init__(self) -> None:
        self.code = 200
        # Answers to the first posts: a code with headers, or something else to do.
        self.first: list[tuple[int, dict[str, str]] | Callable[[Any], None]] = []
        self.bodies: list[dict[str, Any]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.headers["Content-Type"] == "application/json"
                receiver.bodies.append(json.loads(content))
                answer = receiver.first.pop(0) if receiver.first else (receiver.code, {})
                if callable(answer):
                    answer(self)
                    return
                code, headers = answer
                self.send_response(code)
                for name, value in {"Location": "/elsewhere", **headers}.items():
                    self.send_header(name, value)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/{SECRET}"


@pytest.fixture
def receiver(monkeypatch):
    made = Receiver()
    thread = threading.Thread(target=made.server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("STOKER_WEBHOOK_URL", made.url)
    monkeypatch.setattr("stoker.repeat.MIN_PAUSE_SECONDS", 0.001)
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join()


def ends(*, run="mnist-1", step="run", **notify):
    return telling(of(**notify), run=run, step=step, quiet=False)


def of(**notify: Any) -> Workload:
    return Workload(name="mnist", command=("true",), notify=NotifySettings(**notify))


def test_a_run_that_failed_is_told_with_its_facts(receiver):
    words = "accuracy is 0.5, asked for at least 0.9"

    def judge() -> None:
        with ends() as ending:
            ending.step, ending.links["report"] = "evaluate", "runs/mnist-1/report.html"
            raise GateError(words)

    with pytest.raises(GateError):
        judge()
    (body,) = receiver.bodies
    head, link = body["text"].splitlines()
    assert head == f"stoker: run mnist-1 of mnist failed in evaluate (exit code 3): {words}"
    assert link == "report: runs/mnist-1/report.html"
    facts = body["stoker"]
    assert (facts["run"], facts["step"], facts["exit_code"]) == ("mnist-1", "evaluate", 3)


def test_a_run_that_ends_well_is_told_only_where_it_is_asked_for(receiver):
    for settings in ({}, {"on": "always"}):
        with ends(**settings):
            pass
    (body,) = receiver.bodies
    assert body["text"] == "stoker: run mnist-1 of mnist succeeded"


def test_a_run_that_ends_well_with_a_warning_is_told(receiver):
    words = "the data group made 0 of 1,240 batches, $3.10"
    with ends() as ending:
        ending.warnings = (words,)
    (body,) = receiver.bodies
    head, warning = body["text"].splitlines()
    assert (head, warning) == ("stoker: run mnist-1 of mnist succeeded", f"warning: {words}")
    assert body["stoker"]["warnings"] == [words]


def test_a_warning_of_a_run_that_continues_is_sent_at_once(receiver):
    warned(of(), run="mnist-1", step="train", text="$8 of $10 are spent", quiet=True)
    (body,) = receiver.bodies
    assert body["text"] == "stoker: run mnist-1 of mnist running in train: $8 of $10 are spent"
    assert body["stoker"]["status"] == "running"


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), TerminatedError(), DeclinedError("no")])
def test_what_a_person_stops_is_not_told(receiver, stop):
    with pytest.raises(type(stop)), ends(on="always"):
        raise stop
    assert not receiver.bodies


@pytest.mark.parametrize(
    ("code", "tries"), [(500, 3), (503, 3), (429, 3), (404, 1), (403, 1), (302, 1)]
)
def test_a_webhook_that_fails_is_a_line_without_its_url_after_three_tries_at_most(
    receiver, code, tries, capsys
):
    receiver.code = code
    with ends() as ending:
        ending.failed("no", exit_code=6)
    said = "".join(capsys.readouterr())
    assert said == f"notify: webhook failed: the webhook answered with {code}\n"
    assert len(receiver.bodies) == tries


def reset(handler: BaseHTTPRequestHandler) -> None:
    linger = struct.pack("ii", 1, 0)
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    handler.connection.close()


@pytest.mark.parametrize("fault", [(429, {}), (500, {}), (503, {"Retry-After": "x"}), reset])
def test_a_webhook_that_falters_twice_is_told(receiver, fault, capsys):
    receiver.first = [fault, fault]
    with ends() as ending:
        ending.failed("no", exit_code=6)
    assert len(receiver.bodies) == 3
    assert "".join(capsys.readouterr()) == ""


@pytest.mark.parametrize(
    ("header", "pause"),
    [("0.002", 0.002), ("7", 7.0), ("9999999", 60.0), ("-1", 0.001), ("nan", 0.001), ("date", 30)],
)
def test_a_webhook_is_left_alone_as_long_as_it_asks(receiver, monkeypatch, header, pause):
    slept: list[float] = []
    monkeypatch.setitem(repeated.__kwdefaults__, "sleep", slept.append)
    is_date = header == "date"
    asked = formatdate(time.time() + 30, usegmt=True) if is_date else header
    receiver.first = [(503 if is_date else 429, {"Retry-After": asked})]
    assert post(receiver.url, {"text": ""}, timeout=50) == ""
    assert slept == [pytest.approx(pause, abs=5 * is_date)]


def test_an_answer_that_trickles_in_is_not_waited_for(receiver):
    is_over = threading.Event()

    def trickle(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"HTTP/1.1 200 ")
        while not is_over.wait(0.02):
            handler.wfile.write(b"x")

    receiver.first = [trickle] * 3
    try:
        said = post(receiver.url, {"text": ""}, timeout=0.3)
    finally:
        is_over.set()
    assert said == "the webhook cannot be reached: no answer within 0.3 s"
    assert len(receiver.bodies) == 3


@pytest.mark.parametrize(
    "url", ["{}", "file:///{}", "http://127.0.0.1:1/{}", "http://127.0.0.1:1/{} a", "https://[{}"]
)
def test_no_address_is_in_what_is_said_of_it(url, monkeypatch):
    monkeypatch.setattr("stoker.repeat.MIN_PAUSE_SECONDS", 0.001)
    said = post(url.format(SECRET), {"text": ""}, timeout=5)
    assert said
    assert SECRET not in said


def test_without_its_variable_nobody_is_told_and_that_is_said(monkeypatch, capsys):
    monkeypatch.delenv("STOKER_WEBHOOK_URL", raising=False)
    with ends() as ending:
        ending.failed("no")
    assert "variable STOKER_WEBHOOK_URL" in "".join(capsys.readouterr())


def finish_words(workload, *, outcome):
    given = {"workload": to_json(workload), "run_id": "0a1b2c3d-4e5f", "outcome": outcome}
    told = {"inputs": {"parameterValues": given}, "outputs": {"outputFile": "unused"}}
    return ["train", "--finish", "--executor-input", json.dumps(told)]


def test_the_last_step_of_a_pipeline_tells_what_kubeflow_says_of_the_run(receiver, capsys):
    status = {"state": "FAILED", "error": {"message": "task gate failed"}}
    for state in ("FAILED", "SUCCEEDED", "COMPLETE"):
        assert command(finish_words(of(), outcome={**status, "state": state})) == 0
    (body,) = receiver.bodies
    assert body["stoker"]["run"] == "mnist-0a1b2c3d"
    assert body["stoker"]["error"] == "task gate failed"
    assert SECRET not in "".join(capsys.readouterr())


@pytest.mark.parametrize("outcome", [{"state": "CANCELLED"}, "{{$.pipeline_task_final_status}}"])
def test_a_run_of_a_pipeline_that_did_not_succeed_is_not_told_so(receiver, outcome):
    assert command(finish_words(of(on="always"), outcome=outcome)) == 0
    (body,) = receiver.bodies
    assert body["stoker"]["status"] == "stopped"


def test_a_training_that_was_stopped_is_not_told_as_failed(receiver, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stopped = msgspec.structs.replace(sample_records.training(), status="stopped")
    records = {"profile": sample_records.profile(), "decision": sample_records.decision()}
    for name, record in {**records, "training": stopped}.items():
        write_json(Path(f"{name}.json"), record)
    words = [f"--{name}={name}.json" for name in (*records, "training")]
    monkeypatch.setenv("STOKER_PIPELINE_RUN", "mnist-1")
    assert command(["evaluate", to_json(of(on="always")), *words]) == 143
    monkeypatch.delenv("STOKER_PIPELINE_RUN")
    monkeypatch.setattr("stoker.run.training_run.train_and_keep", lambda *_, **__: stopped)
    assert command(["train", to_json(of(on="always")), "--name", "mnist-1"]) == 143
    assert [body["stoker"]["status"] for body in receiver.bodies] == ["stopped", "stopped"]


def test_a_training_that_hangs_is_told_once_while_it_runs(receiver, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    line = "stoker 2026-11-25T03:00:00.000Z run=$STOKER_RUN_ID host=algo-1 no_progress "
    line += "text='no step for 20 min'"
    workload = msgspec.structs.replace(of(), command=("sh", "-c", f'echo "{line}"; echo "{line}"'))
    assert command(["train", to_json(workload), "--group=dnn=local.c1:1", "--yes"]) == 0
    (body,) = receiver.bodies
    run, error = body["stoker"]["run"], "no step for 20 min"
    assert body["text"] == f"stoker: run {run} of mnist running in train: {error}"
    assert body["stoker"]["error"] == error
    assert "warning: dnn/algo-1: no step for 20 min" in capsys.readouterr().err


def test_a_step_on_sagemaker_reads_the_url_from_a_secret(receiver, aws_server, monkeypatch, capsys):
    monkeypatch.delenv("STOKER_WEBHOOK_URL")
    monkeypatch.setenv("STOKER_PIPELINE_RUN", "mnist-0a1b2c3d")
    client: Any = aws_server.client("secretsmanager")
    arn = client.create_secret(Name="webhook", SecretString=receiver.url)["ARN"]
    for secret_arn in (arn, arn[:-6] + "gone00"):
        with ends(run="mnist-0a1b2c3d", step="evaluate", secret_arn=secret_arn) as ending:
            ending.failed("no")
    (body,) = receiver.bodies
    assert body["stoker"]["step"] == "evaluate"
    said = "".join(capsys.readouterr())
    assert said.startswith("notify: webhook failed: ")
    assert SECRET not in said


def test_teams_gets_a_card():
    outcome = RunEnding(workload="mnist", run="1", step="train", status="failed", error="no")
    (card,) = body_of(outcome, format="teams")["attachments"]
    assert card["contentType"] == "application/vnd.microsoft.card.adaptive"
    assert "mnist failed in train: no" in json.dumps(card)
