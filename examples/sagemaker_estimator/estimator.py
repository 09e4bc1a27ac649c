"""Starts stoker's launcher through SageMaker's own SDK, on the instance groups of a decision.

    python examples/sagemaker_estimator/estimator.py decision.json \
      --image ACCOUNT.dkr.ecr.REGION.amazonaws.com/stoker:TAG --role ROLE_ARN \
      --data s3://BUCKET/mnist/ --output s3://BUCKET/stoker -- python train.py --epochs 3

For people whose jobs start this way today. `stoker train` sends the same request by itself, after
it has checked the service's rules, and follows the job to its end.
"""

import argparse
import json
import secrets
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import boto3
from sagemaker.core.helper.session_helper import Session
from sagemaker.core.shapes import Channel, DataSource, InstanceGroup, S3DataSource
from sagemaker.core.training.configs import Compute, OutputDataConfig, StoppingCondition
from sagemaker.train import ModelTrainer

# Folder in which the containers find the channels.
CHANNELS = "/opt/ml/input/data"


def instance_groups(decision: Mapping[str, object]) -> list[InstanceGroup]:
    """Returns the chosen plan's groups, the dnn group first."""
    return [
        InstanceGroup(
            instance_group_name=group["name"],
            instance_type=group["instance_type"],
            instance_count=group["count"],
        )
        for group in decision["plan"]["groups"]
    ]


def compute(decision: Mapping[str, object], *, volume_gb: int) -> Compute:
    """Returns the hosts; a plan of one group is a plain job, without instance groups."""
    groups = instance_groups(decision)
    if len(groups) > 1:
        return Compute(instance_groups=groups, volume_size_in_gb=volume_gb)
    return Compute(
        instance_type=groups[0].instance_type,
        instance_count=groups[0].instance_count,
        volume_size_in_gb=volume_gb,
    )


def channel(name: str, uri: str, *, groups: Sequence[str]) -> Channel:
    """Returns a channel for some of the groups: if one channel names groups, all of them must."""
    named = {"instance_group_names": list(groups)} if groups else {}
    source = S3DataSource(
        s3_data_type="S3Prefix",
        s3_uri=uri,
        s3_data_distribution_type="FullyReplicated",
        **named,
    )
    return Channel(
        channel_name=name, data_source=DataSource(s3_data_source=source), input_mode="File"
    )


def environment(decision: Mapping[str, object], command: Sequence[str]) -> dict[str, str]:
    """Returns the launcher's variables; the image is started with the one argument `train`."""
    groups = decision["plan"]["groups"]
    workers = {
        group["role"]: group["workers_per_host"]
        for group in groups
        if group.get("workers_per_host") is not None
    }
    return {
        "STOKER_COMMAND": json.dumps(list(command)),
        "STOKER_TOKEN_FILE": f"{CHANNELS}/stoker_token/token",
        "STOKER_WORKERS": json.dumps(workers),
        "STOKER_ROLES": json.dumps({group["name"]: group["role"] for group in groups}),
    }


def put_token(s3: object, folder: str) -> tuple[str, str]:
    """Writes the run's token, from which all keys between the hosts are made; bucket and key."""
    address = urlsplit(folder)
    bucket, key = address.netloc, f"{address.path.strip('/')}/token"
    s3.put_object(
        Bucket=bucket,
        Key=key,
        Body=secrets.token_hex(32).encode(),
        ServerSideEncryption="AES256",
    )
    return bucket, key


def main() -> None:
    """Starts the job, waits for it, and deletes its token."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("decision", type=Path, help="decision.json of stoker decide")
    parser.add_argument("--image", required=True, help="with stoker's launcher as entry point")
    parser.add_argument("--role", required=True, help="ARN of the execution role")
    parser.add_argument("--data", required=True, help="s3:// address of the channel training")
    parser.add_argument("--output", required=True, help="s3:// address for outputs and token")
    parser.add_argument("--data-groups", default="", help="groups that read it, by commas: all")
    parser.add_argument("--volume-gb", type=int, default=100)
    parser.add_argument("--max-run-seconds", type=int, default=86400)
    parser.add_argument("--no-wait", action="store_true", help="its token is then yours to delete")
    parser.add_argument("command", nargs="+", metavar="-- CMD", help="program and arguments")
    options = parser.parse_args()

    decision = json.loads(options.decision.read_text())
    session = Session(boto3.Session())
    s3 = session.boto_session.client("s3")
    everyone = [group["name"] for group in decision["plan"]["groups"]]
    readers = [name for name in options.data_groups.split(",") if name] or everyone
    if len(everyone) == 1:
        everyone, readers = [], []
    folder = f"{options.output.rstrip('/')}/tokens/{uuid.uuid4().hex}"
    trainer = ModelTrainer(
        sagemaker_session=session,
        role=options.role,
        base_job_name="stoker-estimator",
        training_image=options.image,
        compute=compute(decision, volume_gb=options.volume_gb),
        environment=environment(decision, options.command),
        output_data_config=OutputDataConfig(s3_output_path=options.output.rstrip("/")),
        stopping_condition=StoppingCondition(max_runtime_in_seconds=options.max_run_seconds),
        input_data_config=[
            channel("training", options.data, groups=readers),
            channel("stoker_token", f"{folder}/", groups=everyone),
        ],
    )
    bucket, key = put_token(s3, folder)
    try:
        trainer.train(wait=not options.no_wait, logs=not options.no_wait)
    finally:
        if not options.no_wait:
            s3.delete_object(Bucket=bucket, Key=key)


if __name__ == "__main__":
    main()
