"""`stoker profile WORKLOAD | -- CMD` measures what a step of the unchanged command waits for."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from stoker.catalog import catalog_of
from stoker.cli.billing import confirm
from stoker.cli.delivery import Outputs, deliver
from stoker.cli.progress import relative, say, step_line
from stoker.cli.step_outputs import told_of_profile
from stoker.cli.workloads import new_run_dir, region_of, resolve, todays_cluster
from stoker.host.cpu import usable_vcpus
from stoker.logs import parse_line
from stoker.platforms import platform_named
from stoker.platforms.base import LogLine
from stoker.profile import explain, profile
from stoker.profile.profiled_job import UnmeasuredError, notebook_refusal
from stoker.records import Cluster, Group, TodaysGroup, Workload, write_json


def profile_command(
    words: Sequence[str],
    *,
    outputs: Outputs,
    overrides: Sequence[str],
    params: Sequence[str],
    as_json: bool,
    yes: bool,
) -> None:
    """Runs `stoker profile`; writes what was observed where no step could be measured.

    Raises:
        UsageError: If the command is a notebook, or as `stoker.profile.profiled_job`.
    """
    refused = notebook_refusal(words, where="command line") if words else None
    if refused:
        raise refused
    workload = resolve(words, overrides=overrides, params=params)
    cluster = _cluster(workload, is_command=workload.command == tuple(words))
    confirm(
        workload,
        [Group.of_today(cluster.dnn)],
        catalog=catalog_of(workload),
        decision=None,
        assume_yes=yes,
        quiet=as_json,
    )
    run_dir = new_run_dir(f"{workload.name}-profile")
    say(
        f"profile of {workload.name}: {workload.profile.budget_seconds:.0f} s from its first batch "
        f"on, then it is ended; its output: {relative(run_dir / 'logs')}",
        quiet=as_json,
    )
    followed = _Followed(quiet=as_json)
    try:
        record = profile(
            workload,
            cluster=cluster,
            platform=platform_named(workload.platform, region=region_of(workload)),
            run_dir=run_dir,
            on_line=followed.line,
        )
    except UnmeasuredError as err:
        if err.observed:
            out = outputs.out or Path("profile.json")
            write_json(out, err.observed)
            say(f"no step was measured; written is what was observed: {out}", quiet=as_json)
        raise
    deliver(
        record,
        outputs=outputs,
        name="profile",
        explain=explain,
        as_json=as_json,
        told=told_of_profile(record),
    )


def _cluster(workload: Workload, *, is_command: bool) -> Cluster:
    """Returns today's cluster; a bare command has this machine to itself, as without stoker."""
    if is_command and workload.cluster is None and workload.platform == "local":
        return Cluster(dnn=TodaysGroup(instance_type=f"local.c{usable_vcpus()}", count=1))
    return todays_cluster(workload)


class _Followed:
    """Shows how far the profile is, from the log of its first rank."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._said: set[str] = set()

    def line(self, line: LogLine) -> None:
        """Takes one line of the job's log; the script's own are in the files."""
        event = parse_line(line.text) if line.text.startswith("stoker ") else None
        if event is None or event.values.get("rank", "0") != "0":
            return
        words = _WORDS.get(event.event)
        if words:
            title, text = words
            # Ranks that say not who they are say the same.
            once = f"{event.event} {event.values.get('workers')}"
            if once not in self._said:
                self._said.add(once)
                say(step_line(title, text(event.values), None), quiet=self._quiet)


def _steps_so_far(values: Mapping[str, str]) -> str:
    step = values.get("step_seconds")
    took = f"; a step takes {_ms(step)}" if step else "; no step has ended yet"
    return f"{_share(values)} of the time goes on waiting for data{took}"


def _as_is(values: Mapping[str, str]) -> str:
    return f"a step takes {_ms(values['step_seconds'])}, {_share(values)} of it waiting for data"


def _accelerator(values: Mapping[str, str]) -> str:
    return f"with cached batches a step takes {_ms(values['step_seconds'])}"


def _loader(values: Mapping[str, str]) -> str:
    return f"{values['workers']} workers alone: {_ms(values['cpu_seconds'])} of CPU a batch"


def _share(values: Mapping[str, str]) -> str:
    return f"{float(values['wait_share']):.0%}"


def _ms(seconds: str) -> str:
    return f"{float(seconds) * 1000:.1f} ms"


_WORDS: Mapping[str, tuple[str, Callable[[Mapping[str, str]], str]]] = {
    "profile_begins": ("begins", lambda _: "the script asks for its first batch"),
    "profile_so_far": ("so far", _steps_so_far),
    "profile_as_is": ("as is", _as_is),
    "profile_accelerator": ("no loader", _accelerator),
    "profile_loader": ("loader", _loader),
}
