"""The command line: thin verbs over the bodies of the components.

A verb's flags are the parameters of its function in the module of its name; flags that several
verbs share are in `options`. `main` runs the verb that is typed and turns errors and signals into
exit codes, which `stoker.errors` lists; `app` makes the parser.
"""

import signal
from typing import NoReturn

__all__ = ["main"]


def main() -> NoReturn:
    """Runs the command line of this process; Ctrl-C during the imports ends it without words."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from stoker.cli.main import main as run_command_line

    run_command_line()
