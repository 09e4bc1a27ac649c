"""What a pipeline's run is made of, and whether that is what its last good run was made of.

Channels in S3 are listed, with each object's entity tag; folders as `host/listing.py` does it.
What cannot be read counts as changed: a comparison never fails a run.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from stoker.environment import own_pod
from stoker.errors import StokerError, UsageError, what_of
from stoker.host.listing import listing_version
from stoker.platforms.aws import Aws, region_of
from stoker.platforms.kubernetes.own_image import own_image_digest
from stoker.platforms.sagemaker.lineage import image_digest, objects_version
from stoker.records import Channel, Comparison, RememberedRun, Workload
from stoker.records.memory import compared, trains, workload_facts
from stoker.run.pipeline_memory import remembered_runs
from stoker.run.unchanged import has_linked_folders

# A million objects: some minutes of a small host.
_MAX_PAGES = 1000
# As many files of a claim; a file server answers for one in about a millisecond.
_MAX_FILES = 1_000_000
_MAX_LISTING_SECONDS = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineFacts:
    """What a run of a pipeline is made of, as its first step finds it.

    Attributes:
        workload: With the run's parameters.
        code: Digest of the code's package; empty: it is in the image, or in an archive in S3.
        image_digest: Digest of the image; empty: as its name has it, or ECR; on Kubernetes this
            process's own pod.
        folders: Channels whose files are in this container.
    """

    workload: Workload
    code: str = ""
    image_digest: str = ""
    folders: Mapping[str, Path] = field(default_factory=dict)

    def read(self) -> tuple[dict[str, str], dict[str, str]]:
        """Returns the facts with their digests, and those that are not known, each with why."""
        made_of = workload_facts(self.workload)
        unknown = dict[str, str]()
        for fact, reader in self._readers():
            try:
                made_of[fact] = reader()
            except (StokerError, OSError) as err:
                unknown[fact] = what_of(err)
        if not self.workload.channels:
            unknown["channels"] = "the workload names none, so that new data would not be seen"
        return made_of, unknown

    def _readers(self) -> Iterator[tuple[str, Callable[[], str]]]:
        """Yields each fact with the function that reads it, and raises if it cannot."""
        yield "image", self._image
        settings = self.workload.sagemaker
        if self.code:
            yield "code", lambda: self.code
        elif settings and settings.source:
            yield "code", partial(self._objects, settings.source)
        for name, channel in sorted(self.workload.channels.items()):
            yield f"channel.{name}", partial(self._channel, name, channel)

    def _image(self) -> str:
        image = self.workload.image or ""
        is_pinned = "@sha256:" in image
        if self.workload.platform == "kubernetes" and not (is_pinned or self.image_digest):
            settings = self.workload.kubernetes_settings
            return own_image_digest(own_pod(), image=image, settings=settings)
        digest = self.image_digest or image_digest(self._aws, image)
        if not digest:
            what = f"the digest of {image} cannot be read"
            raise UsageError(what, fix="name it by its digest: NAME@sha256:...")
        return digest

    def _channel(self, name: str, channel: Channel) -> str:
        folder = self.folders.get(name)
        is_prefix = channel.uri.startswith("s3://") and channel.data_type == "S3Prefix"
        if folder is None and is_prefix:
            return self._objects(channel.uri)
        if folder is None:
            raise UsageError(f"the files that {channel.uri} lists are not looked at")
        if has_linked_folders(folder):
            raise UsageError(f"{folder} has linked folders, which are not looked into")
        version = listing_version(folder, max_files=_MAX_FILES, max_seconds=_MAX_LISTING_SECONDS)
        if version is None:
            raise UsageError(f"{folder} is empty, or could not be read whole")
        return version

    def _objects(self, uri: str) -> str:
        version = objects_version(self._aws, uri, max_pages=_MAX_PAGES)
        if not version:
            raise UsageError(f"{uri} is empty, or has too many objects")
        return version

    @property
    def _aws(self) -> Aws:
        return Aws(region=region_of(self.workload))


def compared_with(memory: Path, *, facts: PipelineFacts, branch: str) -> Comparison:
    """Returns whether a run would train what the pipeline's last run that passed has trained.

    Args:
        memory: Folder with the pipeline's runs that passed.
        facts: Read here, also where the run trains: the next one is compared with them.
        branch: Which of the pipeline's training jobs it is; empty: its only one.
    """
    workload = facts.workload
    made_of, unknown = facts.read()
    remembered = remembered_runs(memory, workload=workload, branch=branch)
    last = next(iter(remembered.runs), None)
    comparison = compared(made_of, unknown=unknown, last=last)
    if remembered.why_not:
        return trains(comparison, f"as {remembered.why_not}")
    if not workload.skip_unchanged:
        return trains(comparison, "as this run asks for it")
    if last is None or comparison.has_changed:
        return comparison
    why = _why_not_passed(last, workload=workload)
    if why:
        return trains(comparison, f"as {why}")
    return comparison


def _why_not_passed(last: RememberedRun, *, workload: Workload) -> str:
    """Returns why the whole run did not pass although its training job did; empty: it did."""
    if not last.execution:
        # Its last step has written it.
        return ""
    arn = last.execution
    try:
        aws = Aws(region=region_of(workload))
        answer = aws.call("sagemaker", "DescribePipelineExecution", PipelineExecutionArn=arn)
    except StokerError as err:
        return f"it is not known how {last.words} ended: {err.what}"
    status = answer.get("PipelineExecutionStatus")
    if status == "Succeeded":
        return ""
    return f"{last.words} has passed its gates, and is {status}"
