"""Flags say where Kubeflow is before the workload does, and the workload before the environment."""

from pathlib import Path

import pytest

from stoker.cli.pipelines import Reach
from stoker.errors import UsageError
from stoker.orchestrators.kubeflow.api import IN_CLUSTER, Flags, connection_of
from stoker.records import Workload
from stoker.settings import KubeflowEnvironment, kubeflow_environment, workload_from
from support import builders

NOTHING = KubeflowEnvironment()
EVERYTHING = KubeflowEnvironment(
    endpoint="https://from.environment", namespace="environment", token="secret", cookie="c=1"
)


def workload(**kubeflow: object) -> Workload:
    overrides = [f"kubernetes.kubeflow.{key}={value}" for key, value in kubeflow.items()]
    return builders.workload("x", *overrides)


def test_nothing_named_leaves_it_to_the_kube_config() -> None:
    found = connection_of(None, flags=Flags(), environment=NOTHING)
    assert (found.host, found.ui, found.namespace, found.token) == (None, "", "", None)
    assert found.place == "the cluster of the kube config"


def test_flags_before_workload_before_environment() -> None:
    of = workload(host="https://from.workload", namespace="ada")
    flags = Flags(host="https://from.flag", namespace="bob")
    hosts = [
        connection_of(one, flags=two, environment=EVERYTHING)
        for one, two in ((of, flags), (of, Flags()), (None, Flags()))
    ]
    assert [(found.host, found.namespace) for found in hosts] == [
        ("https://from.flag", "bob"),
        ("https://from.workload", "ada"),
        ("https://from.environment", "environment"),
    ]


def test_the_namespace_of_the_cluster_s_settings_counts_where_no_other_is_named() -> None:
    of = workload_from({"name": "x", "command": ["true"], "kubernetes": {"namespace": "team"}})
    assert connection_of(of, flags=Flags(), environment=NOTHING).namespace == "team"


@pytest.mark.parametrize(
    ("typed", "host"),
    [
        ("kubeflow.example.com", "https://kubeflow.example.com"),
        ("http://localhost:8888/", "http://localhost:8888"),
        ("https://site/pipeline/#/runs", "https://site/pipeline"),
    ],
)
def test_addresses_as_people_type_them(typed: str, host: str) -> None:
    found = connection_of(None, flags=Flags(host=typed), environment=NOTHING)
    assert (found.host, found.ui) == (host, host)


@pytest.mark.parametrize("typed", ["ftp://x", "https://", "http://x:port", "https://x:0"])
def test_what_is_no_address_is_refused(typed: str) -> None:
    with pytest.raises(UsageError, match="is not an address"):
        connection_of(None, flags=Flags(host=typed), environment=NOTHING)


def test_a_password_in_the_address_is_refused_and_not_repeated() -> None:
    with pytest.raises(UsageError, match="does not belong in the address") as caught:
        connection_of(None, flags=Flags(host="https://me:hunter2@x"), environment=NOTHING)
    assert "hunter2" not in str(caught.value)


def test_a_token_file_is_read_again_each_time(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("one\n")
    found = connection_of(None, flags=Flags(token_file=file), environment=EVERYTHING)
    assert found.token is not None
    assert found.token() == "one"
    file.write_text("two\n")
    assert found.token() == "two"


@pytest.mark.parametrize("content", ["", " \n", "one\ntwo\n"])
def test_a_token_file_that_holds_none_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "token"
    file.write_text(content)
    with pytest.raises(UsageError, match="is empty or has several lines"):
        connection_of(None, flags=Flags(token_file=file), environment=NOTHING)


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    with pytest.raises(UsageError, match=f"cannot read {gone}: No such file"):
        connection_of(None, flags=Flags(token_file=gone), environment=NOTHING)
    with pytest.raises(UsageError, match=f"no such file: {gone}"):
        connection_of(None, flags=Flags(ca_file=gone), environment=NOTHING)


def test_secrets_of_the_environment_are_in_no_representation() -> None:
    found = connection_of(None, flags=Flags(), environment=EVERYTHING)
    assert found.token is not None
    assert found.token() == "secret"
    assert "secret" not in repr(EVERYTHING) + repr(found)
    assert "c=1" not in repr(EVERYTHING) + repr(found)


def test_in_a_pod_it_is_the_cluster_s_own_with_the_pod_s_token(tmp_path: Path) -> None:
    (tmp_path / "namespace").write_text("team-a\n")
    token = tmp_path / "token"
    token.write_text("projected")
    environment = kubeflow_environment({}, account=tmp_path)
    found = connection_of(None, flags=Flags(), environment=environment, pod_token=token)
    assert (found.host, found.namespace, found.ui) == (IN_CLUSTER, "team-a", "")
    assert found.token is not None
    assert found.token() == "projected"


def test_the_environment_is_read_by_its_names(tmp_path: Path) -> None:
    environ = {
        "KF_PIPELINES_ENDPOINT": "http://a",
        "KF_PIPELINES_UI_ENDPOINT": "http://b",
        "STOKER_KUBEFLOW_NAMESPACE": "ada",
        "STOKER_KUBEFLOW_TOKEN": " t\n",
        "STOKER_KUBEFLOW_COOKIE": "c",
    }
    assert kubeflow_environment(environ, account=tmp_path) == KubeflowEnvironment(
        endpoint="http://a", ui="http://b", namespace="ada", token="t", cookie="c"
    )


def test_next_commands_repeat_what_was_typed(tmp_path: Path) -> None:
    reach = Reach(host="http://a", namespace="b c")
    assert reach.words("kubeflow") == " --host http://a --namespace 'b c'"
    overrides = ["epochs=1", "kubernetes.kubeflow.host=http://x"]
    assert Reach().words("kubeflow", file="w.yaml", overrides=overrides) == (
        " --workload w.yaml --set kubernetes.kubeflow.host=http://x"
    )
    assert reach.words("sagemaker", file="w.yaml") == ""
