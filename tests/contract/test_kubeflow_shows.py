"""docs/kubeflow.md shows two runs as the verbs print them, on the strict double of 2.17."""

import json
import textwrap
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path

import pytest
import yaml

pytest.importorskip("kfp")

from stoker import orchestrators
from stoker.cli import pipelines
from stoker.records import Json
from support.command import stoker
from support.kfp_server import KfpServer
from support.kubeflow_backend import Clock, KubeflowRun, Pipeline, Step, Store
from support.kubeflow_orchestrator import ROOT, WORKLOAD, compiled, nodes_played, upload

pytestmark = pytest.mark.usefixtures("quick_kfp")

WORKLOAD_FILE = "configs/mnist-kubeflow.yaml"
RUN = "5b1f6c3e-8d0a-4c6e-9f6e-2f1d7c0b9a34"
BEGAN = datetime(2026, 11, 20, 10, 0, tzinfo=UTC)
SECONDS = {"profile": 262.0, "train": 1467.0}
PAGE = (ROOT / "docs" / "kubeflow.md").read_text()
LOG = (ROOT / "tests" / "data" / "kubeflow_logs" / "gate.log").read_text()


@pytest.fixture(autouse=True)
def _in_utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize("is_good", [True, False], ids=["good", "failed"])
def test_the_page_shows_a_run_as_it_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_good: bool
) -> None:
    document = json.loads(json.dumps(WORKLOAD))
    (tmp_path / "pipelines").symlink_to(ROOT / "pipelines")
    file = tmp_path / WORKLOAD_FILE
    file.parent.mkdir()
    file.write_text(yaml.safe_dump(document))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(orchestrators, "POLL_SECONDS", 0.0)
    clock = Clock()
    looks: list[tuple[float, list[dict[str, Json]]]] = []

    def execute(step: Step) -> int:
        clock.sleep(3)
        looks.append((clock.seconds, nodes_played(run)))
        outputs = step.executor_input["outputs"]
        for name in (*outputs["artifacts"], *outputs.get("parameters", {})):
            if name != "executor-logs":
                step.output(name).write_text("1")
        clock.sleep(SECONDS.get(step.task, 8.0))
        return 3 if step.task == "gate" and not is_good else 0

    run = KubeflowRun(
        Pipeline(compiled().definition),
        execute=execute,
        store=Store(tmp_path / "store"),
        parameters={"epochs": 3},
        clock=clock,
        run_id=RUN,
    )
    state = run.run()
    looks.append((clock.seconds, nodes_played(run)))
    shown_at = [0.0]

    class PlayedTime(datetime):
        """The time at which the verbs look."""

        @classmethod
        def now(cls, tz: tzinfo | None = None) -> "PlayedTime":
            moment = BEGAN + timedelta(seconds=shown_at[0])
            return cls.fromtimestamp(moment.timestamp(), tz)

    monkeypatch.setattr(pipelines, "datetime", PlayedTime)
    with KfpServer() as server:
        monkeypatch.setenv("KF_PIPELINES_ENDPOINT", server.url)
        upload(server)
        (pod,) = (n.pod for n in run.nodes.values() if n.name.endswith(".gate(0).executor(0)"))
        server.logs[pod] = LOG

        def look() -> None:
            is_last = len(looks) == 1
            shown_at[0], nodes = looks[0] if is_last else looks.pop(0)
            server.tell(*nodes)
            server.run().update(state="RUNNING", created_at=f"{BEGAN:%FT%TZ}")
            if is_last:
                ended = BEGAN + timedelta(seconds=clock.seconds)
                server.run().update(state=state, finished_at=f"{ended:%FT%TZ}")

        server.script = [look]
        started = stoker(
            "start", "kubeflow", WORKLOAD_FILE, "--param", "epochs=3", "--wait", "--yes"
        )
        assert started.returncode == (0 if is_good else 3), started.stderr
        status = stoker("status", "kubeflow", "mnist", "--workload", WORKLOAD_FILE)
        url, id = server.url, str(server.run()["run_id"])
        assert server.problems == []
    waited = started.stderr[started.stderr.index("page:") :]
    for text in (waited, status.stdout):
        shown = text.replace(url, "https://SITE/pipeline").replace(id, RUN)
        assert textwrap.indent(shown, "    ").rstrip() in PAGE, shown
