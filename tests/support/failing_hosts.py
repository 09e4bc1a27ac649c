"""Small scripts whose data hosts fail, each with the words that have to be the last ones.

On a machine of its own a data host lacks what the trainer has. Here both share one, so a script
asks where it runs: `is_host()`.
"""

from collections.abc import Sequence
from typing import NamedTuple

HEAD = """\
import os
from torch.utils.data import DataLoader

# As stoker's sitecustomize does it where a training starts a Python.
from stoker.feed.replace import install

install(DataLoader)
import ctypes, errno, importlib, json, locale, signal, socket, sqlite3, subprocess, sys
import tempfile, urllib.request
import torch
from torch.utils.data import Dataset

HERE = os.path.dirname(os.path.abspath(sys.argv[0]))


def is_host():
    # Variables of stoker's are those of one host.
    return "STOKER_COORDINATOR" not in os.environ


class Base(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        if is_host():
            self.make(index)
        return torch.full((2,), float(index))

    def make(self, index):
        pass


class Rebuilt(Base):
    def __getstate__(self):
        return {"a": 1}

    def __setstate__(self, state):
        if is_host():
            self.rebuild()


def module_here(name, text, is_kept=True):
    from stoker.feed.wire.imported_code import imported_code

    folder = tempfile.mkdtemp(dir=HERE)
    sys.path.insert(0, folder)
    with open(f"{folder}/{name}.py", "w") as file:
        file.write("import os\\nIS_HOST = 'STOKER_COORDINATOR' not in os.environ\\n" + text)
    module = importlib.import_module(name)
    if not is_kept:
        # Known here, and not there.
        imported_code().note([name])
        os.remove(f"{folder}/{name}.py")
    return module


def read(dataset, **more):
    given = {"batch_size": 4, "num_workers": 1, **more}
    given.update(json.loads(os.environ.get("LOADER", "{}")))
    for batch in DataLoader(dataset, **given):
        print(json.dumps({"said": batch.tolist()}), flush=True)
"""


class Failing(NamedTuple):
    """A script, the words of its end, and its exit code: 5 of the feed, 1 of the dataset."""

    script: str
    words: Sequence[str]
    code: int


CASES: dict[str, Failing] = {}
HOST = "host algo-"


def _indented(text: str) -> str:
    return "".join(f"        {line}\n" for line in text.splitlines())


def rebuilt(name: str, body: str, *words: str) -> None:
    """Adds a dataset whose __setstate__ fails on a data host."""
    script = "class D(Rebuilt):\n    def rebuild(self):\n" + _indented(body) + "read(D())\n"
    CASES[f"rebuilt: {name}"] = Failing(script, words, 5)


def sampled(name: str, body: str, *words: str, code: int = 1) -> None:
    """Adds a dataset whose samples fail on a data host."""
    script = "class D(Base):\n    def make(self, index):\n" + _indented(body) + "read(D())\n"
    CASES[f"sampled: {name}"] = Failing(script, words, code)


def imported(name: str, text: str, *words: str, is_kept: bool = True) -> None:
    """Adds a dataset with an object of a module that cannot be imported on a data host."""
    # Of its own name: data hosts keep what they have imported.
    module = f"theirs_{len(CASES)}"
    script = (
        f"module = module_here({module!r}, {'class T: pass' + chr(10) + text!r}, {is_kept})\n"
        "class D(Base):\n    def __init__(self):\n        self.t = module.T()\nread(D())\n"
    )
    own = [word.replace("their_module", module) for word in words]
    CASES[f"imported: {name}"] = Failing(script, own, 5)


def both(name: str, body: str, *words: str) -> None:
    rebuilt(name, body, *words)
    sampled(name, body, *words)


def _raising(number: str, path: str = "/mnt/data/part-0.bin") -> str:
    return f"raise OSError(errno.{number}, os.strerror(errno.{number}), {path!r})"


# Modules and libraries.
imported("a file of the user's", "", "has no module their_module", "a file of yours", is_kept=False)
imported(
    "sys.exit with words",
    "import sys\nif IS_HOST: sys.exit('no licence for this host')",
    *("SystemExit: no licence for this host", "(their_module.py:5)", HOST),
)
imported("sys.exit(3)", "if IS_HOST: raise SystemExit(3)", "SystemExit: 3", "their_module.py", HOST)
imported(
    "os._exit", "if IS_HOST: os._exit(4)", "as it imported their_module: exit code 4", "os._exit"
)
imported(
    "native code that crashes",
    "import ctypes\nif IS_HOST: ctypes.string_at(0)",
    *("as it imported their_module: signal 11 (SIGSEGV)", "stack in that host's log"),
)
imported(
    "the kernel kills it",
    "if IS_HOST: os.kill(os.getpid(), 9)",
    *("as it imported their_module: signal 9 (SIGKILL), perhaps out of memory", "more memory"),
)
imported(
    "its own error",
    "if IS_HOST: raise RuntimeError('licence server not reachable')",
    *("licence server not reachable", "their_module.py:4", HOST),
)
imported("another syntax", "if IS_HOST: exec('def f(self) return 1')", "SyntaxError", HOST)
imported(
    "an interrupt", "if IS_HOST: raise KeyboardInterrupt", "KeyboardInterrupt", "their_module.py:4"
)
both(
    "a module behind another error",
    "try:\n    import their_codec\nexcept ImportError as err:\n"
    "    raise RuntimeError('the audio extra is needed') from err",
    *("has no module their_codec", "the audio extra is needed", "install their_codec", HOST),
)
both(
    "a library by ctypes",
    "ctypes.CDLL('libtheirs.so.1')",
    *("has no library libtheirs.so.1", "the system's package with libtheirs.so.1", HOST),
)
both(
    "an older system",
    'raise ImportError("/lib/libc.so.6: version `GLIBC_2.38\' not found (required by /opt/d.so)")',
    *("has no GLIBC_2.38, which /opt/d.so needs", "the image of the trainer", HOST),
)
both(
    "a library for another torch",
    "raise ImportError('/opt/lib/_C.so: undefined symbol: _ZN3c105ErrorC2E')",
    *("/opt/lib/_C.so of data host algo-", "was built for library versions", "same versions"),
)
both(
    "a program", "subprocess.run(['ffmpeg-theirs'])", "has no program ffmpeg-theirs", "install the"
)
CASES["sampled: a name of another version"] = Failing(
    "module = module_here('their_resize', 'if not IS_HOST: resize = len')\nclass D(Base):\n"
    "    def make(self, index):\n        import their_resize\n        their_resize.resize(())\n"
    "read(D())\n",
    ["their_resize of data host algo-", "has no resize", "have the same their_resize"],
    1,
)
CASES["collated: a module"] = Failing(
    "module = module_here('their_collate', '', False)\ndef collate(items):\n"
    "    import their_collate\n    return torch.stack(items)\nread(Base(), collate_fn=collate)\n",
    ["the trainer has their_collate: install it in the image of the data hosts"],
    1,
)
CASES["worker_init_fn: a module"] = Failing(
    "module = module_here('their_init', '', False)\ndef begin(number):\n"
    "    import their_init\nread(Base(), worker_init_fn=begin)\n",
    ["the trainer has their_init: install it in the image of the data hosts"],
    1,
)
# Files, disks and rights.
rebuilt("a folder", "os.listdir('/data/not-there')", "cannot open /data/not-there", "a channel")
CASES["sampled: a file in the middle"] = Failing(
    "PATH = HERE + '/part-2.bin'\nopen(PATH, 'w').close()\nclass D(Base):\n"
    "    def make(self, index):\n        if index == 9:\n"
    "            raise FileNotFoundError(2, 'No such file or directory', PATH)\nread(D())\n",
    ["the trainer has /", "part-2.bin: have it at the same path on the data hosts"],
    1,
)
rebuilt(
    "a file of HDF5",
    "raise OSError(\"Unable to open file (unable to open file: name = '/data/a.h5', errno = 2)\")",
    *("cannot open /data/a.h5", "at the same path", HOST),
)
both(
    "a database of SQLite",
    "sqlite3.connect('file:/data/no.db?mode=ro', uri=True).execute('select 1')",
    *("cannot open the SQLite database", "at the same path", HOST),
)
both("no right", _raising("EACCES"), "may not use /mnt/data/part-0.bin", "give its user", HOST)
both("a full disk", _raising("ENOSPC"), "the disk of /mnt/data/part-0.bin is full on", HOST)
both("a quota", _raising("EDQUOT"), "the disk of /mnt/data/part-0.bin is full on", HOST)
both(
    "too little shared memory",
    "raise RuntimeError('unable to write to file </torch_1_2>: No space left on device (28)')",
    *("the disk of /dev/shm/torch_1_2 is full on", "--shm-size", HOST),
)
both("a read-only disk", _raising("EROFS"), "read-only there", "write below /tmp", HOST)
both("a stale mount", _raising("ESTALE"), "the storage below /mnt/data/part-0.bin fails on", HOST)
both("a mount without server", _raising("ENOTCONN"), "the storage below /mnt/data/part-0.bin", HOST)
both("a bad disk", _raising("EIO"), "the storage below /mnt/data/part-0.bin fails on", HOST)
both(
    "open files",
    "self.files = [open('/dev/null') for _ in range(1 << 21)]",
    *("has too many open files", "ulimit -n", HOST),
)
both(
    "a group of errors", f"raise ExceptionGroup('2 shards', [{_raising('ENOSPC')[6:]}])", "2 shards"
)
# What a host's surroundings lack.
both(
    "a variable",
    "os.environ['THEIR_DATA_ROOT']",
    *("has no environment variable THEIR_DATA_ROOT", "set THEIR_DATA_ROOT for all hosts", HOST),
)
both("a locale", "locale.setlocale(locale.LC_ALL, 'xx_YY')", "lacks a locale", "C.UTF-8", HOST)
both(
    "a service that refuses",
    "urllib.request.urlopen('http://127.0.0.1:9/index.json')",
    *("cannot reach a machine", "Connection refused", "security groups", HOST),
)
both(
    "a name",
    "raise socket.gaierror(-2, 'Name or service not known')",
    *("cannot reach a machine", "Name or service not known", HOST),
)
both(
    "credentials",
    "class NoCredentialsError(Exception): pass\n"
    "raise NoCredentialsError('Unable to locate credentials')",
    *("has no credentials", "Unable to locate credentials", "the trainer's role", HOST),
)
both("an accelerator", "torch.zeros(1, device='cuda')", "needs an accelerator", "on the CPU", HOST)
both(
    "a model of an accelerator",
    "raise RuntimeError('Attempting to deserialize object on a CUDA device but '\n"
    "    'torch.cuda.is_available() is False.\\nIf you are on a CPU-only machine, map it.')",
    *("needs an accelerator", "keep it on the CPU", HOST),
)
# Memory, threads and processes.
both("Python's memory", "bytearray(1 << 50)", "ran out of memory", "more memory", HOST)
both("torch's memory", "torch.empty(1 << 50)", "ran out of memory", "more memory", HOST)
both(
    "threads", 'raise RuntimeError("can\'t start new thread")', "start no more threads", "ulimit -u"
)
for number in ("SIGSEGV", "SIGABRT", "SIGBUS"):
    kill = f"os.kill(os.getpid(), signal.{number})"
    rebuilt(number, kill, f"({number})", "native code", HOST)
    sampled(number, kill, f"({number})", "native code", HOST, code=5)
rebuilt("SIGKILL", "os.kill(os.getpid(), 9)", "SIGKILL", "out of memory", "more memory", HOST)
sampled("SIGKILL", "os.kill(os.getpid(), 9)", "SIGKILL", "out of memory", "more memory", code=5)
rebuilt("SIGTERM", "os.kill(os.getpid(), 15)", "SIGTERM", "something on that host ended it", HOST)
sampled("SIGTERM", "os.kill(os.getpid(), 15)", "SIGTERM", "something on that host", code=5)
rebuilt("os._exit", "os._exit(7)", "exit code 7", "os._exit", HOST)
sampled("os._exit", "os._exit(7)", "exit code 7", "os._exit", code=5)
for ending in ("SystemExit('no licence')", "KeyboardInterrupt", "GeneratorExit"):
    kind = ending.partition("(")[0]
    rebuilt(ending, f"raise {ending}", kind, "rebuild (train.py:", HOST)
    sampled(ending, f"raise {ending}", kind, "make (train.py:", code=5)
# Errors that say little, or cannot be sent.
rebuilt("an error without words", "raise ValueError", "ValueError, in rebuild (train.py:", HOST)
sampled("an error without words", "raise ValueError", "in make\n", "ValueError", HOST)
rebuilt("a bare assert", "assert not is_host()", "AssertionError, in rebuild (train.py:", HOST)
rebuilt("a recursion", "self.rebuild()", "RecursionError", "rebuild (train.py:", HOST)
both("a text in another encoding", "b'\\xff'.decode()", "UnicodeDecodeError", "0xff", HOST)
_ODD = (
    "class Odd(Exception):\n    def __init__(self, a, b):\n"
    "        super().__init__(f'{a} is not {b}')\n        self.socket = socket.socket()\n"
    "raise Odd('this', 'that')"
)
both("an error that cannot be sent", _ODD, "Odd: this is not that", HOST)
_MUTE = "class Mute(Exception):\n    def __str__(self):\n        raise RuntimeError\nraise Mute"
both("an error whose text raises", _MUTE, "Mute", HOST)
