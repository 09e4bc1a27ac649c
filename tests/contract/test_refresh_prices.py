"""tools/refresh_prices.py writes AWS's prices (here, made-up ones)."""

import csv
import io
import json
from collections.abc import Sequence
from datetime import date

import boto3
import pytest
from botocore.stub import ANY, Stubber

import refresh_prices
from stoker.catalog import load_catalog

REGION = "eu-central-1"
TODAY = date(2027, 1, 5)
ASKED = {"AmazonSageMaker": refresh_prices.TRAINING, "AmazonEC2": refresh_prices.ON_DEMAND}


def product(region: str, usd: str, unit: str = "Hrs", **attributes: str) -> str:
    """Makes a product of GetProducts' PriceList: a JSON text with a term and a price dimension."""
    dimension = {"unit": unit, "description": f"$ {usd} per hour", "pricePerUnit": {"USD": usd}}
    term = {"priceDimensions": {"x.y.z": dimension}, "termAttributes": {}}
    reserved = {"priceDimensions": {"x": {**dimension, "pricePerUnit": {"USD": "0.0001"}}}}
    attributes = {"regionCode": region, **attributes}
    about = {"productFamily": "ML Instance", "attributes": attributes}
    terms = {"OnDemand": {"x.y": term}, "Reserved": {"r": reserved}}
    return json.dumps({"product": about, "terms": terms})


def trains(kind: str, usd: str, *, usage: str = "EUC1-Train") -> str:
    told = {"component": "Training", "platoinstancetype": "Training"}
    return product(REGION, usd, usagetype=f"{usage}:{kind}", instanceName=kind, **told)


def runs(kind: str, usd: str, **changes: str) -> str:
    attributes = {"instanceType": kind, "usagetype": f"EUC1-BoxUsage:{kind}"}
    attributes |= {"operatingSystem": "Linux", "tenancy": "Shared", "preInstalledSw": "NA"}
    attributes |= {"capacitystatus": "Used", "marketoption": "OnDemand", **changes}
    return product(REGION, usd, **attributes)


KEYS = {"aws_access_key_id": "x", "aws_secret_access_key": "x"}


@pytest.fixture
def pricing():
    with Stubber(boto3.client("pricing", region_name="us-east-1", **KEYS)) as stub:
        yield stub


@pytest.fixture
def ec2():
    with Stubber(boto3.client("ec2", region_name="us-east-1", **KEYS)) as stub:
        yield stub


def answer(pricing: Stubber, service: str, *pages: Sequence[str], region: str = REGION) -> None:
    fields = {"regionCode": region, **ASKED[service]}
    filters = [{"Type": "TERM_MATCH", "Field": k, "Value": v} for k, v in fields.items()]
    asked = {"ServiceCode": service, "FormatVersion": "aws_v1", "Filters": filters}
    for number, page in enumerate(pages, start=1):
        more = {"NextToken": f"page-{number}"} if number < len(pages) else {}
        begun = {"NextToken": f"page-{number - 1}"} if number > 1 else {}
        found = {"FormatVersion": "aws_v1", "PriceList": list(page), **more}
        pricing.add_response("get_products", found, {**asked, **begun})


def described(kind: str, network: str = "2x 25 Gigabit") -> dict[str, object]:
    return {
        "InstanceType": kind,
        "VCpuInfo": {"DefaultVCpus": 6, "DefaultCores": 3},
        "MemoryInfo": {"SizeInMiB": 24576},
        "GpuInfo": {"Gpus": [{"Count": 1}]},
        "NetworkInfo": {"NetworkPerformance": network},
    }


def test_the_table_has_todays_sizes_and_prices_and_no_others(pricing, ec2, tmp_path, capsys):
    training = [trains("ml.p4d.24xlarge", "27"), trains("ml.c5.18xlarge", "4")]
    answer(pricing, "AmazonSageMaker", training, [trains("ml.c5.24xlarge", "0.01")])
    answer(pricing, "AmazonEC2", [runs("c5.xlarge", "0.19")])
    found = {"InstanceTypes": [described("g5.xlarge"), described("c5.xlarge", "Up to 10 Gigabit")]}
    ec2.add_response("describe_instance_types", found, {"Filters": ANY})
    trainable = ("ml.p4d.24xlarge", "ml.c5.18xlarge", "ml.g5.xlarge")
    out = io.StringIO()
    about = {"region": REGION, "trainable": trainable, "today": TODAY}
    refresh_prices.table(pricing.client, ec2.client, **about, out=out)
    rows = {row["instance_type"]: row for row in csv.DictReader(io.StringIO(out.getvalue()))}
    columns = ("vcpus", "memory_gib", "gpus", "sustained_gbps")
    assert [rows["ml.g5.xlarge"][c] for c in columns] == ["6", "24.0", "1", "50.0"]
    # Up to 10 Gbit/s, which six vCPUs do not hold.
    assert rows["ml.c5.xlarge"]["sustained_gbps"] == "1.875"
    assert rows["ml.g5.xlarge"]["priced_on"] == ""
    assert "note: no training price for" in capsys.readouterr().err
    file = tmp_path / "eu.csv"
    file.write_text(out.getvalue())
    catalog = load_catalog("sagemaker", file)
    priced = {i.type for i in catalog.instances if i.usd_per_hour is not None}
    assert priced == {"ml.p4d.24xlarge", "ml.c5.18xlarge", "ml.c5.24xlarge", "ml.c5.xlarge"}
    # Of the region's price of EC2, which is the only one that is known.
    assert catalog.get("c5.xlarge").estimate == "EC2's $0.19 x 1.20"
    assert catalog.region == REGION
