"""All objects of a run, as they are sent: the job and what it owns."""

from collections.abc import Mapping
from dataclasses import dataclass

from stoker.errors import UsageError
from stoker.platforms.base import JobSpec
from stoker.platforms.kubernetes.api import text
from stoker.platforms.kubernetes.jobset import (
    job_of,
    metadata,
    object_of_run,
)
from stoker.platforms.kubernetes.layout import (
    JOBSET_LABEL,
    REQUEST_ANNOTATION,
    ROLE_LABEL,
    STEP_LABEL,
    TOKEN_KEY,
    WORKFLOW_LABEL,
    Layout,
    config_map,
    lay_out,
    records_map,
    token_secret,
)
from stoker.platforms.kubernetes.pod_template import files_of_run, pods_of
from stoker.records import Json
from stoker.records.base import Document, mapping

# In place of the token where the Secret is shown; a launcher refuses it as a token.
NO_TOKEN = "made-when-the-job-is-submitted"
# Followers that a budget keeps: more than one run can have.
_ALL_FOLLOWERS = 10_000


def follower_budget(layout: Layout, workflow: Document, labels: Document) -> Document:
    """Returns the budget, owned by a Workflow, by which a drain waits for the follower of a job.

    One for each step, whose pods alone have `labels`: the eviction API refuses a pod with two
    budgets by an error (500), on which a drain gives up instead of waiting. A step in a loop has
    many pods, so the budget asks for more than there can be: none may be evicted.
    """
    name = text(workflow, "name")
    described = metadata(layout, name=f"{name}-{text(labels, STEP_LABEL) or 'followers'}")
    del described["annotations"]
    described["ownerReferences"] = [dict(workflow)]
    return _budget(described, _ALL_FOLLOWERS, {WORKFLOW_LABEL: name, **labels})


def _budget(described: dict[str, Json], count: int, labels: Document) -> Document:
    # Not maxUnavailable: a Workflow has no scale, and of a Job a budget does not know its pods.
    spec: Document = {"minAvailable": count, "selector": {"matchLabels": labels}}
    return object_of_run("policy/v1", "PodDisruptionBudget", described, spec=spec)


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesRequest:
    """All objects of a job, before anything is sent.

    The job owns Secret, ConfigMaps, budget and its runtime; submit() sets their owner references,
    and the job's to its Workflow.

    Attributes:
        main: JobSet or TrainJob.
        runtime_is_ours: Whether submit() makes the runtime; else an equal one must exist.
        config: ConfigMap that launchers read.
        secret: Secret, with NO_TOKEN in place of the token.
        budget: PodDisruptionBudget of the dnn group.
        records: ConfigMap for a later follower; None outside of pipelines.
    """

    job: JobSpec
    layout: Layout
    main: Document
    runtime: Document | None
    runtime_is_ours: bool
    config: Document
    secret: Document
    budget: Document
    records: Document | None = None

    @property
    def name(self) -> str:
        return self.layout.name

    @property
    def objects(self) -> tuple[Document, ...]:
        """What submit() makes, in the order of need."""
        runtime = (self.runtime,) if self.runtime and self.runtime_is_ours else ()
        records = (self.records,) if self.records else ()
        return (self.secret, self.config, *records, self.budget, *runtime, self.main)

    @property
    def request_sha256(self) -> str:
        """Digest of the job's spec and configuration: equal in all attempts."""
        return str(mapping(self.main, "metadata", "annotations")[REQUEST_ANNOTATION])


def plan_request(job: JobSpec) -> KubernetesRequest:
    """Returns the objects for `job`, without files or calls; raises UsageError for wrong ones."""
    layout = lay_out(job)
    if layout.settings.runtime and job.run is not None:
        raise UsageError(
            f"the TrainingRuntime {layout.settings.runtime} fits the run's first plan only",
            where="key kubernetes.runtime",
            fix="leave it out: one is made for each plan",
        )
    pods = pods_of(layout)
    files = files_of_run(layout)
    main, runtime = job_of(layout, pods, files=files)
    secret = object_of_run(
        "v1",
        "Secret",
        metadata(layout, name=token_secret(layout.name)),
        type="Opaque",
        immutable=True,
        stringData={TOKEN_KEY: NO_TOKEN},
    )
    dnn = {JOBSET_LABEL: layout.name, ROLE_LABEL: "dnn"}
    return KubernetesRequest(
        job=job,
        layout=layout,
        main=main,
        runtime=runtime,
        runtime_is_ours=runtime is not None and layout.settings.runtime is None,
        config=_config_map(layout, config_map(layout.name), files),
        secret=secret,
        # A drain waits for the dnn group to end.
        budget=_budget(metadata(layout), layout.dnn.group.count, dnn),
        records=_config_map(layout, records_map(layout.name), job.records) if job.records else None,
    )


def _config_map(layout: Layout, name: str, data: Mapping[str, str]) -> Document:
    # Immutable: a run's settings do not change, and kubelets need not watch the object.
    described = metadata(layout, name=name)
    return object_of_run("v1", "ConfigMap", described, immutable=True, data=dict(data))
