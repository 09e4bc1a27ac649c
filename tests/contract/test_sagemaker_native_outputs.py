"""training.json of a native training step is taken out of its job's outputs in S3."""

import io
import tarfile
from pathlib import Path

from stoker.platforms.aws import Aws
from stoker.platforms.sagemaker.job import fetch_training
from support.moto import REGION, AwsServer

JOBS = "s3://bucket/out/stoker/jobs/mnist/abcdefghijkl"


def archive(**files: str) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as packed:
        for name, text in files.items():
            entry = tarfile.TarInfo(f"stoker/{name}.json")
            entry.size = len(text)
            packed.addfile(entry, io.BytesIO(text.encode()))
    return content.getvalue()


def test_the_record_is_found_whatever_the_job_is_called(
    aws_server: AwsServer, tmp_path: Path
) -> None:
    aws_server.make_bucket("bucket")
    aws = Aws(region=REGION)
    aws.write_object(f"{JOBS}/pipelines-abc-Train-xyz/output/output.tar.gz", archive(training="T"))
    aws.write_object(f"{JOBS}/pipelines-abc-Train-xyz/output/model.tar.gz", b"large")
    aws.write_object(f"{JOBS}mn/other/output/output.tar.gz", archive(training="another run's"))
    file = fetch_training(JOBS, folder=tmp_path, aws=aws)
    assert file
    assert file.read_text() == "T"


def test_a_job_that_left_no_record_is_no_error(aws_server: AwsServer, tmp_path: Path) -> None:
    aws_server.make_bucket("bucket")
    aws = Aws(region=REGION)
    assert fetch_training(JOBS, folder=tmp_path, aws=aws) is None
    aws.write_object(f"{JOBS}/job/output/output.tar.gz", archive(metrics="{}"))
    assert fetch_training(JOBS, folder=tmp_path, aws=aws) is None
