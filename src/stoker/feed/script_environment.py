"""What a script changed in its environment: it travels with the dataset, so that code which asks
`os.environ` or `sys.argv` gets the same answer from every worker.

Only the difference to the environment that the script was started with travels: what else is there
belongs to the host. Not even of that what a secret may be, or what is another in each rank or on
each host: a dataset is held once by a data host, for all ranks.
"""

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# A part of a name, between underscores, that ends so: TOKEN, but not TOKENIZERS_PARALLELISM.
_SECRETS = re.compile(
    r"(TOKENS?|SECRETS?|PASSWORDS?|PASSWD|PASSPHRASE|KEYS?|CREDENTIALS?|AUTH|COOKIE)(_|$)"
)
# user:password@host
_SECRET_VALUE = re.compile(r"://[^/@\s]*:[^/@\s]*@")
# Of a rank, a host, a launcher or the libraries that talk between ranks.
_OF_ONE_PROCESS = re.compile(
    r"^(STOKER|SM|SAGEMAKER|MASTER|LOCAL|GROUP|NODE|ROLE|TORCHELASTIC|OMPI|PMI|PMIX|PRTE|MPI|SLURM"
    r"|HOROVOD|KUBERNETES|CUDA|NVIDIA|ROCR|HIP|NCCL|TORCH_NCCL|GLOO|UCX|FI|RAY|WANDB"
    r"|TORCHINDUCTOR|TRITON|OMP|KMP|MKL|OPENBLAS|NUMEXPR|LD|DYLD|SSH|CONDA)_"
    r"|(^|_)(RANKS?|WORLD_SIZE)(_|$)|_PROXY$|^PYTHON"
    r"|^(PATH|HOME|PWD|OLDPWD|SHELL|SHLVL|USER|LOGNAME|HOST|HOSTNAME|TMPDIR|TEMP|TMP|TERM|DISPLAY"
    r"|COLUMNS|LINES|VIRTUAL_ENV|XDG_RUNTIME_DIR|LC_CTYPE|_)$"
)
_RANK_ARGUMENT = re.compile(r"^--local[-_]rank(=|$)")

# Always as many: the arguments may be others in each rank, which is no reason for a dataset to be
# held twice. So they are no part of what names a spec, and its size does not tell them.
ARGUMENT_BYTES = 8192


@dataclass(frozen=True, slots=True)
class ScriptEnvironment:
    """What travels of it.

    Attributes:
        changes: Names and values that the script set; None: it deleted the name.
        arguments: `sys.argv`.
    """

    changes: tuple[tuple[str, str | None], ...] = ()
    arguments: tuple[str, ...] = ()

    @classmethod
    def of_this_process(cls) -> "ScriptEnvironment":
        """As it is now; 60 us."""
        start = environment_at_start()
        changes = changes_between(start, os.environ) if start is not None else ()
        return cls(changes, arguments_of(sys.argv))

    @classmethod
    def unpacked(cls, changes: bytes, arguments: bytes) -> "ScriptEnvironment":
        """What the two `packed` gave."""
        found = tuple((name, value) for name, value in json.loads(changes))
        return cls(found, tuple(json.loads(arguments)))

    def packed_changes(self) -> bytes:
        """Bytes that are the same in each rank."""
        return json.dumps(self.changes).encode()

    def packed_arguments(self) -> bytes:
        """ARGUMENT_BYTES bytes; none of the arguments if they are longer."""
        packed = json.dumps(self.arguments).encode()
        return (packed if len(packed) <= ARGUMENT_BYTES else b"[]").ljust(ARGUMENT_BYTES)

    def set(self) -> None:
        """Makes it this process's."""
        for name, value in self.changes:
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if self.arguments:
            sys.argv[:] = self.arguments


def environment_at_start(pid: str = "self") -> Mapping[str, str] | None:
    """The environment that this script was started with; None: it is not known.

    Of a child that multiprocessing spawned it is the parent's: what the script set before is set in
    the child's, too.
    """
    if pid == "self" and "--multiprocessing-fork" in sys.orig_argv:
        pid = str(os.getppid())
    try:
        text = os.fsdecode(Path(f"/proc/{pid}/environ").read_bytes())
    except OSError:
        return None
    found = dict(line.split("=", 1) for line in text.split("\0") if "=" in line)
    # A program that shows another title (setproctitle) has written over it.
    return found if any(name.startswith("STOKER_") for name in found) else None


def changes_between(
    start: Mapping[str, str], now: Mapping[str, str]
) -> tuple[tuple[str, str | None], ...]:
    """What of `now` is another than at the start and may travel; sorted."""
    names = sorted(name for name in {*start, *now} if start.get(name) != now.get(name))
    return tuple((name, now.get(name)) for name in names if may_travel(name, now.get(name)))


def may_travel(name: str, value: str | None) -> bool:
    """Whether a variable is neither a secret, perhaps, nor a matter of one rank or host."""
    upper = name.upper()
    if _SECRETS.search(upper) or _OF_ONE_PROCESS.search(upper):
        return False
    return value is None or not _SECRET_VALUE.search(value)


def arguments_of(arguments: Sequence[str]) -> tuple[str, ...]:
    """Without the rank that some launchers put there: it is another in each process."""
    kept: list[str] = []
    is_value = False
    for argument in arguments:
        if not is_value and not _RANK_ARGUMENT.match(argument):
            kept.append(argument)
        is_value = not is_value and argument in ("--local-rank", "--local_rank")
    return tuple(kept)
