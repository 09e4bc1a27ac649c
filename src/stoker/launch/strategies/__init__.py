"""Strategies: how the training command starts on dnn hosts; `start` chooses, by the workload."""
