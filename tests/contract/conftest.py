import sys
from types import SimpleNamespace

import pytest


@pytest.fixture
def follow():
    from support.platform_jobs import follower

    yield from follower()


@pytest.fixture
def answers(aws):
    from support.aws_answers import Answers

    return Answers(aws)


@pytest.fixture
def api():
    from support.kubernetes_api import kubernetes_api

    with kubernetes_api() as found:
        yield found


@pytest.fixture(scope="session", autouse=True)
def _quick_kfp():
    """Keeps kfp from reading the stack's sources, deep below pytest: 2 CPU-seconds a pipeline."""
    with pytest.MonkeyPatch.context() as patch:
        try:
            from kfp.dsl import pipeline_task
        except ImportError:
            pass
        else:
            patch.setattr(pipeline_task, "inspect", SimpleNamespace(stack=_names_on_the_stack))
        yield


def _names_on_the_stack() -> list[tuple[None, None, None, str]]:
    """Returns what kfp reads of inspect.stack(): a function's name and that of its caller."""
    frame = sys._getframe(1)
    return [(None, None, None, each.f_code.co_name) for each in (frame, frame.f_back)]
