"""Values and times that a person types are checked before the service is reached."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from stoker.cli.app import app_for
from stoker.errors import UsageError

WORDS = {
    "kubeflow": "name: mnist\ncommand: [python]\nplatform: kubernetes\nimage: r/i:1\n"
    "cluster: {dnn: {instance_type: g5.xlarge}}\n",
    "sagemaker": "name: mnist\ncommand: [python]\nplatform: sagemaker\nimage: r/i:1\n"
    "cluster: {dnn: {instance_type: ml.g5.xlarge}}\n"
    "sagemaker: {role: 'arn:aws:iam::111122223333:role/a', output_uri: s3://b/runs}\n",
}


class ReachedError(Exception):
    """The service was asked."""


@pytest.fixture(autouse=True)
def _out_of_reach(monkeypatch, tmp_path):
    def reached(*_: object, **__: object) -> None:
        raise ReachedError

    monkeypatch.setattr("stoker.pipelines.kubeflow.client.KubeflowClient.call", reached)
    monkeypatch.setattr("stoker.platforms.aws.Aws.call", reached)
    monkeypatch.chdir(tmp_path)


def raised(verb: str, target: str, *more: str) -> BaseException | None:
    Path("w.yaml").write_text(WORDS[target])
    return CliRunner().invoke(app_for(verb), [verb, target, "w.yaml", *more]).exception


@pytest.mark.parametrize("target", ["kubeflow", "sagemaker"])
@pytest.mark.parametrize(
    ("verb", "more", "words"),
    [
        ("start", ("--param", "objective=speed"), "speed"),
        ("start", ("--param", "objectiv=cost"), "did you mean objective?"),
        ("schedule", ("--cron", "@daily", "--param", "objective=speed"), "speed"),
        # Five fields of Unix's cron: the services would read them otherwise, or not at all.
        ("schedule", ("--cron", "0 3 * * 1"), "0 3 * * 1"),
    ],
)
def test_a_wrong_value_is_refused_without_the_service(target, verb, more, words):
    err = raised(verb, target, *more)
    assert isinstance(err, UsageError)
    assert words in str(err)


@pytest.mark.parametrize("target", ["kubeflow", "sagemaker"])
def test_a_parameter_that_only_the_pipeline_may_have_is_asked_for(target, monkeypatch):
    err = raised("start", target, "--param", "colour_of_my_own_step=3")
    assert isinstance(err, ReachedError)
    # Near to a parameter of the workload, and declared in the project's own pipeline.
    monkeypatch.setattr("stoker.cli.compile.has_parameter", lambda *_: True)
    err = raised("start", target, "--param", "objectives=3")
    assert isinstance(err, ReachedError)
