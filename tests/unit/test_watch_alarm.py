"""A sleep that tells how late the machine ended it."""

import signal
import subprocess
import sys
import threading
import time

from stoker.profile.watch import Alarm

STOPPED_SECONDS = 0.2
# Until its input ends, whenever that is.
SLEEPING = """
import select, sys
from stoker.profile.watch import Alarm
alarm = Alarm()
late = alarm.sleep(0.001)
print("ready", flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    late = max(late, alarm.sleep(0.02))
print(late)
"""


def test_a_sleep_that_the_machine_ends_late_says_by_how_much() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SLEEPING], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        # More than once: between two sleeps there are moments when being stopped is no lateness.
        for _ in range(4):
            process.send_signal(signal.SIGSTOP)
            time.sleep(STOPPED_SECONDS)  # the lateness that is to be seen
            process.send_signal(signal.SIGCONT)
            time.sleep(STOPPED_SECONDS / 10)
        process.stdin.close()
        late = float(process.stdout.read())
    assert late > STOPPED_SECONDS / 2


def test_a_rung_alarm_ends_a_sleep_and_all_later_ones() -> None:
    alarm = Alarm()
    sleeper = threading.Thread(target=alarm.sleep, args=(300.0,), daemon=True)
    sleeper.start()
    alarm.ring()
    sleeper.join(timeout=30)
    assert not sleeper.is_alive()
    assert alarm.sleep(300.0) == 0.0
    alarm.close()
    alarm.close()
