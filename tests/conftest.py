"""What holds for all tests."""

import signal

from support.moto import aws_server, moto_process

__all__ = ["aws_server", "moto_process"]

# A shell starts what it puts in the background with SIGINT ignored, and children inherit that: the
# tests that press Ctrl-C would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)
