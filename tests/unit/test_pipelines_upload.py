"""Checks the question before an update, and what people see before it."""

import io

import pytest

from stoker import orchestrators
from stoker.cli import compile as compile_module
from stoker.cli import pipelines
from stoker.errors import UsageError
from stoker.orchestrators.base import Uploaded, UploadPlan
from support.sagemaker_orchestrator import PIPELINE, HandMade, hand_made, workload


class Terminal(io.StringIO):
    """Plays a person's terminal, with what they typed."""

    def isatty(self) -> bool:
        return True


class Sent:
    """Plays a target that holds what it would send."""

    name = "sagemaker"

    def __init__(self, *changes: str, exists: bool = True) -> None:
        self.pipeline: HandMade = hand_made(workload())
        self.plans: list[UploadPlan] = []
        self._plan = UploadPlan(pipeline=self.pipeline, exists=exists, changes=changes, missing=())

    def plan(self, pipeline: object) -> UploadPlan:
        return self._plan

    def upload(self, plan: UploadPlan) -> Uploaded:
        self.plans.append(plan)
        return Uploaded(id=PIPELINE, action="updated", url="https://page", num_inputs=0)


def upload(
    target: Sent, monkeypatch: pytest.MonkeyPatch, *, typed: str | None, yes: bool = False
) -> None:
    monkeypatch.setattr(orchestrators, "orchestrator_named", lambda name, **of: target)
    monkeypatch.setattr(pipelines, "workload_of", lambda file, overrides: workload())
    monkeypatch.setattr(
        compile_module, "compiled_for", lambda name, workload, **how: target.pipeline
    )
    monkeypatch.setattr("sys.stdin", Terminal(typed) if typed is not None else io.StringIO())
    monkeypatch.setattr("sys.stderr", Terminal())
    pipelines.upload_verb("sagemaker", "w.yaml", reach=pipelines.Reach(), yes=yes)


@pytest.mark.parametrize("typed", ["n\n", "\n", "", "nonsense\n"])
def test_an_update_that_a_person_does_not_want_is_not_sent(
    monkeypatch: pytest.MonkeyPatch, typed: str
) -> None:
    target = Sent("~ step Train", "  - Seed = 1", "  + Seed = 2")
    with pytest.raises(UsageError, match="you said no"):
        upload(target, monkeypatch, typed=typed)
    assert target.plans == []


@pytest.mark.parametrize(("typed", "yes"), [("y\n", False), ("YES\n", False), ("", True)])
def test_an_update_that_a_person_wants_is_sent(
    monkeypatch: pytest.MonkeyPatch, typed: str, yes: bool
) -> None:
    target = Sent("~ step Train", "  - Seed = 1", "  + Seed = 2")
    upload(target, monkeypatch, typed=typed, yes=yes)
    assert len(target.plans) == 1


def test_with_no_terminal_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Sent("~ step Train", "  - Seed = 1", "  + Seed = 2")
    upload(target, monkeypatch, typed=None)
    assert len(target.plans) == 1


def test_a_creation_replaces_nothing_and_is_not_asked_about(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = Sent(exists=False)
    upload(target, monkeypatch, typed="")
    assert len(target.plans) == 1
