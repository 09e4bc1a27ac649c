"""`stoker doctor` prints one line for each finding."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated

import typer

from stoker.cli.options import AsJson, Debug
from stoker.errors import PlatformError


def doctor_verb(
    *,
    peer: Annotated[
        str | None,
        typer.Option("--peer", metavar="HOST[:PORT]", help="Tries the feed's port there, too."),
    ] = None,
    aws: Annotated[bool, typer.Option("--aws", help="Asks AWS who we are, too.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Says what this host is and has, and what it lacks."""
    raise typer.Exit(doctor_command(os.environ, peer=peer, aws=aws, as_json=as_json))


def doctor_command(
    environ: Mapping[str, str], *, peer: str | None, aws: bool, as_json: bool
) -> int:
    """Prints what was found; 0, or 4 where a finding says that a run cannot work here.

    Args:
        environ: Of this process.
        peer: Another host to reach.
        aws: Whether to ask AWS who we are.
        as_json: One JSON document instead of lines.
    """
    from stoker.doctor import examine

    checks = []
    for check in examine(environ, peer=peer, aws=aws):
        checks.append(check)
        if not as_json:
            print(f"{check.state:<5} {check.name:<8} {check.text}", flush=True)
            if check.state != "ok" and check.fix:
                print(f"{'':<15}try: {check.fix}", flush=True)
    is_healthy = all(check.state != "fail" for check in checks)
    if as_json:
        print(json.dumps({"healthy": is_healthy, "checks": [asdict(c) for c in checks]}, indent=2))
    return 0 if is_healthy else PlatformError.exit_code
