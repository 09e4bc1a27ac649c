"""Profiles that runs of a pipeline keep in its bucket, found again by what a step costs.

A run that measures leaves a note under `stoker/profiles/NAME/by-cost/KEY/`: where its profile will
be, and how much data it has. A later run of the same key reads the notes, newest first. Dates in
the addresses of data are in no key; much more or less data is seen by its size.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice

import msgspec

from stoker.errors import ServiceError, UsageError
from stoker.pipelines.base import sagemaker_of
from stoker.platforms.aws import Aws
from stoker.records import Profile, Workload, read_json
from stoker.records.base import Document, mappings
from stoker.units import count
from stoker.units import size as size_words

# Of 1000 objects each: some ten seconds. The size of a channel with more objects is not known.
MAX_PAGES = 100
# Another total of a channel is measured again: less fits into the memory of a host, more may not.
MOST_TIMES_AS_MUCH = 1.5
# Another mean size of an object, too: a larger sample costs more to read and decode.
MOST_TIMES_AS_LARGE = 1.25
_MAX_NOTES = 20


class DataSize(msgspec.Struct, frozen=True, kw_only=True):
    """What a channel in S3 holds.

    Attributes:
        objects: Their number.
        bytes: Their sizes together.
    """

    objects: int
    bytes: int


class ProfileNote(msgspec.Struct, frozen=True, kw_only=True):
    """What a run notes before it measures.

    Attributes:
        profile: Address of its profile.json to be.
        channels: Address of each channel.
        data: Size of each channel in S3. A channel of unknown size is left out.
    """

    profile: str
    channels: dict[str, str] = msgspec.field(default_factory=dict)
    data: dict[str, DataSize] = msgspec.field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundProfile:
    """The answer to a run that asks whether it has to measure.

    Attributes:
        profile: None: it has to.
        words: Why, in one line.
    """

    profile: Profile | None = None
    words: str = ""


def find_profile(
    workload: Workload, *, aws: Aws, key: str, run: str, now: datetime | None = None
) -> FoundProfile:
    """Returns a kept profile, or notes that this run measures one; never raises a ServiceError.

    Blocks for a few calls, and for a listing of each channel.

    Args:
        workload: With the values of the run's parameters.
        aws: The account.
        key: By `records.profile_key.reuse_key`.
        run: Id of the run that asks, which names the folder of its profile.
        now: With a time zone. Absent: this moment.
    """
    try:
        sizes = sizes_of(workload, aws=aws)
        answer = _newest(workload, aws=aws, key=key, sizes=sizes, now=now or datetime.now(UTC))
        if answer.profile is None:
            note = ProfileNote(
                profile=f"{_folder(workload)}/{run}/profile.json",
                channels=_addresses(workload),
                data=sizes,
            )
            kms_key = sagemaker_of(workload).output_kms_key
            content = msgspec.json.encode(note)
            aws.write_object(f"{_notes(workload, key)}{run}", content, kms_key=kms_key)
        return answer
    except ServiceError as err:
        # A run does not fail for a profile that it can measure.
        return FoundProfile(words=f"kept profiles cannot be read or noted: {err.what}")


def sizes_of(workload: Workload, *, aws: Aws) -> dict[str, DataSize]:
    """Returns the sizes of the channels in S3 that may be read."""
    sizes = {}
    for name, channel in workload.channels.items():
        if not channel.uri.startswith("s3://"):
            continue
        size = _size(channel.uri, aws=aws)
        if size is not None:
            sizes[name] = size
    return sizes


def data_change(was: Mapping[str, DataSize], now: Mapping[str, DataSize]) -> str:
    """Returns how data differ so much that a step may cost otherwise; empty: they do not."""
    for name in sorted(was.keys() | now.keys()):
        before = was.get(name)
        today = now.get(name)
        if before is None or today is None:
            return f"the size of the data of {name} is not known for both"
        if _is_other(before, today):
            return f"the data of {name} had {_words(before)}, and now has {_words(today)}"
    return ""


def _is_other(was: DataSize, now: DataSize) -> bool:
    if not was.objects or not now.objects:
        return was != now
    pairs = ((was.objects, now.objects), (was.bytes, now.bytes))
    if any(_times(before, today) > MOST_TIMES_AS_MUCH for before, today in pairs):
        return True
    return _times(was.bytes / was.objects, now.bytes / now.objects) > MOST_TIMES_AS_LARGE


def _times(one: float, other: float) -> float:
    """Returns how many times as much the larger one is."""
    # An empty marker of a folder has no bytes.
    return max(one, other, 1.0) / max(1.0, min(one, other))


def _words(size: DataSize) -> str:
    return f"{count(size.objects, 'object')}, {size_words(size.bytes)}"


def _size(uri: str, *, aws: Aws) -> DataSize | None:
    objects = num_bytes = 0
    try:
        for page in islice(aws.object_pages(uri), MAX_PAGES):
            for item in mappings(page, "Contents"):
                objects += 1
                num_bytes += int(str(item.get("Size", 0)))
            if not page.get("IsTruncated"):
                return DataSize(objects=objects, bytes=num_bytes)
    except ServiceError:
        # The role of the small steps may have no right to the data.
        return None
    return None


def _newest(
    workload: Workload, *, aws: Aws, key: str, sizes: Mapping[str, DataSize], now: datetime
) -> FoundProfile:
    """Returns the newest kept profile whose data are as much as today's."""
    days = sagemaker_of(workload).cache_days
    oldest = now - timedelta(days=days)
    words = f"no profile of the last {days} days has this cost: it is measured"
    for note in _young_notes(workload, aws=aws, key=key, oldest=oldest):
        if change := data_change(note.data, sizes):
            words = f"it is measured again: {change}"
            continue
        profile = _profile_at(note.profile, aws=aws)
        if profile is not None:
            return FoundProfile(profile=profile, words=_measured_words(note, workload))
    return FoundProfile(words=words)


def _addresses(workload: Workload) -> dict[str, str]:
    return {name: channel.uri for name, channel in workload.channels.items()}


def _measured_words(note: ProfileNote, workload: Workload) -> str:
    """Returns that a profile is used, and over which data it was measured if over others."""
    today = _addresses(workload)
    others = [uri for name, uri in sorted(note.channels.items()) if today.get(name) != uri]
    if others:
        return f"measured before over {', '.join(others)}, nothing is run"
    return "measured before, nothing is run"


def _young_notes(
    workload: Workload, *, aws: Aws, key: str, oldest: datetime
) -> Iterator[ProfileNote]:
    """Yields the notes of a key, newest first."""
    items: list[Document] = []
    for page in aws.object_pages(_notes(workload, key)):
        items += mappings(page, "Contents")
    young = [item for item in items if datetime.fromisoformat(str(item["LastModified"])) >= oldest]
    young.sort(key=lambda item: str(item["LastModified"]), reverse=True)
    for item in young[:_MAX_NOTES]:
        run = str(item["Key"]).rpartition("/")[2]
        content = aws.read_object(f"{_notes(workload, key)}{run}")
        try:
            yield msgspec.json.decode(content, type=ProfileNote)
        except msgspec.DecodeError:
            # Of another version.
            continue


def _profile_at(uri: str, *, aws: Aws) -> Profile | None:
    """Returns a profile; None where the run that meant to measure it has none."""
    if not aws.has_object(uri):
        return None
    try:
        return read_json(aws.read_object(uri).decode(errors="replace"), Profile)
    except UsageError:
        return None


def _folder(workload: Workload) -> str:
    return f"{sagemaker_of(workload).output_uri.rstrip('/')}/stoker/profiles/{workload.name}"


def _notes(workload: Workload, key: str) -> str:
    return f"{_folder(workload)}/by-cost/{key}/"


def found_document(answer: FoundProfile) -> str:
    """Returns what the pipeline's condition reads."""
    word = "no" if answer.profile is None else "yes"
    return json.dumps({"found": word, "words": answer.words})
