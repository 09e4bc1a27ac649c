"""TensorFlow's servers say what is missing where there is no TensorFlow."""

import sys

import pytest

from stoker.launch.engines import tf_server


@pytest.fixture
def no_tensorflow(monkeypatch):
    # Restored afterwards: the servers hide accelerators from TensorFlow.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    monkeypatch.setitem(sys.modules, "tensorflow", None)


@pytest.mark.usefixtures("no_tensorflow")
def test_a_server_of_tf_data_service_says_what_is_missing(capsys):
    assert tf_server.main(["dispatcher", "--port", "5050"]) == 2
    worker = ["worker", "--dispatcher", "a:1", "--address", "b:2"]
    assert tf_server.main(worker) == 2
    said = capsys.readouterr().err
    assert said.count("error: this engine needs TensorFlow") == 2
    assert "try:   install tensorflow" in said


@pytest.mark.usefixtures("no_tensorflow")
def test_a_server_of_tf_config_says_what_is_missing(capsys):
    assert tf_server.main([]) == 2
    assert "error: this engine needs TensorFlow" in capsys.readouterr().err
