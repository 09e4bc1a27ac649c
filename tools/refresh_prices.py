"""The table of instance types with today's prices of an AWS region.

    python tools/refresh_prices.py --region eu-west-1 > prices.csv
    stoker decide profile.json --prices prices.csv      or constraints.prices_file: prices.csv

It takes pricing:GetProducts and ec2:DescribeInstanceTypes, and about a minute. Types and CPU speeds
are those of the table that comes with stoker. A type whose price AWS does not list, or lists twice,
has a blank one: it is estimated by EC2's, or in no plan. Own prices (contracts, spot, savings
plans) go into the same file.
"""

import argparse
import csv
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from importlib import resources
from typing import Any, TextIO

import boto3

SHIPPED = "aws_training_instances.csv"
TRAINING = {"component": "Training"}
# USE1-Train:ml.p4d.24xlarge; spot and reserved hours have other words before the colon.
USAGE = re.compile(r"^(?:[A-Z0-9]+-)?Train:ml\.(?P<type>[a-z0-9-]+\.[a-z0-9-]+)$")
ON_DEMAND = {
    "operatingSystem": "Linux",
    "tenancy": "Shared",
    "preInstalledSw": "NA",
    "capacitystatus": "Used",
}
# SageMaker's price over EC2's. Checked on all 125 types that have both, to 0.4%, on 2026-11-26
# (tests/unit/test_prices.py checks it on the table); p2 and p3 by the prices of 2022.
RATIOS = (
    (r"g\d\w*\.xlarge", 1.40),
    (r"g\d\w*\..+", 1.25),
    (r"p2\..+|p3\.2xlarge", 1.25),
    (r"p3\.8xlarge", 1.20),
    (r"(p\d|trn\d)[a-z0-9-]*\..+", 1.15),
    (r"[mcrt]\d[a-z0-9-]*\..+", 1.20),
)
# AWS's baseline behind an "up to" figure is at least this for c, m and p types (c5.xlarge: 1.25
# of "up to 10" for 4 vCPUs); beyond it the network runs on credits, which a training run uses up.
BASELINE_GBPS_PER_VCPU = 0.3125
NETWORK = re.compile(r"^(?P<burst>Up to )?(?:(?P<cards>\d+)x )?(?P<gbps>[\d.]+) Gigabit$")


def prices(pricing: Any, service: str, region: str, fields: Mapping[str, str]) -> dict[str, str]:
    """Returns USD an hour by type, without `ml.`, of what AWS lists with one price."""
    wanted = {"regionCode": region, **fields}
    filters = [{"Type": "TERM_MATCH", "Field": k, "Value": v} for k, v in wanted.items()]
    found: dict[str, set[str]] = {}
    pages = pricing.get_paginator("get_products").paginate(
        ServiceCode=service, Filters=filters, FormatVersion="aws_v1"
    )
    for product in (json.loads(text) for page in pages for text in page["PriceList"]):
        attributes = product["product"]["attributes"]
        usage = USAGE.match(attributes.get("usagetype", ""))
        # Capacity blocks are another market, at another price, with the same type.
        if attributes.get("marketoption", "OnDemand") == "OnDemand":
            kind = usage["type"] if usage else attributes.get("instanceType")
            if kind and (usage or service == "AmazonEC2"):
                found.setdefault(kind, set()).update(hourly(product))
    return {kind: usd.pop() for kind, usd in found.items() if len(usd) == 1}


def hourly(product: Mapping[str, Any]) -> Iterable[str]:
    for term in product.get("terms", {}).get("OnDemand", {}).values():
        for price in term["priceDimensions"].values():
            usd = float(price["pricePerUnit"].get("USD", 0))
            # Products of 0 $ are free tiers and capacity that is paid elsewhere.
            if price["unit"].lower() in ("hrs", "hours") and usd > 0:
                yield f"{usd:.10f}".rstrip("0").rstrip(".")


def sizes(ec2: Any, kinds: Sequence[str]) -> dict[str, dict[str, str]]:
    """Returns the columns that EC2 knows, by type."""
    found = {}
    pages = ec2.get_paginator("describe_instance_types").paginate(
        Filters=[{"Name": "instance-type", "Values": list(kinds)}]
    )
    for item in (each for page in pages for each in page["InstanceTypes"]):
        row = {
            "vcpus": item["VCpuInfo"]["DefaultVCpus"],
            "memory_gib": item["MemoryInfo"]["SizeInMiB"] / 1024,
        }
        devices = item.get("GpuInfo", {}).get("Gpus") or item.get("NeuronInfo", {}).get(
            "NeuronDevices", []
        )
        # A part of a GPU counts as 0 here: such a type stays as it is.
        if gpus := sum(device.get("Count", 0) for device in devices):
            row["gpus"] = gpus
        if network := NETWORK.match(item["NetworkInfo"]["NetworkPerformance"]):
            # "4x 100 Gigabit": four network cards, 400 Gbit/s together.
            gbps = float(network["gbps"]) * int(network["cards"] or 1)
            if network["burst"]:
                gbps = min(gbps, BASELINE_GBPS_PER_VCPU * row["vcpus"])
            row["sustained_gbps"] = gbps
        found[item["InstanceType"]] = {key: str(value) for key, value in row.items()}
    return found


def price_ratio(kind: str) -> float | None:
    """Returns SageMaker's price over EC2's for a type's family; None: not known."""
    return next((ratio for pattern, ratio in RATIOS if re.fullmatch(pattern, kind)), None)


def table(pricing: Any, ec2: Any, *, region: str, trainable: Sequence[str], today: date, out: TextIO
          ) -> None:  # fmt: skip
    """Writes the table.

    Args:
        pricing: Client of the price list.
        ec2: Client of EC2 in the region.
        region: Region of the prices.
        trainable: Types that a training job takes, with `ml.`.
        today: Date of the prices.
        out: Where the table goes.
    """
    text = resources.files("stoker.catalog").joinpath(SHIPPED).read_text(encoding="utf-8")
    rows = list(csv.DictReader(text.splitlines()))
    kinds = [row["instance_type"].removeprefix("ml.") for row in rows]
    training = prices(pricing, "AmazonSageMaker", region, TRAINING)
    if not training:
        raise SystemExit(f"error: AWS's price list has no training prices in USD for {region}")
    on_demand = prices(pricing, "AmazonEC2", region, ON_DEMAND)
    described = sizes(ec2, kinds)
    place = region.replace("-", "_")
    columns = [name.replace("us_east_1", place) for name in rows[0]]
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    for kind, row in zip(kinds, rows, strict=True):
        usd, estimate = training.get(kind, ""), ""
        of_ec2 = on_demand.get(kind, "")
        ratio = price_ratio(kind)
        if of_ec2 and ratio and not usd:
            usd, estimate = f"{float(of_ec2) * ratio:.10g}", f"EC2's ${of_ec2} x {ratio:.2f}"
        row = {name.replace("us_east_1", place): cell for name, cell in row.items()}
        row |= described.get(kind, {})
        row |= {f"sagemaker_usd_per_hour_{place}": usd, f"ec2_usd_per_hour_{place}": of_ec2}
        row["estimate"] = estimate
        row["priced_on"] = str(today) if usd else ""
        row["ec2_priced_on"] = str(today) if of_ec2 else ""
        row["in_training_enum"] = str(f"ml.{kind}" in trainable).lower()
        row["source"] = f"SM:price-api-{today}; EC2:price-api-{today}" if usd or of_ec2 else ""
        writer.writerow(row)
    blank = [kind for kind in kinds if kind not in training]
    print(f"note: no training price for {', '.join(blank)}" * bool(blank), file=sys.stderr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write AWS's prices of today as a table.")
    parser.add_argument("--region", required=True, metavar="R", help="region of the prices")
    given = parser.parse_args()
    enum = boto3.client("sagemaker", region_name=given.region).meta.service_model.shape_for(
        "TrainingInstanceType"
    )
    table(
        # This region has the price list of all regions.
        boto3.client("pricing", region_name="us-east-1"),
        boto3.client("ec2", region_name=given.region),
        region=given.region,
        trainable=enum.enum,
        today=date.today(),
        out=sys.stdout,
    )
