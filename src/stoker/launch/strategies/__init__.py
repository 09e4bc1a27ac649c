"""Strategies: how the training command starts on dnn hosts."""
