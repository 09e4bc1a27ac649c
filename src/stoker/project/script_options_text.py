"""The options of a script as keys of a workload: hyperparameters, and what is known of them."""

import json
import re
import textwrap
from collections.abc import Iterator

from stoker.parameters import MAX_HYPERPARAMETERS
from stoker.project.script_options import FoundOption, ScriptOptions
from stoker.records import Json

_PLAIN_KEY = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
# Which YAML 1.1 reads as something else.
_NO_KEYS = ("y", "yes", "n", "no", "on", "off", "true", "false", "null")
_WIDTH = 96
_HEAD = """\
# Options of the script, read from its source; null leaves one out, so that the script's own default
# counts. Each is a parameter of a pipeline's runs: --param NAME=VALUE.
hyperparameters:
"""


def options_text(found: ScriptOptions) -> str:
    """Returns the keys `hyperparameters` and `options`, and comments on what was left out."""
    lines = list(_comments(found))
    if not found.options:
        return "".join(f"# {line}\n" for line in lines)
    values = "".join(
        f"  {_key(each.name)}: {_scalar(each.default)}{_remark(each)}\n" for each in found.options
    )
    facts = "".join(f"  {_key(each.name)}: {_facts(each)}\n" for each in found.options)
    left = "".join(f"# {line}\n" for line in lines)
    return f"{_HEAD}{values}options:\n{facts}{left}"


def _comments(found: ScriptOptions) -> Iterator[str]:
    if len(found.options) > MAX_HYPERPARAMETERS:
        yield f"Only the first {MAX_HYPERPARAMETERS} are parameters of a pipeline's runs."
    if found.left_out:
        yield "Not read:"
    for line in found.left_out:
        yield from textwrap.wrap(line, _WIDTH, initial_indent="- ", subsequent_indent="  ")


def _remark(option: FoundOption) -> str:
    if option.is_required and option.default is None:
        return "    # required: the script ends without it"
    # A line break would end the comment.
    return f"    # {' '.join(option.why.split())}" if option.why else ""


def _facts(option: FoundOption) -> str:
    facts = [f"type: {option.type}"]
    if option.help:
        facts.append(f"help: {_scalar(option.help)}")
    if option.choices:
        facts.append(f"choices: [{', '.join(_scalar(each) for each in option.choices)}]")
    return f"{{{', '.join(facts)}}}"


def _key(name: str) -> str:
    is_plain = _PLAIN_KEY.fullmatch(name) and name.lower() not in _NO_KEYS
    if is_plain:
        return name
    return json.dumps(name)


def _scalar(value: Json) -> str:
    """Returns a value as JSON, which is YAML."""
    text = json.dumps(value, ensure_ascii=False)
    if isinstance(value, float) and "e" in text and "." not in text:
        # YAML's numbers with an exponent have a point.
        text = text.replace("e", ".0e")
    return text
