"""The command line: thin verbs over the bodies of the components.

A verb's flags are the parameters of its function in the module of its name; flags that several
verbs share are in `options`. `main` runs the verb that is typed and turns errors and signals into
exit codes, which `stoker.errors` lists; `app` makes the parser.
"""

import os
import signal
from typing import NoReturn

__all__ = ["main"]

_STANDARD_DESCRIPTORS = (0, 1, 2)


def main() -> NoReturn:
    """Runs the command line of this process; Ctrl-C during the imports ends it without words."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    _open_standard_descriptors()
    from stoker.cli.main import main as run_command_line

    run_command_line()


def _open_standard_descriptors() -> None:
    """Opens those that the caller has closed, as `<&-` and some services do, for children, too.

    Otherwise the next file that is opened, such as a run's folder, is a script's standard input.
    """
    for descriptor in _STANDARD_DESCRIPTORS:
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest that is free, so this one.
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(nowhere, True)
