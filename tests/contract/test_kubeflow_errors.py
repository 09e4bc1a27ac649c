"""Errors between stoker and Kubeflow Pipelines are told in words that say what to do."""

import contextlib
import io
import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.cli.edge import run
from stoker.errors import PlatformError, UsageError
from stoker.orchestrators.kubeflow import api as client
from stoker.orchestrators.kubeflow.api import Kubeflow, KubeflowConnection, KubeflowError
from support.kfp_server import KfpServer
from support.kubeflow_orchestrator import RUN, connection, target_at, upload, workload

pytestmark = pytest.mark.usefixtures("quick_kfp")

PAGE = "<!doctype html><html><body>Log in to Kubeflow</body></html>"


@pytest.fixture
def server() -> Iterator[KfpServer]:
    with KfpServer() as made:
        yield made


def refused(server: KfpServer) -> KubeflowError:
    """Returns the error of a call."""
    with pytest.raises(KubeflowError) as caught:
        Kubeflow(connection(server)).call("run", "get_run", run_id=RUN)
    assert "Traceback" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("status", "message", "what", "fix", "may_pass"),
    [
        (400, "bad page token", "cannot do this (400): bad page token", "", False),
        (401, "no identity", "does not know who you are", "--token-file F", False),
        (403, "not allowed to get runs", "does not let you do this (403)", "--namespace N", False),
        (404, "run not found", "it does not exist (404): run not found", "", False),
        (409, "already exists", "it exists already (409)", "run the command again", False),
        (429, "", "is overloaded, or not running (429)", "a little later", True),
        (500, "Internal Server Error: x", "Kubeflow failed (500): Internal", "ml-pipeline", True),
        (503, "no healthy upstream", "is overloaded, or not running (503)", "a little later", True),
    ],
)
def test_a_refusal_is_told_with_the_service_s_words_and_what_to_do(
    server: KfpServer, status: int, message: str, what: str, fix: str, may_pass: bool
) -> None:
    server.trouble(".*", status, json.dumps({"code": 13, "message": message, "details": []}))
    error = refused(server)
    assert what in error.what
    assert fix in error.fix
    assert error.where == server.url
    assert (error.status, error.is_unreachable) == (status, may_pass)
    assert error.exit_code == 4


def test_a_refusal_in_a_namespace_names_it(server: KfpServer) -> None:
    server.trouble(".*", 403, '{"message": "no"}')
    with pytest.raises(KubeflowError, match="ask for the right in namespace ada"):
        Kubeflow(connection(server, namespace="ada")).call("run", "get_run", run_id=RUN)


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (200, "a web page answered where Kubeflow Pipelines should"),
        (401, "does not know who you are"),
        (404, "there is no Kubeflow Pipelines at this address"),
    ],
)
def test_a_page_in_place_of_json_is_called_a_page(
    server: KfpServer, status: int, words: str
) -> None:
    server.trouble(".*", status, PAGE, content_type="text/html; charset=utf-8")
    error = refused(server)
    assert words in error.what
    assert "<" not in error.what
    assert not error.is_unreachable


def test_a_redirect_to_a_login_page_is_followed_and_told(server: KfpServer) -> None:
    server.trouble("GET /runs/.*", 302, location="/dex/auth?client_id=x")
    server.trouble("GET /dex/auth", 200, PAGE, content_type="text/html")
    error = refused(server)
    assert "a login, or another site" in error.what
    assert "https://SITE/pipeline" in error.fix


def test_redirects_in_a_circle_end(server: KfpServer) -> None:
    server.trouble(".*", 302, location="/again")
    assert "redirects again and again" in refused(server).what
    assert len(server.requests) < 10


@pytest.mark.parametrize("body", ["[1, 2]", "pong", '"text"'])
def test_an_answer_that_is_no_json_object_is_not_kubeflow_s(server: KfpServer, body: str) -> None:
    server.trouble(".*", 200, body)
    assert "this is not Kubeflow Pipelines" in refused(server).what


def test_an_answer_without_end_is_not_read_to_its_end(
    server: KfpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "MAX_ANSWER_BYTES", 1 << 16)
    server.trouble(".*", 200, json.dumps({"x": "y" * (1 << 20)}))
    assert "its answer is longer than" in refused(server).what


def test_a_service_that_does_not_answer_in_time_is_left(server: KfpServer) -> None:
    server.stall("GET .*")
    with pytest.raises(KubeflowError, match="no answer in time") as caught:
        Kubeflow(connection(server), read_seconds=0.2).call("run", "get_run", run_id=RUN)
    assert caught.value.is_unreachable
    assert len(server.requests) == 2


def test_a_start_without_an_answer_is_sent_once_and_said_to_may_have_begun(
    server: KfpServer,
) -> None:
    upload(server)
    server.stall("POST /runs")
    target = target_at(server)
    target._kubeflow._read_seconds = 0.2
    with pytest.raises(KubeflowError, match="may have been done anyway"):
        target.start(workload(), parameters=())
    assert server.sent().count("POST /runs") == 1


def test_nothing_that_listens_is_told_with_a_port_forward() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        host = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(KubeflowError, match="nothing listens there") as caught:
            Kubeflow(KubeflowConnection(host=host)).call("healthz", "get_healthz")
    assert "kubectl port-forward" in caught.value.fix
    assert caught.value.is_unreachable


def test_a_host_without_an_address_is_told() -> None:
    with pytest.raises(KubeflowError, match="no such host name"):
        Kubeflow(KubeflowConnection(host="http://kubeflow.invalid")).call("healthz", "get_healthz")


def test_the_token_goes_with_each_request_and_into_no_message(
    server: KfpServer, tmp_path: Path
) -> None:
    server.token = "first-secret"
    file = tmp_path / "token"
    file.write_text("first-secret\n")
    kubeflow = Kubeflow(connection(server, token=lambda: file.read_text().strip()))
    assert kubeflow.call("healthz", "get_healthz")["multi_user"] is False
    file.write_text("second-secret")
    with pytest.raises(KubeflowError, match="does not know who you are") as caught:
        kubeflow.call("healthz", "get_healthz")
    assert server.requests[-1].headers["authorization"] == "Bearer second-secret"
    assert "secret" not in str(caught.value)


def test_the_cookie_of_a_session_goes_with_each_request(server: KfpServer) -> None:
    kubeflow = Kubeflow(connection(server, cookie="authservice_session=abc"))
    kubeflow.call("healthz", "get_healthz")
    assert server.requests[-1].headers["Cookie"] == "authservice_session=abc"


def test_nothing_is_written_to_the_home_folder_nor_asked_when_a_client_is_made(
    server: KfpServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    kubeflow = Kubeflow(connection(server))
    assert kubeflow._client
    assert server.requests == []
    assert list(tmp_path.iterdir()) == []


def test_no_address_at_all_is_a_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION"
    monkeypatch.setattr(location, str(tmp_path / "none"))
    with pytest.raises(UsageError, match="where is Kubeflow Pipelines"):
        Kubeflow(KubeflowConnection(host=None)).call("healthz", "get_healthz")


def test_the_cluster_of_the_kube_config_is_asked_through_its_proxy(
    server: KfpServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION"
    file = tmp_path / "config"
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
        "clusters": [{"name": "here", "cluster": {"server": server.url}}],
        "users": [{"name": "me", "user": {"token": "mine"}}],
    }
    file.write_text(json.dumps(document))
    monkeypatch.setattr(location, str(file))
    server.trouble(r"GET /api/v1/namespaces/kubeflow/services/.*", 200, '{"multi_user": true}')
    kubeflow = Kubeflow(KubeflowConnection(host=None, namespace="ada"))
    assert kubeflow.namespace == "ada"
    (request,) = server.requests
    assert request.path.endswith("/services/ml-pipeline:http/proxy//apis/v2beta1/healthz")
    assert request.headers["authorization"] == "Bearer mine"


def test_without_kfp_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kfp", None)
    with pytest.raises(UsageError, match=r"pip install .*\[kubeflow\]'"):
        Kubeflow(KubeflowConnection(host="http://x")).call("healthz", "get_healthz")


def test_the_orchestrator_imports_neither_kfp_nor_kubernetes() -> None:
    code = (
        "import sys, stoker.orchestrators.kubeflow; "
        "print([m for m in ('kfp', 'kubernetes', 'urllib3', 'yaml') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "kfp" not in done.stdout
    assert "kubernetes" not in done.stdout


def test_a_listing_that_does_not_end_is_an_error(server: KfpServer) -> None:
    server.trouble(".*", 200, '{"runs": [], "next_page_token": "again"}')
    with pytest.raises(PlatformError, match="has no end"):
        list(Kubeflow(connection(server)).pages("run", "list_runs", items="runs"))
    assert len(server.requests) == client.MAX_PAGES


def test_the_command_line_gives_three_lines_and_the_platform_s_exit_code(
    server: KfpServer,
) -> None:
    server.trouble(".*", 500, '{"message": "database is locked"}')
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        assert run(["status", "kubeflow", RUN, "--host", server.url]) == 4
    assert said.getvalue().startswith("error: Kubeflow failed (500): database is locked\nwhere: ")
    assert len(said.getvalue().splitlines()) == 3


# TLS.


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl")
    folder = tmp_path_factory.mktemp("tls")
    made = folder / "cert.pem", folder / "key.pem"
    words = ("-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost")
    names = ("-addext", "subjectAltName=IP:127.0.0.1")
    files = ("-out", str(made[0]), "-keyout", str(made[1]))
    subprocess.run(["openssl", "req", *words, *names, *files], capture_output=True, check=True)
    return made


@pytest.fixture
def secure(certificate: tuple[Path, Path]) -> Iterator[KfpServer]:
    with KfpServer(tls=certificate) as made:
        yield made


def test_a_certificate_of_an_authority_that_is_named_is_trusted(
    secure: KfpServer, certificate: tuple[Path, Path]
) -> None:
    kubeflow = Kubeflow(connection(secure, ca_file=certificate[0]))
    assert kubeflow.call("healthz", "get_healthz")["multi_user"] is False


def test_an_unknown_certificate_is_refused_and_the_flag_named(secure: KfpServer) -> None:
    with pytest.raises(PlatformError, match="its certificate is not trusted") as caught:
        Kubeflow(connection(secure)).call("healthz", "get_healthz")
    assert "--ca-file F" in caught.value.fix
    assert secure.requests == []


@pytest.mark.filterwarnings("ignore:Unverified HTTPS request")
def test_a_certificate_is_not_checked_where_people_say_so(secure: KfpServer) -> None:
    kubeflow = Kubeflow(connection(secure, verify=False))
    assert kubeflow.call("healthz", "get_healthz")["multi_user"] is False
