"""Children that are forked while another thread of the script waits."""

import subprocess
import sys

CODE = """
import io, multiprocessing, os, sys, threading
from stoker.host.processes import start_to_last

is_held = threading.Event()

class Silent(io.RawIOBase):
    def readable(self):
        return True

    def readinto(self, room):
        is_held.set()
        threading.Event().wait()

def make():
    assert sys.stdin.read() == ""

def start():
    is_held.wait()
    child = multiprocessing.get_context("fork").Process(target=make, daemon=True)
    start_to_last(child.start)
    child.join(150)
    os.write(2, f"ended with {child.exitcode}".encode())
    child.kill()
    os._exit(0)

threading.Thread(target=start).start()
sys.stdin = io.TextIOWrapper(io.BufferedReader(Silent()))
sys.stdin.readline()
"""


def test_a_child_runs_while_the_script_waits_for_a_line():
    ran = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert ran.stderr == "ended with 0"
