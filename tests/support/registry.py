"""A registry on loopback with one image of one layer, whose digest its pullers know."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.http_server import Handler, http_server

_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"


@contextmanager
def registry(layer: Path, *, architecture: str) -> Iterator[str]:
    """Serves the image whose files are in the tar `layer`, by any name; gives `HOST:PORT`."""
    with layer.open("rb") as file:
        layer_digest = "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()
    rootfs = {"type": "layers", "diff_ids": [layer_digest]}
    config = json.dumps({"architecture": architecture, "os": "linux", "rootfs": rootfs}).encode()
    described = {
        "mediaType": "application/vnd.docker.image.rootfs.diff.tar",
        "size": layer.stat().st_size,
        "digest": layer_digest,
    }
    about = {"mediaType": "application/vnd.docker.container.image.v1+json"}
    about |= {"size": len(config), "digest": _digest(config)}
    parts = {"config": about, "layers": [described]}
    manifest = json.dumps({"schemaVersion": 2, "mediaType": _MANIFEST, **parts}).encode()

    class Answering(Handler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            asked = self.path.rpartition("/")[2]
            if self.path == "/v2/":
                self._answer(b"{}", "application/json")
            elif "/manifests/" in self.path:
                self._answer(manifest, _MANIFEST)
            elif asked == _digest(config):
                self._answer(config, "application/octet-stream")
            elif asked == layer_digest:
                self._head(layer.stat().st_size, "application/octet-stream")
                if self.command == "GET":
                    with layer.open("rb") as file:
                        while block := file.read(1 << 20):
                            self.wfile.write(block)
            else:
                self.send_error(404)

        do_HEAD = do_GET

        def _answer(self, body: bytes, kind: str) -> None:
            self._head(len(body), kind)
            if self.command == "GET":
                self.wfile.write(body)

        def _head(self, size: int, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(size))
            if kind == _MANIFEST:
                self.send_header("Docker-Content-Digest", _digest(manifest))
            self.end_headers()

    with http_server(Answering) as url:
        yield url.removeprefix("http://")


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"
