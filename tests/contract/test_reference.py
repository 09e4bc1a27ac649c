"""The reference can be made from the code, and its examples are right as typed."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from support.examples import project

ROOT = Path(__file__).parents[2]
# Types, and values that an example would only show as they are.
WITHOUT_EXAMPLE = {
    "stoker.kubeflow.Task",
    *(f"stoker.sagemaker.{name}" for name in ("PipelineVariable", "Step", "Text")),
}


@pytest.fixture(scope="module")
def reference():
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "docs/make_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def made(reference):
    pages: dict[Path, str] = reference.pages()
    return pages


def test_the_committed_schema_is_the_one_that_the_code_makes(made):
    schema = Path("configs/workload.schema.json")
    assert (ROOT / schema).read_text() == made[schema], "run make docs, and commit what it changes"


def test_each_public_name_has_an_example(reference):
    missing = {
        f"{module}.{name}"
        for module in reference.MODULES
        for name in reference.public(module)
        if name not in ", ".join(reference.examples(module)).split(", ")
    }
    assert missing == WITHOUT_EXAMPLE


@pytest.fixture
def _in_a_project(tmp_path, monkeypatch):
    monkeypatch.chdir(project(tmp_path))
    yield
    sys.modules.pop("example", None)


def run_examples(reference: ModuleType, module: str, *, without: tuple[str, ...] = ()) -> None:
    cells = reference.examples(module)
    code = "\n\n".join(code for names, code in cells.items() if names not in without)
    exec(compile(code, f"the examples of {module}", "exec"), {"__name__": "example"})


@pytest.mark.usefixtures("_in_a_project")
def test_the_examples_of_stoker_run(reference):
    run_examples(reference, "stoker")


@pytest.mark.usefixtures("_in_a_project")
def test_the_examples_of_kubeflow_run(reference):
    pytest.importorskip("kfp")
    run_examples(reference, "stoker.kubeflow")
    assert "name: mine" in Path("mine.yaml").read_text()


@pytest.mark.usefixtures("_in_a_project")
def test_the_examples_of_sagemaker_run(reference):
    pytest.importorskip("sagemaker")
    # They ask an account.
    session = "Pipeline, ParameterString, ParameterInteger, ParameterFloat, ParameterBoolean"
    run_examples(reference, "stoker.sagemaker", without=(session,))
