"""A training does not wait for an MLflow that its host cannot reach, and does not fail by it."""

import http.server
import io
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from stoker.launch.trainer_host import with_reachable_mlflow
from stoker.logs import Log, parse_line


class Refusing(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(401)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def server() -> Iterator[int]:
    with http.server.HTTPServer(("127.0.0.1", 0), Refusing) as there:
        thread = threading.Thread(target=there.serve_forever)
        thread.start()
        yield there.server_port
        there.shutdown()
        thread.join()


def told(address: str, **more: str) -> tuple[dict[str, str], str]:
    """Returns the command's environment, and the warning of it."""
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
    with server() as port:
        address = f"http://u:secret@127.0.0.1:{port}"
        left, text = told(address, MLFLOW_RUN_ID="1")
    assert left == {"MLFLOW_TRACKING_URI": address, "MLFLOW_RUN_ID": "1", "PATH": "/bin"}
    assert not text


def test_a_server_that_the_user_named_is_left_to_the_script():
    left, text = told("http://127.0.0.1:1")
    assert left["MLFLOW_TRACKING_URI"] == "http://127.0.0.1:1"
    assert not text
