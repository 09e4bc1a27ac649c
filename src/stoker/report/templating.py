"""How pages are filled in: escaped, and a name that is not there is an error."""

import jinja2


def templates() -> jinja2.Environment:
    """The templates of the report; a page adds its own filters."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader("stoker.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
