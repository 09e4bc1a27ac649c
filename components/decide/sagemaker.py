"""The decide component as a step of a SageMaker pipeline; see README.md for its contract."""

from collections.abc import Sequence

from components.sagemaker_run import (
    INPUT,
    OUTPUT,
    WORKLOAD,
    Run,
    control_step,
)
from components.sagemaker_steps import (
    EXECUTION_ID,
    RequestStep,
    Step,
    Text,
    property_file,
    text,
)


def decide_step(
    run: Run, *, profile_uri: Text, depends_on: Sequence[Step] = (), name: str = "Decide"
) -> RequestStep:
    """A processing step that ranks clusters and writes decision/decision.json of the run.

    It is never taken from the cache: it is the cheapest step, prices grow old, and the run's own
    folder is to hold its decision.

    Args:
        run: Of the pipeline.
        profile_uri: Folder with profile.json.
        depends_on: The step that writes it.
        name: Of the step.
    """
    return control_step(
        run,
        name,
        [
            *("decide", f"{INPUT}/profile/profile.json"),
            *("--workload", WORKLOAD),
            *("--out", f"{OUTPUT}/decision/decision.json"),
            *run.arguments(),
        ],
        display_name="Decide",
        description="Which cluster pays, in time and money.",
        inputs={"profile": text(profile_uri, "/profile.json")},
        outputs={"decision": run.uri("decision")},
        property_files=[property_file("Decision", output="decision", path="decision.json")],
        depends_on=depends_on,
        is_isolated=True,
    )


def hand_over_step(
    run: Run, *, profile_uri: Text, depends_on: Sequence[Step] = (), name: str = "HandOver"
) -> RequestStep:
    """A processing step that starts one more run of the pipeline: it trains on what was decided.

    The groups of the decision are parameters of that run, as are this run's id, whose folder it
    writes to, and the profile's; all other parameters are handed on. A second attempt of the step
    starts no second run.

    Args:
        run: Of the pipeline.
        profile_uri: Folder with profile.json.
        depends_on: The step that decides.
        name: Of the step.
    """
    words: list[Text] = []
    for parameter in run.passed_on:
        words += ["--param", text(f"{parameter}=", run.parameters[parameter])]
    return control_step(
        run,
        name,
        [
            *("start", "sagemaker", WORKLOAD),
            *("--decision", f"{INPUT}/decision/decision.json"),
            *("--parent-run", EXECUTION_ID),
            "--yes",
            *("--param", text("reuse_profile=", profile_uri)),
            *words,
        ],
        display_name="Hand over",
        description="Starts the run that trains on what was decided.",
        inputs={"decision": run.uri("decision/decision.json")},
        outputs={},
        depends_on=depends_on,
    )
