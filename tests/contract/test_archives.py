"""Archives that mean harm are read in bounded memory and time, in a process with little memory."""

import json
import subprocess
import sys
import tarfile
import zlib

import pytest

MIB = 1 << 20
# More than the process may have.
FREE_BYTES = 200 * MIB
PROGRAM = """
import contextlib, io, json, pathlib, resource, sys
from stoker.errors import StokerError
from stoker.launch import code_package as code
from stoker.logs import Log
from stoker.platforms.aws import Aws
from stoker.platforms.sagemaker import job

job.MAX_MEMBERS = code.MAX_CODE_FILES = 1000
job.MAX_ARCHIVE_BYTES = code.MAX_UNPACKED_BYTES = 1 << 30

file, folder, reader, free = *map(pathlib.Path, sys.argv[1:3]), sys.argv[3], int(sys.argv[4])


class Stored(Aws):
    @contextlib.contextmanager
    def open_object(self, uri):
        with file.open("rb") as content:
            yield content


size = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + free, size + free))
try:
    if reader == "code":
        code.unpack(file, folder)
    else:
        log = Log(run="x", host="y", stream=io.StringIO())
        job.fetch_outputs(Stored(), "s3://b/k", folder=folder, log=log)
    found = ""
except StokerError as err:
    found = err.what
print(json.dumps(found))
"""


def packed(*parts: bytes, zeros: int = 0, times: int = 0) -> bytes:
    """Packs `parts`, then `times` x `zeros` zeros, without an end."""
    pack = zlib.compressobj(1, wbits=31)
    head = b"".join(pack.compress(part) for part in parts) + pack.flush(zlib.Z_FULL_FLUSH)
    piece = pack.compress(bytes(zeros)) + pack.flush(zlib.Z_FULL_FLUSH)
    # A piece after a full flush is the same wherever it stands.
    return head + piece * times


def header(name: str, kind: bytes = tarfile.REGTYPE, *, size: int = 0) -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT)


def file(name: str, content: bytes) -> bytes:
    return header(name, size=len(content)) + content + bytes(-len(content) % 512)


GOOD = file("stoker/training.json", b"{}")


def sparse() -> bytes:
    block = bytearray(header("stoker/s", tarfile.GNUTYPE_SPARSE))
    # More of its header follows.
    block[482] = 1
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


# A header and its continuation, which a full block follows.
PIECE_OF_SPARSE = b"00000000001\0" * 42 + b"\1" + bytes(7)
CHAINED = header("x", tarfile.XHDTYPE, size=20) + b"20 comment=12345678\n".ljust(512, b"\0")
A_GIB = {"zeros": 16 * MIB, "times": 64}
HARMFUL = {
    "PAX header": packed(GOOD, header("x", tarfile.XHDTYPE, size=1 << 30), **A_GIB),
    "GNU name": packed(GOOD, header("x", tarfile.GNUTYPE_LONGNAME, size=1 << 30), **A_GIB),
    "chain of headers": packed(GOOD, CHAINED * 9999),
    "sparse file": packed(GOOD, sparse(), PIECE_OF_SPARSE * (64 * MIB // 512)),
    "endless size": packed(GOOD, header("y", size=1 << 62), zeros=MIB, times=2),
    "zeros": packed(GOOD, header("y", size=2 << 30), zeros=16 * MIB, times=128),
    "many members": packed(GOOD, header("y") * 2000),
    "long name of the gzip": b"\x1f\x8b\x08\x08" + bytes(6) + b"n" * (64 * MIB),
}


def read_in_little_memory(tmp_path, content: bytes, *, reader: str) -> str:
    (tmp_path / "a.tar.gz").write_bytes(content)
    words = [str(tmp_path / "a.tar.gz"), str(tmp_path / "found"), reader, str(FREE_BYTES)]
    program = [sys.executable, "-c", PROGRAM, *words]
    ran = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return str(json.loads(ran.stdout))


@pytest.mark.parametrize("name", HARMFUL)
def test_the_record_is_read_and_the_rest_takes_neither_memory_nor_time(tmp_path, name):
    if name == "long name of the gzip":
        assert "cannot be unpacked" in read_in_little_memory(tmp_path, HARMFUL[name], reader="job")
        return
    assert read_in_little_memory(tmp_path, HARMFUL[name], reader="job") == ""
    assert [path.name for path in tmp_path.glob("found/stoker/*")] == ["training.json"]


@pytest.mark.parametrize("name", HARMFUL)
def test_such_a_code_package_is_refused(tmp_path, name):
    said = read_in_little_memory(tmp_path, HARMFUL[name], reader="code")
    assert said.startswith("not a code package: ")
    assert not (tmp_path / "found").exists()
