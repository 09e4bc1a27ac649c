"""The parameters of a pipeline run, for all targets, with defaults and checks.

A pipeline passes each component `--param NAME=VALUE`; the component turns them into overrides of
its workload. A run can change a few keys, and each hyperparameter that is a scalar, under its name
in snake case.
"""

import json
import keyword
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from stoker.errors import UsageError
from stoker.records import Json, Workload, nearest
from stoker.records.base import Document
from stoker.records.hyperparameters import values_of

Kind = Literal["string", "integer", "number", "boolean"]
Value = str | int | float | bool

# Prefix of a run's parameters as inputs of the component profile: one for each.
PARAMETER_INPUT = "param_"
# Its input with such values of any workload, as a JSON object.
PARAMETERS_INPUT = "params"

# Most that a run can change, and their length: a step of a pipeline on SageMaker takes 100
# arguments of 256 characters.
MAX_HYPERPARAMETERS = 60
_MAX_TEXT = 200
_KINDS: dict[type, Kind] = {bool: "boolean", int: "integer", float: "number", str: "string"}
_EXPECTED = {"boolean": "true or false", "integer": "a whole number", "number": "a number"}
_CHANGEABLE = re.compile(r"[A-Za-z0-9_-]+")
# Other inputs of a pipeline's steps have these names.
_TAKEN = ("workload", "run_id", "platform", "cache_days", "champion", "control_image", "job_image")
_BOUND = re.compile(r"(.*?[^<>\s])\s*(>=|<=)\s*(champion)?\s*([-+]?[\d.eE+-]*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter that can be set when a run of a pipeline starts.

    Attributes:
        kind: What the target's console asks for.
        text: What it does, in a sentence, with the meaning of an empty value.
        default: The workload's own value.
        key: Key of the workload that it sets; empty: other code reads it.
        hyperparameter: Name of the hyperparameter that it sets; empty: it sets another key.
    """

    name: str
    kind: Kind = "string"
    text: str
    default: Value = ""
    key: str = ""
    hyperparameter: str = ""

    @property
    def choices(self) -> tuple[str, ...]:
        return ("true", "false") if self.kind == "boolean" else ()

    def check(self, value: Value) -> str:
        """Returns the value as components get it; raises UsageError for a wrong one."""
        text = str(value)
        if not (self.kind == "string" and self.hyperparameter):
            # Consoles of pipelines pass blanks on; in a hyperparameter they may be meant.
            text = text.strip()
        checked: str | None = text
        if self.kind == "integer":
            checked = _whole_number(text)
        elif self.kind == "boolean":
            # Spelt as in JSON, in Python, or as a number.
            word = {"1": "true", "0": "false"}.get(_whole_number(text) or "", text.lower())
            checked = word if word in self.choices else None
        elif self.kind == "number":
            checked = text if is_number(text) else None
        elif self.hyperparameter and text.splitlines() not in ([], [text]):
            checked = None
        if checked is None:
            wanted = _EXPECTED.get(self.kind, "one line")
            raise UsageError(
                f"{self.name}={text}: expected {wanted}", fix=f"{self.name}: {self.text}"
            )
        return checked


def main_channel(workload: Workload) -> str | None:
    """Returns the channel that `input_data` replaces: `train`, `training`, else the first."""
    # The two names that AWS's examples use.
    for name in ("train", "training"):
        if name in workload.channels:
            return name
    return min(workload.channels, default=None)


def parameters_of(workload: Workload) -> tuple[Parameter, ...]:
    """Returns the parameters of `workload`'s runs; input data only with one channel or more."""
    constraints = workload.constraints
    most = constraints.max_usd_per_hour
    fixed = [
        Parameter(
            name="instance_type",
            text="Instance type that trains today; the profile runs on it.",
            default=workload.todays_type,
            key="cluster.dnn.instance_type",
        ),
        Parameter(
            name="max_usd_per_hour",
            text="Limit for the cost of all hosts together, in dollars an hour; empty: no limit.",
            default="" if most is None else f"{most:g}",
            key="constraints.max_usd_per_hour",
        ),
        Parameter(
            name="max_data_hosts",
            kind="integer",
            text="Maximum number of data hosts in a plan; 0: no data group.",
            default=constraints.max_data_hosts,
            key="constraints.max_data_hosts",
        ),
        Parameter(
            name="gate",
            text="What the model must reach, such as accuracy>=0.94, loss<=0.2; empty: no gate.",
            default=_gate_text(workload),
            key="gate",
        ),
        Parameter(
            name="image",
            text="Image that all hosts run.",
            default=workload.image or "",
            key="image",
        ),
        Parameter(
            name="reuse_profile",
            text="Folder with a profile.json to reuse instead of a new profile; empty: profile.",
        ),
    ]
    if channel := main_channel(workload):
        data = Parameter(
            name="input_data",
            text=f"Address of the training data: the uri of the channel {channel}.",
            default=workload.channels[channel].uri,
            key=f"channels.{channel}.uri",
        )
        fixed.insert(0, data)
    hyperparameters = _hyperparameters(workload, names={each.name for each in fixed})
    if "epochs" not in workload.hyperparameters:
        fixed.append(_hyperparameter("epochs", "epochs", workload.training.epochs or 0))
    return (*fixed, *hyperparameters)


def _hyperparameters(workload: Workload, *, names: set[str]) -> list[Parameter]:
    """Returns a parameter for each hyperparameter that a run can change, typed by its value.

    That is a number, a boolean or a short line of text, with a name of letters, digits, - and _.
    """
    parameters: list[Parameter] = []
    for option, value in values_of(workload.hyperparameters).items():
        is_fit = isinstance(value, bool)
        if isinstance(value, str):
            is_fit = len(value) <= _MAX_TEXT and value.splitlines() in ([], [value])
        elif isinstance(value, int | float):
            # Pipelines are JSON, which has no NaN; services store whole numbers in 64 bits.
            is_fit = math.isfinite(value) and abs(value) < 10**18
        if not is_fit or not _CHANGEABLE.fullmatch(option):
            continue
        # As Kubeflow spells names.
        name = re.sub(r"[^a-z0-9]+", "_", option.lower()).strip("_")
        is_name = name.isidentifier() and not keyword.iskeyword(name)
        if name in names or name in (*_TAKEN, "input_data") or not is_name:
            name = f"hyperparameter_{name}"
        if name not in names and len(parameters) < MAX_HYPERPARAMETERS:
            names.add(name)
            parameters.append(_hyperparameter(name, option, cast(Value, value)))
    return parameters


def _hyperparameter(name: str, option: str, value: Value) -> Parameter:
    return Parameter(
        name=name,
        kind=_KINDS[type(value)],
        text=f"Hyperparameter {option}, passed to the command.",
        default=value,
        key=f"hyperparameters.{option}",
        hyperparameter=option,
    )


def parameter_named(name: str, *, workload: Workload) -> Parameter | None:
    """Returns a parameter by its name, or by its hyperparameter's."""
    typed = name.strip()
    option = typed.removeprefix("--")
    parameters = parameters_of(workload)
    by_name = {parameter.name: parameter for parameter in parameters}
    # As on the script's command line; of `gate` and a hyperparameter gate, the parameter counts.
    by_option = {each.hyperparameter: each for each in parameters if each.hyperparameter}
    return by_name.get(typed) or by_option.get(option) or by_name.get(option)


def parse(texts: Sequence[str], *, workload: Workload) -> dict[str, str]:
    """Parses and checks `NAME=VALUE` texts, each parameter at most once.

    Names are the parameters' own, or as the script spells a hyperparameter.
    """
    checked: dict[str, str] = {}
    for name, (parameter, value) in _split(texts, workload=workload).items():
        if parameter is None:
            names = [declared.name for declared in parameters_of(workload)]
            what = f"a run of {workload.name} has no parameter {name}"
            raise UsageError(what, fix=nearest(name, names))
        checked[name] = parameter.check(value)
    return checked


def overrides_of(texts: Sequence[str], *, workload: Workload) -> list[str]:
    """Returns the `key.path=value` overrides for `NAME=VALUE` texts; raises as `parse`."""
    parameters = {each.name: each for each in parameters_of(workload)}
    overrides: list[str] = []
    for name, value in parse(texts, workload=workload).items():
        parameter = parameters[name]
        if not parameter.key or value == parameter.check(parameter.default):
            continue
        overrides.append(f"{parameter.key}={_literal(parameter, value, workload)}")
        if parameter.hyperparameter == "epochs":
            # Steps take precedence over epochs (`TrainingSize.total_steps`).
            overrides += [f"training.epochs={value}", "training.steps=null"]
    return overrides


def run_values(
    texts: Sequence[str], *, workload: Workload, declared: Mapping[str, Kind]
) -> dict[str, Value]:
    """Returns the values of NAME=VALUE texts, of the kinds that an uploaded pipeline declares.

    Args:
        texts: With the parameters' names, or as the script spells a hyperparameter.
        workload: The workload whose pipeline is uploaded.
        declared: Names and kinds of the uploaded pipeline's parameters.

    Raises:
        UsageError: For an unknown name, a name that is given twice, or a value of another kind.
    """
    values: dict[str, Value] = {}
    for name, (own, value) in _split(texts, workload=workload).items():
        if own:
            value = own.check(value)
        if name not in declared:
            raise UsageError(
                f"the uploaded pipeline has no parameter {name}",
                fix=f"{nearest(name, sorted(declared))}; a new one: stoker upload",
            )
        kind = declared[name]
        changed = "if the workload has changed, upload it first"
        word = Parameter(name=name, kind=kind, text=changed).check(value)
        values[name] = word if kind == "string" else cast(Value, json.loads(word))
        if kind == "number":
            values[name] = float(word)
    return values


def _split(texts: Sequence[str], *, workload: Workload) -> dict[str, tuple[Parameter | None, str]]:
    """Returns each parameter that NAME=VALUE texts set, and its value; None: it is unknown."""
    found: dict[str, tuple[Parameter | None, str]] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--param {text} is not NAME=VALUE", fix="for example epochs=3")
        parameter = parameter_named(name, workload=workload)
        name = parameter.name if parameter else name.strip()
        if name in found:
            fix = "leave one of them out"
            raise UsageError(f"{name} is given twice", where=f"--param {text}", fix=fix)
        found[name] = (parameter, value)
    return found


def _whole_number(text: str) -> str | None:
    """Returns a whole number without leading zeros; None for another text.

    Services that store all numbers as floats may write 3 as 3.0, and 20000000 as 2.0E7.
    """
    if re.fullmatch(r"-?[0-9]{1,18}", text):
        return str(int(text))
    value = float(text) if is_number(text) else 0.5
    # Larger floats are not exact.
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else None


def is_number(text: str) -> bool:
    try:
        # float() also takes 1_000 and digits of other scripts.
        return text.isascii() and "_" not in text and math.isfinite(float(text))
    except ValueError:
        return False


def _literal(parameter: Parameter, value: str, workload: Workload) -> str:
    """Returns a value in YAML."""
    if parameter.key == "gate":
        return _gates(value, workload)
    if parameter.kind == "number":
        return repr(float(value))
    is_text = parameter.hyperparameter or not is_number(value)
    if parameter.kind != "string" or not is_text:
        return value
    if not value and not parameter.hyperparameter:
        return "null"
    return json.dumps(value, ensure_ascii=False)


def _gates(value: str, workload: Workload) -> str:
    """Returns `accuracy>=0.94, loss<=champion+0.1` as YAML; metrics keep their patterns."""
    gates: list[Document] = []
    for text in filter(None, (part.strip() for part in value.split(","))):
        match = _BOUND.fullmatch(text)
        bound = (match[4] or ("0" if match[3] else "")) if match else ""
        if match is None or not is_number(bound):
            raise UsageError(
                f"gate {text} is not METRIC>=BOUND or METRIC<=BOUND",
                fix="for example accuracy>=0.94, or accuracy>=champion-0.005",
            )
        key = "min" if match[2] == ">=" else "max"
        gate: dict[str, Json] = {
            "metric": match[1],
            f"{key}_champion" if match[3] else key: float(bound),
        }
        if match[1] in workload.metric_patterns:
            gate["regex"] = workload.metric_patterns[match[1]]
        gates.append(gate)
    # One line: an override is one word of a command line.
    return json.dumps(gates, ensure_ascii=False)


def _gate_text(workload: Workload) -> str:
    """Returns the workload's gate as the parameter `gate` spells it."""
    parts = []
    for gate in workload.gate:
        for sign, bound, change in (
            (">=", gate.min, gate.min_champion),
            ("<=", gate.max, gate.max_champion),
        ):
            if bound is not None:
                parts.append(f"{gate.metric}{sign}{bound:g}")
            if change is not None:
                parts.append(f"{gate.metric}{sign}champion{change:+g}")
    return ", ".join(parts)
