"""A run that Ctrl-C or SIGTERM stops keeps its record, and says what is kept and how to go on."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from stoker.cli.progress import relative, say
from stoker.cli.verbs import training_words
from stoker.records import Training, write_json
from stoker.records.training_facts import copied_to


def keep_stopped(
    record: Training, *, run_dir: Path, out: Path | None, again: str, quiet: bool
) -> None:
    """Copies the record of a stopped training, and says what is kept and how to go on.

    Args:
        record: What was measured until then, as it is in the run's folder; status `stopped`.
        run_dir: Of the run.
        out: Where else the record goes.
        again: The command that goes on.
        quiet: Says nothing.

    Raises:
        UsageError: If the record cannot be written.
    """
    files = [run_dir / "training.json", *([out] if out else [])]
    if out:
        write_json(out, copied_to(out, record, run_dir=run_dir))
    say(
        f"{training_words(record)}: all hosts have ended\n"
        f"kept:  {', '.join(map(relative, files))} (status: stopped), "
        f"{relative(run_dir / 'logs')}, and what the script saved\n"
        f"again: {again}",
        quiet=quiet,
    )


def command_line(arguments: Sequence[str], *, from_step: str | None = None) -> str:
    """Returns the command line as a person would type it again.

    Args:
        arguments: Behind `stoker`.
        from_step: Takes the place of its `--from`, or is added.
    """
    words = ["stoker", *arguments]
    if from_step is not None:
        if "--from" in words:
            at = words.index("--from")
            del words[at : at + 2]
        words = [word for word in words if not word.startswith("--from=")]
        words += ["--from", from_step]
    return shlex.join(words)
