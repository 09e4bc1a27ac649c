"""Views that a collate function returns have the strides of a run without stoker."""

import pytest

from support.cluster import reference

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]
SCRIPT = "strides_script.py"


@pytest.mark.parametrize("num_workers", [0, 1])
def test_views_have_the_strides_and_sums_of_a_run_without_stoker(host, num_workers):
    loader = {"num_workers": num_workers}
    fed = host.train(script=SCRIPT, loader=loader).finish()
    plain = reference(script=SCRIPT, loader=loader)
    assert len(fed) == len(plain) == 24
    for there, here in zip(fed, plain, strict=True):
        for name, facts in here.items():
            assert there[name] == facts, name
