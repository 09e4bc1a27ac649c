"""The report shows a run, and how runs scale: one HTML file with inline pictures."""

from stoker.report.page import write_report
from stoker.report.scaling import ScalingOfRuns, headline, scaling_of_runs, write_scaling

__all__ = ["ScalingOfRuns", "headline", "scaling_of_runs", "write_report", "write_scaling"]
