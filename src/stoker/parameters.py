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
from dataclasses import dataclass, replace
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
_MAX_HYPERPARAMETERS = 60
_MAX_TEXT = 200
_KINDS: dict[type, Kind] = {bool: "boolean", int: "integer", float: "number", str: "string"}
_EXPECTED = {"boolean": "true or false", "integer": "a whole number", "number": "a number"}
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

    def typed(self, text: str) -> Value:
        """Returns a text as a value of this kind; raises UsageError for another one."""
        if self.kind == "string":
            # Consoles of pipelines pass blanks on; in a hyperparameter they may be meant.
            return text if self.hyperparameter else text.strip()
        word = text.strip().lower()
        if word in self.choices:
            return word == "true"
        number = _number(word)
        if number is not None and self.kind == "number":
            return number
        # Services that store all numbers as floats may write 3 as 3.0, and 20000000 as 2.0E7.
        if number is not None and self.kind == "integer" and number.is_integer():
            return int(word) if re.fullmatch(r"[-+]?[0-9]+", word) else int(number)
        what = f"{self.name}={text}: expected {_EXPECTED[self.kind]}"
        raise UsageError(what, fix=f"{self.name}: {self.text}")


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
    if "epochs" not in workload.hyperparameters:
        fixed.append(_hyperparameter("epochs", "epochs", workload.training.epochs or 0))
    names = {*_TAKEN, "input_data", *(each.name for each in fixed)}
    hyperparameters: list[Parameter] = []
    for option, value in values_of(workload.hyperparameters).items():
        # As Kubeflow spells names.
        name = re.sub(r"[^a-z0-9]+", "_", option.lower()).strip("_")
        if name in names or keyword.iskeyword(name) or not name.isidentifier():
            name = f"hyperparameter_{name}"
        if name not in names and _is_changeable(option, value):
            names.add(name)
            hyperparameters.append(_hyperparameter(name, option, cast(Value, value)))
    return (*fixed, *hyperparameters[:_MAX_HYPERPARAMETERS])


def _is_changeable(option: str, value: Json) -> bool:
    """Whether a run can change a hyperparameter: a number, a boolean or a short line of text."""
    if isinstance(value, str):
        is_fit = len(value) <= _MAX_TEXT and "\n" not in value
    else:
        # Pipelines are JSON, which has no NaN; services store whole numbers in 64 bits.
        is_fit = isinstance(value, int | float) and abs(value) < 10**18
    return is_fit and re.fullmatch(r"[A-Za-z0-9_-]+", option) is not None


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
    """Returns a parameter by its name, or by its hyperparameter's as the script spells it."""
    option = name.strip().removeprefix("--")
    parameters = parameters_of(workload)
    by_name = {each.name: each for each in parameters}
    by_option = {each.hyperparameter: each for each in parameters if each.hyperparameter}
    return by_name.get(option) or by_option.get(option)


def overrides_of(texts: Sequence[str], *, workload: Workload) -> list[str]:
    """Returns the `key.path=value` overrides for `NAME=VALUE` texts; raises as `run_values`."""
    parameters = {each.name: each for each in parameters_of(workload)}
    overrides: list[str] = []
    for name, value in run_values(texts, workload=workload).items():
        parameter = parameters[name]
        if not parameter.key or value == parameter.default:
            continue
        overrides.append(f"{parameter.key}={_literal(parameter, value, workload)}")
        if parameter.hyperparameter == "epochs":
            # Steps take precedence over epochs (`TrainingSize.total_steps`).
            overrides += [f"training.epochs={value}", "training.steps=null"]
    return overrides


def run_values(
    texts: Sequence[str], *, workload: Workload, declared: Mapping[str, Kind] | None = None
) -> dict[str, Value]:
    """Returns the values of NAME=VALUE texts, of the kinds that a pipeline declares.

    Args:
        texts: With the parameters' names, or as the script spells a hyperparameter.
        workload: The workload whose pipeline it is.
        declared: Names and kinds of an uploaded pipeline's parameters. None: the workload's.

    Raises:
        UsageError: For an unknown name, a name that is given twice, or a value of another kind.
    """
    if declared is None:
        declared = {each.name: each.kind for each in parameters_of(workload)}
    values: dict[str, Value] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--param {text} is not NAME=VALUE", fix="for example epochs=3")
        changed = "if the workload has changed, upload it first"
        parameter = parameter_named(name, workload=workload)
        parameter = parameter or Parameter(name=name.strip(), text=changed)
        name = parameter.name
        if name in values:
            fix = "leave one of them out"
            raise UsageError(f"{name} is given twice", where=f"--param {text}", fix=fix)
        if name not in declared:
            fix = f"{nearest(name, sorted(declared))}; a new one: stoker upload"
            raise UsageError(f"the pipeline of {workload.name} has no parameter {name}", fix=fix)
        # A boolean is a text on SageMaker, with two choices.
        if parameter.kind != "boolean":
            parameter = replace(parameter, kind=declared[name])
        values[name] = parameter.typed(value)
    return values


def _number(text: str) -> float | None:
    """Returns the number that a text is; None: it is none, or not finite."""
    if not re.fullmatch(r"[-+.0-9eE]+", text):
        return None
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _literal(parameter: Parameter, value: Value, workload: Workload) -> str:
    """Returns a value in YAML."""
    if parameter.key == "gate":
        return _gates(str(value), workload)
    if parameter.hyperparameter or parameter.kind != "string":
        return json.dumps(value, ensure_ascii=False)
    # max_usd_per_hour is a number, of the kind of a text, as it may be empty.
    is_number = _number(str(value)) is not None
    return str(value) if is_number else json.dumps(value or None, ensure_ascii=False)


def _gates(value: str, workload: Workload) -> str:
    """Returns `accuracy>=0.94, loss<=champion+0.1` as YAML; metrics keep their patterns."""
    gates: list[Document] = []
    for text in filter(None, map(str.strip, value.split(","))):
        match = _BOUND.fullmatch(text)
        bound = _number(match[4] or ("0" if match[3] else "")) if match else None
        if match is None or bound is None:
            raise UsageError(
                f"gate {text} is not METRIC>=BOUND or METRIC<=BOUND",
                fix="for example accuracy>=0.94, or accuracy>=champion-0.005",
            )
        key = "min" if match[2] == ">=" else "max"
        gate: dict[str, Json] = {
            "metric": match[1],
            f"{key}_champion" if match[3] else key: bound,
        }
        if pattern := workload.metric_patterns.get(match[1]):
            gate["regex"] = pattern
        gates.append(gate)
    # One line: an override is one word of a command line.
    return json.dumps(gates, ensure_ascii=False)


def _gate_text(workload: Workload) -> str:
    """Returns the workload's gate as the parameter `gate` spells it."""
    parts = []
    for gate in workload.gate:
        bounds = ((">=", gate.min), ("<=", gate.max))
        changes = ((">=", gate.min_champion), ("<=", gate.max_champion))
        parts += [f"{gate.metric}{sign}{bound:g}" for sign, bound in bounds if bound is not None]
        parts += [f"{gate.metric}{sign}champion{by:+g}" for sign, by in changes if by is not None]
    return ", ".join(parts)
