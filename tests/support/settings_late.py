"""A project's module that nothing imports before it is needed."""

DEPTH = 1
WIDTH = 2
