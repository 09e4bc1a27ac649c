"""Webhooks are told how a run ended: a receiver on loopback gets what is sent."""

import dataclasses
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from stoker.cli.main import run as command
from stoker.errors import DeclinedError, GateError, TerminatedError
from stoker.records import NotifySettings, Workload, to_json
from stoker.run.folders import RunFiles
from stoker.run.train import concluding

SECRET = "T0/B0/a-secret"


class Receiver:
    """Receives webhooks, and answers with `code`."""

    def __init__(self) -> None:
        self.code = 200
        self.bodies: list[dict[str, Any]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.headers["Content-Type"] == "application/json"
                receiver.bodies.append(json.loads(content))
                self.send_response(receiver.code)
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
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join()


def ends(*, run="mnist-1", step="run", **notify):
    files = dataclasses.replace(RunFiles.of(Path("no-such-run")), report=None)
    return concluding(files, of(**notify), run=run, step=step)


def of(**notify: Any) -> Workload:
    return Workload(name="mnist", command=("true",), notify=NotifySettings(**notify))


def test_a_run_that_failed_is_told_with_its_facts(receiver):
    words = "accuracy 0.5 (at least 0.9)"

    def judge() -> None:
        with ends() as ending:
            ending.step = "evaluate"
            raise GateError(words)

    with pytest.raises(GateError):
        judge()
    (body,) = receiver.bodies
    assert body["text"] == f"stoker: run mnist-1 of mnist failed in evaluate: {words}"


def test_a_run_that_ends_well_is_told_only_where_it_is_asked_for(receiver):
    for settings in ({}, {"on": "always"}):
        with ends(**settings):
            pass
    (body,) = receiver.bodies
    assert body["text"] == "stoker: run mnist-1 of mnist succeeded"


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), TerminatedError(), DeclinedError("no")])
def test_what_a_person_stops_is_not_told(receiver, stop):
    with pytest.raises(type(stop)), ends(on="always"):
        raise stop
    assert not receiver.bodies


def test_a_webhook_that_fails_is_a_line_without_its_url(receiver, capsys):
    receiver.code = 500
    with ends() as ending:
        ending.failure = "no"
    said = "".join(capsys.readouterr())
    assert said == "notify: webhook failed: HTTPError 500\n"


def finish_words(workload, *, outcome):
    given = {"workload": to_json(workload), "run_id": "0a1b2c3d-4e5f", "outcome": outcome}
    told = {"inputs": {"parameterValues": given}, "outputs": {"outputFile": "unused"}}
    return ["step", "finish", "--executor-input", json.dumps(told)]


def test_the_last_step_of_a_pipeline_tells_what_kubeflow_says_of_the_run(receiver, capsys):
    status = {"state": "FAILED", "error": {"message": "task gate failed"}}
    for state in ("FAILED", "SUCCEEDED", "COMPLETE"):
        assert command(finish_words(of(), outcome={**status, "state": state})) == 0
    (body,) = receiver.bodies
    assert "run mnist-0a1b2c3d of mnist failed in the pipeline: task gate failed" in body["text"]
    assert SECRET not in "".join(capsys.readouterr())


def test_a_step_on_sagemaker_reads_the_url_from_a_secret(receiver, aws_server, monkeypatch, capsys):
    monkeypatch.delenv("STOKER_WEBHOOK_URL")
    monkeypatch.setenv("STOKER_PIPELINE_RUN", "mnist-0a1b2c3d")
    client: Any = aws_server.client("secretsmanager")
    arn = client.create_secret(Name="webhook", SecretString=receiver.url)["ARN"]
    for secret_arn in (arn, arn[:-6] + "gone00"):
        with ends(run="mnist-0a1b2c3d", step="evaluate", secret_arn=secret_arn) as ending:
            ending.failure = "no"
    (body,) = receiver.bodies
    assert "failed in evaluate" in body["text"]
    said = "".join(capsys.readouterr())
    assert said.startswith("notify: webhook failed: ")
    assert SECRET not in said
