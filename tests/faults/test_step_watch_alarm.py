"""A sleep tells how late the machine ended it."""

import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from stoker.profile.step_watch import Alarm
from support.cluster import wait_until

pytestmark = pytest.mark.fault

SLEEP_SECONDS = 0.5
LATE_SECONDS = 0.3
AT_REST = (psutil.STATUS_SLEEPING, psutil.STATUS_ZOMBIE)
SLEEPING = f"""
from stoker.profile.step_watch import Alarm
alarm = Alarm()
late = alarm.sleep(0.001)
while late < {LATE_SECONDS / 2}:
    print("sleeps", flush=True)
    late = alarm.sleep({SLEEP_SECONDS})
print(late)
"""


def test_a_sleep_that_the_machine_ends_late_says_by_how_much():
    with subprocess.Popen(
        [sys.executable, "-c", SLEEPING], stdout=subprocess.PIPE, text=True
    ) as process:
        began = time.monotonic()
        # A process that is stopped after its sleep, before it runs again, was woken in time: then
        # there is another sleep.
        while (line := process.stdout.readline()) == "sleeps\n":
            status = psutil.Process(process.pid).status
            wait_until(lambda status=status: status() in AT_REST, "it sleeps, or was late already")
            process.send_signal(signal.SIGSTOP)
            time.sleep(SLEEP_SECONDS + LATE_SECONDS)  # the lateness that is to be seen
            process.send_signal(signal.SIGCONT)
    assert LATE_SECONDS / 2 <= float(line) < time.monotonic() - began


def test_a_rung_alarm_ends_a_sleep_and_all_later_ones():
    alarm = Alarm()
    sleeper = threading.Thread(target=alarm.sleep, args=(300.0,), daemon=True)
    sleeper.start()
    alarm.ring()
    sleeper.join(timeout=30)
    assert not sleeper.is_alive()
    assert alarm.sleep(300.0) == 0.0
    alarm.close()
    alarm.close()
