"""The process ends with one of these codes, or with that of a `StokerError`."""

EXIT_BUG = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


class TerminatedError(BaseException):
    """SIGTERM came: unwinds the stack as Ctrl-C does, so that all that runs is ended."""
