"""Lightning keeps a loader's state in its checkpoints, and gives it back: nothing else to do."""

import warnings

import pytest

# Its own: of few workers, of a missing logger, of names in other libraries.
pytestmark = pytest.mark.filterwarnings("ignore")

BATCHES, STOP_AT = 8, 3


@pytest.fixture(scope="module")
def fit():
    """Gives `fit` of support/lightning_fit.py, which imports Lightning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("lightning")
        from support import lightning_fit

    assert lightning_fit.BATCHES == BATCHES
    return lightning_fit.fit


@pytest.mark.parametrize("stop_at", [STOP_AT, BATCHES + STOP_AT], ids=["first", "second epoch"])
def test_a_fit_that_was_stopped_in_an_epoch_resumes_with_the_batches_left(tmp_path, fit, stop_at):
    file = tmp_path / "last.ckpt"
    whole = fit(file)
    first = fit(file, stop_at=stop_at)
    assert first == whole[:stop_at]
    assert fit(file, resume=True) == whole[stop_at:]
