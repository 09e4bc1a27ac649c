"""TensorFlow's servers say what is missing where there is no TensorFlow."""

import sys

import pytest

from stoker.launch.engines import tf_server


@pytest.mark.parametrize(
    "words",
    [
        ["dispatcher", "--port", "5050"],
        ["worker", "--dispatcher", "a:1", "--address", "b:2"],
        [],  # Of TF_CONFIG.
    ],
)
def test_a_server_says_what_is_missing(words, monkeypatch, capsys):
    # Restored afterwards: the servers hide accelerators from TensorFlow.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    assert tf_server.main(words) == 2
    said = capsys.readouterr().err
    assert "error: this engine needs TensorFlow" in said
    assert "try:   install tensorflow" in said
