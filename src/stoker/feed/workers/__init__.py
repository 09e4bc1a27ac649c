"""Data workers and their pools, on data hosts and in trainers."""
