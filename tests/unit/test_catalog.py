from datetime import date
from pathlib import Path

import pytest

from stoker.catalog import load_catalog
from stoker.errors import UsageError
from stoker.records import Group


@pytest.fixture(scope="module")
def sagemaker():
    return load_catalog("sagemaker")


def _prices(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "prices.csv"
    file.write_text(text, encoding="utf-8")
    return file


def test_both_spellings_name_the_same_type(sagemaker):
    assert sagemaker.get("c5.9xlarge") is sagemaker.get("ml.c5.9xlarge")
    assert sagemaker.get("c5.9xlarge").type == "ml.c5.9xlarge"
    kubernetes = load_catalog("kubernetes")
    assert kubernetes.get("ml.c5.9xlarge").type == "c5.9xlarge"


def test_unknown_type_is_an_error_that_names_the_nearest(sagemaker):
    with pytest.raises(UsageError, match=r"did you mean ml\.c5\.9xlarge"):
        sagemaker.get("c5.9xlarg")


def test_unknown_platform_is_a_usage_error():
    with pytest.raises(UsageError, match="did you mean sagemaker"):
        load_catalog("sagemake")


def test_each_platform_pays_its_own_price(sagemaker):
    assert sagemaker.get("p4d.24xlarge").usd_per_hour == 25.2513
    assert load_catalog("kubernetes").get("p4d.24xlarge").usd_per_hour == 21.957642


def test_prices_of_kubernetes_carry_the_date_of_the_ec2_price(sagemaker):
    assert sagemaker.get("m5.large").priced_on == date(2026, 9, 27)
    assert load_catalog("kubernetes").get("m5.large").priced_on == date(2026, 9, 24)
    assert load_catalog("kubernetes").get("c5.12xlarge").priced_on == date(2025, 3, 2)


def test_blank_price_is_unknown_and_never_zero(sagemaker):
    assert sagemaker.get("p3.2xlarge").usd_per_hour is None
    assert all(i.usd_per_hour is None or i.usd_per_hour > 0 for i in sagemaker.instances)


def test_types_that_no_training_job_takes_are_marked(sagemaker):
    outside = {i.type for i in sagemaker.instances if not i.in_training_enum}
    assert outside == {
        "ml.c5.12xlarge",
        "ml.c5.24xlarge",
        "ml.m5.8xlarge",
        "ml.m5.16xlarge",
        "ml.c5.large",
        "ml.c6i.large",
    }


def test_the_whole_table_is_there_with_its_sources(sagemaker):
    assert len(sagemaker.instances) == 108
    assert sagemaker.get("p4d.24xlarge").accelerators == 8
    assert sagemaker.get("trn1.32xlarge").accelerators == 16
    folder = Path(load_catalog.__code__.co_filename).parent
    assert "libcloud" in (folder / "SOURCES.md").read_text()


def test_burst_network_counts_with_its_baseline(sagemaker):
    burst, sustained = sagemaker.get("c5.xlarge"), sagemaker.get("c5.9xlarge")
    assert (burst.network_gbps, burst.sustained_gbps) == (10.0, 1.25)
    assert sustained.sustained_gbps == sustained.network_gbps == 10.0


def test_local_types_go_up_to_the_cores_of_the_machine():
    catalog = load_catalog("local", cores=3)
    assert [i.type for i in catalog.instances] == ["local.c1", "local.c2", "local.c3"]
    assert catalog.max_total_vcpus == 3
    assert catalog.purchase == "nominal"
    assert "nominal" in catalog.source
    assert "$" not in catalog.table()


def test_a_local_type_beyond_the_machine_can_still_be_named():
    named = load_catalog("local", cores=1).get("local.c16")
    assert (named.vcpus, named.usd_per_hour) == (16, 0.8)
    with pytest.raises(UsageError, match="no instance type"):
        load_catalog("local", cores=1).get("local.c0")


def test_price_file_replaces_the_price_alone_and_forgets_its_date(tmp_path):
    file = _prices(tmp_path, "instance_type,usd_per_hour\nml.c5.9xlarge,1.25\n")
    found = load_catalog("sagemaker", file).get("c5.9xlarge")
    assert (found.usd_per_hour, found.vcpus, found.network_gbps) == (1.25, 36, 10.0)
    assert found.priced_on is None


def test_price_file_adds_types_of_other_clouds(tmp_path):
    text = (
        "instance_type,vcpus,gpus,gpu_model,coremark_per_vcpu,usd_per_hour,priced_on\n"
        "a2-highgpu-1g,12,1,A100,15000,3.67,2026-10-01\n"
    )
    found = load_catalog("kubernetes", _prices(tmp_path, text)).get("a2-highgpu-1g")
    assert (found.vcpus, found.accelerators, found.usd_per_hour) == (12, 1, 3.67)
    assert found.priced_on == date(2026, 10, 1)


def test_blank_price_in_a_file_takes_the_type_out(tmp_path):
    file = _prices(tmp_path, "instance_type,usd_per_hour\nc5.9xlarge,\n")
    assert load_catalog("sagemaker", file).get("c5.9xlarge").usd_per_hour is None


def test_price_of_another_platform_does_not_count(tmp_path):
    file = _prices(tmp_path, "instance_type,ec2_usd_per_hour_us_east_1\nc5.9xlarge,0.5\n")
    assert load_catalog("sagemaker", file).get("c5.9xlarge").usd_per_hour == 1.836
    assert load_catalog("kubernetes", file).get("c5.9xlarge").usd_per_hour == 0.5


def test_region_is_read_from_the_price_column(tmp_path):
    file = _prices(tmp_path, "instance_type,sagemaker_usd_per_hour_eu_west_1\nc5.9xlarge,2.0\n")
    assert load_catalog("sagemaker", file).region == "eu-west-1"


@pytest.mark.parametrize(
    ("text", "what", "where"),
    [
        ("", "no column instance_type", ":1"),
        ("vcpus\n4\n", "no column instance_type", ":1"),
        ("instance_type,vcpu\nx.y,4\n", "unknown column 'vcpu'", ":1"),
        ("instance_type,vcpus,vcpus\nx.y,4,4\n", "duplicate column", ":1"),
        ("instance_type,vcpus\nx.y,4,5\n", "3 cells in a table of 2", ":2"),
        ("instance_type,vcpus\nx.y,four\n", "found 'four'", ":2, column vcpus"),
        ("instance_type,vcpus\nx.y,0\n", "found '0'", ":2, column vcpus"),
        ("instance_type,usd_per_hour\nx.y,1\n", "vCPUs are needed", ":2, column vcpus"),
        ("instance_type,usd_per_hour\nc5.9xlarge,-1\n", "found '-1'", ":2, column usd_per_hour"),
        ("instance_type,usd_per_hour\nc5.9xlarge,0\n", "found '0'", ":2, column usd_per_hour"),
        ("instance_type,usd_per_hour\nc5.9xlarge,nan\n", "'nan'", ":2, column usd_per_hour"),
        ("instance_type,usd_per_hour\nc5.9xlarge,inf\n", "'inf'", ":2, column usd_per_hour"),
        (
            "instance_type,usd_per_hour,priced_on\nc5.9xlarge,1,soon\n",
            "'soon'",
            ":2, column priced_on",
        ),
        (
            "instance_type,usd_per_hour\nc5.9xlarge,1\n\nml.c5.9xlarge,2\n",
            "is in line 2, too",
            ":4, column instance_type",
        ),
        ("instance_type,vcpus\n,4\n", "has no name", ":2, column instance_type"),
        (
            "instance_type,in_training_enum\nc5.9xlarge,maybe\n",
            "yes or no",
            "column in_training_enum",
        ),
    ],
)
def test_wrong_price_file_names_line_and_column(tmp_path, text, what, where):
    file = _prices(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        load_catalog("sagemaker", file)
    assert what in caught.value.what
    assert where in caught.value.where
    assert str(file) in caught.value.where


def test_another_separator_is_named(tmp_path):
    with pytest.raises(UsageError) as caught:
        load_catalog("sagemaker", _prices(tmp_path, "instance_type;usd_per_hour\nx.y;1\n"))
    assert caught.value.fix == "separate the columns by commas"


def test_missing_price_file_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="no such file"):
        load_catalog("sagemaker", tmp_path / "none.csv")


def test_prices_are_stale_after_ninety_days_and_dated_by_the_oldest(sagemaker):
    used = [sagemaker.get("c5.9xlarge"), sagemaker.get("p4d.24xlarge")]
    fresh = sagemaker.prices(used, today=date(2026, 12, 26))
    stale = sagemaker.prices(used, today=date(2026, 12, 27))
    assert (fresh.date, fresh.stale, fresh.region) == ("2026-09-27", False, "us-east-1")
    assert stale.stale


def test_date_is_unknown_where_one_of_the_prices_has_none(tmp_path):
    file = _prices(tmp_path, "instance_type,usd_per_hour\nc5.9xlarge,1.25\n")
    catalog = load_catalog("sagemaker", file)
    used = [catalog.get("c5.9xlarge"), catalog.get("p4d.24xlarge")]
    assert catalog.prices(used, today=date(2026, 10, 1)).date is None


def test_cost_of_a_cluster_is_unknown_where_one_price_is(sagemaker):
    dnn = Group(name="dnn", role="dnn", instance_type="ml.p4d.24xlarge", count=1)
    data = Group(name="data", role="data", instance_type="c5.18xlarge", count=2)
    blank = Group(name="data", role="data", instance_type="p3.2xlarge", count=1)
    assert sagemaker.usd_per_hour((dnn, data)) == pytest.approx(25.2513 + 2 * 3.672)
    assert sagemaker.usd_per_hour((dnn, blank)) is None


def test_table_is_narrow_and_says_what_is_not_known(sagemaker):
    lines = sagemaker.table().splitlines()
    assert max(map(len, lines)) <= 88
    assert "us-east-1" in lines[0]
    assert "$ per hour" in lines[1]
    assert any("ml.p3.2xlarge" in line and "unknown" in line for line in lines)


def test_document_keeps_a_blank_price_as_null(sagemaker):
    rows = sagemaker.to_document()["instances"]
    assert isinstance(rows, list)
    blank = next(r for r in rows if isinstance(r, dict) and r["type"] == "ml.p3.2xlarge")
    assert blank["usd_per_hour"] is None
    assert blank["accelerators"] == 1
