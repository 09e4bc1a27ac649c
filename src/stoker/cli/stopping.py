"""A run that Ctrl-C or SIGTERM stops keeps its record, and prints what is kept and how to go on."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from stoker.catalog import Catalog
from stoker.cli.progress import following, relative, say
from stoker.cli.verdicts import training_words
from stoker.platforms.base import JobSpec, Platform
from stoker.records import Decision, Training, write_json
from stoker.records.training_facts import copied_to
from stoker.train import train


def train_and_keep(
    job: JobSpec,
    *,
    platform: Platform[object],
    catalog: Catalog,
    decision: Decision | None,
    total_steps: int | None,
    out: Path | None,
    again: str,
    quiet: bool,
    echo: bool,
) -> Training:
    """Trains and shows how far it is; keeps the record of a training that is stopped.

    Args:
        job: What to train; its folder gets the record of a training that is stopped.
        platform: The platform that runs the job.
        catalog: Prices of that platform.
        decision: The decision that predicted its time, if there is one.
        total_steps: Steps of the whole training, if known.
        out: Second file for the record of a training that is stopped.
        again: The command that goes on after a stop.
        quiet: Whether to show nothing.
        echo: Whether to show the lines of the script, too.
    """
    with following(quiet=quiet, echo=echo, total_steps=total_steps) as follow:
        return train(
            job,
            platform=platform,
            catalog=catalog,
            decision=decision,
            on_line=follow.line,
            on_stop=lambda stopped: keep_stopped(
                stopped, run_dir=job.run_dir, out=out, again=again, quiet=quiet
            ),
        )


def keep_stopped(
    record: Training, *, run_dir: Path, out: Path | None, again: str, quiet: bool
) -> None:
    """Copies the record of a stopped training, and prints what is kept and how to go on.

    Args:
        record: What was measured until then, as it is in the run's folder; status `stopped`.
        run_dir: Folder of the run.
        out: Second file for the record.
        again: The command that goes on.
        quiet: Whether to print nothing.

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
        arguments: The words after `stoker`.
        from_step: Step for `--from`, which is replaced or added.
    """
    words = ["stoker", *arguments]
    if from_step is not None:
        if "--from" in words:
            at = words.index("--from")
            del words[at : at + 2]
        words = [word for word in words if not word.startswith("--from=")]
        words += ["--from", from_step]
    return shlex.join(words)
