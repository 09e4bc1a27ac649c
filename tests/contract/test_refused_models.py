"""A model that missed its gate expires by the rule of the bucket; one that is registered never."""

from datetime import UTC, datetime, timedelta

import msgspec
import pytest
import yaml

from stoker.errors import ServiceError
from stoker.pipelines.sagemaker.expiry import expiry_warnings
from stoker.platforms.aws import Aws, split_uri
from stoker.platforms.sagemaker.registry import (
    REFUSED_TAG,
    keep_registered,
    mark_model,
    mark_models,
)
from stoker.records import Json
from stoker.records.base import mappings
from support.moto_server import REGION
from support.policies import ROOT
from support.sample_records import training

OUT = "s3://bucket/stoker/"
MODEL, OTHER = (f"{OUT}mnist--{run}/output/model.tar.gz" for run in ("r1", "r2"))
SHARED = ROOT / "configs" / "sagemaker" / "shared.yaml"


@pytest.fixture
def aws(aws_server):
    aws_server.make_bucket("bucket")
    aws = Aws(region=REGION)
    for uri in (MODEL, OTHER):
        aws.write_object(uri, b"model")
    return aws


def tags(aws: Aws, uri: str) -> dict[str, str]:
    bucket, key = split_uri(uri)
    found = aws.call("s3", "GetObjectTagging", Bucket=bucket, Key=key)
    return {str(tag["Key"]): str(tag["Value"]) for tag in mappings(found, "TagSet")}


def tag(aws: Aws, uri: str, **values: str) -> None:
    bucket, key = split_uri(uri)
    listed = [{"Key": name, "Value": value} for name, value in values.items()]
    aws.call("s3", "PutObjectTagging", Bucket=bucket, Key=key, Tagging={"TagSet": listed})


def register(aws: Aws, uri: str) -> None:
    group = {"ModelPackageGroupName": "mnist"}
    aws.call("sagemaker", "CreateModelPackageGroup", **group)
    types = {"SupportedContentTypes": ["text/csv"], "SupportedResponseMIMETypes": ["text/csv"]}
    specification = {"Containers": [{"Image": "image", "ModelDataUrl": uri}], **types}
    aws.call("sagemaker", "CreateModelPackage", **group, InferenceSpecification=specification)


def rules() -> list[dict[str, Json]]:
    """Returns the lifecycle rules of the stack's bucket."""
    document = SHARED.read_text().replace("!Ref ", "")
    bucket = yaml.safe_load(document)["Resources"]["SharedBucket"]
    found: list[dict[str, Json]] = bucket["Properties"]["LifecycleConfiguration"]["Rules"]
    return found


def test_the_stacks_rule_asks_for_the_tag_of_refused_models_and_nothing_else_expires():
    (rule,) = (rule for rule in rules() if "ExpirationInDays" in rule)
    name, value = REFUSED_TAG
    assert rule["TagFilters"] == [{"Key": name, "Value": value}]
    assert rule["Status"] == "Enabled"


@pytest.mark.parametrize("own", [{}, {"team": "vision"}, {"team": "vision", "stoker": "yes"}])
def test_a_refused_model_has_the_tag_until_it_passes_and_other_tags_stay(aws, own):
    if own:
        tag(aws, MODEL, **own)
    assert mark_model(aws, MODEL, is_refused=True)
    assert tags(aws, MODEL) == own | dict([REFUSED_TAG])
    assert not mark_model(aws, MODEL, is_refused=True)
    assert tags(aws, OTHER) == {}
    assert mark_model(aws, MODEL, is_refused=False)
    assert not mark_model(aws, MODEL, is_refused=False)
    assert tags(aws, MODEL) == own


@pytest.mark.parametrize(
    ("model", "copy", "marked"),
    [
        (OTHER, MODEL, [OTHER, MODEL]),
        (OTHER, None, [OTHER]),
        (None, None, []),
        ("/opt/ml/model", None, []),
        ("runs/mnist/model", "s3://bucket/stoker/mnist--r1/output/model.tar.gz", [MODEL]),
    ],
)
def test_a_refused_model_and_its_copy_of_a_retried_job_are_tagged(aws, model, copy, marked):
    record = msgspec.structs.replace(training(), model_uri=model, model_copy_uri=copy)
    assert mark_models(aws, record, is_refused=True) == marked
    assert [uri for uri in (OTHER, MODEL) if tags(aws, uri) == dict([REFUSED_TAG])] == marked
    assert mark_models(aws, record, is_refused=True) == []
    assert mark_models(aws, record, is_refused=False) == marked


def test_a_refused_model_that_someone_registers_by_hand_expires_no_more(aws):
    for uri in (MODEL, OTHER):
        mark_model(aws, uri, is_refused=True)
    register(aws, MODEL)
    assert keep_registered(aws, "mnist", below=OUT) == [MODEL]
    assert (tags(aws, MODEL), tags(aws, OTHER)) == ({}, dict([REFUSED_TAG]))
    assert keep_registered(aws, "mnist", below=OUT) == []


def test_a_package_whose_model_is_elsewhere_or_gone_is_left_alone(aws):
    register(aws, f"{OUT}mnist--gone/output/model.tar.gz")
    assert keep_registered(aws, "mnist", below=OUT) == []
    assert keep_registered(aws, "mnist", below="s3://other/") == []
    later = datetime.now(UTC) + timedelta(days=200)
    assert keep_registered(aws, "mnist", below=OUT, now=later) == []


def test_a_model_that_is_not_there_is_named(aws):
    with pytest.raises(ServiceError) as caught:
        mark_model(aws, f"{OUT}mnist--r3/output/model.tar.gz", is_refused=True)
    assert caught.value.kind == "missing"


def test_upload_warns_of_no_rule_that_asks_for_the_tag(aws):
    name, value = REFUSED_TAG
    asked = {"Filter": {"Tag": {"Key": name, "Value": value}}, "Expiration": {"Days": 30}}
    rule = {"ID": "RefusedModels", "Status": "Enabled", **asked}
    configuration = {"LifecycleConfiguration": {"Rules": [rule]}}
    aws.call("s3", "PutBucketLifecycleConfiguration", Bucket="bucket", **configuration)
    assert expiry_warnings(aws, OUT) == []
