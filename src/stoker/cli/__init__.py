"""The command line: thin verbs over the bodies of the components.

`main` makes the parser and turns errors and signals into exit codes, which `stoker.errors` lists.
The verbs are in `local`, `pipelines`, `setup` and, for the steps of pipelines, `steps`; options
that several verbs share are in `options`. A verb imports its body inside its function.
"""

from stoker.cli.main import main

__all__ = ["main"]
