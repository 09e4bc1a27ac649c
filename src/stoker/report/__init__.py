"""The report of a run: one HTML file with inline pictures."""

from stoker.report.page import write_report

__all__ = ["write_report"]
