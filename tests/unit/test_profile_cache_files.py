"""Caches are no files of the user: neither named as written, nor a reason to end a profile."""

import py_compile
from pathlib import Path

import pytest

from stoker.profile.file_guard import TAG, FileGuard, is_cache

CACHES = [
    "project/__pycache__/model.cpython-312.pyc",
    "project/model.pyc",
    "home/.cache/torch/kernels/k.bin",
    "home/.cache/matplotlib/fontlist-v390.json",
    "home/.triton/cache/abc/kernel.cubin",
    "home/.nv/ComputeCache/index",
    "project/.mypy_cache/3.12/a.json",
    "project/.numba_cache/f.bin",
    "project/lib/numba_f-12.py312.nbi",
    "home/Library/Caches/pip/x",
]
USERS = [
    "project/model.pt",
    "project/cache/train.pt",
    "project/cached_features/a.npy",
    "project/checkpoints/last.ckpt",
    "project/notes.lock",
    "project/nv/index",
]


def write(path: Path, text: str = "x") -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", CACHES)
def test_a_cache_is_known_by_the_name_of_its_folder_or_kind(tmp_path, name):
    assert is_cache(write(tmp_path / name), environ={})


@pytest.mark.parametrize("name", USERS)
def test_what_a_user_keeps_is_no_cache(tmp_path, name):
    assert not is_cache(write(tmp_path / name), environ={})


@pytest.mark.parametrize(
    "variable",
    ["XDG_CACHE_HOME", "TRITON_CACHE_DIR", "HF_HOME", "MPLCONFIGDIR", "PYTHONPYCACHEPREFIX"],
)
def test_a_folder_that_a_variable_names_for_caches_is_one(tmp_path, variable):
    path = write(tmp_path / "elsewhere" / "deep" / "file")
    assert is_cache(path, environ={variable: str(tmp_path / "elsewhere")})
    assert not is_cache(path, environ={"DATA_DIR": str(tmp_path / "elsewhere")})


def test_a_variable_that_names_a_folder_above_the_users_makes_nothing_a_cache(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "model.pt")
    for folder in ("/", str(tmp_path), str(tmp_path.parent)):
        assert not is_cache(path, environ={"MY_CACHE_DIR": folder})


def test_a_folder_with_the_tag_is_a_cache(tmp_path):
    path = write(tmp_path / "hub" / "models" / "blob")
    assert not is_cache(path, environ={})
    write(tmp_path / "hub" / TAG, "Signature: 8a477f597d28d172789f06886806bc55")
    assert is_cache(path, environ={})


def test_an_empty_lock_and_a_compilers_temporary_folder_hold_nothing_of_the_users(tmp_path):
    assert is_cache(write(tmp_path / "data.lock", ""), environ={})
    assert is_cache("/scratch/torchinductor_me/ab/kernel.py", environ={"TMPDIR": "/scratch"})
    assert is_cache("/scratch/matplotlib-x1/fontlist.json", environ={"TMPDIR": "/scratch"})
    assert not is_cache("/scratch/last.ckpt", environ={"TMPDIR": "/scratch"})
    assert not is_cache("/home/me/matplotlib-figures/a.png", environ={"TMPDIR": "/scratch"})


def test_a_compiled_module_is_not_named_as_written_while_batches_were_repeated(tmp_path):
    guard = FileGuard([])
    guard.arm(lambda action: pytest.fail(action))
    source = Path(write(tmp_path / "model.py", "a = 1"))
    kept = tmp_path / "kept.pt"
    compiled = Path(tmp_path, "__pycache__", "model.cpython-312.pyc")
    for path in (compiled, kept):
        # As the audit hook hears of a file before it is there.
        guard._makes(str(path))
    py_compile.compile(str(source), cfile=str(compiled))
    write(kept)
    assert [Path(path).name for path in guard.made()] == ["kept.pt"]


def test_a_script_that_lies_in_a_cache_writes_files_of_the_user(tmp_path, monkeypatch):
    here = tmp_path / ".cache" / "checkout"
    path = write(here / "model.pt")
    monkeypatch.chdir(here)
    assert not is_cache(path, environ={})
    assert is_cache(write(here / "__pycache__" / "a"), environ={})
