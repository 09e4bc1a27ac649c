"""An HTTP proxy that fails calls to the double of a service by rule, and passes all others on."""

import contextlib
import http.client
import json
import socket
import struct
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from support.http_server import Handler, http_server

# Both ends of a connection, so that each has its length as the other side sees it.
_OF_CONNECTION = ("connection", "keep-alive", "transfer-encoding", "content-length")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceFault:
    """How a call fails.

    Attributes:
        status: HTTP status of the answer; 0: the connection is reset without one.
        code: The service's code of the error; empty: a proxy's page.
        is_cut: The real answer breaks off after half of its body.
        is_garbled: The status is 200, and the body is no answer of the service.
    """

    status: int = 0
    code: str = ""
    message: str = "no"
    is_cut: bool = False
    is_garbled: bool = False

    def body(self, *, path: str) -> bytes:
        if self.is_garbled:
            return b"<html>welcome to the hotel's network</html>"
        if not self.code:
            return f"<html>{self.status}</html>".encode()
        if path.startswith(("/api", "/apis")):
            status = {"kind": "Status", "status": "Failure", "message": self.message}
            return json.dumps({**status, "reason": self.code, "code": self.status}).encode()
        if path != "/":
            error = f"<Error><Code>{self.code}</Code><Message>{self.message}</Message></Error>"
            return f'<?xml version="1.0"?>{error}'.encode()
        return json.dumps({"__type": self.code, "message": self.message}).encode()


@dataclass(slots=True)
class FaultyService:
    """The proxy; `rule` gets `METHOD path` of a call, or AWS's operation, and returns its fault."""

    url: str = ""
    rule: Callable[[str], ServiceFault | None] = lambda call: None
    calls: list[tuple[str, bool]] = field(default_factory=list)

    def num_failed(self, part: str) -> int:
        return sum(failed and part in call for call, failed in self.calls)


@contextlib.contextmanager
def faulty_service(target: str) -> Iterator[FaultyService]:
    place = urllib.parse.urlsplit(target)
    service = FaultyService()

    class Passing(Handler):
        protocol_version = "HTTP/1.1"

        def _pass(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length) if length else None
            operation = self.headers.get("X-Amz-Target", "").rpartition(".")[2]
            call = operation or f"{self.command} {self.path}"
            fault = service.rule(call)
            service.calls.append((call, fault is not None))
            if fault and not fault.is_cut:
                self._fail(fault)
                return
            upstream = http.client.HTTPConnection(place.hostname, place.port)
            try:
                headers = {
                    name: value
                    for name, value in self.headers.items()
                    if name.lower() not in _OF_CONNECTION
                }
                upstream.request(self.command, self.path, body=body, headers=headers)
                self._answer(upstream.getresponse(), is_cut=fault is not None)
            finally:
                upstream.close()

        def _fail(self, fault: ServiceFault) -> None:
            self.close_connection = True
            if not fault.status and not fault.is_garbled:
                # A reset, not an end in good order.
                linger = struct.pack("ii", 1, 0)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                self.connection.close()
                return
            body = fault.body(path=self.path)
            self.send_response(fault.status or 200)
            self.send_header("Connection", "close")
            if fault.code and self.path == "/":
                self.send_header("x-amzn-ErrorType", fault.code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _answer(self, found: http.client.HTTPResponse, *, is_cut: bool) -> None:
            self.send_response(found.status)
            for name, value in found.getheaders():
                if name.lower() not in _OF_CONNECTION:
                    self.send_header(name, value)
            if found.length is not None or self.command == "HEAD":
                content = found.read()
                self.send_header("Content-Length", str(found.length or len(content)))
                self.end_headers()
                self.wfile.write(content[: len(content) // 2] if is_cut else content)
                self.close_connection = is_cut
                return
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            while chunk := found.read1(1 << 16):
                self.wfile.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
            self.wfile.write(b"0\r\n\r\n")

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = _pass

    with http_server(Passing) as service.url:
        yield service
