"""Types and prices of 2026 through the verbs: compile, upload, start, and the run's *decide*."""

import json
from pathlib import Path

import msgspec
import pytest
import yaml

from stoker.pipelines.kubeflow.compile import workload_text
from stoker.pipelines.sagemaker.compile import compile_pipeline
from stoker.records import Decision, ProfiledHost, read_json, write_json
from stoker.workload_file import read_workload
from support import builders
from support.command import Done, stoker, succeeds
from support.sagemaker_uploads import BUCKET, WORKLOAD

ROOT = Path(__file__).resolve().parents[2]
# In no catalog and no list of the service.
UNHEARD = "ml.q9x-ultra.480xlarge"
MISSPELT = "ml.g5.2xlrage"
# The service trains on it, and no price of it is known.
UNPRICED = "ml.trn2.48xlarge"
ESTIMATED = ("ml.p5en.48xlarge", "ml.g7e.2xlarge", "ml.p6-b200.48xlarge", "ml.c8i.8xlarge")
# The region of the catalog's prices.
HERE = ("--set", "sagemaker.region=us-east-1")
TYPES = ("ml.g5.xlarge", "ml.g6e.4xlarge", *ESTIMATED, "ml.t3.xlarge", UNPRICED)


@pytest.fixture
def server(aws_server):
    aws_server.make_bucket(BUCKET)
    return aws_server


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "pipelines").symlink_to(ROOT / "pipelines")
    document = json.loads(json.dumps(WORKLOAD))
    # Jobs of these tests are in other regions than their image.
    document["sagemaker"]["elsewhere"] = ["eu-central-1"]
    (tmp_path / "w.yaml").write_text(yaml.safe_dump(document))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def on(name: str) -> tuple[str, ...]:
    return ("--set", f"cluster.dnn.instance_type={name}", *HERE)


def refused(*words: str) -> str:
    done = stoker(*words)
    assert done.returncode == 2, done.stdout + done.stderr
    return done.stderr


def profiled(name: str, folder: Path) -> None:
    """Writes what a profile measures on one host of the type: also its vCPUs."""
    host = ProfiledHost(instance_type=name, count=1, vcpus=8, accelerators=1)
    write_json(folder / "profile.json", msgspec.structs.replace(builders.starved(), host=host))


def decided(name: str, folder: Path, *sets: str) -> Decision:
    """Runs the step *decide* of the compiled pipeline on a profile of that type."""
    overrides = [word for word in (*on(name), *sets) if word != "--set"]
    compiled = compile_pipeline(read_workload("w.yaml", overrides=overrides), folder=folder)
    (text,) = [text for uri, text in compiled.uploads.items() if uri.endswith("workload.json")]
    (folder / "workload.json").write_bytes(text)
    return decide_step(name, folder)


def decide_step(name: str, folder: Path, *more: str) -> Decision:
    profiled(name, folder)
    out = folder / "decision.json"
    words = ("decide", "profile.json", "--workload", "workload.json", "--out", str(out))
    succeeds(*words, "--param", "max_data_hosts=3", *more)
    return read_json(out, Decision)


@pytest.mark.parametrize("name", TYPES)
def test_a_type_goes_through_all_verbs_and_its_price_is_never_promised(server, project, name):
    succeeds("compile", "sagemaker", "w.yaml", *on(name), "--out", "p.json")
    succeeds("upload", "sagemaker", "w.yaml", *on(name), "--yes")
    started = succeeds("start", "sagemaker", "w.yaml", *on(name), "--yes")
    line = next(line for line in started.stderr.splitlines() if line.startswith("profile on"))
    is_estimate = name in ESTIMATED
    assert ("price unknown" in line) == (name == UNPRICED)
    assert ("~$" in line) == is_estimate
    assert ("estimated price" in started.stderr) == is_estimate

    decision = decided(name, project)
    keep = next(plan for plan in decision.plans if plan.action == "keep")
    if name == UNPRICED:
        assert (decision.action, decision.kind, keep.predicted) == ("keep", "unknown", None)
    else:
        assert keep.predicted.usd_per_hour > 0
        assert keep.predicted.is_estimate == is_estimate


@pytest.mark.parametrize("name", TYPES)
def test_a_limit_of_the_run_is_kept_estimated_or_refused(server, project, name):
    limit = (*on(name), "--set", "constraints.max_usd=5")
    if name == UNPRICED:
        verbs = (("compile", "--out", "p.json"), ("upload", "--yes"), ("start", "--yes"))
        for verb, *more in verbs:
            said = refused(verb, "sagemaker", "w.yaml", *limit, *more)
            assert f"the price of {name} is not known" in said
            assert "constraints.max_usd" in said
            assert "ended at" not in said
        return
    succeeds("upload", "sagemaker", "w.yaml", *limit, "--yes")
    said = succeeds("start", "sagemaker", "w.yaml", *limit, "--yes").stderr
    assert "the run is ended at $5.00 (max_usd" in said
    assert ("counted by an estimated price" in said) == (name in ESTIMATED)


@pytest.mark.parametrize("key", ["max_usd", "max_usd_per_run"])
def test_a_parameter_at_the_start_is_checked_like_the_file(server, project, key):
    succeeds("upload", "sagemaker", "w.yaml", "--yes")
    sets = ("--set", f"constraints.{key}=5", "--set", "sagemaker.max_run_seconds=60")
    said = refused("start", "sagemaker", "w.yaml", *sets, "--param", f"InstanceType={UNPRICED}")
    assert f"the price of {UNPRICED} is not known" in said


WRONG = {
    UNHEARD: "no instance type",
    MISSPELT: "did you mean ml.g5.2xlarge",
    "ml.p5en.48xlargee": "did you mean ml.p5en.48xlarge",
    "c8i.8xlrage": "did you mean ml.c8i.8xlarge",
    "g5": "no instance type",
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("key", ["cluster.dnn.instance_type", "constraints.allowed_instance_types"])
def test_a_type_that_nobody_knows_is_refused_before_anything_is_rented(project, name, key):
    value = name if key.startswith("cluster") else f"[ml.c7i.4xlarge, {name}]"
    for verb, *more in (("compile", "--out", "p.json"), ("upload", "--yes"), ("start", "--yes")):
        said = refused(verb, "sagemaker", "w.yaml", "--set", f"{key}={value}", *more)
        assert WRONG[name] in said
        assert key in said


@pytest.mark.parametrize("verb", ["start", "schedule"])
@pytest.mark.parametrize("parameter", ["AllowedTypes", "allowed_types", "InstanceType"])
def test_a_wrong_type_in_a_parameter_starts_nothing(project, verb, parameter):
    more = ("--cron", "rate(1 day)") if verb == "schedule" else ("--yes",)
    said = refused(verb, "sagemaker", "w.yaml", "--param", f"{parameter}={MISSPELT}", *more)
    assert "did you mean ml.g5.2xlarge" in said


@pytest.mark.parametrize("name", [UNHEARD, "ml.p7-r100.48xlarge", "ml.c9i.8xlarge"])
def test_decide_keeps_a_type_without_facts_after_its_profile_was_paid(project, name):
    # As the service's newer list, or a newer stoker, let it pass.
    compiled = compile_pipeline(read_workload("w.yaml"), folder=project)
    (text,) = [text for uri, text in compiled.uploads.items() if uri.endswith("workload.json")]
    document = json.loads(text)
    document["cluster"]["dnn"]["instance_type"] = name
    document["constraints"]["allowed_instance_types"] = ["ml.c7i.4xlarge", "ml.c9i.4xlarge"]
    (project / "workload.json").write_text(json.dumps(document))
    decision = decide_step(name, project)
    assert (decision.action, decision.kind) == ("keep", "unknown")
    assert any(f"{name} is not in the catalog" in each for each in decision.warnings)
    assert any("ml.c9i.4xlarge is allowed, but" in each for each in decision.warnings)


PRICES = {
    "a missing type": ("c7i.4xlarge,0.9,2026-11-20", ""),
    "a negative price": ("c7i.4xlarge,-1,2026-11-20", "found '-1'"),
    "a price of zero": ("c7i.4xlarge,0,2026-11-20", "found '0'"),
    "no number": ("c7i.4xlarge,nan,2026-11-20", "found 'nan'"),
    "infinity": ("c7i.4xlarge,inf,2026-11-20", "found 'inf'"),
    "words": ("c7i.4xlarge,cheap,2026-11-20", "found 'cheap'"),
    "a day that is none": ("c7i.4xlarge,0.9,2026-02-30", "priced_on"),
    "a type twice": ("c7i.4xlarge,0.9,2026-11-20\nml.c7i.4xlarge,1,2026-11-20", "too"),
    "a new type without a size": ("c99.large,0.9,2026-11-20", "vCPUs are needed"),
}


def pool(name: str) -> tuple[str, ...]:
    """Returns the options for a cluster with two pools, one of them of that type."""
    size = {"cpu": 7, "memory": "28Gi"}
    pools = {name: {**size, "gpus": 1}, "c7i.4xlarge": {**size, "gpus": 0}}
    return ("--set", f"kubernetes={json.dumps({'pools': pools})}")


def with_prices(folder: Path, rows: str, *, head="instance_type,usd_per_hour,priced_on"):
    (folder / "prices.csv").write_text(f"{head}\n{rows}\n")
    return ("--set", "constraints.prices_file=prices.csv")


@pytest.mark.parametrize("case", PRICES)
@pytest.mark.parametrize("target", ["sagemaker", "kubeflow"])
def test_a_wrong_prices_file_is_refused_with_line_and_column(project, target, case):
    rows, error = PRICES[case]
    sets = with_prices(project, rows)
    sets += pool("g4dn.xlarge") if target == "kubeflow" else ()
    words = ("compile", target, "w.yaml", *sets, "--out", "p")
    if error:
        said = refused(*words)
        assert error in said
        assert "constraints.prices_file:" in said
    else:
        succeeds(*words)


def test_a_prices_file_that_is_not_there_is_refused(project):
    words = ("--set", "constraints.prices_file=none.csv", "--out", "p.json")
    assert "constraints.prices_file" in refused("compile", "sagemaker", "w.yaml", *words)


def test_the_prices_file_reaches_every_step_of_both_pipelines(project):
    sets = with_prices(project, f"{UNPRICED[3:]},40,2026-11-20\nc7i.4xlarge,0.2,2026-11-20")
    decision = decided(UNPRICED, project, *sets)
    keep = next(plan for plan in decision.plans if plan.action == "keep")
    assert keep.predicted.usd_per_hour == 40
    assert decision.prices.source.startswith("constraints.prices_file")
    # The table is in the run's inputs, not in every record.
    assert decision.constraints.prices_file is None

    from stoker.pipelines.kubeflow.compile import kubeflow_request

    words = (*on(UNPRICED), *sets, *pool(UNPRICED[3:]))
    overrides = [word for word in words if word != "--set"]
    request = kubeflow_request(read_workload("w.yaml", overrides=overrides))
    (project / "workload.json").write_text(workload_text(request.workload))
    # Elsewhere: the pod has no such file.
    (project / "prices.csv").unlink()
    kubernetes = decide_step(UNPRICED[3:], project)
    keep = next(plan for plan in kubernetes.plans if plan.action == "keep")
    assert keep.predicted.usd_per_hour == 40


def test_the_prices_file_counts_on_a_terminal_and_the_option_goes_before_it(project):
    sets = with_prices(project, "g5.8xlarge,9,2026-11-20")
    profiled("ml.g5.8xlarge", project)
    (project / "other.csv").write_text("instance_type,usd_per_hour\ng5.8xlarge,7\n")
    command = ("decide", "profile.json", "--workload", "w.yaml", *on("ml.g5.8xlarge"), *sets)

    def usd(*more: str) -> float:
        document = json.loads(succeeds(*command, "--json", "--out", "d.json", *more).stdout)
        return next(p for p in document["plans"] if p["action"] == "keep")["predicted"][
            "usd_per_hour"
        ]

    assert usd() == 9
    assert usd("--prices", "other.csv") == 7


def test_prices_of_all_types_fit_into_a_pipeline_of_kubeflow(project):
    table = ROOT / "src/stoker/catalog/aws_training_instances.csv"
    text = table.read_text().replace("us_east_1", "eu_west_1")
    lines = text.splitlines()
    # As refresh_prices writes them: both prices are of one day.
    head, source = lines[0], lines[0].split(",").index("source")
    rows = [",".join([*line.split(",")[:source], "EC2:price-api"]) for line in lines[1:]]
    (project / "prices.csv").write_text("\n".join([head, *rows]) + "\n")
    sets = ("--set", "constraints.prices_file=prices.csv", *pool("g4dn.xlarge"))
    words = (*sets, "--out", "p.yaml")
    succeeds("compile", "kubeflow", "w.yaml", *words)


def told_regions(done: Done) -> list[str]:
    return [line for line in done.stderr.splitlines() if "the hosts are in" in line]


@pytest.mark.parametrize("region", ["eu-west-1", "ap-south-1", "us-gov-east-1"])
def test_another_region_than_the_prices_is_told_in_one_line(server, project, region):
    # Not the service's: a run is only started where the double is.
    sets = ("--set", f"sagemaker.region={region}")
    profiled("ml.g5.8xlarge", project)
    words = ("decide", "profile.json", "--workload", "w.yaml", *on("ml.g5.8xlarge"), *sets)
    succeeds(*words, "--out", "d.json")
    decision = read_json(project / "d.json", Decision)
    (warning,) = [each for each in decision.warnings if "the hosts are in" in each]
    assert f"the hosts are in {region}, the prices are of us-east-1" in warning
    assert decision.prices.hosts_region == region
    assert all(plan.predicted.is_estimate for plan in decision.plans if plan.predicted)


@pytest.mark.parametrize("way", ["file", "columns", "path"])
def test_plans_are_ranked_by_the_prices_of_the_jobs_region(project, way):
    head = "instance_type,sagemaker_usd_per_hour_eu_west_1,priced_on"
    row = "g5.8xlarge,11,2026-11-20"
    if way == "columns":
        head = head.replace("1,", "1,sagemaker_usd_per_hour_us_west_2,", 1)
        head = ",".join(["instance_type,sagemaker_usd_per_hour_us_west_2", head.split(",")[1]])
        row = "g5.8xlarge,99,11"
    sets = with_prices(project, row, head=head)
    if way == "path":
        (project / "prices.csv").rename(project / "prices-eu-west-1.csv")
        sets = ("--set", "constraints.prices_file=prices-{region}.csv")
    decision = decided("ml.g5.8xlarge", project, *sets, "--set", "sagemaker.region=eu-west-1")
    keep = next(plan for plan in decision.plans if plan.action == "keep")
    assert (keep.predicted.usd_per_hour, keep.predicted.is_estimate) == (11, False)
    assert decision.prices.region == "eu-west-1"
    assert decision.prices.hosts_region is None
    # Types that the file lacks have another region's price.
    others = [plan for plan in decision.plans if plan.predicted and len(plan.groups) > 1]
    assert others
    assert all(plan.predicted.is_estimate for plan in others)


def test_a_region_without_a_file_of_its_own_has_the_catalogs_prices_and_says_so(project):
    sets = ("--set", "constraints.prices_file=prices-{region}.csv")
    decision = decided("ml.g5.8xlarge", project, *sets, "--set", "sagemaker.region=eu-west-1")
    assert decision.prices.hosts_region == "eu-west-1"


@pytest.mark.parametrize("verb", ["compile", "upload", "start"])
@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("constraints.regions=[eu-west-1]", "the prices are for region us-east-1"),
        ("constraints.max_data_hosts=5000", "max_data_hosts 5000 is too large"),
    ],
)
def test_what_decide_would_refuse_is_refused_first(project, verb, override, words):
    more = ("--out", "p.json") if verb == "compile" else ("--yes",)
    profiled("ml.g5.8xlarge", project)
    on_type = on("ml.g5.8xlarge")
    judged = ("decide", "profile.json", "--workload", "w.yaml", *on_type, "--set", override)
    assert words in refused(*judged)
    assert words in refused(verb, "sagemaker", "w.yaml", "--set", override, *more)


def test_old_prices_are_told_before_a_job_and_in_its_decision(server, project):
    sets = with_prices(project, "g5.8xlarge,11,2025-01-20")
    succeeds("upload", "sagemaker", "w.yaml", *on("ml.g5.8xlarge"), *sets, "--yes")
    started = succeeds("start", "sagemaker", "w.yaml", *on("ml.g5.8xlarge"), *sets, "--yes")
    assert "the prices of 2025-01-20 are older than 90 days" in started.stderr
    decision = decided("ml.g5.8xlarge", project, *sets)
    assert decision.prices.stale


def test_compile_and_upload_tell_another_region_in_one_line(server, project):
    for verb, *more in (("compile", "--out", "p.json"), ("upload", "--yes")):
        done = succeeds(verb, "sagemaker", "w.yaml", *more)
        (line,) = told_regions(done)
        assert "the hosts are in eu-central-1, the prices are of us-east-1" in line
        assert told_regions(succeeds(verb, "sagemaker", "w.yaml", *HERE, *more)) == []


def test_an_hourly_limit_is_not_promised_without_a_price(server, project):
    limit = (*on(UNPRICED), "--set", "constraints.max_usd_per_hour=6")
    succeeds("upload", "sagemaker", "w.yaml", *limit, "--yes")
    said = succeeds("start", "sagemaker", "w.yaml", *limit, "--yes").stderr
    assert "at most $6.00" not in said
    assert "today's price is not known" in said
    dear = (*on("ml.p4d.24xlarge"), "--set", "constraints.max_usd_per_hour=6")
    said = succeeds("start", "sagemaker", "w.yaml", *dear, "--yes").stderr
    assert "today's costs more" in said


def test_the_document_of_a_workload_holds_the_prices_themselves(project):
    with_prices(project, "g5.8xlarge,11,2026-11-20")
    sets = ["constraints.prices_file=prices.csv"]
    text = read_workload("w.yaml", overrides=sets).constraints.prices_file
    assert text == (project / "prices.csv").read_text()
