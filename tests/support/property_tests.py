"""Sets how many examples a property test draws: more with `--hypothesis-profile soak`."""

from hypothesis import settings

# Of those without `examples`: hypothesis' own default.
FULL = 100
PROFILES = {"stoker": FULL, "soak": 4 * FULL}


def examples(full: int) -> int:
    """Scales a test's number of examples in `make test` to the present profile."""
    return full * settings.default.max_examples // FULL
