"""The memory of a pipeline: its runs that passed, and what a new run has in common with the last.

Each run that passed is one file. So two runs that end at once write two files.
"""

from collections.abc import Mapping
from typing import Literal

import msgspec

from stoker.records.base import Json, Name, Record, sha256_of, to_document
from stoker.records.decision import Decision
from stoker.records.profile import Profile
from stoker.records.training import Lineage, Training
from stoker.records.workload import Workload

# Other values of these keys train the same model.
NO_CHANGE = ("skip_unchanged", "notify", "tracking", "watchdog", "on_no_capacity")
# Facts with their own values: the digest of the image, and of the code.
_OF_FACTS = ("image",)
_NO_CHANGE_ON_SAGEMAKER = (
    "source",
    "schedule",
    "schedule_role",
    "dead_letter_queue",
    "overlap",
    "cache_days",
    "control",
    "pipeline_role",
)
_DIGITS = 16
# How the words of a run begin that trains nothing: `stoker status` finds them in a step's log.
NOTHING_CHANGED = "nothing changed since"


class RememberedRun(Record, frozen=True, kw_only=True):
    """A run of a pipeline that passed, as the pipeline's later runs read it.

    Attributes:
        schema: Version of the file format.
        pipeline: Name of the workload.
        branch: Which of the run's training jobs it is. Empty: its only one.
        run: Name of the run, as in its job's name.
        execution: Run of the service, whose later steps may have failed. Empty: it is known to have
            passed.
        ended_at: When it trained or ended: ISO 8601, in UTC.
        made_of: What it was made of: facts to digests, as in a comparison. Empty: not compared.
        profile: Its profile.
        decision: Its decision, with the chosen plan and the probable one alone.
        training: Its training: status, groups, events and measured steps.
    """

    schema: Literal["stoker.memory/v1"] = "stoker.memory/v1"
    pipeline: Name
    branch: str = ""
    run: Name
    execution: str = ""
    ended_at: Name
    made_of: dict[str, str] = {}
    profile: Profile
    decision: Decision
    training: Training

    @property
    def words(self) -> str:
        """The run with its day: `mnist--abcdefghijkl of 2026-11-19`."""
        return f"{self.run} of {self.ended_at[:10]}"


class Comparison(Record, frozen=True, kw_only=True):
    """What has changed since the last run that passed: whether a new one would train another model.

    Attributes:
        schema: Version of the file format.
        has_changed: Whether the pipeline trains.
        words: What to tell, in one line.
        since: The last run that passed. Empty: there is none, or it cannot be read.
        made_of: What this run is made of: facts to digests.
        unknown: Facts that could not be read, and why; they count as changed.
    """

    schema: Literal["stoker.comparison/v1"] = "stoker.comparison/v1"
    has_changed: bool = True
    words: str = ""
    since: str = ""
    made_of: dict[str, str] = {}
    unknown: dict[str, str] = {}


def compared(
    made_of: Mapping[str, str], *, unknown: Mapping[str, str], last: RememberedRun | None
) -> Comparison:
    """Returns whether a run would train what the last one that passed has trained. Pure.

    Args:
        made_of: What the run is made of: facts to digests.
        unknown: Facts that could not be read, and why.
        last: The last run that passed. None: there is none.
    """
    here = Comparison(made_of=dict(made_of), unknown=dict(unknown))
    if last is None:
        return trains(here, "as no run of this pipeline is remembered yet")
    here = msgspec.structs.replace(here, since=last.run)
    if unknown:
        facts = "; ".join(f"{fact}: {why}" for fact, why in sorted(unknown.items()))
        return trains(here, f"as this is not known: {facts}")
    if not last.made_of:
        return trains(here, f"as it is not known what {last.words} was made of")
    names = sorted(made_of.keys() | last.made_of.keys())
    changed = [fact for fact in names if made_of.get(fact) != last.made_of.get(fact)]
    if changed:
        return trains(here, f"as this changed since {last.words}: {', '.join(changed)}")
    words = f"{NOTHING_CHANGED} {last.words}: skipped (--param skip_unchanged=false trains)"
    return msgspec.structs.replace(here, has_changed=False, words=words)


def trains(comparison: Comparison, why: str) -> Comparison:
    """Returns the comparison of a run that trains.

    Args:
        comparison: Its facts are kept.
        why: Half a sentence: as the data changed.
    """
    words = f"skip_unchanged: it trains, {why}"
    return msgspec.structs.replace(comparison, has_changed=True, words=words)


def workload_facts(workload: Workload) -> dict[str, str]:
    """Returns a digest of each key of a workload whose value changes the model."""
    document = {
        key: value
        for key, value in to_document(workload).items()
        if key not in (*NO_CHANGE, *_OF_FACTS)
    }
    settings = document.get("sagemaker")
    if isinstance(settings, Mapping):
        document["sagemaker"] = {
            key: value for key, value in settings.items() if key not in _NO_CHANGE_ON_SAGEMAKER
        }
    return {f"workload.{key}": _digest(value) for key, value in sorted(document.items())}


def remembered_run(
    *,
    workload: Workload,
    branch: str,
    run: str,
    execution: str,
    now: str,
    made_of: Mapping[str, str],
    records: tuple[Profile, Decision, Training],
) -> RememberedRun:
    """Returns what later runs need of a run that passed. Pure.

    Args:
        workload: Its name is the pipeline's.
        branch: Which of the run's training jobs it is; empty: its only one.
        run: Name of the run.
        execution: Run of the service; empty: nobody needs to ask how it has ended.
        now: Time for a training run that has none: ISO 8601, in UTC.
        made_of: As its comparison had it, without what the training saw otherwise; empty: not
            compared.
        records: The profile is kept whole, as runs are replayed from it; the decision with its own
            plans alone; the training without what is of single hosts.
    """
    profile, decision, training = records
    # `followed` may ask for each of these, which may be one plan.
    named = (decision.plan, decision.probable, decision.today)
    plans = tuple(plan for plan in named if plan)
    measured = training.measured
    if measured:
        measured = msgspec.structs.replace(measured, timeline_file=None)
    # Metrics and hyperparameters may be no numbers of JSON, and no decision reads them.
    trained = msgspec.structs.replace(
        training,
        measured=measured,
        lineage=Lineage(),
        hosts=(),
        memory=(),
        gpus=(),
        metrics={},
        hyperparameters={},
        not_numbers=None,
    )
    return RememberedRun(
        pipeline=workload.name,
        branch=branch,
        run=run,
        execution=execution,
        ended_at=training.events[-1].when if training.events else now,
        made_of=_confirmed(made_of, image=workload.image or "", lineage=training.lineage),
        profile=profile,
        decision=msgspec.structs.replace(decision, plans=plans, path=(), advice=(), warnings=()),
        training=trained,
    )


def _confirmed(made_of: Mapping[str, str], *, image: str, lineage: Lineage) -> dict[str, str]:
    """Returns the facts, without those that the training saw otherwise.

    Data may change between the comparison and the training, and so may what a tag names; or a node
    has kept an earlier image of it. A fact that is left out counts as changed.
    """
    seen = {f"channel.{name}": data.version for name, data in lineage.inputs.items()}
    if "@sha256:" not in image:
        seen["image"] = lineage.image_digest
    return {fact: digest for fact, digest in made_of.items() if seen.get(fact) in (None, digest)}


def _digest(value: Json) -> str:
    return sha256_of({"value": value})[:_DIGITS]
