"""A workload from a training job that exists."""

from stoker.targets.adopt.job import Adopted, adopt, workload_name, workload_of

__all__ = ["Adopted", "adopt", "workload_name", "workload_of"]
