"""Did quality hold, did the promise hold: records in, evaluation out."""

from stoker.evaluate.body import evaluate, lost_training
from stoker.evaluate.summary import summary

__all__ = ["evaluate", "lost_training", "summary"]
