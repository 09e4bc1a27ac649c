"""The report's page says what profile and decision say, whatever was measured."""

import html
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.catalog import load_catalog
from stoker.decide.explain import explain as explain_decision
from stoker.profile.explain import explain as explain_profile
from stoker.step_model import limit_words
from support.builders import gpu_load
from support.decisions import decided
from support.drawn_ranks import hosts
from support.profiled_ranks import profile_of
from support.property_tests import examples
from support.sample_records import write_page


def words(text: str) -> str:
    return " ".join(html.unescape(text).split())


@given(
    hosts(),
    st.none() | st.floats(0, 1),
    st.sampled_from(["cost", "time"]),
    st.sampled_from(["sure", "probable"]),
)
@settings(max_examples=examples(15), deadline=None)
def test_page_profile_and_decision_agree(rank, busy, objective, follow):
    gpus = () if busy is None else (gpu_load(busy),)
    profile = profile_of(rank, kind=f"local.c{rank.vcpus}", gpus=gpus)
    catalog = load_catalog("local", cores=24)
    decision = decided(profile, catalog=catalog, objective=objective, follow=follow)
    records = {"profile": profile, "decision": decision, "training": None, "evaluation": None}
    with tempfile.TemporaryDirectory() as folder:
        page = words(write_page(Path(folder), **records, is_planned=True))
    assert f"The limit today: {limit_words(decision.bottleneck)}." in page
    said = words(explain_decision(decision))
    for text in (page, said):
        assert ("stoker does not help here" in text) <= (decision.verdict == "none")
        assert ("Probably worth it" in text) == (decision.verdict == "probable")
    assert ("the accelerator sets the pace" in words(explain_profile(profile))) <= (
        decision.verdict in ("none", "unknown") or decision.bottleneck in ("accelerator", "none")
    )
    # Each fix that costs nothing and saves something is on the page too, or its plan is.
    for fix in profile.fixes:
        if fix.id == "num_workers" and fix.saves_seconds and decision.bottleneck != "unexplained":
            assert "num_workers=" in page
