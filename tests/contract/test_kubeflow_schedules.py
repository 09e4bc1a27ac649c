"""`stoker schedule kubeflow` makes recurring runs of both forms, on a fixed or latest version."""

import contextlib
import io
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from stoker.cli.edge import run
from stoker.errors import PlatformError, UsageError
from stoker.orchestrators.base import Schedule, Timing
from stoker.orchestrators.kubeflow.runs import RunOptions
from stoker.records import Json, to_json
from support import sample_records
from support.kfp_server import KfpServer
from support.kubeflow_orchestrator import WORKLOAD, target_at, upload, workload

pytestmark = pytest.mark.usefixtures("quick_kfp")

NIGHTLY = Timing(expression="0 0 3 * * *")


@pytest.fixture
def server() -> Iterator[KfpServer]:
    with KfpServer() as made:
        yield made
    assert made.problems == []


@pytest.fixture
def file(tmp_path: Path, server: KfpServer) -> str:
    path = tmp_path / "w.yaml"
    document = json.loads(json.dumps(WORKLOAD))
    document["kubernetes"]["kubeflow"] = {"host": server.url}
    path.write_text(yaml.safe_dump(document))
    return str(path)


def stoker(*words: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run([*words])
    return code, out.getvalue(), err.getvalue()


def add(
    server: KfpServer,
    *parameters: str,
    timing: Timing = NIGHTLY,
    name: str | None = None,
    options: RunOptions | None = None,
) -> Schedule:
    target = target_at(server, options=options)
    return target.schedule(workload(), timing=timing, parameters=parameters, name=name)


def body(server: KfpServer) -> dict[str, Json]:
    found = server.last("POST /recurringruns").body
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(("version", "told"), [("2.16.1", "is 2.16.1"), ("unknown", "does not")])
def test_a_server_that_counts_no_runs_of_the_latest_version_gets_a_fixed_one(
    server: KfpServer, version: str, told: str
) -> None:
    server.version = version
    uploaded = upload(server)
    made = add(server)
    reference = {"pipeline_id": uploaded.id, "pipeline_version_id": uploaded.version_id}
    assert body(server)["pipeline_version_reference"] == reference
    assert f"fixed, for this Kubeflow Pipelines {told}" in made.note
    assert add(server).note == made.note
    asked = add(server, options=RunOptions(version="latest"))
    assert body(server)["pipeline_version_reference"] == {"pipeline_id": uploaded.id}
    assert "fixed" not in asked.note


def test_an_upload_names_the_schedules_that_start_an_older_version(server: KfpServer) -> None:
    server.version = "2.16.1"
    assert upload(server).notes == ()
    add(server)
    add(server, name="latest", options=RunOptions(version="latest"))
    done = upload(server, "feed.credits=5")
    assert done.notes == ("schedule stoker-mnist still starts an older version: make it again",)
    add(server)
    assert upload(server, "feed.credits=5").notes == ()


def test_a_schedule_without_cache_profiles_at_each_start(server: KfpServer) -> None:
    upload(server)
    add(server, options=RunOptions(no_cache=True))
    assert body(server)["runtime_config"] == {"parameters": {"cache_days": 0}}


def test_cron_on_the_latest_version_with_catch_up_off(server: KfpServer, file: str) -> None:
    uploaded = upload(server)
    code, out, err = stoker(
        "schedule", "kubeflow", file, "--cron", "30 6 * * 1-5", "--param", "epochs=20"
    )
    assert code == 0, err
    sent = body(server)
    assert sent["trigger"] == {"cron_schedule": {"cron": "0 30 6 * * 1-5"}}
    assert sent["pipeline_version_reference"] == {"pipeline_id": uploaded.id}
    assert (sent["mode"], sent["no_catchup"], sent["max_concurrency"]) == ("ENABLE", True, "1")
    assert sent["runtime_config"] == {"parameters": {"epochs": 20}}
    assert out.startswith("created: stoker-mnist")
    assert "the latest version, 1 run at a time, no catch-up" in out
    assert f"/#/recurringrun/details/{server.kept['recurringruns'][0]['recurring_run_id']}" in out
    assert f"delete:  stoker schedule kubeflow {file} --delete stoker-mnist" in out


def test_the_command_that_deletes_a_schedule_names_the_same_pipeline(
    server: KfpServer, file: str
) -> None:
    upload(server)
    words = ("--set", "name=mnist", "--host", server.url)
    code, out, err = stoker("schedule", "kubeflow", file, "--every", "1d", *words)
    assert code == 0, err
    assert f"--delete stoker-mnist --set name=mnist --host {server.url}\n" in out


def test_a_period_on_a_fixed_version_with_catch_up(server: KfpServer, file: str) -> None:
    uploaded = upload(server)
    options = ("--version", "current", "--catch-up", "--max-concurrency", "3")
    code, out, err = stoker(
        "schedule", "kubeflow", file, "--every", "12h", "--name", "often", *options
    )
    assert code == 0, err
    sent = body(server)
    assert sent["display_name"] == "stoker-mnist-often"
    assert sent["trigger"] == {"periodic_schedule": {"interval_second": "43200"}}
    assert sent["pipeline_version_reference"] == {
        "pipeline_id": uploaded.id,
        "pipeline_version_id": uploaded.version_id,
    }
    assert (sent["no_catchup"], sent["max_concurrency"]) == (False, "3")
    assert "every 12 h" in out


def test_account_and_experiment_go_with_a_schedule(server: KfpServer) -> None:
    upload(server)
    add(server, options=RunOptions(experiment="weekly", service_account="robot"))
    (experiment,) = server.kept["experiments"]
    assert experiment["display_name"] == "weekly"
    assert body(server)["experiment_id"] == experiment["experiment_id"]
    assert body(server)["service_account"] == "robot"


def test_the_same_schedule_again_sends_nothing(server: KfpServer) -> None:
    upload(server)
    assert add(server, "epochs=3").action == "created"
    assert add(server, "epochs=3").action == "unchanged"
    assert server.sent().count("POST /recurringruns") == 1


@pytest.mark.parametrize(
    ("parameters", "timing", "options"),
    [
        (["epochs=4"], NIGHTLY, RunOptions()),
        (["epochs=3"], Timing(expression="0 0 4 * * *"), RunOptions()),
        (["epochs=3"], Timing(expression="every 1 d"), RunOptions()),
        (["epochs=3"], NIGHTLY, RunOptions(max_concurrency=2)),
        (["epochs=3"], NIGHTLY, RunOptions(catch_up=True)),
        (["epochs=3"], NIGHTLY, RunOptions(version="current")),
        (["epochs=3"], NIGHTLY, RunOptions(service_account="robot")),
        (["epochs=3"], NIGHTLY, RunOptions(experiment="other")),
    ],
)
def test_a_schedule_that_changes_is_replaced_and_the_new_one_comes_first(
    server: KfpServer, parameters: list[str], timing: Timing, options: RunOptions
) -> None:
    upload(server)
    before = add(server, "epochs=3")
    after = add(server, *parameters, timing=timing, options=options)
    assert (after.action, after.name) == ("updated", before.name)
    assert [item["recurring_run_id"] for item in server.kept["recurringruns"]] == [after.id]
    lines = [request.line for request in server.requests]
    assert lines.index(f"DELETE /recurringruns/{before.id}") > max(
        index for index, line in enumerate(lines) if line == "POST /recurringruns"
    )


def test_a_schedule_that_somebody_turned_off_is_turned_on_again(server: KfpServer) -> None:
    upload(server)
    add(server)
    server.kept["recurringruns"][0]["status"] = "DISABLED"
    assert add(server).action == "updated"


def test_parameters_that_a_schedule_would_lose_are_named_and_kept_when_named_again(
    server: KfpServer, file: str
) -> None:
    upload(server)
    daily = ("schedule", "kubeflow", file, "--cron", "0 6 * * *")
    gate = "gate=accuracy>=0.9, loss<=0.2"
    for words in (("--param", gate, "--no-cache"), ("--param", gate, "--no-cache")):
        code, _, said = stoker(*daily, *words)
        assert (code, "replaced" in said) == (0, False)
    _, made, said = stoker(*daily, "--json", "--yes")
    assert f"replaced by the pipeline's defaults: cache_days=0, {gate}" in said
    assert json.loads(made)["parameters"] == {}


def test_a_profile_that_a_schedule_would_lose_is_named_and_not_typed_again(
    server: KfpServer, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def say_no(*_: object, refused: UsageError, **__: object) -> None:
        raise refused

    upload(server)
    daily = ("schedule", "kubeflow", file, "--cron", "0 6 * * *")
    profile = to_json(sample_records.profile())
    code, _, said = stoker(*daily, "--param", f"reuse_profile={profile}", "--param", "epochs=3")
    assert code == 0, said
    monkeypatch.setattr("stoker.cli.pipelines.ask", say_no)
    _, _, said = stoker(*daily)
    fix = said.partition("try:")[2]
    assert "--param reuse_profile=... " in fix
    assert "--param epochs=3" in fix
    assert "to keep them (...: as in the schedule), or --yes" in fix
    assert len(fix) < 200


def test_an_old_schedule_stays_if_the_new_one_is_refused(server: KfpServer) -> None:
    upload(server)
    before = add(server)
    server.trouble("POST /recurringruns", 500, '{"message": "no"}')
    with pytest.raises(PlatformError):
        add(server, "epochs=5")
    assert [item["recurring_run_id"] for item in server.kept["recurringruns"]] == [before.id]


def test_schedules_of_other_pipelines_are_neither_shown_nor_replaced(
    server: KfpServer, file: str
) -> None:
    upload(server)
    add(server)
    foreign = {**server.kept["recurringruns"][0], "recurring_run_id": "foreign"}
    foreign["pipeline_version_reference"] = {"pipeline_id": "another"}
    server.kept["recurringruns"].append(foreign)
    add(server, "epochs=9")
    assert "foreign" in [item["recurring_run_id"] for item in server.kept["recurringruns"]]
    assert len(target_at(server).schedules(workload())) == 1


def test_a_list_says_when_next_and_with_what(server: KfpServer, file: str) -> None:
    upload(server)
    add(server, "epochs=3")
    add(server, timing=Timing(expression="every 90 s"), name="often")
    server.kept["recurringruns"][0]["status"] = "DISABLED"
    code, out, _ = stoker("schedule", "kubeflow", file, "--list", "--json")
    nightly, often = json.loads(out)
    assert code == 0
    assert (nightly["name"], nightly["is_on"], nightly["next_run"]) == ("stoker-mnist", False, None)
    assert nightly["parameters"] == {"epochs": "3"}
    assert often["timing"] == {"expression": "every 90 s", "time_zone": "UTC"}
    assert datetime.fromisoformat(often["next_run"]).tzinfo is not None


def test_the_next_start_of_a_period_counts_from_its_beginning(server: KfpServer) -> None:
    upload(server)
    target = target_at(server)
    target._now = lambda: datetime(2026, 11, 20, 23, 0, tzinfo=UTC)
    made = target.schedule(
        workload(), timing=Timing(expression="every 6 h"), parameters=(), name=None
    )
    created = datetime.fromisoformat(str(server.kept["recurringruns"][0]["created_at"]))
    assert made.next_run is not None
    assert (made.next_run - created).total_seconds() == 18 * 3600


def test_delete_by_name_and_by_id(server: KfpServer, file: str) -> None:
    upload(server)
    add(server)
    second = add(server, name="often")
    assert stoker("schedule", "kubeflow", file, "--delete", "often")[1] == (
        "deleted: stoker-mnist-often\n"
    )
    third = add(server, name="often")
    assert third.id != second.id
    target_at(server).unschedule(workload(), name=third.id)
    assert [item["display_name"] for item in server.kept["recurringruns"]] == ["stoker-mnist"]
    code, _, err = stoker("schedule", "kubeflow", file, "--delete", "oftn")
    assert code == 2
    assert "has no schedule oftn" in err
    assert "stoker-mnist" in err


def test_two_of_one_name_are_deleted_by_id_only(server: KfpServer) -> None:
    upload(server)
    made = add(server)
    server.kept["recurringruns"].append(
        {**server.kept["recurringruns"][0], "recurring_run_id": "twin"}
    )
    with pytest.raises(UsageError, match=f"--delete with an id: twin, {made.id}"):
        target_at(server).unschedule(workload(), name="stoker-mnist")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--cron", "0 3 * * ? *"], "month ? is not from 1 to 12"),
        (["--cron", "0 3 * * *", "--time-zone", "Europe/Berlin"], "has no time zone"),
        (["--every", "10s"], "not a period of a minute or more"),
        (["--cron", "0 3 * * *", "--max-concurrency", "11"], "Kubeflow takes 1 to 10"),
        (["--cron", "0 3 * * *", "--param", "epoch=1"], "did you mean epochs?"),
        (["--cron", "0 3 * * *", "--version", "none"], "has no version none"),
        (["--list", "--version", "current"], "--list does not take --param"),
    ],
)
def test_what_cannot_be_scheduled_is_refused_and_nothing_made(
    server: KfpServer, file: str, words: list[str], said: str
) -> None:
    upload(server)
    code, _, err = stoker("schedule", "kubeflow", file, *words)
    assert code == 2, err
    assert said in err
    assert server.kept["recurringruns"] == []


def test_many_users_schedules_are_those_of_the_namespace(server: KfpServer, file: str) -> None:
    server.multi_user = True
    words = ("--namespace", "ada")
    upload(server, namespace="ada")
    assert stoker("schedule", "kubeflow", file, "--every", "1d", *words)[0] == 0
    assert "stoker-mnist" in stoker("schedule", "kubeflow", file, "--list", *words)[1]
    assert stoker("schedule", "kubeflow", file, "--list", "--namespace", "bob")[0] == 2
