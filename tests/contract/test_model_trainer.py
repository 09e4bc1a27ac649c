"""What a ModelTrainer of SageMaker's SDK 3 gives a script, by its own start program."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from stoker.records.hyperparameters import argument, driver_decoded
from support.when_used import needs

pytestmark = needs("sagemaker")

VALUES = ["1.10", "true", '{"a": 1}', "007", "null", "", "adam", " x ", "1e5", '"x"', "[1, 2]"]
VALUES += [True, None, 1e-4, 10**20, [1, "a", None], {"b": True, "a": [1]}, [], {}]


@pytest.fixture(scope="module")
def driver() -> ModuleType:
    # A file of the container, which is no part of a package that could be imported here.
    found = importlib.util.find_spec("sagemaker.train")
    (root, *_) = found.submodule_search_locations
    file = Path(root) / "container_drivers" / "common" / "utils.py"
    spec = importlib.util.spec_from_file_location("driver_utils", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_workload_of_its_job_gives_the_same_arguments(driver, value):
    from sagemaker.train.utils import safe_serialize

    text = safe_serialize(value)
    # Its environment.py decodes once, for SM_HPS, and each driver again.
    told = {"value": driver.safe_deserialize(text)}
    _, word = driver.hyperparameters_to_cli_args(json.loads(json.dumps(told)))
    assert argument(driver_decoded(text)) == word


def test_what_the_page_says_of_it_holds(driver):
    assert driver.hyperparameters_to_cli_args({"k": "1.10"}) == ["--k", "1.1"]
    assert driver.hyperparameters_to_cli_args({"on": True}) == ["--on", "true"]
    assert driver.hyperparameters_to_cli_args({"zip": "007"}) == ["--zip", "007"]
