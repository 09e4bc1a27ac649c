"""An array of zeros takes its pages as a loop writes them, which is no growth of the loop's.

In processes of its own: tests before free and keep memory in theirs.
"""

import json

import pytest

from support.warm_python import run_code

MB = 1_000_000
CODE = """
import json
import numpy as np
from stoker.profile.memory.loop_growth import LoopWatch

# As of a replay buffer, or of what is known of each sample.
buffer = np.zeros((60, 1_000_000), dtype=np.uint8)
# Each has the one before it, which nothing names.
held = {{}}
watch = LoopWatch(clock=iter(range(10**6)).__next__)
for number in range(60):
    watch.look(number)
    if {keeps}:
        held = {{"before": held, "array": np.ones(1_000_000, dtype=np.uint8)}}
    else:
        buffer[number] = 1
growth = watch.result(60)
print(json.dumps([growth.grown_bytes_per_step, growth.seen_bytes]))
"""


@pytest.mark.parametrize("keeps", [False, True], ids=["written", "kept"])
def test_an_array_of_zeros_that_is_written_step_by_step_is_no_growth(keeps):
    grown_per_step, seen = json.loads(run_code(CODE.format(keeps=keeps)))
    assert grown_per_step == pytest.approx(MB, rel=0.2)
    # Without the first third of the steps.
    assert (seen > 10 * MB) == keeps
