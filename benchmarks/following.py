"""Measures what is seen of pods that are deleted: followed as stoker does it, and polled.

    KUBECONFIG=... python benchmarks/following.py --image IMAGE [--pods 20] [--seconds 5]

Each pod prints ten lines a second, and one more when it is asked to end; then it is deleted. Both
read the same pods at the same time: *followed* by a watch and streams of the logs (as `stoker
train` does), *polled* by a list and `log?sinceTime` of each running pod every `--seconds`. The
image needs a shell.
"""

import argparse
import random
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import cast

from stoker.errors import ServiceError
from stoker.platforms.kubernetes.api import PODS, ClusterApi
from stoker.platforms.kubernetes.objects import (
    JOBSET_LABEL,
    REPLICATED_JOB_LABEL,
    PodGroup,
)
from stoker.platforms.kubernetes.pods import PodState, pod_state
from stoker.platforms.kubernetes.streams import Following, LogPosition, LogText, ObjectNews
from stoker.records import Group
from stoker.records.base import Document

NAME = "following"
_GROUP = Group(name="dnn", role="dnn", instance_type="any", count=1)
# What `pod_state` reads of a group.
GROUPS = cast(Mapping[str, PodGroup], {"dnn": SimpleNamespace(group=_GROUP, job="dnn")})
SCRIPT = "trap 'echo the end; exit 0' TERM; while :; do date +%s.%N; sleep 0.1; done"


class Seen:
    """What one way has seen: delays of lines in seconds, and pods whose last line came."""

    def __init__(self) -> None:
        self.delays: list[float] = []
        self.ended: set[str] = set()

    def take(self, pod: str, line: str) -> None:
        if line == "the end":
            self.ended.add(pod)
        else:
            self.delays.append(time.time() - float(line))


def follow(cluster: ClusterApi, seen: Seen, is_over: threading.Event) -> None:
    following = Following(cluster, resource=PODS, name=NAME, containers={"dnn": "dnn"})
    following.begin()
    known: dict[str, PodState] = {}
    while not (is_over.is_set() and following.is_empty):
        match following.next(0.25):
            case LogText(pod, line):
                seen.take(pod.name, line)
            case ObjectNews(what=what, items=items):
                for pod in filter(None, (pod_state(item, GROUPS, run=NAME) for item in items)):
                    known[pod.uid] = pod
                    following.follow(pod, is_deleted=what == "deleted")
    following.close()


def poll(cluster: ClusterApi, seen: Seen, is_over: threading.Event, *, seconds: float) -> None:
    positions: dict[str, LogPosition] = {}
    while not is_over.wait(seconds):
        items, _ = cluster.list(PODS, query={"labelSelector": f"{JOBSET_LABEL}={NAME}"})
        for pod in filter(None, (pod_state(item, GROUPS, run=NAME) for item in items)):
            position = positions.setdefault(pod.uid, LogPosition())
            query = {"container": "dnn", "timestamps": "true", **position.query()}
            try:
                stream = cluster.open(PODS, pod.name, part="log", query=query, read_seconds=10.0)
                lines = [line for line, is_whole in stream.lines() if is_whole]
                stream.release()
            except ServiceError:
                continue
            for line in filter(None, map(position.take, lines)):
                seen.take(pod.name, line)


def pod_of(number: int, image: str) -> Document:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{NAME}-{number}",
            "labels": {JOBSET_LABEL: NAME, REPLICATED_JOB_LABEL: "dnn"},
        },
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "containers": [{"name": "dnn", "image": image, "command": ["sh", "-c", SCRIPT]}],
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--image", required=True)
    parser.add_argument("--namespace", default="default")
    parser.add_argument("--pods", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    is_over, ways = threading.Event(), {"followed": Seen(), "polled": Seen()}
    runs: dict[str, Callable[[ClusterApi], None]] = {
        "followed": lambda cluster: follow(cluster, ways["followed"], is_over),
        "polled": lambda cluster: poll(cluster, ways["polled"], is_over, seconds=options.seconds),
    }
    threads = [
        threading.Thread(target=run, args=(ClusterApi(namespace=options.namespace),))
        for run in runs.values()
    ]
    cluster = ClusterApi(namespace=options.namespace)
    for thread in threads:
        thread.start()
    try:
        for number in range(options.pods):
            cluster.create(PODS, pod_of(number, options.image))
            time.sleep(3.0 + random.uniform(0.0, options.seconds))
            cluster.delete(PODS, f"{NAME}-{number}")
        while cluster.list(PODS, query={"labelSelector": f"{JOBSET_LABEL}={NAME}"})[0]:
            time.sleep(0.5)
        time.sleep(2 * options.seconds)
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    for name, seen in ways.items():
        middle = statistics.median(seen.delays)
        print(
            f"{name}: the last line of {len(seen.ended)} of {options.pods} pods; "
            f"a line came after {middle:.2f} s (at most {max(seen.delays):.2f} s)"
        )


if __name__ == "__main__":
    main()
