"""The feed's import begins no collection, and leaves the collector as it was."""

import gc
import sys

import pytest

from stoker.host.importing import imported

_MODULE = "\n".join(
    [
        "import gc",
        "was_on = gc.isenabled()",
        "objects = [[number] for number in range(100_000)]",
    ]
)


@pytest.fixture
def module(tmp_path, monkeypatch):
    name = "module_of_many_objects"
    (tmp_path / f"{name}.py").write_text(_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


@pytest.mark.parametrize("is_on", [True, False])
def test_no_collection_runs_meanwhile_and_the_collector_is_as_before(module, is_on):
    before = gc.isenabled()
    (gc.enable if is_on else gc.disable)()
    try:
        made = imported(module)
        assert gc.isenabled() is is_on
        assert not made.was_on
    finally:
        (gc.enable if before else gc.disable)()


def test_what_is_imported_is_returned_as_it_is_and_an_error_is_raised(tmp_path, monkeypatch):
    assert imported("json") is sys.modules["json"]
    (tmp_path / "module_that_fails.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    before = gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        imported("module_that_fails")
    assert gc.isenabled() is before
