"""HTTP servers of doubles, on a port of the loopback interface."""

import contextlib
import ssl
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    # Head and body are two packets: the second would wait 40 ms for the first to be acknowledged.
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None: ...

    def reply(self, status: int, content: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


class _Server(ThreadingHTTPServer):
    def handle_error(self, *about) -> None:
        # A client that hangs up is no news.
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(*about)


@contextlib.contextmanager
def http_server(handler: type[Handler], *, host="127.0.0.1", tls=None) -> Iterator[str]:
    """Serves while the block runs, which gets the URL."""
    with _Server((host, 0), handler) as server:
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*tls)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        # It looks so often whether it is to end.
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), name="http server")
        thread.start()
        try:
            yield f"{'https' if tls else 'http'}://{host}:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
