"""Did quality hold, did the promise hold: records in, evaluation out."""

from stoker.evaluate.body import evaluate, lost_training
from stoker.evaluate.summary import band_words, summary

__all__ = ["band_words", "evaluate", "lost_training", "summary"]
