"""How many examples a property test draws: few in `make test`, many in `make soak`."""

from hypothesis import settings

# Of those without `examples`: hypothesis' own default.
FULL = 100
PROFILES = {"stoker": 40, "soak": 400}


def examples(full: int) -> int:
    """The test's number of examples, of which the present profile draws its part."""
    return max(1, full * settings.default.max_examples // FULL)
