"""`stoker decide --calibrate PLACE`: the records of earlier runs, read and weighed."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.catalog import Catalog
from stoker.decide import Run, calibrate
from stoker.errors import UsageError
from stoker.records import Calibration, Decision, Profile, Training, read_json

if TYPE_CHECKING:
    from stoker.platforms.aws import Aws

_FILES = ("profile.json", "decision.json", "training.json")
# Of many runs in the cloud the newest: each is three small objects to be fetched.
MOST_CLOUD_RUNS = 100


def calibration_of(
    place: str, *, like: Profile, catalog: Catalog, region: str | None = None
) -> Calibration:
    """What the runs in `place` (PLACE/ID/{profile,decision,training}.json) say of the constants.

    A run that was not finished, or whose records cannot be read, says nothing.

    Args:
        place: A folder, or s3://BUCKET/FOLDER; there, the newest MOST_CLOUD_RUNS count.
        like: The profile that is to be decided on.
        catalog: Of the platform that it will run on.
        region: Of the bucket.

    Raises:
        UsageError: If there is no such folder, or nothing of a run is in the cloud's.
        AwsError: If the cloud's cannot be read.
    """
    if "://" in place:
        from stoker.platforms.aws import Aws

        found = [*_cloud_runs(place, aws=Aws(region=region))]
    else:
        folder = Path(place)
        if not folder.is_dir():
            raise UsageError(
                f"no runs in {folder}",
                where="--calibrate",
                fix="name the folder of the runs: runs, or s3://BUCKET/FOLDER",
            )
        found = [
            _run(*(each / name for name in _FILES))
            for each in sorted(folder.iterdir())
            if each.is_dir()
        ]
    return calibrate((run for run in found if run), like=like, catalog=catalog)


def _cloud_runs(place: str, *, aws: "Aws") -> Iterator[Run | None]:
    from stoker.platforms.aws import split_uri

    bucket, prefix = split_uri(place)
    prefix = f"{prefix.rstrip('/')}/" if prefix else ""
    runs: dict[str, dict[str, str]] = defaultdict(dict)
    token: dict[str, object] = {}
    while True:
        page = aws.call("s3", "ListObjectsV2", Bucket=bucket, Prefix=prefix, **token)
        objects = page.get("Contents")
        for each in objects if isinstance(objects, list) else ():
            if isinstance(each, dict):
                folder, _, name = str(each["Key"]).rpartition("/")
                if name in _FILES:
                    runs[folder][name] = str(each["LastModified"])
        if not page.get("NextContinuationToken"):
            break
        token = {"ContinuationToken": page["NextContinuationToken"]}
    whole = [(dates[_FILES[-1]], folder) for folder, dates in runs.items() if len(dates) == 3]
    if not whole:
        raise UsageError(
            f"no runs in {place}",
            where="--calibrate",
            fix=f"copy their {', '.join(_FILES)} there: aws s3 sync runs {place}",
        )
    for _, folder in sorted(whole, reverse=True)[:MOST_CLOUD_RUNS]:
        yield _run(*(_text(aws, f"s3://{bucket}/{folder}/{name}") for name in _FILES))


def _text(aws: "Aws", uri: str) -> str:
    """The record's text, as `read_json` takes it; what is no record is none with a brace, too."""
    text = aws.read_object(uri).decode(errors="replace").lstrip()
    return text if text.startswith("{") else f"{{{text}"


def _run(profile: Path | str, decision: Path | str, training: Path | str) -> Run | None:
    try:
        return Run(
            profile=read_json(profile, Profile),
            decision=read_json(decision, Decision),
            training=read_json(training, Training),
        )
    except UsageError:
        return None
