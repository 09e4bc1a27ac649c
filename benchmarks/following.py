"""Measures what is seen of pods that are deleted: followed as stoker does it, and polled.

    KUBECONFIG=... python benchmarks/following.py --image IMAGE [--pods 20] [--seconds 5]

Each pod prints ten numbered lines a second, and a last one when it is asked to end; then it is
deleted. Both ways read the same pods at the same time: *followed* by watches and streams of the
logs (as `stoker train` does), *polled* by lists of pods and events and `log?sinceTime` of each
running pod every `--seconds`. The image needs a shell and GNU date; only pods are made.
"""

import argparse
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import cast

from stoker.errors import ServiceError
from stoker.platforms.kubernetes.api import EVENTS, PODS, ClusterApi
from stoker.platforms.kubernetes.layout import JOBSET_LABEL, REPLICATED_JOB_LABEL, PodGroup
from stoker.platforms.kubernetes.pods import PodState, pod_state
from stoker.platforms.kubernetes.streams import Following, LogPosition, LogText, ObjectNews
from stoker.records import Group
from stoker.records.base import Document

NAME = "following"
_GROUP = Group(name="dnn", role="dnn", instance_type="any", count=1)
# What `pod_state` reads of a group.
GROUPS = cast(Mapping[str, PodGroup], {"dnn": SimpleNamespace(group=_GROUP, job="dnn")})
SCRIPT = "trap 'echo 0 end; exit 143' TERM; n=0; "
SCRIPT += "while :; do n=$((n+1)); echo $n $(date +%s.%N); sleep 0.1; done"
OF_RUN = {"labelSelector": f"{JOBSET_LABEL}={NAME}"}


class Counting(ClusterApi):
    """Counts its requests."""

    requests = 0

    def _connected(self) -> object:
        self.requests += 1
        return super()._connected()


class Seen:
    """What one way has seen."""

    def __init__(self) -> None:
        # Seconds from a line's print to its arrival.
        self.delays: list[float] = []
        # Pod and number of each line.
        self.lines: set[tuple[str, int]] = set()
        # Pods whose last line came, and whose exit code.
        self.last_lines: set[str] = set()
        self.exit_codes: set[str] = set()

    def take_line(self, pod: str, line: str) -> None:
        number, _, printed_at = line.partition(" ")
        if printed_at == "end":
            self.last_lines.add(pod)
        else:
            self.lines.add((pod, int(number)))
            self.delays.append(time.time() - float(printed_at))

    def take_pods(self, items: list[Document]) -> list[PodState]:
        pods = [pod for item in items if (pod := pod_state(item, GROUPS, run=NAME))]
        self.exit_codes.update(pod.name for pod in pods if pod.ended)
        return pods


def follow(cluster: ClusterApi, seen: Seen, is_over: threading.Event) -> None:
    following = Following(cluster, resource=PODS, name=NAME, containers={"dnn": "dnn"})
    following.begin()
    while not (is_over.is_set() and following.is_empty):
        match following.next(0.25):
            case LogText(pod, line):
                seen.take_line(pod.name, line)
            case ObjectNews(resource=resource, what=what, items=items) if resource == PODS:
                for pod in seen.take_pods([*items]):
                    following.follow(pod, is_deleted=what == "deleted")
    following.close()


def poll(cluster: ClusterApi, seen: Seen, is_over: threading.Event, *, seconds: float) -> None:
    positions: dict[str, LogPosition] = {}
    while not is_over.wait(seconds):
        items, _ = cluster.list(PODS, query=OF_RUN)
        cluster.list(EVENTS)
        for pod in seen.take_pods(items):
            position = positions.setdefault(pod.uid, LogPosition())
            query = {"container": "dnn", "timestamps": "true", **position.query()}
            try:
                stream = cluster.open(PODS, pod.name, part="log", query=query, read_seconds=10.0)
                lines = [line for line, is_whole in stream.lines() if is_whole]
                stream.release()
            except ServiceError:
                continue
            for line in filter(None, map(position.take, lines)):
                seen.take_line(pod.name, line)


def pod_of(number: int, image: str) -> Document:
    container: Document = {
        "name": "dnn",
        "image": image,
        "command": ["sh", "-c", SCRIPT],
        "imagePullPolicy": "IfNotPresent",
    }
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
            "containers": [container],
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
    clusters = {name: Counting(namespace=options.namespace) for name in ways}
    reads: dict[str, Callable[[ClusterApi], None]] = {
        "followed": lambda cluster: follow(cluster, ways["followed"], is_over),
        "polled": lambda cluster: poll(cluster, ways["polled"], is_over, seconds=options.seconds),
    }
    threads = [
        threading.Thread(target=read, args=(clusters[name],)) for name, read in reads.items()
    ]
    cluster = ClusterApi(namespace=options.namespace)
    for thread in threads:
        thread.start()
    begin = time.monotonic()
    try:
        for number in range(options.pods):
            cluster.create(PODS, pod_of(number, options.image))
            time.sleep(3.0 + random.uniform(0.0, options.seconds))
            cluster.delete(PODS, f"{NAME}-{number}")
        while cluster.list(PODS, query=OF_RUN)[0]:
            time.sleep(0.5)
        time.sleep(2 * options.seconds)
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
        # They print for ever where this was interrupted.
        for number in range(options.pods):
            cluster.delete(PODS, f"{NAME}-{number}")
    if not all(seen.lines for seen in ways.values()):
        sys.exit(f"no line of a pod was seen: can the nodes pull {options.image}?")
    minutes = (time.monotonic() - begin) / 60
    printed = set[tuple[str, int]]().union(*(seen.lines for seen in ways.values()))
    for name, seen in ways.items():
        print(
            f"{name}: {len(printed - seen.lines)} of {len(printed)} lines missing; the last line of"
            f" {len(seen.last_lines)} and the exit code of {len(seen.exit_codes)} of"
            f" {options.pods} pods; a line came after {statistics.median(seen.delays):.2f} s (at"
            f" most {max(seen.delays):.2f} s); {clusters[name].requests / minutes:.0f} requests a"
            " minute"
        )


if __name__ == "__main__":
    main()
