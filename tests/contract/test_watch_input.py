import subprocess
import sys

from support.feed_rows import feed_line, host_rate


def test_lines_of_another_command_are_shown_as_they_come():
    words = [sys.executable, "-m", "stoker.cli", "watch", "-"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, **pipes, text=True) as watcher:
        # Two lines in one write: the second must not lie in a buffer until a third comes.
        for name in ("data-1", "data-2"):
            watcher.stdin.write(feed_line(host_rate(name, 12.5)))
        watcher.stdin.flush()
        assert "data-1 12.5/s" in watcher.stdout.readline()
        assert "data-2 12.5/s" in watcher.stdout.readline()
        watcher.stdin.close()
        assert watcher.stdout.read().endswith("the run has ended\n")
    assert watcher.returncode == 0
