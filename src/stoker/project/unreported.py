"""Gates on metrics that a script, by its source, reports nowhere; found before it is paid."""

import re
from pathlib import Path

from stoker.project.script_options import sources_of
from stoker.records import Workload

# The ways in which a script reports: the function, and the file that it writes.
_REPORTS = re.compile(r"\blog_metrics\b|\bSTOKER_METRICS\b|metrics\.json")


def unreported_words(workload: Workload, *, folder: Path) -> str:
    """Returns a warning of gates whose metric nothing reports; empty: none, or it is not known.

    Args:
        workload: Workload with its gates; those with a pattern read what the script prints.
        folder: The folder in which its command runs.
    """
    names = [gate.metric for gate in workload.gate if gate.regex is None]
    sources = sources_of(workload.command, folder)
    if not names or not any(sources) or any(_REPORTS.search(source) for source in sources):
        return ""
    metric = names[0]
    return (
        f"the gate on {metric} may fail: the source of the script reports no metric; "
        f"add stoker.log_metrics({metric}=value) to it, or to the gate a pattern of a line that it "
        f"prints, such as regex: '{metric}[=: ]+([0-9.]+)'"
    )
