"""The parser of all verbs."""

from typing import Annotated

import typer

from stoker.cli import local, pipelines, setup, steps

app = typer.Typer(
    name="stoker",
    # Else `stoker --help` would import rich, and brackets in a help text would be markup.
    rich_markup_mode=None,
    # Errors are shown by `main`, in three lines.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Each verb shows examples: stoker profile --help",
)
for verbs in (local.app, pipelines.app, setup.app):
    app.add_typer(verbs)
app.add_typer(steps.app, name="step", hidden=True, help="The steps of a pipeline's definition.")


def print_version(value: bool) -> None:
    if value:
        from stoker import __version__

        print(f"stoker {__version__}")
        raise typer.Exit


@app.callback()
def stoker(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", callback=print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Find out why your GPUs wait for data, and feed them from CPU hosts."""
