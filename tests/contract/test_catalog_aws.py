"""AWS's table of types is made of today's price list, EC2's types and boto3's own model.

EC2's types are those of moto, which are EC2's own; the price list has the shape of the API's
documents, with prices that are made up.
"""

import csv
import io
import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from datetime import date, timedelta
from pathlib import Path

import pytest
from botocore.awsrequest import AWSResponse

from stoker.catalog import load_catalog
from stoker.catalog.refresh import (
    ec2_prices,
    machines,
    renewed,
    shipped_text,
    shipped_types,
    training_prices,
)
from stoker.cli.catalog import refresh_from_aws, refreshed
from stoker.decide import decide
from stoker.errors import PlatformError, UsageError
from stoker.platforms.aws import Aws, AwsError, price_list_region
from stoker.records import Constraints, Group, Observed, Profile, ProfiledHost, StepTerms
from support.aws_answers import Answers
from support.moto import REGION, AwsServer

TODAY = date(2027, 1, 5)
SHIPPED = {row["instance_type"]: row for row in csv.DictReader(io.StringIO(shipped_text()))}


def product(region: str, usd: str, unit: str = "Hrs", **attributes: str) -> str:
    """Makes a product of GetProducts' PriceList: a JSON text with a term and a price dimension."""
    sku = "ABCDEFGH12345678"
    dimension = {
        "unit": unit,
        "endRange": "Inf",
        "description": f"$ {usd} per hour",
        "appliesTo": [],
        "rateCode": f"{sku}.JRTCKXETXF.6YS6EN2CT7",
        "beginRange": "0",
        "pricePerUnit": {"USD": usd},
    }
    term = {
        "priceDimensions": {f"{sku}.JRTCKXETXF.6YS6EN2CT7": dimension},
        "sku": sku,
        "effectiveDate": "2026-12-01T00:00:00Z",
        "offerTermCode": "JRTCKXETXF",
        "termAttributes": {},
    }
    reserved = {"priceDimensions": {"x": {**dimension, "pricePerUnit": {"USD": "0.0001"}}}}
    return json.dumps(
        {
            "product": {
                "productFamily": "ML Instance",
                "attributes": {"regionCode": region, **attributes},
                "sku": sku,
            },
            "serviceCode": "AmazonSageMaker",
            "terms": {"OnDemand": {f"{sku}.JRTCKXETXF": term}, "Reserved": {"r": reserved}},
            "version": "20261201000000",
            "publicationDate": "2026-12-01T00:00:00Z",
        }
    )


def trains(kind: str, usd: str, *, usage: str = "EUC1-Train", region: str = REGION) -> str:
    return product(
        region,
        usd,
        usagetype=f"{usage}:{kind}",
        instanceName=kind,
        component="Training",
        platoinstancetype="Training",
    )


def runs(kind: str, usd: str, *, region: str = REGION, **changes: str) -> str:
    attributes = {
        "instanceType": kind,
        "operatingSystem": "Linux",
        "tenancy": "Shared",
        "preInstalledSw": "NA",
        "capacitystatus": "Used",
        "marketoption": "OnDemand",
        "usagetype": f"EUC1-BoxUsage:{kind}",
        **changes,
    }
    return product(region, usd, **attributes)


# What moto says of all types, by what it was asked: it takes a second each time, and never differs.
EC2_TYPES: dict[bytes, bytes] = {}


@pytest.fixture
def aws(aws_server: AwsServer) -> Aws:
    aws = Aws(region=REGION)
    events = aws.client("ec2").meta.events  # type: ignore[attr-defined]

    def before(
        params: dict[str, object], context: dict[str, object], **_: object
    ) -> tuple[AWSResponse, object] | None:
        asked = context["asked"] = pickle.dumps(params["body"])
        if asked not in EC2_TYPES:
            return None
        return AWSResponse("", 200, {}, None), pickle.loads(EC2_TYPES[asked])

    def after(parsed: dict[str, object], context: dict[str, bytes], **_: object) -> None:
        if "Error" not in parsed:
            EC2_TYPES.setdefault(context["asked"], pickle.dumps(parsed))

    # Last: a test's own answers come before these.
    events.register_last("before-call.ec2.DescribeInstanceTypes", before)
    events.register_first("after-call.ec2.DescribeInstanceTypes", after)
    return aws


@pytest.fixture
def answers(aws: Aws) -> Answers:
    return Answers(aws)


def listing(*pages: Sequence[str]) -> list[Mapping[str, object]]:
    """Makes answers of GetProducts, page by page."""
    return [
        {"FormatVersion": "aws_v1", "PriceList": list(page)}
        | ({"NextToken": f"page-{number}"} if number < len(pages) else {})
        for number, page in enumerate(pages, start=1)
    ]


def rows_of(text: str) -> dict[str, dict[str, str]]:
    return {row["instance_type"]: row for row in csv.DictReader(io.StringIO(text))}


# ---- what the price list says


def test_a_training_price_is_that_of_on_demand_hours_of_the_region() -> None:
    found = training_prices(
        [
            trains("ml.p4d.24xlarge", "27.5000000000"),
            trains("ml.g5.xlarge", "1.2", region="us-east-1"),
            trains("ml.c5.xlarge", "0.3", usage="EUC1-SpotTraining"),
            trains("ml.c5.2xlarge", "0.3", usage="EUC1-Host"),
            trains("ml.c5.4xlarge", "0.3", usage="EUC1-ReservedTrain"),
            trains("ml.m5.large", "0.0000000000"),
            product(REGION, "1.0", unit="GB-Mo", usagetype="EUC1-Train:ml.m5.xlarge"),
            "no JSON",
            json.dumps(["nothing"]),
            "{}",
        ],
        region=REGION,
    )
    assert found.usd == {"p4d.24xlarge": "27.5"}
    assert found.unclear == ()


def test_us_east_1_has_usage_types_with_and_without_a_head() -> None:
    for usage in ("Train", "USE1-Train"):
        one = trains("ml.p5.48xlarge", "60", usage=usage, region="us-east-1")
        assert training_prices([one], region="us-east-1").usd == {"p5.48xlarge": "60"}


def test_two_prices_of_a_type_are_none_and_the_same_twice_is_one() -> None:
    found = training_prices(
        [
            trains("ml.g5.xlarge", "1.2"),
            trains("ml.g5.xlarge", "1.3"),
            trains("ml.g5.2xlarge", "1.50"),
            trains("ml.g5.2xlarge", "1.5000"),
        ],
        region=REGION,
    )
    assert found.usd == {"g5.2xlarge": "1.5"}
    assert found.unclear == ("g5.xlarge",)


@pytest.mark.parametrize(
    "changes",
    [
        {"operatingSystem": "Windows"},
        {"tenancy": "Dedicated"},
        {"preInstalledSw": "SQL Web"},
        {"capacitystatus": "UnusedCapacityReservation"},
        {"marketoption": "CapacityBlock"},
    ],
)
def test_an_ec2_price_is_that_of_plain_linux_on_demand(changes: dict[str, str]) -> None:
    found = ec2_prices(
        [runs("c5.xlarge", "0.194"), runs("c5.xlarge", "9.9", **changes)], region=REGION
    )
    assert found.usd == {"c5.xlarge": "0.194"}


# ---- the table


def made(
    aws: Aws,
    answers: Answers,
    *,
    training: Sequence[str],
    ec2: Sequence[str] = (),
    region: str = REGION,
) -> tuple[dict[str, dict[str, str]], str, list[str]]:
    """Makes a table of these prices, and returns its rows, text and notes."""
    answers.answer("pricing", "GetProducts", *listing(training), *listing(ec2))
    table, notes = refreshed(aws, aws, region=region, today=TODAY)
    return rows_of(table.csv()), table.csv(), notes


def test_every_page_is_read_and_the_questions_name_service_and_region(
    aws: Aws, answers: Answers
) -> None:
    first, second = [trains("ml.g5.xlarge", "1.2")], [trains("ml.c5.xlarge", "0.3")]
    answers.answer("pricing", "GetProducts", *listing(first, second), *listing([]))
    table, _ = refreshed(aws, aws, region=REGION, today=TODAY)
    rows = rows_of(table.csv())
    column = "sagemaker_usd_per_hour_eu_central_1"
    assert (rows["ml.g5.xlarge"][column], rows["ml.c5.xlarge"][column]) == ("1.2", "0.3")
    asked = [json.loads(str(call["body"], "utf-8")) for _, call in answers.calls]  # type: ignore[call-overload]
    assert [one["ServiceCode"] for one in asked] == ["AmazonSageMaker"] * 2 + ["AmazonEC2"]
    assert [one.get("NextToken") for one in asked] == [None, "page-1", None]
    fields = {one["Field"]: one["Value"] for one in asked[0]["Filters"]}
    assert fields == {"regionCode": REGION, "component": "Training"}
    assert {one["Type"] for one in asked[2]["Filters"]} == {"TERM_MATCH"}


def test_another_regions_prices_are_never_taken_for_this_ones(aws: Aws, answers: Answers) -> None:
    rows, _, notes = made(
        aws, answers, training=[trains("ml.g5.xlarge", "1.2")], ec2=[runs("g5.xlarge", "1.0")]
    )
    assert "sagemaker_usd_per_hour_us_east_1" not in rows["ml.g5.xlarge"]
    assert rows["ml.g5.xlarge"]["ec2_usd_per_hour_eu_central_1"] == "1"
    assert rows["ml.g5.xlarge"]["priced_on"] == "2027-01-05"
    assert rows["ml.g5.xlarge"]["source"].startswith("SM:price-api-2027-01-05; ")
    assert "EC2:price-api-2027-01-05" in rows["ml.g5.xlarge"]["source"]
    others = [row for name, row in rows.items() if name != "ml.g5.xlarge"]
    assert len(others) == len(SHIPPED) - 1
    assert {row["sagemaker_usd_per_hour_eu_central_1"] for row in others} == {""}
    assert {row["priced_on"] for row in others} == {""}
    assert any("other regions' prices" in note for note in notes)


def test_at_home_a_price_that_is_not_listed_keeps_its_date_and_is_named(
    aws: Aws, answers: Answers
) -> None:
    listed = trains("ml.g5.xlarge", "1.2", usage="USE1-Train", region="us-east-1")
    rows, _, notes = made(aws, answers, training=[listed], region="us-east-1")
    old = SHIPPED["ml.p4d.24xlarge"]
    column = "sagemaker_usd_per_hour_us_east_1"
    kept = rows["ml.p4d.24xlarge"]
    assert (kept[column], kept["priced_on"]) == (old[column], old["priced_on"])
    assert kept["source"] == old["source"]
    assert rows["ml.g5.xlarge"][column] == "1.2"
    assert any("2026-09-27 is kept" in note for note in notes)


def test_a_blank_price_stays_blank(aws: Aws, answers: Answers) -> None:
    listed = trains("ml.g5.xlarge", "1.2", usage="USE1-Train", region="us-east-1")
    rows, _, notes = made(aws, answers, training=[listed], region="us-east-1")
    assert SHIPPED["ml.p3.2xlarge"]["sagemaker_usd_per_hour_us_east_1"] == ""
    assert rows["ml.p3.2xlarge"]["sagemaker_usd_per_hour_us_east_1"] == ""
    assert any("no part of plans" in note and "p3.2xlarge" in note for note in notes)


def test_the_shipped_sizes_are_ec2s(aws: Aws, answers: Answers) -> None:
    rows, _, notes = made(aws, answers, training=[trains("ml.g5.xlarge", "1.2")])
    for name in ("ml.p4d.24xlarge", "ml.g5.12xlarge", "ml.c5.18xlarge", "ml.trn1.32xlarge"):
        for column in ("vcpus", "physical_cores", "gpus", "network_kind"):
            assert rows[name][column] == SHIPPED[name][column], (name, column)
        for column in ("memory_gib", "network_gbps"):
            assert float(rows[name][column]) == float(SHIPPED[name][column]), (name, column)
    assert rows["ml.g5.xlarge"]["coremark_per_vcpu"] == SHIPPED["ml.g5.xlarge"]["coremark_per_vcpu"]
    assert not [note for note in notes if "p4d" in note and " is " in note]


def test_a_size_that_has_changed_is_taken_and_named() -> None:
    described = machines(
        [
            {
                "InstanceType": "g5.xlarge",
                "VCpuInfo": {"DefaultVCpus": 6, "DefaultCores": 3},
                "MemoryInfo": {"SizeInMiB": 24576},
                "GpuInfo": {"Gpus": [{"Count": 1}]},
                "NetworkInfo": {"NetworkPerformance": "2x 25 Gigabit"},
            },
            {"InstanceType": "c5.xlarge", "NetworkInfo": {"NetworkPerformance": "High"}},
        ]
    )
    table = renewed(
        shipped_text(),
        region="us-east-1",
        training=training_prices([], region="us-east-1"),
        ec2=ec2_prices([], region="us-east-1"),
        described=described,
        trainable={"ml.g5.xlarge"},
        today=TODAY,
    )
    row = rows_of(table.csv())["ml.g5.xlarge"]
    assert [row[c] for c in ("vcpus", "memory_gib", "network_gbps", "network_kind")] == [
        "6",
        "24",
        "50",
        "sustained",
    ]
    (said,) = (note for note in table.notes if note.startswith("ml.g5.xlarge:"))
    assert "vcpus 4 is 6" in said
    assert rows_of(table.csv())["ml.c5.xlarge"] | {"in_training_enum": ""} == SHIPPED[
        "ml.c5.xlarge"
    ] | {"in_training_enum": ""}


def test_the_shipped_types_that_cannot_train_are_those_that_boto3_does_not_know(
    aws: Aws, answers: Answers
) -> None:
    rows, _, _ = made(aws, answers, training=[trains("ml.g5.xlarge", "1.2")])
    assert {n: row["in_training_enum"] for n, row in rows.items()} == {
        name: row["in_training_enum"] for name, row in SHIPPED.items()
    }


def test_types_that_are_not_in_the_table_are_named_not_guessed(aws: Aws, answers: Answers) -> None:
    listed = [trains("ml.g5.xlarge", "1.2"), trains("ml.t3.xlarge", "0.2")]
    rows, _, notes = made(aws, answers, training=listed)
    assert "ml.t3.xlarge" not in rows
    assert any("t3.xlarge" in note and "CPU speed is not known" in note for note in notes)


def test_decide_takes_the_table_and_never_a_type_without_a_price(
    aws: Aws, answers: Answers, tmp_path: Path
) -> None:
    priced = {"ml.p4d.24xlarge": "27", "ml.c5.18xlarge": "4", "ml.c5.24xlarge": "0.01"}
    _, text, _ = made(aws, answers, training=[trains(kind, usd) for kind, usd in priced.items()])
    file = tmp_path / "eu.csv"
    file.write_text(text)
    catalog = load_catalog("sagemaker", file)
    assert {i.type for i in catalog.instances if i.usd_per_hour is not None} == set(priced)
    assert catalog.region == REGION
    profile = Profile(
        host=ProfiledHost(instance_type="ml.p4d.24xlarge"),
        step=StepTerms(step_seconds=0.192, wait_seconds=0.1, global_batch_size=8),
        observed=Observed(cpu_utilization=0.99, gpu_utilization=0.45),
    )
    found = decide(profile, catalog=catalog, constraints=Constraints(), today=TODAY)
    used = {group.instance_type for plan in found.plans for group in plan.groups}
    # The cheap c5.24xlarge cannot train, others have no price.
    assert used == {"ml.p4d.24xlarge", "ml.c5.18xlarge"}
    assert (found.prices.date, found.prices.stale) == ("2027-01-05", False)


def test_kubernetes_pays_ec2s_price_with_ec2s_date(
    aws: Aws, answers: Answers, tmp_path: Path
) -> None:
    _, text, _ = made(
        aws, answers, training=[trains("ml.g5.xlarge", "1.2")], ec2=[runs("c5.xlarge", "0.19")]
    )
    file = tmp_path / "eu.csv"
    file.write_text(text)
    catalog = load_catalog("kubernetes", file)
    assert catalog.get("c5.xlarge").usd_per_hour == 0.19
    assert catalog.get("c5.xlarge").priced_on == TODAY
    assert catalog.get("g5.xlarge").usd_per_hour is None


def test_a_named_type_without_a_price_is_no_plan_to_run() -> None:
    profile = Profile(
        host=ProfiledHost(instance_type="ml.p4d.24xlarge"),
        step=StepTerms(step_seconds=0.192, wait_seconds=0.1, global_batch_size=8),
    )
    groups = (
        Group(name="dnn", role="dnn", instance_type="ml.p4d.24xlarge", count=1),
        Group(name="data", role="data", instance_type="ml.p3.2xlarge", count=1),
    )
    found = decide(
        profile,
        catalog=load_catalog("sagemaker"),
        constraints=Constraints(),
        extra_clusters=(groups,),
        today=TODAY,
    )
    (named,) = (p for p in found.plans if p.groups[-1].instance_type == "ml.p3.2xlarge")
    assert (named.feasible, named.predicted) == (False, None)
    assert named.reason == "asked for, but ml.p3.2xlarge has no price"


@pytest.mark.parametrize(("days", "is_stale"), [(90, False), (91, True)])
def test_a_price_is_stale_from_the_ninety_first_day(days: int, is_stale: bool) -> None:
    catalog = load_catalog("sagemaker")
    priced_on = catalog.get("ml.p4d.24xlarge").priced_on
    assert priced_on is not None
    used = [catalog.get("ml.p4d.24xlarge")]
    assert catalog.prices(used, today=priced_on + timedelta(days=days)).stale is is_stale


# ---- what may go wrong


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("AccessDeniedException", "permission pricing:GetProducts is missing"),
        ("ThrottlingException", "throttled pricing:GetProducts"),
        ("ExpiredTokenException", "ExpiredTokenException"),
    ],
)
def test_a_refusal_is_said_in_words_with_a_way_out(
    aws: Aws, answers: Answers, code: str, words: str
) -> None:
    answers.always_refuse("pricing", "GetProducts", code, "no")
    with pytest.raises(AwsError) as caught:
        refreshed(aws, aws, region=REGION, today=TODAY)
    assert words in str(caught.value)
    assert caught.value.fix


def test_where_ec2_may_not_be_asked_sizes_stay_and_that_is_said(aws: Aws, answers: Answers) -> None:
    answers.always_refuse("ec2", "DescribeInstanceTypes", "UnauthorizedOperation")
    rows, _, notes = made(aws, answers, training=[trains("ml.g5.xlarge", "1.2")])
    assert rows["ml.g5.xlarge"]["vcpus"] == "4"
    assert any("ec2:DescribeInstanceTypes" in note for note in notes)
    assert not any("EC2 has none of these" in note for note in notes)


def test_a_region_without_prices_makes_no_table(aws: Aws, answers: Answers, tmp_path: Path) -> None:
    answers.answer("pricing", "GetProducts", *listing([]))
    with pytest.raises(PlatformError, match="no training prices for mars-1"):
        refreshed(aws, aws, region="mars-1", today=TODAY)


def test_without_a_network_the_shipped_table_is_pointed_to(
    monkeypatch: pytest.MonkeyPatch, aws_server: AwsServer, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("stoker.platforms.aws.MAX_ATTEMPTS", 1)
    out = tmp_path / "table.csv"
    with pytest.raises(PlatformError) as caught:
        refresh_from_aws(region=REGION, out=out, as_json=True, today=TODAY)
    assert "AWS did not answer" in str(caught.value)
    assert "still works" in str(caught.value)
    assert not out.exists()


@pytest.mark.parametrize(
    ("region", "where"),
    [
        ("eu-west-3", "eu-central-1"),
        ("ap-northeast-1", "ap-south-1"),
        ("us-west-2", "us-east-1"),
        ("sa-east-1", "us-east-1"),
    ],
)
def test_the_price_list_is_asked_for_near_by(region: str, where: str) -> None:
    assert price_list_region(region) == where


def test_prices_in_another_currency_are_refused() -> None:
    with pytest.raises(UsageError, match="CNY"):
        price_list_region("cn-north-1")


def test_the_verb_writes_the_file_and_says_what_is_missing(
    aws_server: AwsServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    listed = listing([trains("ml.g5.xlarge", "1.2")]), listing([runs("g5.xlarge", "1")])
    pages = [json.loads(json.dumps(page)) for pages in listed for page in pages]
    call: Callable[..., object] = Aws.call

    def answered(self: Aws, service: str, operation: str, **parameters: object) -> object:
        if service != "pricing":
            return call(self, service, operation, **parameters)
        return pages.pop(0)

    monkeypatch.setattr(Aws, "call", answered)
    out = tmp_path / "eu.csv"
    refresh_from_aws(region=REGION, out=out, as_json=False, today=TODAY)
    said = capsys.readouterr()
    assert (
        f"{len(SHIPPED)} types, 1 with today's SageMaker price, 1 with today's EC2 price"
        in said.out
    )
    assert f"--prices {out}" in said.out
    assert "note: no training price" in said.err
    assert load_catalog("sagemaker", out).get("g5.xlarge").usd_per_hour == 1.2


def test_all_shipped_types_fit_into_a_few_questions() -> None:
    assert len(shipped_types()) == len(set(shipped_types())) == len(SHIPPED)
