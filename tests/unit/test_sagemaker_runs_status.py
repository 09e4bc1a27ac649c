"""Recorded answers of the service tell a run's state, and how it is followed and stopped."""

import json

import pytest

from stoker import orchestrators
from stoker.cli import pipelines
from stoker.errors import PlatformError, TerminatedError, UsageError
from stoker.orchestrators import PATIENCE_SECONDS, follow_run
from stoker.orchestrators.base import RunState, StepState
from stoker.orchestrators.sagemaker import SageMakerOrchestrator
from stoker.orchestrators.sagemaker.compile import ONLY_RUN
from stoker.orchestrators.sagemaker.pipelines import SageMakerPipeline
from stoker.orchestrators.sagemaker.runs import (
    POLL_SECONDS,
    STOP_SECONDS,
    checked_parameters,
    region_in,
)
from stoker.records import Json
from support.sagemaker_orchestrator import (
    ARN,
    EXECUTION,
    LAUNCHED,
    PIPELINE,
    RUN,
    Recorded,
    at,
    processing,
    recorded,
    step,
    training_job,
    workload,
)

OF = workload()
REACH = pipelines.RunReach()
TAKEN = step(
    "NeedsProfile", "Succeeded", EndTime=at(1), Metadata={"Condition": {"Outcome": "True"}}
)
PROFILE = step(
    "Profile",
    "Succeeded",
    EndTime=at(3),
    Metadata={"TrainingJob": {"Arn": f"{ARN}:training-job/pipelines-abc-Profile"}},
)
DECIDE = step("Decide", "Succeeded", EndTime=at(4), Metadata=processing("pipelines-abc-Decide"))
TRAINING = step("Train", "Executing", Metadata=processing("pipelines-abc-Train"))
TRAINED = step("Train", "Succeeded", EndTime=at(9), Metadata=processing("pipelines-abc-Train"))


def looked_at(
    status: str,
    *steps: dict[str, object],
    launched: dict[str, object] | None = None,
    reason: str = "",
) -> RunState:
    answers = recorded()
    answers.add_state(status, steps, of=OF, launched=launched, reason=reason)
    state = SageMakerOrchestrator(aws=answers.aws()).status(EXECUTION)
    answers.stubber.assert_no_pending_responses()
    return state


def steps_of(state: RunState) -> dict[str, StepState]:
    return {found.name: found for found in state.steps}


def test_a_run_is_told_with_its_parameters_and_times() -> None:
    state = looked_at("Executing", TAKEN, PROFILE)
    assert (state.run, state.pipeline, state.status) == (RUN, "mnist", "running")
    assert state.parameters == {"Epochs": "3"}
    assert (state.began, state.ended) == (at(0), None)
    assert not state.has_ended


def test_steps_stand_in_the_pipelines_order_with_those_to_come() -> None:
    state = looked_at("Executing", TAKEN, DECIDE, PROFILE)
    told = [(found.name, found.depth, found.status) for found in state.steps]
    assert told == [
        ("NeedsProfile", 0, "succeeded"),
        ("Profile", 1, "succeeded"),
        ("Decide", 1, "succeeded"),
        ("Train", 1, "waiting"),
        ("Gate", 1, "waiting"),
        ("Register", 2, "waiting"),
        ("Refuse", 2, "waiting"),
    ]


def test_the_branch_that_a_condition_did_not_take_is_left_out() -> None:
    other = {**TAKEN, "Metadata": {"Condition": {"Outcome": "False"}}}
    state = looked_at("Executing", other)
    assert [found.name for found in state.steps] == ["NeedsProfile", "DecideAgain"]
    assert state.steps[0].outcome == "False"


def test_before_a_condition_is_known_both_its_branches_are_there() -> None:
    names = [found.name for found in looked_at("Executing").steps]
    assert {"Profile", "DecideAgain"} <= set(names)


def test_jobs_are_linked_by_their_kind() -> None:
    steps = steps_of(looked_at("Executing", TAKEN, PROFILE, DECIDE))
    assert steps["Profile"].url.endswith("#/jobs/pipelines-abc-Profile")
    assert steps["Decide"].url.endswith("#/processing-jobs/pipelines-abc-Decide")
    assert "region=eu-central-1" in steps["Decide"].url


def test_the_job_that_train_started_stands_below_it_with_its_groups() -> None:
    state = looked_at("Executing", TAKEN, TRAINING, launched=training_job("InProgress", "Training"))
    names = [found.name for found in state.steps]
    assert names.index(f"job {LAUNCHED}") == names.index("Train") + 1
    job = steps_of(state)[f"job {LAUNCHED}"]
    assert job.depth == 2
    assert job.kind == "dnn 1 x ml.g4dn.xlarge, data 2 x ml.c5.2xlarge"
    assert job.reason == "Training"


def test_a_train_step_whose_job_is_not_there_yet_stands_alone() -> None:
    answers = recorded()
    answers.add_state("Executing", [TAKEN, TRAINING], of=OF)
    answers.add("list_training_jobs", {"TrainingJobSummaries": []})
    answers.refuse("describe_training_job", "ValidationException", "Requested resource not found.")
    state = SageMakerOrchestrator(aws=answers.aws()).status(EXECUTION)
    assert f"job {LAUNCHED}" not in steps_of(state)


def test_the_gates_words_are_the_reason_of_the_step_that_refuses() -> None:
    refused = step(
        "Refuse", "Failed", EndTime=at(9), Metadata={"Fail": {"ErrorMessage": "accuracy 0.8 < 0.9"}}
    )
    state = looked_at(
        "Failed",
        TAKEN,
        TRAINED,
        refused,
        launched=training_job("Completed", "Completed"),
        reason="Step failure: One or multiple steps failed",
    )
    assert steps_of(state)["Refuse"].reason == "accuracy 0.8 < 0.9"
    assert state.exit_code == 3
    assert state.ended == at(50)


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("AlgorithmError: , exit code: 1", 6),
        ("AlgorithmError: See job logs for more information", 6),
        ("AlgorithmError: , exit code: 4", 4),
        ("AlgorithmError: , exit code: 3", 3),
        ("CapacityError: Unable to provision requested ML compute capacity", 4),
        ("ClientError: the role cannot be assumed", 4),
    ],
)
def test_the_exit_code_says_whose_failure_it_is(reason: str, code: int) -> None:
    failed = {**DECIDE, "StepStatus": "Failed", "FailureReason": reason}
    assert looked_at("Failed", TAKEN, PROFILE, failed).exit_code == code


def test_a_failed_training_counts_more_than_the_gate_that_then_refuses() -> None:
    refused = step("Refuse", "Failed", Metadata={"Fail": {"ErrorMessage": "no model"}})
    failed = {**TRAINED, "StepStatus": "Failed", "FailureReason": "AlgorithmError: exit code: 6"}
    launched = training_job("Failed", "Failed", "AlgorithmError: out of memory, exit code: 1")
    assert looked_at("Failed", TAKEN, failed, refused, launched=launched).exit_code == 6


def test_a_stopped_run_is_the_platforms() -> None:
    stopped = {**TRAINING, "StepStatus": "Stopped"}
    state = looked_at("Stopped", TAKEN, stopped, launched=training_job("Stopped", "Stopped"))
    assert state.exit_code == 4


def test_what_was_not_run_in_an_ended_run_does_not_wait() -> None:
    failed = {**PROFILE, "StepStatus": "Failed", "FailureReason": "AlgorithmError: exit code: 1"}
    assert steps_of(looked_at("Failed", TAKEN, failed))["Decide"].status == "not run"


def test_attempts_and_results_of_earlier_runs_are_told() -> None:
    cached = {**PROFILE, "CacheHitResult": {"SourcePipelineExecutionArn": EXECUTION}}
    again = {**DECIDE, "AttemptCount": 2}
    steps = steps_of(looked_at("Executing", TAKEN, cached, again))
    assert steps["Profile"].is_cached
    assert steps["Decide"].attempts == 2


def test_a_training_job_by_itself_is_told_with_its_way() -> None:
    answers = recorded()
    answer = {
        **training_job("Failed", "Failed", "AlgorithmError: exit code: 7"),
        "SecondaryStatusTransitions": [
            {"Status": "Starting", "StartTime": at(3), "EndTime": at(5)},
            {"Status": "Training", "StartTime": at(5), "EndTime": at(9)},
        ],
    }
    answers.add("describe_training_job", answer, TrainingJobName=LAUNCHED)
    state = SageMakerOrchestrator(aws=answers.aws()).status(f"{ARN}:training-job/{LAUNCHED}")
    assert (state.run, state.status, state.exit_code) == (LAUNCHED, "failed", 6)
    assert [found.name for found in state.steps] == [f"job {LAUNCHED}", "Starting", "Training"]
    assert state.steps[2].ended == at(9)


def test_a_pipelines_name_means_its_newest_run() -> None:
    answers = recorded()
    answers.add("describe_pipeline", {"PipelineName": "mnist", "PipelineArn": PIPELINE})
    answers.add(
        "list_pipeline_executions",
        {
            "PipelineExecutionSummaries": [
                {"PipelineExecutionArn": f"{PIPELINE}/execution/old", "StartTime": at(0)},
                {"PipelineExecutionArn": EXECUTION, "StartTime": at(5)},
            ]
        },
    )
    answers.add_state("Executing", [TAKEN], of=OF)
    assert SageMakerOrchestrator(aws=answers.aws()).status("mnist").run == RUN


def test_a_name_that_is_neither_pipeline_nor_job_is_refused() -> None:
    answers = recorded()
    answers.refuse("describe_pipeline", "ResourceNotFound", "Pipeline mnits does not exist.")
    answers.refuse("describe_training_job", "ValidationException", "Requested resource not found.")
    with pytest.raises(UsageError, match="no pipeline and no training job mnits"):
        SageMakerOrchestrator(aws=answers.aws()).status("mnits")


def test_a_missing_permission_is_not_taken_for_a_missing_run() -> None:
    answers = recorded()
    answers.refuse(
        "describe_pipeline",
        "AccessDeniedException",
        "User is not authorized to perform: sagemaker:DescribePipeline on resource",
    )
    with pytest.raises(PlatformError, match="sagemaker:DescribePipeline"):
        SageMakerOrchestrator(aws=answers.aws()).status("mnist")


@pytest.mark.parametrize("run", [EXECUTION, f"{ARN}:training-job/{LAUNCHED}", PIPELINE])
def test_an_arn_names_its_region(run: str) -> None:
    assert region_in(run) == "eu-central-1"


def test_a_name_names_no_region() -> None:
    assert region_in(RUN) is None


def follow(answers: Recorded) -> tuple[RunState, list[str]]:
    aws = answers.aws()
    lines: list[str] = []
    state = follow_run(
        SageMakerOrchestrator(aws=aws),
        EXECUTION,
        on_change=lambda found: lines.append(f"{found.name} {found.status} {found.reason}".strip()),
        sleep=aws.sleep,
        clock=aws.clock,
    )
    return state, lines


def test_following_tells_each_change_of_a_step_once() -> None:
    answers = recorded()
    running = {**PROFILE, "StepStatus": "Executing"}
    answers.add_state("Executing", [TAKEN, running], of=OF)
    answers.add_state("Executing", [TAKEN, running], of=OF)
    answers.add_state("Succeeded", [TAKEN, PROFILE], of=OF)
    state, lines = follow(answers)
    assert lines == ["NeedsProfile succeeded", "Profile running", "Profile succeeded"]
    assert state.exit_code == 0


def test_following_outlasts_a_service_that_is_away_for_a_while() -> None:
    answers = recorded()
    answers.add_state("Executing", [TAKEN], of=OF)
    for _ in range(3):
        answers.refuse("describe_pipeline_execution", "ThrottlingException", "Rate exceeded")
    answers.add_state("Succeeded", [TAKEN], of=OF)
    state, _ = follow(answers)
    assert state.status == "succeeded"


def test_following_ends_where_the_service_stays_away() -> None:
    answers = recorded()
    for _ in range(1000):
        answers.refuse("describe_pipeline_execution", "ThrottlingException", "Rate exceeded")
    with pytest.raises(PlatformError, match="throttled"):
        follow(answers)
    assert PATIENCE_SECONDS <= answers.seconds < PATIENCE_SECONDS + 60


def test_a_run_that_is_not_seen_at_once_is_waited_for() -> None:
    answers = recorded()
    answers.refuse("describe_pipeline_execution", "ResourceNotFound", "does not exist")
    answers.add_state("Succeeded", [TAKEN], of=OF)
    state, _ = follow(answers)
    assert state.status == "succeeded"


def test_a_missing_permission_ends_the_following_at_once() -> None:
    answers = recorded()
    answers.refuse("describe_pipeline_execution", "AccessDeniedException", "not authorized")
    with pytest.raises(PlatformError, match="permission"):
        follow(answers)
    assert answers.slept == []


def stop(answers: Recorded) -> RunState:
    return SageMakerOrchestrator(aws=answers.aws()).stop(EXECUTION)


def test_a_run_is_stopped_and_waited_for() -> None:
    answers = recorded()
    answers.add_state("Executing", [TAKEN, PROFILE], of=OF)
    answers.add("stop_pipeline_execution", {"PipelineExecutionArn": EXECUTION})
    answers.add_state("Stopping", [TAKEN, PROFILE], of=OF)
    answers.add_state("Stopped", [TAKEN, PROFILE], of=OF)
    assert stop(answers).status == "stopped"
    answers.stubber.assert_no_pending_responses()


def test_a_run_that_has_ended_is_not_stopped() -> None:
    answers = recorded()
    answers.add_state("Succeeded", [TAKEN], of=OF)
    answers.add_state("Succeeded", [TAKEN], of=OF)
    assert stop(answers).status == "succeeded"


def test_the_job_that_a_stopped_run_left_running_is_stopped_once() -> None:
    answers = recorded()
    stopped = {**TRAINING, "StepStatus": "Stopped"}
    going = training_job("InProgress", "Training")
    answers.add_state("Executing", [TAKEN, TRAINING], of=OF, launched=going)
    answers.add("stop_pipeline_execution", {"PipelineExecutionArn": EXECUTION})
    answers.add_state("Stopped", [TAKEN, stopped], of=OF, launched=going)
    answers.add("stop_training_job", {}, TrainingJobName=LAUNCHED)
    stopping = training_job("Stopping", "Stopping")
    answers.add_state("Stopped", [TAKEN, stopped], of=OF, launched=stopping)
    ended = training_job("Stopped", "Stopped")
    answers.add_state("Stopped", [TAKEN, stopped], of=OF, launched=ended)
    assert stop(answers).status == "stopped"
    answers.stubber.assert_no_pending_responses()


def test_a_job_on_a_further_plan_is_shown_and_stopped_too_and_no_other_runs() -> None:
    answers = recorded()
    second = f"{LAUNCHED}-plan2"
    stopped = {**TRAINING, "StepStatus": "Stopped"}
    failed = training_job("Failed", "Failed", "CapacityError: Unable to provision")
    going = {**training_job("InProgress", "Training"), "TrainingJobName": second}
    ended = {**training_job("Stopped", "Stopped"), "TrainingJobName": second}

    def look(status: str, job: dict[str, object]) -> None:
        answers.add_state(status, [TAKEN, stopped], of=OF)
        answers.add_jobs(LAUNCHED, second, f"{LAUNCHED}0")
        answers.add("describe_training_job", failed, TrainingJobName=LAUNCHED)
        answers.add("describe_training_job", job, TrainingJobName=second)

    for _ in range(2):
        look("Stopped", going)
    answers.add("stop_training_job", {}, TrainingJobName=second)
    look("Stopped", ended)
    state = stop(answers)
    jobs = [step.name for step in state.steps if step.name.startswith("job ")]
    assert jobs == [f"job {LAUNCHED}", f"job {second}"]
    answers.stubber.assert_no_pending_responses()


def test_who_may_not_list_jobs_sees_the_first_one() -> None:
    answers = recorded()
    answers.add_state("Executing", [TAKEN, TRAINING], of=OF)
    answers.refuse("list_training_jobs", "AccessDeniedException", "not authorized")
    answers.add("describe_training_job", training_job("InProgress", "Training"))
    state = SageMakerOrchestrator(aws=answers.aws()).status(EXECUTION)
    assert f"job {LAUNCHED}" in [step.name for step in state.steps]


def test_a_stop_that_takes_too_long_is_an_error_that_says_where_to_look() -> None:
    answers = recorded()
    answers.add_state("Executing", [TAKEN], of=OF)
    answers.add("stop_pipeline_execution", {"PipelineExecutionArn": EXECUTION})
    for _ in range(int((STOP_SECONDS + 60) / POLL_SECONDS)):
        answers.add_state("Stopping", [TAKEN], of=OF)
    with pytest.raises(PlatformError) as refused:
        stop(answers)
    assert f"stoker status sagemaker {RUN}" in refused.value.fix
    assert STOP_SECONDS <= answers.seconds < STOP_SECONDS + 60


def test_a_job_that_ends_as_it_is_stopped_is_no_error() -> None:
    answers = recorded()
    answers.add("describe_training_job", training_job("InProgress", "Uploading"))
    answers.refuse("stop_training_job", "ValidationException", "The request was rejected")
    answers.add("describe_training_job", training_job("Completed", "Completed"))
    answers.add("describe_training_job", training_job("Completed", "Completed"))
    target = SageMakerOrchestrator(aws=answers.aws())
    assert target.stop(f"{ARN}:training-job/{LAUNCHED}").status == "succeeded"


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """Puts recorded answers behind the command line of this process."""
    made = recorded()
    monkeypatch.setattr(
        orchestrators,
        "orchestrator_named",
        lambda name, **of: SageMakerOrchestrator(aws=made.aws()),
    )
    return made


def test_status_prints_a_tree_with_reasons_pages_and_next_commands(
    answers: Recorded, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = {**DECIDE, "StepStatus": "Failed", "FailureReason": "AlgorithmError: exit code: 1"}
    answers.add_state("Failed", [TAKEN, PROFILE, failed], of=OF, reason="Step failure")
    pipelines.status_verb("sagemaker", EXECUTION, as_json=False, reach=REACH)
    shown = capsys.readouterr().out
    assert "mnist/abc123def456  failed  50 min 00 s" in shown
    assert "NeedsProfile             Condition      succeeded → True" in shown
    assert "  Decide                 Processing     failed  3 min 00 s" in shown
    assert "why:  AlgorithmError: exit code: 1" in shown
    assert "with: Epochs = 3" in shown
    assert "stop:" not in shown


def test_status_as_json_holds_the_same_facts(
    answers: Recorded, capsys: pytest.CaptureFixture[str]
) -> None:
    answers.add_state("Executing", [TAKEN, PROFILE], of=OF)
    pipelines.status_verb("sagemaker", EXECUTION, as_json=True, reach=REACH)
    told: dict[str, Json] = json.loads(capsys.readouterr().out)
    assert told["status"] == "running"
    assert told["began"] == "2026-11-20T10:00:00Z"
    steps = told["steps"]
    assert isinstance(steps, list)
    assert steps[1]["name"] == "Profile"


def listed(execution: str, minute: int, status: str = "Executing") -> dict[str, object]:
    return {
        "PipelineExecutionArn": f"{PIPELINE}/execution/{execution}",
        "PipelineExecutionStatus": status,
        "StartTime": at(minute),
    }


def test_of_two_runs_that_are_under_way_only_the_later_one_is_refused(
    answers: Recorded, capsys: pytest.CaptureFixture[str]
) -> None:
    # Next to a day's training an hourly schedule leaves many refused runs.
    newest = [listed("later", 2), *(listed(f"refused-{n}", 2, "Failed") for n in range(99))]
    for asks in ("earlier", "later"):
        summaries = "PipelineExecutionSummaries"
        answers.add("list_pipeline_executions", {summaries: newest, "NextToken": "more"})
        oldest = [listed("earlier", 1), listed("before", 0, "Succeeded")]
        answers.add("list_pipeline_executions", {summaries: oldest})
        if asks == "earlier":
            # It is at its own check.
            add_later(answers, only_run="Executing")
    # Its step may begin when the later run is there already.
    pipelines.status_verb("sagemaker", "mnist", besides="earlier", reach=REACH)
    assert "no run of mnist that began earlier is under way" in capsys.readouterr().out
    with pytest.raises(PlatformError, match="under way: mnist/earlier") as refused:
        pipelines.status_verb("sagemaker", "mnist", besides="later", reach=REACH)
    assert "stoker stop sagemaker mnist/earlier" in refused.value.fix


def add_later(answers: Recorded, *, only_run: str, parent: str = "") -> None:
    """Adds the answers to what is asked of the run called later."""
    arn = f"{PIPELINE}/execution/later"
    parameters = [{"Name": "ParentRun", "Value": parent}]
    answers.add(
        "list_pipeline_parameters_for_execution",
        {"PipelineParameters": parameters},
        PipelineExecutionArn=arn,
    )
    if not parent:
        guard = step("Guard", only_run, StepDisplayName=ONLY_RUN)
        found = [step("Profile", "Succeeded"), guard]
        answers.add("list_pipeline_execution_steps", {"PipelineExecutionSteps": found})


@pytest.mark.parametrize(
    ("only_run", "parent"),
    [
        pytest.param("Succeeded", "", id="the earlier one had failed and is tried again"),
        pytest.param("", "before", id="an even earlier one handed over to it"),
    ],
)
def test_a_later_run_that_gives_way_to_nobody_counts_as_earlier(
    answers: Recorded, only_run: str, parent: str
) -> None:
    runs = [listed("later", 2), listed("earlier", 1)]
    answers.add("list_pipeline_executions", {"PipelineExecutionSummaries": runs})
    add_later(answers, only_run=only_run, parent=parent)
    with pytest.raises(PlatformError, match="under way: mnist/later"):
        pipelines.status_verb("sagemaker", "mnist", besides="earlier", reach=REACH)
    answers.stubber.assert_no_pending_responses()


def test_a_run_that_is_not_listed_yet_gives_way_to_all(answers: Recorded) -> None:
    runs = [listed("other", 2)]
    answers.add("list_pipeline_executions", {"PipelineExecutionSummaries": runs})
    with pytest.raises(PlatformError, match="under way: mnist/other"):
        pipelines.status_verb("sagemaker", "mnist", besides="mine", reach=REACH)


def test_a_stop_of_what_has_ended_says_so_and_is_no_error(
    answers: Recorded, capsys: pytest.CaptureFixture[str]
) -> None:
    answers.add_state("Succeeded", [TAKEN], of=OF)
    assert pipelines.stop_verb("sagemaker", EXECUTION, as_json=False, reach=REACH) == 0
    assert "had already ended: succeeded" in capsys.readouterr().err


def exit_code_of_start(*, is_waiting: bool) -> int:
    return pipelines.start_verb(
        "sagemaker",
        "w.yaml",
        wait=is_waiting,
        kubeflow=pipelines.KubeflowRun(),
        reach=REACH,
        yes=True,
    )


@pytest.mark.parametrize(("end", "code"), [(KeyboardInterrupt, 130), (TerminatedError, 143)])
def test_whoever_stops_waiting_leaves_the_run_running(
    answers: Recorded,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    end: type[BaseException],
    code: int,
) -> None:
    answers.add("describe_pipeline", {"PipelineName": "mnist", "PipelineArn": PIPELINE})
    answers.add("start_pipeline_execution", {"PipelineExecutionArn": EXECUTION})

    def interrupted(*asked: object, **more: object) -> RunState:
        raise end

    monkeypatch.setattr(orchestrators, "follow_run", interrupted)
    monkeypatch.setattr(pipelines, "workload_of", lambda file, overrides: OF)
    assert exit_code_of_start(is_waiting=True) == code
    said = capsys.readouterr().err
    assert "the run goes on" in said
    assert f"stoker stop sagemaker {RUN}" in said


def test_an_interruption_before_the_service_answered_says_that_a_run_may_have_started(
    answers: Recorded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*asked: object, **more: object) -> RunState:
        raise KeyboardInterrupt

    monkeypatch.setattr(SageMakerOrchestrator, "start", interrupted)
    monkeypatch.setattr(pipelines, "workload_of", lambda file, overrides: OF)
    assert exit_code_of_start(is_waiting=False) == 130
    assert "a run may have started" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "typed", "sent"),
    [
        ("Integer", "-1", "-1"),
        ("Integer", " 010", "10"),
        ("String", " a ", " a "),
        ("Boolean", "True", "true"),
        ("Float", "0.5 ", "0.5"),
    ],
)
def test_a_parameter_of_the_pipelines_own_is_sent_as_its_kind_is_written(
    kind: str, typed: str, sent: str
) -> None:
    deployed = SageMakerPipeline(
        name="mnist",
        arn="arn",
        description="",
        role="",
        definition={"Parameters": [{"Name": "Own", "Type": kind}]},
        domain="",
    )
    assert checked_parameters(deployed, OF, [f"own={typed}"]) == {"Own": sent}
