"""The report of a run, one HTML file with inline pictures, and the table of how runs scale."""

from stoker.report.page import ReportedRun, write_report
from stoker.report.scaling import ScalingOfRuns, scaling_of_runs

__all__ = ["ReportedRun", "ScalingOfRuns", "scaling_of_runs", "write_report"]
