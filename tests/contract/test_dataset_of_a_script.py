"""Another process unpacks what a script packs of its dataset, classes and environment."""

import multiprocessing
import os
import subprocess
import sys
import textwrap

import pytest

from stoker.errors import ShippingError
from stoker.feed.wire.dataset import DatasetSpec, environment_at_start, pack_spec, unpack_spec
from stoker.feed.wire.script_module import SCRIPT_NAMES


def run(code, **env):
    words, env = [sys.executable, "-c", code], {"PATH": os.environ["PATH"], **env}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=150, check=True)
    return done.stdout


LOOK = (
    "import os, sys; os.environ['SET'] = 'here'; del os.environ['GONE']\n"
    "from stoker.feed.wire.dataset import ScriptEnvironment\n"
    "print(ScriptEnvironment.of_this_process().changes)\n"
)


def test_the_difference_to_what_the_script_was_started_with_travels_if_that_is_known():
    assert run(LOOK, GONE="1", STOKER_RUN_ID="r") == "(('GONE', None), ('SET', 'here'))\n"
    # Not after setproctitle, say, which writes over what the kernel shows.
    assert run(LOOK, GONE="1") == "()\n"
    assert environment_at_start("0") is None


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_fork_of_a_rank_that_multiprocessing_started_knows_what_the_script_changed(method):
    inner = (
        "import multiprocessing\n"
        "from stoker.feed.wire import dataset as s\n"
        "with multiprocessing.get_context('fork').Pool(1) as pool:\n"
        "    print(pool.apply(s.ScriptEnvironment.of_this_process).changes, flush=True)\n"
    )
    code = (
        "import multiprocessing, os\n"
        "from concurrent.futures import ProcessPoolExecutor\n"
        "os.environ['SET'] = 'by the script'\n"
        f"context = multiprocessing.get_context({method!r})\n"
        "with ProcessPoolExecutor(1, mp_context=context) as pool:\n"
        f"    pool.submit(exec, {inner!r}, {{}}).result()\n"
    )
    assert run(code, STOKER_RUN_ID="r") == "(('SET', 'by the script'),)\n"


class Numbers:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def __getitem__(self, index):
        return index


def test_a_scripts_classes_lambdas_and_modules_beside_it_come_back_in_another_process(tmp_path):
    ten = "class Ten:\n    def __getitem__(self, i):\n        return 10\n"
    (tmp_path / "beside_me.py").write_text(ten)
    (tmp_path / "script.py").write_text(
        textwrap.dedent("""
        import sys
        import beside_me
        from stoker.feed.wire.dataset import DatasetSpec, pack_spec
        scale = 10
        class Squares:
            beside = beside_me.Ten()
            def __getitem__(self, i):
                return scale * i * i
        with open(sys.argv[1], "wb") as file:
            file.write(pack_spec(DatasetSpec(dataset=Squares(), collate_fn=lambda b: sum(b)),
                max_bytes=1 << 20).data)
        """)
    )
    subprocess.run([sys.executable, tmp_path / "script.py", tmp_path / "spec"], check=True)
    before = list(sys.path)
    # Also of `__main__`, whose place the script's stand-in takes: it is this process's again.
    modules = dict(sys.modules)
    try:
        back = unpack_spec((tmp_path / "spec").read_bytes())
        assert back.collate_fn([back.dataset[2], back.dataset[3]]) == 130
        assert back.dataset.beside[0] == 10
    finally:
        sys.path[:] = before
        sys.modules.pop("beside_me", None)
        for name in SCRIPT_NAMES:
            sys.modules.pop(name, None)
            if name in modules:
                sys.modules[name] = modules[name]


def test_a_proxy_of_a_manager_is_named():
    with multiprocessing.Manager() as manager:
        shared = DatasetSpec(dataset=Numbers(seen=manager.dict()), collate_fn=len)
        with pytest.raises(
            ShippingError, match=r"dataset\.seen is multiprocessing\.managers\.Dict"
        ):
            pack_spec(shared, max_bytes=1 << 20)
