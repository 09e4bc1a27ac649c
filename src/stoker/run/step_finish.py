"""A pipeline's last step: ends what is left of a run that is over, and reports how the run ended.

Jobs of a failed run whose steps were lost are followed to their end, unless the run was stopped.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from stoker.catalog import catalog_of
from stoker.environment import own_pod
from stoker.errors import PlatformError, StokerError, TerminatedError
from stoker.pipelines.kubeflow.step_logs import words_of_skip
from stoker.platforms import platform_named
from stoker.platforms.base import Platform
from stoker.platforms.kubernetes.api import ClusterApi
from stoker.records import Decision, Json, Workload, read_json, write_text
from stoker.records.base import item_at, text
from stoker.records.outcome import outcome_of, training_exit_code
from stoker.run.clusters import todays_cluster
from stoker.run.judging import Judgement, judged
from stoker.run.outputs import Outputs
from stoker.run.plan_price import with_plan_price
from stoker.run.profiling import deliver_profile, profile_and_keep
from stoker.run.run_folders import named_run_dir
from stoker.run.training_run import FollowedTraining, deliver_training, train_and_keep
from stoker.run.webhook import telling
from stoker.terminal import say
from stoker.train import prepare

# As on Kubeflow's pages, and as its driver hands it to an exit handler.
_FAILED = ("failed", "error", "system_error")
# Kubeflow publishes nothing of a step whose driver failed or whose pod was killed, nor of a last
# condition that was not taken: such a run still runs for it when it is over.
_UNPUBLISHED = ("running", "new")
_SUCCEEDED = ("succeeded", "success", "complete", "cached")
_NO_REPORT = "<p>No training job of this run was lost: the report of the run is Evaluate's.</p>\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishOutputs:
    """Where the results of a job go whose step was lost; `record` is also for the model."""

    record: Outputs
    evaluation: Path | None
    report: Path | None


def finish_run(
    workload: Workload, *, run_id: str, outcome: str, outputs: FinishOutputs, as_json: bool
) -> None:
    """Follows lost jobs of a failed run, ends what is left of it, and reports how it ended.

    `outcome` is JSON as of Kubeflow's PipelineTaskFinalStatus. Raises TerminatedError on SIGTERM
    while it follows a job, which continues.
    """
    run = workload.run_name(run_id)
    state, why = _state(outcome)
    platform = platform_named(workload.platform, settings=workload)
    if state not in _SUCCEEDED:
        if platform.is_cancelled(workload):
            # Whatever the outcome says: a run that is being cancelled has not failed.
            state = "cancelled"
        elif state in _UNPUBLISHED:
            state = "failed" if platform.has_failed(workload) else "succeeded"
    followed: list[str] = []
    is_left = False
    ended = ""
    with telling(workload, run=run, step="the pipeline", quiet=as_json) as ending:
        # First: that the run failed is the greater news, should this step fail as well.
        if state in _FAILED:
            ending.failed(why)
        elif state not in _SUCCEEDED:
            # Cancelled, or a word that Kubeflow did not fill in.
            ending.status = "stopped"
        else:
            ending.note = why = _why_skipped(workload, run_id=run_id)
        if state not in (*_SUCCEEDED, "cancelled"):
            lost = LostJobs(
                workload=workload,
                run_id=run_id,
                platform=platform,
                outputs=outputs,
                quiet=as_json,
            )
            followed, is_left = lost.follow_all()
        # A job that may still run is left alone: `stoker stop` ends it.
        if not is_left:
            ended = platform.clean_up(run, workload, run_id=run_id)
    if outputs.report and not outputs.report.exists():
        # Kubeflow shows the page of each declared report.
        outputs.report.parent.mkdir(parents=True, exist_ok=True)
        write_text(outputs.report, _NO_REPORT)
    if as_json:
        document = {"run": run, "state": state, "reason": why, "ended": ended, "followed": followed}
        print(json.dumps(document))
        return
    words = f"{state}: {why}" if why else state
    print(f"run {run}: {words}")
    print("\n".join([ended or "no job of the run was left", *followed]))


def _why_skipped(workload: Workload, *, run_id: str) -> str:
    """Returns why a run was skipped; empty: it was not, or the cluster does not show it."""
    settings = workload.kubernetes
    pod = own_pod()
    if not (workload.skip_unchanged and settings and pod):
        return ""
    cluster = ClusterApi(
        context=settings.context,
        namespace=pod.namespace or settings.namespace,
        strict_tls=settings.strict_tls,
    )
    try:
        return words_of_skip(cluster, run_id=run_id)
    except StokerError:
        # The run has succeeded all the same.
        return ""


def _state(outcome: str) -> tuple[str, str]:
    """Returns how the run ended, and why, from what Kubeflow hands an exit handler."""
    try:
        document: Json = json.loads(outcome)
    except ValueError:
        # A placeholder that a server before 2.14 does not fill in.
        document = {}
    state = str(item_at(document, "state") or "unknown").lower()
    return state, text(document, "error", "message")


@dataclass(frozen=True, slots=True, kw_only=True)
class LostJobs:
    """The jobs of a failed run whose steps were lost, and where their results go."""

    workload: Workload
    run_id: str
    platform: Platform[object]
    outputs: FinishOutputs
    quiet: bool

    def follow_all(self) -> tuple[list[str], bool]:
        """Follows them one by one; returns what came of each, and whether one may still run."""
        followed = []
        is_left = False
        for words, may_run in self.follow():
            followed.append(words)
            is_left = is_left or may_run
            say(words, quiet=self.quiet)
        return followed, is_left

    def follow(self) -> Iterator[tuple[str, bool]]:
        """Follows the jobs of a failed run to their end, and writes what the lost steps would have.

        The jobs' own time limits hold. Yields a line on each lost job, and whether it may still
        run. Raises TerminatedError on SIGTERM; the job continues.
        """
        run = self.workload.run_name(self.run_id)
        for records in self.platform.lost(run, self.workload, run_id=self.run_id):
            step = records.get("step", "")
            follow = self._follow_training
            if step == "profile":
                follow = self._follow_profile
            kept = {name: text for name, text in records.items() if name != "run"}
            try:
                yield follow(kept, run=records["run"]), False
            except TerminatedError as err:
                # With a message the job continues: the run was not stopped.
                if err.args:
                    raise
                yield f"the run was stopped, and with it the job of the {step}", False
            except PlatformError as err:
                words = f"it cannot be followed: {err.what}; `stoker stop` ends what still runs"
                yield f"the step that followed the {step} was lost, and {words}", True
            except StokerError as err:
                yield (
                    f"the step that followed the {step} was lost, and it failed: {err.what}",
                    False,
                )

    def _follow_profile(self, records: Mapping[str, str], *, run: str) -> str:
        # As Profile had it, with the parameters of the run.
        workload = read_json(records["workload.json"], Workload)
        cluster = todays_cluster(workload)
        run_dir = named_run_dir(run)
        record = profile_and_keep(
            workload,
            cluster=cluster,
            platform=self.platform.adopting(),
            run_dir=run_dir,
            records=records,
            quiet=self.quiet,
        )
        out = self.outputs.record.out or run_dir / "profile.json"
        deliver_profile(record, outputs=replace(self.outputs.record, out=out), as_json=self.quiet)
        return "the profile is finished though the run has FAILED: Retry uses it instead of another"

    def _follow_training(self, records: Mapping[str, str], *, run: str) -> str:
        # As Train had it, with the parameters of the run.
        workload = read_json(records["workload.json"], Workload)
        decided = read_json(records["decision.json"], Decision)
        run_dir = named_run_dir(run)
        for name, content in records.items():
            if name.endswith(".json"):
                write_text(run_dir / name, content)
        job = prepare(
            workload=workload, groups=decided.plan.groups, run_dir=run_dir, decision=decided
        )
        life = FollowedTraining(
            job=replace(job, records=records),
            workload=workload,
            platform=self.platform.adopting(),
            catalog=with_plan_price(catalog_of(workload, None), workload, quiet=True),
            decision=decided,
            quiet=self.quiet,
        )
        record = train_and_keep(life)
        life.track(record, files=("decision.json", "training.json"))
        deliver_training(life, record, outputs=self.outputs.record)
        if "profile.json" in records:
            # The claim of champions is not mounted here: the step that frees hosts must not wait
            # for a volume. A retry judges by all gates.
            gates = tuple(gate for gate in self.workload.gate if not gate.needs_champion)
            training = self.outputs.record.out or run_dir / "training.json"
            judgement = Judgement(
                workload=msgspec.structs.replace(workload, gate=gates),
                profile=run_dir / "profile.json",
                decision=run_dir / "decision.json",
                training=str(training),
                outputs=Outputs(out=self.outputs.evaluation or run_dir / "evaluation.json"),
                report=self.outputs.report or run_dir / "report.html",
                as_json=self.quiet,
            )
            judged(judgement)
        if training_exit_code(record):
            return f"{outcome_of(record).words}; the step that followed it was lost before"
        return (
            "the training is finished though the run has FAILED: Retry uses it instead of another"
        )
