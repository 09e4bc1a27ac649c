"""`stoker decide --calibrate PLACE` reads and weighs the records of earlier runs."""

import tarfile
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from stoker.catalog import Catalog
from stoker.decide import EarlierRun, calibrate
from stoker.errors import UsageError
from stoker.platforms.aws import Aws, split_uri
from stoker.records import Calibration, Decision, Profile, Training, read_json

_FILES = ("profile.json", "decision.json", "training.json")
# Only the newest runs of a folder in the cloud are read: each is three small objects to fetch.
MOST_CLOUD_RUNS = 100
# One file that holds a folder of runs: tar czf runs.tgz runs
_ARCHIVES = (".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz")
# A decision of a thousand plans takes 2 MB.
_LARGEST_RECORD = 1 << 24


def calibration_of(
    place: str, *, like: Profile, catalog: Catalog, region: str | None = None
) -> Calibration:
    """Returns constants that fit the runs in `place` (PLACE/ID/{profile,decision,training}.json).

    A run that did not end, or whose records cannot be read, is left out.

    Args:
        place: A folder, a tar file of one, or either at s3://, where only the newest
            MOST_CLOUD_RUNS of a folder are read.
        like: The profile to decide on.
        catalog: Catalog of the platform where the workload will run.
        region: Region of the bucket.

    Raises:
        UsageError: If there is no such folder, the file is not an archive, or the cloud folder has
            no run.
        AwsError: If the cloud folder cannot be read.
    """
    if "://" in place:
        aws = Aws(region=region)
        if place.endswith(_ARCHIVES):
            with aws.open_object(place) as content:
                found = [*_archived_runs(content, place=place)]
        else:
            found = [*_cloud_runs(place, aws=aws)]
    elif Path(place).is_file():
        with Path(place).open("rb") as content:
            found = [*_archived_runs(content, place=place)]
    else:
        folder = Path(place)
        if not folder.is_dir():
            raise UsageError(
                f"no runs in {folder}",
                where="--calibrate",
                fix="name the folder of the runs, runs or s3://BUCKET/FOLDER, or a tar file of it",
            )
        found = [
            _run(*(each / name for name in _FILES))
            for each in sorted(folder.iterdir())
            if each.is_dir()
        ]
    return calibrate((run for run in found if run), like=like, catalog=catalog)


def _cloud_runs(place: str, *, aws: Aws) -> Iterator[EarlierRun | None]:
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


def _archived_runs(content: IO[bytes], *, place: str) -> Iterator[EarlierRun | None]:
    """Yields the runs of a tar file, read as a stream; unpacks nothing onto the disk."""
    runs: dict[str, dict[str, bytes]] = defaultdict(dict)
    try:
        with tarfile.open(fileobj=content, mode="r|*") as archive:
            for member in archive:
                path = PurePosixPath(member.name)
                if path.name in _FILES and member.isfile() and member.size <= _LARGEST_RECORD:
                    file = archive.extractfile(member)
                    if file:
                        runs[str(path.parent)][path.name] = file.read()
    except (tarfile.TarError, EOFError, OSError, zlib.error) as err:
        raise UsageError(
            f"not a tar file of runs: {err}",
            where=f"--calibrate {place}",
            fix="make one from their folder: tar czf runs.tgz runs",
        ) from None
    for _, texts in sorted(runs.items()):
        if len(texts) == len(_FILES):
            yield _run(*(_record_text(texts[name]) for name in _FILES))


def _text(aws: Aws, uri: str) -> str:
    return _record_text(aws.read_object(uri))


def _record_text(content: bytes) -> str:
    """Returns the text with a brace in front, so `read_json` never takes it for a file's name."""
    text = content.decode(errors="replace").lstrip()
    return text if text.startswith("{") else f"{{{text}"


def _run(profile: Path | str, decision: Path | str, training: Path | str) -> EarlierRun | None:
    try:
        return EarlierRun(
            profile=read_json(profile, Profile),
            decision=read_json(decision, Decision),
            training=read_json(training, Training),
        )
    except UsageError:
        return None
