"""The report of a run, one HTML file with inline pictures, and the table of how runs scale."""

from stoker.report.page import write_report
from stoker.report.runs import rows_of_runs, table_of_runs
from stoker.report.verdict import ReportedRun

__all__ = ["ReportedRun", "rows_of_runs", "table_of_runs", "write_report"]
