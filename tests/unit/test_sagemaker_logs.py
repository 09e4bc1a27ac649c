import pytest
from botocore.stub import Stubber

from stoker.logs import Log
from stoker.platforms.aws import Aws
from stoker.platforms.sagemaker.logs import (
    HOLD_SECONDS,
    LOG_GROUP,
    MAX_PAGES,
    UNKNOWN,
    JobLogs,
    Labels,
    LogEntry,
)
from support.aws_answers import Clock
from support.log_stubs import stubbed_logs

GROUPS = ("dnn", "data")
ROLE = "stoker 2026-11-20T08:00:00.000Z run=job host={host} host_role group={group} role=x"


def entry(host: str, text: str, millis: int = 0) -> LogEntry:
    return LogEntry(millis=millis, host=host, text=text)


def role(host: str, group: str) -> LogEntry:
    return entry(host, ROLE.format(host=host, group=group))


def shown(labels: Labels, *entries: LogEntry, now: float = 0.0) -> list[str]:
    return [f"{x.group}/{x.host} {x.text}" for x in labels.label(entries, now=now)]


def test_lines_before_the_group_is_known_wait_and_keep_their_order():
    labels = Labels(GROUPS)
    assert shown(labels, entry("algo-1", "early"), entry("algo-2", "other")) == []
    lines = shown(labels, role("algo-1", "data"), entry("algo-1", "late"))
    assert [line.split()[1] for line in lines] == ["early", "stoker", "late"]
    assert {line.split()[0] for line in lines} == {"data/algo-1"}
    # What is held at the end is not lost.
    assert [(x.group, x.text) for x in labels.flush()] == [(UNKNOWN, "other")]
    assert list(labels.flush()) == []


def test_a_host_whose_group_is_never_told_is_shown_without_one_after_a_while():
    labels = Labels(GROUPS)
    assert shown(labels, entry("algo-1", "hello")) == []
    assert shown(labels, now=HOLD_SECONDS - 0.1) == []
    assert shown(labels, now=HOLD_SECONDS) == [f"{UNKNOWN}/algo-1 hello"]
    assert shown(labels, role("algo-1", "dnn"), now=HOLD_SECONDS)[0].startswith("dnn/algo-1")


def test_the_leaders_roster_tells_the_groups_of_all_hosts(capsys):
    Log(run="job", host="algo-3").event(
        "roster",
        groups='{"dnn":{"role":"dnn","type":"ml.g5.xlarge","hosts":["algo-3"]},'
        '"data":{"role":"data","type":"ml.c5.xlarge","hosts":["algo-2","algo-1"]}}',
    )
    line = capsys.readouterr().err.strip()
    labels = Labels(GROUPS)
    assert shown(labels, entry("algo-1", "a"), entry("algo-2", "b")) == []
    assert shown(labels, entry("algo-3", line))[:2] == ["data/algo-1 a", "data/algo-2 b"]
    assert labels.roster == {"algo-3": "dnn", "algo-2": "data", "algo-1": "data"}


ROSTER = "stoker T run=job host=algo-1 roster groups="


@pytest.mark.parametrize(
    "line",
    [
        *(f"{ROSTER}'{groups}'" for groups in ("", "[1, 2]", "{", '{"dnn": 3}')),
        ROSTER + '\'{"dnn": {"hosts": [1]}}\'',
        "the roster of the team",
        # The line of another host, and a script's in the middle of its own.
        ROLE.format(host="algo-2", group="data"),
        "see: " + ROLE.format(host="algo-1", group="data"),
    ],
)
def test_a_line_that_is_none_of_the_hosts_launcher_names_no_group(line):
    labels = Labels(GROUPS)
    assert shown(labels, entry("algo-1", line), entry("algo-2", "x")) == []
    assert labels.roster == {}


def test_a_job_of_one_group_needs_no_roster():
    # There the service calls the group homogeneousCluster; the plan's name is what people know.
    labels = Labels(["dnn"])
    assert shown(labels, entry("algo-1", "first")) == ["dnn/algo-1 first"]
    assert shown(labels, role("algo-1", "homogeneousCluster"))[0].startswith("dnn/algo-1")


@pytest.fixture
def stub():
    with stubbed_logs() as made:
        yield made


def logs_of(stub: Stubber, num_hosts: int | None = 1, *, clock: Clock | None = None) -> JobLogs:
    clock = clock or Clock()
    aws = Aws(clients={"logs": stub.client}, sleep=clock.sleep, clock=clock)
    return JobLogs(aws, job_name="job", num_hosts=num_hosts)


def streams(stub: Stubber, *names: str, sent: str = "", gives: str = "") -> None:
    asked = {"logGroupName": LOG_GROUP, "logStreamNamePrefix": "job/"}
    listed = [{"logStreamName": name} for name in names]
    stub.add_response(
        "describe_log_streams",
        {"logStreams": listed, **({"nextToken": gives} if gives else {})},
        asked | ({"nextToken": sent} if sent else {}),
    )


def asked_of(stream: str, **more: object) -> dict[str, object]:
    return {"logGroupName": LOG_GROUP, "logStreamName": stream, "startFromHead": True, **more}


def page(stub, stream, *events, sent=None, gives, **more):
    asked = asked_of(stream, **({"nextToken": sent} if sent else {}), **more)
    listed = [{"timestamp": at, "message": text, "ingestionTime": at} for at, text in events]
    stub.add_response("get_log_events", {"events": listed, "nextForwardToken": gives}, asked)


def texts(entries: list[LogEntry]) -> list[str]:
    return [f"{x.host} {x.text}" for x in entries]


def test_hosts_are_merged_by_time_and_pages_are_read_to_the_last(stub):
    one, two, again = "job/algo-1-1700000000", "job/algo-2-1700000001", "job/algo-2-1700003600"
    streams(stub, one, gives="more")
    streams(stub, two, sent="more")
    page(stub, one, (1, "a"), gives="t1")
    # CloudWatch gives empty pages with more behind them: only a repeated token is the end.
    page(stub, one, sent="t1", gives="t2")
    page(stub, one, (5, "c\r\nd\n\ne\n"), sent="t2", gives="t3")
    page(stub, one, sent="t3", gives="t3")
    page(stub, two, (3, "b\n"), gives="u1")
    page(stub, two, sent="u1", gives="u1")
    clock = Clock()
    logs = logs_of(stub, num_hosts=2, clock=clock)
    assert texts(logs.read()) == [
        *("algo-1 a", "algo-2 b", "algo-1 c", "algo-1 d", "algo-1 ", "algo-1 e")
    ]
    # A host that is started again has a second stream.
    clock.now += 3600
    streams(stub, one, two, again)
    page(stub, one, sent="t3", gives="t3")
    page(stub, two, (9, "d"), sent="u1", gives="u2")
    page(stub, two, sent="u2", gives="u2")
    page(stub, again, (10, "e"), gives="v")
    page(stub, again, sent="v", gives="v")
    assert texts(logs.read()) == ["algo-2 d", "algo-2 e"]


def test_a_token_that_is_no_longer_valid_loses_and_repeats_nothing(stub):
    name = "job/algo-1-1"
    streams(stub, name)
    page(stub, name, (1, "a"), (7, "b"), (7, "c"), gives="old")
    page(stub, name, sent="old", gives="old")
    logs = logs_of(stub)
    assert len(logs.read()) == 3
    stub.add_client_error(
        "get_log_events",
        "InvalidParameterException",
        "The specified nextToken is invalid.",
        expected_params=asked_of(name, nextToken="old"),
    )
    page(stub, name, (7, "b"), (7, "c"), (7, "d"), (9, "e"), gives="new", startTime=7)
    page(stub, name, sent="new", gives="new")
    assert texts(logs.read()) == ["algo-1 d", "algo-1 e"]


def test_a_long_log_leaves_other_things_their_turn(stub):
    name = "job/algo-1-1"
    streams(stub, name)
    for number in range(MAX_PAGES):
        sent = {"sent": f"t{number}"} if number else {}
        page(stub, name, (number, str(number)), gives=f"t{number + 1}", **sent)
    logs = logs_of(stub)
    assert len(logs.read()) == MAX_PAGES
    assert logs.is_behind
    page(stub, name, sent=f"t{MAX_PAGES}", gives=f"t{MAX_PAGES}")
    assert logs.read() == []
    assert not logs.is_behind


@pytest.mark.parametrize("operation", ["describe_log_streams", "get_log_events"])
def test_no_log_yet_is_an_empty_log(stub, operation):
    if operation == "get_log_events":
        streams(stub, "job/algo-1-1")
    stub.add_client_error(operation, "ResourceNotFoundException", "not there")
    assert logs_of(stub).read() == []
