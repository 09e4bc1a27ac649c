"""`stoker decide --calibrate s3://...` reads runs that others left in a bucket."""

import io
import tarfile
from pathlib import Path

import pytest

from stoker.catalog import load_catalog
from stoker.cli.decide import calibration_of
from stoker.errors import UsageError
from stoker.platforms.aws import Aws
from stoker.records import to_json
from support import sample_records
from support.moto import REGION, AwsServer

PLACE = "s3://bucket/team/runs"
LOCAL = load_catalog("local", cores=2)


def write_run(aws: Aws, folder: str, **texts: str) -> None:
    records = {
        "profile": to_json(sample_records.profile()),
        "decision": to_json(sample_records.decision()),
        "training": to_json(sample_records.training()),
    }
    for name, text in {**records, **texts}.items():
        if text and '"workload_sha256": "' not in text:
            text = text.replace("{", '{"workload_sha256": "%s",' % ("a" * 64), 1)
        if text:
            aws.write_object(f"{folder}/{name}.json", text.encode())


def test_whole_runs_of_a_bucket_are_read_and_the_others_left(
    aws_server: AwsServer, tmp_path: Path
) -> None:
    aws_server.make_bucket("bucket")
    aws = Aws(region=REGION)
    for name in ("one", "two", "deeper/three"):
        write_run(aws, f"{PLACE}/{name}")
    write_run(aws, f"{PLACE}/torn", training="no JSON")
    write_run(aws, f"{PLACE}/unfinished", training="")
    write_run(aws, f"{PLACE}-of-others/four")
    found = calibration_of(PLACE, like=sample_records.profile(), catalog=LOCAL, region=REGION)
    assert found.runs == 3
    assert found == calibration_of(
        f"{PLACE}/", like=sample_records.profile(), catalog=LOCAL, region=REGION
    )


def test_a_file_in_the_cloud_may_hold_the_folder(aws_server: AwsServer, tmp_path: Path) -> None:
    aws_server.make_bucket("bucket")
    aws = Aws(region=REGION)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name in ("one", "two", "three"):
            for record, value in (
                ("profile", sample_records.profile()),
                ("decision", sample_records.decision()),
                ("training", sample_records.training()),
            ):
                text = to_json(value)
                if '"workload_sha256": "' not in text:
                    text = text.replace("{", '{"workload_sha256": "%s",' % ("a" * 64), 1)
                member = tarfile.TarInfo(f"runs/{name}/{record}.json")
                member.size = len(text.encode())
                archive.addfile(member, io.BytesIO(text.encode()))
    aws.write_object(f"{PLACE}.tgz", packed.getvalue())
    found = calibration_of(
        f"{PLACE}.tgz", like=sample_records.profile(), catalog=LOCAL, region=REGION
    )
    assert found.runs == 3


def test_a_bucket_without_runs_is_an_error(aws_server: AwsServer) -> None:
    aws_server.make_bucket("bucket")
    with pytest.raises(UsageError, match="no runs in s3://bucket/team/runs") as caught:
        calibration_of(PLACE, like=sample_records.profile(), catalog=LOCAL, region=REGION)
    assert "aws s3 sync runs" in caught.value.fix


def test_another_cloud_is_named(aws_server: AwsServer) -> None:
    with pytest.raises(UsageError, match="not an s3:// address"):
        calibration_of("gs://bucket/runs", like=sample_records.profile(), catalog=LOCAL)
