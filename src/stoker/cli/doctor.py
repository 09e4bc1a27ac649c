"""`stoker doctor` prints one line for each finding."""

import json
import os
from dataclasses import asdict
from typing import Annotated

import typer

from stoker.cli.options import AsJson
from stoker.errors import PlatformError


def doctor_verb(
    *,
    peer: Annotated[
        str | None,
        typer.Option(
            "--peer", metavar="HOST[:PORT]", help="Also tries to reach the feed's port there."
        ),
    ] = None,
    aws: Annotated[
        bool, typer.Option("--aws", help="Also asks AWS which account and role it sees.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Checks what this host has, and what it lacks for stoker."""
    from stoker.doctor import examine

    checks = []
    for check in examine(os.environ, peer=peer, aws=aws):
        checks.append(check)
        if not as_json:
            # At once: some look-ups take seconds, and a hang shows at what.
            print(f"{check.state:<5} {check.name:<8} {check.text}", flush=True)
            if check.state != "ok" and check.fix:
                print(f"{'':<15}try: {check.fix}", flush=True)
    is_healthy = all(check.state != "fail" for check in checks)
    if as_json:
        print(json.dumps({"healthy": is_healthy, "checks": [asdict(c) for c in checks]}, indent=2))
    # A host that a run cannot use is the platform's fault, not the command line's.
    return 0 if is_healthy else PlatformError.exit_code
