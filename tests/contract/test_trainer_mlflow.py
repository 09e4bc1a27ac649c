"""A training does not wait for an MLflow that its host cannot reach, and does not fail by it."""

import http.server
import io
import socket
import threading

from stoker.launch.train_command import with_reachable_mlflow
from stoker.logs import Log, parse_line


def told(address: str, **more: str) -> tuple[dict[str, str], str]:
    stream = io.StringIO()
    environ = {"MLFLOW_TRACKING_URI": address, "PATH": "/bin", **more}
    left = with_reachable_mlflow(environ, Log(run="r", host="a", stream=stream))
    event = parse_line(stream.getvalue())
    return left, event.values["text"] if event else ""


def test_a_run_on_a_server_that_is_away_is_left_out_with_a_warning():
    with socket.socket() as held:
        # Bound and not listening: nobody else can have the port meanwhile.
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        left, text = told(f"http://u:secret@127.0.0.1:{port}", MLFLOW_RUN_ID="1")
    assert left == {"PATH": "/bin"}
    assert text.startswith(f"mlflow: 127.0.0.1:{port} cannot be reached from here")


def test_a_server_that_answers_is_used_whatever_it_answers():
    # The handler refuses each request.
    handler = http.server.BaseHTTPRequestHandler
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as there:
        there.timeout = 10
        thread = threading.Thread(target=there.handle_request)
        thread.start()
        address = f"http://u:secret@127.0.0.1:{there.server_port}"
        left, text = told(address, MLFLOW_RUN_ID="1")
        thread.join()
    assert left == {"MLFLOW_TRACKING_URI": address, "MLFLOW_RUN_ID": "1", "PATH": "/bin"}
    assert not text


def test_a_server_that_the_user_named_is_left_to_the_script():
    left, text = told("http://127.0.0.1:1")
    assert left["MLFLOW_TRACKING_URI"] == "http://127.0.0.1:1"
    assert not text
