"""Checks types: of stoker strictly, of the tests by what tests/data/untyped.json still allows.

    python tests/check_types.py [--hold]

No error is allowed outside the tests. A file of tests may have as many lines with errors as that
list says: one more fails, and so does one fewer, until `--hold` has lowered the number. Lines, as
mypy complains of each field of a record that is made from a dictionary.
"""

import argparse
import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
ALLOWED = ROOT / "tests" / "data" / "untyped.json"
PLACES = ["src/stoker", "pipelines", "tools", "tests"]
ERROR = re.compile(r"(?P<file>[^:]+):(?P<line>\d+): error: ")


def errors_by_file() -> dict[str, dict[int, str]]:
    """Returns the first error of each line that has one; runs mypy, which may take minutes.

    Raises:
        SystemExit: Mypy says something else than errors of types.
    """
    # In one process: workers of mypy's that a busy machine starts too late end it.
    command = [sys.executable, "-m", "mypy", "--no-error-summary", *PLACES]
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if completed.returncode > 1 or completed.stderr:
        raise SystemExit(completed.stdout + completed.stderr)
    errors: dict[str, dict[int, str]] = defaultdict(dict)
    for line in completed.stdout.splitlines():
        if match := ERROR.match(line):
            errors[match["file"]].setdefault(int(match["line"]), line)
    return errors


def hold(allowed: Counter[str], counts: Counter[str]) -> None:
    """Writes the list with what is both allowed and there."""
    lowered = allowed & counts
    ALLOWED.write_text(json.dumps(dict(sorted(lowered.items())), indent=2) + "\n")


def main() -> None:
    """Prints what is new; the exit code is 1 if there is any."""
    parser = argparse.ArgumentParser(description="Checks types of stoker and of its tests.")
    parser.add_argument("--hold", action="store_true", help="lower what the list allows")
    arguments = parser.parse_args()
    errors = errors_by_file()
    counts = Counter({file: len(lines) for file, lines in errors.items()})
    allowed = Counter(json.loads(ALLOWED.read_text()))
    if arguments.hold:
        hold(allowed, counts)
        return
    for file in sorted(counts - allowed):
        print(f"{file}: {counts[file]} lines with errors of types, {allowed[file]} allowed")
        print("\n".join(errors[file].values()))
    mended = sorted(allowed - counts)
    if mended:
        print(f"fewer than allowed, try: python tests/check_types.py --hold: {mended}")
    sys.exit(counts != allowed)


if __name__ == "__main__":
    main()
