"""Data workers are processes that make batches, in pools, on data hosts and next to trainers."""
