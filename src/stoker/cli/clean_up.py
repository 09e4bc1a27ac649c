"""`stoker train --clean-up STATUS` says the last word of a pipeline's run, however it ended."""

import json
from collections.abc import Callable, Mapping, Sequence

from stoker.cli.workloads import read_with_params, region_of
from stoker.errors import UsageError
from stoker.records import Json, KubernetesSettings

_CleanUp = Callable[[str, KubernetesSettings | None], str]


def clean_up_command(
    words: Sequence[str],
    *,
    name: str | None,
    run_id: str | None,
    status: str,
    overrides: Sequence[str],
    params: Sequence[str],
    as_json: bool,
) -> None:
    """Ends the run's job if it is still there, and says how the run ended.

    Raises:
        UsageError: If no run is named.
        PlatformError: If the platform does not answer, or does not let us.
    """
    from stoker.platforms import platform_named

    if len(words) != 1 or not (name or run_id):
        raise UsageError(
            "nothing says whose job to end",
            where="--clean-up",
            fix="stoker train WORKLOAD --run-id ID --clean-up STATUS",
        )
    workload = read_with_params(words[0], overrides=overrides, params=params)
    job = name or workload.run_name(run_id or "")
    platform = platform_named(workload.platform, region=region_of(workload))
    # Only a platform whose jobs outlive their caller has it; gives what it ended, in words.
    clean_up: _CleanUp | None = getattr(platform, "clean_up", None)
    ended = clean_up(job, workload.kubernetes) if clean_up else ""
    state, why = _state(status)
    if as_json:
        print(json.dumps({"run": job, "state": state, "reason": why, "ended": ended}))
        return
    print(f"run {job}: {state}" + (f": {why}" if why else ""))
    print(ended or "nothing was left to end")


def _state(status: str) -> tuple[str, str]:
    """Returns how the run ended, and why, from the status that Kubeflow hands an exit handler."""
    try:
        document: Json = json.loads(status)
    except ValueError:
        return status.strip().lower() or "unknown", ""
    found = document if isinstance(document, Mapping) else {}
    error = found.get("error")
    message = error.get("message") if isinstance(error, Mapping) else None
    return str(found.get("state") or "unknown").lower(), str(message or "")
