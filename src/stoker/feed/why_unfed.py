"""Why no batch comes from data hosts: the one place that builds these sentences.

Each names what failed and on which host, and what to do. The same words stand in the error that a
script gets, in log lines, in the run's record, and so in its last words, report and webhook.
"""

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum, auto
from typing import TypeVar

from stoker.errors import FeedError

_ErrorT = TypeVar("_ErrorT", bound=FeedError)

# Of a data host whose code differs from the trainer's.
MEND_CODE = (
    "give all hosts the same image and the same files, and restart those that had others; "
    "feed.code_check: warn makes batches in spite of it"
)
_IMAGE = "the image of the data hosts"
_OWN = "give the library a loader of torch's or stoker's, or train without a data group"
# Signals by which processes are asked to end, and what to do about that.
_ASKED_TO_END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_ENDED_BY_OTHERS = "something on that host ended it: see its log, and who else runs there"
_TORCHS = "train with --replace-dataloader true, or import DataLoader from stoker"


class Cause(StrEnum):
    """What keeps data hosts from feeding a training run."""

    NO_STOKER = auto()  # The script's Python has no stoker, or not all that it needs.
    OTHER_STOKER = auto()  # The script's Python has another version of stoker.
    OTHER_PYTHON = auto()  # The script and the data hosts run different Pythons.
    NO_STARTUP = auto()  # The script's Python is started so that stoker cannot reach it.
    OTHER_VERSION = auto()  # A package has another version on the other side.
    OTHER_CODE = auto()  # A data host's files differ from the trainer's.
    MISSING_MODULE = auto()  # A module is not there.
    MISSING_NAME = auto()  # A class or function is not in its module.
    MISSING_LIBRARY = auto()  # A shared library of the system is not there.
    MISSING_FILE = auto()  # A file is not there.
    MISSING_PROGRAM = auto()  # A program of the system is not there.
    MISSING_VARIABLE = auto()  # An environment variable is not set.
    MISSING_LOCALE = auto()  # A locale is not there.
    NO_RIGHT = auto()  # A file may not be read or written.
    NO_CREDENTIALS = auto()  # A service's credentials are not there.
    NO_NETWORK = auto()  # Another machine does not answer.
    STORAGE_FAILED = auto()  # A disk or file server fails.
    DISK_FULL = auto()  # Nothing more can be written.
    TOO_MANY = auto()  # A limit of open files or tasks is reached.
    REBUILDING_FAILED = auto()  # The script's own code raised as it was rebuilt.
    ENDED_ITSELF = auto()  # The script's own code ended its process.
    NOT_PICKLABLE = auto()  # The dataset cannot be sent.
    TOO_LARGE = auto()  # The dataset is larger than its bound.
    ON_ACCELERATOR = auto()  # The dataset holds memory of an accelerator.
    OUT_OF_MEMORY = auto()  # A data host ran out of memory.
    HOST_FAILED = auto()  # A data host cannot work, for another reason.
    HOSTS_LOST = auto()  # No data host came, or none is left.
    TORCHS_LOADER = auto()  # A loader of torch's class was left as it is.
    OWN_LOADER = auto()  # A library's own loader made the batches.
    NEVER_READ = auto()  # A loader was made and never read.
    EMPTY = auto()  # A loader was read and gave no batch.
    NO_LOADER = auto()  # No loader of torch's was there.
    MADE_HERE = auto()  # The trainer made all batches, for a reason of each loader.


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyUnfed:
    """A cause with its facts, in words: what, where, and what to do.

    Attributes:
        subject: The module, name or path that is missing; empty: it is none of these.
    """

    cause: Cause
    what: str
    where: str = ""
    fix: str = ""
    subject: str = ""

    @property
    def words(self) -> str:
        """The cause and what to do, in one line."""
        if self.fix:
            return f"{self.what}; {self.fix}"
        return self.what

    def error(self, kind: type[_ErrorT]) -> _ErrorT:
        return kind(self.what, where=self.where, fix=self.fix)


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """The two sides of what is sent, in words: `here` rebuilds it, `there` sent it.

    Attributes:
        part: What is sent: `the dataset`.
        place: Where something is installed for `here`.
        doing: What `here` does with `part`, in the past.
    """

    part: str
    here: str
    there: str
    place: str
    doing: str = "rebuilt"


def of_data_host(host: str) -> Side:
    """Returns the sides of a dataset that a data host rebuilds; `host` may be empty."""
    here = f"data host {host}" if host else "this host"
    return Side(part="the dataset", here=here, there="the trainer", place=_IMAGE)


def of_worker(host: str) -> Side:
    """Returns the sides of a batch that a worker of a data host makes."""
    return replace(of_data_host(host), part="this batch", doing="made")


OF_TRAINER = Side(
    part="a part of the batch",
    here="the trainer",
    there="the host that made it",
    place="the Python of the training script",
)


def no_stoker(python: str, *, version: str, problem: str, own: str) -> WhyUnfed:
    """Returns the cause: the script's Python lacks stoker, or a library that stoker needs.

    Args:
        python: The interpreter.
        version: Its version.
        problem: What its import of stoker raised.
        own: The Python that runs this launcher.
    """
    what = f"{python} (Python {version}), which runs the script, has no stoker"
    if problem and "No module named 'stoker'" not in problem:
        what = (
            f"{python} (Python {version}), which runs the script, cannot import stoker: {problem}"
        )
    return WhyUnfed(
        cause=Cause.NO_STOKER,
        what=what,
        fix=f"install stoker in that Python, or run the script with {own}, which has it",
    )


def other_stoker(python: str, *, theirs: int, own: int) -> WhyUnfed:
    return WhyUnfed(
        cause=Cause.OTHER_STOKER,
        what=f"{python}, which runs the script, has another stoker: its protocol is {theirs}, that "
        f"of the data hosts {own}",
        fix="install the same stoker in the script's Python and everywhere",
    )


def other_python(theirs: str, *, own: str, who: str, python: str = "the trainer") -> WhyUnfed:
    """Returns the cause: functions are sent as bytecode, which other versions cannot run.

    Args:
        theirs: Python version of the trainer.
        own: Python version of the data hosts.
        who: The data host or hosts, in words, with the verb.
        python: The trainer's interpreter, if it is known.
    """
    return WhyUnfed(
        cause=Cause.OTHER_PYTHON,
        what=f"{python} runs Python {theirs}, {who} Python {own}: functions cannot be sent",
        fix=f"use one Python version: {own}, or one image",
    )


def no_startup(python: str, *, options: Sequence[str]) -> WhyUnfed:
    started = f"{python}, started"
    if options:
        started += f" with {' '.join(options)}"
    return WhyUnfed(
        cause=Cause.NO_STARTUP,
        what=f"{started}, does not read PYTHONPATH, by which stoker puts the feed under its "
        "loaders",
        fix="start it without -I, -E and -S, or import DataLoader from stoker",
    )


def other_protocol(theirs: int, *, own: int, host: str) -> WhyUnfed:
    return WhyUnfed(
        cause=Cause.OTHER_STOKER,
        what=f"the trainer's stoker speaks protocol {theirs}, that of data host {host} {own}",
        fix="install the same stoker everywhere",
    )


def missing_module(
    name: str, side: Side, *, raised: str, version: str = "", is_file: bool = False
) -> WhyUnfed:
    """Returns the cause: a module is not there.

    Args:
        name: The module.
        side: Where it is missing.
        raised: The import's error in words.
        version: The module's version on the other side, where it is installed.
        is_file: Whether it is a file of the user's there.
    """
    package = name.partition(".")[0]
    fix = f"install {package} in {side.place}, or put its file there"
    if version:
        fix = f"install {package} {version}, as in {side.there}, in {side.place}"
    elif is_file:
        fix = (
            f"{name} is a file of yours in {side.there}: have it in the folder that is sent with "
            f"the job, or in {side.place}"
        )
    return WhyUnfed(
        cause=Cause.MISSING_MODULE,
        what=f"{side.here} has no module {name}, which {side.part} needs ({raised})",
        fix=fix,
        subject=name,
    )


def module_in_memory(name: str, side: Side, *, raised: str) -> WhyUnfed:
    return WhyUnfed(
        cause=Cause.MISSING_MODULE,
        what=f"{side.here} has no module {name}, which {side.part} needs ({raised}); in "
        f"{side.there} it is neither a file nor a package",
        fix=f"put {name} into a file that can be imported",
    )


def other_version(
    package: str, side: Side, *, here: str, there: str, raised: str, lacks: str = ""
) -> WhyUnfed:
    """Returns the cause: a package has another version on the other side.

    Args:
        package: The package.
        side: Where it cannot be used.
        here: Its version there; empty: not known.
        there: Its version on the other side; empty: not known.
        raised: The error in words.
        lacks: What the version lacks.
    """
    words = f"{' '.join(filter(None, (package, here)))} of {side.here}"
    if lacks and there:
        words += f" has no {lacks}, which version {there} of {side.there} has"
    elif lacks:
        words += f" has no {lacks}, which that of {side.there} has"
    else:
        words += f" differs from that of {', '.join(filter(None, (side.there, there)))}"
    fix = f"install the same {package} for the trainer and the data hosts"
    if there:
        fix += f": {there}"
    return WhyUnfed(cause=Cause.OTHER_VERSION, what=f"{words} ({raised})", fix=fix)


def missing_name(name: str, module: str, side: Side, *, raised: str, is_script: bool) -> WhyUnfed:
    """Returns the cause: a class or function is not in its module.

    Args:
        name: The class or function.
        module: The module that should have it.
        side: Where it is missing.
        raised: The error in words.
        is_script: Whether it is the training script's own.
    """
    if is_script:
        return WhyUnfed(
            cause=Cause.MISSING_NAME,
            what=f"{side.here} does not have {name} of the training script, which {side.part} "
            f"needs ({raised})",
            fix=f"move {name} into a module that the script imports",
        )
    return WhyUnfed(
        cause=Cause.MISSING_NAME,
        what=f"{module} of {side.here} has no {name}, which {side.part} needs ({raised})",
        fix=f"have the same {module} in {side.there} and in {side.place}",
    )


def missing_library(name: str, side: Side, *, raised: str) -> WhyUnfed:
    return WhyUnfed(
        cause=Cause.MISSING_LIBRARY,
        what=f"{side.here} has no library {name}, which {side.part} needs ({raised})",
        fix=f"install the system's package with {name} in {side.place}",
    )


def missing_file(path: str, side: Side, *, raised: str) -> WhyUnfed:
    return WhyUnfed(
        cause=Cause.MISSING_FILE,
        what=f"{side.here} cannot open {path}, which {side.part} needs ({raised})",
        fix="have it at the same path there, by a channel or a shared volume",
        subject=path,
    )


def missing_program(name: str, side: Side, *, raised: str) -> WhyUnfed:
    return WhyUnfed(
        cause=Cause.MISSING_PROGRAM,
        what=f"{side.here} has no program {name}, which {side.part} needs ({raised})",
        fix=f"install the system's package with {name} in {side.place}",
    )


def missing_variable(name: str, side: Side, *, raised: str) -> WhyUnfed:
    return WhyUnfed(
        cause=Cause.MISSING_VARIABLE,
        what=f"{side.here} has no environment variable {name}, which {side.part} needs ({raised})",
        fix=f"set {name} for all hosts (the workload's environment), or read it in the dataset's "
        "__init__, which runs in the trainer",
    )


def missing_locale(side: Side, *, raised: str) -> WhyUnfed:
    return WhyUnfed(
        cause=Cause.MISSING_LOCALE,
        what=f"{side.here} lacks a locale that {side.part} sets ({raised})",
        fix=f"install it in {side.place} (locale-gen, or locales-all), or use C.UTF-8",
    )


def no_right(path: str, side: Side, *, raised: str) -> WhyUnfed:
    return WhyUnfed(
        cause=Cause.NO_RIGHT,
        what=f"{side.here} may not use {path}, which {side.part} needs ({raised})",
        fix="give its user the right (owner, mode, the volume's fsGroup or mount options), or run "
        "it as the trainer's user",
        subject=path,
    )


def no_credentials(side: Side, *, raised: str) -> WhyUnfed:
    return WhyUnfed(
        cause=Cause.NO_CREDENTIALS,
        what=f"{side.here} has no credentials that {side.part} needs ({raised})",
        fix="give data hosts the trainer's role or service account: variables whose names look "
        "secret are not sent",
    )


def no_network(side: Side, *, raised: str) -> WhyUnfed:
    return WhyUnfed(
        cause=Cause.NO_NETWORK,
        what=f"{side.here} cannot reach a machine that {side.part} needs ({raised})",
        fix="let data hosts reach what the trainer reaches: subnets, security groups, network "
        "policies, proxies; an address of the trainer's own host is another one there",
    )


def storage_failed(path: str, side: Side, *, raised: str) -> WhyUnfed:
    return WhyUnfed(
        cause=Cause.STORAGE_FAILED,
        what=f"the storage below {path} fails on {side.here} ({raised})",
        fix="look at that mount and its server, and mount it again on the data hosts",
        subject=path,
    )


def disk_full(path: str, side: Side, *, raised: str) -> WhyUnfed:
    """Returns the cause: nothing more can be written; `path` may be empty."""
    fix = "free space there, write less, or set TMPDIR to a larger volume"
    if path.startswith("/dev/shm"):
        fix = "give its container more shared memory (--shm-size)"
    disk = f"the disk of {path}" if path else "a disk"
    return WhyUnfed(
        cause=Cause.DISK_FULL,
        what=f"{disk} is full on {side.here} ({raised})",
        fix=fix,
    )


def read_only(path: str, side: Side, *, raised: str) -> WhyUnfed:
    return WhyUnfed(
        cause=Cause.NO_RIGHT,
        what=f"{side.here} cannot write {path}, which is read-only there ({raised})",
        fix="write below /tmp, or mount it writable for data hosts as well",
    )


def too_many_files(side: Side, *, raised: str) -> WhyUnfed:
    return WhyUnfed(
        cause=Cause.TOO_MANY,
        what=f"{side.here} has too many open files as {side.part} is {side.doing} ({raised})",
        fix="close files after use, raise the limit there (ulimit -n 65536), or use fewer workers",
    )


def too_many_tasks(side: Side, *, raised: str) -> WhyUnfed:
    return WhyUnfed(
        cause=Cause.TOO_MANY,
        what=f"{side.here} can start no more threads as {side.part} is {side.doing} ({raised})",
        fix="raise the limit of tasks there (ulimit -u, a pod's pids limit), or use fewer workers",
    )


def old_system(version: str, side: Side, *, needs: str, raised: str) -> WhyUnfed:
    """Returns the cause: a library was built for a later system.

    Args:
        version: What the system lacks: `GLIBC_2.38`.
        side: Where.
        needs: The library's file; empty: not known.
        raised: The error in words.
    """
    return WhyUnfed(
        cause=Cause.MISSING_LIBRARY,
        what=f"the system of {side.here} has no {version}, which {needs or side.part} needs "
        f"({raised})",
        fix=f"use the image of {side.there} for both, or install a build for that system",
    )


def unlike_libraries(library: str, side: Side, *, raised: str) -> WhyUnfed:
    return WhyUnfed(
        cause=Cause.MISSING_LIBRARY,
        what=f"{library} of {side.here} was built for library versions that are not there "
        f"({raised})",
        fix=f"install the same versions in {side.place} as in {side.there}: of its package, and of "
        "what it was built with (often torch)",
    )


def rebuilding_failed(side: Side, *, raised: str, place: str = "", differing: str = "") -> WhyUnfed:
    """Returns the cause: what is sent raised as it was rebuilt.

    Args:
        side: Where it was rebuilt.
        raised: The error in words.
        place: Where in the user's code; empty: not known.
        differing: Packages that differ between both sides, in words.
    """
    what = f"{side.part} cannot be rebuilt on {side.here}: {raised}"
    if place:
        what += f", in {place}"
    if differing:
        fix = "install the same versions for the trainer and the data hosts"
        return WhyUnfed(cause=Cause.OTHER_VERSION, what=f"{what}; {differing}", fix=fix)
    fix = "see the traceback: what its constructors and __setstate__ use has to be there, too"
    return WhyUnfed(cause=Cause.REBUILDING_FAILED, what=what, fix=fix)


def ended_itself(side: Side, *, raised: str, place: str) -> WhyUnfed:
    """Returns the cause: the user's code raised what ends a process, such as SystemExit.

    Args:
        side: Where.
        raised: What was raised, in words.
        place: Where in the user's code; empty: not known.
    """
    what = f"{side.part} ends its process as it is {side.doing} on {side.here}: {raised}"
    if place:
        what += f", in {place}"
    return WhyUnfed(
        cause=Cause.ENDED_ITSELF,
        what=what,
        fix="look at what that line asks for and this host lacks, or raise an exception instead "
        "of calling sys.exit",
    )


def out_of_memory(side: Side, *, raised: str) -> WhyUnfed:
    return WhyUnfed(
        cause=Cause.OUT_OF_MEMORY,
        what=f"{side.here} ran out of memory as it {side.doing} {side.part} ({raised})",
        fix="give it more memory, or fewer workers, or build the dataset there: "
        "stoker.remote('module:function')",
    )


def needs_accelerator(side: Side, *, raised: str) -> WhyUnfed:
    return WhyUnfed(
        cause=Cause.ON_ACCELERATOR,
        what=f"{side.part} needs an accelerator, which {side.here} does not have ({raised})",
        fix="keep it on the CPU, and move batches to the accelerator in the training loop",
    )


def advice_on(how: str) -> str:
    """Returns what to try after a data worker ended as `pool.describe_exit` has it."""
    if "ulimit -n" in how:
        return "raise the limit of open files (ulimit -n 65536), or use fewer workers"
    if "lost its connection" in how:
        return "have the dataset close only what it has opened"
    if "lowered its limits" in how:
        return "have the dataset leave the limits of its process as they are (resource.setrlimit)"
    if "when it was forked" in how:
        return (
            "see the place in the script's other threads that has this lock, or have the loader's "
            "workers start without it: multiprocessing_context='spawn'"
        )
    if "ended with exit code" in how:
        return "see the host's log: the dataset ended its own process (sys.exit, os._exit)"
    if any(f"({number.name})" in how for number in _ASKED_TO_END):
        return _ENDED_BY_OTHERS
    if "ended with signal" in how and "SIGKILL" not in how:
        return (
            "see the stack in the host's log: native code of the dataset crashed, perhaps at one "
            "sample"
        )
    return "see the host's log; give it more memory, or fewer workers"


def fix_of_death(status: int) -> str:
    """Returns what to do where the process that rebuilds a dataset died; negative: by a signal."""
    if status == -signal.SIGKILL:
        return "see that host's log; give it more memory, or fewer workers"
    if -status in _ASKED_TO_END:
        return _ENDED_BY_OTHERS
    if status < 0:
        return (
            "see the stack in that host's log: native code crashed as modules were imported or "
            "the dataset was rebuilt"
        )
    return (
        "see that host's log: a module of the dataset, a constructor or __setstate__ ended the "
        "process (os._exit)"
    )


def host_failed(reason: str, *, host: str, fix: str = "") -> WhyUnfed:
    """Returns the cause: a data host cannot serve a session, for its own reason."""
    cause = Cause.HOST_FAILED
    if fix == MEND_CODE:
        cause = Cause.OTHER_CODE
    elif "memory" in reason:
        cause = Cause.OUT_OF_MEMORY
    return WhyUnfed(
        cause=cause,
        what=f"data host {host}: {reason}",
        where=f"host {host}",
        fix=fix or "see that host's log; give it more memory, or fewer workers",
    )


def not_picklable(culprit: str, *, raised: str) -> WhyUnfed:
    return WhyUnfed(
        cause=Cause.NOT_PICKLABLE,
        what=f"cannot send {culprit} to a data host: {raised}",
        fix="make it in worker_init_fn or at first use, leave it out in __getstate__, "
        "name the dataset by stoker.remote('module:function'), or have local workers make "
        "its batches: feed.unshippable=local",
    )


def not_readable(culprit: str, *, what: str) -> WhyUnfed:
    """Returns the cause: a part of the dataset can be pickled, and read back on no host.

    Args:
        culprit: The part, as `dataset.rng (lib.Random)`.
        what: What a data host said of it.
    """
    return WhyUnfed(
        cause=Cause.NOT_PICKLABLE,
        what=f"{what}; {culprit} cannot be read back from its pickle in the trainer either",
        fix="give its class a __reduce__ with which it can be, or make it at first use and leave "
        "it out in __getstate__",
    )


def too_large(nbytes: int, *, most: int, largest: str) -> WhyUnfed:
    what = f"the pickled dataset has {nbytes} bytes, more than feed.max_dataset_bytes ({most})"
    if largest:
        what += f"; {largest}"
    return WhyUnfed(
        cause=Cause.TOO_LARGE,
        what=what,
        fix="build it on the data hosts: stoker.remote('module:function'), or raise "
        "feed.max_dataset_bytes",
    )


def on_accelerator(tensor: str) -> WhyUnfed:
    return WhyUnfed(
        cause=Cause.ON_ACCELERATOR,
        what=f"the dataset or collate function holds {tensor}, perhaps a model among its globals",
        fix="keep it on the CPU, and move batches to the accelerator in the training loop",
    )


def hosts_lost(what: str, *, where: str) -> WhyUnfed:
    return WhyUnfed(
        cause=Cause.HOSTS_LOST,
        what=what,
        where=where,
        fix="see the logs of the data hosts, or set feed.local_workers as a fallback",
    )


def torchs_loader(kind: str) -> WhyUnfed:
    return WhyUnfed(cause=Cause.TORCHS_LOADER, what=f"{kind} is read without stoker", fix=_TORCHS)


def own_loader(kinds: Sequence[str]) -> WhyUnfed:
    return WhyUnfed(
        cause=Cause.OWN_LOADER, what=f"{' or '.join(kinds)} makes batches in its own way", fix=_OWN
    )


def never_read(place: str) -> WhyUnfed:
    return WhyUnfed(
        cause=Cause.NEVER_READ,
        what=f"the DataLoader made at {place} was never read",
        fix="train on its batches, or train without a data group",
    )


def empty_loader() -> WhyUnfed:
    return WhyUnfed(
        cause=Cause.EMPTY,
        what="a DataLoader was read and gave no batch",
        fix="is its dataset empty?",
    )


def no_loader() -> WhyUnfed:
    return WhyUnfed(cause=Cause.NO_LOADER, what="no loader of torch or stoker was read", fix=_OWN)


def made_here(reasons: Sequence[str]) -> WhyUnfed:
    return WhyUnfed(
        cause=Cause.MADE_HERE, what=f"the trainer made all batches: {'; '.join(reasons)}"
    )


def advice_in_trainer(why: WhyUnfed, *, is_there: bool) -> str:
    """Returns what to do about an error of a batch, in one line; empty: nothing is known.

    Args:
        why: What the error says of the host that raised it.
        is_there: Whether the trainer has the module or file that is missing there.
    """
    if why.cause == Cause.MISSING_MODULE and is_there:
        return f"the trainer has {why.subject}: install it in {_IMAGE}, or put its file there"
    if why.cause == Cause.MISSING_FILE and is_there:
        return f"the trainer has {why.subject}: have it at the same path on the data hosts"
    if why.cause == Cause.MISSING_FILE and os.path.isabs(why.subject):
        # Nobody has it: the dataset's own mistake.
        return ""
    return why.words
