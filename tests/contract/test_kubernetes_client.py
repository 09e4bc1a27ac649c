"""What stoker uses of the kubernetes client is the same in each of its years: 28 to 37."""

from types import SimpleNamespace
from typing import Any

import pytest
import urllib3

from stoker.errors import ServiceError
from stoker.platforms.kubernetes import api as connection
from stoker.platforms.kubernetes.api import CONFIG_MAPS, PODS, ClusterApi
from support.kubernetes_api import NAMESPACE, TOKEN, kubernetes_api


@pytest.fixture
def api():
    with kubernetes_api() as made:
        yield made


@pytest.fixture
def tokens():
    return [TOKEN]


@pytest.fixture
def cluster(api, monkeypatch, tokens):
    """A cluster by a client that has connections and a login, and no `call_api` of any year."""

    def auth_settings() -> dict[str, Any]:
        key, value = "authorization", f"Bearer {tokens[-1]}"
        return {"BearerToken": {"type": "api_key", "in": "header", "key": key, "value": value}}

    client = SimpleNamespace(
        configuration=SimpleNamespace(host=api.url, auth_settings=auth_settings),
        rest_client=SimpleNamespace(pool_manager=urllib3.PoolManager(retries=False)),
        default_headers={"User-Agent": "kubernetes"},
    )
    monkeypatch.setattr(connection, "connect", lambda context, strict_tls: (client, NAMESPACE))
    return ClusterApi(namespace=NAMESPACE)


def config_map(name: str) -> dict[str, Any]:
    metadata = {"name": name, "labels": {"a": "b"}}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"k": "v"}}


def test_each_kind_of_call_goes_by_the_clients_own_connections(cluster):
    assert cluster.find(CONFIG_MAPS, "one") is None
    made = cluster.create(CONFIG_MAPS, config_map("one"))
    assert made["data"] == {"k": "v"}
    cluster.patch(CONFIG_MAPS, "one", {"data": {"k": "w", "é": "ü & = ?"}})
    assert cluster.get(CONFIG_MAPS, "one")["data"] == {"k": "w", "é": "ü & = ?"}
    found, _ = cluster.list(CONFIG_MAPS, query={"labelSelector": "a=b"})
    assert [each["metadata"]["name"] for each in found] == ["one"]
    cluster.delete(CONFIG_MAPS, "one")
    assert cluster.find(CONFIG_MAPS, "one") is None


def test_a_refusal_has_the_clusters_words_and_its_code(cluster):
    cluster.create(CONFIG_MAPS, config_map("one"))
    with pytest.raises(ServiceError) as caught:
        cluster.create(CONFIG_MAPS, config_map("one"))
    assert (caught.value.kind, caught.value.code) == ("taken", "409")
    with pytest.raises(ServiceError) as caught:
        cluster.open(PODS, "none", part="log", query={}, read_seconds=5.0)
    assert (caught.value.kind, caught.value.code) == ("missing", "404")


def test_a_token_is_asked_for_with_each_request(cluster, api, tokens):
    seen: list[str] = []
    client = cluster._connected()
    send = client.rest_client.pool_manager.request

    def noted(method: str, url: str, **about: Any) -> Any:
        seen.append(about["headers"]["authorization"])
        return send(method, url, **about)

    client.rest_client.pool_manager.request = noted
    cluster.list(CONFIG_MAPS)
    tokens.append("expired")
    with pytest.raises(ServiceError, match="does not accept"):
        cluster.list(CONFIG_MAPS)
    assert seen == [f"Bearer {TOKEN}", "Bearer expired"]


def test_a_cluster_that_does_not_answer_is_away(cluster):
    cluster._connected().configuration.host = "http://127.0.0.1:9"
    with pytest.raises(ServiceError, match="does not answer") as caught:
        cluster.list(CONFIG_MAPS)
    assert caught.value.kind == "away"
