"""The report of a run, one HTML file with inline pictures, and the table of how runs scale.

To add a picture: a function `draw_NAME` in a separate module, an entry in `page._pictures` with
its heading, and its place in `templates/report.html.jinja`.
"""

from stoker.report.page import ReportedRun, write_report
from stoker.report.scaling import ScalingOfRuns, scaling_of_runs

__all__ = ["ReportedRun", "ScalingOfRuns", "scaling_of_runs", "write_report"]
