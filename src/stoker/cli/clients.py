"""The client of a pipeline service, and the workload of its pipeline, from a command line."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from stoker.cli.options import Reach
from stoker.errors import UsageError

if TYPE_CHECKING:
    from stoker.pipelines.kubeflow.client import KubeflowClient
    from stoker.pipelines.sagemaker.client import SageMakerClient
    from stoker.records import Workload


def client_of(
    target: str, of: "Workload | None", reach: Reach, *, run: str = ""
) -> "KubeflowClient | SageMakerClient":
    from stoker.pipelines.base import sagemaker_of
    from stoker.pipelines.kubeflow.client import KubeflowClient
    from stoker.pipelines.sagemaker.client import SageMakerClient
    from stoker.workload_file import read_workload

    given = {key: value for key, value in asdict(reach).items() if value}
    if target == "kubeflow":
        if file := given.pop("workload", None):
            of = read_workload(file)
        return KubeflowClient(of, **given)
    if given:
        raise UsageError(f"{reach.words(None)[1:]} is only for kubeflow", fix="leave it out")
    settings = None
    if of:
        settings = sagemaker_of(of)
    client = SageMakerClient(settings, run=run)
    client.check_caller()
    return client


def workload_of(file: str, *, overrides: Sequence[str]) -> "Workload":
    from stoker.cli.workloads import resolve

    if not file.endswith((".yaml", ".yml", ".json")):
        raise UsageError(f"{file} is not a workload file", fix="name a .yaml file, as in configs/")
    return resolve([file], overrides=overrides)
