"""Where examples, configurations and pipelines are: a wheel carries them, a checkout has them."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
# An installed wheel carries the project's files; an editable installation has its checkout.
CARRIED = (_PACKAGE / "project", _PACKAGE.parents[1])
