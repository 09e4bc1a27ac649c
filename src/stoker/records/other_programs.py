"""Other programs on the cores of a run: how far they make its figures uncertain.

Profile, plan and record of a run judge by these numbers.
"""

# Minimum share of the vCPUs that other programs leave.
LEAST_FREE = 0.02
# Share of the vCPUs used by other programs above which the figures are uncertain.
MAX_OTHERS = 0.10
# Other programs may leave, or return while the plan runs: used over left vCPUs is the relative
# error of a step. Above this no band would help, and nothing is recommended.
_BEYOND_TELLING = 0.6
# Start of what is said of other programs, with how many vCPUs they used.
OTHERS = "other programs were using"


def is_beyond_telling(busy: float, *, vcpus: float) -> bool:
    """Returns whether other programs on `busy` of the vCPUs make times meaningless."""
    return error_width(busy, vcpus=vcpus) > _BEYOND_TELLING


def error_width(busy: float, *, vcpus: float) -> float:
    """Returns the relative error of a step's time beside other programs on `busy` of the vCPUs."""
    # Never all of them: the rest is a divisor.
    others = min(busy, vcpus * (1 - LEAST_FREE))
    if others > MAX_OTHERS * vcpus:
        return others / (vcpus - others)
    return 0.0
