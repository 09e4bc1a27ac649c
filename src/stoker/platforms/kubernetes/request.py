"""All objects of a run, as they are sent: the job and what it owns."""

from dataclasses import dataclass

from stoker.errors import UsageError
from stoker.platforms.base import JobSpec
from stoker.platforms.kubernetes.checks import checked_job
from stoker.platforms.kubernetes.jobset import job_of
from stoker.platforms.kubernetes.layout import REQUEST_ANNOTATION, Layout, lay_out
from stoker.platforms.kubernetes.owned import (
    config_map,
    dnn_budget,
    records_map,
    token_secret,
)
from stoker.platforms.kubernetes.pod_template import files_of_run, pods_of
from stoker.records.base import Document, mapping


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
    layout = lay_out(checked_job(job))
    if layout.settings.runtime and job.run is not None:
        raise UsageError(
            f"the TrainingRuntime {layout.settings.runtime} fits the run's first plan only",
            where="key kubernetes.runtime",
            fix="leave it out: one is made for each plan",
        )
    pods = pods_of(layout)
    files = files_of_run(layout)
    main, runtime = job_of(layout, pods, files=files)
    return KubernetesRequest(
        job=job,
        layout=layout,
        main=main,
        runtime=runtime,
        runtime_is_ours=runtime is not None and layout.settings.runtime is None,
        config=config_map(layout, files),
        secret=token_secret(layout),
        budget=dnn_budget(layout),
        records=records_map(layout),
    )
