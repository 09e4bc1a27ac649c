"""A signal's handler raises within next(), and the script goes on with the same iterator."""

import functools

import pytest

from support.cluster import run_script

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

SCRIPT = "interrupted_script.py"
OPTIONS: dict[str, dict[str, object]] = {
    "no workers": {"num_workers": 0},
    "two workers": {"num_workers": 2},
    "persistent workers": {"num_workers": 2, "persistent_workers": True},
    "two spawned": {"num_workers": 2, "multiprocessing_context": "spawn"},
    "one ahead": {"num_workers": 1, "prefetch_factor": 1},
}


def given(options: str, *, error: str, **changes: object) -> dict[str, object]:
    """Returns what the script is given; error: own or Ctrl-C; empty: no signal comes."""
    defaults = {"handler": "function", "is_stream": False}
    defaults |= {"in_draws": False, "epochs": 2, "samples": 12}
    return {**defaults, "options": OPTIONS[options], "error": error, **changes}


def expected(options: str, **changes: object) -> list[object]:
    """Returns what the script takes if no signal comes; spawned workers change nothing of it."""
    return undisturbed("two workers" if "spawned" in options else options, **changes)


@functools.cache
def undisturbed(options: str, **changes: object) -> list[object]:
    lines = run_script(given(options, error="", **changes), script=SCRIPT).finish()
    return [line["taken"] for line in lines]


@pytest.mark.parametrize(
    ("options", "error"),
    [*((name, "own") for name in OPTIONS), ("no workers", "Ctrl-C"), ("two workers", "Ctrl-C")],
)
def test_no_batch_is_lost_doubled_or_moved(options, error, hosts):
    lines = hosts.train(script=SCRIPT, **given(options, error=error)).finish()
    assert [line["taken"] for line in lines] == expected(options)
    assert [line["ending"] for line in lines] == ["", ""]
    assert all(line["num_raised"] > 50 for line in lines)


@pytest.mark.parametrize("options", ["two workers", "persistent workers"])
def test_no_batch_of_a_stream_is_lost_doubled_or_moved(options, hosts):
    asked = given(options, error="own", is_stream=True)
    lines = hosts.train(script=SCRIPT, **asked).finish()
    assert [line["taken"] for line in lines] == expected(options, is_stream=True)
    assert [line["ending"] for line in lines] == ["", ""]


@pytest.mark.parametrize(
    ("handler", "error"),
    [
        ("function", "own"),
        ("method", "own"),
        ("object", "own"),
        ("partial", "own"),
        ("lambda", "own"),
        ("function", "Ctrl-C"),
    ],
)
def test_a_sampler_that_was_torn_ends_the_epoch_in_words(error, handler, hosts):
    asked = given("two workers", error=error, handler=handler, in_draws=True)
    asked |= {"epochs": 1, "samples": 2000}
    [line] = hosts.train(script=SCRIPT, **asked).finish()
    [whole] = expected("two workers", epochs=1, samples=2000)
    # At the first place of all the sampler is not asked yet.
    assert line["num_raised"] in (1, 2)
    assert line["taken"] == whole[: len(line["taken"])]
    assert "while the sampler was asked" in str(line["ending"])
    assert "state_dict()" in str(line["ending"])
