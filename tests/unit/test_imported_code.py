import importlib
import sys
import types
import zipfile
from importlib import metadata
from importlib.machinery import ExtensionFileLoader, ModuleSpec

import pytest
import torch

from stoker.feed.wire import imported_code
from stoker.feed.wire.imported_code import CodeFacts, ImportedCode, installed_version


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Returns a function that writes modules; those that are imported are forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    # Edits within a second and of the same size count, too.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)

    def of(**texts):
        for name, text in texts.items():
            path = tmp_path / (name.replace("__of__", "/") + ".py")
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        importlib.invalidate_caches()
        return tmp_path

    yield of
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_file_counts_as_it_was_imported_until_it_is_reloaded(write):
    write(code_a="VALUE = 1\n")
    module, code = importlib.import_module("code_a"), ImportedCode()
    first = code.facts(["code_a"])
    write(code_a="VALUE = 2\n")
    assert code.facts(["code_a"]) == first
    importlib.reload(module)
    assert code.facts(["code_a"]).files["code_a"] != first.files["code_a"]


def test_what_a_module_uses_counts_and_of_its_package_only_the_file(write):
    write(
        code_p__of____init__="import code_other\n",
        code_p__of__data="from code_p.parts import cut\nimport code_q, json, torch\n",
        code_p__of__parts="def cut(): ...\n",
        code_p__of__training="",
        code_q="from code_r import Base\nLATER = []\n",
        code_r="class Base: ...\n",
        code_other="",
    )
    for name in ("code_p.data", "code_p.training"):
        importlib.import_module(name)
    code = ImportedCode()
    facts = code.facts(["code_p.data"])
    assert sorted(facts.files) == ["code_p", "code_p.data", "code_p.parts", "code_q", "code_r"]
    assert facts.versions == {"torch": torch.__version__.partition("+")[0]}
    # What is imported later changes no spec.
    sys.modules["code_q"].code_other = sys.modules["code_other"]
    assert code.facts(["code_p.data"]) == facts


def test_an_archive_counts_and_what_has_no_source_does_not(write, monkeypatch):
    folder = write(code_n__of__inner="")
    with zipfile.ZipFile(folder / "code.zip", "w") as archive:
        archive.writestr("code_z.py", "VALUE = 1\n")
    monkeypatch.syspath_prepend(folder / "code.zip")
    native = types.ModuleType("code_native")
    origin = str(folder / "code_native.so")
    native.__spec__ = ModuleSpec("code_native", ExtensionFileLoader("code_native", origin))
    native.__spec__.origin, native.__spec__.has_location = origin, True
    monkeypatch.setitem(sys.modules, "code_native", native)
    monkeypatch.setitem(sys.modules, "code_made", types.ModuleType("code_made"))
    imported = ["code_z", "code_n.inner"]
    for name in imported:
        importlib.import_module(name)
    others = ["code_native", "code_made", "json", "__main__", "stoker.feed"]
    facts = ImportedCode().facts([*imported, *others])
    # code_n has no __init__.py.
    assert sorted(facts.files) == ["code_n.inner", "code_z"]
    assert facts.versions == {}


def test_only_what_both_have_can_differ_imported_or_not(write):
    write(code_a="VALUE = 1\n", code_b="", code_c="")
    importlib.import_module("code_a")
    code = ImportedCode()
    mine = code.facts(["code_a"])
    assert code.differences(mine) == ""
    assert code.differences(CodeFacts({"code_absent": "0" * 32}, {"code_absent": "1.0"})) == ""
    theirs = CodeFacts(dict.fromkeys(["code_a", "code_b", "code_c"], "0" * 32), {"torch": "0.9"})
    told = code.differences(theirs)
    assert told.startswith("its code differs from the trainer's: module code_a (")
    assert f"is {mine.files['code_a'][:8]} on the data host, 00000000 in the trainer" in told
    assert "code_b" in told
    assert told.endswith("; and 1 more")
    versions = code.differences(CodeFacts({}, {"torch": "0.9"}))
    assert versions.endswith("on the data host, 0.9 in the trainer")


@pytest.mark.parametrize(
    "package", ["torch", "numpy", "cloudpickle", "zmq", "pyzmq", "nothing-such"]
)
def test_an_installed_version_is_the_one_that_the_metadata_package_reads(package):
    try:
        version = metadata.version(package).partition("+")[0]
    except metadata.PackageNotFoundError:
        version = str(getattr(sys.modules.get(package), "__version__", ""))
    assert installed_version(package) == version


def test_no_file_of_an_installed_package_is_read(monkeypatch):
    monkeypatch.setattr(imported_code, "_digest", lambda spec: pytest.fail(spec.name))
    assert ImportedCode().facts(["torch.utils.data", "numpy"]).files == {}
