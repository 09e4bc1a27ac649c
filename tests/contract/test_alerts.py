"""The alerts and the dashboard of configs/kubernetes on Prometheus's own tool."""

import json
import shutil
import subprocess

import pytest
import yaml

from support.cluster_files import FOLDER

RUN = '{run="night-7"}'
BUSY = 'stoker_feed_busy_seconds_total{run="night-7", host="data-0", rank="0"}'
FED = 'stoker_feed_batches_total{run="night-7", host="data-0", rank="0"}'
STEPS = 'stoker_steps_total{run="night-7", rank="0"}'
# Values at each minute: begin, step and number of further ones.
MINUTES = 2000
# From this minute on, rules are evaluated every five minutes until then: each takes a millisecond.
LONG = 1000
GPU = 'stoker_gpu_utilization{run="night-7", host="gpu-0", gpu="0", UUID="GPU-1"}'
# A training that runs as it should: no alert.
SINCE, SPENT, PREDICTED, MAX, UP = (
    *(f"stoker_{name}{RUN}" for name in ("seconds_since_last_step", "spent_usd", "predicted_usd")),
    *(f"stoker_max_usd{RUN}", 'stoker_data_host_up{run="night-7", host="data-0"}'),
)
HEALTHY = {
    SINCE: f"0+0x{MINUTES}",
    SPENT: f"0+0.01x{MINUTES}",
    PREDICTED: f"20+0x{MINUTES}",
    MAX: f"100+0x{MINUTES}",
    UP: f"1+0x{MINUTES}",
    # Two workers that are busy for 60 of 120 seconds.
    BUSY: f"0+60x{MINUTES}",
    'stoker_feed_workers{run="night-7", host="data-0", rank="0"}': f"2+0x{MINUTES}",
    FED: f"0+90x{MINUTES}",
    # The trainer's own workers make some.
    FED.replace("data-0", "dnn-0"): f"0+10x{MINUTES}",
    STEPS: f"0+100x{MINUTES}",
    GPU: f"0.8+0x{MINUTES}",
    # One of two that a script leaves unused.
    GPU.replace('"0"', '"1"'): f"0+0x{MINUTES}",
}

LACKS = not shutil.which("promtool")
pytestmark = pytest.mark.skipif(LACKS, reason="needs promtool (Debian: prometheus)")


def checked(folder, *words):
    words = ("promtool", *words)
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr


def rules():
    _, rule = yaml.safe_load_all((FOLDER / "alerts.yaml").read_text())
    return rule["spec"]


def all_rules():
    return [each for group in rules()["groups"] for each in group["rules"]]


# Of each alert: what changes of a healthy training, when one looks, and what is said.
CAUSES = [
    (
        *("StokerMakesNoSteps", {SINCE: f"0+60x{MINUTES}"}, 31),
        "Run night-7 made no step for 31m 0s, and its hosts are billed",
    ),
    (
        *("StokerRunEnded", {SINCE: "0+0x60"}, 70),
        "Run night-7 has ended, or its leader does not answer; its record says how it ended",
    ),
    (
        *("StokerNothingTrained", dict.fromkeys((SINCE, STEPS, FED), "0+1x10"), 1700),
        "No run trained for 1d 4h 5m 0s",
    ),
    (
        *("StokerCostsMoreThanPredicted", {PREDICTED: f"10+0x{MINUTES}"}, 1250),
        "Run night-7 has spent $12.5, over 20% more than predicted",
    ),
    (
        *("StokerBudgetNearlySpent", {MAX: f"15+0x{MINUTES}"}, 1250),
        "Run night-7 has spent $12.5, over 80% of constraints.max_usd, at which it is ended",
    ),
    (
        *("StokerDataGroupIdle", {BUSY: f"0+12x{MINUTES}"}, 60),
        "The data workers of run night-7 are idle 90% of the time: fewer data hosts would do",
    ),
    *(
        (
            *("StokerDataGroupOfNoUse", {FED: batches}, 60),
            f"The data group of run night-7 made {share} of its batches, and it is billed",
        )
        for batches, share in ((f"0+4x{MINUTES}", "4%"), ("_", "0%"))
    ),
    (
        *("StokerGpusIdle", {GPU: f"0.02+0x{MINUTES}"}, 60),
        "No GPU of run night-7 was more than 2% busy for half an hour, and they are billed",
    ),
    (
        *("StokerDataHostDown", {UP: f"0+0x{MINUTES}"}, 20),
        "Data host data-0 of run night-7 is away; the run continues without it",
    ),
]


@pytest.mark.parametrize(("alert", "changed", "minute", "summary"), CAUSES)
def test_each_alert_fires_for_its_cause_alone(tmp_path, alert, changed, minute, summary):
    found = {each["alert"]: each for each in all_rules() if "alert" in each}
    words, values = found[alert]["annotations"]["summary"], {"run": "night-7", "host": "data-0"}
    named = {key: value for key, value in values.items() if f"$labels.{key}" in words}
    labels = found[alert]["labels"] | named
    fires = {"exp_labels": labels, "exp_annotations": {"summary": summary}}
    looks = [looked(name, minute, *([fires] if name == alert else [])) for name in found]
    play(tmp_path, {**HEALTHY, **changed}, looks)


def test_no_alert_fires_for_a_training_that_runs_as_it_should(tmp_path):
    names = [each["alert"] for each in all_rules() if "alert" in each]
    minutes = sorted({minute for _, _, minute, _ in CAUSES})
    for those in ([m for m in minutes if m < LONG], [m for m in minutes if m >= LONG]):
        play(tmp_path, HEALTHY, [looked(name, minute) for minute in those for name in names])


def looked(alert, minute, *fires):
    return {"eval_time": f"{minute}m", "alertname": alert, "exp_alerts": [*fires]}


def play(folder, series, looks):
    """Has Prometheus evaluate all rules on these series, until the last look."""
    is_long = any(int(look["eval_time"].rstrip("m")) >= LONG for look in looks)
    (folder / "rules.yaml").write_text(yaml.safe_dump(rules()))
    played = {
        "interval": "1m",
        "input_series": [{"series": key, "values": each} for key, each in series.items()],
        "alert_rule_test": looks,
    }
    every = "5m" if is_long else "1m"
    document = {"rule_files": ["rules.yaml"], "evaluation_interval": every, "tests": [played]}
    (folder / "tests.yaml").write_text(yaml.safe_dump(document))
    checked(folder, "test", "rules", "tests.yaml")


DAY_MINUTES = 24 * 60


@pytest.mark.parametrize(("hours", "between_days"), [(26, 1), (78, 3), (174, 7), (750, 31)])
@pytest.mark.parametrize("run", ["mnist-4xk2", "mnist-20261126-081500"])
def test_a_workloads_run_that_did_not_come_is_told_by_its_own_limit(
    tmp_path, hours, between_days, run
):
    """Two runs of an hour, then none; another workload trains all the time."""
    limit = {"record": "stoker:heartbeat_hours", "expr": f"vector({hours})"}
    limit["labels"] = {"workload": "mnist"}
    # Those of the heartbeat alone: the others take a minute for a month.
    names = ("stoker:trained_timestamp_seconds", "StokerRunDidNotCome")
    heartbeat = [each for each in all_rules() if each.get("record", each.get("alert")) in names]
    groups = {"groups": [{"name": "stoker", "rules": [limit, *heartbeat]}]}
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(groups))
    step, between = 30, between_days * DAY_MINUTES
    pause, end = between // step - 4, between + 60
    # A run of an hour: now, after half an hour, after an hour.
    runs = f"1+1x2 _x{pause + 1} 1+1x2"
    series = [
        {"series": f'stoker_steps_total{{run="{run}", rank="0"}}', "values": runs},
        {
            "series": 'stoker_steps_total{run="other-1", rank="0"}',
            "values": f"1+1x{3 * end // step}",
        },
    ]
    late = end + hours * 60 + 2 * 60

    def told(minute, fires):
        return {
            "expr": 'ALERTS{alertname="StokerRunDidNotCome", alertstate="firing"}',
            "eval_time": f"{minute}m",
            "exp_samples": [
                {
                    "labels": 'ALERTS{alertname="StokerRunDidNotCome", alertstate="firing", '
                    'severity="warning", workload="mnist"}',
                    "value": 1,
                }
                for _ in range(fires)
            ],
        }

    # On time, between two runs, before the limit, and two hours after it at the latest.
    moments = [(between, False), (end, False), (end + hours * 60 - 60, False), (late, True)]
    test = {
        "interval": f"{step}m",
        "input_series": series,
        "promql_expr_test": [told(minute, fires) for minute, fires in moments],
    }
    document = {"rule_files": ["rules.yaml"], "evaluation_interval": "30m", "tests": [test]}
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(document))
    checked(tmp_path, "test", "rules", "tests.yaml")


def test_prometheus_reads_each_expression_of_the_dashboard(tmp_path):
    panels = json.loads((FOLDER / "grafana.json").read_text())["panels"]
    found = [
        {"record": f"panel:{number}", "expr": each["expr"].replace("$__rate_interval", "5m")}
        for number, each in enumerate(each for panel in panels for each in panel["targets"])
    ]
    assert found
    groups = {"groups": [*rules()["groups"], {"name": "panels", "rules": found}]}
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(groups))
    checked(tmp_path, "check", "rules", "--lint-fatal", "rules.yaml")
