"""The ten steps of docs/kubeflow.md on a real cluster, typed as they stand.

The reader's own part is done between the lines, as the page says it: names of pools, the image,
prices, claims or none. Lines for which the environment stands are left out: support.guide.LEFT_OUT.
"""

import os
import re
import shutil
from pathlib import Path

import pytest

from support.guide import GuideShell, steps, why_left_out
from support.node_cluster import MINUTES, Given, NodeCluster, PipelinesServer, put_prices

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[3]
WORKLOAD, POOLS = Path("configs/mnist-kubeflow.yaml"), Path("configs/kubernetes/pools.csv")
RIGHTS = Path("configs/kubernetes/kustomization.yaml")


def put_names_in(workload: Path, given: Given) -> None:
    """Does what steps 5 and 7 ask of the reader: names, image, gate, and no claims."""
    text = workload.read_text()
    text = re.sub(r"(?m)^image: .*$", f"image: {given.image}", text)
    text = text.replace("instance_type: gpu", f"instance_type: {given.train[1]}")
    text = text.replace("namespace: kubeflow", f"namespace: {given.namespace}")
    # Three epochs of the bundled pictures: what is looked for here is no model.
    text = text.replace("min: 0.97", "min: 0.5")
    # For a first try leave both out.
    text = re.sub(r"(?m)^channels:\n(?:[ ]+.*\n)+", "", text)
    text = re.sub(r"(?m)^  output: .*\n", "", text)
    workload.write_text(text)


def on_this_cluster(line: str, given: Given) -> str:
    line = line.replace("dnn=gpu:", f"dnn={given.train[1]}:")
    line = line.replace("data=cpu:", f"data={given.feed[1]}:")
    line = line.replace("node_pools.py", f"node_pools.py --pool-label {given.train[0]}")
    return line.replace("-n kubeflow ", f"-n {given.namespace} ")


def test_the_ten_steps_as_they_stand(given, tmp_path):
    server = PipelinesServer()
    for program in ("kubectl", "bash"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not on the PATH")
    (tmp_path / "stoker").symlink_to(ROOT)
    env = {**os.environ, "HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    shell = GuideShell(tmp_path, env=env, plays=False, seconds=60 * MINUTES)
    project = tmp_path / "retraining"
    cluster = NodeCluster(given, tmp_path, namespace=given.namespace)
    try:
        for title, lines in steps((ROOT / "docs" / "kubeflow.md").read_text()):
            for line in lines:
                if why := why_left_out(line):
                    print(f"left out: {line} ({why})")
                    continue
                done = shell.type(on_this_cluster(line, given))
                assert done.returncode == 0, f"{title}: {line}\n{done.stdout}{done.stderr}"
            if title.startswith("2."):
                put_names_in(project / WORKLOAD, given)
                text = (project / RIGHTS).read_text()
                text = text.replace("namespace: kubeflow", f"namespace: {given.namespace}")
                (project / RIGHTS).write_text(text.replace("pipeline-runner", given.account))
            if title.startswith("6."):
                put_prices(project / POOLS, {given.train[1]: 1.0, given.feed[1]: 0.1})
    finally:
        server.delete_schedules("stoker-mnist")
        cluster.close()
