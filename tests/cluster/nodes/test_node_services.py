"""A cluster's own services that are away for a while: no training ends for them."""

import signal

import pytest

from support.cluster_files import rbac
from support.node_cluster import MINUTES, are_gone, succeeds, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]

AWAY_SECONDS = 3 * MINUTES


@pytest.mark.parametrize("service", ["kubelet", "containerd"])
@pytest.mark.parametrize("role", ["dnn", "data"])
def test_a_node_s_service_that_is_started_again_takes_nothing(cluster, service, role):
    command = cluster.train(cluster.workload(), *cluster.groups(data=1))
    cluster.trains()
    (pod,) = cluster.pods_of("t", role)
    cluster.restart_service(service, cluster.node_of(pod))
    succeeds(cluster, command)
    assert cluster.restarts() == 0


def test_a_job_is_made_once_jobset_s_webhook_answers_again(cluster):
    with cluster.without_webhook():
        command = cluster.train(cluster.workload(), *cluster.groups())
        wait_for(lambda: "webhook" in command.text, what="it says what does not answer")
        cluster.let_pass(AWAY_SECONDS, command)
        assert cluster.names("jobsets") == []
    succeeds(cluster, command)


def test_a_training_outlasts_jobset_s_controller(cluster):
    command = cluster.train(cluster.workload(), *cluster.groups(data=1))
    pod = cluster.trains()
    with cluster.without_jobset():
        cluster.let_pass(AWAY_SECONDS, command)
        assert pod in cluster.running("stoker/role=dnn")
    succeeds(cluster, command)
    assert cluster.restarts() == 0


def test_a_host_that_is_lost_without_jobset_s_controller_restarts_when_it_is_back(cluster):
    file = cluster.workload(kubernetes={"output": f"pvc://{cluster.claim('runs')}/stoker"})
    command = cluster.train(file, *cluster.groups(data=1))
    pod = cluster.trains()
    with cluster.without_jobset():
        cluster.lose(pod, "deleted")
        wait_for(lambda: not cluster.running("stoker/role=dnn"), what="it has ended")
        cluster.let_pass(AWAY_SECONDS, command)
    cluster.restarted([pod])
    succeeds(cluster, command)


def test_a_role_that_is_taken_away_in_mid_run_ends_nothing(cluster):
    role = rbac(namespace=cluster.namespace, account="runner")
    config = cluster.account_config(role)
    command = cluster.train(cluster.workload(), *cluster.groups(data=1), config=config)
    pod = cluster.trains()
    with cluster.without_bindings(role):
        # The watches that the server has allowed go on for some minutes.
        what = "it says what it may not"
        wait_for(lambda: "forbidden" in command.text, what=what, seconds=15 * MINUTES)
        cluster.let_pass(AWAY_SECONDS, command)
        assert pod in cluster.running("stoker/role=dnn")
    succeeds(cluster, command)


def test_nothing_is_left_of_a_run_that_is_stopped_without_jobset_s_controller(cluster):
    command = cluster.train(cluster.workload(), *cluster.groups(data=1))
    cluster.trains()
    with cluster.without_jobset():
        command.signal(signal.SIGINT)
        assert command.ended() == 130
    are_gone(cluster)
