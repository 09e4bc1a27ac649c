"""`stoker watch -` shows the lines of another command as they come."""

import subprocess
import sys
from io import StringIO

from stoker.launch.telemetry import FeedInterval, RankRate, csv_text
from stoker.logs import Log
from support.feed_rows import host_rate


def feed_line(host: str) -> str:
    rank = RankRate(name="0", batches_per_second=30.0, wait_share=0.4, queue_depth=0.5, window=18)
    rows = FeedInterval(
        start_seconds=4.0, seconds=2.0, ranks=(rank,), hosts=(host_rate(host, 12.5),)
    )
    stream = StringIO()
    Log(run="mnist-1", host="gpu-1", stream=stream).event("feed", rows=csv_text(rows))
    return stream.getvalue()


def test_lines_of_another_command_are_shown_as_they_come():
    watcher = subprocess.Popen(
        [sys.executable, "-m", "stoker.cli", "watch", "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert watcher.stdin is not None
    assert watcher.stdout is not None
    with watcher:
        # Two lines in one write: the second must not lie in a buffer until a third comes.
        watcher.stdin.write(feed_line("data-1") + feed_line("data-2"))
        watcher.stdin.flush()
        assert "data-1 12.5/s" in watcher.stdout.readline()
        assert "data-2 12.5/s" in watcher.stdout.readline()
        watcher.stdin.close()
        assert watcher.stdout.read().endswith("the run has ended\n")
    assert watcher.returncode == 0
